"""What the engines of a run, its ledger and a node's history tell each other, and what
one that hangs costs the others, without Ray.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
import ray

from das_adapter.config import DasConfig, HistoryConfig
from das_adapter.core.homes import homes
from das_adapter.core.length import RESPONSE
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import Published, Trajectory, pack
from das_adapter.protocol.spool import AWAY, BATCH, FOLDER, TEXTS, put_batch, put_file
from das_adapter.service import ledger, node, session
from das_adapter.service.ledger import Ledger, Synced
from das_adapter.service.node import NodeHistory
from das_adapter.service.session import Session
from das_adapter.trouble import IMPATIENCE_S, Peer

TEXT = np.arange(30, dtype=np.int32).tobytes()
SYNCED = Synced(0, np.zeros(0, RESPONSE), ())


class Actor:
    """An actor that answers, or hangs."""

    def __init__(self, **answers: Any) -> None:
        self.hangs = False
        for method, answer in answers.items():
            setattr(self, method, SimpleNamespace(remote=self._call(answer)))

    def _call(self, answer: Any) -> Callable[..., Any]:
        return lambda *arguments: (self, answer)


class Waits:
    """Waits of this process for actors: how long each may take."""

    def __init__(self) -> None:
        self.patience_s: list[float] = []

    def __call__(self, call: Any, timeout_s: float) -> Any:
        actor, answer = call
        self.patience_s.append(timeout_s)
        if actor.hangs:
            raise ray.exceptions.GetTimeoutError("hangs")
        return answer


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(ledger, "wait_for_answer", waits)
    monkeypatch.setattr(ledger, "of_ledger", Peer())
    monkeypatch.setattr(session, "history_name", lambda: "das_history:1:here")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return waits


def write(one: Session, problem: int, version: int) -> None:
    """Let an engine finish a response."""
    ids = np.frombuffer(TEXT, np.int32)
    one.record_response(Label(problem, 1, True), ids, 0.0, 1.0, version)


def session_with(
    monkeypatch: pytest.MonkeyPatch, history: Actor, run_ledger: Actor
) -> Session:
    monkeypatch.setattr(session, "ledger", lambda: run_ledger)
    monkeypatch.setattr(node, "history_here", lambda config: history)
    return Session(DasConfig(), lambda *_: [[{"generation": 1}]])


def test_a_history_that_hangs_costs_one_time_out_then_a_second_each(
    waits: Waits, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    history = Actor(sync=(Published("/nowhere", 1), SYNCED))
    one = session_with(monkeypatch, history, Actor())
    one.sync(1)
    history.hangs = True
    for version in range(2, 12):
        one.sync(version)
    assert waits.patience_s[1] > 10 * IMPATIENCE_S
    assert waits.patience_s[2:] == [IMPATIENCE_S] * 9
    assert len(caplog.records) == 1
    history.hangs = False
    one.sync(12)
    one.sync(13)
    assert waits.patience_s[-1] > 10 * IMPATIENCE_S


def test_texts_wait_for_nobody_while_the_history_hangs(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = Actor(sync=None, directory="/nowhere")
    history.hangs = True
    one = session_with(monkeypatch, history, Actor())
    for version in range(1, 4):
        write(one, 1, version)
        one.sync(version)
    first, *later = waits.patience_s
    assert first > 10 * IMPATIENCE_S and sum(later) <= 3 * IMPATIENCE_S


def test_a_node_that_hangs_is_asked_for_history_once_a_weight_sync(
    waits: Waits, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    away = Actor(give=b"")
    away.hangs = True
    monkeypatch.setattr(session, "find_actor", lambda name: away)
    nodes = ("das_history:1:here", "das_history:1:there")
    synced = SYNCED._replace(nodes=nodes)
    one = session_with(monkeypatch, Actor(sync=(Published("/x", 1), synced)), Actor())
    problems = np.arange(400)
    for version in (1, 2):
        one.sync(version)
        waits.patience_s.clear()
        for some in np.split(problems, 4):
            one.fetch_guest_history(some.tolist())
            time.sleep(0.15)  # they are gathered for a moment
        first_s = session.GUESTS_WAIT_S if version == 1 else IMPATIENCE_S
        assert waits.patience_s == [first_s]
    assert len(caplog.records) == 1


def test_a_ledger_that_hangs_costs_the_trainer_one_time_out_for_all_its_questions(
    waits: Waits, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    run_ledger = Actor(metrics={}, expected_lengths={})
    run_ledger.hangs = True
    monkeypatch.setattr(ledger, "running_ledger", lambda: run_ledger)
    for step in range(5):
        assert ledger.metrics(step) == {}
        assert ledger.expected_lengths() is None
    first_s, *later_s = waits.patience_s
    assert first_s > 5 * IMPATIENCE_S and later_s == 9 * [IMPATIENCE_S]
    assert len(caplog.records) == 2


def test_another_actor_of_the_ledgers_name_costs_figures_and_names_alone(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    squatter = Actor()
    monkeypatch.setattr(ledger, "running_ledger", lambda: squatter)
    monkeypatch.setattr(session, "ledger", lambda: squatter)
    context = SimpleNamespace(get_job_id=lambda: "01")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert ledger.metrics(1) == {}
    assert ledger.expected_lengths() is None
    assert session.for_run(DasConfig(log_dir="/logs")).log_dir == "/logs/job-01"
    monkeypatch.setattr(ledger, "history_names", lambda: ("das_history:01:node",))
    monkeypatch.setattr(ledger, "name_in_run", lambda part: f"{part}:01")
    names = iter([{"das_history:01:node"}])
    monkeypatch.setattr(ledger, "_actor_names", lambda: next(names, set()))
    monkeypatch.setattr(ledger, "find_actor", lambda name: squatter)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    ledger.end_earlier_run()


@pytest.fixture
def run_ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A ledger in this process."""
    monkeypatch.setattr(ledger, "history_names", lambda: ("das_history:1:here",))
    return Ledger()


def lengths(*tokens: int) -> np.ndarray:
    """Return the lengths of responses to one problem."""
    return np.array([(1, length, 0) for length in tokens], RESPONSE)


def test_all_engines_hear_the_same_of_the_ledger_at_a_weight_sync(
    run_ledger: Ledger,
) -> None:
    run_ledger.add(lengths(10, 20, 30))
    first = run_ledger.sync(1, 0)
    run_ledger.add(lengths(40, 50))
    assert run_ledger.sync(1, 0).cursor == first.cursor == 3
    for cursor, heard in ((0, [10, 20, 30]), (1, [20, 30]), (3, [])):
        assert run_ledger.sync(1, cursor).lengths["tokens"].tolist() == heard
    assert run_ledger.sync(2, first.cursor).lengths["tokens"].tolist() == [40, 50]


def test_figures_of_the_last_steps_can_still_be_asked_for(run_ledger: Ledger) -> None:
    for step in range(1, 12):
        run_ledger.report(step, {"tokens": step, "busy_seconds": 1.0})
    known = [step for step in range(1, 12) if run_ledger.metrics(step)]
    assert known == list(range(3, 12))


class Told:
    """An engine that answers, and what a session tells it and reports of it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        nodes: tuple[str, ...] = (),
        **answers: Any,
    ) -> None:
        """`answers`: of the engine, by command."""
        self.reports: list[dict[str, Any]] = []
        self.lengths: list[list[int]] = []
        """Lengths of responses, as they were given to the ledger."""
        self.answers = {"refresh": [[{"generation": 2}]], "stats": [[{}]], **answers}
        synced = SYNCED._replace(nodes=nodes)
        run_ledger = Actor(sync=SYNCED)
        run_ledger.report = SimpleNamespace(
            remote=lambda step, report: self.reports.append(report)
        )
        run_ledger.add = SimpleNamespace(
            remote=lambda rows: self.lengths.append(rows["tokens"].tolist())
        )
        monkeypatch.setattr(session, "ledger", lambda: run_ledger)
        history = Actor(sync=(Published("/x", 2), synced))
        monkeypatch.setattr(node, "history_here", lambda config: history)

    def rpc(self, command: str, *_: Any) -> Any:
        return self.answers[command]


def test_the_counts_of_an_engine_are_those_of_its_rank_that_samples(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [{"error": None}, {"tokens": 7}, {"tokens": 0}]
    told = Told(monkeypatch, stats=[ranks, ranks[::-1]])
    Session(DasConfig(), told.rpc).report(1)
    assert [report["tokens"] for report in told.reports] == [7, 7]


@pytest.mark.parametrize(
    ("ranks", "behind"),
    [
        ([[{"generation": 2}, {}]], 0),
        ([[{"generation": 2}, {"generation": 1}]], 1),
        ([[{"generation": 1}], [{"generation": 2}], [{"error": "no room"}]], 1),
    ],
)
def test_engines_with_an_older_history_than_their_nodes_are_counted_once(
    waits: Waits, monkeypatch: pytest.MonkeyPatch, ranks: Any, behind: int
) -> None:
    told = Told(monkeypatch, refresh=ranks, stats=[[{"tokens": 1}], [{"tokens": 2}]])
    one = Session(DasConfig(), told.rpc)
    one.sync(1)
    one.report(1)
    first, second = told.reports
    assert first["engines_behind"] == behind
    assert "engines_behind" not in second


def test_history_that_is_at_home_elsewhere_is_fetched_once_in_a_weight_version(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def give(problems: list[int]) -> Any:
        asked.extend(problems)
        return away, b""

    away = Actor()
    away.give = SimpleNamespace(remote=give)
    monkeypatch.setattr(session, "find_actor", lambda name: away)
    nodes = ("das_history:1:here", "das_history:1:there")
    told = Told(monkeypatch, nodes=nodes)
    one = Session(DasConfig(), told.rpc, any_time=False)
    problems = list(range(40))
    elsewhere = [problem for problem in problems if homes([problem], nodes)[0] == 1]
    assert 0 < len(elsewhere) < len(problems)
    for version in (1, 2):
        one.sync(version)
        asked.clear()
        for _ in range(2):
            one.fetch_guest_history(problems)
            time.sleep(0.15)  # they are gathered for a moment
        assert sorted(asked) == elsewhere


@pytest.mark.parametrize("record", [True, False])
def test_a_validations_response_is_no_history(
    waits: Waits, monkeypatch: pytest.MonkeyPatch, record: bool
) -> None:
    told = Told(monkeypatch)
    das = DasConfig(history=HistoryConfig(scope="request"))
    one = Session(das, told.rpc)
    label = Label(problem=1, seed=5, record=record)
    one.record_response(label, [1, 2, 3], 0.0, 1.0, 1)
    one.flush()
    assert told.lengths == [[3]] * record


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeHistory:
    monkeypatch.setattr(node, "_own_object_store_bytes", lambda: 0)
    monkeypatch.setattr(ledger, "history_names", tuple)
    monkeypatch.setattr(ledger, "end_with_job", lambda: None)
    config = HistoryConfig(max_bytes=2**24)
    return NodeHistory(config, "das-history-test", str(tmp_path), 0.1)


def test_a_ledger_that_hangs_costs_the_engines_of_a_node_less_than_they_wait(
    waits: Waits, monkeypatch: pytest.MonkeyPatch, here: NodeHistory, caplog: Any
) -> None:
    run_ledger = Actor(start=(None, 0, 0), sync=SYNCED, add=None)
    monkeypatch.setattr(ledger, "running_ledger", lambda: run_ledger)
    here.sync(1, 0)
    run_ledger.hangs = True
    waits.patience_s.clear()
    for version in range(2, 5):
        for _ in range(8):  # engines of the node
            _, synced = here.sync(version, 0)
            assert synced is None
    first, *later = waits.patience_s
    assert first > 3 * IMPATIENCE_S
    assert len(later) == 2 and max(later) < IMPATIENCE_S / 2
    told = [r for r in caplog.records if "the ledger does not answer" in r.message]
    assert len(told) == 1


def test_lengths_wait_here_while_the_ledger_hangs(
    waits: Waits, monkeypatch: pytest.MonkeyPatch, here: NodeHistory
) -> None:
    sent: list[Any] = []
    run_ledger = Actor(start=(None, 0, 0), sync=SYNCED)
    run_ledger.add = SimpleNamespace(remote=sent.append)
    monkeypatch.setattr(ledger, "running_ledger", lambda: run_ledger)
    here.sync(1, 0)
    run_ledger.hangs = True
    here.sync(2, 0)
    for version in (2, 3, 4):
        put_batch(here.writer.directory, "engine", [Trajectory(1, TEXT, version)])
        here.sync(version, 0)
        here.tick()
    assert not sent
    run_ledger.hangs = False
    here.sync(5, 0)
    here.sync(6, 0)
    assert [len(rows) for rows in sent] == [3]


def test_every_engine_of_a_node_hears_the_ledger_at_a_weight_sync(
    waits: Waits, monkeypatch: pytest.MonkeyPatch, here: NodeHistory
) -> None:
    run_ledger = Actor(start=(None, 0, 0), sync=SYNCED, add=None)
    monkeypatch.setattr(ledger, "running_ledger", lambda: run_ledger)
    assert [here.sync(1, 0)[1] for _ in range(3)] == [SYNCED] * 3


def test_lengths_of_texts_from_another_node_were_counted_there(
    waits: Waits, monkeypatch: pytest.MonkeyPatch, here: NodeHistory
) -> None:
    sent: list[Any] = []

    def add(rows: Any) -> Any:
        sent.extend(rows["problem"].tolist())
        return run_ledger, None

    run_ledger = Actor(start=(None, 0, 0), sync=SYNCED)
    run_ledger.add = SimpleNamespace(remote=add)
    monkeypatch.setattr(ledger, "running_ledger", lambda: run_ledger)
    put_file(here.writer.directory, f"{TEXTS}-z", pack([Trajectory(1, TEXT, 1)]))
    put_batch(here.writer.directory, "engine", [Trajectory(2, TEXT, 1)])
    for version in (1, 2):
        here.sync(version, 0)
    assert here.writer.store.tokens == 60
    assert sent == [2]


def test_the_engines_of_a_node_share_what_is_sealed_at_a_weight_sync(
    waits: Waits, monkeypatch: pytest.MonkeyPatch, here: NodeHistory
) -> None:
    run_ledger = Actor(start=(None, 0, 0), sync=SYNCED, add=None)
    monkeypatch.setattr(ledger, "running_ledger", lambda: run_ledger)
    monkeypatch.setattr(node, "_TOKENS_AT_SYNC", 30)
    here.sync(0, 0)
    texts = [Trajectory(problem, TEXT, 1) for problem in range(20)]
    put_batch(here.writer.directory, "engine", texts)
    left = []
    for version in (1, 1, 1, 2):
        here.sync(version, 0)
        left.append(here.writer.store.staged)
    first, *others, last = left
    assert 0 < first < 600 and others == [first, first] and last < first


@pytest.mark.parametrize("kind", [BATCH, TEXTS, AWAY])
@pytest.mark.parametrize("odd", ["a pipe", "a directory", "empty", "no name"])
def test_one_odd_file_in_the_spool_costs_itself(
    waits: Waits,
    monkeypatch: pytest.MonkeyPatch,
    here: NodeHistory,
    kind: str,
    odd: str,
    caplog: Any,
) -> None:
    synced = SYNCED._replace(nodes=("", "there"))
    run_ledger = Actor(start=(None, 0, 0), sync=synced, add=None)
    monkeypatch.setattr(ledger, "running_ledger", lambda: run_ledger)
    folder = here.writer.directory / FOLDER
    path = folder / (kind if odd == "no name" else f"{kind}-there-x")
    if odd == "a pipe":
        os.mkfifo(path)
    elif odd == "a directory":
        (path / "inside").mkdir(parents=True)
    else:
        path.write_bytes(b"")
    monkeypatch.setattr(ledger, "find_actor", lambda name: Actor(receive=None))
    here.sync(1, 0)
    caplog.clear()
    put_file(here.writer.directory, f"{TEXTS}-z", pack([Trajectory(1, TEXT, 1)]))
    for version in (2, 3):
        here.tick()
        here.sync(version, 0)
    assert here.writer.store.tokens == 30
    assert len([r for r in caplog.records if str(path) in r.message]) <= 1
    assert "Traceback" not in caplog.text


def test_a_place_that_can_not_be_taken_over_is_replaced_by_one_that_can_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: NodeHistory
) -> None:
    monkeypatch.setattr(node, "directory_for", lambda name, *_: tmp_path / name)
    another = NodeHistory(HistoryConfig(max_bytes=2**24), "das-history-test", None, 0.1)
    assert another.writer.directory.parent == tmp_path
    assert another.writer.directory != here.writer.directory
