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
    # das-adapter's workers run in these environments
    "VllmGenerationWorker",
    "VllmAsyncGenerationWorker",
    # the driver sends these actors das-adapter's generation
    "AsyncTrajectoryCollector",
    "SyncRolloutActor",
    # what the collector and its workers raise may reach this one
    "ReplayBuffer",
)
"""Classes of NeMo-RL's actors that unpickle objects of das-adapter's."""
OUR_ACTORS = ("DasGenerationWorker", "DasAsyncGenerationWorker")
"""Classes of das-adapter's actors. NeMo-RL builds environments for them where the stock
workers have none.
"""
_PRINT_VERSION = (
    "import das_adapter._native, das_adapter; print(das_adapter.__version__)"
)


def environments(venvs: Path) -> dict[str, Path]:
    """Return the interpreters of the environments that need das-adapter, by name.

    Raises:
        DasError: there is none.
    """
    found = {}
    for python in sorted(venvs.glob("*/bin/python")):
        name = python.parents[1].name
        actor = name.rpartition(".")[2]
        if actor in ACTORS or actor in OUR_ACTORS:
            found[name] = python
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
        name: name of the environment.
        python: interpreter of the environment.
        source: a wheel, a checkout, or what else uv takes; None: from where the
            das-adapter that runs here came.

    Raises:
        DasError: it can't be installed, or does not run there.
    """
    interpreter = str(python)
    requirement = source or _own_source()
    uv = ("uv", "pip", "install", "--reinstall-package", "das-adapter", "--python")
    _run(name, *uv, interpreter, requirement)
    return _run(name, interpreter, "-I", "-c", _PRINT_VERSION)


def _own_source() -> str:
    """Return where the das-adapter that runs here was installed from: a wheel, a
    checkout or a repository's commit (PEP 610), or a registry.
    """
    own = importlib.metadata.distribution("das-adapter")
    origin = json.loads(own.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    vcs = origin.get("vcs_info")
    if vcs:
        source = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
        if "subdirectory" in origin:
            source = f"{source}#subdirectory={origin['subdirectory']}"
        return source
    path = url.removeprefix("file://")
    if path:
        return urllib.parse.unquote(path)
    return f"das-adapter=={own.version}"


def _run(name: str, *command: str) -> str:
    """Run a command for an environment; return what it printed.

    Raises:
        DasError: it failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise DasError(
            f"install nemo-rl: found no {command[0]}, which NeMo-RL needs as well"
        ) from None
    if done.returncode:
        printed = f"{done.stdout}{done.stderr}".strip()
        if printed:
            reason = printed.splitlines()[-1]
        else:
            reason = f"{command[0]}: exit code {done.returncode}"
        raise DasError(f"install nemo-rl: {name}: {reason}")
    return done.stdout.strip()
