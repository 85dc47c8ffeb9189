"""The parts that the examples on plain vLLM servers share: a server on a CPU under a
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
    """The rollout of a step."""

    seconds: float
    """Its duration."""
    processor_s: float
    """Processor seconds that the server's processes took."""
    tokens: list[Any]
    """Token ids of its responses."""


class Server(NamedTuple):
    """A server that runs."""

    address: str
    """Its URL."""
    process: psutil.Process

    def processor_s(self) -> float:
        """Return the processor seconds that its processes have taken so far. Other work
        on the machine does not change them, as it changes the time on a clock.
        """
        seconds = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            times = process.cpu_times()
            seconds += times.user + times.system
        return seconds


def settings(block: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of an engine on a CPU under a `das:` block."""
    return {
        "DAS_CONFIG": json.dumps(block),
        # on a CPU: weights may be written into the live model
        "DAS_CPU_WEIGHT_SYNC": "1",
        # equal logits whatever else is in the batch
        "MKL_CBWR": "AUTO,STRICT",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # two would wait for each other where other processes take a core
        "OMP_NUM_THREADS": "1",
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
        module: the server's module, as `python -m` takes it.
        arguments: the server's arguments, without the port.
        block: the `das:` block.
        log: file for what the server writes.
        env: further environment variables of the server.

    Raises:
        RuntimeError: the server ended; the message has the end of its log.
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
    """Return whether a server answers."""
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
    all_equal = True
    for step, (rollout_off, rollout_on) in enumerate(zip(off, on, strict=True)):
        off_s = rollout_off["seconds"]
        on_s = rollout_on["seconds"]
        processor_ratio = rollout_on["processor_s"] / rollout_off["processor_s"]
        is_equal = rollout_off["tokens"] == rollout_on["tokens"]
        all_equal &= is_equal
        note = f", {notes[step]}" if notes else ""
        print(
            f"step {step + 1}: off {off_s:.2f} s, history {on_s:.2f} s"
            f" ({on_s / off_s:.2f}), processor time {processor_ratio:.2f}, tokens"
            f" {'equal' if is_equal else 'DIFFERENT'}{note}"
        )
    return all_equal
