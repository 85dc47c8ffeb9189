"""`das-adapter doctor`: what is installed, whether it fits, and what das-adapter changes in it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from das_adapter import __version__, compat, patching
from das_adapter.config import DasConfig
from das_adapter.errors import UnsupportedHost
from das_adapter.protocol.engine_args import V2_DRAFTERS, needs_v1

_DEVICE = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    state: Literal["ok", "absent", "symbols present", "too old", "broken"]
    detail: str


def changes() -> list[dict[str, Any]]:
    """List the attributes that are replaced in or added to the installed packages (see `patching.Change`)."""
    return [asdict(change) for change in patching.changes() if importlib.util.find_spec(change.target.split(".")[0])]


def examine() -> Iterator[Finding]:
    """Check the parts of the installation one after the other."""
    yield Finding("das-adapter", "ok", __version__)
    yield _native_core()
    torch = any(importlib.metadata.distributions(name="torch")) and importlib.metadata.version("torch")
    yield Finding("torch", "ok" if torch else "broken", torch or "not installed")
    yield from map(_host, compat.HOSTS)
    yield _entry_points()
    if compat.version("vllm"):
        yield _runner()
    if compat.version("vllm") and not compat.missing("vllm"):
        yield _engine_process()
        run = subprocess.run([sys.executable, "-c", _DEVICE], capture_output=True, text=True, check=False)
        yield Finding("equal tokens", "ok", equality(run.stdout.strip(), os.environ))


def _native_core() -> Finding:
    try:
        import numpy as np

        from das_adapter.core.native import native

        tokens, zero = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        logits, one = np.array([[0.0, 50.0, 0.0]], dtype=np.float32), np.ones(1, dtype=np.float32)
        native().keyed_sample(logits, one, zero, zero, tokens)
        assert tokens[0] == 1
        return Finding("native core", "ok", str(native().__file__))
    except (ImportError, TypeError, AssertionError) as error:  # TypeError: it is that of another version
        return Finding(
            "native core", "broken", f"{error!r}: reinstall das-adapter; from source it needs a C++17 compiler"
        )


def _host(host: str) -> Finding:
    version, state, known = compat.version(host), compat.state(host), compat.HOSTS[host]
    if state == "absent":
        return Finding(host, "broken" if host == "vllm" else "absent", "not installed")
    if state in ("broken", "too old"):
        try:
            compat.require(host)
        except UnsupportedHost as error:
            return Finding(host, state, str(error))
    signatures = sum(bool(symbol.parameters) for symbol in known.symbols)
    checked = f"{len(known.symbols)} symbols are there, {signatures} with the signature relied on"
    if state == "symbols present":
        return Finding(host, state, f"{version}; tried are {', '.join(known.tried)}; {checked}")
    return Finding(host, "ok", f"{version}; {checked}")


def _entry_points() -> Finding:
    groups = ("vllm.general_plugins", "verl.plugins")
    lacking = [g for g in groups if not any(e.name == "das_adapter" for e in importlib.metadata.entry_points(group=g))]
    if lacking:
        return Finding("entry points", "broken", f"{', '.join(lacking)}: das-adapter is not installed, only importable")
    return Finding("entry points", "ok", ", ".join(groups))


def equality(gpu: str, environment: Mapping[str, str]) -> str:
    """Describe what drafts can change on a machine; `gpu`: its name, empty where there is none.

    The noise is the same in any case. Tokens are equal if a row's logits do not depend on how many rows there are.
    """
    if not gpu:
        setting = "MKL_CBWR=AUTO,STRICT"
        if environment.get("MKL_CBWR") == "AUTO,STRICT":
            return f"CPU, {setting}: a float32 policy writes the same tokens with and without drafts"
        return f"CPU: a float32 policy writes the same tokens with and without drafts once {setting} is set"
    if environment.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        return (
            f"{gpu}, VLLM_BATCH_INVARIANT=1: the same tokens with and without drafts, where vLLM has "
            "batch-invariant kernels for the policy's layers and attention"
        )
    return (
        f"{gpu}: the same distribution with and without drafts; near-ties may fall the other way. For the "
        "same tokens set VLLM_BATCH_INVARIANT=1, which is slower"
    )


def _runner() -> Finding:
    """Say which of vLLM's model runners an engine gets, and why."""
    if why := needs_v1(DasConfig()):
        return Finding("model runner", "ok", f"V1: {why}; the history is drafted from on the host")
    drafters = ", ".join(V2_DRAFTERS)
    return Finding(
        "model runner",
        "ok",
        f"V2 for {drafters} where vLLM can run it, which needs Triton and a device: "
        "drafts are made there, and scheduling stays asynchronous; V1 for every "
        "other das.drafter",
    )


_ENGINE_START = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.worker.worker_base import WorkerBase
assert hasattr(WorkerBase, "das_rpc"), "vLLM did not load the plug-in das_adapter (is VLLM_PLUGINS set without it?)"
import das_adapter.engine.v1.proposer, das_adapter.engine.v1.worker
"""


def _engine_process() -> Finding:
    """Start a process as vLLM starts a worker, up to the point at which a model would be loaded."""
    run = subprocess.run([sys.executable, "-c", _ENGINE_START], capture_output=True, text=True, check=False)
    if run.returncode:
        reason = run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit code {run.returncode}"
        return Finding("plug-in in an engine process", "broken", reason)
    return Finding("plug-in in an engine process", "ok", "das_rpc is on vLLM's workers")
