"""The simulator: nothing is lost, small cases agree with what can be counted by hand,
and equal seeds agree.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import replace
from typing import Any

import index_workload as workload
import numpy as np
import pytest
from replay import replay

from das_adapter.core.latency import StepModel
from das_adapter.sim import Simulation, fleet, pipeline, summary
from das_adapter.sim.config import RolloutBlock, parse
from das_adapter.sim.controlled import Controlled
from das_adapter.sim.drafting import Fixed, no_drafts
from das_adapter.sim.fleet import Fleet
from das_adapter.sim.pipeline import Run
from das_adapter.sim.requests import Requests
from das_adapter.sim.sources import Given
from das_adapter.sim.steps import Line
from das_adapter.sim.workload import draw_lengths

ROLLOUTS = workload.synthetic(problems=10, samples=6, mean_tokens=60, seed=3)
WRITTEN = workload.synthetic(problems=12, samples=6, mean_tokens=80, seed=3)
ALWAYS: dict[str, Any] = {
    "budget": "unlimited",
    "max_draft_tokens": 8,
    "speculate": "always",
}
LINE = {"base": 0.01, "token": 1e-4, "draft": 0.0}
SLOW = LINE | {"base": 0.1}
OFF: dict[str, Any] = {"das": {"drafter": "none"}}
SMALL: dict[str, Any] = {
    "steps": {"kind": "line", "line": LINE},
    "hardware": {"gpus": 2},
    "rollout": {
        "problems": 6,
        "samples": 4,
        "dataset": 12,
        "cap": 300,
        "prompt": 20,
        "lengths": {"mean": 80},
    },
    "arms": {"off": OFF, "history": {}},
}


def small(**changed: Any) -> Simulation:
    """A simulation whose keys `a__b` are changed."""
    content = json.loads(json.dumps(SMALL))
    for key, value in changed.items():
        block, *path = content, *key.split("__")
        for part in path[:-1]:
            block = block.setdefault(part, {})
        block[path[-1]] = value
    return Simulation(parse(content))


def controlled(simulation: Simulation, arm: str = "a") -> Controlled:
    found = simulation.fleet(arm)[0].drafting
    assert isinstance(found, Controlled)
    return found


def sent(simulation: Simulation, arm: str = "off") -> Fleet:
    """The engines of an arm with the requests of its first step."""
    found, work = simulation.fleet(arm)
    rows = found.requests.add(**work.steps[0])
    found.submit(rows, rows % found.engines, np.zeros(len(rows), np.int64), 0.0)
    return found


def engine_of(lengths: list[int], slots: int) -> Fleet:
    """One engine with requests of these lengths and no prompts: the first pass reads
    one token.
    """
    requests = Requests()
    n = len(lengths)
    rows = requests.add(
        problem=np.arange(n),
        text=np.full(n, -1),
        num_prompt_tokens=np.zeros(n, np.int64),
        num_output_tokens=np.array(lengths),
        max_tokens=np.full(n, 1000),
    )
    found = Fleet(1, requests, Line(StepModel(**LINE)), no_drafts(requests), slots)
    found.submit(rows, np.zeros(n, np.int64), np.zeros(n, np.int64), 0.0)
    return found


# Counted by hand


@pytest.mark.parametrize("slots", [1, 3, 256])
def test_plain_decoding_takes_what_each_round_takes(slots: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 120, 20).tolist()
    one = engine_of(lengths, slots)
    one.run()
    ends = [0] * slots  # each request takes the slot that is free first
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    assert one.step_count[0] == max(ends)
    assert one.clock[0] == pytest.approx(
        LINE["base"] * max(ends) + LINE["token"] * sum(lengths), rel=1e-9
    )


def test_engines_that_step_together_and_in_turns_agree() -> None:
    def ends(slack: float) -> np.ndarray:
        one = sent(small(), "history")
        one.run(slack=slack)
        return one.requests.ended_s

    assert np.array_equal(ends(0.0), ends(np.inf))


def test_one_draft_length_takes_the_rounds_that_its_acceptance_gives() -> None:
    ngram = {
        "drafter": "ngram",
        "budget": "unlimited",
        "max_draft_tokens": 3,
        "speculate": "always",
    }
    one = {
        "problems": 1,
        "samples": 1,
        "cap": 4000,
        "lengths": {"mean": 3999, "sigma": 0.01},
    }
    simulation = small(
        hardware__gpus=1,
        rollout=one,
        arms={"k3": {"das": ngram}},
        acceptance__length=2.5,
    )
    (step,) = simulation.run("k3").steps
    assert step.tokens_per_forward == pytest.approx(2.5, rel=0.05)
    assert step.rollout_s == pytest.approx(
        step.forwards * (LINE["base"] + 4 * LINE["token"]), rel=0.01
    )


def test_neural_drafters_draft_where_they_pay() -> None:
    """Under the controller, as in a run; in every step only where the block says so."""
    eagle: dict[str, Any] = {"drafter": "eagle3", "draft": {"model": "eagle"}}
    always = {**eagle, "budget": "unlimited", "speculate": "always"}
    both = {**eagle, "drafter": "history+eagle3"}
    arms = {
        "off": OFF,
        "eagle3": {"das": eagle},
        "always": {"das": always},
        "both": {"das": both},
    }
    for line, length, pays in (
        (LINE, 3.0, True),
        ({"base": 1e-2, "token": 2e-2}, 1.3, False),
    ):
        runs = small(
            rollout__steps=3, steps__line=line, acceptance__length=length, arms=arms
        ).run_all()
        off, alone, every, beside = (
            sum(step.rollout_s for step in runs[name].steps) for name in arms
        )
        if pays:
            assert alone < 0.75 * off
            assert beside < 1.02 * alone
        else:
            assert alone < 1.1 * off < every
            assert all(
                step.tokens_per_forward < 1.01 for step in runs["eagle3"].steps[1:]
            )


@pytest.mark.parametrize("how", [{}, {"budget": "unlimited", "speculate": "always"}])
def test_a_parallel_drafter_takes_one_pass_a_step(how: dict[str, str]) -> None:
    """Of equal tokens; a pass is a twentieth of a plain step."""
    blocks = {
        name: {"drafter": name, "max_draft_tokens": 4, "draft": {"model": "m"}, **how}
        for name in ("eagle3", "dflash")
    }
    arms = {name: {"das": block} for name, block in blocks.items()}
    runs = small(rollout__steps=2, acceptance__length=3.0, arms=arms).run_all()
    four, one = (sum(step.rollout_s for step in runs[name].steps) for name in blocks)
    assert 0.8 * four < one < 0.92 * four


def test_the_index_drafts_as_in_a_replay() -> None:
    keys = {
        "hardware": {"gpus": 1},
        "engine": {"max_num_seqs": 4096},
        "acceptance": {"history": "index"},
    }
    run = Simulation(
        parse(SMALL | keys | {"arms": {"k8": {"das": ALWAYS}}}), ROLLOUTS
    ).run("k8")
    theirs = replay(ROLLOUTS, budget=8).total
    (step,) = run.steps
    # a request's first token comes with its prompt, and has no draft
    assert step.tokens == theirs.tokens
    assert theirs.rounds <= step.forwards <= theirs.rounds + len(ROLLOUTS)


# Conservation


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"engine__max_num_seqs": 3},
        {"engine__kv_tokens": 480},
        {"engine__kv_tokens": 480, "engine__max_num_seqs": 3},
        {
            "rollout__steps": 5,
            "pipeline__kind": "async",
            "pipeline__lag": 2,
            "pipeline__train_s": 0.5,
        },
        {"arms": {"self": {"das": {"drafter": "history+self"}}}},
        {"rollout__steps": 3, "arms": {"strided": {"stride": 4}}},
        {
            "rollout__dataset": 5,
            "rollout__problems": 4,
            "rollout__steps": 12,
            "pipeline__kind": "async",
        },
    ],
)
def test_tokens_blocks_and_time_are_conserved(changed: dict[str, Any]) -> None:
    simulation = small(**changed)
    for arm in simulation.config.arms:
        run = simulation.run(arm)
        one = sent(simulation, arm)
        while one.busy.any():  # at any time
            one.run(until=one.clock[one.busy].min() + 0.02)
            r = one.requests
            running = one.running
            assert (np.bincount(r.engine[running], minlength=2) <= one.slots).all()
            held = -(-(r.num_prompt_tokens + r.num_written)[running] // 16)
            assert (np.bincount(r.engine[running], held, 2) <= one.kv_blocks).all()
            assert (r.num_written <= r.num_output_tokens).all()
        assert not one.used_blocks().any() and (one.busy_s <= one.clock + 1e-9).all()
        if changed == {"engine__kv_tokens": 480}:
            assert r.num_preemptions.sum() > 0
        assert sum(s.tokens for s in run.steps) == run.requests.num_output_tokens.sum()
        for r in (one.requests, run.requests):
            assert np.array_equal(
                r.num_written, r.num_output_tokens
            ) and np.array_equal(r.num_forwards + r.num_accepted, r.num_written)
            assert (r.num_accepted <= r.num_drafted).all() and (r.ended_s > 0).all()
        if changed.get("pipeline__kind") == "async":
            assert len(run.steps) == changed["rollout__steps"] and sum(
                s.requests for s in run.steps
            ) == len(run.requests)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_each_recorded_step_is_simulated_with_all_of_its_problems(kind: str) -> None:
    """Whatever the first had: a dump may begin in the midst of one."""
    steps = [replace(r, step=min(r.problem, 2)) for r in ROLLOUTS]
    keys = {"acceptance": {"history": "index"}, "pipeline": {"kind": kind}}
    run = Simulation(parse(SMALL | keys), steps).run("off")
    assert [step.requests for step in run.steps] == [6, 6, 48]
    assert sum(step.tokens for step in run.steps) == sum(len(r.tokens) for r in steps)


@pytest.mark.parametrize("chunk", [7, 8192])
def test_prompts_are_read_once_by_siblings_and_in_chunks(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "BATCHED_TOKENS", chunk)
    one = sent(small(hardware__gpus=1))
    read_tokens = list[float]()
    prefill = one.steps.prefill
    monkeypatch.setattr(
        Line, "prefill", lambda _, tokens: read_tokens.extend(tokens) or prefill(tokens)
    )
    one.run()
    assert sum(read_tokens) == 6 * 20 + 18 and max(read_tokens) <= chunk


def test_equal_seeds_give_equal_runs_and_other_seeds_do_not() -> None:
    def figures(seed: int) -> Any:
        return summary(small(rollout__seed=seed, rollout__steps=2).run_all())

    assert figures(1) == figures(1) != figures(2)


# What is known of rollouts


def rollout_s(run: Run) -> float:
    return sum(s.rollout_s for s in run.steps)


def test_drafts_pay_in_small_batches_and_are_left_out_where_they_cost() -> None:
    bound = {"base": 0.0, "token": 1e-3}
    for line, samples in ((LINE, 4), (bound, 16)):
        changed = {
            "hardware__gpus": 1,
            "rollout__steps": 3,
            "acceptance__rates": [[0.3]],
        }
        runs = small(steps__line=line, rollout__samples=samples, **changed).run_all()
        # the first is the calibration
        drafted, off = (runs[arm].steps[-1].rollout_s for arm in ("history", "off"))
        ratio = drafted / off
        assert ratio < 0.95 if line is LINE else ratio == pytest.approx(1.0, abs=0.05)


def test_a_lag_hides_the_tail_and_training_hides_generation() -> None:
    def step(lag: int, train_s: float) -> float:
        run = small(
            rollout__steps=8,
            pipeline__kind="async",
            pipeline__lag=lag,
            pipeline__train_s=train_s,
        ).run("off")
        return float(np.mean([s.step_s for s in run.steps[2:]]))

    assert step(2, 0.0) < 0.9 * step(0, 0.0)
    assert step(1, 50.0) == pytest.approx(50.0)
    assert step(0, 50.0) > 50.5


def test_with_a_lag_the_rollout_goes_on_while_the_trainer_trains() -> None:
    """From one batch to the next; engines have less to do than between batches without
    training, not more.
    """

    def steps(**pipeline: Any) -> list[Any]:
        return small(rollout__steps=8, pipeline=pipeline).run("off").steps

    sync = steps()
    trained = steps(kind="async", train_s=50.0, sync_s=2.0)[1:]
    written_s = float(np.mean([(1.0 - step.idle) * step.rollout_s for step in sync]))
    for step in trained:
        assert step.exposed_s == 0.0 and (step.rollout_s, step.step_s) == pytest.approx(
            (52.0, 52.0)
        )
    # less the weight sync
    busy_s = [(1.0 - step.idle) * step.rollout_s - 2.0 for step in trained[:-1]]
    assert np.mean(busy_s) == pytest.approx(written_s, rel=0.1)


def test_engines_that_go_on_by_themselves_do_what_they_do_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end() -> Fleet:
        one, work = small(engine__kv_tokens=1600).fleet("off")
        r = one.requests
        source = Given(r, [[0.7]], agreement=0.9)
        one.drafting = Fixed(
            r, source, 4, lambda b, context: 1e-3 + 1e-4 * b + 1e-6 * context, 4
        )
        rows = r.add(**work.steps[0])
        r.num_ahead[::2] = r.num_output_tokens[::2] // 2
        one.submit(rows, rows % 2, rows * 0, 0.0)
        one.run()
        return one

    by_themselves = end()
    monkeypatch.setattr(Fixed, "free_steps", lambda *_: None)
    stepped = end()
    names = ("written", "forwards", "drafted", "accepted", "preemptions")
    for column in (f"num_{name}" for name in names):
        assert np.array_equal(
            getattr(by_themselves.requests, column), getattr(stepped.requests, column)
        ), column
    assert by_themselves.requests.ended_s == pytest.approx(stepped.requests.ended_s)
    assert by_themselves.busy_s == pytest.approx(stepped.busy_s)


def test_a_controller_that_is_asked_now_and_then_saves_about_as_much() -> None:
    arms = {"off": OFF, "each": {}, "sixteenth": {"stride": 16}}
    rollout = SMALL["rollout"] | {"problems": 8, "cap": 2000, "lengths": {"mean": 600}}
    content = SMALL | {
        "rollout": rollout,
        "acceptance": {"rates": [[0.5], [0.7]]},
        "arms": arms,
    }
    off, each, sixteenth = (
        rollout_s(Simulation(parse(content)).run(arm)) for arm in arms
    )
    assert each < 0.8 * off
    assert sixteenth == pytest.approx(each, rel=0.1)


# Run-ahead

AHEAD: dict[str, Any] = {"das": {"history": {"run_ahead": "auto"}}}
FIRST: dict[str, Any] = {  # four engines, and every problem once
    "hardware__gpus": 4,
    "rollout__steps": 4,
    "rollout__dataset": 24,
    "rollout__lengths__sigma": 1.2,
    "steps__line": SLOW,
    "arms": {"off": OFF, "history": {}, "ahead": AHEAD},
}


def test_what_idle_engines_write_ahead_shortens_the_next_steps() -> None:
    runs = {
        chance: small(**FIRST, acceptance__agreement=chance).run_all()
        for chance in (0.5, 0.9999)
    }
    for chance, by_arm in runs.items():
        history = by_arm["history"]
        ahead = by_arm["ahead"]
        first, *later = ahead.steps
        assert (
            first.ahead == 0
            and first.tokens_per_forward == history.steps[0].tokens_per_forward
        )
        assert all(0.1 < step.idle < 0.9 for step in history.steps)
        assert all(0.3 * step.tokens < step.ahead <= step.tokens for step in later)
        assert rollout_s(ahead) < rollout_s(history) < rollout_s(by_arm["off"]), chance
        r = ahead.requests
        real = ahead.requests.num_ahead >= 0
        assert (
            sum(step.tokens for step in ahead.steps)
            == r.num_output_tokens[real].sum()
            == history.requests.num_output_tokens.sum()
        )
        assert (r.num_written[real] == r.num_output_tokens[real]).all() and (
            r.num_ahead[real] <= r.num_output_tokens[real]
        ).all()
        assert (
            r.num_written[~real].sum() == r.num_ahead[real].sum()
            and not r.ended_s[r.num_written < r.num_output_tokens].any()
        )
    same, other = (
        runs[chance]["ahead"].steps[-1].tokens_per_forward for chance in (0.9999, 0.5)
    )
    assert same > 1.5 * other


def test_a_long_tail_writes_several_steps_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = FIRST | {
        "rollout__steps": 8,
        "rollout__dataset": 48,
        "acceptance__agreement": 0.9999,
    }
    several = small(**keys).run("ahead")
    monkeypatch.setattr(pipeline.tuning, "RUN_AHEAD_STEPS", 1)
    one = small(**keys).run("ahead")
    assert sum(step.ahead for step in several.steps) > sum(
        step.ahead for step in one.steps
    )
    assert rollout_s(several) < rollout_s(one)


def test_nobody_looks_for_idle_engines_when_nothing_is_left_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With slow steps, most of the looks of a long tail would come after the last
    request was given out.
    """
    looked = list[float]()
    stock = Fleet.run
    monkeypatch.setattr(pipeline.tuning, "RUN_AHEAD_STEPS", 1)
    monkeypatch.setattr(
        Fleet,
        "run",
        lambda self, *at, **how: (looked.extend(at), stock(self, *at, **how))[1],
    )
    run = small(**FIRST).run("ahead")
    assert (
        len(looked)
        < 0.3
        * sum(step.rollout_s for step in run.steps)
        / pipeline.tuning.RUN_AHEAD_POLL_S
    )


def test_run_ahead_costs_at_most_a_step_where_no_engine_is_idle() -> None:
    even = FIRST | {
        "rollout__lengths__sigma": 0.001,
        "rollout__problems": 8,
        "rollout__dataset": 32,
    }
    runs = small(**even, rollout__lengths__mean=299).run_all()
    for without, step in zip(runs["history"].steps, runs["ahead"].steps, strict=True):
        assert (
            step.rollout_s
            <= without.rollout_s + SLOW["base"] + 0.05 * without.rollout_s
        )
    assert rollout_s(runs["ahead"]) <= 1.01 * rollout_s(runs["history"])


def test_nothing_is_written_ahead_where_requests_run_on_across_weight_syncs() -> None:
    history, ahead = (
        small(**FIRST, pipeline__kind="async", pipeline__train_s=1.0).run(arm)
        for arm in ("history", "ahead")
    )
    assert history.steps == ahead.steps and len(history.requests) == len(ahead.requests)


def test_recorded_rollouts_are_drafted_from_what_was_written_ahead_of_them() -> None:
    steps = [replace(r, step=r.problem % 3) for r in ROLLOUTS]
    again = [replace(r, step=3 + r.step, tokens=r.tokens[::-1].copy()) for r in steps]

    def forwards(arm: str, agreement: float = 0.5) -> int:
        keys = {
            "hardware": {"gpus": 4},
            "acceptance": {"history": "index", "agreement": agreement},
        }
        arms = {"history": {}, "ahead": AHEAD}
        found = Simulation(
            parse(
                SMALL | keys | {"steps": {"kind": "line", "line": SLOW}, "arms": arms}
            ),
            steps + again,
        )
        return sum(step.forwards for step in found.run(arm).steps[:3])

    assert forwards("ahead", 0.9999) < forwards("ahead") < 1.05 * forwards("history")
    assert forwards("ahead", 0.9999) < 0.8 * forwards("history")


# Routing


def test_groups_that_stay_together_draft_as_on_one_replica() -> None:
    def run(replicas: int, routing: str) -> tuple[float, int]:
        """Replicas of a group, and accepted tokens."""
        arm = {"das": {**ALWAYS, "routing": routing}}
        keys = {
            "hardware": {"gpus": replicas},
            "acceptance": {"history": "index"},
            "arms": {"a": arm},
        }
        r = Simulation(parse(SMALL | keys), WRITTEN).run("a").requests
        places = set(zip(r.problem.tolist(), r.engine.tolist(), strict=True))
        return len(places) / len(set(r.problem.tolist())), int(r.num_accepted.sum())

    (spread, fewer) = run(4, "least_loaded")
    (together, kept) = run(4, "longest_first")
    assert spread > 2 > together == 1
    assert fewer < kept == pytest.approx(run(1, "longest_first")[1], rel=0.02)


# Lengths


@pytest.mark.parametrize(("mean", "cap"), [(500, 8192), (6000, 8192), (2000, 16384)])
def test_lengths_have_the_mean_the_cap_and_the_correlation_that_were_asked_for(
    mean: float, cap: int
) -> None:
    rollout = RolloutBlock.model_validate(
        {"cap": cap, "lengths": {"within": 0.6, "mean": mean, "sigma": 0.9}}
    )
    drawn, again = (
        draw_lengths(rollout, np.arange(3000), np.random.default_rng(seed))
        for seed in (0, 1)
    )
    assert drawn.mean() == pytest.approx(mean, rel=0.05)
    assert drawn.max() <= cap and drawn.min() >= 1
    between = np.corrcoef(np.log(drawn.mean(axis=1)), np.log(again.mean(axis=1)))[0, 1]
    assert between > 0.8
