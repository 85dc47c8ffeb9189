"""What jobs that were killed have left in shared memory is removed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from test_local_history import TEXT

from das_adapter.config import HistoryConfig
from das_adapter.core.index.store import HistoryStore
from das_adapter.protocol import spool
from das_adapter.service import janitor
from das_adapter.service.writer import Writer


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in the place of shared memory and of the temporary one: other runs of
    this node have theirs.
    """
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(spool, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "shm"


def dead(directory: Path) -> Path:
    """A history whose job was killed together with its janitor."""
    with HistoryStore(directory) as store:
        store.add(1, TEXT, 0)
        store.seal()
    (directory / spool.FOLDER).mkdir(mode=0o700)
    (directory / "janitor").touch()
    return directory


def test_what_dead_runs_have_left_goes_when_a_history_starts_and_nothing_else_does(
    root: Path, tmp_path: Path
) -> None:
    left = [
        dead(root / "das-history-dead"),
        dead(tmp_path / "tmp" / "das-history-dead"),
    ]
    (root / "das-history-of-nobody.txt").touch()
    other = dead(root / "another-history")
    with HistoryStore(root / "das-history-writing"):
        Writer(
            HistoryConfig(max_bytes=2**24), root / "das-history-new", grace_s=0.1
        ).store.close()
    assert not any(path.exists() for path in left)
    assert other.is_dir() and (root / "das-history-writing").is_dir()


@pytest.mark.parametrize("killed_at", range(7))
def test_what_a_process_that_was_killed_has_not_removed_is_removed_later(
    root: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = dead(root / "das-history-dead")
    removed = list[int]()
    stock = os.unlink

    def unlink(*path: Any, **where: Any) -> None:
        removed.append(1)
        if len(removed) > killed_at:
            raise KeyboardInterrupt
        stock(*path, **where)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "unlink", unlink)
        janitor.sweep(root, besides="")
    janitor.sweep(root, besides="")
    assert removed and not history.exists()


def test_a_history_that_is_taken_over_is_not_swept_away_before(root: Path) -> None:
    left = dead(root / "das-history-dead")
    janitor.sweep(root, besides=left.name)
    assert left.is_dir()
    janitor.sweep(root, besides="das-history-other")
    assert not left.exists()
