"""What is left for a history stays until it is published."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from das_adapter.config import HistoryConfig
from das_adapter.core import tuning
from das_adapter.core.history import HistoryRules
from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.errors import IndexFileError
from das_adapter.core.index.store import HistoryStore
from das_adapter.protocol import spool
from das_adapter.protocol.messages import Trajectory, pack, unpack
from das_adapter.protocol.spool import (
    AWAY,
    BATCH,
    FOLDER,
    TEXTS,
    Gathered,
    put_batch,
    put_file,
)
from das_adapter.service.writer import Writer

SOME = [
    Trajectory(2**64 - 2, np.arange(5, dtype=np.int32).tobytes(), 3),
    Trajectory(0, b"", -1),
    Trajectory(7, b"abc", 2**40),
]


def written(problem: int) -> Trajectory:
    """A response of 30 tokens."""
    return Trajectory(problem, np.arange(30, dtype=np.int32).tobytes(), 0)


def take(writer: Writer) -> int:
    """Let a writer keep what has arrived; return how many tokens are published after
    that.
    """
    for file, texts in writer.read_files():
        writer.keep_texts(file, texts)
    writer.publish()
    return SuffixIndex.attach(writer.directory).tokens


def opened(root: Path, max_bytes: int = 2**24) -> Writer:
    return Writer(
        HistoryConfig(max_bytes=max_bytes), root / "das-history-test", grace_s=5.0
    )


def test_trajectories_survive_the_way() -> None:
    assert unpack(pack(SOME)) == SOME
    assert unpack(pack([])) == []
    for damaged in (b"", pack(SOME)[:-1], pack(SOME)[:9], b"\xff" * 8 + pack(SOME)[8:]):
        with pytest.raises(ValueError):
            unpack(damaged)


def test_a_file_goes_when_its_texts_are_published(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(1)])
    put_batch(writer.directory, "engine", [written(2), written(1)])
    put_file(writer.directory, f"{TEXTS}-1", pack([written(3)]))
    put_file(writer.directory, f"{AWAY}-peer-1", pack([written(4)]))
    (first, texts), (second, _), (third, _) = writer.read_files()
    assert texts == [written(1)]  # in the order in which they were written
    assert stat.S_IMODE((writer.directory / FOLDER / first).stat().st_mode) == 0o600
    assert third == f"{TEXTS}-1"
    writer.keep_texts(first, texts)
    writer.keep_texts(second, [])  # they all go elsewhere
    assert [file for file, _ in writer.read_files()] == [third]
    assert [path.name for path in writer.waiting_files(BATCH, TEXTS)] == [first, third]
    writer.publish()
    assert SuffixIndex.attach(writer.directory).tokens == 30
    assert [path.name for path in writer.waiting_files(BATCH, TEXTS, AWAY)] == [
        f"{AWAY}-peer-1",
        third,
    ]
    writer.store.close()  # the process ends
    again = opened(tmp_path)
    assert take(again) == 60
    assert not again.waiting_files(BATCH, TEXTS)
    again.store.close()


@pytest.mark.parametrize("kind", ["manifest", "segments-*"])
def test_a_damaged_history_begins_anew_where_it_lies_with_what_engines_left(
    tmp_path: Path, caplog: Any, kind: str
) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(1)])
    take(writer)
    writer.work(60.0)
    writer.store.close()  # the process ends
    put_batch(writer.directory, "engine", [written(2)])
    for file in writer.directory.glob(kind):
        file.write_bytes(file.read_bytes()[:-8])
    for _ in range(2):  # it is found again
        again = opened(tmp_path)
        assert again.directory == writer.directory
        assert take(again) == 30
        assert not again.waiting_files(BATCH)
        again.store.close()
    assert caplog.text.count("; the history begins anew") == 1


def test_a_history_whose_damage_shows_later_begins_anew_with_what_engines_left(
    tmp_path: Path, caplog: Any
) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(1)])
    take(writer)
    writer.work(60.0)
    writer.store.close()  # the process ends
    for file in writer.directory.glob("segments-*"):
        content = bytearray(file.read_bytes())
        content[-3] ^= (
            1  # in the body, which nobody reads before the problem comes again
        )
        file.write_bytes(content)
    again = opened(tmp_path)
    put_batch(again.directory, "engine", [written(1)._replace(version=1), written(2)])
    take(again)
    assert take(again) == 60
    assert not again.waiting_files(BATCH)
    assert caplog.text.count("; the history begins anew") == 1
    again.store.close()


@pytest.mark.parametrize("problems", [[], [1]])
def test_a_history_whose_files_went_is_there_again_once_there_is_room(
    tmp_path: Path, problems: list[int]
) -> None:
    """A limit on the size of files stands for a full disk."""
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(problem) for problem in problems])
    take(writer)
    shutil.rmtree(writer.directory)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.restore()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.restore()
    put_batch(writer.directory, "engine", [written(2)])
    assert take(writer) == 30 * len([*problems, 2])
    writer.store.close()


def test_a_history_that_is_damaged_and_whose_files_went_begins_anew(
    tmp_path: Path, caplog: Any
) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(1)])
    take(writer)
    writer.store.close()  # the process ends
    for file in writer.directory.glob("segments-*"):
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    again = opened(tmp_path)
    for file in again.directory.glob("segments-*"):
        file.unlink()
    put_batch(again.directory, "engine", [written(2)])
    again.restore()
    assert take(again) == 30
    assert caplog.text.count("; the history begins anew") == 1
    again.store.close()


def test_texts_that_come_twice_are_kept_once(tmp_path: Path) -> None:
    """As from a node that had no answer."""
    writer = opened(tmp_path)
    for _ in range(2):
        put_file(writer.directory, f"{TEXTS}-1", pack([written(3)]))
        assert take(writer) == 30
        assert not writer.waiting_files(TEXTS)
    writer.store.close()


def test_a_writer_that_ended_before_it_removed_a_file_has_its_texts_once(
    tmp_path: Path,
) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(1), written(2)])
    (file,) = writer.waiting_files(BATCH)
    content = file.read_bytes()
    assert take(writer) == 60
    writer.store.close()
    longer = Trajectory(1, np.arange(31, dtype=np.int32).tobytes(), 0)
    newer = written(2)._replace(version=1)
    file.write_bytes(content)
    put_batch(writer.directory, "engine", [longer, newer])  # these are other texts
    again = opened(tmp_path)
    assert take(again) == 60 + 31 + 30
    assert not again.waiting_files(BATCH)
    # another sample that is the same
    put_batch(writer.directory, "engine", [written(1)])
    assert take(again) == 60 + 31 + 30 + 30
    again.store.close()


@pytest.mark.parametrize(
    "left", [b"", b"half of a", pack(SOME)[:-1], b"\xff" * 8 + pack(SOME)[8:]]
)
def test_a_damaged_file_is_told_and_dropped(
    tmp_path: Path, caplog: Any, left: bytes
) -> None:
    writer = opened(tmp_path)
    put_file(writer.directory, f"{BATCH}-a-1", left)
    put_batch(writer.directory, "b", [written(1)])
    # not yet complete
    (writer.directory / FOLDER / f"{BATCH}-c.123.tmp").write_bytes(
        pack([written(2)])[:9]
    )
    (writer.directory / FOLDER / "last-abc").write_text("")
    assert take(writer) == 30
    assert [path.name for path in (writer.directory / FOLDER).glob(f"{BATCH}-*")] == [
        f"{BATCH}-c.123.tmp"
    ]
    assert (
        len(
            [
                record
                for record in caplog.records
                if record.message.startswith("das: history: ")
            ]
        )
        == 1
    )
    writer.store.close()


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
    # one line for one cause, and no traceback
    assert caplog.text.count("trajectories do not reach the history") == 1
    assert "Traceback" not in caplog.text
    full = False
    gathered.add(SOME[2])
    gathered.flush()
    assert left == SOME


def test_what_could_not_be_left_is_left_with_what_is_written_next(
    monkeypatch: Any,
) -> None:
    left = []
    timers = []
    monkeypatch.setattr(
        spool.threading,
        "Timer",
        lambda _, act: SimpleNamespace(start=lambda: timers.append(act)),
    )
    gathered = Gathered(lambda batch: left.extend(batch) if len(timers) > 1 else 1 / 0)
    for text in SOME:
        gathered.add(text)
        timers[-1]()
    assert (left, len(timers)) == (SOME, 3)


def test_a_file_that_two_threads_leave_is_one_of_theirs(tmp_path: Path) -> None:
    """As when a node sends a text again while it arrives."""
    (tmp_path / FOLDER).mkdir()
    contents = [bytes([i]) * 2**20 for i in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(100):
            list(
                threads.map(
                    lambda content: put_file(tmp_path, "texts-1", content), contents
                )
            )
            assert (tmp_path / FOLDER / "texts-1").read_bytes() in contents
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["texts-1"]


def test_a_spool_that_is_another_thing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IndexFileError, match="no link"):
        put_batch(tmp_path, "engine", SOME)


def test_others_have_their_turn_between_slices_of_thinning_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    writer = opened(tmp_path, max_bytes=100_000)
    rng = np.random.default_rng(0)
    slices = list[bool]()
    texts = [
        Trajectory(problem, rng.integers(0, 9, 2000).astype(np.int32).tobytes(), 0)
        for problem in range(10)
    ]
    put_batch(writer.directory, "engine", texts)
    assert take(writer) == 20_000
    shrink = HistoryStore.shrink
    with ThreadPoolExecutor(1) as another:

        def waited_for(store: HistoryStore, max_bytes: int) -> Any:
            shrunk = shrink(store, max_bytes)
            slices.append(another.submit(lambda: store.intact).result(60.0))
            return shrunk

        monkeypatch.setattr(HistoryStore, "shrink", waited_for)
        monkeypatch.setattr("das_adapter.core.tuning.SEAL_SLICE_TOKENS", 1)
        while writer.work(60.0):
            pass
    assert len(slices) > 3 and all(slices)
    assert SuffixIndex.attach(writer.directory).nbytes == writer.store.nbytes <= 100_000
    assert (
        f"{20_000 - writer.store.tokens} of 20000 tokens were dropped; {len(slices)}"
        " problems" in caplog.text
    )
    assert caplog.text.count("above das.history.max_bytes=100000") == 1


def test_what_is_published_while_a_history_is_thinned_out_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(tmp_path, max_bytes=2**16)
    tidy = HistoryRules.shrink_slice

    def published_meanwhile(
        policy: HistoryRules, store: HistoryStore, room: float
    ) -> bool:
        more = tidy(policy, store, room)
        take(writer)
        return more

    monkeypatch.setattr(HistoryRules, "shrink_slice", published_meanwhile)
    put_batch(writer.directory, "engine", [written(1)])
    take(writer)
    put_batch(writer.directory, "engine", [written(number) for number in range(500)])
    writer.work(60.0)
    assert 0 < writer.store.nbytes <= 2**16
    writer.store.close()


def test_files_do_not_pile_up_where_nobody_asks_for_a_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(tmp_path)
    most = 0
    at_once = list[int]()
    seal = HistoryStore.seal
    monkeypatch.setattr(
        HistoryStore,
        "seal",
        lambda store, *how: (at_once.append(store.staged), seal(store, *how))[1],
    )
    for number in range(1000):
        put_batch(writer.directory, "engine", [written(number)])
        if number % 50 == 49:
            for file, texts in writer.read_files():
                writer.keep_texts(file, texts)
            writer.work(1.0)
            most = max(most, len(writer.waiting_files(BATCH)))
    assert most < 250
    # all was sealed in slices before, for which no weight sync waits
    assert set(at_once) == {0}
    assert take(writer) == 1000 * 30


@pytest.mark.parametrize("together", [1, 8])
def test_what_waits_for_a_writer_that_hangs_is_bounded(
    tmp_path: Path, together: int
) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    text = bytes(10_000)
    put_file(tmp_path, f"{AWAY}-peer-1", bytes(10**6))  # is bounded elsewhere
    (folder / f"{BATCH}-x").mkdir()  # odd, and no reason to fail
    for version in range(0, 48, together):
        batch = [Trajectory(1, text, version + i) for i in range(together)]
        put_batch(tmp_path, f"engine{version % 3}", batch, max_bytes=160_000)
        left = [path for path in folder.glob(f"{BATCH}-*") if path.is_file()]
        assert sum(path.stat().st_size for path in left) <= 160_000 // spool.OUTBOX
    newest = sorted(left, key=lambda path: path.stat().st_mtime_ns)[-1]
    assert unpack(newest.read_bytes())[-1].version == 47
    put_batch(tmp_path, "engine", [Trajectory(1, bytes(10**6), 0)], max_bytes=160_000)
    left = [path for path in folder.glob(f"{BATCH}-*") if path.is_file()]
    assert len(left) == 1  # one text may be larger


def test_a_flush_does_not_wait_for_another_that_hangs() -> None:
    hangs = threading.Event()
    gathered = Gathered(lambda batch: hangs.wait(60))
    gathered.add(SOME[0])
    thread = threading.Thread(target=gathered.flush)
    thread.start()
    gathered.flush(0.05)  # it would be half a minute
    assert thread.is_alive()
    hangs.set()
    thread.join()


def test_files_stay_until_all_their_texts_are_published(tmp_path: Path) -> None:
    """A writer that is killed between two generations takes them again."""
    writer = opened(tmp_path)
    for problem in range(4):
        put_batch(writer.directory, "engine", [written(problem)])
    for file, texts in writer.read_files():
        writer.keep_texts(file, texts)
    writer.publish(tokens=31)
    assert 0 < writer.store.staged < 120
    assert len(writer.waiting_files(BATCH)) == 4
    writer.publish()
    assert not writer.store.staged and not writer.waiting_files(BATCH)
    writer.store.close()


def test_files_stay_where_publishing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(1)])
    for file, texts in writer.read_files():
        writer.keep_texts(file, texts)

    def fails(tokens: int) -> int:
        assert len(writer.waiting_files(BATCH)) == 1
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(writer.store, "seal", fails)
        with pytest.raises(OSError, match="no space"):
            writer.publish()
    assert len(writer.waiting_files(BATCH)) == 1
    assert take(writer) == 30
    writer.store.close()


def test_what_the_history_takes_itself_is_no_taken_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it thins itself out."""
    disk = SimpleNamespace(total=800, free=300)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    assert spool.available_bytes(tmp_path, 0) == 300 - 100
    assert spool.available_bytes(tmp_path, 0, held_bytes=400) == 700 - 100


def test_a_history_that_begins_anew_leaves_the_engines_their_lock(
    tmp_path: Path,
) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(1)])
    take(writer)
    writer.store.close()
    users = writer.directory / spool.USERS
    users.touch()
    before = users.stat().st_ino
    (writer.directory / "manifest").write_bytes(b"damaged")
    again = opened(tmp_path)
    assert again.store.tokens == 0 and users.stat().st_ino == before
    again.store.close()


def test_the_memory_of_many_small_problems_counts_as_part_of_max_bytes(
    tmp_path: Path, caplog: Any
) -> None:
    """As HTTP clients make them, with ever new prompts and short answers."""
    rules = HistoryRules(HistoryConfig(max_bytes=2**20))
    store = HistoryStore(tmp_path / "history", rules.window)
    text = np.arange(10, dtype=np.int32).tobytes()
    for version in range(4):
        batch = [(1000 * version + problem, text, version) for problem in range(1000)]
        rules.add_and_seal(store, batch)
        for _ in range(100):
            if not rules.shrink_slice(store):
                break
        assert store.nbytes <= 2**20
    assert 1000 < store.problems < 2**20 / tuning.CPP_PROBLEM_BYTES
    assert store.nbytes > 0 and "das.history.max_bytes=1048576" in caplog.text
    store.close()


def test_of_what_waits_for_a_writer_the_oldest_is_given_up(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for version in range(12):
        before = set((tmp_path / FOLDER).iterdir())
        put_batch(tmp_path, "engine", [written(1)._replace(version=version)])
        [newest] = set((tmp_path / FOLDER).iterdir()) - before
        os.utime(newest, (version, version))
    size = newest.stat().st_size
    last = [written(1)._replace(version=12)]
    put_batch(tmp_path, "engine", last, max_bytes=4 * size * spool.OUTBOX)
    left = [unpack(path.read_bytes()) for path in (tmp_path / FOLDER).iterdir()]
    assert sorted(text.version for [text] in left) == [9, 10, 11, 12]


def test_what_cannot_be_left_is_kept_up_to_a_bound(monkeypatch: Any) -> None:
    monkeypatch.setattr(spool, "KEPT_BYTES", 200)
    asked = []

    def leave(batch: Any) -> None:
        asked.append(len(batch))
        raise OSError("no space")

    gathered = Gathered(leave)
    for _ in range(4):
        gathered.add(written(1))  # 120 bytes
        gathered.flush()
    assert asked == [1, 2, 1, 2]


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).mkdir()

    def write_half(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        raise OSError("no space")

    monkeypatch.setattr(spool, "write_private", write_half)
    with pytest.raises(OSError, match="no space"):
        put_file(tmp_path, "texts-1", bytes(100))
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_bytes_behind_the_texts_are_no_trajectories() -> None:
    with pytest.raises(ValueError, match="bytes of trajectories"):
        unpack(pack(SOME) + b"x")


def test_a_history_whose_files_went_is_published_anew_without_a_new_text(
    tmp_path: Path,
) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [written(1), written(2)])
    assert take(writer) == 60
    for path in writer.directory.glob("*"):
        if path.is_file():
            path.unlink()
    writer.restore()
    assert take(writer) == 60
