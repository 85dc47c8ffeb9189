"""Put das-adapter into the environments of NeMo-RL's actors.

NeMo-RL keeps one for each class of actor, `<directory>/<module>.<class>`, and leaves as it is what it finds there.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from das_adapter.errors import DasError

ACTORS = (
    *("VllmGenerationWorker", "VllmAsyncGenerationWorker"),  # das-adapter's workers run there
    *("AsyncTrajectoryCollector", "SyncRolloutActor"),  # the driver sends them das-adapter's generation
    "ReplayBuffer",  # what the collector and its workers raise may reach it
)
"""Classes of NeMo-RL's actors that unpickle objects of das-adapter's."""
OURS = ("DasGenerationWorker", "DasAsyncGenerationWorker")
"""Those of das-adapter's, which NeMo-RL builds environments for where the stock workers have none."""
_VERSION = "import das_adapter._native, das_adapter; print(das_adapter.__version__)"


class Outcome(NamedTuple):
    """What was done with one environment."""

    environment: str
    """Its name: module and class of the actor."""
    state: str
    """`installed` or `failed`."""
    detail: str
    """The version, or what went wrong."""


def environments(venvs: Path) -> dict[str, Path]:
    """Return the interpreters of the environments that need das-adapter, by name.

    Raises:
        DasError: there is none.
    """
    pythons = {path.parents[1].name: path for path in sorted(venvs.glob("*/bin/python"))}
    found = {name: python for name, python in pythons.items() if name.rpartition(".")[2] in ACTORS + OURS}
    if not found:
        raise DasError(
            f"install nemo-rl: found none of NeMo-RL's environments in {str(venvs)!r}, expected directories such as "
            "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker with bin/python: NeMo-RL builds them at "
            "its first start, or by nemo_rl/utils/prefetch_venvs.py, in NEMO_RL_VENV_DIR"
        )
    return found


def install(found: dict[str, Path], source: str | None, progress: Callable[[str], None]) -> Iterator[Outcome]:
    """Install das-adapter into environments, in the place of a version that is there; what it requires is installed
    where it is missing.

    Args:
        source: a wheel, a checkout, or what else uv takes; None: from where the das-adapter that runs here came.

    Raises:
        DasError: the source is gone, or no wheel can be built of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = _wheel(source or _own_source(), folder)
        for name, python in found.items():
            progress(name)
            try:
                _run("uv", "pip", "install", "--reinstall-package", "das-adapter", "--python", str(python), wanted)
                yield Outcome(name, "installed", _run(str(python), "-I", "-c", _VERSION))
            except DasError as error:
                yield Outcome(name, "failed", str(error))


def _own_source() -> str:
    """Return where the das-adapter that runs here was installed from: a wheel or checkout (PEP 610), or a registry."""
    own = importlib.metadata.distribution("das-adapter")
    url = json.loads(own.read_text("direct_url.json") or "{}").get("url", "")
    return urllib.parse.unquote(url.removeprefix("file://")) or f"das-adapter=={own.version}"


def _wheel(source: str, folder: str) -> str:
    """Return what uv is given; of a checkout it is a wheel, built once."""
    path = Path(source)
    if path.is_absolute() and not path.exists():
        raise DasError(f"install nemo-rl: {source!r} is gone: name a wheel or a checkout by --from")
    if not path.is_dir():
        return source
    _run("uv", "build", "--wheel", "--out-dir", folder, source)
    return str(next(Path(folder).glob("das_adapter-*.whl")))


def _run(*command: str) -> str:
    """Run a command; return what it said. DasError: it failed."""
    if not shutil.which(command[0]):
        raise DasError(f"install nemo-rl: found no {command[0]}, which NeMo-RL needs as well")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = f"{done.stdout}{done.stderr}".strip().splitlines()
        raise DasError(said[-1] if said else f"{command[0]}: exit code {done.returncode}")
    return done.stdout.strip()
