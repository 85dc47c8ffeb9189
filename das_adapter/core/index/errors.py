"""Errors of the suffix index."""

from __future__ import annotations

from das_adapter.errors import DasError


class IndexFileError(DasError):
    """A file that is not a saved index, is of another format version, truncated or
    damaged.
    """
