"""Whether requests find history of their problem when it comes back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Returns:
    """Counts requests that begin: those that find sealed history of their problem, and those that find none although
    the run has met the problem before.

    A byte tells whether a problem was met. The identities of problems are hashes: of a million, 6 % share their byte.
    """

    BYTES = 2**24

    def __init__(self) -> None:
        self._met = np.zeros(self.BYTES, dtype=bool)
        self._counts = np.zeros(3, dtype=np.int64)

    def met(self, problems: npt.NDArray[np.uint64]) -> None:
        """Take the problems of finished responses, at a weight sync."""
        self._met[problems % np.uint64(self.BYTES)] = True

    def begin(self, problem: int, found: bool) -> None:
        """Count a request; `found`: whether there is sealed history of its problem."""
        self._counts += (1, found, not found and self._met[problem % self.BYTES])

    def arrived(self, problem: int) -> None:
        """Count a request that began without history as one that found it: it has arrived from another node."""
        self._counts += (0, 1, -int(self._met[problem % self.BYTES]))

    def take(self) -> tuple[int, int, int]:
        """Return (requests, those that found history, those that should have), and start again."""
        requests, found, lost = self._counts.tolist()
        self._counts[:] = 0
        return requests, found, lost
