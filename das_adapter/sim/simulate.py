"""Build a simulation from its config and run its arms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.config import parse as parse_das
from das_adapter.core.hardware import device
from das_adapter.core.latency import StepModel
from das_adapter.core.roofline import Prior, Roofline
from das_adapter.errors import ConfigError, DasError
from das_adapter.sim.config import ArmBlock, SimConfig
from das_adapter.sim.controlled import Controlled
from das_adapter.sim.drafting import Drafting, Fixed, no_drafts
from das_adapter.sim.fleet import BLOCK, UNLIMITED, Fleet
from das_adapter.sim.models import sizes
from das_adapter.sim.pipeline import Pipeline, Run
from das_adapter.sim.requests import Requests
from das_adapter.sim.rollouts import Rollout, read, written_ahead
from das_adapter.sim.routing import Router
from das_adapter.sim.sources import Given, Indexed, Source
from das_adapter.sim.steps import Instance, Line, Seconds, Steps, instance
from das_adapter.sim.workload import Workload, drawn, recorded

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a weight in a linear layer."""
MEMORY = 0.9
"""Share of a device's memory for weights and KV cache: vLLM's
`gpu_memory_utilization`.
"""
COEFFICIENTS = (
    "base",
    "token",
    "bend",
    "knee",
    "request",
    "draft",
    "context",
    "attention",
)
"""Fields of `StepModel` that a line may have."""
Progress = Callable[[str], None]
"""Hears the name of an arm that begins."""


class Simulation:
    """A config with what its arms have in common: step times and recorded rollouts."""

    def __init__(
        self, config: SimConfig, rollouts: Sequence[Rollout] | None = None
    ) -> None:
        """Take recorded rollouts, or read those of `rollout.dump`.

        Raises:
            ConfigError, DasError: a value that does not fit, with its key.
        """
        self.config = config
        self._blocks = {name: _das(name, arm) for name, arm in config.arms.items()}
        if rollouts is None and config.rollout.dump is not None:
            rollouts = read(Path(config.rollout.dump), config.rollout.tokenizer)
        if config.acceptance.length is None and any(
            das.drafter == "ngram" for das in self._blocks.values()
        ):
            raise ConfigError(
                "acceptance.length: found null, needed with drafter: ngram"
            )
        self._ahead = {
            name for name, das in self._blocks.items() if das.history.run_ahead != "off"
        }
        if rollouts is not None and self._ahead:
            rollouts = written_ahead(rollouts, config.acceptance.agreement)
        self.rollouts = rollouts
        if rollouts is None and config.acceptance.history != "given":
            raise ConfigError(
                "acceptance.history: found index, which needs rollout.dump"
            )
        self.steps = step_times(config)
        self.engines, rest = divmod(config.hardware.gpus, config.hardware.per_engine)
        if rest or not self.engines:
            raise ConfigError(
                f"hardware: found gpus {config.hardware.gpus}, per_engine"
                f" {config.hardware.per_engine}: the first must be a multiple of the"
                " second"
            )
        self.kv_blocks = kv_blocks(config, self.steps)

    def run(self, name: str) -> Run:
        """Run an arm."""
        das = self._blocks[name]
        (fleet, workload) = self.fleet(name)
        router = Router(
            das, self.engines, workload.group, fleet.slots, self.config.rollout.seed
        )
        return Pipeline(
            fleet, workload, router, self.config.pipeline, name in self._ahead
        ).run()

    def fleet(self, name: str) -> tuple[Fleet, Workload]:
        """Return fresh engines with the drafter of an arm, and the requests to send."""
        requests = Requests()
        workload = self._workload()
        drafting = self._drafting(name, requests, workload)
        engine = self.config.engine.max_num_seqs, self.kv_blocks
        return Fleet(self.engines, requests, self.steps, drafting, *engine), workload

    def run_all(self, progress: Progress = lambda _: None) -> dict[str, Run]:
        """Run every arm."""
        found = {}
        for name in self._blocks:
            progress(name)
            found[name] = self.run(name)
        return found

    def _workload(self) -> Workload:
        r = self.config.rollout
        rollouts = self.rollouts
        disagreement = 1.0 - self.config.acceptance.agreement
        longest = max((len(x.tokens) for x in rollouts or ()), default=0)
        found = (
            drawn(r) if rollouts is None else recorded(rollouts, max(r.cap, longest))
        )
        for number, step in enumerate(found.steps):
            rng = np.random.default_rng((r.seed, number, 1))
            step["same"] = rng.geometric(disagreement, len(step["problem"])) - 1
        return found

    def _drafting(self, name: str, requests: Requests, workload: Workload) -> Drafting:
        das = self._blocks[name]
        stride = self.config.arms[name].stride
        if das.drafter == "none":
            return no_drafts(requests)
        accept = self.config.acceptance
        seed = self.config.rollout.seed
        copy = None
        passes = None
        source = Source(requests)
        if das.uses_history and accept.history == "index":
            source = Indexed(requests, workload.texts, self.engines, das.history)
        elif das.uses_history:
            source = Given(
                requests, accept.rates, das.num_draft_tokens, seed, accept.agreement
            )
        if das.copies_policy:
            copy = Given(requests, [[accept.copy_rate]], longest=16, seed=seed + 1)
            passes = self._copy_pass(das)
        elif das.neural or das.drafter == "ngram":
            tokens = das.model_tokens if das.neural else das.num_draft_tokens
            given = Given(
                requests,
                [[rate_of(accept.length or 1.0 + 0.5 * tokens, tokens)]],
                longest=tokens,
                seed=seed,
            )
            passes = (
                self.steps.neural_pass(accept.pass_share, das.drafter)
                if das.neural
                else None
            )
            if (
                not das.uses_history
                and das.speculate == "always"
                and das.budget == "unlimited"
            ):
                return Fixed(
                    requests, given, tokens, passes, 1 if das.parallel else tokens
                )
            source, copy = (source, given) if das.neural else (given, None)
        if stride > 1 and (copy is not None or not isinstance(source, Given)):
            raise ConfigError(
                "arms: stride needs acceptance.history given, and no model that drafts"
            )
        limit = self.config.rollout.cap + self.config.rollout.prompt
        limit = max(
            [limit, *(len(r.prompt) + len(r.tokens) for r in self.rollouts or ())]
        )
        return Controlled(
            das,
            requests,
            self.engines,
            limit,
            source,
            copy,
            passes,
            self._prior(das),
            stride,
        )

    def _prior(self, das: DasConfig) -> Prior | None:
        """What controllers know before the first step, as in a run."""
        if das.speculate != "auto" or not isinstance(self.steps, Instance):
            return None
        config = self.config
        gpu = device(config.hardware.gpu)
        bytes_per_weight = WEIGHT_BYTES[config.precision]
        roof = Roofline.from_config(
            sizes(config.model), gpu, config.hardware.per_engine, bytes_per_weight
        )
        return Prior(roof.step_model())

    def _copy_pass(self, das: DasConfig) -> Seconds:
        """Return the time of a pass of the policy copy."""
        if not isinstance(self.steps, Instance):
            return self.steps.copy_pass
        share = WEIGHT_BYTES[das.self.weights] / WEIGHT_BYTES[self.config.precision]
        return replace(self.steps, copy_share=share).copy_pass


def _das(name: str, arm: ArmBlock) -> DasConfig:
    try:
        return parse_das(arm.das) or DasConfig(drafter="none")
    except ConfigError as error:
        raise ConfigError(f"arms.{name}: {error}") from None


def step_times(config: SimConfig) -> Steps:
    """Return the step times that a config asks for.

    Raises:
        ConfigError, DasError: a key is missing.
    """
    block = config.steps
    hardware = config.hardware
    if block.kind == "line":
        line: dict[str, Any] = block.line
        if not {"base", "token"} <= line.keys() <= {*COEFFICIENTS}:
            raise ConfigError(
                f"steps.line: found {line}, allowed: {', '.join(COEFFICIENTS)}; needed:"
                " base and token"
            )
        return Line(StepModel(**line))
    own = {
        f"{name}_s": 1e-3 * getattr(block, f"{name}_ms")
        for name in ("overhead", "draft_overhead", "pass_overhead")
    }
    return instance(
        sizes(config.model),
        device(hardware.gpu),
        hardware.per_engine,
        config.precision,
        **own,
    )


def kv_blocks(config: SimConfig, steps: Steps) -> int:
    """Return the blocks of an engine's KV cache.

    Raises:
        DasError: the weights leave no room for it.
    """
    if config.engine.kv_tokens is not None:
        return config.engine.kv_tokens // BLOCK
    if not isinstance(steps, Instance):
        return UNLIMITED
    roof = steps.roof
    room = MEMORY * device(config.hardware.gpu).memory
    weights = roof.weight_bytes + roof.table_bytes + roof.expert_bytes
    blocks = int((room - weights) / (roof.kv_bytes * BLOCK))
    if blocks < 64:
        raise DasError(
            f"hardware: the weights take {weights / 1e9:.0f} of {room / 1e9:.0f} GB on"
            " each device: raise hardware.per_engine"
        )
    return blocks


def rate_of(length: float, tokens: int) -> float:
    """Return the chance of each draft token, equal for all, with which a request gets
    `length` tokens from a step.

    Raises:
        DasError: no chance gives that.
    """
    if not 1.0 <= length < tokens + 1:
        raise DasError(
            f"acceptance.length: found {length}, allowed with {tokens} draft tokens: 1"
            f" to under {tokens + 1}"
        )
    low = 0.0
    high = 1.0
    for _ in range(60):
        rate = 0.5 * (low + high)
        low, high = (
            (rate, high)
            if sum(rate**i for i in range(tokens + 1)) < length
            else (low, rate)
        )
    return low


def summary(runs: dict[str, Run]) -> dict[str, Any]:
    """Return the figures of each arm, as plain numbers; ratios are relative to the
    first.
    """
    found: dict[str, Any] = {}
    base: dict[str, Any] = {}
    for name, run in runs.items():
        total = {
            key: sum(getattr(step, key) for step in run.steps)
            for key in vars(run.steps[0])
        }
        base = base or total
        found[name] = {
            key: total[key] / len(run.steps)
            for key in ("rollout_s", "step_s", "exposed_s", "idle")
        }
        for key in ("rollout", "step"):
            found[name][f"{key}_of_first"] = total[f"{key}_s"] / max(
                base[f"{key}_s"], 1e-12
            )
        found[name] |= {
            key: total[key]
            for key in ("tokens", "drafted", "accepted", "preempted", "ahead")
        }
        found[name]["tokens_per_forward"] = total["tokens"] / max(total["forwards"], 1)
        found[name]["by_step"] = [
            vars(s) | {"tokens_per_forward": s.tokens_per_forward} for s in run.steps
        ]
    return found


def simulate(
    config: SimConfig,
    rollouts: Sequence[Rollout] | None = None,
    progress: Progress = lambda _: None,
) -> Any:
    """Run every arm of a config; return `summary`."""
    return summary(Simulation(config, rollouts).run_all(progress))
