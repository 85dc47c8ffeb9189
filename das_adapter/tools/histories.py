"""The histories of this node and of checkpoints: what lies there, and what dead runs have left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.private import is_private
from das_adapter.core.index.store import newest_in, problems_in
from das_adapter.errors import DasError
from das_adapter.protocol.spool import FOLDER, places, size_of
from das_adapter.service import janitor


def here() -> Iterator[dict[str, Any]]:
    """Describe this user's histories on this node, as `inspect` does; of one that can't be read, say why (`error`)."""
    for path in _lying():
        try:
            yield inspect(path)
        except (OSError, DasError) as error:  # it was removed just now, say
            yield {"directory": str(path), "error": str(error)}


def clean() -> list[str]:
    """Remove the histories of this user's that nobody writes to, watches or uses; return their directories."""
    before = _lying()
    for root in places():
        janitor.sweep(root, besides="")
    return [str(path) for path in before if not path.exists()]


def _lying() -> list[Path]:
    return [path for root in places() for path in sorted(root.glob("das-history-*")) if is_private(path)]


def inspect(directory: Path) -> dict[str, Any]:
    """Describe the history of a node or of a checkpoint; nothing is changed.

    Returns:
        `directory`, `problems`, and `bytes` of files. Of a node: `tokens`; `generation`, the last that was published;
        files that wait for the writer (`waiting`); `age_s`, seconds since something was published or left. Of a
        checkpoint: `version`, the newest of the weights that wrote it, the number of `nodes`, and the `scope` and
        `tokenizer` of its run.

    Raises:
        DasError: it is neither, or damaged.
    """
    for saved in (directory, directory / "das_history"):
        if (saved / "history.json").is_file():
            return _saved(saved)
    if not (directory / FOLDER).is_dir():
        raise DasError(
            f"history: found none in {str(directory)!r}, allowed: a directory das-history-* of a node (in "
            f"{places()[0]}), a checkpoint, or its directory das_history"
        )
    index = SuffixIndex.attach(directory)
    generation = index.refresh()
    waiting = [path for path in (directory / FOLDER).iterdir() if path.name.startswith(("batch-", "texts-"))]
    touched = [path.stat().st_mtime for path in (*directory.glob("manifest-*"), *waiting)]
    return {
        "directory": str(directory),
        "problems": index.problems,
        "tokens": index.tokens,
        "bytes": size_of(directory),
        "generation": generation,
        "waiting": len(waiting),
        "age_s": round(time.time() - max(touched)) if touched else None,
    }


def _saved(directory: Path) -> dict[str, Any]:
    try:
        facts = json.loads((directory / "history.json").read_text())
        parts = sorted((directory / "index").iterdir())
        return {
            "directory": str(directory),
            "problems": len(np.unique(np.concatenate([problems_in(part) for part in parts]))),
            "bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
            "version": max(newest_in(part) for part in parts),
            "nodes": len(parts),
            **{name: facts[name] for name in ("scope", "tokenizer")},
        }
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DasError(f"history: {str(directory)!r} is damaged: {error!r}") from None
