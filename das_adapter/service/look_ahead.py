"""A look at the batches that a trainer will take next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Seen:
    """A batch that was read and is not taken yet."""

    state: Any
    """Of the loader, before it was read."""
    batch: Any = None
    error: Exception | None = None
    """What the loader raised in its place: at the end of an epoch, `StopIteration`."""


class LookAhead:
    """A host's stateful data loader, of which the next batches of an epoch can be seen before they are taken. Whoever
    takes batches or saves the state finds what the loader alone would give: what was only seen is not taken yet."""

    def __init__(self, loader: Any) -> None:
        """`loader`: torchdata's `StatefulDataLoader`, or one like it."""
        self._loader, self._iterator = loader, iter(())
        self._seen = deque[_Seen]()

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not yet there in a copy
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> LookAhead:
        self._seen.clear()
        self._iterator = iter(self._loader)
        return self

    def __next__(self) -> Any:
        if not self._seen:
            return next(self._iterator)
        seen = self._seen.popleft()
        if seen.error is not None:
            raise seen.error
        return seen.batch

    def peek(self, count: int) -> list[Any]:
        """Return the batches that are taken next, at most so many: fewer where the epoch ends before, or one can't be
        read, which is an error when it is taken."""
        while len(self._seen) < count and not (self._seen and self._seen[-1].error):
            state = self._loader.state_dict()
            try:
                self._seen.append(_Seen(state, next(self._iterator)))
            except Exception as error:
                self._seen.append(_Seen(state, error=error))
        return [seen.batch for seen in self._seen if seen.error is None]

    def state_dict(self) -> Any:
        """Return the state in which the batch that is taken next has not been read."""
        return self._seen[0].state if self._seen else self._loader.state_dict()
