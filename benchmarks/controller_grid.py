"""Whether the policy of drafts keeps its promise on hardware that it does not expect:
rollouts on modelled engines, relative to plain decoding and to the best fixed number of
draft tokens.

    python benchmarks/controller_grid.py --out FILE.json

The engines are those of `modelled.py`: they drive the package's own code in its real
order of calls. Chances are learned as in an engine, by the package's own `Acceptance`,
from what was offered and what was written. Each cell is a run of four rollouts of new
texts, with a weight sync after each. Seconds are those of the modelled steps without
their noise, and of the looks for drafts. A cell differs from the usual one in the few
things that its name says:

    steps     h100, l40s, ...: the roofline of Qwen2.5-7B (`:1.5b`: Qwen2.5-1.5B) on a
              device of the table
              knee K + X: 8 ms, and X ms more for each token beyond K
              cpu: a token is dear from the fifth on
    prior     what is known of step times before the first: right; none: the device is
              not recognised; the name of another device
    requests  of a rollout, all at once
    drafts    good: 95 % of their tokens are right; mixed: 60 to 98 %, by stretches;
              poor: 5 to 40 %, and known to be so; hopeless: they promise 80 % and
              5 % are right; gaps N: good, and N % of the text has no history;
              collapse: good for two rollouts, 3 % from then on; halfway: good in the
              first half of each response, 3 % in the second; late: 3 % for two
              rollouts, good from then on; lose: mixed, and any drafts make a step half
              as long again, which no prior knows
    noise     even: none; 20 %: standard deviation of step times; tails: 5 %, and one
              step in a hundred takes ten times as long
    lengths   equal: 600 tokens each, of more than 8 requests 400, of more than 64 200;
              tailed: log-normal around 150; short: 20 to 60
    runner    v1, v2; v2 one: all requests of a step have one number of draft tokens
    graphs    whether there are CUDA graphs, up to 1024 tokens
    syncs     whether weight syncs follow the rollouts
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from modelled import MOST, PROMPT, RATES, EngineV1, EngineV2, Text
from provenance import provenance, save

from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.core.hardware import DEVICES
from das_adapter.core.latency import ASSUMED_ON_GPU, StepModel
from das_adapter.core.native import native
from das_adapter.core.policy import DraftPolicy
from das_adapter.core.roofline import Roofline
from das_adapter.sim.models import sizes

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch, read at its first import
ROLLOUTS = 4
LONGEST = 2000
ROLLOUT_BAR = 1.05
"""Times plain decoding that any rollout may take."""
RUN_BAR = 1.02
"""Times plain decoding that any run of four may take."""
FIXED_BAR = 1.05
"""Times the best fixed number of draft tokens that runs may take on average."""
FIXED = (1, 2, 4, 8, MOST)
"""Fixed numbers of draft tokens that are tried, beside none."""
GRAPHS = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 1025, 32))
"""Tokens for which CUDA graphs are captured."""
DEVICE_SEARCH_S = (1e-4, 1e-7)
"""Seconds of a look on a GPU, and of each request in it."""
HOST_SEARCH_S = (tuning.LOOK_S, tuning.LOOK_REQUEST_S)
KNEE_BASE_S = 0.008
ALWAYS_FOUND = ("collapse", "halfway", "late", "hopeless")
"""Drafts that are found however wrong they are; others are not for two tokens after a
wrong one.
"""
USELESS = 0.03
"""Chance of a token after a collapse."""


@dataclass(frozen=True)
class Cell:
    """A run; see the head of this file."""

    steps: str
    prior: str = "right"
    requests: int = 32
    drafts: str = "good"
    noise: str = "even"
    lengths: str = "equal"
    runner: str = "v2"
    graphs: bool = True
    syncs: bool = True

    @property
    def name(self) -> str:
        """What differs from the usual, in one line."""
        said = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if value is False:
                said.append(f"no {field.name}")
            elif field.name in ("steps", "runner"):
                said.append(str(value))
            else:
                said.append(f"{field.name} {value}")
        return ", ".join(said)


def knee(tokens: int, more_ms: float) -> str:
    """Return the name of steps that bend."""
    return f"knee {tokens} + {more_ms:g}"


def grid() -> list[Cell]:
    """Return all cells."""
    cells = [Cell(device, requests=8) for device in DEVICES]
    cells += [Cell(device, requests=32) for device in ("h100", "h20", "l40s", "a100")]
    cells += [Cell(device, requests=128) for device in ("h100", "h20", "a100")]
    cells += [
        Cell(device, prior, requests)
        for device in ("h20", "l40s", "b200")
        for prior in ("none", "h100")
        for requests in (8, 32)
    ]
    cells += [Cell(device, "none", 128) for device in ("h20", "a100")]
    cells += [
        Cell(knee(at, more_ms), prior, requests)
        for at, more_ms in ((24, 1.0), (48, 1.0), (48, 0.25), (96, 0.25), (96, 1.0))
        for prior in ("none", "h100")
        for requests in (8, 32)
    ]
    cells += [
        Cell(knee(at, more_ms), "right", requests)
        for at, more_ms in ((24, 1.0), (96, 1.0))
        for requests in (8, 32)
    ]
    cells += [
        Cell(knee(at, more_ms), prior, 32, runner=runner)
        for at, more_ms in ((24, 1.0), (96, 1.0))
        for prior in ("none", "h100")
        for runner in ("v1", "v2 one")
    ]
    cells += [
        Cell(knee(at, more_ms), prior, 32, drafts, graphs=False)
        for at, more_ms in ((24, 1.0), (48, 0.25), (96, 1.0))
        for prior in ("none", "h100")
        for drafts in ("good", "mixed")
    ]
    cells += [
        Cell(knee(35, 0.14), "none", requests, drafts)
        for requests in (8, 32, 64)
        for drafts in ("mixed", "poor")
    ]
    cells += [
        Cell(steps, "none", requests, drafts)
        for steps in ("h100", knee(24, 1.0), knee(96, 0.25))
        for requests in (8, 64)
        for drafts in ("collapse", "halfway", "late", "hopeless")
    ]
    cells += [
        Cell("h100", "right", requests, f"gaps {percent}", runner=runner)
        for requests, percent in ((1, 80), (2, 95), (8, 95))
        for runner in ("v1", "v2")
    ]
    cells += [
        Cell(steps, "none", 32, noise=noise)
        for steps in ("h100", knee(48, 0.25), knee(96, 1.0))
        for noise in ("20 %", "tails")
    ]
    cells += [
        Cell(steps, "none", requests, "mixed", lengths=lengths)
        for steps in ("h100:1.5b", knee(96, 0.25))
        for requests, lengths in ((64, "tailed"), (32, "short"))
    ]
    cells += [
        Cell("h100", "none", 512, drafts, lengths="short")
        for drafts in ("good", "hopeless")
    ]
    cells += [
        Cell("cpu", "none", requests, drafts, runner="v1", graphs=False, syncs=syncs)
        for requests in (16, 64)
        for drafts in ("mixed", "hopeless", "lose")
        for syncs in (True, False)
    ]
    cells += [
        Cell("h100", "right", requests, "lose", runner=runner)
        for requests, runner in ((16, "v1"), (16, "v2"), (64, "v2"))
    ]
    return list(dict.fromkeys(cells))


# Texts


class Learner:
    """The chances of draft tokens of some kinds, as an engine learns them."""

    def __init__(self) -> None:
        self._acceptance = native().Acceptance()
        priors = native().drafting_rules()["CHANCES"]
        self._priors = priors
        self._table = priors.astype(np.float32)
        self._stale = True

    def kinds_of(self, promised: np.ndarray) -> np.ndarray:
        """Return the kinds of tokens that promise most nearly these chances."""
        values, places = np.unique(promised, return_inverse=True)
        nearest = [int(np.abs(self._priors - value).argmin()) for value in values]
        return np.array(nearest, dtype=np.uint16)[places]

    def chances(self, kinds: np.ndarray) -> np.ndarray:
        """Return the chance of each token, given those before it, float32 [n]."""
        if self._stale:
            every = np.arange(len(self._priors), dtype=np.uint16)
            self._table = self._acceptance.chances(every)
            self._stale = False
        found: np.ndarray = self._table[kinds]
        return found

    def learn(self, kinds: np.ndarray, right: np.ndarray) -> None:
        """Learn from a draft: which of its tokens were written."""
        self._acceptance.learn(kinds, right)
        self._stale = True

    def sync(self) -> None:
        """Take a weight sync, as an engine does."""
        self._acceptance.forget()
        self._stale = True


class LearnedText(Text):
    """A response whose drafts have learned chances."""

    def __init__(
        self,
        rng: np.random.Generator,
        chance: np.ndarray,
        promised: np.ndarray,
        problem: int,
        learner: Learner,
    ) -> None:
        """
        Args:
            rng: draws which tokens of the history are right.
            chance: of each token to be right, float [n].
            promised: what it seems to be before anything is learned, float [n].
            problem: number of its problem.
            learner: of the engine.
        """
        super().__init__(rng, len(chance), unknown=0.0, problem=problem)
        self.chance = chance.astype(np.float32)
        self.right = rng.random(len(chance)) < chance
        self._kinds = learner.kinds_of(promised)
        self._learner = learner
        self._offered = 0

    def draft(self) -> np.ndarray:
        end = self.at + self._num_found()
        kinds = self._kinds[self.at : end]
        self._offered = len(kinds)
        return self._learner.chances(kinds)

    def write(self, drafted: int, by_model: bool = False) -> int:
        before = self.at
        got = super().write(drafted, by_model)
        end = before + min(got, self._offered)
        self._offered = 0
        if end > before:
            self._learner.learn(self._kinds[before:end], self.right[before:end])
        return got


def chances_of(
    cell: Cell, rng: np.random.Generator, length: int, rollout: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the chance of each token of a response, and what it seems to be."""
    good = np.full(length, 0.95)
    useless = np.full(length, USELESS)
    drafts, _, percent = cell.drafts.partition(" ")
    if drafts == "gaps":
        chance = good.copy()
        chance[_gaps(rng, length, int(percent) / 100)] = 0.0
        return chance, good
    if drafts == "collapse":
        return (good if rollout < 2 else useless), good
    if drafts == "late":
        return (useless if rollout < 2 else good), good
    if drafts == "halfway":
        first_half = np.arange(length) < length / 2
        return np.where(first_half, good, useless), good
    if drafts == "hopeless":
        return np.full(length, 0.05), np.full(length, 0.8)
    if drafts in ("mixed", "lose", "poor"):
        rates = (0.6, 0.8, 0.95) if drafts == "poor" else RATES
        of_stretch = rng.choice(rates, length // 16 + 1)
        chance = 1.0 - np.repeat(of_stretch, 16)[:length]
        return chance, chance
    return good, good


def _gaps(rng: np.random.Generator, length: int, share: float) -> np.ndarray:
    """Return where a text has no history, bool [n]: in stretches of 40 tokens between
    those of which it has one, on average.
    """
    gap = np.zeros(length, dtype=bool)
    at = 0
    is_gap = rng.random() < share
    while at < length:
        mean = 40 * share / (1.0 - share) if is_gap else 40
        end = at + 1 + int(rng.exponential(mean))
        gap[at:end] = is_gap
        at = end
        is_gap = not is_gap
    return gap


def lengths_of(cell: Cell, rng: np.random.Generator) -> list[int]:
    """Return the lengths of a rollout's responses."""
    if cell.lengths == "short":
        return rng.integers(20, 61, cell.requests).tolist()
    if cell.lengths == "tailed":
        drawn = np.exp(rng.normal(np.log(150), 0.8, cell.requests)) + 10
        return np.minimum(drawn, 1500).astype(int).tolist()
    length = 600 if cell.requests <= 8 else 400 if cell.requests <= 64 else 200
    return [length] * cell.requests


def texts_of(cell: Cell, learner: Learner, seed: int = 0) -> list[list[LearnedText]]:
    """Return the texts of all rollouts of a cell."""
    rng = np.random.default_rng((seed, cell.requests))
    rollouts = []
    for rollout in range(ROLLOUTS):
        texts = []
        for place, length in enumerate(lengths_of(cell, rng)):
            chance, promised = chances_of(cell, rng, length, rollout)
            text = LearnedText(rng, chance, promised, place, learner)
            if cell.drafts in ALWAYS_FOUND:
                text.blind = 0
            texts.append(text)
        rollouts.append(texts)
    return rollouts


# Engines


@functools.lru_cache(maxsize=64)
def device_steps(name: str) -> StepModel:
    """Return the step times of a device of the table, by its roofline."""
    device, _, policy = name.partition(":")
    shape = sizes(f"Qwen/Qwen2.5-{(policy or '7b').upper()}")
    model = Roofline.from_config(shape, DEVICES[device]).step_model()
    return model.at_context(PROMPT + 300)


def true_steps(cell: Cell) -> StepModel:
    """Return what steps of a cell take."""
    if cell.steps == "cpu":
        model = StepModel(base=0.034, token=0.0, bend=0.00135, knee=4)
    elif cell.steps.startswith("knee"):
        _, at, _, more_ms = cell.steps.split()
        model = StepModel(
            base=KNEE_BASE_S, token=0.0, bend=float(more_ms) * 1e-3, knee=float(at)
        )
    else:
        model = device_steps(cell.steps)
    if cell.drafts == "lose":
        model = replace(model, draft=0.5 * model.plain_step(cell.requests))
    if not cell.graphs:
        return model
    return replace(model, sizes=GRAPHS, launch=tuning.LAUNCH_S)


def prior_of(cell: Cell) -> StepModel | None:
    """Return what the policy knows of step times before the first."""
    if cell.prior == "none":
        return None
    if cell.prior == "right":
        return replace(true_steps(cell), draft=0.0)
    return device_steps(cell.prior)


def noise_of(cell: Cell, seed: int) -> Callable[[], float] | None:
    """Return the noise of step times."""
    rng = np.random.default_rng(seed)
    if cell.noise == "even":
        return None

    def factor() -> float:
        deviation = 0.2 if cell.noise == "20 %" else 0.05
        paused = cell.noise == "tails" and rng.random() < 0.01
        times = max(0.5, 1.0 + deviation * rng.standard_normal())
        return (10.0 if paused else 1.0) * times

    return factor


def engine_of(cell: Cell, seed: int = 0) -> EngineV1 | EngineV2:
    """Return the engine of a cell."""
    truth = true_steps(cell)
    prior = prior_of(cell)
    noise = noise_of(cell, seed)
    engine: EngineV1 | EngineV2
    if cell.runner == "v1":
        policy = DraftPolicy(DasConfig(), LONGEST, prior, sizes=truth.sizes)
        engine = EngineV1(policy, truth, noise, HOST_SEARCH_S, LONGEST)
    else:
        own = cell.runner == "v2"
        engine = EngineV2(own, truth, prior, noise, DEVICE_SEARCH_S, LONGEST)
    if prior is None and cell.steps != "cpu":
        engine.policy.latency.set_prior(ASSUMED_ON_GPU)
    return engine


def das_s(cell: Cell, seed: int = 0) -> list[float]:
    """Return the seconds of each rollout with the policy of drafts."""
    learner = Learner()
    engine = engine_of(cell, seed)
    taken = []
    for number, texts in enumerate(texts_of(cell, learner, seed)):
        taken.append(engine.rollout(number, texts, sync=cell.syncs))
        if cell.syncs:
            learner.sync()
    return taken


def fixed_s(cell: Cell, num_draft_tokens: int, seed: int = 0) -> list[float]:
    """Return the seconds of each rollout in which every request drafts so many tokens
    in every step, as far as drafts are found.
    """
    truth = true_steps(cell)
    look_s, look_request_s = HOST_SEARCH_S if cell.runner == "v1" else DEVICE_SEARCH_S
    taken = []
    for texts in texts_of(cell, Learner(), seed):
        drafted = np.zeros(LONGEST, dtype=np.int64)
        running = np.zeros(LONGEST, dtype=np.int64)
        for text in texts:
            step = 0
            if not num_draft_tokens:
                running[: text.length] += 1
                continue
            while text.at < text.length:
                found = 0
                if step:
                    room = text.length - text.at - 1
                    found = min(num_draft_tokens, text._num_found(), room)
                drafted[step] += found
                running[step] += 1
                Text.write(text, found)
                step += 1
        steps = int(np.count_nonzero(running))
        drafted, running = drafted[:steps], running[:steps]
        seconds = truth.seconds(running + drafted, running, drafted > 0).sum()
        if num_draft_tokens:
            seconds += steps * look_s + running.sum() * look_request_s
        taken.append(float(seconds))
    return taken


def run(cell: Cell) -> dict[str, Any]:
    """Return the row of a cell: times relative to plain decoding."""
    plain = fixed_s(cell, 0)
    all_s = sum(plain)
    taken = das_s(cell)
    fixed = {count: sum(fixed_s(cell, count)) / all_s for count in FIXED}
    fixed[0] = 1.0
    best = min(fixed, key=lambda count: fixed[count])
    total = sum(taken) / all_s
    rollouts = [took / off for took, off in zip(taken, plain, strict=True)]
    return {
        "cell": cell.name,
        "of_plain": round(total, 4),
        "rollouts": [round(value, 4) for value in rollouts],
        "best_fixed": round(fixed[best], 4),
        "best_fixed_tokens": best,
        "of_best_fixed": round(total / fixed[best], 4),
    }


def summed_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how many cells are above each bar, and how far."""
    largest = [max(row["rollouts"]) for row in rows]
    runs = [row["of_plain"] for row in rows]
    return {
        "cells": len(rows),
        "rollout_bar": ROLLOUT_BAR,
        "cells_above_rollout_bar": sum(value > ROLLOUT_BAR for value in largest),
        "largest_rollout": max(largest),
        "run_bar": RUN_BAR,
        "cells_above_run_bar": sum(value > RUN_BAR for value in runs),
        "largest_run": max(runs),
        "mean_of_plain": round(float(np.mean(runs)), 4),
        "fixed_bar": FIXED_BAR,
        "mean_of_best_fixed": round(
            float(np.mean([row["of_best_fixed"] for row in rows])), 4
        ),
    }


def above_a_bar(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that are above a bar of their own, the largest first."""
    found = []
    for row in rows:
        if row["of_plain"] > RUN_BAR or max(row["rollouts"]) > ROLLOUT_BAR:
            found.append(row)
    return sorted(found, key=lambda row: -max(row["rollouts"]))


@click.command()
@click.option("--cells", default="", help="Only cells whose names match this.")
@click.option("--processes", default=2)
@click.option("--out", type=click.Path(path_type=Path))
def main(cells: str, processes: int, out: Path | None) -> None:
    """Write a row for each cell."""
    chosen = [cell for cell in grid() if re.search(cells, cell.name)]
    rows = []
    with multiprocessing.Pool(processes) as pool:
        for row in pool.imap(run, chosen):
            rows.append(row)
            print(row, flush=True)
    summary = summed_up(rows)
    print(summary)
    if out is not None:
        save(out, {"provenance": provenance(), "summary": summary, "grid": rows})


if __name__ == "__main__":
    main()
