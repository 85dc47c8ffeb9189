"""Which requests the policy copy drafts for: against brute force, at the limits, and
through the policy.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from driver import decide
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from test_policy import stated
from test_two_sources import rollout

from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.core.acceptance import AcceptanceRate
from das_adapter.core.hardware import DEVICES
from das_adapter.core.latency import StepModel
from das_adapter.core.length import RESPONSE
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.planners import (
    DraftCandidates,
    add_model_drafts,
    plan_one_length,
    plan_own_lengths,
)
from das_adapter.core.policy import DraftPolicy
from das_adapter.core.roofline import Roofline
from das_adapter.core.steps import Outcome, StepPlan
from das_adapter.sim.models import MODELS


def copy(rate: float, seconds: float, most: int = 5) -> ModelDrafts:
    """A copy whose tokens are accepted at this rate, and whose passes take so long."""
    drafts = ModelDrafts(most)
    drafts.acceptance = AcceptanceRate(1000 * rate, 1000, fade=1.0)
    drafts.set_pass_prior(StepModel(base=seconds, token=0.0))
    return drafts


def nothing(requests: int) -> StepPlan:
    return StepPlan(np.zeros(requests, int), np.zeros(requests, int))


def planned(
    c: ModelDrafts,
    found: StepPlan,
    theirs: list[float],
    worth: list[float],
    limits: Any,
    m: StepModel,
    cut: bool = True,
) -> StepPlan:
    """Plan with a copy where the tokens that were found are worth so much for each
    request.
    """
    chances = [
        np.append(value / one, np.zeros(9))[:n]
        for value, one, n in zip(theirs, worth, found.history, strict=True)
    ]
    offsets = np.append(0, np.cumsum(found.history))
    return add_model_drafts(
        DraftCandidates(limits, np.concatenate(chances), offsets, c, 0.0, cut),
        found,
        np.array(worth),
        m,
    )


def gain(
    drafted: tuple[int, ...],
    keep: list[int],
    theirs: list[float],
    worth: list[float],
    c: ModelDrafts,
    m: StepModel,
) -> float:
    """Seconds that a step gains where the copy drafts so many tokens, by the
    definition.
    """
    batch = len(drafted)
    total = 0
    value = 0.0
    for i, count in enumerate(drafted):
        total += count or keep[i]
        mine = sum(c.acceptance.rate ** (j + 1) * worth[i] for j in range(count))
        value += mine if count else theirs[i]
    passes = sum(
        c.passes.model.step(1, 1, False)
        for step in range(max(drafted))
        if any(d > step for d in drafted)
    )
    return (
        value
        - (m.step(batch + total, batch, total > 0) - m.step(batch, batch, False))
        - passes
    )


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3), st.integers(0, 4), st.integers(0, 4), st.floats(0.1, 2)
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(50, 990).map(lambda n: n / 1000),
    st.floats(0.0, 2.0),
    st.floats(0.0, 0.2),
)
def test_no_other_lengths_gain_more(
    rows: list[tuple[float, int, int, float]], rate: float, seconds: float, token: float
) -> None:
    keep = [kept for _, kept, *_ in rows]
    worth = [value for *_, value in rows]
    # worth more than they cost
    theirs = [value + token * kept if kept else 0.0 for value, kept, *_ in rows]
    limits = np.array([limit for _, _, limit, _ in rows])
    c = copy(rate, seconds)
    m = StepModel(base=1.0, token=token)
    nobody = (0,) * len(rows)
    found = StepPlan(
        np.array(keep), np.zeros_like(keep), gain(nobody, keep, theirs, worth, c, m)
    )
    plan = planned(c, found, theirs, worth, limits, m)
    assert (plan.model <= limits).all()
    assert not (plan.model * plan.history).any()
    assert plan.gain == pytest.approx(
        gain(tuple(plan.model), list(plan.history), theirs, worth, c, m), abs=1e-9
    )
    for drafted in itertools.product(*(range(limit + 1) for limit in limits)):
        assert plan.gain >= gain(drafted, keep, theirs, worth, c, m) - 1e-9


def test_a_request_whose_tokens_are_worth_less_gets_a_shorter_draft() -> None:
    c = copy(0.8, 0.01)
    found = nothing(3)
    w = [1.0, 0.1, 0.01]
    m = StepModel(base=1.0, token=0.05)
    plan = planned(c, found, [0.0] * 3, w, np.array([5, 5, 5]), m)
    assert plan.model.tolist() == [5, 3, 0]
    whole = planned(c, found, [0.0] * 3, w, np.array([5, 5, 5]), m, cut=False)
    assert whole.model.tolist() == [5, 5, 0]


def test_tokens_that_hardly_survive_are_not_drafted() -> None:
    assert list(copy(0.5, 0.1).lengths_above(0.2)) == [1, 2]


def test_the_first_passes_are_assumed_and_then_known() -> None:
    c = ModelDrafts(5)
    assert c.passes_s(np.array([2, 1]), plain_s=1.0) == pytest.approx(0.8)
    for _ in range(20):
        c.record_pass(4, 0.1)
    assert c.passes_s(np.array([2, 1, 0]), plain_s=1.0) == pytest.approx(0.2)


def test_a_pass_is_for_all_requests_or_for_those_that_still_lack_tokens() -> None:
    for narrows, seconds in ((True, 0.3), (False, 0.4)):
        c = ModelDrafts(5, narrows)
        c.set_pass_prior(StepModel(base=0.0, token=0.1))
        assert c.passes_s(np.array([2, 1]), plain_s=1.0) == pytest.approx(seconds)


def test_a_parallel_drafter_makes_one_pass_for_all_tokens() -> None:
    for always, seconds in ((0, 0.1), (1, 0.0)):
        c = ModelDrafts(5, narrows=False, passes_every_step=always, parallel=True)
        c.set_pass_prior(StepModel(base=0.1, token=0.0))
        assert c.passes_s(np.array([5, 1]), plain_s=1.0) == pytest.approx(seconds)
        assert c.passes_s(np.array([0, 0]), plain_s=1.0) == 0.0


def test_acceptance_counts_only_what_was_tried() -> None:
    a = AcceptanceRate(0.0, 0.0, fade=1.0)
    a.observe(np.array([5, 5]), np.array([5, 2]))
    assert (a.accepted, a.tried) == (7, 8)


def test_a_weight_sync_keeps_the_rate_and_lets_it_change_soon() -> None:
    a = AcceptanceRate(fade=1.0)
    a.observe(np.full(1000, 5), np.full(1000, 4))
    rate = a.rate
    a.forget()
    assert a.rate == pytest.approx(rate)
    assert a.tried == tuning.RATE_KNOWN_TOKENS


@pytest.mark.parametrize(("tokens", "length"), [(5, 5.0), (5, 5.7), (5, 3.5), (7, 7.0)])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B"])
def test_before_the_first_step_it_drafts_where_the_papers_speed_up_is_enough(
    model: str, tokens: int, length: float
) -> None:
    """EfficientRollout's S = L / (gamma T_D / T_T + T_V / T_T), of a request with 2048
    tokens of context.
    """
    roof = Roofline.from_config(MODELS[model], DEVICES["a100"])
    context = 2048
    step = roof.step_model(context)
    of_pass = roof.step_model(context, share=0.25)
    rate = brentq(lambda r: sum(r**j for j in range(tokens + 1)) - length, 0.01, 1.0)

    def speedup(b: int) -> float:
        took = tokens * of_pass.step(b, b, False, b * context) + step.step(
            b * (1 + tokens), b, True, b * context
        )
        return length * step.step(b, b, False, b * context) / took

    def predicted(b: int) -> tuple[float, bool]:
        drafts = ModelDrafts(tokens, lengths=(tokens,))
        drafts.acceptance = AcceptanceRate(1000 * rate, 1000, fade=1.0)
        drafts.set_pass_prior(of_pass)
        das = DasConfig(drafter="self", max_draft_tokens=tokens)
        policy = DraftPolicy(das, longest_response=8192, prior=step, drafts=drafts)
        slots = np.array([policy.begin(i, 0, 8192) for i in range(b)])
        one = np.ones(b, dtype=int)
        plan = decide(
            policy, Outcome(slots, one, None, None, 1000 * one, context=context * one)
        )
        took = step.step(b * (1 + tokens), b, True, b * context) + plan.passes_s
        return 1.0 + plan.gain / took, bool(plan.model.all())

    pays = max(b for b in range(1, 200) if speedup(b) >= 1 + tuning.LEAST_GAIN)
    assert [predicted(b)[1] for b in (1, 8, pays - 2, pays + 2)] == [
        True,
        True,
        True,
        False,
    ]
    for batch in (1, 4, 16):
        assert predicted(batch)[0] == pytest.approx(speedup(batch), rel=0.01)


@pytest.mark.parametrize(("rate", "drafted"), [(0.97, True), (0.3, False)])
def test_the_first_drafts_say_what_is_accepted(rate: float, drafted: bool) -> None:
    """A token of each request, until enough were tried; then it drafts, or probes as
    rarely as others.
    """
    drafts = ModelDrafts(5)
    batch = 8
    rng = np.random.default_rng(0)
    # at 0.8, the assumption, it would not pay
    drafts.set_pass_prior(StepModel(base=0.0075, token=0.0))
    step = StepModel(base=0.01, token=1e-5)
    policy = DraftPolicy(
        DasConfig(drafter="self"), longest_response=8192, prior=step, drafts=drafts
    )
    slots = np.array([policy.begin(i, 0, 8192) for i in range(batch)])
    ones = np.ones(batch, dtype=int)
    carried = 0 * ones
    drafting = list[int]()
    for _ in range(40):
        right = rng.random((batch, 6)) < rate
        got = 1 + np.array(
            [
                np.argmin([*hits[:n], False])
                for hits, n in zip(right, carried, strict=True)
            ]
        )
        some = carried if carried.any() else None
        carried = decide(policy, Outcome(slots, got, some, carried, 1000 * ones)).model
        drafting.append(int(carried.max()))
    assert drafting[0] == 1
    assert drafts.acceptance.known
    assert drafts.acceptance.rate == pytest.approx(rate, abs=0.15)
    assert any(drafting[6:]) == drafted


def alone(
    policy: DraftPolicy,
    lengths: np.ndarray,
    truth: StepModel,
    rate: float,
    pass_s: float,
) -> float:
    """Seconds of a rollout that nobody drafts for but the copy."""
    return rollout(
        policy, lengths, truth, 0.0, 0.0, 3, rate, StepModel(base=pass_s, token=0.0)
    )


def self_controller(speculate: Any = "auto") -> DraftPolicy:
    return DraftPolicy(
        DasConfig(drafter="self", speculate=speculate),
        longest_response=2048,
        drafts=ModelDrafts(5),
    )


@pytest.mark.parametrize(
    ("rate", "pass_s", "bar"), [(0.9, 0.01, 0.6), (0.9, 0.047, 1.03), (0.1, 0.02, 1.03)]
)
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_the_controller_lets_the_copy_draft_where_it_pays(
    rate: float, pass_s: float, bar: float, batch: int
) -> None:
    lengths = np.random.default_rng(batch).integers(200, 400, batch)
    truth = StepModel(base=0.048, token=0.0001)
    off = sum(
        truth.step((lengths > n).sum(), (lengths > n).sum(), False)
        for n in range(lengths.max())
    )
    policy = self_controller()
    for version in (1, 2):
        on = alone(policy, lengths, truth, rate, pass_s)
        saved = policy.figures()["time_saved_s"]
        policy.weight_sync(
            np.array([(i, int(n), version) for i, n in enumerate(lengths)], RESPONSE)
        )
    assert on <= bar * off
    assert saved == pytest.approx(off - on, abs=0.05 * off)


@pytest.mark.parametrize(
    ("rate", "pass_s", "bar"), [(0.9, 0.004, 0.6), (0.05, 0.004, 0.03)]
)
@pytest.mark.parametrize("always", [0, 1])
def test_drafts_of_one_length_for_all_are_made_where_they_pay(
    rate: float, pass_s: float, bar: float, always: int
) -> None:
    """As on vLLM's V2 runner, where EAGLE makes a pass in every step: that is no reason
    to draft.
    """
    lengths = np.random.default_rng(8).integers(200, 400, 8)
    truth = StepModel(base=0.048, token=0.0001)
    off = sum(
        truth.step((lengths > n).sum(), (lengths > n).sum(), False)
        for n in range(lengths.max())
    )
    drafts = ModelDrafts(5, narrows=False, passes_every_step=always)
    lengths_there = (1, 2, 4, 5)
    policy = DraftPolicy(
        DasConfig(drafter="self"), 2048, drafts=drafts, lengths=lengths_there
    )
    for version in (1, 2):
        on = alone(policy, lengths, truth, rate, pass_s)
        policy.weight_sync(
            np.array([(i, int(n), version) for i, n in enumerate(lengths)], RESPONSE)
        )
    if rate > 0.5:
        assert on <= bar * off
    else:
        assert on <= (1 + bar) * off + always * pass_s * lengths.max()
    slots = np.array([policy.begin(i, 0, 500) for i in range(3)])
    plan = decide(
        policy, Outcome(slots, np.ones(3, int), None, None, np.array([100, 3, 100]))
    )
    assert len(set(plan.model.tolist())) == 1
    assert int(plan.model[0]) in {0, *lengths_there}
    assert not plan.history.any()


@pytest.mark.parametrize(
    ("found", "pass_s", "by_model"),
    [(0.95, 0.004, False), (0.2, 0.004, True), (0.2, 0.5, False)],
)
def test_all_requests_have_one_length_and_the_better_draft_of_both_sources(
    found: float, pass_s: float, by_model: bool
) -> None:
    """The model drafts where most of the history's drafts are worse than what its
    passes cost.
    """
    drafts = ModelDrafts(5, narrows=False, follows=True)
    running = 8
    drafts.set_pass_prior(StepModel(base=pass_s, token=0.0))
    policy = DraftPolicy(
        DasConfig(max_draft_tokens=8),
        2048,
        prior=StepModel(base=0.05, token=0.0001),
        drafts=drafts,
        lengths=(1, 2, 4, 5, 8),
    )
    slots = np.array([policy.begin(i, 0, 500) for i in range(running)])

    def history(limits: Any, floor: float) -> Any:
        lengths = np.minimum(limits, 8)
        chances = np.concatenate(
            [found ** np.arange(1, n + 1) for n in lengths]
        ).astype(np.float32)
        return chances, np.concatenate([[0], np.cumsum(lengths)])

    room = np.full(running, 100)
    plan = decide(
        policy, Outcome(slots, np.ones(running, int), None, None, room), history
    )
    chosen = plan.model if by_model else plan.history
    assert set(chosen.tolist()) == {5 if by_model else 8} or (
        pass_s == 0.5 and not chosen.any()
    )
    assert not (plan.history if by_model else plan.model).any()


@pytest.mark.parametrize(("follows", "drafted"), [(True, 0), (False, 8)])
def test_a_copy_makes_no_pass_for_the_drafts_of_the_history(
    follows: bool, drafted: int
) -> None:
    """A neural drafter reads in one what the history has drafted, and where that costs
    too much, nobody drafts.
    """
    drafts = ModelDrafts(5, narrows=False, follows=follows)
    limits = np.full(4, 20)
    drafts.set_pass_prior(StepModel(base=1.0, token=0.0))
    worth = np.full(4, 0.01)
    found = np.tile(np.full(8, 0.9, dtype=np.float32), 4)
    offer = DraftCandidates(limits, found, np.arange(5) * 8, drafts, 0.0, True)
    plan = plan_one_length(
        offer, worth, StepModel(base=0.05, token=0.0), (1, 2, 4, 5, 8)
    )
    assert set(plan.history.tolist()) == {drafted}
    assert not plan.model.any()
    own = plan_own_lengths(offer, worth, StepModel(base=0.05, token=0.0))
    assert (own.gain < 0, own.passes_s) == (follows, pytest.approx(float(follows)))


def test_the_model_drafts_one_of_its_lengths() -> None:
    """For which there are CUDA graphs; a longer one than was wanted costs its
    passes.
    """
    drafts = ModelDrafts(5, narrows=False, lengths=(1, 2, 4, 5, 16, 32))
    drafts.set_pass_prior(StepModel(base=0.1, token=0.0))
    assert [drafts.draft_length(n) for n in range(6)] == [0, 1, 2, 4, 4, 5]
    assert drafts.passes_s(np.array([3, 1]), 1.0) == pytest.approx(0.4)
    assert drafts.lengths_above(0.0) == [1, 2, 4, 5]


@pytest.mark.parametrize(("drafter", "by_history"), [("self", 0), ("history+self", 32)])
def test_fixed_budgets_have_all_tokens_that_there_can_be(
    drafter: Any, by_history: int
) -> None:
    """Of the history's drafts, which are looked up later, there may be as much as can
    be.
    """
    drafts = ModelDrafts(5, narrows=False, follows=False)
    config = DasConfig(drafter=drafter, budget="unlimited", speculate="always")
    policy = DraftPolicy(config, 2048, drafts=drafts, lengths=(1, 2, 4, 5, 16, 32))
    slots = np.array([policy.begin(i, 0, 500) for i in range(3)])
    plan = decide(policy, Outcome(slots, np.ones(3, int), None, None, np.full(3, 100)))
    assert set(plan.model.tolist()) == {5}
    assert set(plan.history.tolist()) == {by_history}


def test_passes_of_every_step_are_no_cost_of_drafts() -> None:
    c = ModelDrafts(5, narrows=False, passes_every_step=1)
    c.set_pass_prior(StepModel(base=0.1, token=0.0))
    assert [c.passes_s(np.array([n, n]), 1.0) for n in (0, 1, 3)] == pytest.approx(
        [0.0, 0.0, 0.2]
    )


def test_the_copy_drafts_where_it_gains_two_hundredths() -> None:
    policy = self_controller()
    policy.latency.model = StepModel(base=0.05, token=0.0)
    policy.drafts = copy(0.8, 0.0)
    slots = np.array([policy.begin(i, 0, 500) for i in range(2)])

    def drafts_at(pass_s: float) -> bool:
        policy.drafts.set_pass_prior(StepModel(base=pass_s, token=0.0))
        ones = np.ones(2, dtype=int)
        outcome = Outcome(slots, ones, None, None, 100 * ones, left_out=64)
        return bool(decide(policy, outcome).model.any())

    # speed-ups of 1.03, more than 1.05 and less than 1
    assert drafts_at(0.037)
    assert drafts_at(0.02)
    assert not drafts_at(0.2)
    assert drafts_at(0.037)


def test_a_threshold_keeps_the_copy_out_of_larger_batches() -> None:
    policy = self_controller(speculate=4)
    policy.latency.model = StepModel(base=0.05, token=0.0)
    for batch, drafted in ((8, False), (4, True)):
        slots = np.array([policy.begin(i, 0, 500) for i in range(batch)])
        plan = decide(
            policy, Outcome(slots, np.ones(batch, int), None, None, np.full(batch, 100))
        )
        assert bool(plan.model.any()) is drafted
        for slot in slots.tolist():
            policy.end(slot)


def test_under_fixed_budgets_history_and_copy_share_the_batch() -> None:
    das = DasConfig(budget="uniform", max_draft_tokens=8, speculate="always")
    policy = DraftPolicy(das, longest_response=2048, drafts=copy(0.8, 0.1))
    slots = np.array([policy.begin(i, 0, 500) for i in range(2)])

    def history(limits: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
        return stated(limits * (1, 0), 0.95)  # the second request has no match

    plan = decide(
        policy,
        Outcome(slots, np.ones(2, int), None, None, np.array([100, 100])),
        history,
    )
    assert plan.history.tolist() == [8, 0]
    assert plan.model.tolist() == [0, 5]


def test_a_fixed_budget_of_one_length_is_drafted_whatever_it_gains() -> None:
    """Neither a loss nor the steps that were timed keep it from that."""
    chances, offsets = np.full(8, 0.01, np.float32), np.array([0, 4, 8])
    candidates = DraftCandidates(
        max_tokens=np.array([4, 4]),
        chances=chances,
        offsets=offsets,
        drafter=None,
        min_chance=0.0,
        by_worth=False,
        max_total=1,
    )
    dear = StepModel(base=0.01, token=0.01)
    plan = plan_one_length(candidates, np.full(2, 1e-6), dear, (1, 2, 4, 8))
    assert plan.history.tolist() == [4, 4]
    chosen = candidates._replace(by_worth=True)
    assert not plan_one_length(chosen, np.full(2, 1e-6), dear, (1, 2, 4, 8)).total
