"""The decision log: what the controller decided in every step and how each request went, as lines of JSON.

One file per engine worker and run. A line is a list whose first entry names its kind:

    ["run", das-adapter version, process id]
    ["s", begin, requests, tokens, draft tokens, accepted, seconds, predicted seconds or null]   a decode step
    ["r", problem, length class, begin, end, tokens, draft tokens, accepted]                      a request that ended
    ["a", [draft tokens ...], [accepted ...]]      by the power of two of the response's length, since the last "v"
    ["v", version, time, latency model or null, seconds saved, reason why speculation stopped or null]  a weight sync

Times are seconds since the epoch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter import __version__

_OCTAVES = 24
_LINES = 256
"""Lines that are kept back before they are written together."""


class DecisionLog:
    """Writes one worker's decisions. Lines of the last moments before a crash may be missing."""

    def __init__(self, directory: str):
        """Raises OSError where the directory can't be made."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.path = Path(directory) / f"decisions-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.jsonl"
        self._lines = [json.dumps(["run", __version__, os.getpid()])]
        self._tried, self._kept = np.zeros(_OCTAVES), np.zeros(_OCTAVES)

    def step(
        self, begin: float, requests: int, tokens: int, drafted: int, accepted: int, seconds: float, predicted: float
    ) -> None:
        """A decode step that was timed; `predicted` 0: there was no model."""
        self._add(["s", round(begin, 4), requests, tokens, drafted, accepted, round(seconds, 6),
                   round(predicted, 6) or None])  # fmt: skip

    def verified(self, written: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Where in their responses drafts were verified: tokens before, draft tokens, accepted; shape (b,) each."""
        octave = np.log2(np.maximum(written, 1)).astype(np.int64)
        self._tried += np.bincount(octave, weights=drafted, minlength=_OCTAVES)
        self._kept += np.bincount(octave, weights=accepted, minlength=_OCTAVES)

    def request(self, problem: int, kind: int, tokens: int, drafted: int, accepted: int, begin: float) -> None:
        """A request that ended just now."""
        self._add(["r", problem, kind, round(begin, 4), round(time.time(), 4), tokens, drafted, accepted])

    def sync(self, version: int, model: dict[str, float] | None, saved: float, stopped: str | None) -> None:
        """A weight sync; everything so far is on disk after it."""
        self._add(["a", self._tried.astype(int).tolist(), self._kept.astype(int).tolist()])
        self._tried[:] = self._kept[:] = 0
        self._add(["v", version, round(time.time(), 4), model, round(saved, 4), stopped])
        self.flush()

    def flush(self) -> None:
        """Write what was kept back."""
        with self.path.open("a") as file:
            file.writelines(line + "\n" for line in self._lines)
        self._lines.clear()

    def _add(self, record: list[Any]) -> None:
        self._lines.append(json.dumps(record, separators=(",", ":")))
        if len(self._lines) >= _LINES:
            self.flush()
