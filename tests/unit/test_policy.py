"""The policy on a modelled engine: what it decides for a batch, and that it never
makes a rollout slower.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import decide
from modelled import Engine, EngineV1, Text

from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.core.latency import StepModel
from das_adapter.core.length import RESPONSE, LengthClass, LengthModel
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.policy import DraftPolicy
from das_adapter.core.requests import RequestTable
from das_adapter.core.steps import Outcome, Rest, Search, TimedStep

MEMORY_BOUND = StepModel(base=0.048, token=0.0, bend=0.0006, knee=8)
COMPUTE_BOUND = StepModel(base=0.002, token=0.004)


def stated(limits: np.ndarray, chance: float) -> tuple[np.ndarray, np.ndarray]:
    """Drafts as long as they may be, whose tokens are each accepted with `chance`."""
    offsets = np.concatenate([[0], np.cumsum(limits)])
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], limits)
    return np.maximum(chance ** (place + 1), 1e-3).astype(np.float32), offsets


def rollout(
    lengths: np.ndarray,
    truth: StepModel,
    policy: DraftPolicy | None,
    chance: float = 0.8,
    at_once: int | None = None,
) -> Engine:
    """Decode requests of these lengths; request i is problem i. A draft token survives
    with `chance` to the power of its place, by a draw fixed for (request, position).
    """
    rng = np.random.default_rng(7)
    texts = []
    for length in lengths.tolist():
        text = Text(rng, length, rates=(1.0 - chance,), unknown=0.0)
        text.blind = 0
        texts.append(text)
    engine = Engine(truth)
    if policy is not None:
        engine = EngineV1(policy, truth, longest=int(lengths.max()))
    engine.rollout(0, texts, at_once, sync=False)
    return engine


def make(
    budget: Any = "optimal", most: int = 16, speculate: Any = "auto"
) -> DraftPolicy:
    return DraftPolicy(
        DasConfig(budget=budget, max_draft_tokens=most, speculate=speculate),
        longest_response=2048,
    )


def warm(
    policy: DraftPolicy, lengths: np.ndarray, truth: StepModel, **how: float
) -> DraftPolicy:
    rollout(lengths, truth, policy, **how)
    policy.weight_sync(
        np.array([(i, int(n), 0) for i, n in enumerate(lengths)], RESPONSE)
    )
    return policy


def long_tail(count: int = 48, seed: int = 0) -> np.ndarray:
    return (
        np.minimum(np.random.default_rng(seed).lognormal(4.3, 0.9, count), 1500).astype(
            int
        )
        + 4
    )


def test_optimal_beats_every_fixed_length_on_a_long_tail() -> None:
    lengths = long_tail()
    times = {}
    for k in (1, 3, 7, 15):
        fixed = warm(make("unlimited", k, speculate="always"), lengths, MEMORY_BOUND)
        times[k] = rollout(lengths, MEMORY_BOUND, fixed).now
    optimal = rollout(lengths, MEMORY_BOUND, warm(make(), lengths, MEMORY_BOUND)).now
    assert optimal < 0.9 * min(times.values())


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_at_every_starting_batch_it_keeps_up_with_the_best_fixed_length(
    batch: int,
) -> None:
    lengths = np.clip(
        np.random.default_rng(batch).lognormal(3.5, 0.7, batch), 8, 200
    ).astype(int)
    lengths[0] = 200
    fixed = [
        rollout(lengths, MEMORY_BOUND, make("unlimited", k, speculate="always")).now
        for k in (1, 3, 7, 15)
    ]
    policy = warm(make(), np.full(48, 96), MEMORY_BOUND)
    groups = [(i, int(n), 1) for i, n in enumerate(lengths) for _ in range(4)]
    policy.weight_sync(np.array(groups, RESPONSE))
    assert rollout(lengths, MEMORY_BOUND, policy).now <= 1.05 * min(fixed)


@pytest.mark.parametrize(
    "truth",
    [MEMORY_BOUND, COMPUTE_BOUND, StepModel(base=0.03, token=0.001, draft=0.004)],
)
@pytest.mark.parametrize("chance", [0.02, 0.5, 0.9])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_never_much_slower_than_off(
    truth: StepModel, chance: float, batch: int
) -> None:
    lengths = np.random.default_rng(1).integers(150, 400, batch)
    off = rollout(lengths, truth, None).now
    policy = warm(make(), lengths, truth, chance=chance)
    assert rollout(lengths, truth, policy, chance=chance).now <= 1.02 * off


def test_what_is_saved_is_what_is_reported() -> None:
    lengths = long_tail()
    off = rollout(lengths, MEMORY_BOUND, None).now
    policy = warm(make(), lengths, MEMORY_BOUND)
    on = rollout(lengths, MEMORY_BOUND, policy).now
    assert policy.figures()["time_saved_s"] == pytest.approx(off - on, abs=0.05 * off)


def test_batches_without_a_weight_sync_between_them_are_credited_one_by_one() -> None:
    lengths = long_tail()
    off = rollout(lengths, MEMORY_BOUND, None).now
    policy = warm(make(), lengths, MEMORY_BOUND)
    on = sum(rollout(lengths, MEMORY_BOUND, policy).now for _ in range(3))
    assert policy.figures()["time_saved_s"] == pytest.approx(
        3 * off - on, abs=0.05 * 3 * off
    )


def test_drafting_goes_to_those_who_decide_the_end() -> None:
    lengths = np.array([60] * 30 + [1200] * 12)
    policy = make()
    for version in range(1, 4):
        rollout(lengths, StepModel(base=0.02, token=0.001), policy, chance=0.7)
        policy.weight_sync(
            np.array([(i, int(n), version) for i, n in enumerate(lengths)], RESPONSE)
        )
    result = rollout(lengths, StepModel(base=0.02, token=0.001), policy, chance=0.7)
    drafted: dict[bool, list[float]] = {True: [], False: []}
    for request in result.ended:
        steps = request.written - request.accepted
        drafted[request.written > 60].append(request.drafted / steps)
    long = np.mean(drafted[True])
    short = np.mean(drafted[False])
    assert long > 1.0
    assert short < 0.2 * long


def test_a_compute_bound_batch_gets_no_drafts_and_its_tail_does() -> None:
    truth = StepModel(base=0.005, token=0.004)
    lengths = np.array([100] * 63 + [900])
    policy = warm(make(), lengths, truth, chance=0.6)
    result = rollout(lengths, truth, policy, chance=0.6)
    assert result.drafted > 300
    assert result.accepted / result.drafted > 0.4
    assert result.now < rollout(lengths, truth, None).now


@pytest.mark.parametrize("budget", ["uniform", "unlimited"])
def test_always_means_always_and_asks_no_clock(budget: str) -> None:
    lengths = np.full(24, 200)
    runs = []
    for truth in (COMPUTE_BOUND, MEMORY_BOUND):
        policy = make(budget, speculate="always")
        runs.append(rollout(lengths, truth, policy, chance=0.3))
        assert policy.figures()["reason"] is None
    assert runs[0].drafted == runs[1].drafted > 1000
    assert runs[0].steps == runs[1].steps


@pytest.mark.parametrize("scale", [0.001, 0.02, 1.0])
def test_while_nothing_pays_it_considers_drafts_once_in_a_while_and_more_often_where_steps_are_long(
    scale: float,
) -> None:
    lengths = np.full(64, 300)
    truth = COMPUTE_BOUND.scaled(scale)
    policy = warm(make(), lengths, truth, chance=0.05)
    result = rollout(lengths, truth, policy, chance=0.05)
    # in a step
    looks = (
        tuning.LOOK_SHARE
        * truth.step(64, 64, False)
        / (tuning.LOOK_S + 64 * tuning.LOOK_REQUEST_S)
    )
    usual = result.steps * min(0.5, max(1 / tuning.LOOK_STEPS, looks))
    assert usual - 2 <= result.looks <= usual + 16


def test_steps_that_only_measure_ask_the_same_requests() -> None:
    """A neural drafter has to read what they have written since."""
    drafts = ModelDrafts(4, narrows=False)
    policy = DraftPolicy(DasConfig(), longest_response=2048, drafts=drafts)
    slots = np.array([policy.begin(i, 0, 2048) for i in range(32)])
    one = np.ones(32, dtype=int)
    one_draft = np.zeros(32, dtype=int)
    asked = list[tuple[int, ...]]()
    for step in range(3000):
        # rows move as requests come and go
        order = np.random.default_rng(step).permutation(32)
        drafted = one_draft[order]
        decoded = Outcome(
            slots[order], one, drafted if drafted.any() else None, drafted, 1000 * one
        )
        plan = decide(policy, decoded)
        tokens = 32 + int(drafted.sum())
        policy.timed(
            TimedStep(
                slots[order], one, tokens, COMPUTE_BOUND.step(tokens, 32, drafted.any())
            )
        )
        one_draft = np.zeros(32, dtype=int)
        one_draft[slots[order]] = plan.model
        if step > 100 and plan.model.any():
            asked.append(tuple(np.flatnonzero(one_draft)))
    assert len(asked) >= 3
    assert set(asked) == {(0, 1, 2, 3)}


def test_a_refilling_batch_is_judged_by_its_rate() -> None:
    # Eight at a time: whoever ends makes room for the next, so that nobody decides the
    # end.
    lengths = np.full(60, 120)
    truth = StepModel(base=0.03, token=0.0005)
    off = rollout(lengths, truth, None, at_once=8)
    policy = make()
    on = rollout(lengths, truth, policy, at_once=8)
    assert on.now < 0.55 * off.now
    assert policy.figures()["time_saved_s"] == pytest.approx(off.now - on.now, rel=0.1)


def test_a_refilling_batch_without_drafts_has_saved_nothing() -> None:
    """Its longest request was not the last to begin."""
    policy = DraftPolicy(DasConfig(), longest_response=2048, prior=MEMORY_BOUND)
    lengths = np.array([500] + [40] * 36)
    seconds = rollout(lengths, MEMORY_BOUND, policy, chance=0.01, at_once=4).now
    assert policy.figures()["time_saved_s"] == pytest.approx(0.0, abs=0.02 * seconds)


@pytest.mark.parametrize("policy", ["optimal", "das", "uniform", "unlimited"])
def test_drafts_keep_to_the_room_and_the_maximum(policy: str) -> None:
    policy = make(policy, most=8)
    slots = np.array([policy.begin(i, 5, 100) for i in range(5)])
    room = np.array([0, 3, 8, 50, 1])
    seen = []

    def history(limits: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
        seen.append(limits)
        return stated(limits, 0.9)

    plan = decide(
        policy, Outcome(slots, np.ones(5, dtype=int), None, None, room), history
    )
    assert np.all(seen[0] <= np.minimum(room, 8))
    assert np.all(seen[0] >= 0)
    assert np.all(plan.history <= seen[0])


@pytest.mark.parametrize("requests", [1, 32])
def test_das_drafts_for_who_ends_last_however_much_is_written_without_drafts(
    requests: int,
) -> None:
    """Requests that have none say nothing of how far a draft is accepted; one that runs
    alone is not short.
    """
    truth = StepModel(base=0.042, token=0.0, bend=0.0022, knee=4)
    lengths = long_tail(requests)
    policy = DraftPolicy(DasConfig(budget="das", speculate="always"), 2048, prior=truth)
    policy.weight_sync(
        np.array([(i, int(n), 0) for i, n in enumerate(lengths)], RESPONSE)
    )
    assert rollout(lengths, truth, policy).steps < 0.6 * lengths.max()


@pytest.mark.parametrize("truth", [MEMORY_BOUND, COMPUTE_BOUND])
@pytest.mark.parametrize("chance", [0.02, 0.9])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_one_length_for_all_is_never_much_slower_than_off(
    truth: StepModel, chance: float, batch: int
) -> None:
    lengths = np.random.default_rng(1).integers(150, 400, batch)
    off = rollout(lengths, truth, None).now

    def policy() -> DraftPolicy:
        return DraftPolicy(DasConfig(), longest_response=2048, lengths=(1, 2, 4, 8, 16))

    on = rollout(
        lengths, truth, warm(policy(), lengths, truth, chance=chance), chance=chance
    ).now
    assert on <= 1.02 * off
    if truth is MEMORY_BOUND and chance == 0.9 and batch < 64:
        assert on < 0.7 * off


@pytest.mark.parametrize("policy", ["optimal", "das", "uniform", "unlimited"])
@pytest.mark.parametrize("speculate", ["always", "auto"])
def test_one_length_for_all_is_one_that_there_are_graphs_of(
    policy: Any, speculate: Any
) -> None:
    common = (1, 2, 4, 8)
    das = DasConfig(budget=policy, max_draft_tokens=8, speculate=speculate)
    policy = DraftPolicy(das, 2048, lengths=common)
    slots = np.array([policy.begin(i, 5, 400) for i in range(5)])
    lengths = set()
    for _ in range(100):
        decoded = Outcome(slots, np.ones(5, dtype=int), None, None, np.full(5, 50))
        keep = decide(
            policy,
            decoded,
            lambda limits, floor: stated(np.minimum(limits, [0, 1, 3, 5, 5]), 0.9),
        ).history
        assert len(set(keep.tolist())) == 1
        lengths.add(int(keep[0]))
        tokens = int(keep.sum()) + 5
        policy.timed(
            TimedStep(
                slots,
                np.ones(5, dtype=int),
                tokens,
                MEMORY_BOUND.step(tokens, 5, keep.any()),
            )
        )
    assert lengths <= {0, *common}
    assert max(lengths) > 0


def test_steps_at_whose_end_nobody_is_asked_count_as_plain_ones() -> None:
    table = RequestTable()
    curve = np.zeros(4)
    asked, unasked = (
        np.array([table.open(0, np.ones(LengthModel.GRID))]) for _ in range(2)
    )
    for _ in range(20):
        for slot in (asked, unasked):
            table.advance(slot, np.array([4]), np.array([5]), curve)
    assert table.pace[unasked] > 3.5
    for _ in range(30):
        table.advance(asked, np.array([1]), None, curve)
    table.record_baseline_steps(unasked, np.array([30]))
    for column in (table.written, table.pace, table.load):
        assert column[unasked] == pytest.approx(column[asked])


def decoded(
    policy: DraftPolicy,
    truth: StepModel,
    requests: int,
    steps: int,
    chance: float = 0.9,
) -> np.ndarray:
    """Decode a batch, each draft of which is accepted whole; return the draft tokens of
    each request in each step, [steps, requests].
    """
    slots = np.array([policy.begin(i, 0, 2048) for i in range(requests)])
    got = np.ones(requests, dtype=int)
    carried = None
    room = np.full(requests, 1000)
    found = []
    for _ in range(steps):
        outcome = Outcome(slots, got, carried, None, room)
        plan = decide(policy, outcome, lambda most, _: stated(most, chance))
        drafts = np.zeros(requests, dtype=int) + plan.history
        found.append(drafts)
        tokens = requests + int(drafts.sum())
        seconds = truth.step(tokens, requests, bool(drafts.any()))
        policy.timed(TimedStep(slots, got, tokens, seconds))
        carried = drafts if drafts.any() else None
        got = 1 + drafts
    for slot in slots:
        policy.end(slot)
    return np.array(found)


def test_while_it_drafts_it_takes_plain_steps_to_know_what_these_cost() -> None:
    """ "Never slower than off" rests on them."""
    drafts = decoded(make(), MEMORY_BOUND, requests=8, steps=600)
    plain = (drafts[300:].sum(axis=1) == 0).sum()
    assert 1 <= plain <= 15


def test_a_batch_that_begins_when_another_has_ended_does_not_refill_it() -> None:
    """As after a validation: its longest requests decide its end from the first
    step.
    """
    truth = StepModel(base=0.02, token=0.001)
    lengths = [60] * 30 + [1200] * 2
    rows = [(i, n, 1) for i, n in enumerate(lengths)]
    policy = make()
    policy.weight_sync(np.array(rows * 4, RESPONSE))
    for _ in range(2):
        drafts = decoded(policy, truth, requests=32, steps=20, chance=0.7)
        assert drafts[:, :30].sum() == 0 and drafts[:, 30:].mean() > 1.0


def test_das_drafts_a_fraction_of_a_token_in_that_share_of_the_steps() -> None:
    policy = DraftPolicy(
        DasConfig(budget="das", speculate="always"), 2048, prior=MEMORY_BOUND
    )
    rows = [(i, int(n), 0) for i, n in enumerate(long_tail(32))]
    policy.weight_sync(np.array(rows * 4, RESPONSE))
    slots = np.array([policy.begin(i, 0, 2048) for i in range(32)])
    got = np.zeros(32, dtype=int)
    found = []
    for _ in range(24):
        search = policy.next(Outcome(slots, got, None, None, np.full(32, 1000)))
        found.append(search.max_tokens)
        policy.choose(search, stated(search.max_tokens, 0.5))
        got = np.ones(32, dtype=int)
    most = np.array(found)
    num_changes = (np.diff(most, axis=0) != 0).sum(axis=0)
    assert num_changes.max() >= 6  # what is planned anew changes once
    assert np.ptp(most[:, num_changes.argmax()]) == 1
    below_one = (most.max(axis=0) == 1) & (most.min(axis=0) == 0)
    assert below_one.any()


def test_a_weight_sync_fits_the_latency_model_to_the_few_steps_that_there_were() -> (
    None
):
    policy = DraftPolicy(DasConfig(), 2048, prior=MEMORY_BOUND.scaled(20))
    for running in (8, 4, 2):
        policy.timed(plain_step(running))
    truth_s = MEMORY_BOUND.step(8, 8, False)
    assert policy.latency.model.step(8, 8, False) == pytest.approx(20 * truth_s)
    policy.weight_sync(np.zeros(0, RESPONSE))
    assert policy.latency.model.step(8, 8, False) == pytest.approx(truth_s, rel=0.01)


def plain_step(running: int) -> TimedStep:
    """Return a step without drafts."""
    seconds = MEMORY_BOUND.step(running, running, False)
    one = np.ones(running, dtype=int)
    return TimedStep(np.arange(running), one, running, seconds)


def test_steps_have_no_more_tokens_than_can_be_told_from_those_that_were_timed() -> (
    None
):
    free = StepModel(base=0.05, token=0.0)
    policy = DraftPolicy(DasConfig(), 2048, prior=free)
    for _ in range(2 * int(tuning.FIT_TIMES)):
        policy.timed(plain_step(8)._replace(seconds=0.05))
    assert policy.latency.largest_tokens == 8
    slots = np.array([policy.begin(i, 0, 2048) for i in range(8)])
    one = np.ones(8, dtype=int)
    outcome = Outcome(slots, one, None, None, 1000 * one)
    plan = decide(policy, outcome, lambda most, _: stated(most, 0.9))
    assert 8 + plan.total == policy.latency.max_tokens(8)


def test_steps_that_a_simulation_leaves_out_count_while_nobody_is_asked() -> None:
    # looks for drafts are rare where steps are short
    policy = DraftPolicy(DasConfig(), 2048, prior=COMPUTE_BOUND.scaled(0.001))
    slots = np.array([policy.begin(i, 0, 2048) for i in range(32)])
    one = np.ones(32, dtype=int)
    outcome = Outcome(slots, one, None, None, 1000 * one)
    for _ in range(500):
        rest = policy.next(outcome)
        if isinstance(rest, Search):
            rest = policy.choose(rest, stated(0 * one, 0.1))
        assert isinstance(rest, Rest)
        if rest.steps >= 4:
            break
    assert rest.steps >= 4
    assert isinstance(policy.next(outcome), Rest)
    left_out = outcome._replace(left_out=rest.steps - 1)
    assert isinstance(policy.next(left_out), Search)


def test_after_the_rehearsal_it_drafts_only_where_that_pays() -> None:
    policy = DraftPolicy(DasConfig(), 2048, prior=COMPUTE_BOUND)
    one = np.ones(32, dtype=int)

    def drafted() -> int:
        slots = np.array([policy.begin(i, 0, 2048) for i in range(32)])
        outcome = Outcome(slots, one, None, None, 1000 * one)
        plan = decide(policy, outcome, lambda most, _: stated(most, 0.1))
        for slot in slots.tolist():
            policy.end(slot)
        return plan.total

    policy.rehearse()
    assert drafted() == 32 * 32
    policy.rehearsed()
    assert drafted() == 0


def test_no_response_is_longer_than_its_request_allows() -> None:
    """Two requests of a problem whose responses are long: the one that may write little
    is taken to be short, and does not decide the end.
    """
    policy = make()
    rows = [(i, 1500 if i < 8 else 100, 0) for i in range(32)]
    policy.weight_sync(np.array(rows * 4, RESPONSE))
    slots = [policy.begin(0, 0, longest) for longest in (50, 2048)]
    one = np.ones(2, dtype=int)
    outcome = Outcome(np.array(slots), one, None, None, 1000 * one)
    decide(policy, outcome, lambda most, _: stated(most, 0.9))
    short, long = (policy.end(slot).length_class for slot in slots)
    assert short == LengthClass.SHORT < long
