"""A look at the batches that a trainer will take next."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any


class LookAhead:
    """A host's stateful data loader, of which the next batches of an epoch can be seen before they are taken. Whoever
    takes batches or saves the state finds what the loader alone would give: what was only seen is not taken yet."""

    def __init__(self, loader: Any) -> None:
        """`loader`: torchdata's `StatefulDataLoader`, or one like it."""
        self._loader, self._iterator = loader, iter(())
        self._seen = deque[tuple[Any, Future[Any]]]()
        """The loader's state before each batch that was read and is not taken yet; and the batch, or what was raised in
        its place: at the end of an epoch, `StopIteration`."""

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
        return self._seen.popleft()[1].result() if self._seen else next(self._iterator)

    def peek(self, count: int) -> list[Any]:
        """Return the batches that are taken next, at most so many: fewer where the epoch ends before, or one can't be
        read, which is an error when it is taken."""
        while len(self._seen) < count and not (self._seen and self._seen[-1][1].exception()):
            self._seen.append((self._loader.state_dict(), batch := Future[Any]()))
            try:
                batch.set_result(next(self._iterator))
            except Exception as error:
                batch.set_exception(error)
        return [batch.result() for _, batch in self._seen if not batch.exception()]

    def state_dict(self) -> Any:
        """Return the state in which the batch that is taken next has not been read."""
        return self._seen[0][0] if self._seen else self._loader.state_dict()
