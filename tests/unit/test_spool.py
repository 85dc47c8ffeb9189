"""What is left for a history stays until everybody who needs it has it, and counts once."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from das_adapter.config import HistoryConfig
from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.errors import IndexFileError
from das_adapter.protocol.messages import Trajectory, pack, unpack
from das_adapter.protocol.spool import BATCH, FOLDER, TEXTS, Gathered, put, put_batch
from das_adapter.service.spool import Spool
from das_adapter.service.writer import Writer

SOME = [
    Trajectory(2**64 - 1, np.arange(5, dtype=np.int32).tobytes(), 3, 2**64 - 1),
    Trajectory(0, b"", -1),
    Trajectory(7, b"abc", 2**40),
]


def written(request: int, problem: int = 1, version: int = 0, first: int = 0) -> Trajectory:
    """A response of 30 tokens."""
    return Trajectory(problem, np.arange(first, first + 30, dtype=np.int32).tobytes(), version, request)


def take(writer: Writer) -> int:
    """Let a writer keep what has arrived; return how many tokens are published after that."""
    for file, texts in writer.read():
        writer.keep(file, texts)
    writer.publish()
    return SuffixIndex.attach(writer.directory).tokens


def opened(root: Path) -> Writer:
    return Writer(HistoryConfig(max_bytes=2**24), root / "das-history-test", grace_s=0.1)


def test_trajectories_survive_the_way() -> None:
    assert unpack(pack(SOME)) == SOME
    assert unpack(pack([])) == []
    for damaged in (b"", pack(SOME)[:-1], pack(SOME)[:9]):
        with pytest.raises(ValueError):
            unpack(damaged)


def test_a_file_goes_when_all_have_its_texts(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    put_batch(tmp_path, "engine", SOME[:1])
    put_batch(tmp_path, "engine", SOME)
    put(tmp_path, f"{TEXTS}-1", pack(SOME))
    first, second = spool.new((BATCH,))
    assert unpack(spool.path(first).read_bytes()) == SOME[:1]  # in the order in which they were written
    assert stat.S_IMODE(spool.path(first).stat().st_mode) == 0o600
    assert spool.new((BATCH,)) == []
    assert spool.new() == [f"{TEXTS}-1"]
    spool.expect(first, ["here", "there"])
    spool.done([first, second], "here")
    assert spool.path(first).exists()
    spool.expect(first, [""], instead="there")  # that node is gone
    assert spool.path(first).exists()
    spool.expect(first, ["elsewhere"])
    spool.done([first], "elsewhere")
    assert not spool.path(first).exists()
    assert set(Spool(tmp_path).new()) == {second, f"{TEXTS}-1"}  # as the next process finds it


def test_one_text_that_comes_twice_counts_once_and_equal_texts_of_two_requests_twice(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(1), written(2)])
    put(writer.directory, f"{TEXTS}-1", pack([written(2), written(3)]))  # as another node sends again
    assert take(writer) == 90
    for again in (written(1), written(3), written(3, version=1), written(3, problem=2), written(3, first=7)):
        put_batch(writer.directory, "engine", [again])
    assert take(writer) == 90 + 3 * 30
    assert writer.spool.nbytes == 0
    writer.store.close()


def test_what_was_published_ahead_of_a_crash_counts_once(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(1)])
    assert take(writer) == 30
    put_batch(writer.directory, "engine", [written(1, first=5), written(2, problem=2)])
    for file, texts in writer.read():
        writer.keep(file, texts)
    writer.store.seal(16)  # as in the background: the file is still there
    writer.store.close()  # the process ends
    put_batch(writer.directory, "engine", [written(3, version=1)])  # meanwhile; the policy still writes the same
    again = opened(tmp_path)
    assert again.spool.nbytes > 0
    assert take(again) == 120
    assert again.spool.nbytes == 0
    again.store.close()


@pytest.mark.parametrize("left", [b"", b"half of a", pack(SOME)[:-1]])
def test_a_damaged_file_is_told_and_dropped(tmp_path: Path, caplog: Any, left: bytes) -> None:
    writer = opened(tmp_path)
    put(writer.directory, f"{BATCH}-a-1", left)
    put_batch(writer.directory, "b", [written(1)])
    (writer.directory / FOLDER / f"{BATCH}-c.123.tmp").write_bytes(pack([written(2)])[:9])  # not yet complete
    (writer.directory / FOLDER / "last-abc").write_text("")
    assert take(writer) == 30
    assert [path.name for path in (writer.directory / FOLDER).glob(f"{BATCH}-*")] == [f"{BATCH}-c.123.tmp"]
    assert len([record for record in caplog.records if record.message.startswith("das: history: ")]) == 1
    writer.store.close()


def test_what_a_killed_engine_had_not_completed_goes(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    Spool(tmp_path)
    for name, age in (("old", 10_000), ("new", 0)):
        (folder / f"{BATCH}-{name}.1.tmp").touch()
        os.utime(folder / f"{BATCH}-{name}.1.tmp", (0, (folder / f"{BATCH}-{name}.1.tmp").stat().st_mtime - age))
    assert Spool(tmp_path).new() == []
    assert [path.name for path in folder.iterdir()] == [f"{BATCH}-new.1.tmp"]


def test_what_cannot_be_left_is_kept_for_the_next_time(caplog: Any) -> None:
    left: list[Trajectory] = []
    full = True

    def leave(batch: Any) -> None:
        if full:
            raise OSError("no space")
        left.extend(batch)

    gathered = Gathered(leave)
    for text in SOME[:2]:
        gathered.add(text)
        gathered.flush()
    assert caplog.text.count("trajectories do not reach the history") == 2
    full = False
    gathered.add(SOME[2])
    gathered.flush()
    assert left == SOME


def test_a_spool_that_is_another_thing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IndexFileError, match="no link"):
        put_batch(tmp_path, "engine", SOME)
    with pytest.raises(IndexFileError, match="no link"):
        Spool(tmp_path)
