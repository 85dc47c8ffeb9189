"""The history of a node without a Ray cluster: a process that engines start, share and outlive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from das_adapter.config import HistoryConfig
from das_adapter.core.index import SuffixIndex
from das_adapter.engine.history_link import HistoryLink
from das_adapter.protocol.messages import Published, Trajectory
from das_adapter.service import janitor

CONFIG = HistoryConfig(max_bytes=2**24)
TEXT = np.arange(30, dtype=np.int32)


@pytest.fixture
def name() -> str:
    return f"das-history-test-{uuid.uuid4().hex[:8]}"


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def tokens(published: Published | None) -> int:
    assert published is not None
    index = SuffixIndex.attach(published.directory)
    return index.tokens


def served_by(published: Published) -> int:
    """The process that writes in a directory."""
    found = subprocess.run(["pgrep", "-f", f"das_adapter.service.local {published.directory}"], capture_output=True)
    return int(found.stdout.split()[0])


def test_engines_share_one_history_and_know_each_others_lengths(name: str) -> None:
    one, two = (HistoryLink(name, CONFIG, grace_s=0.1) for _ in range(2))
    one.push([Trajectory(1, TEXT.tobytes(), 0)])
    assert tokens(one.sync()[0]) == 30
    two.push([Trajectory(2, TEXT.tobytes(), 0), Trajectory(2, TEXT[:5].tobytes(), 0)])
    published, lengths = two.sync()
    assert tokens(published) == 65
    assert lengths["tokens"].tolist() == [30, 30, 5]
    assert one.sync()[1]["tokens"].tolist() == [30, 5]
    drafted = SuffixIndex.attach(published.directory)
    handle = drafted.open(2, TEXT[:3])
    drafted.extend(handle, TEXT[3:6])
    assert drafted.draft([handle], [4])[0][0].tolist() == TEXT[6:10].tolist()


def test_a_killed_history_is_taken_over_and_gets_again_what_it_had_not_published(name: str) -> None:
    link = HistoryLink(name, CONFIG, grace_s=0.1)
    link.push([Trajectory(1, TEXT.tobytes(), 0)])
    published, _ = link.sync()
    os.kill(process := served_by(published), signal.SIGKILL)
    os.waitpid(process, 0)
    janitor.sweep(Path(published.directory).parent, besides="")  # as another history does that starts just now
    link.push([Trajectory(2, TEXT.tobytes(), 1)])
    assert tokens(link.sync()[0]) == 60


def test_an_engine_that_comes_later_follows_what_is_there(name: str) -> None:
    early, late = (HistoryLink(name, CONFIG, grace_s=0.1) for _ in range(2))
    for version in range(8):
        early.push([Trajectory(1, (TEXT + version).tobytes(), version)])
    early.sync()
    late.push([Trajectory(1, (TEXT + 50).tobytes(), 0)])  # not the oldest visit, which the window would drop
    index = SuffixIndex.attach(late.sync()[0].directory)
    handle = index.open(1, TEXT[:1])
    index.extend(handle, TEXT[:5] + 50)
    assert index.draft([handle], [3])[0][0].tolist() == (TEXT[5:8] + 50).tolist()


ENGINE = """
import os, signal, sys
from das_adapter.config import HistoryConfig
from das_adapter.engine.history_link import HistoryLink
from das_adapter.protocol.messages import Trajectory
link = HistoryLink(sys.argv[1], HistoryConfig(max_bytes=2**24), grace_s=0.2)
link.push([Trajectory(1, b"abcd", 0)])
print(link.sync()[0].directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_when_the_last_engine_was_killed(name: str) -> None:
    run = subprocess.run([sys.executable, "-c", ENGINE, name], capture_output=True, text=True, check=False, timeout=60)
    directory = Path(run.stdout.strip())
    assert directory.name == name, run.stderr
    until(lambda: not directory.exists())


def test_a_history_that_cannot_be_kept_is_told_and_done_without(name: str, caplog: Any, tmp_path: Path) -> None:
    os.symlink(tmp_path, f"/dev/shm/{name}")  # somebody else's
    try:
        link = HistoryLink(name, CONFIG, grace_s=0.1)
        link.push([Trajectory(1, TEXT.tobytes(), 0)])
        published, lengths = link.sync()
    finally:
        os.unlink(f"/dev/shm/{name}")
    assert published is None
    assert len(lengths) == 0
    assert any("das: history: " in record.message for record in caplog.records)
