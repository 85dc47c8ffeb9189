"""Errors of the suffix index."""

from __future__ import annotations

from das_adapter.errors import DasError


class IndexFileError(DasError):
    """A file that is not a saved index, is of another format version, truncated or damaged."""


class UnknownHandle(DasError, KeyError):
    """A request handle that was never given out, or whose request is closed."""

    def __init__(self, handle: object) -> None:
        super().__init__(f"request handle {handle}: not open (closed before, or of another index)")

    __str__ = DasError.__str__
