"""`das-adapter doctor`: what is installed, whether it fits, and what das-adapter
changes in it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from das_adapter import __version__, compat, features, patching, tried
from das_adapter.config import parse
from das_adapter.core.native import native
from das_adapter.engine.runner import (
    HOST_PLANS,
    NO_GRAPHS,
    ONE_LENGTH,
    SMALL_HEADS,
    STOCK_NOISE,
)
from das_adapter.errors import ConfigError, DasError, UnsupportedHost
from das_adapter.reports.configs import placement


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    state: str
    """`ok`, `absent` or `broken`; of a host also `tried`, `same code as ...` or
    `changed since ...`.
    """
    detail: str
    changed: Sequence[str] = ()
    """Functions of a host that have changed since the version that the state names."""


def changes() -> list[dict[str, Any]]:
    """List the attributes that are replaced in or added to the installed packages: by
    which patch, what it needs, what fails without it, and when it can go.
    """
    return [
        {
            "patch": p.replacement.__name__,
            "target": target,
            "needs": p.needs,
            "since": p.since,
            **p.reasons,
        }
        for p in patching.patches()
        for target in p.targets
        if importlib.util.find_spec(target.split(".")[0])
    ]


def examine() -> Iterator[Finding]:
    """Check the parts of the installation one after the other."""
    yield Finding("das-adapter", "ok", __version__)
    yield _native_core()
    for host in compat.HOSTS:
        yield _host(host)
        yield from _left_out(host)
    if compat.version("verl"):
        yield _plugin_of_verl()
    if compat.version("vllm") and not compat.missing("vllm"):
        yield from _engine_process()


def verdict(findings: Sequence[Finding]) -> list[str]:
    """Say whether das-adapter can run here, and what to do next."""
    broken = [finding for finding in findings if finding.state == "broken"]
    if broken:
        first = broken[0]
        names = ", ".join(finding.name for finding in broken)
        return [
            f"Not ready: {names}.",
            f"Next: mend {first.name} ({first.detail}), and call das-adapter doctor"
            " again.",
        ]
    hosts = []
    changed = []
    for finding in findings:
        version = compat.version(finding.name) if finding.name in compat.HOSTS else None
        if version is not None:
            hosts.append(f"{finding.name} {version}")
        if finding.changed:
            changed.append(finding.name)
    said = [f"Ready with {', '.join(hosts)}."]
    if changed:
        said.append(
            f"The tests have not run on this version of {', '.join(changed)}: it does"
            " other things in functions that das-adapter relies on. Look at das/health"
            " in the first steps."
        )
    said.append(
        "Next: das-adapter config FILE says whether a block, or your trainer's config,"
        " is right."
    )
    return said


def _native_core() -> Finding:
    try:
        return Finding("native core", "ok", str(native().__file__))
    except (DasError, ImportError) as error:
        return Finding(
            "native core",
            "broken",
            f"{error}: reinstall das-adapter; from source it needs a C++17 compiler",
        )


def _host(host: str) -> Finding:
    version = compat.version(host)
    known = compat.HOSTS[host]
    if version is None and host == "vllm" and compat.version("nemo_rl"):
        return Finding(
            host,
            "absent",
            "not installed here: NeMo-RL's workers have theirs; call das-adapter doctor"
            " there",
        )
    if version is None:
        return Finding(host, "broken" if host == "vllm" else "absent", "not installed")
    try:
        compat.require(host)
    except UnsupportedHost as error:
        return Finding(host, "broken", str(error))
    found = tried.compare(host)
    assert found is not None, "it has a version"
    checked = f"{version}; {len(known.symbols)} symbols are there"
    if found.changed:
        checked = f"{tried.some_of(found.changed)}; the tests have not run on {version}"
    return Finding(host, found.state, checked, found.changed)


def _left_out(host: str) -> Iterator[Finding]:
    """Say which features a host leaves out: runs that do not ask for them work. One of
    vLLM's model runners must be there.
    """
    if compat.version(host) is None:
        return
    found = compat.unavailable(host)
    v2 = host == "vllm" and not compat.missing(compat.V2_RUNNER)
    if v2:
        found |= compat.unavailable(compat.V2_RUNNER)
    for feature, gone in found.items():
        if feature == features.V1_RUNNER and not v2:
            state = "broken"
        else:
            state = "absent"
        yield Finding(feature, state, f"{host} lacks {', '.join(map(str, gone))}")


def _plugin_of_verl() -> Finding:
    try:
        compat.check_plugin()
    except ConfigError as error:
        return Finding("plug-in in veRL", "broken", str(error))
    return Finding("plug-in in veRL", "ok", "veRL loads das-adapter")


def equality(gpu: str, environment: Mapping[str, str]) -> str:
    """Describe what drafts can change on a machine; `gpu`: its name, empty where there
    is none.

    The noise is the same in any case. Tokens are equal if a row's logits do not depend
    on how many rows there are.
    """
    same = "the same tokens with and without drafts"
    if not gpu:
        strict = environment.get("MKL_CBWR") == "AUTO,STRICT"
        return f"CPU: a float32 policy writes {same}" + (
            "" if strict else " once MKL_CBWR=AUTO,STRICT is set"
        )
    if environment.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        where = (
            "where vLLM has batch-invariant kernels for the policy's layers and"
            " attention (heads over 64)"
        )
        return f"{gpu}: {same}, {where}"
    return (
        f"{gpu}: the same distribution with and without drafts; near-ties may fall the"
        " other way. For the same tokens set VLLM_BATCH_INVARIANT=1, which is slower"
    )


_ENGINE_START = """
import sys
import torch
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "", flush=True)
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.worker.worker_base import WorkerBase
if not hasattr(WorkerBase, "das_rpc"):
    import os
    found = os.environ.get("VLLM_PLUGINS")
    sys.exit(
        f"vLLM loads das-adapter's plug-in nowhere; VLLM_PLUGINS: found {found!r},"
        " allowed: not set, or a list with das_adapter"
    )
if "V1" in sys.argv:
    import das_adapter.engine.v1.proposer, das_adapter.engine.v1.worker
from vllm.triton_utils import HAS_TRITON
print(HAS_TRITON)
"""


def _engine_process() -> Iterator[Finding]:
    """Start a process as vLLM starts a worker, up to the point at which a model would
    be loaded.
    """
    v1 = features.V1_RUNNER not in compat.unavailable("vllm")
    start = [sys.executable, "-P", "-c", _ENGINE_START, *(["V1"] if v1 else [])]
    run = subprocess.run(start, capture_output=True, text=True, check=False)
    reason = [f"exit code {run.returncode}", *run.stderr.strip().splitlines()][-1]
    works = Finding(
        "plug-in in an engine process", "ok", "das_rpc is on vLLM's workers"
    )
    yield replace(works, state="broken", detail=reason) if run.returncode else works
    yield Finding(
        "equal tokens", "ok", equality(run.stdout.partition("\n")[0], os.environ)
    )
    if not run.returncode:
        yield from runners(run.stdout.split()[-1] == "True")


def runners(triton: bool) -> Iterator[Finding]:
    """Say which model runner engines get with the installed vLLM, and why, and what
    they draft; `triton`: whether vLLM finds a device that Triton compiles for.
    """

    def would_run(what: str, drafter: str = "history", **arguments: Any) -> str:
        return placement(parse({"drafter": drafter}), None, arguments, triton)[what]

    for drafter in ("history", "self", "mtp"):
        yield Finding(
            f"model runner of {drafter}", "ok", would_run("model runner", drafter)
        )
    yield Finding("drafts of history", "ok", would_run("drafts"))
    if would_run("model runner") == "V2":
        attention = (
            f"attention that {why}" for why in (HOST_PLANS, NO_GRAPHS, SMALL_HEADS)
        )
        found = "; ".join((*ONE_LENGTH, *attention, STOCK_NOISE))
        yield Finding("one draft length for all requests", "ok", found)
