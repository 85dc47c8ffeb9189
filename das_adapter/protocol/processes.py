"""Processes of ours that outlive the one that starts them. Each says at its start, in
that one's log, why it does not run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from das_adapter.errors import DasError
from das_adapter.trouble import reason

BEGIN_S = 10.0
"""How long a starting process is watched; after that it is on its own."""
_MAX_REASON_BYTES = 4096
"""Maximum bytes of the reason that a process gives for its end."""


class Starter:
    """A command that starts a process and ends."""

    def __init__(
        self, command: Sequence[str], what: str, env: Mapping[str, str] | None = None
    ) -> None:
        """Run the command; `what`: what it starts, for the message. OSError: it can't
        be run.
        """
        self._what = what
        self._run = subprocess.Popen(
            command,
            start_new_session=True,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    @property
    def is_running(self) -> bool:
        """Whether the command runs still."""
        return self._run.poll() is None

    def wait(self, timeout_s: float) -> None:
        """Wait until the command has ended, once; DasError: with an error, or it takes
        longer, and goes on.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._run.wait(timeout_s)
        if self.is_running:
            raise DasError(f"{self._what} did not start within {timeout_s:.0f} s")
        _, said = self._run.communicate()
        status = self._run.returncode
        lines = said.strip().splitlines() or [f"status {status}"]
        if status:
            raise DasError(f"{self._what} did not start: {lines[-1]}")


def leave_process(begin: Callable[[], Callable[[], None]]) -> str:
    """Leave a process that outlives this one: it calls `begin`, then what that returns,
    and ends. Return why it did not begin; empty: it did, or it takes longer than
    `BEGIN_S`.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _run(begin, write)
    os.close(write)
    os.set_blocking(read, False)
    return _reason_of_end(child, read)


def _run(begin: Callable[[], Callable[[], None]], write: int) -> None:
    """Run what a process is for, and end it; why it did not begin goes into a pipe."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    try:
        work = begin()
    except BaseException as error:
        text = reason(error).encode(errors="replace")
        os.write(write, text[:_MAX_REASON_BYTES] or b"it ended")
        os._exit(1)
    os.write(write, b"\n")
    os.close(write)
    try:
        work()
    finally:
        os._exit(0)


def _reason_of_end(child: int, read: int) -> str:
    """Return why a child did not begin, by what it wrote or how it ended."""
    until = time.monotonic() + BEGIN_S
    while time.monotonic() < until:
        try:
            said = os.read(read, _MAX_REASON_BYTES)
        except BlockingIOError:
            time.sleep(0.005)
            continue
        if said:
            return said.decode(errors="replace").strip()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            return f"it ended by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"it ended with status {os.WEXITSTATUS(status)}"
    return ""
