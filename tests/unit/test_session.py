"""What a history or a ledger that hangs costs the engines of a run, without Ray."""

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
from das_adapter.core.length import RESPONSE
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import Published, Trajectory, pack
from das_adapter.protocol.spool import AWAY, BATCH, FOLDER, TEXTS, put_batch, put_file
from das_adapter.service import ledger, node, session
from das_adapter.service.ledger import Synced
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
