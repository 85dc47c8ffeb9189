"""What the examples on plain vLLM servers have in common: a server on a CPU under a
`das:` block, and the comparison of a run with speculation off and a run with it on.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import psutil
import requests

EXAMPLES = Path(__file__).resolve().parents[1]
POLICY = EXAMPLES / "tiny_math" / "policy"
ARMS: dict[str, dict[str, Any]] = {
    "off": {"drafter": "none", "verify": {"noise": "keyed"}},
    "history": {"drafter": "history"},
}
"""The `das:` blocks of the arms. The first has speculation off, with the noise of the
other.
"""


class Rollout(TypedDict):
    """What a step's rollout brought."""

    seconds: float
    processor_s: float
    """Of the server's processes."""
    tokens: list[Any]


class Server(NamedTuple):
    """A server that runs."""

    address: str
    process: psutil.Process

    def processor_s(self) -> float:
        """Return the processor seconds that its processes have taken so far: other work
        on the machine does not count, as it does in what a clock says.
        """
        times = [
            one.cpu_times()
            for one in (self.process, *self.process.children(recursive=True))
        ]
        return sum(one.user + one.system for one in times)


def settings(block: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of an engine on a CPU under a `das:` block."""
    return {
        "DAS_CONFIG": json.dumps(block),
        "DAS_CPU_WEIGHT_SYNC": (
            "1"
        ),  # on a CPU: weights may be written into the live model
        "MKL_CBWR": "AUTO,STRICT",  # equal logits whatever else is in the batch
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextlib.contextmanager
def served(
    module: str, arguments: Sequence[str], block: dict[str, Any], log: Path, **env: str
) -> Iterator[Server]:
    """Run a server under a `das:` block; yield it when it answers.

    Args:
        module: of the server, as `python -m` takes it.
        arguments: of the server, less the port.
        block: the `das:` block.
        log: file for what the server writes.
        env: further environment variables of the server.

    Raises:
        RuntimeError: the server ended; with the end of what it wrote.
    """
    port = free_port()
    extensions = [
        str(EXAMPLES / "vllm"),
        str(EXAMPLES / "trl"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = {
        **os.environ,
        **settings(block),
        "PYTHONPATH": os.pathsep.join(extensions),
        **env,
    }
    command = [sys.executable, "-m", module, *arguments, "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        address = f"http://127.0.0.1:{port}"
        while not _healthy(address):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield Server(address, psutil.Process(server.pid))
    finally:
        server.terminate()
        server.wait()


def _healthy(address: str) -> bool:
    try:
        return requests.get(f"{address}/health", timeout=5).ok
    except requests.RequestException:
        return False


def compare(
    off: Sequence[Rollout], on: Sequence[Rollout], notes: Sequence[str] = ()
) -> bool:
    """Print the rollouts of two runs side by side, each with its note; return whether
    their tokens are equal.
    """
    equal = [a["tokens"] == b["tokens"] for a, b in zip(off, on, strict=True)]
    for step, (a, b, same) in enumerate(zip(off, on, equal, strict=True)):
        (slow, fast), (slow_cpu, fast_cpu) = (
            [r[of] for r in (a, b)] for of in ("seconds", "processor_s")
        )
        note = f", {notes[step]}" if notes else ""
        print(
            f"step {step + 1}: off {slow:.2f} s, history {fast:.2f} s"
            f" ({fast / slow:.2f}), processor time {fast_cpu / slow_cpu:.2f}, tokens"
            f" {'equal' if same else 'DIFFERENT'}{note}"
        )
    return all(equal)
