"""What each mechanism of the policy of drafts is worth: it is switched off, alone, and
the time of whole rollouts is compared with that of the policy as it is.

    PYTHONPATH=.venv/newest python benchmarks/ablation.py --traces DIR --out FILE.json

The engine is modelled (`modelled.py`, for recorded rollouts `das_adapter.sim`), and
drives the package's own policy in its real order of calls. Seconds are those of the
modelled steps without their scatter, and of the looks for drafts.

`grid`: four rollouts of the same problems, a weight sync after each, responses of 150
tokens in the median (log-normal, 0.8), a problem's own within a quarter. A quarter of
the requests have no history. A cell differs from the usual one in the few things that
its name says:

    steps        h100, h200: roofline of Qwen2.5-7B and CUDA graphs, V2 runner
                 cpu: a token is dear from the fifth on, V1 runner, no prior
                 cheap: a thousand tokens double a step, V1 runner
                 h100_v1: as h100, on the V1 runner
    requests     in a rollout; `slots`: at once; `syncs`: whether weight syncs follow
    scatter      even: none; 5 %; tails: 5 %, and one step in a hundred takes ten times
                 as long
    prior        right; steps: they take twice what the prior says; tokens: a token of
                 compute takes three times what it says
    drafts       pay: mistakes at a rate of 2 to 40 %; bad: 60 to 95 %; hopeless: these,
                 and each token is told to be right with 0.9; sure: the chance
                 of a mistake is told as 0.4 of what it is; unsure: a token's chance is
                 told as 0.4 of what it is; lose: sure, and drafts make a step take half
                 as long again, which no prior knows

`models`: a model drafts, seven tokens at most, and says how sure it is (kinds are the
odds of its tokens with an error).

`traces`: recorded rollouts are written again, each problem visited several times, with
drafts from the real index. `retention`: the same, where the history keeps a part of
its bytes. `routing`, `run_ahead`: four engines in the simulator.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from modelled import (
    PROMPT,
    RATES,
    DraftedText,
    Engine,
    EngineV1,
    EngineV2,
    EngineWithModel,
    Text,
)
from provenance import provenance, save
from visits import epochs

from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.core.confidence import EVEN, KINDS
from das_adapter.core.hardware import DEVICES
from das_adapter.core.latency import StepModel
from das_adapter.core.policy import DraftPolicy
from das_adapter.core.roofline import Roofline
from das_adapter.sim.config import parse as parse_simulation
from das_adapter.sim.controlled import Controlled
from das_adapter.sim.models import sizes
from das_adapter.sim.rollouts import RecordedResponse, read
from das_adapter.sim.simulate import Simulation
from das_adapter.sim.sources import Indexed

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch, read at its first import
_SIMULATE: Any = sys.modules[Simulation.__module__]
ROLLOUTS = 4
SEEDS = 3
LONGEST = 800
MEDIAN_TOKENS = 150
SPREAD = 0.8
WITHIN = 0.25
GRAPHS = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Tokens for which vLLM captures CUDA graphs for 256 requests."""
DEVICE_SEARCH_S = (5e-5, 1e-7)
"""Seconds of a look on a GPU: benchmarks/results/gpu_kernels_7b.json, proposals."""
HOST_SEARCH_S = (tuning.LOOK_S, tuning.LOOK_REQUEST_S)

MARGIN = 0.05
"""Gain at which drafting once began."""
AS_IT_IS = "as it is"
Switch = Callable[[DraftPolicy], None]


def _replace(owner: Any, name: str, value: Any) -> None:
    """Replace a part of the policy that must be there."""
    if not hasattr(owner, name):
        raise AttributeError(f"{type(owner).__name__} has no {name}")
    setattr(owner, name, value)


def _no_fit(policy: DraftPolicy) -> None:
    times = policy.latency
    _replace(times, "known", True)
    _replace(times, "fit", lambda: times.model)


def _scale_only(policy: DraftPolicy) -> None:
    # with too few kinds of step the prior's times are multiplied
    _replace(policy.latency, "_min_step_kinds", 2**30)


def _one_length_distribution(policy: DraftPolicy) -> None:
    lengths = policy._lengths
    _replace(lengths, "cdf", lambda problem: lengths._population)


def _equal_weights(policy: DraftPolicy) -> None:
    def equal(cdf: np.ndarray, written: np.ndarray) -> np.ndarray:
        return np.full(len(written), 1.0 / len(written))

    _replace(policy, "_chances_to_end_last", equal)


def _no_account(policy: DraftPolicy) -> None:
    _replace(policy._account, "_speculate", "always")
    _replace(tuning, "LEAST_GAIN", 0.0)


def _with_margin(policy: DraftPolicy) -> None:
    account = policy._account
    stock = account.drafts_pay
    drafted = False

    def drafts_pay(running: int, gain: float | None, optimal: bool) -> bool:
        nonlocal drafted
        drafted = gain is not None and gain >= (0.0 if drafted else MARGIN)
        return drafted and stock(running, gain, optimal)

    _replace(account, "drafts_pay", drafts_pay)


def _no_guard(policy: DraftPolicy) -> None:
    _replace(tuning, "GUARD_STEPS", 2**30)


def _no_rest(policy: DraftPolicy) -> None:
    for rest in (policy._account._rest, policy._account.model_rest):
        _replace(rest, "judge_rollout", lambda lost, saved_s: False)


def _no_probes(policy: DraftPolicy) -> None:
    _replace(policy._account, "probe", lambda probe, unseen=False: False)


def _look_always(policy: DraftPolicy) -> None:
    _replace(policy._account.look, "due_in", lambda step, batch=0: 0)


SWITCHES: dict[str, Switch] = {
    AS_IT_IS: lambda policy: None,
    "no fit": _no_fit,
    "scale only": _scale_only,
    "one length distribution": _one_length_distribution,
    "equal weights": _equal_weights,
    "no account": _no_account,
    "a margin": _with_margin,
    "no guard": _no_guard,
    "no rest": _no_rest,
    "no probes": _no_probes,
    "look always": _look_always,
}
ONE_LENGTH = "one length"
ALIKE = "tokens alike"
ARMS = {
    AS_IT_IS: "nothing is switched off",
    "no fit": "step times are the prior's, and never fitted",
    "scale only": "the prior's times are multiplied to meet those that were seen",
    "one length distribution": "all requests have the same length distribution",
    "equal weights": "all requests are equally likely to end last",
    "no account": "whatever gains is drafted: no least gain, guard or rest",
    "a margin": "drafting begins at a gain of 5 %, and goes on at 2 % (this went)",
    "no guard": "nothing stops a losing rollout",
    "no rest": "no rollout is at rest after a loss",
    "no probes": "no step is taken the other way",
    "look always": "drafts are looked for in every step",
    ONE_LENGTH: "all requests of a step have the same number of draft tokens",
    ALIKE: "all tokens of a model are alike",
}


@contextlib.contextmanager
def numbers_kept() -> Iterator[None]:
    """Put the numbers of the table back that a switch changes."""
    names = ("LEAST_GAIN", "GUARD_STEPS")
    before = {name: getattr(tuning, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(tuning, name, value)


# The grid


@dataclass(frozen=True)
class Cell:
    """A workload of the grid; see the head of this file."""

    steps: str = "h100"
    requests: int = 16
    slots: int | None = None
    scatter: str = "even"
    prior: str = "right"
    drafts: str = "pay"
    syncs: bool = True


def _grid() -> list[Cell]:
    batches = ((4, None), (16, None), (64, None), (256, None), (256, 64))
    cells = [
        Cell(steps, requests, slots)
        for steps in ("h100", "cpu")
        for requests, slots in batches
    ]
    cells += [
        Cell(steps, requests)
        for steps in ("h200", "cheap", "h100_v1")
        for requests in (16, 64)
    ]
    cells += [
        Cell(steps, requests, scatter=scatter)
        for steps, requests in (("h100", 64), ("cpu", 16))
        for scatter in ("5 %", "tails")
    ]
    cells += [
        Cell("h100", requests, prior=prior)
        for requests in (16, 64)
        for prior in ("steps", "tokens")
    ]
    cells += [
        Cell(steps, requests, drafts=drafts)
        for steps in ("h100", "cpu")
        for requests in (16, 64)
        for drafts in ("bad", "sure", "unsure", "lose", "hopeless")
    ]
    cells += [
        Cell("cpu", 64, drafts=drafts, syncs=False) for drafts in ("lose", "hopeless")
    ]
    return cells


def roofline(device: str, layers: int | None = None) -> StepModel:
    """Return the step times of Qwen2.5-7B, or of so many of its layers."""
    shape = sizes("Qwen/Qwen2.5-7B")
    if layers is not None:
        shape = {**shape, "num_hidden_layers": layers}
    model = Roofline.from_config(shape, DEVICES[device]).step_model()
    return model.at_context(PROMPT + MEDIAN_TOKENS)


def true_steps(name: str) -> StepModel:
    """Return the step times of a name of the grid."""
    if name == "cpu":
        return StepModel(base=0.034, token=0.0, bend=0.00135, knee=4)
    if name == "cheap":
        return StepModel(base=0.02, token=2e-5)
    graphs = replace(
        roofline(name.partition("_")[0]), sizes=GRAPHS, launch=tuning.LAUNCH_S
    )
    return graphs


def prior_of(cell: Cell, truth: StepModel) -> StepModel | None:
    """Return what the policy knows before the first step."""
    if cell.steps == "cpu":
        return None
    if cell.prior == "steps":
        return truth.scaled(0.5)
    if cell.prior == "tokens":
        third = 1.0 / 3.0
        return replace(
            truth,
            token=truth.token * third,
            bend=truth.bend * third,
            knee=3.0 * truth.knee,
        )
    return truth


def scatter_of(name: str, rng: np.random.Generator) -> Callable[[], float] | None:
    """Return a scatter of step times."""
    if name == "even":
        return None

    def factor() -> float:
        paused = name == "tails" and rng.random() < 0.01
        return (10.0 if paused else 1.0) * max(0.5, 1.0 + 0.05 * rng.standard_normal())

    return factor


def drawn(rng: np.random.Generator, typical: np.ndarray) -> list[int]:
    """Return lengths of a rollout, around those that are typical of its problems."""
    lengths = typical * np.exp(WITHIN * rng.standard_normal(len(typical)))
    return np.clip(lengths, 8, LONGEST).astype(int).tolist()


def typical_lengths(rng: np.random.Generator, requests: int) -> np.ndarray:
    """Return lengths that are typical of problems, four requests each."""
    problems = -(-requests // 4) if requests > 4 else requests
    of_problem = np.exp(rng.normal(np.log(MEDIAN_TOKENS), SPREAD, problems)) + 10
    return np.resize(np.repeat(of_problem, requests // problems), requests)


def texts_of(cell: Cell, seed: int) -> list[list[Text]]:
    """Return the texts of all rollouts of a cell."""
    rng = np.random.default_rng((seed, cell.requests))
    typical = typical_lengths(rng, cell.requests)
    group = 4 if cell.requests > 4 else 1
    rates = (0.6, 0.8, 0.95) if cell.drafts in ("bad", "hopeless") else RATES
    rollouts = []
    for _ in range(ROLLOUTS):
        texts = []
        for place, length in enumerate(drawn(rng, typical)):
            text = Text(rng, length, rates, problem=place // group)
            if cell.drafts in ("sure", "lose"):
                text.told = 1.0 - 0.4 * (1.0 - text.chance)
            elif cell.drafts == "hopeless":
                text.told = np.full_like(text.chance, 0.9)
            elif cell.drafts == "unsure":
                text.told = np.float32(0.4) * text.chance
            texts.append(text)
        rollouts.append(texts)
    return rollouts


def engine_of(cell: Cell, arm: str, seed: int) -> Engine:
    """Return the engine of a cell with one mechanism switched off."""
    known = true_steps(cell.steps)
    truth = known
    if cell.drafts == "lose":
        truth = replace(known, draft=0.5 * known.plain_step(cell.requests))
    rng = np.random.default_rng(seed)
    scatter = scatter_of(cell.scatter, rng)
    prior = prior_of(cell, known)
    engine: Any
    if cell.steps in ("h100", "h200"):
        engine = EngineV2(
            arm != ONE_LENGTH, truth, prior, scatter, DEVICE_SEARCH_S, LONGEST
        )
    else:
        policy = DraftPolicy(DasConfig(), LONGEST, prior, sizes=truth.sizes)
        engine = EngineV1(policy, truth, scatter, HOST_SEARCH_S, LONGEST)
    SWITCHES.get(arm, SWITCHES[AS_IT_IS])(engine.policy)
    return engine


def off_s(rollouts: Sequence[Sequence[Text]], cell: Cell) -> float:
    """Return the seconds of rollouts without drafts."""
    engine = Engine(true_steps(cell.steps))
    lengths = [[text.length for text in texts] for texts in rollouts]
    return sum(_plain_s(engine.truth, one, cell.slots) for one in lengths)


def _plain_s(model: StepModel, lengths: list[int], slots: int | None) -> float:
    """Return the seconds of a rollout without drafts, requests in their order."""
    waiting = lengths[::-1]
    running: list[int] = []
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < (slots or len(lengths)):
            running.append(waiting.pop())
        steps = min(running)
        seconds += steps * model.plain_step(len(running))
        running = [left - steps for left in running if left > steps]
    return seconds


def grid_run(task: tuple[Cell, str, int]) -> tuple[float, float]:
    """Return the time of all rollouts, and of all but the first, relative to off."""
    cell, arm, seed = task
    rollouts = texts_of(cell, seed)
    off = [off_s([texts], cell) for texts in rollouts]
    with numbers_kept():
        engine = engine_of(cell, arm, seed)
        took = [
            engine.rollout(number, texts, cell.slots, sync=cell.syncs)
            for number, texts in enumerate(rollouts)
        ]
    return sum(took) / sum(off), sum(took[1:]) / sum(off[1:])


# A model that drafts


def records_of(mean_odds: float, rng: np.random.Generator) -> list[Any]:
    """Return what a model makes of texts: tokens whose log odds, base 2, are drawn
    around a mean, told with an error.
    """
    records = []
    for _ in range(64):
        odds = rng.normal(mean_odds, 2.5, 128)
        right = rng.random(128) < 1.0 / (1.0 + 2.0**-odds)
        told = odds / tuning.CONFIDENCE_SLOPE + rng.normal(0.0, 1.0, 128)
        kinds = np.clip(np.floor(told) + EVEN, 0, KINDS - 1)
        records.append((kinds.astype(np.uint8), right))
    return records


MODELS = {"strong": 4.0, "weak": 0.5}
"""Mean log odds of a token."""
MODEL_ARMS = (
    AS_IT_IS,
    ALIKE,
    ONE_LENGTH,
    "no fit",
    "equal weights",
    "no account",
    "a margin",
    "no guard",
    "no rest",
    "no probes",
)


def model_run(task: tuple[tuple[str, int], str, int]) -> tuple[float, float]:
    """As `grid_run`, with a model that drafts on an H100."""
    (drafter, requests), arm, seed = task
    rng = np.random.default_rng((seed, requests))
    records = records_of(MODELS[drafter], rng)
    typical = typical_lengths(rng, requests)
    group = 4 if requests > 4 else 1
    rollouts: list[list[Text]] = []
    for _ in range(ROLLOUTS):
        lengths = drawn(rng, typical)
        rollouts.append(
            [
                DraftedText(rng, records, length=length, problem=place // group)
                for place, length in enumerate(lengths)
            ]
        )
    cell = Cell("h100", requests)
    truth = true_steps("h100")
    off = [off_s([texts], cell) for texts in rollouts]
    with numbers_kept():
        engine = EngineWithModel(
            arm != ONE_LENGTH,
            arm not in (ALIKE, ONE_LENGTH),
            truth,
            roofline("h100", layers=1),
            prior=truth,
            longest=LONGEST,
        )
        SWITCHES.get(arm, SWITCHES[AS_IT_IS])(engine.policy)
        took = [engine.rollout(number, texts) for number, texts in enumerate(rollouts)]
    return sum(took) / sum(off), sum(took[1:]) / sum(off[1:])


# Recorded rollouts, in the simulator

TRACES = {
    # problems, problems of a step, visits
    "code_humaneval_codegen16b_k100": (32, 16, 4),
    "misguided_attention_k3": (16, 16, 3),
    "rl_reasoning_gym_qwen25_3b_k3": (32, 16, 3),
    "tot_gpt4_game24_cot_k100": (32, 16, 4),
}
CUT = 2000
"""Tokens after which a recorded response is cut."""
TRACE_STEPS = {
    "h100": {"model": "Qwen/Qwen2.5-7B", "hardware": {"gpu": "h100", "gpus": 1}},
    "cpu": {
        "hardware": {"gpus": 1},
        "steps": {
            "kind": "line",
            "line": {"base": 0.034, "token": 0.0, "bend": 0.00135, "knee": 4},
        },
    },
}
_FOLDER = Path()


def _use_folder(folder: Path) -> None:
    global _FOLDER
    _FOLDER = folder


@functools.lru_cache(maxsize=4)
def visits_of(name: str, seed: int) -> list[RecordedResponse]:
    """Return recorded responses, problems chosen by a seed, visit after visit."""
    problems, a_step, visits = TRACES[name]
    rollouts = read(_FOLDER / f"{name}.npz")
    laid_out = epochs(rollouts, problems, visits, a_step, seed)
    return [
        replace(response, tokens=response.tokens[:CUT])
        for response in itertools.chain(*laid_out)
    ]


@contextlib.contextmanager
def switched(arm: str) -> Iterator[None]:
    """Switch a mechanism off in the simulator."""
    stock = Controlled._policy

    def policy(self: Controlled, *args: Any) -> DraftPolicy:
        made = stock(self, *args)
        SWITCHES[arm](made)
        return made

    Controlled._policy = policy  # type: ignore[method-assign]
    try:
        with numbers_kept():
            yield
    finally:
        Controlled._policy = stock  # type: ignore[method-assign]


def rollout_s(
    config: dict[str, Any], das: dict[str, Any], dump: Any, stride: int = 1
) -> float:
    """Simulate one arm; return the seconds of its rollouts."""
    arms = {"one": {"das": das, "stride": stride}}
    run = Simulation(parse_simulation({**config, "arms": arms}), dump).run("one")
    return sum(step.rollout_s for step in run.steps)


@functools.lru_cache(maxsize=16)
def recorded_off_s(name: str, steps: str, seed: int) -> float:
    """Return the seconds of recorded rollouts without drafts."""
    config = {**TRACE_STEPS[steps], "acceptance": {"history": "index"}}
    return rollout_s(config, {"drafter": "none"}, visits_of(name, seed))


def trace_run(task: tuple[tuple[str, str], str, int]) -> tuple[float, float]:
    """As `grid_run`, for recorded rollouts."""
    (name, steps), arm, seed = task
    config = {**TRACE_STEPS[steps], "acceptance": {"history": "index"}}
    dump = visits_of(name, seed)
    off = recorded_off_s(name, steps, seed)
    with switched(arm):
        took = rollout_s(config, {}, dump)
    return took / off, took / off


# Which text goes


class _Thinned(Indexed):
    """Keeps a byte budget as the package does, also a small one."""

    budget = 2**62

    def remember(self, written: Any) -> None:
        config = self._rules.config
        self._rules.config = config.model_copy(update={"max_bytes": self.budget})
        super().remember(written)


class _Dropping(Indexed):
    """Keeps a byte budget by dropping whole visits."""

    budget = 2**62
    oldest = True

    def remember(self, written: Any) -> None:
        texts = getattr(self, "_texts_kept", {})
        self._texts_kept = texts
        for problem, tokens, version in written:
            texts.setdefault((version, problem), []).append(tokens)
        everything = [
            (problem, tokens, version)
            for (version, problem), kept in texts.items()
            for tokens in kept
        ]
        super().remember(everything[len(everything) - len(written) :])
        rng = np.random.default_rng(len(texts))
        while self._store.nbytes > self.budget and texts:
            excess = (self._store.nbytes - self.budget) / 8 + 1
            while excess > 0 and texts:
                visits = sorted(texts)
                place = 0 if self.oldest else int(rng.integers(len(visits)))
                gone = texts.pop(visits[place])
                excess -= sum(len(tokens) // 4 for tokens in gone)
            while self._store.nbytes:
                self._store.shrink(0)
            super().remember(
                [
                    (problem, tokens, version)
                    for (version, problem), kept in texts.items()
                    for tokens in kept
                ]
            )


RETENTIONS = ("thinned out", "oldest visits go", "random visits go")


def retention_run(task: tuple[tuple[str, int], str, int]) -> tuple[float, float]:
    """As `grid_run`, where the history keeps some percent of its text's bytes."""
    (name, percent), arm, seed = task
    dump = visits_of(name, seed)
    config = {**TRACE_STEPS["h100"], "acceptance": {"history": "index"}}
    off = recorded_off_s(name, "h100", seed)
    steps = sorted({response.step for response in dump})
    half = steps[: len(steps) // 2]
    tokens = sum(len(r.tokens) for r in dump if r.step in half)
    budget = 8 * tokens * percent // 100
    base = _Thinned if arm == RETENTIONS[0] else _Dropping
    kind = type("Kept", (base,), {"budget": budget, "oldest": arm == RETENTIONS[1]})
    _SIMULATE.Indexed = kind
    try:
        took = rollout_s(config, {}, dump)
    finally:
        _SIMULATE.Indexed = Indexed
    return took / off, took / off


# Several engines

ROUTINGS = ("longest first", "least loaded", "round robin")


def fleet_config(spread: float, waves: int, seed: int) -> dict[str, Any]:
    """Return four H100 with 16 problems of 8 samples, visited four times."""
    return {
        "hardware": {"gpu": "h100", "gpus": 4},
        "engine": {"max_num_seqs": 32 // waves},
        "rollout": {
            "dataset": 16,
            "problems": 16,
            "samples": 8,
            "cap": 4096,
            "steps": 4,
            "seed": seed,
            "lengths": {"mean": 800, "sigma": max(spread, 1e-6)},
        },
    }


def routing_run(task: tuple[tuple[float, int], str, int]) -> tuple[float, float]:
    """As `grid_run`, of four engines."""
    (spread, waves), arm, seed = task
    config = fleet_config(spread, waves, seed)
    off = rollout_s(config, {"drafter": "none"}, None)
    routing = "longest_first" if arm == ROUTINGS[0] else "least_loaded"
    stock = _SIMULATE.Router

    class RoundRobin(stock):  # type: ignore[misc, valid-type]
        """Sends the n-th request to the n-th engine."""

        def send(self, requests: Any, rows: Any) -> Any:
            engines, priorities = super().send(requests, rows)
            np.add.at(self._loads, engines, -1)
            engines = np.arange(len(rows)) % len(self._loads)
            np.add.at(self._loads, engines, 1)
            return engines, priorities

    if arm == ROUTINGS[2]:
        _SIMULATE.Router = RoundRobin
    try:
        took = rollout_s(config, {"routing": routing}, None, stride=16)
    finally:
        _SIMULATE.Router = stock
    return took / off, took / off


AHEAD = ("off", "auto")


def ahead_run(task: tuple[float, str, int]) -> tuple[float, float]:
    """As `grid_run`, with run-ahead or without."""
    spread, arm, seed = task
    config = fleet_config(spread, 1, seed)
    config["rollout"] |= {"dataset": 48, "steps": 6}
    off = rollout_s(config, {"drafter": "none"}, None)
    took = rollout_s(config, {"history": {"run_ahead": arm}}, None, stride=16)
    return took / off, took / off


# All of it

PARTS: dict[str, tuple[Callable[[Any], tuple[float, float]], list[Any], Any]] = {
    "grid": (grid_run, _grid(), (*SWITCHES, ONE_LENGTH)),
    "models": (
        model_run,
        list(itertools.product(MODELS, (4, 64, 256))),
        MODEL_ARMS,
    ),
    "traces": (
        trace_run,
        [(name, "h100") for name in TRACES]
        + [("rl_reasoning_gym_qwen25_3b_k3", "cpu")],
        tuple(SWITCHES),
    ),
    "retention": (
        retention_run,
        list(itertools.product(TRACES, (50, 10))),
        RETENTIONS,
    ),
    "routing": (
        routing_run,
        list(itertools.product((0.4, 0.8, 1.2), (1, 4))),
        ROUTINGS,
    ),
    "run_ahead": (ahead_run, [0.0, 0.8, 1.2], AHEAD),
}
"""What is measured: a function, cells, and arms, of which the first is the policy as
it is.
"""


def applies(part: str, cell: Any, arm: str) -> bool:
    """Return whether an arm means anything in a cell."""
    if part != "grid" or arm != ONE_LENGTH:
        return True
    return cell.steps in ("h100", "h200")


def named(cell: Any) -> dict[str, Any]:
    """Return a cell as columns of a row."""
    if isinstance(cell, Cell):
        return vars(cell)
    parts = cell if isinstance(cell, tuple) else (cell,)
    return {"cell": " ".join(map(str, parts))}


def measure(pool: Any, part: str) -> list[dict[str, Any]]:
    """Return a row for each cell: times of off, and what each mechanism is worth: how
    much longer rollouts take without it.
    """
    function, cells, arms = PARTS[part]
    tasks = [
        (cell, arm, seed)
        for cell in cells
        for arm in arms
        if applies(part, cell, arm)
        for seed in range(SEEDS)
    ]
    found = dict[Any, tuple[float, float]]()
    results = zip(tasks, pool.imap(function, tasks), strict=True)
    rows = []
    for cell in cells:
        there = [arm for arm in arms if applies(part, cell, arm)]
        for _ in range(SEEDS * len(there)):
            task, result = next(results)
            found[task] = result
        times = {
            arm: np.array([found[cell, arm, seed][0] for seed in range(SEEDS)])
            for arm in there
        }
        base = times[arms[0]]
        worth = {arm: times[arm] / base - 1.0 for arm in there[1:]}
        rows.append(
            {
                **named(cell),
                "of_off": {a: round(float(t.mean()), 4) for a, t in times.items()},
                "worth": {a: round(float(w.mean()), 4) for a, w in worth.items()},
                "least_worth": {a: round(float(w.min()), 4) for a, w in worth.items()},
                "most_worth": {a: round(float(w.max()), 4) for a, w in worth.items()},
            }
        )
        print(part, rows[-1], flush=True)
    return rows


def summed_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the least, median and greatest worth of each mechanism over cells."""
    arms = dict.fromkeys(arm for row in rows for arm in row["worth"])
    found = {}
    for arm in arms:
        worth = [row["worth"][arm] for row in rows if arm in row["worth"]]
        found[arm] = {
            "least": min(worth),
            "median": round(float(np.median(worth)), 4),
            "greatest": max(worth),
            "cells": len(worth),
            "cells_above_1_percent": sum(value >= 0.01 for value in worth),
            "cells_below_minus_1_percent": sum(value <= -0.01 for value in worth),
        }
    return found


@click.command()
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Directory of .npz files.",
)
@click.option("--part", multiple=True, default=tuple(PARTS))
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(traces: Path, part: tuple[str, ...], out: Path) -> None:
    """Write a row for each cell of each part."""
    result: dict[str, Any] = {"provenance": provenance(), "arms": ARMS, "worth": {}}
    with multiprocessing.Pool(2, _use_folder, (traces,)) as pool:
        for name in part:
            result[name] = measure(pool, name)
            result["worth"][name] = summed_up(result[name])
            save(out, result)


if __name__ == "__main__":
    main()
