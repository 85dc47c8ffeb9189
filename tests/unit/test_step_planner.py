"""The plans of the next steps on vLLM's V2 runner: a rollout that lost is followed by
silence.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
import torch

from das_adapter.config import parse
from das_adapter.core import tuning
from das_adapter.core.index import IndexFileError
from das_adapter.core.latency import StepModel, StepTimes
from das_adapter.core.steps import Rest, StepPlan, TimedStep
from das_adapter.engine.plan import DraftPlan
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.scheduler import PlanLookup
from das_adapter.engine.v2 import step_planner
from das_adapter.engine.v2.live import LiveTexts
from das_adapter.engine.v2.step_planner import Output, Step, StepPlanner
from das_adapter.engine.worker import WorkerState
from das_adapter.protocol.decision_log import read
from das_adapter.protocol.messages import Refresh
from das_adapter.protocol.metrics import figures
from das_adapter.reports import run_series

DRAFTED = 3
PLAIN_S = 0.01
IDS = [f"request {i}" for i in range(4)]
THREE_TOKENS: Any = SimpleNamespace(
    lengths=torch.full((len(IDS),), DRAFTED),
    chances=torch.full((len(IDS), DRAFTED), 0.8),
    by_model=torch.zeros(len(IDS), dtype=torch.bool),
)
"""What is offered for the requests of a step."""


class Engine:
    """Takes ten milliseconds for a step, and what the test says for one with drafts, of
    which one is accepted.
    """

    def __init__(self, **das: Any) -> None:
        model = SimpleNamespace(
            max_model_len=4096,
            get_vocab_size=lambda: 100,
            enforce_eager=True,
            quantization=None,
        )
        config = parse({"drafter": "history", **das})
        vllm_config = SimpleNamespace(
            model_config=model, compilation_config=SimpleNamespace(cudagraph_mode=None)
        )
        self.planner = StepPlanner(config, vllm_config)
        # as the data sheet of a GPU says
        policy = self.planner.engine.policy
        policy.latency = StepTimes(StepModel(base=PLAIN_S, token=0.0))
        self.wanting = False
        self.now = 0.0
        self._rollouts = 0
        self.chosen = DraftPlan()
        stock = policy.choose

        def choose(*args: Any) -> Any:
            found = stock(*args)
            if not self.wanting or isinstance(found, Rest):
                return found if isinstance(found, Rest) else Rest(0, True)
            wanted = np.full(len(found.history), DRAFTED)
            budget = int(wanted.sum()) if found.budget else 0
            return found._replace(history=wanted, budget=budget)

        policy.choose = choose  # type: ignore[method-assign]

    def rollout(
        self, steps: int, drafted_s: float, silent_steps: int = 0, end: int = 4000
    ) -> list[bool]:
        """Return which steps carried drafts; none is wanted in the first few. `end`:
        length at which requests stop.
        """
        self._rollouts += 1
        ids = [f"{req_id} of {self._rollouts}" for req_id in IDS]
        carried = []
        wanted = 0
        for number in range(steps):
            self.wanting = number >= silent_steps
            begun = [
                LiveRequest(req_id, i, 8, end, True, length=8)
                for i, req_id in enumerate(ids)
                if number == 0
            ]
            drafts = DRAFTED if wanted else 0
            offer = THREE_TOKENS if wanted or self.wanting else None
            drafted = dict.fromkeys(ids, drafts)
            step = Step(
                begun, frozenset(), drafted, number > 0, self.now, offer, req_ids=ids
            )
            self.now += drafted_s if drafts else PLAIN_S
            carried.append(bool(drafts))
            sampled = [[1] * (2 if drafts else 1)] * len(ids)
            self.chosen = self.planner.process_output(Output(step, sampled, self.now))
            wanted = self.chosen.num_draft_tokens
        return carried

    def sync(self) -> str | None:
        silent: str | None = self.planner.stats()["reason"]
        self.planner.refresh(Refresh(version=self._rollouts))
        return silent


def test_a_rollout_that_lost_is_followed_by_one_of_silence() -> None:
    engine = Engine()
    first = engine.rollout(192, drafted_s=2.15 * PLAIN_S, silent_steps=40)
    assert engine.sync() is None and sum(first) > 100
    assert "drafting lost a whole rollout" in engine.planner.stats()["reason"]
    assert not any(engine.rollout(96, drafted_s=1.1 * PLAIN_S))
    engine.sync()
    assert all(engine.rollout(96, drafted_s=1.1 * PLAIN_S)[8:])
    assert engine.sync() is None


def test_where_each_request_has_its_own_number_of_draft_tokens_a_step_has_a_total(
    tmp_path: Path,
) -> None:
    """And each has room for as much of it as it may get."""
    engine = Engine()
    engine.planner.give_own_lengths(())
    engine.rollout(40, drafted_s=PLAIN_S, silent_steps=2)
    # it crosses from process to process
    chosen = pickle.loads(pickle.dumps(engine.chosen))
    assert chosen.num_draft_tokens == chosen.budget == DRAFTED * len(IDS)
    assert chosen.req_ids == [f"{req_id} of 1" for req_id in IDS]
    assert chosen.limits.tolist() == [32] * len(IDS) and chosen.worth.max() == 1.0
    for req_ids, places in (
        (chosen.req_ids, [0, 1, 2, 3]),
        ([f"{IDS[3]} of 1", f"{IDS[1]} of 1"], [3, 1]),
    ):
        most, worth, joined = chosen.limits_and_worth(req_ids)
        assert (most.tolist(), worth.tolist(), joined) == (
            [32] * len(places),
            chosen.worth[places].tolist(),
            0,
        )
    most, worth, joined = chosen.limits_and_worth(["one that joined"])
    assert (most.tolist(), worth.tolist(), joined) == (
        [chosen.num_draft_tokens],
        [1.0],
        1,
    )


def test_what_a_weight_sync_takes_is_no_part_of_a_decode_step() -> None:
    """The requests go on behind it."""
    engine = Engine()
    planner = engine.planner
    timed: list[float] = []
    planner.engine.timed = lambda step, _: timed.append(  # type: ignore[method-assign]
        step.seconds / (step.steps or 1)
    )
    begun = [LiveRequest(id_, i, 8, 4000, True, length=8) for i, id_ in enumerate(IDS)]
    for number in range(20):
        if number == 10:
            planner.refresh(Refresh(version=1))
            engine.now += 30.0
        step = Step(begun, frozenset(), {}, number > 0, engine.now, req_ids=list(IDS))
        begun = []
        engine.now += PLAIN_S
        planner.process_output(Output(step, [[1]] * len(IDS), engine.now))
    planner.stats()
    assert len(timed) > 10
    assert timed == pytest.approx([PLAIN_S] * len(timed))


def scheduled(
    chosen: DraftPlan, running: int, waiting: int = 0, chunks: bool = False
) -> DraftPlan:
    """Return the plan of a step of 8192 tokens."""
    requests = [
        SimpleNamespace(is_prefill_chunk=chunks and i == running - 1)
        for i in range(running)
    ]
    scheduler = SimpleNamespace(max_num_scheduled_tokens=8192, running=requests)
    scheduler.get_request_counts = lambda: (running, waiting)
    lookup = PlanLookup(scheduler, (1, 2, 4, 8, 16))
    lookup.chosen = chosen
    number = lookup[running - chunks]
    assert lookup.scheduled is not None
    assert lookup.scheduled.num_draft_tokens == number
    return lookup.scheduled


@pytest.mark.parametrize(
    ("total", "by_model", "running", "fit", "beside_prompts"),
    [
        (900, 0, 240, 16, 16),
        (900, 0, 500, 15, 7),
        (0, 0, 500, 8, 4),  # of one length
        (900, 4, 500, 8, 4),
        (900, 4, 1500, 4, 1),
        (900, 0, 3000, 1, 0),
        (0, 0, 5000, 0, 0),
    ],
)
def test_draft_tokens_leave_half_of_a_step_to_prompts_that_wait(
    total: int, by_model: int, running: int, fit: int, beside_prompts: int
) -> None:
    chosen = DraftPlan(16, by_model, budget=total, req_ids=IDS)
    assert scheduled(chosen, running).num_draft_tokens == fit
    waiting = scheduled(chosen, running, waiting=3)
    in_chunks = scheduled(chosen, running, chunks=True)
    assert waiting.num_draft_tokens == in_chunks.num_draft_tokens == beside_prompts
    assert replace(waiting, num_draft_tokens=16) == chosen


def test_a_model_drafts_equally_many_tokens_of_which_each_request_has_its_own_number_verified() -> (
    None
):
    engine = Engine(drafter="self")
    engine.planner.give_own_lengths(())
    policy: Any = engine.planner.engine.policy
    model = np.array([3, 1, 0, 2])
    worth = np.ones(4)
    policy.choose = lambda *_: StepPlan(0 * model, model, budget=6, weights=worth)
    engine.rollout(40, drafted_s=PLAIN_S)
    chosen = pickle.loads(pickle.dumps(engine.chosen))
    assert (chosen.num_draft_tokens, chosen.num_model_tokens) == (4, 4)
    assert (chosen.budget, len(chosen.limits)) == (6, 4)
    assert (
        chosen.chances.tolist()
        == policy.drafts.confidence.chances.tolist()
        == sorted(chosen.chances)
    )
    assert 0.0 < chosen.chances[0] < 0.2 < 0.8 < chosen.chances[-1] < 1.0


def test_of_the_scheduled_draft_tokens_those_count_that_the_device_has_verified() -> (
    None
):
    step = Step([], frozenset(), {"a": 4, "b": 3}, True, 0.0, req_ids=["b", "a", "c"])
    assert step.verified is not None and step.verified.tolist() == [3, 4, 0]
    step.admitted = np.array([1, 3, 0])
    assert step.verified.tolist() == [1, 3, 0]


@pytest.mark.parametrize(
    "behind", [False, True], ids=["before the weight sync", "behind it"]
)
def test_each_rollouts_figures_are_told_once_wherever_the_host_asks_for_them(
    behind: bool,
) -> None:
    """veRL asks before each weight sync, NeMo-RL's asynchronous trainer behind it."""
    engine = Engine()
    found = []
    engine.rollout(192, drafted_s=1.1 * PLAIN_S, silent_steps=40)
    engine.planner.engine.fail(RuntimeError("boom"))
    if behind:
        engine.planner.refresh(Refresh(1))
    found.append(figures([engine.planner.stats()]))
    if not behind:
        engine.planner.refresh(Refresh(1))
    found.append(figures([engine.planner.stats()]))
    assert [step["das/health"] for step in found] == [0.0, 1.0]
    assert found[0]["das/time_saved_s"] > 0.5 and found[1]["das/time_saved_s"] == 0.0
    assert 0.0 < found[0]["das/of_stock"] < 1.0 and "das/of_stock" not in found[1]


def test_each_of_several_rollouts_that_fail_alike_is_told() -> None:
    engine = Engine()
    found = []
    for version in (1, 2, 3):
        engine.rollout(20, drafted_s=PLAIN_S)
        engine.planner.engine.fail(RuntimeError("boom"))
        engine.planner.refresh(Refresh(version))
        found.append(figures([engine.planner.stats()])["das/health"])
    assert found == [0.0, 0.0, 0.0]


def test_what_was_told_of_a_rollout_before_the_weight_sync_is_not_told_again_behind_it() -> (
    None
):
    engine = Engine()
    engine.rollout(192, drafted_s=1.1 * PLAIN_S, silent_steps=40)
    engine.planner.engine.fail(RuntimeError("boom"))
    first = engine.planner.stats()
    told = first["time_saved_s"]
    engine.rollout(64, drafted_s=1.1 * PLAIN_S)
    saved = engine.planner.engine.policy.figures()["time_saved_s"]
    engine.planner.refresh(Refresh(1))
    engine.planner.refresh(Refresh(2))
    second = engine.planner.stats()
    assert 0.5 < told <= saved
    assert told + second["time_saved_s"] == pytest.approx(saved, rel=0.02)
    assert "boom" in first["error"] and second["error"] is None


def test_seconds_saved_are_told_once_however_often_the_host_asks() -> None:
    engine = Engine()
    told = []
    saved = 0.0
    for version in (1, 2):
        for _ in range(2):
            engine.rollout(192, drafted_s=1.1 * PLAIN_S, silent_steps=40)
            told.append(engine.planner.stats()["time_saved_s"])
        saved += engine.planner.engine.policy.figures()["time_saved_s"]
        engine.planner.refresh(Refresh(version))
    told.append(engine.planner.stats()["time_saved_s"])
    assert sum(told) == pytest.approx(saved) and saved > 1.0


def test_requests_that_end_with_the_last_step_are_logged_before_the_weight_sync(
    tmp_path: Path,
) -> None:
    """vLLM says that they have ended when the next step begins, after it."""
    engine = Engine(log_dir=str(tmp_path))
    for _ in range(2):
        engine.rollout(20, drafted_s=PLAIN_S, silent_steps=20, end=8 + 20)
        engine.sync()
    first, second = read(tmp_path)
    assert [request.tokens for request in first.requests] == [20] * len(IDS)
    assert [request.tokens for request in second.requests] == [20] * len(IDS)


def test_the_log_counts_draft_tokens_that_were_accepted_and_not_the_policys(
    tmp_path: Path,
) -> None:
    engine = Engine(log_dir=str(tmp_path))
    engine.rollout(20, drafted_s=PLAIN_S, silent_steps=5)
    engine.sync()
    (rollout,) = read(tmp_path)
    drafted = [step for step in rollout.steps if step.drafted]
    assert {step.accepted for step in drafted} == {len(IDS)}  # one of each draft
    plain = [step for step in rollout.steps if not step.drafted]
    assert {step.accepted for step in plain} == {0}


@pytest.mark.parametrize(
    "asked", ["", "in it", "before the weight sync", "behind it", "in it, behind it"]
)
def test_the_log_has_a_rollouts_counts_once_whoever_asks_for_them(
    asked: str, tmp_path: Path
) -> None:
    """TRL never asks, NeMo-RL's asynchronous trainer behind the weight sync, vLLM's
    logger at any time.
    """
    engine = Engine(log_dir=str(tmp_path))
    told = []
    names = ("steps", "tokens", "draft_tokens")
    for version in (1, 2):
        engine.rollout(40, drafted_s=PLAIN_S, silent_steps=2)
        if "in it" in asked:
            told.append(engine.planner.stats())
            engine.rollout(30, drafted_s=PLAIN_S, silent_steps=2)
        if version == 1:
            engine.planner.engine.fail(RuntimeError("boom"))
        if "before" in asked:
            told.append(engine.planner.stats())
        engine.planner.refresh(Refresh(version))
        if "behind" in asked:
            told.append(engine.planner.stats())
    told.append(engine.planner.stats())
    logged = np.array(
        [
            [sum(counts[name] for counts in r.counts) for name in names]
            for r in read(tmp_path)
        ]
    )
    assert (
        logged[:, 0].tolist() == [70 if "in it" in asked else 40] * 2
        and logged.min() > 0
    )
    assert logged.sum(0).tolist() == [
        sum(stats[name] for stats in told) for name in names
    ]
    ((_, reason, versions),) = (
        note for note in run_series.notes(read(tmp_path)) if note[0] == "alarm"
    )
    assert "boom" in reason and versions == [1]
    assert ["boom" in str(stats["error"]) for stats in told].count(True) == 1


def test_what_was_told_of_a_rollout_that_no_weight_sync_follows_is_in_the_log(
    tmp_path: Path,
) -> None:
    engine = Engine(log_dir=str(tmp_path))
    engine.rollout(20, drafted_s=PLAIN_S)
    told = engine.planner.stats()
    (last,) = read(tmp_path)
    assert (last.end, last.counts[0]["tokens"], len(last.steps)) == (
        None,
        told["tokens"],
        19,
    )


def test_requests_come_and_go_while_the_drafter_has_failed(tmp_path: Path) -> None:
    engine = Engine(log_dir=str(tmp_path))
    policy: Any = engine.planner.engine.policy
    stock = policy.choose
    policy.choose = None
    engine.rollout(20, drafted_s=PLAIN_S, end=8 + 20)
    assert "NoneType" in engine.planner.engine.counters.error
    engine.rollout(20, drafted_s=PLAIN_S, end=8 + 40)
    engine.sync()
    policy.choose = stock
    assert set(engine.planner.engine.live) == {f"{req_id} of 2" for req_id in IDS}
    engine.rollout(20, drafted_s=PLAIN_S, silent_steps=20, end=8 + 20)
    engine.sync()
    (after,) = (rollout for rollout in read(tmp_path) if rollout.version == 3)
    assert [request.tokens for request in after.requests] == [20] * len(IDS)


def test_a_command_that_fails_stops_the_drafter() -> None:
    chooses: Any = Engine().planner
    chooses.map_guest_history = None
    assert (
        "NoneType"
        in WorkerState(None, chooses.engine.config, chooses).call(
            "map_guest_history", {"files": []}
        )["error"]
    )
    assert chooses.engine.policy.figures()["state"] == "failed"


def test_nobody_counts_while_the_counts_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chooses: Any = Engine().planner
    state = WorkerState(None, chooses.engine.config, chooses)
    locked = []
    state.model_runner = 2
    counters = type(chooses.engine.counters)
    counts = Thread(target=chooses.catch_up)
    stock = counters.read_and_reset

    def read_and_reset(self: Any) -> Any:
        counts.start()
        counts.join(0.2)
        locked.append(counts.is_alive())
        return stock(self)

    monkeypatch.setattr(counters, "read_and_reset", read_and_reset)
    assert state.call("stats", {})["tokens"] == 0 and locked == [True]


def test_a_request_that_the_history_refuses_takes_no_slot() -> None:
    engine: Any = Engine().planner.engine
    engine.history.open = None
    for number in range(100):
        with pytest.raises(TypeError):
            engine.open(LiveRequest(str(number), 1, 0, 8, True), 0)
        assert not engine.live
    # It gets the slot that the next request gets as well.
    assert engine.policy.begin(1, 0, 8) == 0


def test_a_request_that_the_history_refuses_leaves_no_gap_in_the_texts_of_the_others() -> (
    None
):
    chooses: Any = Engine().planner
    stock = chooses.engine.history.open

    def open_one(request: LiveRequest, *texts: Any) -> None:
        if request.req_id == "refused":
            raise IndexFileError("damaged")
        stock(request, *texts)

    chooses.engine.history.open = open_one
    first, refused, last = (
        LiveRequest(req_id, 7, 8, 100, True, length=8, text=[])
        for req_id in ("first", "refused", "last")
    )
    for begun, sampled in (
        ([first], [[1]]),
        ([refused, last], [[2], [5], [6]]),
        ([], [[3], [5], [7]]),
    ):
        req_ids = ["first", "refused", "last"][: len(sampled)]
        chooses.process_output(
            Output(
                Step(begun, frozenset(), {}, False, 0.0, req_ids=req_ids), sampled, 0.0
            )
        )
    assert (first.text, refused.text, last.text) == ([1, 2, 3], [], [6, 7])
    assert "damaged" in chooses.engine.counters.error


def test_a_response_ends_at_its_stop_and_at_its_last_token_whatever_a_later_step_has_sampled() -> (
    None
):
    stops = LiveRequest(
        "stops", 7, 8, 18, True, length=8, stops=frozenset({3}), text=[]
    )
    full = LiveRequest("full", 7, 8, 12, True, length=8, text=[])
    chooses = Engine().planner
    steps = ([[1, 2, 5], [1, 3, 9]], [[6, 7], [8]])
    for number, sampled in enumerate(steps):
        begun = [stops, full] if number == 0 else []
        chooses.process_output(
            Output(
                Step(begun, frozenset(), {}, False, 0.0, req_ids=["full", "stops"]),
                sampled,
                0.0,
            )
        )
    assert (stops.text, full.text) == ([1, 3], [1, 2, 5, 6])


def test_a_request_that_comes_back_goes_on_with_the_text_it_brings() -> None:
    first = LiveRequest("a", 7, 8, 18, True, length=8, text=[])
    # preempted, and a step's output was not heard
    again = LiveRequest("a", 7, 8, 18, True, length=10, text=[4, 5])
    chooses = Engine().planner
    for begun, sampled in (([first], [4]), ([again], []), ([], [6])):
        chooses.process_output(
            Output(
                Step(begun, frozenset(), {}, False, 0.0, req_ids=["a"]), [sampled], 0.0
            )
        )
    assert first.text == [4, 5, 6]


def test_tokens_that_vllm_throws_away_are_counted_once_they_are_written_again() -> None:
    """A reset of the prefix cache drops the output of the step in flight."""
    first = LiveRequest("a", 7, 8, 40, True, length=8, text=[])
    again = LiveRequest("a", 7, 8, 40, True, length=9, text=[4])
    chooses = Engine().planner
    steps = (([first], [4]), ([], [5, 6, 7]), ([again], []), ([], [5, 6]), ([], [7]))
    for begun, sampled in steps:
        drafts = {"a": 2} if len(sampled) > 1 else {}
        step = Step(begun, frozenset(), drafts, False, 0.0, req_ids=["a"])
        chooses.process_output(Output(step, [sampled], 0.0))
    chooses.count_last()
    counters = chooses.engine.counters
    assert first.text == [4, 5, 6, 7]
    assert counters.tokens == 4 and counters.accepted_tokens >= 0


class Plain:
    """An engine that never has anything to draft: the host's work in a step takes
    `busy` seconds.
    """

    def __init__(self, busy: float) -> None:
        self.planner = Engine().planner
        self._busy = busy
        self.timed: list[TimedStep] = []
        policy = self.planner.engine.policy
        stock = policy.timed

        def timed(step: TimedStep) -> float | None:
            self.timed.append(step)
            return stock(step)

        policy.timed = timed  # type: ignore[method-assign]
        self.worked: list[bool] = []
        """Of each step, whether the output before it was taken at once."""
        self.looked: list[bool] = []

    def rollout(self, steps: int) -> None:
        ids = list(IDS)
        now = 0.0
        pending = [False, False]
        for number in range(steps):
            begun = [
                LiveRequest(req_id, i, 8, 4000, True, length=8)
                for i, req_id in enumerate(ids)
                if number == 0
            ]
            looks = pending.pop(0)
            offer = NOTHING if looks else None
            step = Step(begun, frozenset(), {}, number > 0, now, offer, req_ids=ids)
            counted = self.planner.engine.counters.steps
            self.planner.count_last()
            self.worked.append(
                number == 0 or self.planner.engine.counters.steps > counted
            )
            now += PLAIN_S + self._busy * self.worked[-1]
            output = Output(step, [[1]] * len(ids), now)
            pending.append(self.planner.process_output(output).looks_up)
            self.looked.append(looks)


NOTHING: Any = SimpleNamespace(
    lengths=torch.zeros(len(IDS), dtype=torch.int32),
    chances=torch.zeros(len(IDS), DRAFTED),
    by_model=torch.zeros(len(IDS), dtype=torch.bool),
)


def test_a_step_is_held_against_the_drafter_where_the_host_has_worked_for_it() -> None:
    engine = Plain(busy=0.001)
    engine.rollout(400)
    engine.planner.stats()
    asked = [step for step in engine.timed if step.asked]
    baseline = [step for step in engine.timed if not step.asked]
    counted = [step for step in baseline if step.steps is not None]
    timed = [step for step in baseline if step.steps is None]
    num_counted = sum(step.steps for step in counted if step.steps)
    assert len(asked) + len(timed) + num_counted == 399
    assert num_counted > 100 > len(timed) > 30
    for step in baseline:
        assert step.seconds / (step.steps or 1) == pytest.approx(PLAIN_S)
    assert any(step.seconds == pytest.approx(PLAIN_S + 0.001) for step in asked)
    policy = engine.planner.engine.policy
    assert 0.0 < policy.figures()["of_stock"] - 1.0 < 0.05
    assert [policy.end(slot).written for slot in range(4)] == [400] * 4


def test_what_is_put_aside_changes_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    aside = Plain(busy=0.0)
    aside.rollout(300)
    monkeypatch.setattr(step_planner, "MOST_PUT_OFF", 0)
    at_once = Plain(busy=0.0)
    at_once.rollout(300)
    assert all(at_once.worked) and sum(aside.worked) < 150
    assert aside.looked == at_once.looked and any(aside.looked)


def spoken(steps: int, record: bool) -> StepPlanner:
    """Have an engine rest while its requests write a text each; the second stops at a
    token in step 100, the third has no room for more after step 150.
    """
    chooses = Engine().planner
    ids = list(IDS)
    ended = frozenset[str]()
    stops = frozenset([99])
    ends = dict(zip(IDS, (4000, 4000, 8 + 150, 4000), strict=True))
    for number in range(steps):
        begun = [
            LiveRequest(
                req_id,
                i,
                8,
                ends[req_id],
                record,
                length=8,
                stops=stops,
                text=[] if i != 3 else None,
            )
            for i, req_id in enumerate(ids)
            if number == 0
        ]
        now = 0.01 * number + 0.001 * (number % 7)
        step = Step(
            begun, ended, {}, number > 0, now - 0.009, NOTHING, req_ids=list(ids)
        )
        step.offer = NOTHING if number % 16 == 1 else None
        stopping = {IDS[1]: number == 99, IDS[2]: number == 149}
        sampled = [
            [99 if stopping.get(r) and r == IDS[1] else number % 90] for r in ids
        ]
        chooses.process_output(Output(step, sampled, now))
        chooses.count_last()
        ended = frozenset(req_id for req_id in ids if stopping.get(req_id))
        ids = [req_id for req_id in ids if req_id not in ended]
    chooses.catch_up()
    chooses.count_last()
    return chooses


@pytest.mark.parametrize(
    ("steps", "record"), [(90, True), (140, True), (300, True), (140, False)]
)
def test_steps_that_are_taken_together_are_taken_as_one_by_one(
    steps: int, record: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[int]()
    stock = LiveTexts.process_single_tokens

    def counted(self: LiveTexts, req_ids: Any, outputs: Any) -> Any:
        slots = stock(self, req_ids, outputs)
        taken.append(0 if slots is None else len(outputs))
        return slots

    monkeypatch.setattr(LiveTexts, "process_single_tokens", counted)
    roughly = spoken(steps, record)
    monkeypatch.setattr(step_planner, "TIMED_EVERY", 1)
    taken.clear()
    together = spoken(steps, record)
    assert sum(taken) > 0.3 * steps
    monkeypatch.setattr(LiveTexts, "process_single_tokens", lambda *_: None)
    apart = spoken(steps, record)
    ours = together.engine.policy
    theirs = apart.engine.policy
    some = roughly.engine.policy
    assert together.engine.counters == apart.engine.counters
    assert roughly.engine.counters == together.engine.counters
    assert ours.figures() == pytest.approx(theirs.figures())
    assert ours.latency.model == theirs.latency.model
    assert some.latency.observed <= ours.latency.observed == theirs.latency.observed
    of_stock = ours.figures()["of_stock"]
    assert some.figures()["of_stock"] == pytest.approx(of_stock, rel=0.03)
    for one, other in zip(
        together.engine.live.values(), apart.engine.live.values(), strict=True
    ):
        assert (one.req_id, one.text, one.slot) == (
            other.req_id,
            other.text,
            other.slot,
        )
        assert ours.end(one.slot) == theirs.end(other.slot)


def test_a_resting_engine_looks_up_once_for_each_time_that_it_asks() -> None:
    engine = Plain(busy=0.0)
    engine.rollout(300)
    look_s = tuning.LOOK_S + len(IDS) * tuning.LOOK_REQUEST_S
    host_s = (1 + step_planner.LATE_STEPS) * look_s
    every = host_s / (tuning.LOOK_SHARE * PLAIN_S)
    # sooner at first
    assert 300 / every - 4 < sum(engine.looked) < 300 / every + 6


def test_a_step_is_learned_from_before_the_host_waits_for_the_next() -> None:
    planner = Engine().planner
    request = LiveRequest("a", 7, 8, 18, True, length=8)
    step = Step([request], frozenset(), {}, True, 0.0, req_ids=["a"])
    planner.process_output(Output(step, [[4]], 0.0))
    counted = planner.engine.counters
    assert counted.tokens == 0
    planner.count_last()
    assert counted.tokens == 1
    planner.count_last()
    assert counted.tokens == 1


def test_an_engine_that_gave_drafts_up_drafts_after_no_weight_sync() -> None:
    engine = Engine()
    engine.planner.engine.give_up("this vLLM drafts nothing")
    for _ in range(2):
        engine.sync()
        assert not any(engine.rollout(20, 0.001))
        assert engine.planner.stats()["error"] == "this vLLM drafts nothing"
