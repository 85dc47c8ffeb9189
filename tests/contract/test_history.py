"""The run's history under real Ray, whatever happens to its writer, its files or its
messages.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")
from omegaconf import OmegaConf  # noqa: E402

from das_adapter.config import HistoryConfig, parse  # noqa: E402
from das_adapter.core.index import SuffixIndex  # noqa: E402
from das_adapter.core.index.store import HistoryStore, problems_in  # noqa: E402
from das_adapter.core.length import RESPONSE  # noqa: E402
from das_adapter.core.tuning import HISTORY_WINDOW as WINDOW  # noqa: E402
from das_adapter.errors import DasError  # noqa: E402
from das_adapter.protocol.label import Label  # noqa: E402
from das_adapter.protocol.messages import (  # noqa: E402
    Published,
    Refresh,
    Trajectory,
    pack,
)
from das_adapter.protocol.metrics import Counters  # noqa: E402
from das_adapter.protocol.spool import put_batch, put_file  # noqa: E402
from das_adapter.service import checkpoint as saved  # noqa: E402
from das_adapter.service import ledger as ledger_module  # noqa: E402
from das_adapter.service import session  # noqa: E402
from das_adapter.service.ledger import ledger  # noqa: E402
from das_adapter.service.node import NodeHistory  # noqa: E402
from das_adapter.service.session import Session  # noqa: E402
from das_adapter.verl import hooks  # noqa: E402

DAS = {"drafter": "history", "history": {"max_bytes": "64MiB"}}
CONFIG = HistoryConfig(max_bytes=2**26)
POEM = np.arange(11, 41, dtype=np.int32)
TOKENIZER = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})


class Engine:
    """An engine that writes what it is told to, and what it hears at weight syncs."""

    def __init__(
        self, answers: tuple[dict[str, Any], ...] | None = ({"generation": 1},)
    ):
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self._answers = answers
        self.guests = SuffixIndex()
        """The history of other nodes that it was given."""
        self.brought: list[int] = []
        self.session = Session(parse(DAS), self._rpc)

    def _rpc(
        self, command: str, payload: dict[str, Any], timeout: float
    ) -> list[list[Any]]:
        assert 0 < timeout <= session.PATIENCE_S
        if self._answers is None:
            raise TimeoutError("no answer")
        self.heard.append((command, payload))
        for file in payload.get("files", ()):
            self.guests.map_guest_history(file)
            self.brought += problems_in(file).tolist()
        return [
            [Counters(tokens=7).read_and_reset()]
            if command == "stats"
            else list(self._answers)
        ]

    def write(self, problem: int, text: np.ndarray, version: int) -> None:
        self.session.record_response(Label(problem, seed=1), text, 0.0, 1.0, version)

    def sync(self, version: int) -> Refresh:
        self.session.sync(version)
        return Refresh(**self.heard[-1][1])


@pytest.fixture(scope="module")
def job(ray_address: str) -> Iterator[None]:
    ray.init(ray_address, log_to_driver=False)
    # Ray's workers can't import a test
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ledger()
    yield
    ray.shutdown()


@pytest.fixture
def unsynced(job: None) -> None:
    """A run that has had no weight sync."""
    ledger_module.end_earlier_run()
    ray.get(ledger().__ray_ready__.remote())


class Alone(NodeHistory):
    """A history in this process, at home in all problems."""

    def __init__(
        self, root: Path, name: str = "history", config: HistoryConfig = CONFIG
    ):
        super().__init__(config, name, root=str(root), grace_s=1.0)

    def leave(self, engine: str, *trajectories: Trajectory) -> None:
        """Let an engine leave what it wrote."""
        put_batch(self.directory(), engine, trajectories)

    def push(self, engine: str, *trajectories: Trajectory) -> None:
        self.leave(engine, *trajectories)
        self.tick()

    def published(self, version: int) -> Published:
        return self.sync(version, 0)[0]

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in (self.writer.directory / "spool").iterdir())


@pytest.fixture
def writer(job: None, tmp_path: Path) -> Alone:
    return Alone(tmp_path)


def figures_of(history: Any) -> dict[str, Any]:
    """Ask the actor of a history for its size, its newest weight version, its place and
    its process's id.
    """

    def figures(of: NodeHistory) -> dict[str, Any]:
        store = of.writer.store
        size = {"tokens": store.tokens, "newest": store.newest}
        return {**size, "directory": str(store.directory), "pid": os.getpid()}

    return ray.get(
        history.__ray_call__.options(concurrency_group="peers").remote(figures)
    )


def tokens(history: tuple[str, int]) -> int:
    return mapped(history).tokens


def mapped(history: tuple[str, int]) -> SuffixIndex:
    index = SuffixIndex.attach(history[0])
    index.refresh(history[1])
    return index


def drafted(index: SuffixIndex, problem: int = 1) -> list[int]:
    return index.draft([index.open(problem, [])], [40], 0.0)[0][0].tolist()


def janitors(directory: str) -> list[Path]:
    """Processes that will remove a directory."""
    return [
        p
        for p in Path("/proc").glob("[0-9]*/cmdline")
        if directory.encode() in _content(p)
    ]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def until(done: Callable[[], Any], tries: int = 120) -> None:
    for _ in range(tries):
        if done():
            return
        time.sleep(0.5)
    raise AssertionError("it never came true")


def test_what_engines_write_is_published_at_the_weight_sync(job: None) -> None:
    here = Engine()
    sibling = Engine()
    here.write(1, POEM, 0)
    sibling.write(2, POEM, 0)
    # a validation's
    here.session.record_response(Label(3, seed=1, record=False), POEM, 0.0, 1.0, 0)
    here.session.flush()
    sibling.sync(1)
    message = here.sync(1)
    assert message.version == 1
    assert sorted(message.responses.tolist()) == [(1, 30, 0), (2, 30, 0)]
    assert drafted(mapped(message.history)) == POEM.tolist()
    assert tokens(message.history) == 60
    assert not here.sync(2).lengths
    again = Engine().sync(2)  # an engine that was started again
    assert (len(again.responses), tokens(again.history)) == (2, 60)


def test_what_is_written_arrives_without_a_weight_sync(job: None) -> None:
    """A checkpoint is written before it."""
    engine = Engine()
    before = len(ray.get(ledger().since.remote(0)))
    engine.write(1, POEM, 2)
    until(lambda: len(ray.get(ledger().since.remote(0))) == before + 1)


def test_a_sync_reports_first_and_then_refreshes(job: None) -> None:
    engine = Engine()
    engine.write(5, POEM, 1)
    engine.session.sync(2, report=True)
    assert [command for command, _ in engine.heard] == ["stats", "refresh"]
    # with the counts of the node's other engines, or without
    until(lambda: ray.get(ledger().metrics.remote(2)))
    figures = ray.get(ledger().metrics.remote(2))
    assert (figures["das/tokens_per_forward"], figures["das/rollout_s"]) == (7.0, 1.0)


def test_an_engine_that_does_not_answer_costs_the_history_and_raises_nothing(
    job: None, caplog: Any
) -> None:
    engine = Engine(None)
    engine.session.sync(4, report=True)
    assert "das: no figures of an engine: " in caplog.text
    assert "a weight sync without fresh history; decoding goes on" in caplog.text
    with pytest.raises(DasError, match="entry point"):
        engine.session.start()


def test_what_arrives_is_published_once_and_what_is_old_is_dropped(
    writer: Alone,
) -> None:
    writer.push("a", Trajectory(1, POEM.tobytes(), 3))
    writer.push("b", Trajectory(1, POEM.tobytes(), 3))
    assert [file.split("-")[:2] for file in writer.files] == [
        ["batch", "a"],
        ["batch", "b"],
    ]
    assert tokens(writer.published(4)) == 60
    assert not writer.files
    writer.push("a", Trajectory(1, POEM[::-1].tobytes(), 0))  # late
    assert tokens(writer.published(4)) == 90
    for version in range(4, 3 + WINDOW):
        writer.push("a", Trajectory(1, POEM.tobytes(), version))
        published = writer.published(version + 1)
    # version 0 is none of the last visits
    assert tokens(published) == 60 + (WINDOW - 1) * 30


def test_what_arrives_is_sealed_before_the_weight_sync_and_published_by_it(
    unsynced: None, writer: Alone
) -> None:
    writer.push("a", Trajectory(1, POEM.tobytes(), 0))
    # the run's first weight sync says which version this is
    assert writer.writer.store.staged == 0
    before = writer.published(1)
    writer.push("a", Trajectory(2, POEM.tobytes(), 1))
    assert writer.writer.store.generation == before.generation
    assert (writer.writer.store.staged, writer.writer.store.tokens, tokens(before)) == (
        0,
        60,
        30,
    )
    assert len(writer.files) == 1  # until it is published
    assert tokens(writer.published(2)) == 60
    assert not writer.files


def test_an_engine_two_versions_behind_turns_nothing_back(writer: Alone) -> None:
    for version in range(2 * WINDOW):
        writer.push("ahead", Trajectory(1, POEM.tobytes(), version))
        published = writer.published(version + 1)
    late = writer.published(2 * WINDOW - 2)
    assert late[0] == published[0]
    assert late[1] >= published[1]  # a background merge may have published once more
    assert tokens(late) == WINDOW * 30


def test_a_service_that_ended_for_good_comes_back_at_the_weight_sync_with_all_it_had(
    job: None,
) -> None:
    engine = Engine()
    here = ledger_module.history_name()
    engine.write(1, POEM, 0)
    first = engine.sync(1).history
    all_of_it = tokens(first) + 30
    engine.write(20, POEM, 1)
    engine.session.flush()
    before = figures_of(ledger_module.find_actor(here))
    ray.kill(ledger_module.find_actor(here), no_restart=True)
    found = []
    until(
        lambda: (
            found.append(engine.sync(2).history)
            or (found[-1] and tokens(found[-1]) == all_of_it)
        )
    )
    assert found[-1].directory == first.directory  # it was taken over
    assert figures_of(ledger_module.find_actor(here))["pid"] != before["pid"]
    assert engine.sync(3).history is not None


@pytest.mark.parametrize("everything", [True, False])
def test_removed_files_are_published_anew(
    writer: Alone, caplog: Any, everything: bool
) -> None:
    writer.push("a", Trajectory(1, POEM.tobytes(), 0))
    before = writer.published(1)
    engine = mapped(before)
    if everything:
        shutil.rmtree(before[0])
    else:
        next(Path(before[0]).glob("segments-*")).unlink()
    assert drafted(engine) == POEM.tolist()  # what is mapped stays
    writer.push("a", Trajectory(2, POEM.tobytes(), 1))
    after = writer.published(2)
    assert tokens(after) == 60
    assert drafted(mapped(after)) == POEM.tolist()
    engine.refresh(after[1])
    assert engine.tokens == 60
    # the removed directory's leaves this one alone
    until(lambda: len(janitors(after[0])) == 1)
    assert tokens(after) == 60
    assert caplog.text.count("were removed; it is published anew") == 1


def test_a_directory_that_is_taken_is_left_for_a_new_one(
    job: None, tmp_path: Path, caplog: Any
) -> None:
    published = Alone(tmp_path).published(1)
    second = Alone(tmp_path)  # the first still writes
    second.push("a", Trajectory(1, POEM.tobytes(), 1))
    other = second.published(2)
    assert other.directory != published.directory and tokens(other) == 30
    assert caplog.text.count("can't be taken over") == 1


def test_another_run_starts_warm_and_forgets_in_time(job: None, tmp_path: Path) -> None:
    old = Alone(tmp_path, "old")
    old.push("a", Trajectory(1, POEM.tobytes(), 50))
    old.published(51)
    old.push("a", Trajectory(2, POEM.tobytes(), 51))  # since the weight sync
    save(old, tmp_path / "saved", [(1, 30, 50), (2, 30, 51)])

    ray.get(ledger().start_from.remote(str(tmp_path / "saved")))
    fresh = Alone(tmp_path, "new")
    assert tokens(fresh.published(0)) == 60
    ray.get(ledger().start_from.remote(None))
    fresh.push("a", Trajectory(3, POEM.tobytes(), 0))
    assert tokens(fresh.published(1)) == 90
    for version in range(1, WINDOW + 1):
        fresh.push("b", Trajectory(1, POEM.tobytes(), version))
        published = fresh.published(version + 1)
    # of problem 1 the old run's visit has left the window
    assert tokens(published) == 60 + WINDOW * 30
    facts = saved.facts_of("problem", TOKENIZER)
    for version, moved in (
        (0, [(1, 30, -1), (2, 30, 0)]),
        (52, [(1, 30, 50), (2, 30, 51)]),
    ):
        assert (
            saved.check(tmp_path / "saved", facts, "das.history.load", version).tolist()
            == moved
        )


@pytest.mark.parametrize("damaged", [False, True])
def test_where_all_nodes_saved_all_texts_the_largest_part_is_loaded_alone(
    job: None, tmp_path: Path, damaged: bool
) -> None:
    """The next one, where it can't be read."""
    everything = CONFIG.model_copy(update={"scope": "global"})
    old = Alone(tmp_path, "old", everything)
    index = tmp_path / "saved" / saved.INDEX
    index.mkdir(parents=True)
    for part in range(3):  # nodes that came late have fewer texts
        old.push("a", Trajectory(part, POEM.tobytes(), 1))
        old.save(str(index / str(part)))
    if damaged:
        (index / "2").write_bytes((index / "2").read_bytes()[:-1] + b"damaged")
    ray.get(ledger().start_from.remote(str(index.parent)))
    try:
        assert tokens(Alone(tmp_path, "new", everything).published(0)) == (
            60 if damaged else 90
        )
    finally:
        ray.get(ledger().start_from.remote(None))


def save(history: Alone, target: Path, lengths: list[tuple[int, int, int]]) -> None:
    def save_part(index: Path) -> int:
        history.save(str(index / "0"))
        return 1

    saved.write(
        target,
        saved.facts_of("problem", TOKENIZER),
        np.array(lengths, RESPONSE),
        save_part,
    )


def test_a_save_that_fails_leaves_what_was_saved_before(
    writer: Alone, tmp_path: Path
) -> None:
    target = tmp_path / "checkpoint" / "das_history"
    writer.push("a", Trajectory(1, POEM.tobytes(), 0))
    writer.published(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
        try:
            with pytest.raises(OSError, match="index"):
                save(writer, target, [])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in target.parent.iterdir()] == ["das_history"] * (
            step - 1
        )
        save(writer, target, [(1, 30, 0)])
    lengths = saved.check(
        target, saved.facts_of("problem", TOKENIZER), "das.history.load"
    )
    assert lengths.tolist() == [(1, 30, 0)]


def test_a_start_that_cannot_be_read_is_told_and_tried_again(
    writer: Alone, caplog: Any, tmp_path: Path
) -> None:
    """As where a network file system is away for a while."""
    old = Alone(tmp_path, "old")
    away = tmp_path / "away"
    old.push("a", Trajectory(1, POEM.tobytes(), 0), Trajectory(2, POEM.tobytes(), 0))
    old.published(1)
    ray.get(ledger().start_from.remote(str(away)))
    try:
        for version in (1, 2):
            writer.push("a", Trajectory(1, POEM.tobytes(), version))
            assert tokens(writer.published(version)) == 30 * version
        assert (
            len(
                [
                    r
                    for r in caplog.records
                    if r.message.startswith("das: history: FileNotFound")
                ]
            )
            == 1  # once a minute
        )
        save(old, away, [])
        for version in (3, 4):
            assert tokens(writer.published(version)) == 120  # all of it, once
        (away / "index" / "0").write_bytes(b"damaged")
        fresh = Alone(tmp_path, "fresh")
        for version in (1, 2):
            assert tokens(fresh.published(version)) == 0
        assert (
            len(
                [
                    r
                    for r in caplog.records
                    if r.message.startswith("das: history: IndexFileError")
                ]
            )
            == 1
        )
    finally:
        ray.get(ledger().start_from.remote(None))


def test_a_history_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    mine = {"a": 0, "b": 1}
    other = {"b": 0, "a": 1}
    facts, theirs = (
        saved.facts_of("problem", SimpleNamespace(get_vocab=lambda v=v: v))
        for v in (mine, other)
    )
    with pytest.raises(DasError, match=r"das.history.load: found no history in"):
        saved.check(tmp_path, facts, "das.history.load")
    target = tmp_path / "saved"
    with HistoryStore(tmp_path / "store") as store:
        saved.write(
            target,
            theirs,
            np.array([], RESPONSE),
            lambda index: store.save(index / "0") or 1,
        )
    saved.check(target, theirs, "das.history.load")
    with pytest.raises(
        DasError,
        match=r"das.history.load: .* written with tokenizer '\w+', this run has '\w+'",
    ):
        saved.check(target, facts, "das.history.load")
    with pytest.raises(DasError, match="with scope 'problem', this run has 'global'"):
        saved.check(
            target,
            {"scope": "global", "tokenizer": theirs["tokenizer"]},
            "das.history.load",
        )


def trainer(path: Path, step: int, **changes: Any) -> SimpleNamespace:
    """The parts of veRL's trainers that checkpoints of the history touch."""
    das = {"drafter": "history", "history": {"load": changes.pop("load", None)}}
    keys = {
        "default_local_dir": str(path),
        "resume_mode": "auto",
        "resume_from_path": None,
        **changes,
    }
    config = OmegaConf.create(
        {"trainer": keys, "actor_rollout_ref": {"rollout": {"custom": {"das": das}}}}
    )
    return SimpleNamespace(config=config, global_steps=step, tokenizer=TOKENIZER)


def test_checkpoints_carry_the_history_and_old_ones_give_it_up(
    job: None, tmp_path: Path
) -> None:
    Engine().sync(1)

    def save(self: Any) -> None:
        (tmp_path / f"global_step_{self.global_steps}" / "actor").mkdir(parents=True)

    async def load(self: Any) -> int:
        return self.global_steps

    before = trainer(tmp_path, 1)  # of a run that has ended
    hooks.save_history.replacement(save)(before)
    run = trainer(tmp_path, 2, max_actor_ckpt_to_keep=2)
    for run.global_steps in (2, 4):
        hooks.save_history.replacement(save)(run)
    steps = [tmp_path / f"global_step_{step}" for step in (1, 2, 4)]
    assert all((step / saved.NAME / saved.INDEX).exists() for step in steps)
    for step in steps:  # veRL, which keeps two, removes the second's weights, and the user those of the others
        (step / "actor").rmdir()
    run.global_steps = 6
    hooks.save_history.replacement(save)(run)
    assert [(step / saved.NAME).exists() for step in steps] == [True, False, True]
    here = tmp_path / "weights are elsewhere" / "global_step_2"
    here.mkdir(parents=True)
    hooks.save_history.replacement(lambda self: None)(trainer(here.parent, 2))
    assert (here / saved.NAME / saved.INDEX).exists()

    try:
        assert (
            asyncio.run(hooks.load_history.replacement(load)(trainer(tmp_path, 6))) == 6
        )
        assert ray.get(ledger().start.remote())[0] == str(
            tmp_path / "global_step_6" / saved.NAME
        )
        warm = str(tmp_path / "global_step_4" / saved.NAME)
        hooks.load_history.replacement(lambda self: None)(
            trainer(tmp_path / "fresh", 0, load=warm)
        )
        assert ray.get(ledger().start.remote())[0] == warm
    finally:
        ray.get(ledger().start_from.remote(None))
    with pytest.raises(
        DasError, match=r"custom.das.history.load: found no history in '/nowhere'"
    ):
        hooks.load_history.replacement(lambda self: None)(
            trainer(tmp_path, 0, load="/nowhere")
        )


SCRIPT = """
import os, ray, signal
from das_adapter.config import HistoryConfig
from das_adapter.service import ledger, node
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
ledger.ledger()
here = node.history_here(HistoryConfig(max_bytes=2**26), grace_s=1.0)
print(ray.get(here.sync.remote(1, 0))[0].directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_of_a_run_that_was_killed_is_left_in_shared_memory() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    directory = Path(run.stdout.strip())
    assert directory.parent == Path("/dev/shm"), run.stderr
    until(lambda: not directory.exists())


@ray.remote(num_cpus=0)
class Peer:
    """Another actor, which may never answer."""

    def say(self, what: str) -> str:
        if what == "nothing":
            threading.Event().wait()
        return what


def test_an_actor_that_does_not_answer_is_left_out_and_named_in_the_log(
    job: None, caplog: Any
) -> None:
    calls = [Peer.remote().say.remote(what) for what in ("yes", "nothing", "no")]
    ray.wait(calls, num_returns=2, timeout=60)
    assert ledger_module.wait_for_answers(calls, 0.1, "say") == ["yes", "no"]
    assert (
        caplog.text.count("das: one of 3 actors has no answer to say: GetTimeoutError")
        == 1
    )


def test_texts_for_other_nodes_wait_until_these_are_known(
    unsynced: None, writer: Alone
) -> None:
    put_file(
        writer.directory(),
        "away-other-engine-1",
        pack([Trajectory(1, POEM.tobytes(), 1)]),
    )
    writer.tick()
    assert writer.files == ["away-other-engine-1"]


def test_texts_for_other_nodes_take_a_share_of_the_budget_and_the_oldest_go(
    writer: Alone, caplog: Any
) -> None:
    writer.published(1)
    text = np.arange(
        1_500_000, dtype=np.int32
    ).tobytes()  # 6 MB; of 64 MiB a quarter may wait
    for problem in (1, 2, 3):
        put_file(
            writer.directory(),
            f"away-gone-engine-{problem}",
            pack([Trajectory(problem, text, 1)]),
        )
    os.utime(
        writer.writer.directory / "spool/away-gone-engine-1", (0, time.time() - 100)
    )
    put_file(writer.directory(), "away--engine-4", b"")
    os.utime(writer.writer.directory / "spool/away--engine-4", (0, time.time() - 50))
    writer.tick()  # the node that most were for has gone: they stay here
    assert writer.files == [
        "away--engine-4",
        "texts-engine-2-gone",
        "texts-engine-3-gone",
    ]
    assert caplog.text.count("the oldest texts for other nodes are lost") == 1


@pytest.mark.parametrize("scope", ["problem", "global"])
def test_texts_for_nodes_that_go_together_stay_once_each(
    job: None, tmp_path: Path, scope: Any
) -> None:
    history = Alone(tmp_path, config=HistoryConfig(max_bytes=2**26, scope=scope))
    history.published(1)
    # parts of a batch, of which this node keeps a part as well, or with `global` all
    for node in (
        "one",
        "two",
    ):
        put_file(
            history.directory(),
            f"away-{node}-engine-1",
            pack([Trajectory(1, POEM.tobytes(), 1)]),
        )
    history.tick()
    assert tokens(history.published(2)) == {"problem": 60, "global": 0}[scope]


def test_a_node_that_texts_do_not_reach_is_named_once(
    writer: Alone, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "history_names", lambda: ("", "gone"))
    writer.published(1)
    for number in range(3):
        put_file(
            writer.directory(),
            f"away-gone-engine-{number}",
            pack([Trajectory(1, POEM.tobytes(), 1)]),
        )
        writer.tick()
    assert len(writer.files) == 3
    assert caplog.text.count("texts did not reach gone and are sent again") == 1


def test_an_engine_that_a_weight_sync_left_with_an_older_generation_is_counted(
    job: None,
) -> None:
    for generation, behind in ((10**6, 0), (0, 1)):
        # of two ranks
        engine = Engine(({"generation": 10**6}, {"generation": generation}))
        engine.write(5, POEM, 50)
        engine.session.sync(51)
        assert [report["engines_behind"] for report in engine.session.report(52)] == [
            behind
        ]


def test_another_run_of_the_job_begins_with_nothing_of_the_first(job: None) -> None:
    first = Engine()
    first.write(1, POEM, 70)
    directory = first.sync(71).history.directory
    ledger_module.end_earlier_run()
    assert not Path(directory).exists()
    with pytest.raises(ValueError):
        ledger_module.running_ledger()
    second = Engine()
    second.write(1, POEM[:20], 0)
    heard = second.sync(1)
    assert heard.responses.tolist() == [(1, 20, 0)]
    assert tokens(heard.history) == 20
    assert [step["engines_behind"] for step in second.session.report(1)] == [0]
