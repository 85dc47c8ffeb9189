"""What a node's history promises: once in memory, mapped by many, never wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_history import OwnHistory

from das_adapter.config import HistoryConfig
from das_adapter.core import tuning
from das_adapter.core.history import HistoryRules
from das_adapter.core.index import IndexFileError, SuffixIndex
from das_adapter.core.index.store import HistoryStore, newest_in, problems_in
from das_adapter.errors import DasError

POEM = list(range(11, 21))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    with HistoryStore(tmp_path / "history") as store:
        yield store


def drafted(
    index: SuffixIndex, problem: int = 1, prefix: tuple[int, ...] = ()
) -> list[int]:
    handle = index.open(problem, [], prefix=prefix)
    try:
        return index.draft([handle], [20], 0.0)[0][0].tolist()
    finally:
        index.close(handle, keep=False)


def fill(store: HistoryStore, steps: int, problems: int = 3, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for version in range(steps):
        for problem in range(problems):
            store.add(problem, rng.integers(0, 9, 60), version)
        store.seal()


def settle(store: HistoryStore) -> int:
    """Do what there is to do between two seals; return the generation."""
    while store.work():
        pass
    return store.generation


def names(store: HistoryStore, kind: str = "segments") -> list[str]:
    return sorted(p.name for p in store.directory.glob(f"{kind}-*"))


def test_an_index_that_goes_over_to_a_store_keeps_its_live_requests(
    store: HistoryStore,
) -> None:
    index = OwnHistory()
    index.add(1, POEM[::-1], 0)
    index.seal()
    live = index.open(1, [], prefix=POEM[:1])
    store.add(1, POEM, 0)
    store.seal()
    index.map(store.directory)
    assert index.tokens == len(POEM)
    assert index.draft([live], [20], 0.0)[0][0].tolist() == POEM[1:]


def test_what_is_sealed_is_drafted_after_the_next_refresh(store: HistoryStore) -> None:
    index = SuffixIndex.attach(store.directory)
    assert (index.refresh(), index.tokens) == (0, 0)
    store.add(1, POEM, 0)
    generation = store.seal()
    assert drafted(index) == []
    assert index.refresh() == index.generation == generation
    assert drafted(index) == POEM
    assert (index.tokens, index.problems, index.nbytes) == (
        store.tokens,
        store.problems,
        store.nbytes,
    )


def test_an_empty_directory_is_an_empty_history(tmp_path: Path) -> None:
    index = SuffixIndex.attach(tmp_path)
    assert (index.refresh(), index.tokens, drafted(index)) == (0, 0, [])
    with pytest.raises(FileNotFoundError):
        index.refresh(1)


def test_many_steps_end_in_one_segment_and_few_files(store: HistoryStore) -> None:
    fill(store, 20)
    settle(store)
    index = SuffixIndex.attach(store.directory)
    assert index.tokens == store.tokens == 20 * 3 * 60
    for problem in range(3):
        assert drafted(index, problem, (1, 2))
    sealed = store.nbytes - 3 * tuning.CPP_PROBLEM_BYTES
    assert sealed <= store.file_bytes <= sealed * 4 / 3 + 1000
    store.add(9, POEM, 20)
    for _ in range(3):  # what a generation lacks stays for two more
        store.seal()
        settle(store)
    assert len(names(store)) <= 4
    assert len(names(store, "manifest")) == 3


def test_problems_that_come_one_by_one_end_in_few_files(store: HistoryStore) -> None:
    """Those that the last generations had stay meanwhile, too."""
    rng = np.random.default_rng(0)
    whole = OwnHistory()
    for step in range(4):
        for problem in range(100 * step, 100 * step + 100):
            text = rng.integers(0, 9, 60)
            store.add(problem, text, step)
            whole.add(problem, text, step)
            while store.work(every=True):
                pass
            assert len(names(store)) <= 100
        store.seal()
    whole.seal()
    for _ in range(3):
        store.seal()
    assert len(names(store)) <= 30
    assert store.file_bytes <= store.nbytes * 4 / 3
    index = SuffixIndex.attach(store.directory)
    assert index.tokens == store.tokens == whole.tokens
    for problem in range(400):
        assert drafted(index, problem, (1, 2)) == drafted(whole, problem, (1, 2))


NO_ROOM_TO_MAP = """
import resource, sys
from pathlib import Path
import numpy as np
from das_adapter.core.index.store import HistoryStore

store = HistoryStore(sys.argv[1])
store.add(1, np.random.default_rng(0).integers(0, 50_000, 1_000_000), 0)
store.work(every=True)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**21, -1))
try:
    store.seal()
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
for _ in range(3):
    store.seal()
print(len([*store.directory.glob("segments-*")]))
"""


def test_a_file_that_cannot_be_mapped_goes(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", NO_ROOM_TO_MAP, str(tmp_path / "store")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (
        0,
        "Cannot allocate memory\n1\n",
    ), done.stderr


def test_an_engine_maps_a_node_s_history_and_holds_no_copy(store: HistoryStore) -> None:
    rng = np.random.default_rng(0)
    store.add(1, rng.integers(0, 50_000, 400_000), 0)
    store.seal()
    index = SuffixIndex.attach(store.directory)
    drafted(index)  # read once
    mapped = 0
    private = 0
    with open("/proc/self/smaps") as lines:
        ours = False
        for line in lines:
            if "-" in line.split()[0]:
                ours = str(store.directory) in line
            elif ours and line.startswith("Size:"):
                mapped += int(line.split()[1]) * 1024
            elif ours and line.startswith("Anonymous:"):
                private += int(line.split()[1])
    assert mapped >= 2 * store.nbytes > 0  # the store's mapping and the index's
    assert private == 0


def test_files_that_nobody_reads_any_more_are_mapped_no_more(
    store: HistoryStore,
) -> None:
    index = SuffixIndex.attach(store.directory)
    mapped = []
    for version in range(10):
        store.add(1, POEM, version)
        store.window = 1
        store.seal()
        index.refresh()
        assert drafted(index) == POEM
        mapped.append(Path("/proc/self/maps").read_text().count(f"{store.directory}/"))
    assert mapped == [2] * 10  # of the store and of the index


def test_files_beyond_the_window_go_two_generations_later(store: HistoryStore) -> None:
    store.add(1, POEM, 0)
    store.seal()
    old = names(store)
    store.add(1, POEM[::-1], 5)
    store.window = 1
    store.seal()
    assert store.tokens == len(POEM)
    index = SuffixIndex.attach(store.directory)
    assert drafted(index, 1) == POEM[::-1]
    assert set(old) <= set(names(store))
    store.seal()
    store.seal()
    assert not set(old) & set(names(store))
    assert drafted(index, 1) == POEM[::-1]


def test_what_is_thinned_out_is_published(store: HistoryStore) -> None:
    fill(store, 8, problems=12)
    settle(store)
    generation = store.generation
    budget = store.nbytes // 2
    assert store.shrink(budget).dropped == 0
    assert store.generation == generation + 1
    index = SuffixIndex.attach(store.directory)
    assert index.nbytes == store.nbytes <= budget
    assert all(drafted(index, problem, (1, 2)) for problem in range(12))
    assert store.shrink(budget).tokens == 0
    assert store.generation == generation + 1
    assert store.shrink(0).dropped == 12
    index.refresh()
    assert index.tokens == store.tokens == store.nbytes == 0


def test_a_history_that_is_thinned_out_in_slices_is_the_same(
    store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 8, problems=30)
    settle(store)
    store.save(tmp_path / "saved")
    budget = store.nbytes * 2 // 3
    generation = store.generation
    with HistoryStore(tmp_path / "at once") as other:
        other.absorb(tmp_path / "saved")
        at_once = other.shrink(budget)
    monkeypatch.setattr("das_adapter.core.tuning.SEAL_SLICE_TOKENS", 1000)
    slices = []
    while store.nbytes > budget:
        assert store.generation == generation
        slices.append(store.shrink(budget))
    # problems of 480 tokens each
    assert len(slices) == -(-sum(part.thinned for part in slices) // 3)
    assert at_once == tuple(map(sum, zip(*slices, strict=True)))
    assert store.generation == generation + 1
    index, same = (
        SuffixIndex.attach(directory)
        for directory in (store.directory, tmp_path / "at once")
    )
    assert (index.tokens, index.nbytes) == (same.tokens, same.nbytes)
    for problem in range(30):
        assert all(
            map(np.array_equal, index.flat(problem, 2**20), same.flat(problem, 2**20))
        )


@pytest.mark.parametrize("merged", [False, True])
def test_of_a_problem_too_large_to_be_thinned_out_the_oldest_visits_go(
    store: HistoryStore, merged: bool
) -> None:
    texts = np.random.default_rng(0).integers(0, 99, (6, 200_000))
    for version, text in enumerate(texts):
        store.add(1, text, version)
        store.seal()
    if merged:
        settle(store)
    files = names(store)
    assert store.shrink(store.nbytes * 3 // 4)[:3] == (3 * 200_000, 1, 0)
    assert merged or names(store) == files  # what stays is not written again
    index = SuffixIndex.attach(store.directory)
    tokens, places = index.flat(1, 2**22)
    assert np.bincount(places >> 24).tolist() == [200_000] * 3
    assert np.array_equal(tokens[tokens >= 0], texts[3:].ravel())


@pytest.mark.parametrize("tokens", [200_000, 2**40])
def test_a_visit_too_large_for_the_budget_is_thinned_out(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr("das_adapter.core.tuning.SEAL_SLICE_TOKENS", tokens)
    for version in range(2):
        store.add(1, np.random.default_rng(version).integers(0, 9, 600_000), version)
    store.seal()
    budget = store.nbytes // 4
    sizes = [store.tokens]
    while store.nbytes > budget:
        store.shrink(budget)
        sizes.append(store.tokens)
    assert len(sizes) == 3 and sizes[1] == 600_000 > sizes[2] > 0


def test_with_scope_global_what_all_prompts_wrote_stays(
    store: HistoryStore, tmp_path: Path
) -> None:
    policy = HistoryRules(HistoryConfig(scope="global"))
    rng = np.random.default_rng(0)
    texts = rng.permutation(6000).reshape(300, 20).astype(np.int32)
    for version, text in enumerate(texts[:280]):
        policy.add_and_seal(store, [(version, text.tobytes(), version)])
        while store.work():
            pass
    store.save(tmp_path / "saved")
    with HistoryStore(tmp_path / "resumed") as resumed:
        resumed.absorb(tmp_path / "saved")
        for version, text in enumerate(texts[280:], 280):
            policy.add_and_seal(resumed, [(version, text.tobytes(), version)])
        index = SuffixIndex.attach(resumed.directory)
        assert (index.problems, index.tokens) == (1, texts.size)
        key = policy.key(5)
        assert all(
            drafted(index, key, tuple(text[:2])) == text[2:].tolist() for text in texts
        )
        places = index.flat(key, 2**20)[1]
        # an older visit counts as the 255th
        assert np.bincount(places >> 24).tolist() == [20] * 255 + [45 * 20]


def test_a_late_response_does_not_write_a_large_history_again(
    store: HistoryStore,
) -> None:
    rng = np.random.default_rng(0)
    written = {}
    texts = rng.integers(0, 50_000, (40, 200))
    store.add(0, rng.integers(0, 50_000, 400_000), 0)
    store.seal()
    for version, text in enumerate(texts):
        store.add(0, text, version)
        while store.work(every=True):
            written.update(
                {name: (store.directory / name).stat().st_size for name in names(store)}
            )
    store.seal()
    assert sum(written.values()) < 2 * store.nbytes
    index = SuffixIndex.attach(store.directory)
    assert all(
        drafted(index, 0, tuple(text[:4]))[:16] == text[4:20].tolist() for text in texts
    )


def test_the_window_goes_into_the_generation_of_the_seal(store: HistoryStore) -> None:
    for version in range(4):
        store.add(1, POEM, version)
        store.window = 2
        generation = store.seal()
        assert SuffixIndex.attach(store.directory).tokens == min(2, version + 1) * len(
            POEM
        )
        assert settle(store) - generation == (version > 0)  # the merge


def test_a_reader_two_generations_behind_still_maps_its_own(
    store: HistoryStore,
) -> None:
    rng = np.random.default_rng(0)
    generations = []
    for version in range(4):
        store.add(1, [version] * 3 + rng.integers(10, 20, 30).tolist(), version)
        store.window = 1
        generations.append(store.seal())  # nothing of the last step stays
        settle(store)
    behind = store.generation - 2
    lagging = SuffixIndex.attach(store.directory)
    assert lagging.refresh(behind) == behind
    assert lagging.tokens in (0, 33)
    held = SuffixIndex.attach(store.directory)
    before = drafted(held)
    for version in range(4, 10):
        store.add(1, [version, 77, 78], version)
        store.window = 1
        store.seal()
    assert drafted(held) == before  # its files are unlinked, its mapping is not
    with pytest.raises(FileNotFoundError):
        held.refresh(generations[0])
    assert drafted(held) == before
    assert held.refresh() == store.generation
    assert drafted(held) == [9, 77, 78]


def test_nobody_else_reads_the_history(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = tmp_path / "history"
        directory.mkdir()  # as an earlier writer may have left it
        with HistoryStore(directory) as store:
            fill(store, 3)
            settle(store)
            assert directory.stat().st_mode & 0o777 == 0o700
            assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {
                0o600
            }
            store.save(tmp_path / "saved")
            assert (
                tmp_path / "saved"
            ).stat().st_mode & 0o777 == 0o666  # as the user's umask says
    finally:
        os.umask(before)


def test_a_link_or_another_users_directory_is_no_history(
    tmp_path: Path, store: HistoryStore
) -> None:
    fill(store, 1)
    (tmp_path / "link").symlink_to(store.directory)
    (tmp_path / "file").touch()
    places = [tmp_path / "link", tmp_path / "file"]
    if os.geteuid() == 0:  # only root can make one
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", 12345, 12345)
        places.append(tmp_path / "theirs")
    for place in places:
        for use in (HistoryStore, SuffixIndex.attach):
            with pytest.raises(
                (IndexFileError, FileExistsError),
                match=r"allowed: a directory of user|File exists",
            ):
                use(place)


def test_a_linked_or_foreign_file_is_not_mapped(
    store: HistoryStore, tmp_path: Path
) -> None:
    fill(store, 1)
    segments = next(store.directory.glob("segments-*"))
    segments.rename(tmp_path / "elsewhere")
    segments.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        SuffixIndex.attach(store.directory).refresh()
    if os.geteuid() == 0:
        segments.unlink()
        shutil.copy(tmp_path / "elsewhere", segments)
        os.chown(segments, 12345, 12345)
        with pytest.raises(IndexFileError, match="another user's"):
            SuffixIndex.attach(store.directory).refresh()


def test_there_is_one_writer(store: HistoryStore) -> None:
    with pytest.raises(DasError, match="another store writes there"):
        HistoryStore(store.directory)
    store.close()
    HistoryStore(store.directory).close()


def test_a_closed_store_leaves_the_directory_to_the_next_one(
    store: HistoryStore, tmp_path: Path
) -> None:
    """Threads may still have it in their hands: what they read is there, what they
    would write goes elsewhere.
    """
    store.add(1, POEM, 0)
    store.seal()
    store.save(tmp_path / "saved")
    store.close()
    with HistoryStore(store.directory) as following:
        following.add(2, POEM, 0)
        following.seal()
        files = sorted(path.read_bytes() for path in store.directory.iterdir())
        assert not store.work()
        for change in (
            lambda: store.add(1, POEM, 1),
            store.seal,
            lambda: store.shrink(0),
            lambda: store.absorb(tmp_path / "saved"),
        ):
            with pytest.raises(DasError, match="is closed"):
                change()
        store.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "saved").read_bytes()
        assert sorted(path.read_bytes() for path in store.directory.iterdir()) == files


def test_a_store_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    with HistoryStore(tmp_path) as store:
        fill(store, 3)
    (tmp_path / "segments-00000000000000ff").write_bytes(b"of a writer that died")
    (tmp_path / "manifest.77.tmp").write_bytes(b"")
    with HistoryStore(tmp_path) as again:
        assert again.tokens == 3 * 3 * 60
        generation = again.generation
        fill(again, 4, seed=1)
        settle(again)
        assert again.generation > generation
        assert not [
            p.name for p in tmp_path.iterdir() if p.name.endswith((".tmp", "ff"))
        ]


def test_a_directory_begun_anew_is_mapped_anew(tmp_path: Path) -> None:
    directory = tmp_path / "history"
    indexes = []
    for text in (POEM, [77, 78]):
        with HistoryStore(directory) as store:
            store.add(1, text, 0)
            store.seal()
        indexes = indexes or [SuffixIndex.attach(directory)]
        indexes[0].refresh()
        assert drafted(indexes[0]) == text
        shutil.rmtree(directory)


# Damage


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with HistoryStore(tmp_path_factory.mktemp("store")) as store:
        fill(store, 2)
        settle(store)
        files = {
            p.name: p.read_bytes()
            for p in store.directory.iterdir()
            if p.name != "writer"
        }
        needed = {n: files[n] for n in ("manifest", names(store)[-1])}
    return needed


def laid_out(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def damaged(path: Path) -> Path:
    """Put a file with a flipped bit in the place of one that may be mapped."""
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.unlink()
    path.write_bytes(content)
    return path


def use_all(index: SuffixIndex) -> None:
    for problem in range(3):
        drafted(index, problem)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_an_error_before_it_is_a_draft(
    sound: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    name = data.draw(st.sampled_from(sorted(sound)))
    content = bytearray(sound[name])
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    folder = laid_out(
        sound | {name: bytes(content)}, tmp_path_factory.getbasetemp() / "flipped"
    )
    with pytest.raises(IndexFileError, match=name):
        use_all(SuffixIndex.attach(folder))


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_cut_anywhere_is_refused_when_it_is_mapped(
    sound: dict[str, bytes], tmp_path: Path, which: int
) -> None:
    name = sorted(sound)[which]
    for size in [*range(0, 170, 7), len(sound[name]) // 2, len(sound[name]) - 1]:
        folder = laid_out(sound | {name: sound[name][:size]}, tmp_path / "cut")
        with pytest.raises(IndexFileError, match=name):
            SuffixIndex.attach(folder)


def test_another_store_s_file_of_the_same_name_is_refused(
    sound: dict[str, bytes], tmp_path: Path
) -> None:
    with HistoryStore(tmp_path / "other") as other:
        fill(other, 2, seed=5)
        settle(other)
    name = next(n for n in sound if n != "manifest")
    foreign = (other.directory / names(other)[-1]).read_bytes()
    assert len(foreign) == len(sound[name])
    with pytest.raises(IndexFileError, match="not the file that the manifest names"):
        SuffixIndex.attach(laid_out(sound | {name: foreign}, tmp_path / "mixed"))


def test_after_a_failed_refresh_the_history_is_what_it_was(store: HistoryStore) -> None:
    store.add(1, POEM, 0)
    generation = store.seal()
    index = SuffixIndex.attach(store.directory)
    handle = index.open(1, [])
    store.add(1, [77, 78], 1)
    store.seal()
    settle(store)
    damaged(store.directory / names(store)[-1])
    for _ in range(2):
        with pytest.raises(IndexFileError, match="problem 1"):
            index.refresh()
        assert index.draft([handle], [20], 0.0)[0][0].tolist() == POEM
        assert index.generation == generation


def test_a_store_does_not_pass_damage_on(store: HistoryStore, tmp_path: Path) -> None:
    fill(store, 8)
    settle(store)
    store.close()
    newest = damaged(store.directory / names(store)[-1])
    with HistoryStore(store.directory) as again:
        for call in (
            lambda: again.shrink(again.nbytes // 2),
            lambda: again.save(tmp_path / "saved"),
        ):
            with pytest.raises(IndexFileError, match=newest.name):
                call()


def test_after_a_seal_that_failed_only_what_is_not_sealed_waits(
    store: HistoryStore,
) -> None:
    store.add(1, POEM, 0)
    store.seal()
    store.close()
    damaged(store.directory / names(store)[-1])
    with HistoryStore(store.directory) as again:
        for problem in (2, 1):
            again.add(problem, POEM, 1)
        with pytest.raises(IndexFileError):
            again.seal()
        assert (again.staged, again.tokens) == (len(POEM), 2 * len(POEM))


def test_a_reader_follows_what_changed_and_a_new_one_finds_all(
    store: HistoryStore,
) -> None:
    for problem in range(1100):  # more than a complete manifest may always have
        store.add(problem, [problem, 8, 9], 0)
    store.seal()
    early = SuffixIndex.attach(store.directory)
    for version in (1, 2, 3):
        store.add(version, POEM[version:], version)
        store.add(5000 + version, POEM, version)
        store.window = 1
        generation = store.seal()
    assert len(names(store, "whole")) == 1
    late = SuffixIndex.attach(store.directory)
    assert early.refresh() == late.generation == generation
    for index in (early, late):
        assert (index.tokens, index.problems, index.nbytes) == (
            store.tokens,
            1103,
            store.nbytes,
        )
        assert [drafted(index, problem) for problem in (0, 2, 5003)] == [
            [0, 8, 9],
            POEM[2:],
            POEM,
        ]
    assert late.refresh(generation - 1) == generation - 1
    assert (drafted(late, 3), drafted(late, 5003)) == ([3, 8, 9], [])
    store.shrink(store.nbytes - 1)
    early.refresh()
    assert (early.tokens, early.problems) == (store.tokens, store.problems)


def test_live_text_is_counted_until_it_is_forgotten() -> None:
    index = SuffixIndex()
    handle = index.open(1, [])
    sizes = []
    for _ in range(3):
        index.extend(handle, POEM * 100)
        sizes.append(index.live_bytes)
    assert 3 * 1000 < sizes[0] < sizes[1] < sizes[2]
    index.close(handle)
    assert index.live_bytes == sizes[-1]
    index.clear_live()
    assert index.live_bytes == 0


def test_what_is_sealed_ahead_is_published_by_the_seal(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(1, POEM, 0)
    assert (settle(store), store.staged) == (0, len(POEM))  # more may come of it
    monkeypatch.setattr("das_adapter.core.tuning.SEAL_QUIET_S", -1.0)
    assert settle(store) == 0
    assert (store.staged, store.tokens, len(names(store))) == (0, len(POEM), 1)
    index = SuffixIndex.attach(store.directory)
    assert drafted(index) == []
    assert index.refresh(store.seal()) == 1
    assert drafted(index) == POEM


def test_a_seal_may_leave_the_rest_for_the_next_generation(store: HistoryStore) -> None:
    for problem in (1, 2, 3):
        store.add(problem, POEM, 0)
    store.seal(tokens=len(POEM) + 1)
    index = SuffixIndex.attach(store.directory)
    assert (index.problems, store.staged) == (2, len(POEM))
    store.seal()
    index.refresh()
    assert (index.problems, store.staged) == (3, 0)


Both = tuple[HistoryStore, HistoryStore]


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    with (
        HistoryStore(tmp_path / "here") as here,
        HistoryStore(tmp_path / "there") as there,
    ):
        yield here, there


def test_problems_are_given_to_another_store_and_draft_there_as_before(
    both: Both, tmp_path: Path
) -> None:
    here, there = both
    fill(here, 5)
    before = SuffixIndex.attach(here.directory)
    there.add(1, POEM, 9)  # written since
    there.seal()
    here.give(tmp_path / "given", [0, 1])
    there.absorb(tmp_path / "given")
    there.seal()
    moved = SuffixIndex.attach(there.directory)
    assert (before.problems, moved.problems) == (3, 2)
    assert moved.tokens == before.tokens * 2 // 3 + len(POEM)
    assert drafted(moved, 0, (1, 2)) == drafted(before, 0, (1, 2))
    assert drafted(moved, 1, tuple(POEM[:3])) == POEM[3:]
    there.add(1, POEM, 10)
    there.window = 2
    there.seal()
    moved.refresh()
    assert moved.tokens == before.tokens // 3 + 2 * len(POEM)
    there.close()
    with HistoryStore(tmp_path / "there") as again:
        assert again.tokens == moved.tokens


def test_of_a_file_only_the_problems_asked_for_are_taken(
    both: Both, tmp_path: Path
) -> None:
    here, there = both
    fill(here, 3)
    here.save(tmp_path / "saved")
    assert set(problems_in(tmp_path / "saved").tolist()) == {0, 1, 2}
    assert newest_in(tmp_path / "saved") == 2
    there.absorb(tmp_path / "saved", [2, 5])
    there.seal()
    assert there.problems == 1 and drafted(SuffixIndex.attach(there.directory), 2)
    assert there.newest == 2
    with pytest.raises(IndexFileError):
        there.absorb(damaged(tmp_path / "saved"), [0, 1, 2])
    assert there.problems == 1


def test_a_visitor_is_drafted_from_until_its_requests_are_gone(
    both: Both, tmp_path: Path
) -> None:
    here, there = both
    fill(here, 2, problems=2)
    there.add(5, POEM, 1)
    there.seal()
    there.give(tmp_path / "guests", [5])
    index = SuffixIndex.attach(here.directory)
    early = index.open(5, [])
    assert index.age(early) is None
    index.map_guest_history(tmp_path / "guests")
    (tmp_path / "guests").unlink()
    assert index.draft([early], [20], 0.0)[0][0].tolist() == POEM == drafted(index, 5)
    assert index.age(early) == 0
    for version in range(2, 6):  # more generations than one that is behind can follow
        here.add(1, POEM, version)
        here.seal()
    index.refresh()
    index.clear_live()
    assert index.draft([early], [20], 0.0)[0][0].tolist() == POEM  # it is still open
    index.close(early)
    index.clear_live()
    assert (index.tokens, index.problems, drafted(index, 5)) == (
        here.tokens,
        here.problems,
        [],
    )


def test_a_visitor_gives_way_to_history_of_its_own(both: Both, tmp_path: Path) -> None:
    here, there = both
    there.add(5, POEM, 1)
    there.seal()
    there.give(tmp_path / "guests", [5])
    index = SuffixIndex.attach(here.directory)
    index.map_guest_history(tmp_path / "guests")
    here.add(5, POEM[::-1], 2)
    here.seal()
    index.refresh()
    assert (drafted(index, 5), index.tokens) == (POEM[::-1], len(POEM))
    index.map_guest_history(tmp_path / "guests")  # it comes too late
    index.clear_live()
    assert (drafted(index, 5), index.tokens) == (POEM[::-1], len(POEM))


def test_the_index_of_a_long_response_is_bounded(store: HistoryStore) -> None:
    index = SuffixIndex()
    rng = np.random.default_rng(0)
    handle = index.open(1, [])
    sizes = []
    for _ in range(16):
        index.extend(handle, rng.integers(0, 100_000, 2**13))
        # without the text
        sizes.append(index.live_bytes - 4 * 2**13 * (len(sizes) + 1))
    assert max(sizes) <= 1.1 * max(sizes[:4])
    text = rng.integers(0, 100_000, 20)
    index.extend(handle, np.concatenate([text, text[:10]]))
    assert index.draft([handle], [10], 0.0)[0][0].tolist() == text[10:].tolist()


def test_responses_of_a_problem_that_grow_long_together_are_tidied_up_together() -> (
    None
):
    """For each of them that becomes too long to be found whole, the places of all were
    looked through again.
    """
    index = SuffixIndex()
    rng = np.random.default_rng(0)
    tidied = 0
    handles = [index.open(1, []) for _ in range(8)]
    for _ in range(50):
        for handle in handles:
            before = index.live_bytes
            index.extend(handle, rng.integers(0, 1000, 1000))
            tidied += index.live_bytes < before
    assert 1 <= tidied <= 3
