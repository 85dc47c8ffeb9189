"""A look at the batch that a trainer will take next."""

from __future__ import annotations

import itertools
from typing import Any


class LookAhead:
    """A host's stateful data loader, of which the next batch of an epoch can be seen before it is taken. Whoever takes
    batches or saves the state finds what the loader alone would give: a batch that was only seen is not taken yet."""

    def __init__(self, loader: Any) -> None:
        """`loader`: torchdata's `StatefulDataLoader`, or one like it."""
        self._loader, self._iterator = loader, iter(())
        self._seen: list[Any] | None = None
        """The next batch, none at the end of an epoch; None: nobody has looked."""
        self._state: Any = None
        """Of the loader, before somebody looked."""
        self._error: Exception | None = None
        """What it raised then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> LookAhead:
        self._seen, self._error, self._iterator = None, None, iter(self._loader)
        return self

    def __next__(self) -> Any:
        seen, self._seen = self._seen, None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return next(self._iterator if seen is None else iter(seen))

    def peek(self) -> Any:
        """Return the batch that is taken next; None: the epoch ends before, or the batch can't be read, which is an
        error when it is taken."""
        if self._seen is None:
            self._state, self._seen = self._loader.state_dict(), []
            try:
                self._seen += itertools.islice(self._iterator, 1)
            except Exception as error:
                self._error = error
        return self._seen[0] if self._seen else None

    def state_dict(self) -> Any:
        """Return the state in which the batch that is taken next has not been read."""
        return self._loader.state_dict() if self._seen is None else self._state
