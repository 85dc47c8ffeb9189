"""What goes wrong again and again is said once, and who does not answer is not waited
for again and again.
"""

from __future__ import annotations

import logging
import re
import threading
import time

logger = logging.getLogger("das_adapter")

IMPATIENCE_S = 1.0
"""Maximum time that anything waits for a peer that had no answer the last time."""
AGAIN_S = 60.0
"""Minimum time between two lines of the log that tell the same."""
_MAX_KEPT = 1024
"""Lines of which it is known when the log had them."""
_NUMBERS = re.compile(r"[0-9a-f]{6,}|[0-9]+")


class Said:
    """When the log had which lines. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._times_s)

    def is_new(self, line: str) -> bool:
        """Return whether the log has not had a line for a minute, and note that it has
        it now.
        """
        now = time.monotonic()
        with self._lock:
            last = self._times_s.get(line)
            if last is not None and now < last + AGAIN_S:
                return False
            if len(self._times_s) >= _MAX_KEPT:
                self._times_s.clear()
            self._times_s[line] = now
            return True


said = Said()
"""What the log of this process had."""


def log_once(message: str, error: object = "", end: str = "") -> None:
    """Log an error in one line, unless the log has had it within a minute.

    Args:
        error: why; names of temporary files and numbers in it make no other line.
        end: what follows.
    """
    if said.is_new(f"{message} {kind_of(error)}"):
        why = f": {reason(error)}" if error else ""
        logger.error("%s%s%s", message, why, end)


def kind_of(error: object) -> str:
    """Return what an error says, without numbers and random names."""
    return _NUMBERS.sub("#", reason(error))


def reason(error: object) -> str:
    """Return in one line what an error says, with the path that it is about."""
    if not isinstance(error, BaseException):
        return str(error)
    name = type(error).__name__
    lines = str(error).strip().splitlines()
    # of the traceback of another process, the last line says why
    text = lines[-1] if len(lines) > 3 else " ".join(lines)
    return f"{name}: {text}" if text else name


class Peer:
    """Somebody outside this thread who answers, or hangs, or is gone: an actor, the
    writer of a history, a directory. It is waited for in full once, and then
    `IMPATIENCE_S` at most until it answers again. The log has each kind of failure
    once until then. Any thread may call.
    """

    def __init__(self, later_s: float | None = None) -> None:
        """`later_s`: maximum time to wait after it had no answer; None:
        `IMPATIENCE_S`.
        """
        self._later_s = later_s
        self._told: set[str] = set()
        self.trouble = ""
        """Why it had no answer the last time; empty: it had one."""

    def patience_s(self, first_s: float) -> float:
        """Return how long to wait for an answer for which one would wait `first_s`."""
        if not self.trouble:
            return first_s
        later_s = IMPATIENCE_S if self._later_s is None else self._later_s
        return min(first_s, later_s)

    def answered(self) -> None:
        """Note that it answered."""
        self.trouble = ""
        self._told.clear()

    def failed(self, message: str, error: Exception, end: str = "") -> None:
        """Note that there was no answer; the log says `message`, why, and `end`,
        once.
        """
        self.trouble = reason(error)
        kind = f"{message} {kind_of(error)}"
        if kind not in self._told:
            self._told.add(kind)
            log_once(message, error, end)
