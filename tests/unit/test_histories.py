"""`das-adapter history`: real histories with a real writer, and those of checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from test_local_history import TEXT, Engine

from das_adapter.cli import main
from das_adapter.core.index.store import HistoryStore
from das_adapter.protocol import spool
from das_adapter.service import janitor


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in the place of shared memory and of the temporary one: other runs of this node have theirs."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(spool, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "shm"


def say(*words: object) -> Any:
    done = CliRunner().invoke(main, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_living_history_is_described_and_stays(root: Path) -> None:
    engine = Engine("das-history-living", grace_s=5.0)
    engine.write(1, TEXT, 0)
    engine.write(2, TEXT, 0)
    published = engine.sync()
    assert published is not None and Path(published.directory).parent == root
    (found,) = say("history", "inspect", published.directory)
    assert (found["problems"], found["tokens"], found["waiting"]) == (2, 60, 0)
    assert found["age_s"] >= 0 and found["generation"] > 0
    (listed,) = say("history", "inspect")
    assert listed["directory"] == found["directory"]
    assert say("history", "clean") == {"removed": []}
    output = CliRunner().invoke(main, ["history", "inspect"]).output
    assert ["tokens", "60"] in [line.split() for line in output.splitlines()]


def dead(directory: Path) -> Path:
    """A history whose job was killed together with its janitor."""
    with HistoryStore(directory) as store:
        store.add(1, TEXT, 0)
        store.seal()
    (directory / spool.FOLDER).mkdir(mode=0o700)
    (directory / "janitor").touch()
    return directory


def test_what_dead_runs_have_left_is_removed_and_nothing_else(root: Path, tmp_path: Path) -> None:
    left = [dead(root / "das-history-dead"), dead(tmp_path / "tmp" / "das-history-dead")]
    (root / "das-history-of-nobody.txt").touch()
    other = dead(root / "another-history")
    with HistoryStore(root / "das-history-writing"):
        assert {one["directory"] for one in say("history", "inspect")} >= {str(path) for path in left}
        assert say("history", "clean") == {"removed": [str(path) for path in left]}
    assert other.is_dir() and (root / "das-history-writing").is_dir()


@pytest.mark.parametrize("killed_at", range(7))
def test_what_a_process_that_was_killed_has_not_removed_is_removed_later(
    root: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, removed, stock = dead(root / "das-history-dead"), list[int](), os.unlink

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


def test_one_that_is_damaged_or_of_another_version_does_not_hide_the_others(root: Path) -> None:
    dead(root / "das-history-a")
    broken = dead(root / "das-history-b")
    for manifest in broken.glob("manifest-*"):
        manifest.write_bytes(b"another format")
    fine, damaged = say("history", "inspect")
    assert fine["tokens"] == 30 and "error" in damaged


def test_a_checkpoints_history_is_described(tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("das_adapter.service.checkpoint", reason="Ray is not installed")

    def save(folder: Path) -> int:
        with HistoryStore(tmp_path / "store") as store:
            store.add(1, TEXT, 3)
            for part in range(2):
                store.save(folder / str(part))
        return 2

    facts = {"scope": "problem", "tokenizer": "0123456789abcdef"}
    checkpoint.write(tmp_path / "step_3" / checkpoint.NAME, facts, np.zeros(0, checkpoint.RESPONSE), save)
    (found,) = say("history", "inspect", tmp_path / "step_3")
    assert [found] == say("history", "inspect", tmp_path / "step_3" / "das_history")
    assert (found["nodes"], found["problems"], found["version"], found["scope"]) == (2, 1, 3, "problem")
    (tmp_path / "step_3" / "das_history" / "index" / "0").write_bytes(b"x")
    for path, words in ((tmp_path / "step_3", "too short for a header"), (tmp_path, "found none in")):
        done = CliRunner().invoke(main, ["history", "inspect", str(path)])
        assert done.exit_code == 1 and words in " ".join(done.output.split())


def test_where_nothing_runs_it_says_so() -> None:
    done = CliRunner().invoke(main, ["history", "inspect"])
    assert done.exit_code == 0 and done.output.startswith("No history of yours lies on this node")
