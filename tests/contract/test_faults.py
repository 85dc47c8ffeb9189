"""Whatever breaks under a run on two nodes of a real Ray cluster: the run goes on, and
its history is what it must be.

An engine here writes what a test tells it to; its session, the histories of the nodes
and the ledger are the real ones.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_history
from test_history import CONFIG, POEM, TOKENIZER, drafted, figures_of, mapped, until

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from das_adapter.core.homes import homes  # noqa: E402
from das_adapter.core.index.store import problems_in  # noqa: E402
from das_adapter.errors import DasError  # noqa: E402
from das_adapter.nemo_rl.engine_hooks import SyncEngineHooks, labels  # noqa: E402
from das_adapter.protocol.label import Label  # noqa: E402
from das_adapter.protocol.messages import Refresh, Trajectory  # noqa: E402
from das_adapter.protocol.spool import put_batch  # noqa: E402
from das_adapter.service import checkpoint, janitor  # noqa: E402
from das_adapter.service.ledger import (  # noqa: E402
    find_actor,
    history_name,
    history_names,
    running_ledger,
)

FACTS = checkpoint.facts_of("problem", TOKENIZER)
NAMESPACE = "shared by two jobs"
INTERPOSED = Path(__file__).with_name("interposed.c")


class Engine(test_history.Engine):
    """An engine on some node."""

    def write_long(self, problem: int, length: int, version: int) -> None:
        self.write(problem, np.arange(length, dtype=np.int32), version)

    def deliver(self) -> None:
        """Leave everything in the spool now, and return when it is in those of its
        homes.
        """
        self.session.flush()
        ray.get(find_actor(history_name()).flush.remote())

    def begin(self, problems: list[int]) -> bool:
        """Begin requests of problems; return whether the session starts a thread for
        them.
        """
        before = {*threading.enumerate()}
        self.session.fetch_guest_history(problems)
        return any(
            isinstance(thread, threading.Timer)
            for thread in {*threading.enumerate()} - before
        )

    def visited(self, problems: list[int]) -> list[int]:
        """Begin requests of problems; return of which the history was brought beside
        that of the node.
        """
        self.brought.clear()
        self.begin(problems)
        until(lambda: self.brought)
        assert all(
            drafted(self.guests, problem) == POEM.tolist() for problem in self.brought
        )
        return sorted(self.brought)

    def limit(self, size: int) -> None:
        """Let this process write no file that is larger."""
        limited(os.getpid(), size)

    def warned(self, problems: list[int]) -> str:
        """Begin requests of problems whose history does not come; return the line in
        the log.
        """
        lines = BufferingHandler(1000)
        logging.getLogger("das_adapter").addHandler(lines)
        self.begin(problems)
        until(lambda: lines.buffer)
        logging.getLogger("das_adapter").removeHandler(lines)
        return str(lines.buffer[0].getMessage())


class Run:
    """A run with an engine on each of its nodes."""

    def __init__(self, cluster: Cluster, trap: Path):
        self.cluster = cluster
        self._trap = trap
        self.problems = itertools.count(1000)
        self.versions = itertools.count(1)
        self.version = 0
        self.nodes = [
            cluster.head_node,
            cluster.add_node(num_cpus=1, object_store_memory=80_000_000),
        ]
        self.engines = [self.engine(n.node_id) for n in self.nodes]

    @staticmethod
    def engine(node_id: str) -> Any:
        pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return (
            ray.remote(Engine).options(num_cpus=0, scheduling_strategy=pinned).remote()
        )

    def write(self, engine: int = 0, home: int | None = None) -> int:
        """Let an engine finish a response to a new problem, at home on a node; return
        the problem.
        """
        problem = next(
            p
            for p in self.problems
            if home is None or self.home(p).endswith(self.nodes[home].node_id)
        )
        ray.get(self.engines[engine].write.remote(problem, POEM, self.version))
        return problem

    @staticmethod
    def home(problem: int) -> str:
        """The name of the history where a problem is at home."""
        names = history_names()
        return names[homes([problem], names)[0]]

    def sync(self) -> list[Refresh]:
        """A weight sync; return what each engine hears."""
        self.version = next(self.versions)
        return ray.get([engine.sync.remote(self.version) for engine in self.engines])

    def goes_on(self, *problems: int, nodes: int = 2) -> None:
        """Weight syncs go on until what was written is drafted, each text once, at its
        home, and no text waits.
        """

        def done() -> bool:
            messages = self.sync()
            found = {
                m.history.directory[-16:]: mapped(m.history)
                for m in messages
                if m.history
            }
            if len(found) != nodes or len(history_names()) != nodes:
                return False
            at_home = [
                found[self.home(problem).rpartition(":")[2][:16]]
                for problem in problems
            ]
            return all(
                drafted(history, problem) == POEM.tolist()
                for history, problem in zip(at_home, problems, strict=True)
            ) and not any(map(self.spool, range(nodes)))

        until(done)

    @property
    def tokens(self) -> int:
        """Of the whole history."""
        return sum(self.figures(of)["tokens"] for of in range(len(self.nodes)))

    def history(self, of: int) -> Any:
        return find_actor(history_name(self.nodes[of].node_id))

    def spool(self, of: int) -> list[str]:
        """The texts that wait in a node's spool."""
        return os.listdir(f"{self.figures(of)['directory']}/spool")

    def figures(self, of: int) -> dict[str, Any]:
        """Ask a history for its figures, again while it is being restarted."""
        for _ in range(60):
            try:
                return figures_of(self.history(of))
            except ray.exceptions.ActorUnavailableError:
                time.sleep(0.5)
        raise AssertionError("a history was not restarted")

    def kill_at(self, path: str) -> None:
        """Kill the process that is the next to complete a file with this in its
        path.
        """
        self._trap.with_suffix(".new").write_text(path)
        self._trap.with_suffix(".new").rename(self._trap)

    def was_killed(self) -> bool:
        return not self._trap.exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("faults")
    subprocess.run(
        [
            "cc",
            "-shared",
            "-fPIC",
            "-O1",
            "-o",
            folder / "interposed.so",
            INTERPOSED,
            "-ldl",
        ],
        check=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.utils.write_ray_address", lambda *_, **__: None)
        # a full object store has no way out
        patch.setenv("RAY_automatic_object_spilling_enabled", "0")
        patch.setenv("RAY_local_fs_capacity_threshold", "0.0001")
        # how soon Ray notices that a node has gone
        patch.setenv("RAY_health_check_period_ms", "500")
        head = {
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": 80_000_000,
        }
        cluster = Cluster(initialize_head=True, head_node_args=head)
        env = {
            "LD_PRELOAD": str(folder / "interposed.so"),
            "DAS_TEST_KILL": str(folder / "trap"),
        }
        ray.init(
            cluster.address,
            namespace=NAMESPACE,
            runtime_env={"env_vars": env},
            log_to_driver=False,
        )
        # Ray's workers can't import a test
        for module in (
            sys.modules[__name__],
            test_history,
        ):
            ray.cloudpickle.register_pickle_by_value(module)
        run = Run(cluster, folder / "trap")
        run.goes_on(run.write(0), run.write(1))
        yield run
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("at", ["manifest-", "whole-"])
def test_killed_while_it_publishes(run: Run, at: str) -> None:
    """Before engines could map the generation, or before it removed the files of what
    is in it.
    """
    before = run.figures(1)
    tokens = run.tokens
    problems = run.write(0, home=1), run.write(1, home=1)
    run.kill_at(f"{before['directory']}/{at}")
    run.goes_on(*problems)
    after = run.figures(1)
    assert run.was_killed() and after["pid"] != before["pid"]
    assert after["directory"] == before["directory"]  # it was taken over
    assert run.tokens == tokens + 2 * len(POEM)


def test_killed_before_it_publishes_what_engines_of_other_nodes_sent(run: Run) -> None:
    before = run.figures(1)
    tokens = run.tokens
    problem = run.write(0, home=1)
    ray.get(run.engines[0].deliver.remote())
    assert run.spool(1) and not run.spool(0)
    os.kill(before["pid"], signal.SIGKILL)
    run.goes_on(problem)
    assert run.figures(1)["pid"] != before["pid"]
    assert run.tokens == tokens + len(POEM)


def test_killed_where_engines_sleep(run: Run) -> None:
    """As where replicas of veRL's are on training nodes: no weight sync of theirs lets
    the history begin again.
    """
    run.goes_on(run.write(0, home=1))
    before = run.figures(1)
    tokens = run.tokens
    os.kill(before["pid"], signal.SIGKILL)
    problem = run.write(0, home=1)
    written = run.version
    run.version = next(run.versions)
    ray.get(run.engines[0].sync.remote(run.version))
    until(lambda: run.tokens == tokens + len(POEM))
    after = run.figures(1)
    assert after["pid"] != before["pid"] and after["newest"] == written
    assert ray.get(run.engines[0].visited.remote([problem])) == [problem]


def test_killed_while_it_saves(run: Run, tmp_path: Path, caplog: Any) -> None:
    problem = run.write(1)
    folder = tmp_path / "step_1"
    before = [run.figures(of)["pid"] for of in (0, 1)]
    run.kill_at("step_1/das_history.partial/index/0")
    checkpoint.save(folder, FACTS)
    assert run.was_killed() and not list(folder.iterdir())
    assert caplog.text.count("das: the history was not saved with the checkpoint") == 1
    run.goes_on(problem)
    assert [run.figures(of)["pid"] for of in (0, 1)] != before
    checkpoint.save(folder, FACTS)
    checkpoint.check(folder / checkpoint.NAME, FACTS, "resume")


def test_a_node_that_is_killed_while_it_joins_and_one_that_goes(run: Run) -> None:
    before = run.tokens
    third = run.cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    job = ray.get_runtime_context().get_job_id()
    run.kill_at(f"das-history-{job}-{third.node_id[:16]}/segments-")
    run.nodes.append(third)
    run.engines.append(run.engine(third.node_id))
    until(lambda: run.sync() and len(history_names()) == 3)
    run.sync()  # now all know it
    problems = run.write(0, home=2), run.write(0, home=1)
    run.goes_on(*problems, nodes=3)
    assert run.was_killed() and run.tokens == before + 2 * len(POEM)

    for engine in range(3):
        run.write(engine, home=2)  # at home on the node that goes
    run.engines.pop()
    run.nodes.pop()
    run.cluster.remove_node(third, allow_graceful=False)
    until(lambda: len(history_names()) == 2, tries=240)  # Ray has noticed
    # one home is still there
    assert ray.get(run.engines[0].visited.remote(problems)) == [problems[1]]
    run.sync()  # now all know it
    run.goes_on(run.write(0), run.write(1))
    left = run.tokens - (before + 3 * len(POEM))
    # what had not arrived there stays where it was written
    assert left in (
        0,
        len(POEM),
        2 * len(POEM),
    )


def test_an_engine_gets_the_history_of_other_nodes_and_one_that_starts_again_that_of_its_own(
    run: Run,
) -> None:
    problems = [run.write(engine) for engine in (0, 1) * 8]
    run.goes_on(*problems)
    away = [
        problem
        for problem in problems
        if run.home(problem).endswith(run.nodes[1].node_id)
    ]
    assert 0 < len(away) < len(problems)
    assert not ray.get(
        run.engines[0].begin.remote(
            [problem for problem in problems if problem not in away]
        )
    )
    assert ray.get(run.engines[0].visited.remote(problems)) == away
    before = run.tokens
    ray.kill(run.engines.pop())
    # as a host starts an engine again
    run.engines.append(run.engine(run.nodes[1].node_id))
    run.goes_on(*problems)
    assert run.tokens == before


def test_history_of_another_node_that_finds_no_room_leaves_nothing_behind(
    run: Run,
) -> None:
    away = run.write(1, home=1)
    run.goes_on(away)
    node = run.figures(0)["directory"]
    before = sorted(os.listdir(node))
    ray.get(run.engines[0].limit.remote(16))
    assert "requests go on without the history" in ray.get(
        run.engines[0].warned.remote([away])
    )
    ray.get(run.engines[0].limit.remote(resource.RLIM_INFINITY))
    assert sorted(os.listdir(node)) == before


def test_all_engines_go_and_what_they_started_stays(run: Run) -> None:
    before = [run.figures(of)["pid"] for of in (0, 1)]
    tokens = run.tokens
    name = ray.get(running_ledger().run.remote())
    problems = run.write(0, home=0), run.write(1, home=1)
    for engine in run.engines:
        ray.get(engine.deliver.remote())
        ray.kill(engine)
    for engine in run.engines:
        until(lambda engine=engine: ended(engine))
    run.engines[:] = [run.engine(node.node_id) for node in run.nodes]
    run.goes_on(*problems)
    assert ([run.figures(of)["pid"] for of in (0, 1)], run.tokens) == (
        before,
        tokens + 2 * len(POEM),
    )
    assert ray.get(running_ledger().run.remote()) == name


def ended(engine: Any) -> bool:
    try:
        ray.get(engine.deliver.remote())
    except ray.exceptions.RayActorError:
        return True
    return False


# On a busy machine Ray once did not start another ledger in eleven minutes: for good at
# night only.
@pytest.mark.parametrize(
    "for_good", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_the_ledger_is_killed(run: Run, for_good: bool) -> None:
    run.sync()
    ray.kill(running_ledger(), no_restart=for_good)
    # its length, reported while there was no ledger, may be lost
    run.goes_on(run.write(0))
    written = set()
    heard = set()

    def told() -> bool:
        # again and again, as the ledger may take long to come back
        written.add(run.write(1))
        heard.update(*(message.responses["problem"].tolist() for message in run.sync()))
        return bool(written & heard)

    until(told)
    run.goes_on(*written)


def limited(pid: int, size: int) -> None:
    """Let a process write no file that is larger: no space."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_shared_memory_is_full_on_one_node(run: Run) -> None:
    before = run.figures(1)
    tokens = run.tokens
    limited(before["pid"], 64)
    problems = run.write(0, home=0), run.write(1, home=1), run.write(0, home=1)
    here, there = run.sync()
    assert mapped(there.history).tokens == before["tokens"]  # the node has what it had
    assert drafted(mapped(here.history), problems[0]) == POEM.tolist()
    limited(before["pid"], resource.RLIM_INFINITY)
    run.goes_on(*problems)
    assert (run.figures(1)["pid"], run.tokens) == (
        before["pid"],
        tokens + 3 * len(POEM),
    )


def test_the_spool_is_full(run: Run) -> None:
    before = run.tokens
    ray.get(run.engines[0].limit.remote(16))
    problems = run.write(0), run.write(1)
    run.sync()
    assert run.tokens <= before + len(POEM)  # the engine keeps its text
    ray.get(run.engines[0].limit.remote(resource.RLIM_INFINITY))
    run.goes_on(*problems)
    assert run.tokens == before + 2 * len(POEM)


def test_a_save_that_hangs_holds_up_no_weight_sync(run: Run, tmp_path: Path) -> None:
    hanging = tmp_path / "0"
    # who opens it to write waits for a reader
    os.mkfifo(f"{hanging}.{run.figures(0)['pid']}.tmp")
    saving = run.history(0).save.remote(str(hanging))
    run.goes_on(run.write(0, home=0))
    assert not ray.wait([saving], timeout=0)[0]
    with open(f"{hanging}.{run.figures(0)['pid']}.tmp", "rb") as reader:
        assert reader.read(8)
    with pytest.raises(ray.exceptions.RayTaskError):
        ray.get(saving)


def test_a_save_that_takes_too_long_is_given_up(
    run: Run, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SAVE_S", 2.0)
    stopped = run.figures(1)["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        checkpoint.save(tmp_path / "step_2", FACTS)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert not list(tmp_path.glob("step_2/*"))
    assert caplog.text.count("das: the history was not saved with the checkpoint") == 1
    run.goes_on(run.write(1))


@pytest.fixture(scope="module")
def saved(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint of the run, and the tokens in it."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoint.save(folder, FACTS)
    return folder, run.tokens


@pytest.mark.parametrize("name", ["index/1", "lengths.npy", "history.json", ""])
@pytest.mark.parametrize("keep", [0.0, 0.7])
def test_a_checkpoint_is_half_written(
    run: Run, saved: Any, tmp_path: Path, caplog: Any, name: str, keep: float
) -> None:
    history = tmp_path / checkpoint.NAME
    if name:
        shutil.copytree(saved[0] / checkpoint.NAME, history)
        whole = (history / name).read_bytes()
        (history / name).write_bytes(whole[: int(keep * len(whole))])
    before = ray.get(running_ledger().since.remote(0))
    checkpoint.begin(CONFIG, FACTS, "das", tmp_path, 0)
    assert (
        caplog.text.count(f"the checkpoint {tmp_path} has no history to resume from")
        == 1
    )
    assert ray.get(running_ledger().start.remote())[0] is None
    assert np.array_equal(ray.get(running_ledger().since.remote(0)), before)
    with pytest.raises(DasError, match=r"das\.history\.load"):
        checkpoint.begin(
            CONFIG.model_copy(update={"load": str(history)}), FACTS, "das", None, 0
        )


JOB = """
import json, sys, ray
from pathlib import Path
from das_adapter.protocol import spool
spool.GRACE_S = 1.0  # before others take it for a default
from das_adapter.config import parse
from das_adapter.core.index import SuffixIndex
from das_adapter.protocol.messages import Refresh
from das_adapter.service import checkpoint
from das_adapter.service.session import Session
address, namespace, folder, facts = sys.argv[1:5]
ray.init(address=address, namespace=namespace, log_to_driver=False)
das = parse({"drafter": "history", "history": {"max_bytes": "64MiB"}})
checkpoint.begin(das.history, json.loads(facts), "das", Path(folder), 0)
heard = []
session = Session(das, lambda command, payload, timeout: heard.append(payload) or [[{"generation": 1}]])
session.sync(1)
message = Refresh(**heard[-1])
index = SuffixIndex.attach(message.history.directory)
index.refresh(message.history.generation)
print("RESUMED", index.tokens, len(message.responses), message.history.directory, flush=True)
sys.stdin.read()
"""


def test_two_jobs_on_a_node_one_of_which_resumes_with_fewer_replicas(
    run: Run, saved: Any
) -> None:
    folder, tokens = saved
    before = run.tokens
    directory = run.figures(0)["directory"]
    facts = json.dumps(FACTS)
    command = [
        sys.executable,
        "-c",
        JOB,
        run.cluster.address,
        NAMESPACE,
        str(folder),
        facts,
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        line = next(
            line for line in other.stdout or () if line.startswith("RESUMED")
        ).split()
        problem = run.write(0)
        run.goes_on(problem)  # beside the other job
        other.stdin.close()
    assert int(line[1]) == tokens
    assert int(line[2]) > 0
    assert line[3] != directory and Path(line[3]).parent == Path(directory).parent
    assert run.tokens == before + len(POEM)
    # its history and its ledger end with it, though the cluster goes on
    until(lambda: not Path(line[3]).exists())
    names = {found["name"] for found in ray.util.list_named_actors(all_namespaces=True)}
    assert {name.split(":")[1] for name in names} == {
        ray.get_runtime_context().get_job_id()
    }


def test_the_object_store_is_exhausted(run: Run) -> None:
    before = run.tokens
    # the store has 80 MB
    held = [ray.put(np.zeros(10_000_000, dtype=np.uint8)) for _ in range(7)]
    large = next(p for p in run.problems if run.home(p).endswith(run.nodes[1].node_id))
    ray.get(run.engines[0].write_long.remote(large, 4_000_000, run.version))
    small = run.write(0, home=0)
    until(
        lambda: (
            (heard := run.sync()[0].history)
            and drafted(mapped(heard), small) == POEM.tolist()
        )
    )
    assert run.tokens == before + len(POEM)
    del held
    run.goes_on(small)
    assert run.tokens == before + len(POEM) + 4_000_000


def test_a_poison_trajectory_is_dropped_alone(run: Run) -> None:
    problem = next(run.problems)
    before = run.tokens
    texts = (1, b"abc"), (1, (-POEM).tobytes()), (problem, POEM.tobytes())
    put_batch(
        run.figures(0)["directory"],
        "engine",
        [Trajectory(*text, run.version) for text in texts],
    )
    run.goes_on(problem)
    assert run.tokens == before + len(POEM)


class Refitted:
    """A synchronous engine of NeMo-RL with two ranks, whose requests take three
    steps.
    """

    def __init__(self) -> None:
        self.answers: list[Any] = [True, True]
        self.versions: list[int] = []
        self.brought: list[int] = []
        self.llm_engine = SimpleNamespace(step=lambda: None)

    def generate(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        for _ in range(3):
            self.llm_engine.step()
        return [SimpleNamespace(outputs=[], metrics=None) for _ in prompts]

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        if method == "das_rpc":
            command, payload = args
            if command == "refresh":
                self.versions.append(payload["version"])
            for file in payload.get("files", ()):
                self.brought += problems_in(file).tolist()
            return [{"generation": 1}]
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


def test_a_refit_that_fails_half_way_is_no_new_version(run: Run) -> None:
    engine = Refitted()
    das = test_history.parse(test_history.DAS)
    hooks = SyncEngineHooks(engine, das, source="1")
    hooks.start()
    for answers in (
        [True, False],
        RuntimeError("a rank died"),
        [True, True],
        [{"loaded": 3}],
        [None, None],
    ):
        engine.answers = answers
        try:
            assert engine.collective_rpc("update_weights_via_ipc_zmq") == answers
        except RuntimeError as error:
            assert error is answers
    assert engine.versions == [1, 2, 3]
    assert hooks.version == 3


def test_a_batch_does_not_wait_for_the_history_of_other_nodes(run: Run) -> None:
    def generate() -> None:
        token = labels.set([Label(problem, seed=1)])
        engine.generate(
            [{"prompt_token_ids": [1]}], SimpleNamespace(n=1, extra_args=None)
        )
        labels.reset(token)

    problem = run.write(1, home=1)
    history = run.figures(1)["pid"]
    run.goes_on(problem)
    engine = Refitted()
    SyncEngineHooks(engine, test_history.parse(test_history.DAS), source="2").start()
    engine.collective_rpc("update_weights_via_ipc_zmq")
    os.kill(history, signal.SIGSTOP)
    generate()
    assert not engine.brought
    os.kill(history, signal.SIGCONT)
    until(lambda: generate() or engine.brought == [problem])


def test_only_what_nobody_uses_is_swept(tmp_path: Path) -> None:
    def directory(name: str) -> Path:
        made = tmp_path / f"das-history-{name}"
        made.mkdir()
        for lock in ("writer", "janitor"):
            (made / lock).touch()
        return made

    def locked(path: Path) -> Callable[[], None]:
        import fcntl

        file = path.open("r+")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file.close

    stale, written, watched, own = (
        directory(name) for name in ("stale", "written", "watched", "own")
    )
    for name in ("left", "used"):  # by engines whose writer did not start
        (tmp_path / f"das-history-{name}").mkdir()
        (tmp_path / f"das-history-{name}" / "users").touch()
    (tmp_path / "das-history-link").symlink_to(stale)
    (tmp_path / "das-history-new").mkdir()  # its writer is about to lock it
    release = [
        locked(path)
        for path in (
            written / "writer",
            watched / "janitor",
            tmp_path / "das-history-used/users",
        )
    ]
    janitor.sweep(tmp_path, besides=own.name)
    left = {path.name.removeprefix("das-history-") for path in tmp_path.iterdir()}
    assert left == {"written", "watched", "used", "own", "link", "new"}
    for close in release:
        close()
    janitor.sweep(tmp_path, besides="")
    assert {path.name.removeprefix("das-history-") for path in tmp_path.iterdir()} == {
        "link",
        "new",
    }
