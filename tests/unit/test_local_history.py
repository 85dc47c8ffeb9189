"""The history of a node without a Ray cluster: a process that engines start, share and
outlive.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from das_adapter import trouble
from das_adapter.config import HistoryConfig
from das_adapter.core.index import SuffixIndex
from das_adapter.engine import alone
from das_adapter.engine.alone import SharedHistory
from das_adapter.protocol.messages import Published, Trajectory
from das_adapter.protocol.processes import leave_process
from das_adapter.protocol.spool import (
    ANSWER,
    ASK,
    FOLDER,
    GATHER_S,
    Answer,
    put_batch,
    put_file,
)
from das_adapter.service import janitor
from das_adapter.service.local import LocalHistory

CONFIG = HistoryConfig(max_bytes=2**24)
TEXT = np.arange(30, dtype=np.int32)


@pytest.fixture
def name() -> str:
    return f"das-history-test-{uuid.uuid4().hex[:8]}"


class Engine(SharedHistory):
    """An engine that writes what it is told to."""

    def __init__(self, name: str, grace_s: float = 0.1) -> None:
        super().__init__(name, CONFIG, grace_s)

    def write(self, problem: int, text: np.ndarray, version: int) -> None:
        self.add(Trajectory(problem, text.tobytes(), version))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def tokens(published: Published | None) -> int:
    index = SuffixIndex.attach(published.directory)
    return index.tokens


def served_by(directory: str | Path) -> list[psutil.Process]:
    """The processes that write in a directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "das_adapter.service.local" in command and str(directory) in command:
            found.append(process)
    return found


def test_engines_share_one_history(name: str) -> None:
    one = Engine(name)
    two = Engine(name)
    one.write(1, TEXT, 0)
    assert tokens(one.sync()) == 30
    two.write(2, TEXT, 0)
    two.write(2, TEXT[:5], 0)
    published = two.sync()
    assert tokens(published) == 65
    drafted = SuffixIndex.attach(published.directory)
    handle = drafted.open(2, TEXT[:3])
    drafted.extend(handle, TEXT[3:6])
    assert drafted.draft([handle], [4])[0][0].tolist() == TEXT[6:10].tolist()


def test_a_killed_history_is_taken_over_and_gets_again_what_it_had_not_published(
    name: str,
) -> None:
    engine = Engine(name)
    engine.write(1, TEXT, 0)
    published = engine.sync()
    for process in served_by(published.directory):
        os.kill(process.pid, signal.SIGKILL)
    # as another history does that starts just now
    janitor.sweep(Path(published.directory).parent, besides="")
    engine.write(2, TEXT, 1)
    assert tokens(engine.sync()) == 60


def test_an_engine_that_comes_later_follows_what_is_there(name: str) -> None:
    early = Engine(name)
    late = Engine(name)
    for version in range(8):
        early.write(1, TEXT + version, version)
        early.sync()
    late.write(1, TEXT + 50, 0)  # not the oldest visit, which the window would drop
    index = SuffixIndex.attach(late.sync().directory)
    handle = index.open(1, TEXT[:1])
    index.extend(handle, TEXT[:5] + 50)
    assert index.draft([handle], [3])[0][0].tolist() == (TEXT[5:8] + 50).tolist()


def test_removed_files_are_published_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy machine is no reason for another writer
    monkeypatch.setattr(alone, "AGAIN_S", alone.PATIENCE_S)
    engine = Engine(name, grace_s=5.0)
    engine.write(1, TEXT, 0)
    published = engine.sync()
    shutil.rmtree(published.directory)
    engine.write(2, TEXT, 1)
    assert tokens(engine.sync()) == 60


def test_an_engine_without_an_answer_is_behind_until_there_is_a_writer_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(name)
    engine.write(1, TEXT, 0)
    published = engine.sync()
    assert not engine.trouble
    for process in served_by(published.directory):
        os.kill(process.pid, signal.SIGKILL)
    engine.write(2, TEXT, 1)
    with monkeypatch.context() as patched:
        patched.setattr(alone, "PATIENCE_S", 0.0)
        assert engine.sync() is None
    assert engine.trouble
    until(lambda: engine.sync() is not None)
    assert tokens(published) == 60
    assert not engine.trouble


def test_the_first_weight_sync_waits_for_a_writer_that_could_not_be_started_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no process can be started")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", fails)
        engine = Engine(name)
    monkeypatch.setattr(trouble, "IMPATIENCE_S", 0.0)
    engine.write(1, TEXT, 0)
    assert tokens(engine.sync()) == 30


def test_half_an_answer_is_none(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    Answer(3, 7, ["a line"]).write_to(tmp_path, "engine")
    path = folder / f"{ANSWER}-engine"
    whole = path.read_bytes()
    assert Answer.read(path) == (3, 7, ["a line"])
    assert path.stat().st_mode & 0o777 == 0o600
    for damaged in (b"", whole[:5], whole[:-1], b"7\n", b"[1, 2]\n"):
        path.write_bytes(damaged)
        with pytest.raises((ValueError, TypeError)):
            Answer.read(path)


ENGINE = """
import sys, time
from das_adapter.config import HistoryConfig
from das_adapter.engine.alone import SharedHistory
from das_adapter.protocol.messages import Trajectory
engine = SharedHistory(sys.argv[1], HistoryConfig(max_bytes=2**24), grace_s=0.5)
engine.add(Trajectory(1, bytes(4), 0))
print(engine.sync().directory, flush=True)
time.sleep(60)
"""


def test_the_writer_survives_when_the_engine_and_all_its_children_are_killed(
    name: str,
) -> None:
    """As vLLM ends its workers."""
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, name], stdout=subprocess.PIPE, text=True
    ) as engine:
        directory = Path(engine.stdout.readline().strip())
        # on a busy machine a second one was started, and ends
        until(lambda: len(served_by(directory)) == 1)
        (writer,) = served_by(directory)
        for process in [
            *psutil.Process(engine.pid).children(recursive=True),
            psutil.Process(engine.pid),
        ]:
            process.kill()
    assert directory.exists() and writer.is_running()
    until(lambda: not directory.exists())
    until(lambda: not served_by(directory))


def test_a_history_that_cannot_be_kept_is_told_and_done_without(
    name: str, caplog: Any
) -> None:
    engine = Engine(name + 255 * "x")  # no file may have such a name
    for version in range(3):
        engine.write(1, TEXT, version)
        published = engine.sync()
    time.sleep(2 * GATHER_S)
    assert published is None
    assert (
        len([record for record in caplog.records if "das: history: " in record.message])
        == 1
    )


def test_an_engine_that_was_idle_over_several_weight_updates_is_no_older(
    tmp_path: Path,
) -> None:
    """It counts them as one, at its next step."""
    directory = tmp_path / "das-history-test"
    history = LocalHistory(directory, CONFIG, 0.1)

    def leave(engine: str, problem: int, version: int, tokens: int = 30) -> None:
        put_batch(
            directory, engine, [Trajectory(problem, TEXT[:tokens].tobytes(), version)]
        )
        put_file(directory, f"{ASK}-{engine}", b"1")
        history.work()

    for version in range(12):
        leave("a", 1, version)
        if version == 0:
            leave("b", 2, version)
    leave("b", 1, 1, tokens=20)
    # of the last visits; and both of b's
    assert SuffixIndex.attach(directory).tokens == 8 * 30 + 30 + 20


def test_a_writer_that_hangs_costs_one_time_out_and_no_further_process(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    engine = Engine(name)
    engine.write(1, TEXT, 0)
    published = engine.sync()
    monkeypatch.setattr(alone, "PATIENCE_S", 2.5)
    monkeypatch.setattr(trouble, "IMPATIENCE_S", 0.1)
    writers = served_by(published.directory)
    for process in writers:
        process.suspend()
    took_s = []
    for version in range(1, 5):
        engine.write(1, TEXT, version)
        begin = time.monotonic()
        assert engine.sync() is None
        took_s.append(time.monotonic() - begin)
    assert Engine(name).trouble == ""  # it comes later, and waits for nobody
    assert served_by(published.directory) == writers
    for process in writers:
        process.resume()
    assert took_s[0] > 2.4 and max(took_s[1:]) < 1.0
    assert sum("no answer within" in r.message for r in caplog.records) == 1
    until(lambda: engine.sync() is not None)


@pytest.mark.parametrize(
    ("block", "why"), [('{"max_bytes": 0}', "max_bytes"), ("nothing", "JSON")]
)
def test_a_writer_that_dies_at_its_start_says_why_in_the_engines_log(
    name: str, block: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(HistoryConfig, "model_dump_json", lambda self: block)
    begin = time.monotonic()
    engine = Engine(name)
    assert "the process that writes" in engine.trouble and why in engine.trouble
    assert why in caplog.text
    engine.sync()
    assert time.monotonic() - begin < alone.PATIENCE_S / 2


def test_a_writer_that_can_not_take_the_directory_says_why(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "PATIENCE_S", 20.0)
    monkeypatch.setattr(alone, "make_private", lambda directory: None)
    directory = Path("/dev/shm") / name
    (directory / FOLDER).mkdir(parents=True)
    (directory / "writer").mkdir()
    monkeypatch.setattr(alone, "directory_for", lambda *_: directory)
    assert "Is a directory" in Engine(name).trouble
    shutil.rmtree(directory)


@pytest.mark.parametrize("file", ["users", "janitor", "writer"])
def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(
    name: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "PATIENCE_S", 5.0)
    directory = Path("/dev/shm") / name
    directory.mkdir(mode=0o700)
    os.mkfifo(directory / file)
    begin = time.monotonic()
    engine = Engine(name)
    engine.write(1, TEXT, 0)
    engine.sync()
    assert time.monotonic() - begin < 15
    shutil.rmtree(directory)


def test_locks_are_for_this_user_alone_whatever_the_umask(name: str) -> None:
    before = os.umask(0)
    try:
        engine = Engine(name)
        engine.write(1, TEXT, 0)
        directory = Path(engine.sync().directory)
    finally:
        os.umask(before)
    for path in directory.rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_process_that_does_not_begin_gives_its_reason() -> None:
    def fails() -> Any:
        raise ValueError("of that")

    def is_killed() -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    assert leave_process(fails) == "ValueError: of that"
    assert "SIGKILL" in leave_process(is_killed)
    assert leave_process(lambda: lambda: None) == ""


def test_an_engine_one_weight_version_behind_keeps_its_versions(tmp_path: Path) -> None:
    """Else the history's oldest visit would go too early."""
    directory = tmp_path / "das-history-test"
    history = LocalHistory(directory, CONFIG, 0.1)
    visits = [("a", version, 30) for version in range(8)] + [("b", 6, 20), ("b", 7, 20)]
    for engine, version, tokens in visits:
        text = TEXT[:tokens].tobytes()
        put_batch(directory, engine, [Trajectory(1, text, version)])
        put_file(directory, f"{ASK}-{engine}", b"1")
        history.work()
    assert SuffixIndex.attach(directory).tokens == 8 * 30 + 2 * 20
