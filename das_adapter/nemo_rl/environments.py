"""Put das-adapter into the environments of NeMo-RL's actors.

NeMo-RL keeps one for each class of actor, `<directory>/<module>.<class>`, and leaves as
it is what it finds there.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import urllib.parse
from pathlib import Path

from das_adapter.errors import DasError

ACTORS = (
    *(
        "VllmGenerationWorker",
        "VllmAsyncGenerationWorker",
    ),  # das-adapter's workers run there
    *(
        "AsyncTrajectoryCollector",
        "SyncRolloutActor",
    ),  # the driver sends them das-adapter's generation
    "ReplayBuffer",  # what the collector and its workers raise may reach it
)
"""Classes of NeMo-RL's actors that unpickle objects of das-adapter's."""
OURS = ("DasGenerationWorker", "DasAsyncGenerationWorker")
"""Those of das-adapter's, which NeMo-RL builds environments for where the stock workers
have none.
"""
_VERSION = "import das_adapter._native, das_adapter; print(das_adapter.__version__)"


def environments(venvs: Path) -> dict[str, Path]:
    """Return the interpreters of the environments that need das-adapter, by name.

    Raises:
        DasError: there is none.
    """
    pythons = {
        path.parents[1].name: path for path in sorted(venvs.glob("*/bin/python"))
    }
    found = {
        name: python
        for name, python in pythons.items()
        if name.rpartition(".")[2] in ACTORS + OURS
    }
    if not found:
        raise DasError(
            f"install nemo-rl: found none of NeMo-RL's environments in {str(venvs)!r},"
            " expected directories such as"
            " nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker with"
            " bin/python: NeMo-RL builds them at its first start, or by"
            " nemo_rl/utils/prefetch_venvs.py, in NEMO_RL_VENV_DIR"
        )
    return found


def install(name: str, python: Path, source: str | None) -> str:
    """Install das-adapter into an environment, in the place of a version that is there;
    what it requires is installed where it is missing. Return the version that the
    environment imports then.

    Args:
        name: of the environment.
        python: its interpreter.
        source: a wheel, a checkout, or what else uv takes; None: from where the
            das-adapter that runs here came.

    Raises:
        DasError: it can't be installed, or does not run there.
    """
    uv = ("uv", "pip", "install", "--reinstall-package", "das-adapter", "--python")
    _run(name, *uv, str(python), source or _own_source())
    return _run(name, str(python), "-I", "-c", _VERSION)


def _own_source() -> str:
    """Return where the das-adapter that runs here was installed from: a wheel, a
    checkout or a repository's commit (PEP 610), or a registry.
    """
    own = importlib.metadata.distribution("das-adapter")
    origin = json.loads(own.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if vcs := origin.get("vcs_info"):
        below = (
            f"#subdirectory={origin['subdirectory']}"
            if "subdirectory" in origin
            else ""
        )
        return f"{vcs['vcs']}+{url}@{vcs['commit_id']}{below}"
    return (
        urllib.parse.unquote(url.removeprefix("file://"))
        or f"das-adapter=={own.version}"
    )


def _run(name: str, *command: str) -> str:
    """Run a command for an environment; return what it said. DasError: it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise DasError(
            f"install nemo-rl: found no {command[0]}, which NeMo-RL needs as well"
        ) from None
    if done.returncode:
        said = (
            f"{done.stdout}{done.stderr}".strip()
            or f"{command[0]}: exit code {done.returncode}"
        )
        raise DasError(f"install nemo-rl: {name}: {said.splitlines()[-1]}")
    return done.stdout.strip()
