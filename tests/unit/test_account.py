"""The account of a rollout's time and the state of an engine, on a modelled engine;
`docs/how_it_works.md` tells it in five sentences, which name the parts of this file.
"""

from __future__ import annotations

import numpy as np
import pytest

from das_adapter.core import tuning
from das_adapter.core.account import (
    Account,
    Probe,
    State,
    collapsed,
)
from das_adapter.core.latency import StepModel, StepTimes
from das_adapter.core.plain_time import PlainTime, seconds_of
from das_adapter.core.steps import Ints, TimedStep

PLAIN = StepModel(base=0.010, token=0.0001)
SIMPLE = StepModel(base=1.0, token=0.1)
ONE = np.ones(8, dtype=int)


def make(speculate: object = "auto", model: StepModel | None = None) -> Account:
    engine = StepTimes(model)
    return Account(PlainTime(engine), speculate)  # type: ignore[arg-type]


def timed_step(
    got: Ints, seconds: float, drafted: bool, context: int = 0, asked: bool = True
) -> TimedStep:
    slots = np.arange(len(got))
    return TimedStep(
        slots, got, len(got) + drafted, seconds, context=context, asked=asked
    )


def rollout(
    account: Account,
    asking: float,
    pace: float = 1.0,
    requests: int = 8,
    tokens: int = 256,
    noise: float = 0.0,
    read: float = 0.0,
) -> tuple[float, int]:
    """Decode equally long requests; a step in which the drafter is asked takes `asking`
    times a plain one's time. If that is more, all that are asked draft, and a drafted
    step brings `pace` tokens. `read`: seconds of a token of context. Return the seconds
    and the steps in which nobody was asked.
    """
    rng = np.random.default_rng(tokens)
    written = 0.0
    seconds = 0.0
    unasked = 0
    drafted = False
    slots = np.arange(requests)
    while written < tokens:
        context = int(requests * written)
        plain = (
            PLAIN.step(requests, requests, False)
            * (1.0 + noise * rng.standard_normal())
            + read * context
        )
        account.advance(1)
        asked = account.asks(requests, drafted)
        took = plain * asking if asked or drafted else plain
        got = int(pace) if drafted else 1
        if asked:
            account.decided(requests, asking > 1.0, False)
            account.record_step(
                timed_step(np.full(requests, got), took, drafted, context), None
            )
        elif not drafted:
            account.record_step(
                timed_step(
                    np.ones(requests, dtype=int), took, False, context, asked=False
                ),
                None,
            )
        unasked += not asked
        written = written + got
        seconds = seconds + took
        drafted = asked and asking > 1.0
    for slot in slots.tolist():
        account.time.end_request(slot)
    return seconds, unasked


def knowing() -> Account:
    """One that knows from a rollout without drafts what plain steps take."""
    account = make()
    rollout(account, asking=1.0)
    account.sync()
    return account


def judged(account: Account) -> str | None:
    """What a weight sync says."""
    account.sync()
    return account.pop_news()


# 1. It drafts while the predicted gain is at least 2 % of a step.


def draws(account: Account, *steps: tuple[int, float | None]) -> list[bool]:
    return [account.drafts_pay(running, gain, True) for running, gain in steps]


def test_it_drafts_where_two_hundredths_are_gained() -> None:
    gains = (0.01, 0.02, -0.01, 0.2, None, 0.04)
    drafted = [False, True, False, True, False, True]
    assert draws(make(), *((8, gain) for gain in gains)) == drafted


def test_fixed_budgets_are_drafted_where_they_do_not_lose_and_always_where_the_user_says_so() -> (
    None
):
    account = make()
    always = make("always")
    assert [account.drafts_pay(8, gain, False) for gain in (0.05, 0.0, -0.01)] == [
        True,
        True,
        False,
    ]
    assert [always.drafts_pay(8, gain, False) for gain in (0.05, -0.5, None)] == [
        True
    ] * 3
    assert draws(always, (500, 0.02), (1, 0.01)) == [True, False]  # nobody would gain


def test_a_number_of_requests_counts_with_hysteresis() -> None:
    steps = ((n, 0.02) for n in (33, 32, 40, 41, 33))
    assert draws(make(32), *steps) == [False, True, True, False, False]


def test_the_state_says_what_was_decided() -> None:
    account = make()
    for step, (drafted, probing, state) in enumerate(
        [
            (True, False, State.DRAFTING),
            (False, False, State.RESTING),
            (False, False, State.RESTING),
            (True, True, State.PROBING),
            (True, False, State.DRAFTING),
        ]
    ):
        account.step = step
        account.decided(8, drafted, probing)
        assert account.state is state


# 2. While nothing is worth drafting it rests, and looks again after 1, 2, 4, ... 32
# steps or when the batch shrinks.


def test_looks_become_rarer_while_nothing_is_worth_drafting() -> None:
    account = make()
    looks = list[int]()
    for account.step in range(100):
        if account.look.due(account.step, 10):
            looks.append(account.step)
            account.decided(10, False, False)
    assert np.diff(looks).tolist()[:5] == [2, 4, 8, 16, tuning.LOOK_STEPS]
    assert set(np.diff(looks)[5:]) == {tuning.LOOK_STEPS}
    assert not account.look.due(account.step, 9)
    assert account.look.due(account.step, 8)  # smaller by more than a tenth
    account.decided(10, True, False)
    assert account.look.due(account.step + 1, 10)


# 3. It probes: now and then a step is taken the other way.


def steps_until(account: Account, probe: Probe, drafted: bool) -> int:
    for step in range(10_000):
        if account.probe(probe):
            return step
        account.record_step(timed_step(ONE, 0.01, drafted), None)
    return 10_000


def test_a_plain_step_is_taken_while_it_drafts_and_drafted_ones_ever_more_rarely_while_it_rests() -> (
    None
):
    account = make("always")
    assert steps_until(account, "plain", drafted=True) == tuning.PROBE_STEPS
    waits = [steps_until(account, "drafted", drafted=False) for _ in range(5)]
    assert waits == [tuning.PROBE_STEPS * n for n in (1, 2, 4, 8, 8)]
    account.decided(8, True, False)
    # at once, where nobody knows what is accepted
    assert account.probe("drafted", unseen=True)
    assert steps_until(account, "drafted", drafted=False) == tuning.PROBE_STEPS


def test_no_drafter_is_asked_while_it_rests_but_where_it_looks_again() -> None:
    account = make()
    asked = list[bool]()
    for _ in range(300):
        soon = account.rest_steps(8) == 0
        account.advance(1)
        asked.append(account.asks(8, False))
        assert asked[-1] == soon
        if asked[-1]:
            account.decided(8, False, False)
    assert account.step == 300
    assert np.diff(np.flatnonzero(asked)).tolist()[:5] == [
        2,
        4,
        8,
        16,
        tuning.LOOK_STEPS,
    ]
    assert account.asks(7, False)  # the batch has become smaller by a tenth
    # a step with drafts is no baseline
    assert all(account.asks(8, True) for _ in range(100))


@pytest.mark.parametrize("speculate", ["always", 32])
def test_the_user_decides_with_other_settings(speculate: object) -> None:
    account = make(speculate)
    assert rollout(account, asking=1.5)[1] == 0
    assert judged(account) is None
    assert account.state is State.DRAFTING


# 4. A rollout that lost is followed by one at rest, after the next loss by two, then by
# four, then by eight.


def test_a_rollout_that_lost_is_followed_by_one_at_rest() -> None:
    account = make()
    assert rollout(account, asking=1.0)[1] > 200
    assert judged(account) is None
    assert rollout(account, asking=1.08)[1] == 0
    assert account.time.of_stock() == pytest.approx(1.08, abs=0.01)
    assert "drafting lost a whole rollout" in (judged(account) or "")
    assert (account.state, account.idle) == (State.RESTING, True)
    assert "drafting lost a whole rollout" in (account.reason or "")
    seconds, unasked = rollout(account, asking=1.08)
    assert unasked == 256
    assert seconds == pytest.approx(256 * PLAIN.step(8, 8, False))
    assert judged(account) is None  # nothing new


def test_a_drafter_that_loses_is_asked_again_after_more_and_more_rollouts() -> None:
    account = knowing()
    rests = ""
    for _ in range(40):
        rests += "s" if account.state is State.RESTING else "-"
        rollout(account, asking=1.08)
        account.sync()
        state = account.state
        account.sync()  # nothing lies between them
        assert account.state is state
    assert rests.startswith("-s-ss-ssss-ssssssss-ssssssss-")
    while account.idle:
        rollout(account, asking=1.08)
        account.sync()
    rollout(account, asking=1.3, pace=4)
    account.pop_news()
    assert judged(account) is None
    while not account.idle:
        rollout(account, asking=1.08)
        account.sync()
    rollout(account, asking=1.08)
    account.sync()
    # after one: the drafter had been worth its time
    assert account.state is State.DRAFTING


def test_a_rollout_that_lost_less_than_the_last_ones_saved_is_followed_by_one_that_drafts() -> (
    None
):
    account = knowing()
    balance = 0.0
    rests = list[bool]()
    for asking, pace in [(1.3, 2)] * 2 + [(1.08, 1)] * 5:
        rollout(account, asking, pace)
        balance = tuning.REST_BALANCE_KEPT * balance + account.time.saved_s()
        assert bool(account.time.explain_loss()) == (pace == 1)
        rests.append(bool(judged(account)))
        assert rests[-1] == (balance < 0)
    assert rests == [False] * 6 + [True]


def test_what_a_short_rollout_saved_counts_though_nothing_is_held_against_it() -> None:
    account = knowing()
    rollout(account, asking=1.2, pace=4.0, tokens=4 * (tuning.JUDGED_STEPS - 16))
    assert judged(account) is None
    rollout(account, asking=1.1)
    assert judged(account) is None
    rollout(account, asking=2.0)
    assert judged(account) is not None


def test_what_a_drafter_takes_beside_prompts_counts() -> None:
    account = make()
    seconds = rollout(account, asking=1.0)[0]
    account.time.add_seconds(0.01 * seconds)
    assert judged(account) is None
    account.time.add_seconds(0.06 * rollout(account, asking=1.0)[0])
    assert judged(account)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_rollout_that_costs_what_stock_costs_has_not_lost(noise: float) -> None:
    account = make()
    for tokens in range(200, 600, 20):
        rollout(account, asking=1.0, tokens=tokens, noise=noise)
        assert judged(account) is None


def test_a_rollout_that_gains_goes_on_drafting_and_takes_few_baseline_steps() -> None:
    account = make()
    rollout(account, asking=1.0)  # without drafts
    assert type(account.figures()["of_stock"]) is float
    account.sync()
    unasked = rollout(account, asking=1.3, pace=4, tokens=1000)[1]
    assert unasked <= 1
    assert account.time.of_stock() == pytest.approx(1.3 / 4, abs=0.03)
    assert judged(account) is None


@pytest.mark.parametrize("asking", [1.0, 1.15])
def test_reading_a_long_context_is_no_loss_of_the_drafter(asking: float) -> None:
    account = make()
    for _ in range(200):  # most baseline steps are of short texts
        account.advance(1)
        account.time.record_step(
            timed_step(ONE, PLAIN.step(8, 8, False) + 1e-6 * 800, False, asked=False),
            None,
        )
    rollout(account, 1.0, tokens=200, read=1e-6)
    account.sync()
    rollout(account, asking, pace=1.0 if asking == 1.0 else 1.1, tokens=4000, read=1e-6)
    assert bool(judged(account)) == (asking > 1.0)


def test_what_a_pause_of_the_machine_takes_is_no_loss() -> None:
    account = make()
    rollout(account, asking=1.0)
    account.record_step(timed_step(ONE, 9.0, False), PLAIN.step(8, 8, False))
    # it counts as one step more
    assert account.time.saved_s() >= -1.1 * PLAIN.step(8, 8, False)
    assert judged(account) is None


def test_a_few_steps_are_no_evidence() -> None:
    account = make()
    rollout(account, asking=1.5, tokens=tuning.JUDGED_STEPS // 2)
    assert account.time.explain_loss() is None
    assert judged(account) is None


def model_rests(
    account: Account, took: float, saved: float, may_rest: bool = True
) -> bool:
    """Whether a model rests after a rollout of 256 plain steps in which its passes took
    so long, and saved so much, as shares of the rollout's time.
    """
    seconds = rollout(account, 1.0)[0]
    account.record_model(took_s=took * seconds, saved_s=saved * seconds)
    account.sync(may_rest)
    return account.model_rest.reason is not None


def test_a_model_rests_for_more_and_more_rollouts_while_drafting_goes_on() -> None:
    account = make()
    rests = ""
    for _ in range(12):
        rests += "s" if account.model_rest.reason else "-"
        model_rests(account, 0.0 if account.model_rest.reason else 0.05, 0.01)
        assert account.state is State.DRAFTING
    assert rests == "-s-ss-ssss-s"
    assert not model_rests(make(), 0.05, 0.04)


def test_passes_that_cannot_be_left_out_are_not_held_against_a_model() -> None:
    assert not model_rests(make(), 0.2, 0.0, may_rest=False)


# 5. A loss within a rollout, or collapsed acceptance, stops it; a drafter that raises
# has failed.


@pytest.mark.parametrize("speculate", ["auto", 32])
def test_a_loss_within_a_rollout_stops_it_until_the_next_weight_sync(
    speculate: object,
) -> None:
    account = make(speculate, model=PLAIN)
    plain_s = PLAIN.step(8, 8, False)
    lose_until_suspected(account, 1.3 * plain_s)
    for step in range(tuning.JUDGED_SAMPLES):
        assert account.state is State.DRAFTING, step
        record_baseline_step(account, plain_s)
    assert account.state is State.STOPPED
    assert "of drafted steps" in (account.reason or "")
    assert "no drafts until the next weight sync" in (account.pop_news() or "")
    assert account.pop_news() is None
    assert not account.asks(8, False)
    assert account.figures()["reason"] == account.reason
    account.sync()
    # it has lost a rollout, too
    assert account.asks(8, True) == (speculate != "auto")


def lose_until_suspected(account: Account, seconds: float) -> None:
    """Record drafted steps that bring a token to each request, until it asks nobody."""
    for step in range(tuning.GUARD_STEPS):
        assert account.asks(8, True) and account.looks(8), step
        account.record_step(timed_step(ONE, seconds, True), None)
        account.advance(1)
    assert not account.asks(8, False)
    assert account.rest_steps(8) >= tuning.JUDGED_SAMPLES


def record_baseline_step(account: Account, seconds: float) -> None:
    account.record_step(timed_step(ONE, seconds, False, asked=False), None)
    account.advance(1)


def test_nothing_is_stopped_on_a_plain_time_that_no_plain_step_has_shown() -> None:
    """The latency model says that plain steps are cheaper than they are."""
    account = make(model=PLAIN)
    seconds = 1.3 * PLAIN.step(8, 8, False)
    lose_until_suspected(account, seconds)
    for _ in range(tuning.JUDGED_SAMPLES):
        assert not account.looks(8)
        record_baseline_step(account, seconds)
    assert account.state is State.DRAFTING
    assert account.looks(8)


def test_plain_steps_of_a_large_batch_do_not_stop_a_small_one() -> None:
    account = make(model=PLAIN)
    many = np.arange(64)
    one = np.ones(64, dtype=int)
    for _ in range(tuning.JUDGED_SAMPLES):
        plain = TimedStep(many, one, 64, PLAIN.step(64, 64, False), asked=False)
        account.record_step(plain, None)
    lose_until_suspected(account, 2.0 * PLAIN.step(8, 8, False))
    assert account.state is State.DRAFTING


def test_the_guard_fits_the_baseline_steps_before_it_holds_them_against_the_drafts() -> (
    None
):
    """The first ones, of a full batch, say nothing of a request that runs alone."""
    flat = StepModel(base=0.01, token=0.0)
    account = Account(PlainTime(StepTimes(flat)))
    for requests in (128, 1):
        slots = np.arange(requests)
        one = np.ones(requests, dtype=int)
        for _ in range(tuning.JUDGED_SAMPLES // 2):
            plain = TimedStep(slots, one, requests, flat.base, asked=False)
            account.record_step(plain, flat.base)
    assert account.time.known
    alone = np.arange(1)
    for _ in range(2 * tuning.GUARD_STEPS):
        account.record_step(TimedStep(alone, np.array([2]), 4, flat.base), flat.base)
    assert account.pop_news() is None
    assert account.time.saved_s() == pytest.approx(1.28, rel=0.1)


def test_an_error_of_one_percent_in_many_plain_steps_is_not_held_against_a_few_drafted_ones() -> (
    None
):
    account = make(model=PLAIN)
    for drafted in [False] * 1000 + [True] * tuning.GUARD_STEPS:
        account.record_step(
            timed_step(
                ONE, (1.0 if drafted else 1.01) * PLAIN.step(8, 8, False), drafted
            ),
            None,
        )
        account.advance(1)
    assert account.state is State.DRAFTING


def test_a_bad_step_of_a_batch_that_has_just_begun_stops_nothing() -> None:
    account = make(model=PLAIN)
    for step in range(tuning.GUARD_STEPS):
        if step == tuning.GUARD_STEPS - 1:
            account.time.begin_batch()
        account.record_step(
            timed_step(ONE, 1.3 * PLAIN.step(8, 8, False), drafted=True), None
        )
    assert account.state is State.DRAFTING


def test_collapsed_acceptance_stops_it_until_the_next_weight_sync() -> None:
    account = make()
    assert collapsed(tuning.COLLAPSE_DRAFTS - 1, 0) is None
    assert collapsed(tuning.COLLAPSE_DRAFTS, tuning.COLLAPSE_DRAFTS // 50) is None
    account.stop(str(collapsed(tuning.COLLAPSE_DRAFTS, 0)))
    account.decided(4, True, False)  # of a step whose drafts were asked for before
    assert account.state is State.STOPPED
    assert account.reason == "acceptance collapsed: 0 accepted tokens of 400 drafts"
    rollout(account, 1.0)
    account.sync()
    assert account.state is State.DRAFTING


def test_a_drafter_that_raises_has_failed_until_the_next_weight_sync() -> None:
    account = make("always")
    account.stop("RuntimeError()", State.FAILED)
    account.stop("collapsed")
    assert (account.state, account.reason) == (State.FAILED, "RuntimeError()")
    assert not account.asks(8, True)
    account.sync()
    assert account.state is State.DRAFTING


# What plain decoding would have taken


def test_plain_seconds_are_those_of_a_round_by_round_replay() -> None:
    lengths = [3, 7, 7, 20]
    replay = sum(
        SIMPLE.step(n, n, False)
        for n in (sum(x >= r for x in lengths) for r in range(1, 21))
    )
    assert seconds_of(lengths, 4, SIMPLE.plain_seconds) == pytest.approx(replay)
    assert seconds_of([], 4, SIMPLE.plain_seconds) == 0.0
    assert seconds_of([10, 10, 10, 10], 2, SIMPLE.plain_seconds) == pytest.approx(
        2 * 10 * SIMPLE.step(2, 2, False)
    )


def written(*got: int) -> PlainTime:
    """Five drafted steps of 1.5 s, in which requests get so many tokens each."""
    time = make(model=SIMPLE).time
    for _ in range(5):
        time.record_step(timed_step(np.array(got), 1.5, True), None)
    return time


def test_a_synchronous_rollout_is_credited_for_the_rounds_it_did_not_need() -> None:
    time = written(2, 4)
    time.end_request(0)
    plain = 10 * 1.2 + 10 * 1.1
    assert time.saved_s() == pytest.approx(plain - 5 * 1.5)


@pytest.mark.parametrize("together", [False, True])
def test_baseline_steps_after_the_others_end_are_rounds_of_plain_decoding_that_these_had_too(
    together: bool,
) -> None:
    """Drafts end one of two requests after 10 steps; the other decodes its 90 further
    tokens alone.
    """
    account = make(model=PLAIN)
    alone = np.zeros(1, dtype=int)
    seconds = PLAIN.step(1, 1, False)
    for _ in range(10):
        account.time.record_step(timed_step(np.array([10, 1]), 0.012, True), None)
    account.time.end_request(0)
    singly = 20 if together else 90
    for _ in range(singly):
        account.record_step(
            TimedStep(alone + 1, alone + 1, 1, seconds, asked=False), None
        )
    if singly < 90:
        account.record_baseline_steps(
            alone + 1, np.array([90 - singly, (90 - singly) * seconds, 0.0])
        )
    plain = 100 * PLAIN.step(2, 2, False)
    assert account.time.plain_s() == pytest.approx(plain, rel=0.01)
    assert account.time.saved_s() == pytest.approx(
        plain - 0.12 - 90 * seconds, abs=0.01 * plain
    )
    assert account.time.of_stock() == pytest.approx(
        (0.12 + 90 * seconds) / plain, rel=0.01
    )


def test_baseline_steps_stand_for_plain_decoding_once_they_are_known() -> None:
    account = make(model=PLAIN.scaled(100.0))
    rollout(account, asking=1.0)
    account.sync()
    got = ONE.copy()
    got[0] = 8  # the longest alone is drafted for, and ends with the others
    for _ in range(100):
        account.time.record_step(timed_step(got, 0.02, True), None)
    assert account.time.explain_loss() is not None
    assert account.time.plain_s() == pytest.approx(
        100 * PLAIN.step(8, 8, False) + 700 * PLAIN.step(1, 1, False), rel=0.1
    )


def test_baseline_steps_of_a_full_batch_say_nothing_of_a_small_one() -> None:
    """A full batch is bound by what its tokens compute: there steps seem to have no
    base.
    """
    bound = StepModel(base=0.01, token=0.0, bend=0.0001, knee=60.0)
    time = PlainTime(StepTimes(bound))
    for requests in [176, 180, 184, 188, 192, 192, 192, 192] * tuning.JUDGED_STEPS:
        step = bound.step(requests, requests, False)
        time.record_step(
            timed_step(np.ones(requests, dtype=int), step, False, asked=False), None
        )
    time.begin_batch()
    seconds = 50 * bound.step(4, 4, False)
    for _ in range(50):
        time.record_step(timed_step(np.full(4, 2), bound.step(4, 4, False), True), None)
    assert time.explain_loss() is None
    assert time.saved_s() == pytest.approx(seconds, rel=0.05)
    assert time.of_stock() == pytest.approx(
        time.passed_s / (time.passed_s + seconds), rel=0.05
    )


def test_baseline_steps_of_short_texts_say_nothing_of_long_ones() -> None:
    """Those of a rollout's begin, behind which all steps are drafted."""
    model = StepModel(base=0.01, token=0.0, context=1e-6)
    time = PlainTime(StepTimes(model))
    for context in [1000, 1100, 1200, 1300] * tuning.JUDGED_STEPS:
        time.record_step(
            timed_step(
                ONE, model.step(8, 8, False, context), False, context, asked=False
            ),
            None,
        )
    time.begin_batch()
    plain = 100 * model.step(8, 8, False, 40_000)
    for _ in range(50):
        time.record_step(
            timed_step(2 * ONE, model.step(8, 8, False, 40_000), True, 40_000), None
        )
    assert time.explain_loss() == ""
    assert time.saved_s() == pytest.approx(0.5 * plain, rel=0.05)


def test_a_server_of_one_request_after_another_is_compared_with_their_time_alone() -> (
    None
):
    """Each is a batch of its own, of which the latest are counted."""
    account = make(model=PLAIN)
    rollout(account, asking=1.0, requests=1)
    account.sync()
    for _ in range(3 * tuning.JUDGED_BATCHES):
        for _ in range(10):
            account.time.record_step(
                timed_step(np.full(1, 2), PLAIN.step(1, 1, False), True), None
            )
        account.time.end_request(0)
        account.time.begin_batch()
    assert account.time.of_stock() == pytest.approx(0.5, rel=0.02)


def test_a_slow_start_does_not_have_drafts_save_what_they_did_not() -> None:
    """Baseline steps took four times as long, beside other work, as steps that write
    1.5 tokens take later: fewer steps alone save no more than a third.
    """
    time = PlainTime(StepTimes())
    for _ in range(2 * tuning.JUDGED_SAMPLES):
        time.record_step(timed_step(ONE, 0.035, False, asked=False), None)
    time.restart()
    for got in [ONE, 2 * ONE] * 50:
        time.record_step(timed_step(got, 0.008, True), None)
    assert time.of_stock() == pytest.approx(1 / 1.5, rel=0.01)
    assert time.saved_s() == pytest.approx(50 * 0.008, rel=0.01)


@pytest.mark.parametrize("slower", [1.0, 1.9])
def test_a_rollout_in_which_no_drafter_is_asked_took_what_stock_takes(
    slower: float,
) -> None:
    """Also where its steps take longer than those before."""
    account = make()
    rollout(account, asking=1.0)
    account.sync()
    for _ in range(200):
        step = timed_step(ONE, slower * PLAIN.step(8, 8, False), False, asked=False)
        account.time.record_step(step, None)
    assert account.time.of_stock() == 1.0
    assert account.time.saved_s() == 0.0


def test_the_scatter_of_baseline_steps_raises_no_doubt_of_their_own_part() -> None:
    """Of a rollout of mostly such steps, the others took half as long again."""
    time = PlainTime(StepTimes(StepModel(base=0.01, token=0.0)))
    one = np.ones(4, dtype=int)
    step = TimedStep(np.arange(4), one, 4, seconds=0.015)
    for number in range(400):
        scattered_s = 0.005 if number % 2 else 0.015
        time.record_step(step._replace(seconds=scattered_s, asked=False), None)
    for _ in range(100):
        time.record_step(step, None)
    assert "drafting lost" in (time.explain_loss() or "")
