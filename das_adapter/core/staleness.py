"""How acceptance depends on the age of what a request drafts from."""

from __future__ import annotations

import numpy as np

AGES = ("none", "1", "2_4", "5_16", "17_64", "65_256", "older")
"""Weight versions since the newest rollout of a problem: no rollout (only live siblings), 1, 2 to 4, ..., more."""
_UP_TO = (1, 4, 16, 64, 256)


class Staleness:
    """Draft tokens, and those accepted, by the age of the newest rollout of their problem."""

    def __init__(self) -> None:
        self._counts = np.zeros((len(AGES), 2), dtype=np.int64)

    def count(self, ages: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Add the draft tokens of some requests, and those accepted, int64 [requests] each; `ages`: see `bracket`."""
        np.add.at(self._counts, ages, np.stack([drafted, accepted], axis=1))

    def take(self) -> list[list[int]]:
        """Return [drafted, accepted] for each of `AGES`, and start again."""
        taken, self._counts = self._counts.tolist(), np.zeros_like(self._counts)
        return taken


def bracket(age: int | None) -> int:
    """Return the index into `AGES` for a request with a `SuffixIndex.age`: 0 is the version that was sealed last."""
    return 0 if age is None else 1 + int(np.searchsorted(_UP_TO, age + 1))
