"""The simulator: nothing is lost, small cases agree with what can be counted by hand, and equal seeds agree."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

import index_workload as workload
import numpy as np
import pytest
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.core.hardware import DEVICES, device
from das_adapter.core.latency import StepModel
from das_adapter.core.plain_time import seconds_of
from das_adapter.core.roofline import Roofline, cold_start
from das_adapter.core.routing import StartOrder
from das_adapter.core.siblings import NO_SIBLINGS
from das_adapter.errors import ConfigError, DasError
from das_adapter.sim import Simulation, fleet, routing, summary
from das_adapter.sim.config import RolloutBlock, parse, read
from das_adapter.sim.controlled import Controlled
from das_adapter.sim.drafting import Fixed, no_drafts
from das_adapter.sim.fleet import Fleet
from das_adapter.sim.models import sizes
from das_adapter.sim.pipeline import Run
from das_adapter.sim.requests import Requests
from das_adapter.sim.rollouts import Rollout
from das_adapter.sim.simulate import rate_of
from das_adapter.sim.sources import Given, Traced, record
from das_adapter.sim.steps import Instance, Line, instance, read_sweep
from das_adapter.sim.sweep import sweep, variants
from das_adapter.sim.workload import draw_lengths
from das_adapter.tools.replay import replay

ROLLOUTS = workload.synthetic(problems=10, samples=6, mean_tokens=60, seed=3)
WRITTEN = workload.synthetic(problems=12, samples=6, mean_tokens=80, seed=3)
ALWAYS: dict[str, Any] = {"budget": "unlimited", "max_draft_tokens": 8, "speculate": "always"}
LINE = {"base": 0.01, "token": 1e-4, "draft": 0.0}
OFF: dict[str, Any] = {"das": {"drafter": "none"}}
SMALL: dict[str, Any] = {
    "steps": {"kind": "line", "line": LINE},
    "hardware": {"gpus": 2},
    "rollout": {"problems": 6, "samples": 4, "dataset": 12, "cap": 300, "prompt": 20, "lengths": {"mean": 80}},
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
    """One engine with requests of these lengths, whose prompts take no time."""
    requests, n = Requests(), len(lengths)
    rows = requests.add(
        problem=np.arange(n),
        text=np.full(n, -1),
        prompt=np.full(n, 5),
        length=np.array(lengths),
        most=np.full(n, 1000),
    )
    found = Fleet(1, requests, Line(StepModel(**LINE), prefill_share=0.0), no_drafts(requests), slots)
    found.submit(rows, np.zeros(n, np.int64), np.zeros(n, np.int64), 0.0)
    return found


# Counted by hand


@pytest.mark.parametrize("slots", [1, 3, 256])
def test_plain_decoding_takes_what_each_round_takes(slots: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 120, 20).tolist()
    one = engine_of(lengths, slots)
    one.run()
    running: list[int] = []
    waiting, seconds, now = list(lengths), 0.0, 0
    while waiting or running:  # a request's first token comes with the step that reads its prompt
        new = 0
        while waiting and len(running) < slots:
            heapq.heappush(running, now + waiting.pop(0))
            new += 1
        old = len(running) - new
        seconds += LINE["base"] + LINE["token"] * old
        now += 1
        while running and running[0] <= now:
            heapq.heappop(running)
    assert one.clock[0] == pytest.approx(seconds, rel=1e-9)
    assert one.step_count[0] == now
    if slots >= len(lengths):
        whole = seconds_of(lengths, slots, StepModel(**LINE).plain)
        assert one.clock[0] == pytest.approx(whole - LINE["token"] * len(lengths), rel=1e-9)


@pytest.mark.parametrize("slots", [2, 256])
def test_drafted_decoding_takes_what_each_round_takes(slots: int) -> None:
    lengths, model = np.random.default_rng(1).integers(1, 60, 8).tolist(), StepModel(base=0.01, token=1e-4, draft=2e-3)
    one, other = engine_of(lengths, slots), engine_of(lengths, slots)
    one.steps = Line(model, prefill_share=0.0)
    one.drafting = Fixed(one.requests, Given(one.requests, [[0.8, 0.4]], 3, seed=2), 3)
    one.run()
    r, given = other.requests, Given(other.requests, [[0.8, 0.4]], 3, seed=2)
    waiting, running, seconds, drafted = list(range(8)), list[int](), 0.0, 0
    draft = dict.fromkeys(waiting, (0, 0))  # tokens, and those that survive
    while waiting or running:
        new = [waiting.pop(0) for _ in range(min(len(waiting), slots - len(running)))]
        tokens = sum(1 + draft[row][0] for row in running)
        seconds += model.step(tokens, len(running), tokens > len(running))
        drafted += tokens - len(running)
        for row in running:
            r.written[row] += min(1 + draft[row][1], r.length[row] - r.written[row])
        r.written[new] = 1
        running = [row for row in running + new if r.written[row] < r.length[row]]
        for row in running:
            offer = given.offer(np.array([row]), np.minimum(3, r.length[[row]] - 1 - r.written[[row]]), 0.0)
            draft[row] = int(offer.offsets[-1]), int(offer.hits[0])
    assert one.clock[0] == pytest.approx(seconds, rel=1e-9)
    assert one.requests.drafted.sum() == drafted > one.requests.accepted.sum() > 0


def test_engines_that_step_together_and_in_turns_agree() -> None:
    def ends(slack: float) -> np.ndarray:
        one = sent(small(), "history")
        one.run(slack=slack)
        return one.requests.ended

    assert np.array_equal(ends(0.0), ends(np.inf))


def test_one_draft_length_takes_the_rounds_that_its_acceptance_gives() -> None:
    ngram = {"drafter": "ngram", "budget": "unlimited", "max_draft_tokens": 3, "speculate": "always"}
    one = {"problems": 1, "samples": 1, "cap": 4000, "lengths": {"mean": 3999, "sigma": 0.01}}
    simulation = small(hardware__gpus=1, rollout=one, arms={"k3": {"das": ngram}}, acceptance__length=2.5)
    (step,) = simulation.run("k3").steps
    assert step.tokens_per_forward == pytest.approx(2.5, rel=0.05)
    assert step.rollout_s == pytest.approx(step.forwards * (LINE["base"] + 4 * LINE["token"]), rel=0.01)


def test_neural_drafters_draft_where_they_pay() -> None:
    """Under the controller, as in a run; in every step only where the block says so."""
    eagle: dict[str, Any] = {"drafter": "eagle3", "draft": {"model": "eagle"}}
    always = {**eagle, "budget": "unlimited", "speculate": "always"}
    both = {**eagle, "drafter": "history+eagle3"}
    arms = {"off": OFF, "eagle3": {"das": eagle}, "always": {"das": always}, "both": {"das": both}}
    for line, length, pays in ((LINE, 3.0, True), ({"base": 1e-2, "token": 2e-2}, 1.3, False)):
        runs = small(rollout__steps=3, steps__line=line, acceptance__length=length, arms=arms).run_all()
        off, alone, every, beside = (sum(step.rollout_s for step in runs[name].steps) for name in arms)
        if pays:
            assert alone < 0.75 * off
            assert beside < 1.02 * alone
        else:
            assert alone < 1.1 * off < every
            assert all(step.tokens_per_forward < 1.01 for step in runs["eagle3"].steps[1:])


def test_the_index_drafts_as_in_a_replay() -> None:
    keys = {"hardware": {"gpus": 1}, "engine": {"max_num_seqs": 4096}, "acceptance": {"history": "index"}}
    run = Simulation(parse(SMALL | keys | {"arms": {"k8": {"das": ALWAYS}}}), ROLLOUTS).run("k8")
    theirs = replay(ROLLOUTS, budget=8, batch=4096).total
    (step,) = run.steps
    assert step.tokens == theirs.tokens  # a request's first token comes with its prompt, and has no draft
    assert theirs.rounds <= step.forwards <= theirs.rounds + len(ROLLOUTS)


# Conservation


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"engine__max_num_seqs": 3},
        {"engine__kv_tokens": 480},
        {"engine__kv_tokens": 480, "engine__max_num_seqs": 3},
        {"rollout__steps": 4, "pipeline__kind": "one_step_off", "pipeline__train_s": 1.0},
        {"rollout__steps": 5, "pipeline__kind": "async", "pipeline__lag": 2, "pipeline__train_s": 0.5},
        {"arms": {"self": {"das": {"drafter": "history+self", "self": {"ladder": [3, 5]}}}}},
        {"rollout__steps": 3, "arms": {"strided": {"stride": 4}}},
    ],
)
def test_tokens_blocks_and_time_are_conserved(changed: dict[str, Any]) -> None:
    simulation = small(**changed)
    for arm in simulation.config.arms:
        run, one = simulation.run(arm), sent(simulation, arm)
        while one.busy.any():  # at any time
            one.run(until=one.clock[one.busy].min() + 0.02)
            r, running = one.requests, one.running
            assert (np.bincount(r.engine[running], minlength=2) <= one.slots).all()
            held = -(-(r.prompt + r.written)[running] // 16)
            assert (np.bincount(r.engine[running], held, 2) <= one.kv_blocks).all()
            assert (r.written <= r.length).all()
        assert not one.used_blocks().any() and (one.busy_s <= one.clock + 1e-9).all() and 0 < run.busy_share <= 1 + 1e-9
        if changed == {"engine__kv_tokens": 480}:
            assert r.preempted.sum() > 0
        assert sum(s.tokens for s in run.steps) == run.requests.length.sum()
        for r in (one.requests, run.requests):
            assert np.array_equal(r.written, r.length) and np.array_equal(r.forwards + r.accepted, r.written)
            assert (r.accepted <= r.drafted).all() and (r.ended >= r.begun).all() and (r.begun >= r.sent).all()
        if changed.get("pipeline__kind") == "async":
            assert len(run.steps) == 5 and sum(s.requests for s in run.steps) == len(run.requests)


@pytest.mark.parametrize("chunk", [7, 8192])
def test_prompts_are_read_once_by_siblings_and_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "BATCHED_TOKENS", chunk)
    one, read_tokens = sent(small(hardware__gpus=1)), list[float]()
    prefill = one.steps.prefill
    monkeypatch.setattr(Line, "prefill", lambda _, tokens: read_tokens.extend(tokens) or prefill(tokens))
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
        changed = {"hardware__gpus": 1, "rollout__steps": 3, "acceptance__rates": [[0.3]]}
        runs = small(steps__line=line, rollout__samples=samples, **changed).run_all()
        drafted, off = (runs[arm].steps[-1].rollout_s for arm in ("history", "off"))  # the first is the calibration
        ratio = drafted / off
        assert ratio < 0.95 if line is LINE else ratio == pytest.approx(1.0, abs=0.05)


def test_a_lag_hides_the_tail_and_training_hides_generation() -> None:
    def step(lag: int, train_s: float) -> float:
        run = small(rollout__steps=8, pipeline__kind="async", pipeline__lag=lag, pipeline__train_s=train_s).run("off")
        return float(np.mean([s.step_s for s in run.steps[2:]]))

    assert step(2, 0.0) < 0.9 * step(0, 0.0)
    assert step(1, 50.0) == pytest.approx(50.0)
    assert step(0, 50.0) > 50.5


def test_one_step_off_takes_the_longer_of_rollout_and_training() -> None:
    synchronous = small(rollout__steps=4, pipeline__train_s=2.0).run("off").steps
    beside = small(rollout__steps=4, pipeline__train_s=2.0, pipeline__kind="one_step_off").run("off").steps
    for one, other in zip(synchronous[1:], beside[1:], strict=True):
        assert other.rollout_s == pytest.approx(one.rollout_s)
        assert other.step_s == pytest.approx(max(2.0, other.rollout_s))
        assert other.exposed_s == pytest.approx(max(0.0, other.rollout_s - 2.0))


def test_a_trace_gives_about_what_the_index_gives() -> None:
    def run(kind: str) -> Run:
        content = SMALL | {"acceptance": {"history": kind}, "hardware": {"gpus": 1}, "arms": {"history": {}}}
        return Simulation(parse(content), ROLLOUTS).run("history")

    exact, traced = run("index"), run("trace")
    assert rollout_s(traced) == pytest.approx(rollout_s(exact), rel=0.1)
    trace = record(sorted(ROLLOUTS, key=lambda r: r.step), longest=8)
    assert (trace.hits <= trace.drafted).all() and trace.drafted.max() == 8


def test_a_trace_takes_what_several_runs_wrote_in_one_step_as_steps_of_their_own() -> None:
    """As the index does that is searched at every step: no policy drafts from what another is writing."""
    runs = [Rollout(r.problem, 5, run, r.prompt, r.tokens[run:]) for run in (0, 1) for r in ROLLOUTS]
    steps = [Rollout(r.problem, r.run, 0, r.prompt, r.tokens) for r in runs]
    one, other = record(runs), record(steps)
    for name, column in vars(one).items():
        assert np.array_equal(column, getattr(other, name)), name
    assert not one.known[: len(ROLLOUTS)].any() and one.known[len(ROLLOUTS) :].all()
    assert one.known.sum() == replay(runs).total.hits


@pytest.mark.parametrize("source", ["given", "trace"])
def test_engines_that_go_on_natively_do_what_they_do_step_by_step(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> Fleet:
        rollouts = ROLLOUTS if source == "trace" else None
        one, work = Simulation(parse(SMALL | {"engine": {"kv_tokens": 1600}}), rollouts).fleet("off")
        r = one.requests
        drafts = Given(r, [[0.7]]) if source == "given" else Traced(r, work.texts, record(work.texts.rollouts))
        one.drafting = Fixed(r, drafts, 4, lambda b, context: 1e-3 + 1e-4 * b + 1e-6 * context)
        rows = r.add(**work.steps[0])
        one.submit(rows, rows % 2, rows * 0, 0.0)
        one.run()
        return one

    natively = end()
    monkeypatch.setattr(Fixed, "walk", lambda *_: None)
    stepped = end()
    for column in ("written", "forwards", "drafted", "accepted", "preempted"):
        assert np.array_equal(getattr(natively.requests, column), getattr(stepped.requests, column)), column
    assert natively.requests.ended == pytest.approx(stepped.requests.ended)
    assert natively.busy_s == pytest.approx(stepped.busy_s)


def test_a_controller_that_is_asked_now_and_then_saves_about_as_much() -> None:
    arms = {"off": OFF, "each": {}, "sixteenth": {"stride": 16}}
    rollout = SMALL["rollout"] | {"problems": 8, "cap": 2000, "lengths": {"mean": 600}}
    content = SMALL | {"rollout": rollout, "acceptance": {"rates": [[0.5], [0.7]]}, "arms": arms}
    off, each, sixteenth = (rollout_s(Simulation(parse(content)).run(arm)) for arm in arms)
    assert each < 0.8 * off
    assert sixteenth == pytest.approx(each, rel=0.1)


# Routing


def routed(replicas: int, slots: int = 256, rollouts: list[Rollout] = WRITTEN) -> dict[str, Run]:
    """Recorded rollouts over replicas: groups scattered, together, and leaders first as the package has it."""
    arms = {"scattered": {"das": {**ALWAYS, "routing": "least_loaded"}}, "leaders": {"das": ALWAYS}}
    keys = {"hardware": {"gpus": replicas}, "engine": {"max_num_seqs": slots}, "acceptance": {"history": "index"}}
    config = parse(SMALL | keys | {"arms": arms})
    runs = Simulation(config, rollouts).run_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "start_order", lambda das, group: StartOrder(NO_SIBLINGS, group))
        return runs | {"together": Simulation(config, rollouts).run("leaders")}


def accepted(run: Run) -> int:
    return int(run.requests.accepted.sum())


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("slots", [256, 5])
def test_every_response_is_written_to_its_end(replicas: int, slots: int) -> None:
    for run in routed(replicas, slots).values():
        assert run.requests.forwards.sum() + accepted(run) == sum(len(r.tokens) for r in WRITTEN)


def test_groups_that_stay_together_draft_as_on_one_replica() -> None:
    def replicas_of_a_group(run: Run) -> float:
        r = run.requests
        return len(set(zip(r.problem.tolist(), r.engine.tolist(), strict=True))) / len(set(r.problem.tolist()))

    one, four = routed(1), routed(4)
    assert replicas_of_a_group(four["scattered"]) > 2 > replicas_of_a_group(four["together"]) == 1
    assert (
        accepted(four["scattered"]) < accepted(four["together"]) == pytest.approx(accepted(one["together"]), rel=0.02)
    )
    assert accepted(one["together"]) == pytest.approx(accepted(one["scattered"]), rel=0.02)


def test_leaders_help_where_requests_wait_and_change_nothing_in_one_wave() -> None:
    waiting, at_once = routed(2, slots=6), routed(2)
    assert accepted(waiting["leaders"]) > accepted(waiting["together"])
    assert accepted(at_once["leaders"]) == pytest.approx(accepted(at_once["together"]), rel=0.02)


def test_earlier_steps_are_drafted_from_on_every_replica() -> None:
    again = [Rollout(r.problem, 1, 0, r.prompt, r.tokens) for r in WRITTEN]
    first, both = (accepted(routed(4, rollouts=some)["leaders"]) for some in (WRITTEN, [*WRITTEN, *again]))
    assert both - first > 2 * first


def test_siblings_that_have_finished_are_worth_more_than_growing_ones() -> None:
    alone = [r for i, r in enumerate(WRITTEN) if r.problem not in {x.problem for x in WRITTEN[:i]}]
    none, growing, finished = (
        accepted(run["together"]) / run["together"].requests.forwards.sum()
        for run in (routed(1, rollouts=alone), routed(1), routed(1, slots=1))
    )
    assert none < growing < finished


# Lengths


@pytest.mark.parametrize(("mean", "cap"), [(500, 8192), (6000, 8192), (2000, 16384)])
def test_lengths_have_the_mean_the_cap_and_the_correlation_that_were_asked_for(mean: float, cap: int) -> None:
    rollout = RolloutBlock.model_validate({"cap": cap, "lengths": {"within": 0.6, "mean": mean, "sigma": 0.9}})
    drawn, again = (draw_lengths(rollout, np.arange(3000), np.random.default_rng(seed)) for seed in (0, 1))
    assert drawn.mean() == pytest.approx(mean, rel=0.05)
    assert drawn.max() <= cap and drawn.min() >= 1
    between = np.corrcoef(np.log(drawn.mean(axis=1)), np.log(again.mean(axis=1)))[0, 1]
    assert between > 0.8


def test_chances_differ_from_problem_to_problem_and_stay_from_visit_to_visit() -> None:
    keys = {"rollout__steps": 8, "rollout__dataset": 24, "rollout__samples": 16, "acceptance__rates": [[0.5]]}

    def rates(spread: float) -> np.ndarray:
        run = small(**keys, acceptance__spread=spread, arms={"a": {"das": ALWAYS}}).run("a")
        r, found = run.requests, np.zeros((2, 24))
        for visit, problem in np.ndindex(found.shape):
            mine = (r.visit == visit) & (r.problem == problem)
            found[visit, problem] = r.accepted[mine].sum() / r.forwards[mine].sum()
        return found

    alike, different = rates(0.0), rates(1.0)
    assert different.std() > 3 * alike.std()
    assert np.corrcoef(different)[0, 1] > 0.9
    assert different.mean() == pytest.approx(alike.mean(), rel=0.3)


def test_the_rate_of_a_draft_gives_its_length() -> None:
    assert sum(rate_of(2.77, 3) ** i for i in range(4)) == pytest.approx(2.77)
    with pytest.raises(DasError, match="1 to under 4"):
        rate_of(4.2, 3)


# Hardware


@pytest.mark.parametrize(
    ("model", "billions", "active"), [("Qwen/Qwen3-235B-A22B", 235, 22), ("Qwen/Qwen3-8B", 8.2, 8.2)]
)
def test_a_model_s_sizes_give_its_parameters(model: str, billions: float, active: float) -> None:
    roof = Roofline.of(sizes(model), DEVICES["h100"].speed)
    assert (roof.weight_bytes + roof.table_bytes + roof.expert_bytes) / 2e9 == pytest.approx(billions, rel=0.01)
    embedding = sizes(model)["hidden_size"] * sizes(model)["vocab_size"]
    assert (roof.dense_flops / 2 + embedding) / 1e9 == pytest.approx(active, rel=0.02)


def test_a_step_of_experts_reads_those_that_its_tokens_choose() -> None:
    roof = Roofline.of(sizes("Qwen/Qwen3-30B-A3B"), DEVICES["h100"].speed)
    read = roof.read_bytes([1, 16, 10000])
    assert read[0] == pytest.approx(roof.weight_bytes + roof.expert_bytes * 8 / 128)
    assert read[0] < read[1] < read[2] == pytest.approx(roof.weight_bytes + roof.expert_bytes)
    half = Roofline.of(sizes("Qwen/Qwen3-30B-A3B"), DEVICES["h100"].speed, bytes_per_weight=1.0)
    assert half.expert_bytes == roof.expert_bytes / 2 and half.kv_bytes == roof.kv_bytes


def test_spread_experts_are_read_on_the_device_that_has_most_to_read() -> None:
    """Against choices that are drawn."""
    rng = np.random.default_rng(0)
    for devices in (8, 64):
        roof = Roofline.of(sizes("Qwen/Qwen3-30B-A3B"), DEVICES["h100"].speed, devices)
        for tokens in (1, 4, 32):
            chosen = rng.random((400, tokens, 128)).argsort(axis=2)[:, :, :8]
            read = np.zeros((400, 128))
            np.put_along_axis(read, chosen.reshape(400, -1), 1.0, axis=1)
            drawn = read.reshape(400, devices, -1).mean(axis=2).max(axis=1).mean()
            found = (float(roof.read_bytes(tokens)) - roof.weight_bytes) / roof.expert_bytes
            assert found == pytest.approx(drawn, rel=0.1)
    even = Roofline.of(sizes("Qwen/Qwen3-30B-A3B"), DEVICES["h100"].speed, 1)
    assert float(even.read_bytes(4)) == pytest.approx(even.weight_bytes + even.expert_bytes * (1 - (15 / 16) ** 4))


def test_data_parallel_attention_is_read_whole_and_exchanges_a_part() -> None:
    qwen, one = sizes("Qwen/Qwen3-235B-A22B"), np.ones(1)

    def step(data_parallel: bool, tokens: float) -> float:
        engine = instance(qwen, device("gb200"), 64, "fp8", data_parallel=data_parallel)
        return float(engine.decode(tokens * one, tokens * one, 1000 * tokens * one)[0])

    assert step(True, 1) > step(False, 1)
    assert step(True, 8192) < step(False, 8192)
    with pytest.raises(DasError, match="allowed for a model without experts: 'tensor'"):
        instance(sizes("Qwen/Qwen3-8B"), device("h100"), 2, "bf16", data_parallel=True)


def test_more_devices_read_faster_and_exchange_more() -> None:
    one = np.ones(1)

    def step(devices: int, requests: float) -> float:
        engine = instance(sizes("Qwen/Qwen2.5-32B"), device("h100"), devices, "bf16")
        return float(engine.decode(requests * one, requests * one, 1000 * requests * one)[0])

    assert step(8, 64) < step(4, 64) < step(2, 64)
    assert step(1, 1) / step(8, 1) < 8
    assert step(8, 1) < step(16, 1)  # beyond a node the network's wait is longer than what is gained


def test_an_exchange_that_overlaps_hides_behind_kernels_but_for_its_waits() -> None:
    def seconds(overlap: bool, requests: float, context: float) -> float:
        found = instance(sizes("Qwen/Qwen3-8B"), device("gb200"), 8, "fp8", overlap=overlap)
        many, read = np.array([requests]), np.array([requests * context])
        return float(found.decode(many, 6 * many, read)[0])

    alone = instance(sizes("Qwen/Qwen3-8B"), device("gb200"), 8, "fp8")
    roof, waits, whole = alone.roof, alone.waits_s, alone.waits_s + alone.token_s * 6 * 1024
    kernels = float(roof.verify(1024, 4000, 5))
    assert seconds(False, 1024, 4000) == pytest.approx(kernels + whole)
    assert kernels > whole - waits > 0.2 * kernels and seconds(True, 1024, 4000) == pytest.approx(kernels + waits)
    assert float(roof.verify(1024, 1, 5)) < whole - waits and seconds(True, 1024, 1) == pytest.approx(whole)


@pytest.mark.parametrize(("drafter", "share"), [("eagle3", 1 / 28), ("mtp", 1 / 28), ("draft_model", 0.1)])
def test_a_neural_drafter_reads_a_context_of_its_own(drafter: str, share: float) -> None:
    simulation = small(model="Qwen/Qwen2.5-7B", steps={"kind": "roofline", "pass_overhead_ms": 0.5})
    b, none, plain = np.array([8.0, 64.0]), np.zeros(2), simulation.steps.decode
    read = plain(b, b, 5000 * b) - plain(b, b, none)
    expected = 0.5e-3 + 0.1 * plain(b, b, none) + share * read
    assert simulation.steps.neural_pass(0.1, drafter)(b, 5000 * b) == pytest.approx(expected)
    assert not simulation.steps.neural_pass(0.0, drafter)(b, 5000 * b).any()


def test_a_measured_sweep_is_what_was_measured_and_a_line_between(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    rows = [
        f"m,{b},{s},{g},{mode},{1 + 0.1 * b + 0.001 * s + 0.2 * g * b if mode != 'drafter_decode' else 0.5 + b}"
        for b in (1, 2, 8)
        for s in (100, 400)
        for g, mode in ((0, "target_decode"), (3, "target_verify"), (3, "drafter_decode"))
    ]
    path.write_text("model,batch,seq,gamma,mode,mean_ms\n" + "\n".join(rows))
    sweep = read_sweep(str(path))
    b, d, s = np.array([2.0, 8.0, 16.0]), np.array([0.0, 3.0, 1.0]), np.array([100.0, 250.0, 400.0])
    found = sweep.decode(b, b * (1 + d), b * s)
    assert found == pytest.approx((1 + 0.1 * b + 0.001 * s + 0.2 * d * b) * 1e-3)
    assert sweep.copy_pass(b, b * s) == pytest.approx((0.5 + b) * 1e-3)


@pytest.mark.parametrize("passes", [None, {"base": 2e-3, "token": 1e-5}])
def test_a_calibration_is_simulated_with_what_it_fitted(passes: dict[str, float] | None, tmp_path: Path) -> None:
    model = StepModel(base=0.01, token=1e-4, context=1e-7)
    line = model.to_dict() | {"sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"line": line, "passes": passes}))
    steps = {"kind": "calibration", "file": str(path)}
    simulation = Simulation(parse(SMALL | {"steps": steps, "arms": {"off": OFF, "self": {"das": {"drafter": "self"}}}}))
    b = np.array([4.0, 16.0])
    assert simulation.steps.decode(b, 4 * b, 100 * b) == pytest.approx(model.seconds(4 * b, b, True, 100 * b))
    off = rollout_s(simulation.run("off"))
    expected = 2e-3 + 1e-5 * b if passes else 0.4 * model.seconds(b, b, False, 100 * b)
    assert simulation.steps.copy_pass(b, 100 * b) == pytest.approx(expected)
    assert rollout_s(simulation.run("self")) < (0.8 if passes else 1.05) * off
    neural = 2e-3 + 1e-5 * b if passes else 0.05 * model.seconds(b, b, False, 100 * b)
    assert simulation.steps.neural_pass(None, "eagle3")(b, 100 * b) == pytest.approx(neural)
    half = simulation.steps.neural_pass(0.5, "eagle3")(b, 100 * b)
    assert half == pytest.approx(0.5 * simulation.steps.decode(b, b, 100 * b))


def test_controllers_know_before_the_first_step_what_those_of_a_run_know(tmp_path: Path) -> None:
    def first(**changed: Any) -> Any:
        arms = {"a": {"das": {"drafter": "history+self", **changed}}}
        return controlled(small(model="Qwen/Qwen2.5-7B", arms=arms)).controllers[0]

    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"line": LINE, "passes": {"base": 1e-3, "token": 0.0}}))
    assert first().times.model is None  # steps that belong to no GPU
    known = first(calibration=str(path))
    assert known.times.model == StepModel(**LINE)
    assert known.drafts is not None and known.drafts.passes.model == StepModel(1e-3, 0.0)
    arms = {"a": {}, "b": {"das": {"speculate": 32}}}
    of_gpu = small(steps={"kind": "roofline"}, model="Qwen/Qwen2.5-7B", arms=arms)
    begin = cold_start({**sizes("Qwen/Qwen2.5-7B"), "model_type": "qwen2"}, "NVIDIA H100 80GB HBM3")
    assert begin is not None
    assert controlled(of_gpu).controllers[0].times.model == begin.line()
    assert controlled(of_gpu, "b").controllers[0].times.model is None
    path.write_text(json.dumps({"line": LINE | {"sizes": [8, 16]}}))
    padded = sent(small(steps={"kind": "calibration", "file": str(path)}, arms={"a": {}}), "a")
    padded.run()
    assert padded.drafting.controllers[0].times.model.sizes == (8, 16)


@pytest.mark.parametrize(
    ("weights", "precision", "share"), [("int4", "bf16", 0.25), ("int8", "bf16", 0.5), ("fp8", "fp8", 1.0)]
)
def test_a_policy_copy_has_the_bytes_of_its_format(weights: str, precision: str, share: float) -> None:
    das = {"drafter": "self", "self": {"weights": weights}}
    simulation = small(steps={"kind": "roofline"}, precision=precision, arms={"a": {"das": das}})
    passes, b = controlled(simulation).drafters.pass_seconds, np.ones(1)
    assert isinstance(simulation.steps, Instance) and passes is not None
    expected = simulation.steps.roof.drafts(1, 100, share) + simulation.steps.pass_overhead_s
    assert passes(b, 100 * b)[0] == pytest.approx(expected)


# Files


def test_a_config_is_read_and_a_wrong_key_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "sim.yaml"
    path.write_text("hardware: {gpus: 4}\narms: {off: {das: {drafter: none}}}\n")
    assert read(path).hardware.gpus == 4
    path.write_text("hardware: {gpu_count: 4}\n")
    with pytest.raises(ConfigError, match=r"hardware\.gpu_count: unknown key; .*allowed: gpu, gpus"):
        read(path)
    for content, message in (
        ({"arms": {"a": {"das": {"draftr": "none"}}}}, "das.draftr"),
        ({"hardware": {"gpu": "tpu"}}, "hardware.gpu: found 'tpu', allowed: a100"),
        ({"model": "nobody/nothing"}, "model: found 'nobody/nothing'"),
        ({"hardware": {"gpus": 3, "per_engine": 2}}, "must be a multiple"),
        ({"model": "Qwen/Qwen2.5-72B"}, "raise hardware.per_engine"),
        ({"acceptance": {"history": "index"}}, "rollout.dump"),
        ({"steps": {"kind": "line", "line": {"bas": 1}}}, "steps.line"),
        ({"rollout": {"cap": 100}}, "rollout.lengths.mean: found 2000.0, allowed: 1 to under"),
    ):
        with pytest.raises(DasError, match=message):
            Simulation(parse(content)).run("off")
    with pytest.raises(ConfigError, match=r"stride needs .* no model that drafts"):
        small(arms={"a": {"das": {"drafter": "self"}, "stride": 2}}).run("a")


def test_the_command_simulates_varies_and_draws(tmp_path: Path) -> None:
    path = tmp_path / "sim.yaml"
    path.write_text(json.dumps(SMALL))
    done = CliRunner().invoke(
        main, ["simulate", str(path), "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "p.svg")]
    )
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "o.json").read_text())
    assert figures["off"]["rollout_of_first"] == 1.0 > figures["history"]["rollout_of_first"]
    assert (tmp_path / "p.svg").stat().st_size > 1000
    done = CliRunner().invoke(main, ["simulate", str(path), "--vary", "hardware.gpus=1,2", "--jobs", "1"])
    assert done.exit_code == 0 and "hardware.gpus=2" in done.output
    done = CliRunner().invoke(main, ["simulate", str(path), "--vary", "hardware.gpus"])
    assert done.exit_code == 2 and "KEY=V1,V2" in done.output


@pytest.mark.parametrize(("option", "name"), [("--json", "no/o.json"), ("--plot", "no/p.svg"), ("--plot", "p.xyz")])
def test_what_can_t_be_written_is_refused_before_anything_is_simulated(
    option: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Simulation, "run", None)
    path = tmp_path / "sim.yaml"
    path.write_text(json.dumps(SMALL))
    done = CliRunner().invoke(main, ["simulate", str(path), option, str(tmp_path / name)])
    assert done.exit_code == 2 and Path(name).name in done.output


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sim.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"sim\.yaml"):
        read(tmp_path / "sim.yaml")


def test_a_key_of_an_arm_that_is_there_by_default_is_varied() -> None:
    config = parse({key: value for key, value in SMALL.items() if key != "arms"})
    (_, one), (_, other) = variants(config, {"arms.history.das.max_draft_tokens": [1, 2]})
    assert list(one.arms) == list(other.arms) == list(config.arms)
    assert one.arms["off"] == config.arms["off"] and other.arms["history"].das["max_draft_tokens"] == 2


def test_a_sweep_gives_what_single_runs_give() -> None:
    found = sweep(parse(SMALL), {"hardware.gpus": [1, 2], "rollout.samples": [2]}, jobs=2)
    assert [row["values"]["hardware.gpus"] for row in found] == [1, 2]
    assert found[1]["arms"] == summary(small(rollout__samples=2).run_all())
