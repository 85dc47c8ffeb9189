"""What is left for a history stays until everybody who needs it has it."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from das_adapter.core.index.errors import IndexFileError
from das_adapter.protocol.messages import Trajectory, pack, unpack
from das_adapter.service.spool import BATCH, PACKAGE, Spool, put_batch

TEXTS = [
    Trajectory(2**64 - 1, np.arange(5, dtype=np.int32).tobytes(), 3),
    Trajectory(0, b"", -1),
    Trajectory(7, b"abc", 2**40),
]


def test_trajectories_survive_the_way() -> None:
    assert unpack(pack(TEXTS)) == TEXTS
    assert unpack(pack([])) == []
    for damaged in (b"", pack(TEXTS)[:-1], pack(TEXTS)[:9]):
        with pytest.raises(ValueError):
            unpack(damaged)


def test_a_file_goes_when_all_have_its_texts(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    put_batch(str(tmp_path), "engine", 2, TEXTS)
    put_batch(str(tmp_path), "engine", 1, TEXTS[:1])
    spool.put_package("node", 1, pack(TEXTS))
    first, second = spool.new(BATCH)
    assert unpack(spool.path(first).read_bytes()) == TEXTS[:1]  # in the order in which they were written
    assert stat.S_IMODE(spool.path(first).stat().st_mode) == 0o600
    assert spool.new(BATCH) == []
    assert len(spool.new()) == 1
    spool.expect(first, ["here", "there"])
    spool.done([first, second], "here")
    assert spool.path(first).exists()
    spool.expect(first, [""], instead="there")  # that node is gone
    assert spool.path(first).exists()
    spool.expect(first, ["elsewhere"])
    spool.done([first], "elsewhere")
    assert not spool.path(first).exists()
    assert set(Spool(tmp_path).new()) == {second, f"{PACKAGE}-node-0000000001"}  # as the next process finds it


def test_a_message_is_taken_once_by_whatever_process(tmp_path: Path) -> None:
    for process in range(3):
        spool = Spool(tmp_path)
        for number in (1, 1, 2):
            spool.put_package("node", number, pack(TEXTS))
        found = spool.new()
        assert len(found) == (0 if process else 2)
        for file in found:
            spool.expect(file, ["here"])
        spool.done(found, "here")
        assert spool.nbytes == 0


def test_a_spool_that_is_another_thing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "spool").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IndexFileError, match="no link"):
        put_batch(str(tmp_path), "engine", 1, TEXTS)
    with pytest.raises(IndexFileError, match="no link"):
        Spool(tmp_path)
