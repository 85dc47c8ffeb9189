"""Would it pay? A user's own recorded rollouts on given hardware, without drafts and with das-adapter's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from das_adapter.core.hardware import COMPUTE, device
from das_adapter.core.roofline import Roofline
from das_adapter.errors import DasError
from das_adapter.sim.config import parse
from das_adapter.sim.fleet import BLOCK
from das_adapter.sim.models import sizes
from das_adapter.sim.pipeline import Run
from das_adapter.sim.rollouts import Rollout
from das_adapter.sim.simulate import Progress, Simulation

EXACT = 300_000
"""Tokens of a dump up to which the index is searched at every step; larger ones use a trace of what it offers."""
TRAINING = 8.0
"""Operations of training per parameter and token: 6 for the update, 2 for the log-probabilities."""
TRAINING_SHARE = 0.35
"""Share of a data sheet's 16-bit compute that training reaches; an assumption, where no time is given."""
WORTH = 0.03
"""Share of the rollout's time that must be saved before drafts are recommended."""
CANDIDATES: dict[str, dict[str, Any]] = {
    "history": {"drafter": "history"},
    "history, at most 8": {"drafter": "history", "max_draft_tokens": 8},
}
SCATTERED: dict[str, dict[str, Any]] = {
    "history, least_loaded": {"drafter": "history", "routing": "least_loaded"},
}
"""A further candidate where the index is searched; a trace has all siblings on one engine."""
ASSUMED: dict[str, dict[str, Any]] = {
    "self": {"drafter": "self"},
    "history+self": {"drafter": "history+self"},
}
"""No dump tells what the policy accepts of its copy's drafts: shown at an assumed rate, never recommended."""


@dataclass(frozen=True)
class Epoch:
    """Steps whose problems had been visited equally often before; seconds are means of a step."""

    number: int
    steps: int
    off_s: float
    on_s: float
    off_step_s: float
    on_step_s: float
    tokens_per_forward: float

    def to_dict(self) -> dict[str, float]:
        """Return it as plain numbers."""
        return {**vars(self), "rollout_of_off": self.on_s / self.off_s, "step_of_off": self.on_step_s / self.off_step_s}


@dataclass(frozen=True)
class Answer:
    """The result of the simulation."""

    epochs: list[Epoch]
    block: dict[str, Any]
    """The `das:` block that takes least time."""
    arms: dict[str, float]
    """Rollout time over all steps, of off, by candidate."""
    assumed: dict[str, float]
    """The same, of those whose acceptance is assumed."""
    runs: dict[str, Run]
    """Of off and of the best candidate."""
    settings: dict[str, Any]
    """What was given and assumed."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain containers, without the runs."""
        found = {name: value for name, value in vars(self).items() if name not in ("runs", "block")}
        return {**found, "epochs": [epoch.to_dict() for epoch in self.epochs], "das": self.block}


def would_it_pay(
    rollouts: Sequence[Rollout],
    gpu: str,
    model: str,
    gpus: int,
    per_engine: int = 1,
    precision: str = "bf16",
    other_s: float | None = None,
    engine: dict[str, Any] | None = None,
    copies: int = 1,
    history: dict[str, Any] | None = None,
    budget: int | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Simulate a dump on given hardware: several steps, with every problem that the run visits.

    Args:
        gpu, model, gpus, per_engine, precision, engine, copies: as in `SimConfig`.
        other_s: seconds of a step beside its rollout; None: estimated from the model's size.
        history: keys of the `history:` block of all candidates that have one.
        budget: maximum draft tokens of a request in a step; None: each candidate's.

    Raises:
        DasError: a value that does not fit, with its key.
    """
    tokens, steps = sum(len(r.tokens) for r in rollouts), len({(r.step, r.run) for r in rollouts})
    train_s = training_seconds(model, gpu, gpus, copies * tokens / steps) if other_s is None else other_s
    exact = copies == 1 and tokens <= EXACT
    candidates = CANDIDATES | (SCATTERED if exact else {}) | ASSUMED
    if budget is not None:
        candidates = {name: das for name, das in candidates.items() if "max_draft_tokens" not in das}
    chosen = ({"history": history} if history else {}) | ({} if budget is None else {"max_draft_tokens": budget})
    blocks = {name: das | (chosen if "history" in das["drafter"] else {}) for name, das in candidates.items()}
    content = {
        "model": model,
        "precision": precision,
        "hardware": {"gpu": gpu, "gpus": gpus, "per_engine": per_engine},
        "engine": engine or {},
        "rollout": {"cap": max(2, max(len(r.tokens) for r in rollouts)), "copies": copies},
        "acceptance": {"history": "index" if exact else "trace"},
        "pipeline": {"train_s": train_s},
        "arms": {"off": {"das": {"drafter": "none"}}, **{name: {"das": das} for name, das in blocks.items()}},
    }
    simulation = Simulation(parse(content, "replay"), rollouts)
    runs, of_dump = simulation.run_all(progress), {"tokens": tokens, "steps": steps}
    settings = _settings(simulation) | of_dump | {"other_s_estimated": other_s is None}
    total = {name: sum(s.rollout_s for s in run.steps) for name, run in runs.items()}
    arms = {name: total[name] / total["off"] for name in blocks}
    assumed = {name: arms.pop(name) for name in ASSUMED}
    best = min(arms, key=lambda name: arms[name])
    block = blocks[best] if arms[best] <= 1 - WORTH else {"drafter": "none"}
    shown = {"off": runs["off"], best: runs[best]}
    return Answer(_epochs(*shown.values()), block, arms, assumed, shown, settings)


def training_seconds(model: str, gpu: str, gpus: int, tokens: float) -> float:
    """Estimate the seconds of log-probabilities and update for so many tokens."""
    found = device(gpu)
    roof = Roofline.of(sizes(model), found.speed)
    peak = found.speed.flops / COMPUTE
    return TRAINING * roof.dense_flops / 2 * tokens / (gpus * peak * TRAINING_SHARE)


def _epochs(off: Run, on: Run) -> list[Epoch]:
    steps: defaultdict[int, list[int]] = defaultdict(list)
    for number, step in enumerate(off.steps):
        steps[round(step.visit)].append(number)

    def epoch(visit: int, numbers: list[int]) -> Epoch:
        off_s, on_s, off_step_s, on_step_s = (
            float(np.mean([getattr(run.steps[i], name) for i in numbers]))
            for name in ("rollout_s", "step_s")
            for run in (off, on)
        )
        per_forward = sum(on.steps[i].tokens for i in numbers) / sum(on.steps[i].forwards for i in numbers)
        return Epoch(visit + 1, len(numbers), off_s, on_s, off_step_s, on_step_s, per_forward)

    return [epoch(visit, numbers) for visit, numbers in sorted(steps.items())]


def _settings(simulation: Simulation) -> dict[str, Any]:
    config = simulation.config
    return {
        "model": config.model,
        "gpu": config.hardware.gpu,
        "gpus": config.hardware.gpus,
        "engines": simulation.engines,
        "kv_tokens": simulation.kv_blocks * BLOCK,
        "copies": config.rollout.copies,
        "other_s": config.pipeline.train_s,
        "copy_rate": config.acceptance.copy_rate,
        "max_num_seqs": config.engine.max_num_seqs,
        "drafts": "searched at every step" if config.acceptance.history == "index" else "from a trace",
    }


def check(rollouts: Sequence[Rollout]) -> str | None:
    """Return what in a dump makes the answer less than it could be; None if nothing does."""
    steps = {(r.step, r.run) for r in rollouts}
    if len(steps) < 2:
        return "the dump holds one step: no problem comes back, so that only siblings and own text are drafted from"
    seen: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for r in rollouts:
        seen[r.problem].add((r.step, r.run))
    if max(map(len, seen.values())) < 2:
        return "no problem comes back in the dump: a later epoch would be drafted for better"
    return None


def sample(rollouts: Sequence[Rollout], most: int, seed: int = 0) -> tuple[list[Rollout], int]:
    """Return the rollouts of some problems, about `most` tokens, and how often each stands for one of the dump's.

    Raises:
        DasError: `most` is less than 1.
    """
    if most < 1:
        raise DasError(f"tokens: found {most}, allowed: 1 or more")
    tokens: defaultdict[int, int] = defaultdict(int)
    for r in rollouts:
        tokens[r.problem] += len(r.tokens)
    copies = -(-sum(tokens.values()) // most)
    if copies == 1:
        return list(rollouts), 1
    problems = np.random.default_rng(seed).permutation(sorted(tokens))[: max(1, len(tokens) // copies)]
    kept = set(problems.tolist())
    return [r for r in rollouts if r.problem in kept], copies
