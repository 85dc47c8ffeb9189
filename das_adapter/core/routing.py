"""Which replica a request goes to: predicted-long ones first, and spread out (DAS's interleaving over ranks)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def longest_first(lengths: Sequence[float]) -> list[int]:
    """Order in which to start requests of these predicted lengths; equal ones as they came."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


class Spread:
    """Replicas and the predicted tokens they still owe; each request goes where its arrival delays the end least.

    A replica's step time grows little with its batch, so its rollout ends with its longest requests: what is balanced
    first is the number of long ones, then the tokens. Requests of a problem need not stay together, the history is
    shared.
    """

    def __init__(self, replicas: Iterable[str] = ()) -> None:
        self._tokens: dict[str, float] = dict.fromkeys(replicas, 0.0)
        self._long: dict[str, int] = dict.fromkeys(self._tokens, 0)

    def add(self, replica: str) -> None:
        """A replica joined."""
        self._tokens.setdefault(replica, 0.0)
        self._long.setdefault(replica, 0)

    def remove(self, replica: str) -> None:
        """A replica left."""
        self._tokens.pop(replica, None)
        self._long.pop(replica, None)

    def pick(self, length: float, long: bool) -> str:
        """The replica for a request of a predicted length, and note it there. There must be a replica."""
        best = min(self._tokens, key=lambda r: (self._long[r] if long else 0, self._tokens[r]))
        self._tokens[best] += length
        self._long[best] += long
        return best

    def done(self, replica: str, length: float, long: bool) -> None:
        """A request that was picked with these figures ended."""
        if replica in self._tokens:
            self._tokens[replica] = max(0.0, self._tokens[replica] - length)
            self._long[replica] -= long

    @property
    def load(self) -> Mapping[str, float]:
        """Predicted tokens that each replica owes."""
        return self._tokens
