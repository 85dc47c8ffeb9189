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
from das_adapter.sim.config import ArmBlock, HardwareBlock, SimConfig
from das_adapter.sim.controlled import Controlled
from das_adapter.sim.drafting import Drafting, Fixed, no_drafts
from das_adapter.sim.fleet import BLOCK, UNLIMITED, Fleet
from das_adapter.sim.models import sizes
from das_adapter.sim.pipeline import Pipeline, Run, StepResult
from das_adapter.sim.requests import Requests
from das_adapter.sim.rollouts import RecordedResponse, read, written_ahead
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
COPY_LONGEST = 16
"""Maximum number of tokens of a draft of the policy copy."""
MIN_KV_BLOCKS = 64
"""Fewest blocks of a KV cache with which an engine is simulated."""
Progress = Callable[[str], None]
"""Called with the name of an arm that begins."""


class Simulation:
    """A config with what its arms have in common: step times and recorded responses."""

    def __init__(
        self, config: SimConfig, responses: Sequence[RecordedResponse] | None = None
    ) -> None:
        """Use recorded responses, or read those of `rollout.dump`.

        Raises:
            ConfigError, DasError: a value that does not fit, with its key.
        """
        self.config = config
        self._blocks = {name: _das(name, arm) for name, arm in config.arms.items()}
        drafters = {das.drafter for das in self._blocks.values()}
        if responses is None and config.rollout.dump is not None:
            responses = read(Path(config.rollout.dump), config.rollout.tokenizer)
        if config.acceptance.length is None and "ngram" in drafters:
            raise ConfigError(
                "acceptance.length: found null, needed with drafter: ngram"
            )
        self._ahead_arms = {
            name for name, das in self._blocks.items() if das.history.run_ahead != "off"
        }
        if responses is not None and self._ahead_arms:
            responses = written_ahead(responses, config.acceptance.agreement)
        self.responses = responses
        if responses is None and config.acceptance.history != "given":
            raise ConfigError(
                "acceptance.history: found index, which needs rollout.dump"
            )
        self.steps = step_times(config)
        self.engines = _num_engines(config.hardware)
        self.kv_blocks = kv_blocks(config, self.steps)

    def run(self, name: str) -> Run:
        """Run an arm."""
        fleet, workload = self.fleet(name)
        router = Router(
            self._blocks[name],
            engines=self.engines,
            group=workload.group,
            slots=fleet.slots,
            seed=self.config.rollout.seed,
        )
        ahead = name in self._ahead_arms
        pipeline = Pipeline(fleet, workload, router, self.config.pipeline, ahead)
        return pipeline.run()

    def fleet(self, name: str) -> tuple[Fleet, Workload]:
        """Return fresh engines with the drafter of an arm, and the requests to send."""
        requests = Requests()
        workload = self._workload()
        drafting = self._drafting(name, requests, workload)
        fleet = Fleet(
            self.engines,
            requests,
            self.steps,
            drafting,
            slots=self.config.engine.max_num_seqs,
            kv=self.kv_blocks,
        )
        return fleet, workload

    def run_all(self, progress: Progress = lambda _: None) -> dict[str, Run]:
        """Run every arm."""
        found = {}
        for name in self._blocks:
            progress(name)
            found[name] = self.run(name)
        return found

    def _workload(self) -> Workload:
        rollout = self.config.rollout
        responses = self.responses
        if responses is None:
            workload = drawn(rollout)
        else:
            lengths = [len(response.tokens) for response in responses]
            workload = recorded(responses, max([rollout.cap, *lengths]))
        disagreement = 1.0 - self.config.acceptance.agreement
        for number, step in enumerate(workload.steps):
            rng = np.random.default_rng((rollout.seed, number, 1))
            first_different = rng.geometric(disagreement, len(step["problem"]))
            step["num_same"] = first_different - 1
        return workload

    def _drafting(self, name: str, requests: Requests, workload: Workload) -> Drafting:
        """Return the drafter of an arm.

        Raises:
            ConfigError: its stride is for other drafters.
        """
        das = self._blocks[name]
        if das.drafter == "none":
            return no_drafts(requests)
        history = self._history(das, requests, workload)
        model: Given | None = None
        pass_seconds: Seconds | None = None
        if das.copies_policy:
            model = self._copy(requests)
            pass_seconds = self._copy_pass(das)
        elif das.neural:
            share = self.config.acceptance.pass_share
            model = self._model(das, requests)
            pass_seconds = self.steps.neural_pass(share, das.drafter)
            if _in_every_step(das):
                if das.parallel:
                    num_passes = 1
                else:
                    num_passes = das.model_tokens
                return Fixed(
                    requests, model, das.model_tokens, pass_seconds, num_passes
                )
        elif das.drafter == "ngram":
            ngrams = self._model(das, requests)
            if _in_every_step(das):
                return Fixed(requests, ngrams, das.num_draft_tokens)
            history = ngrams
        stride = self.config.arms[name].stride
        if stride > 1 and (model is not None or not isinstance(history, Given)):
            raise ConfigError(
                "arms: stride needs acceptance.history given, and no model that drafts"
            )
        return Controlled(
            das,
            requests,
            engines=self.engines,
            limit=self._longest_tokens(),
            history=history,
            copy=model,
            pass_seconds=pass_seconds,
            prior=self._prior(das),
            stride=stride,
        )

    def _history(
        self, das: DasConfig, requests: Requests, workload: Workload
    ) -> Source:
        """Return the drafts of the history."""
        accept = self.config.acceptance
        if not das.uses_history:
            return Source(requests)
        if accept.history == "index":
            return Indexed(requests, workload.texts, self.engines, das.history)
        return Given(
            requests,
            accept.rates,
            longest=das.num_draft_tokens,
            seed=self.config.rollout.seed,
            agreement=accept.agreement,
        )

    def _copy(self, requests: Requests) -> Given:
        """Return the drafts of the policy copy."""
        config = self.config
        return Given(
            requests,
            [[config.acceptance.copy_rate]],
            longest=COPY_LONGEST,
            seed=config.rollout.seed + 1,
        )

    def _model(self, das: DasConfig, requests: Requests) -> Given:
        """Return the drafts of a neural drafter, or of n-grams."""
        if das.neural:
            tokens = das.model_tokens
        else:
            tokens = das.num_draft_tokens
        length = self.config.acceptance.length or 1.0 + 0.5 * tokens
        rate = rate_of(length, tokens)
        return Given(
            requests,
            [[rate]],
            longest=tokens,
            seed=self.config.rollout.seed,
        )

    def _longest_tokens(self) -> int:
        """Return the tokens of the longest prompt and response that are possible."""
        rollout = self.config.rollout
        longest = rollout.cap + rollout.prompt
        for response in self.responses or ():
            tokens = len(response.prompt) + len(response.tokens)
            longest = max(longest, tokens)
        return longest

    def _prior(self, das: DasConfig) -> Prior | None:
        """Return what controllers know before the first step, as in a run."""
        if das.speculate != "auto" or not isinstance(self.steps, Instance):
            return None
        config = self.config
        roof = Roofline.from_config(
            sizes(config.model),
            device(config.hardware.gpu),
            config.hardware.per_engine,
            WEIGHT_BYTES[config.precision],
        )
        return Prior(roof.step_model())

    def _copy_pass(self, das: DasConfig) -> Seconds:
        """Return the time of a pass of the policy copy."""
        if not isinstance(self.steps, Instance):
            return self.steps.copy_pass
        policy_bytes = WEIGHT_BYTES[self.config.precision]
        share = WEIGHT_BYTES[das.self.weights] / policy_bytes
        return replace(self.steps, copy_share=share).copy_pass


def _in_every_step(das: DasConfig) -> bool:
    """Say whether vLLM drafts by itself, as many tokens in every step."""
    always = das.speculate == "always" and das.budget == "unlimited"
    return always and not das.uses_history


def _num_engines(hardware: HardwareBlock) -> int:
    """Return how many engines there are.

    Raises:
        ConfigError: the devices make no whole number of engines.
    """
    engines, rest = divmod(hardware.gpus, hardware.per_engine)
    if rest or not engines:
        raise ConfigError(
            f"hardware: found gpus {hardware.gpus}, per_engine {hardware.per_engine}:"
            " the first must be a multiple of the second"
        )
    return engines


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
        return Line(_line_model(block.line))
    return instance(
        sizes(config.model),
        device(hardware.gpu),
        hardware.per_engine,
        config.precision,
        overhead_s=1e-3 * block.overhead_ms,
        draft_overhead_s=1e-3 * block.draft_overhead_ms,
        pass_overhead_s=1e-3 * block.pass_overhead_ms,
    )


def _line_model(line: dict[str, Any]) -> StepModel:
    """Return the model of a line's coefficients."""
    needed = {"base", "token"}
    if not needed <= line.keys() <= {*COEFFICIENTS}:
        raise ConfigError(
            f"steps.line: found {line}, allowed: {', '.join(COEFFICIENTS)}; needed:"
            " base and token"
        )
    return StepModel(**line)


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
    room_bytes = MEMORY * device(config.hardware.gpu).memory
    weight_bytes = roof.weight_bytes + roof.table_bytes + roof.expert_bytes
    block_bytes = roof.kv_bytes * BLOCK
    blocks = int((room_bytes - weight_bytes) / block_bytes)
    if blocks < MIN_KV_BLOCKS:
        raise DasError(
            f"hardware: the weights take {weight_bytes / 1e9:.0f} of"
            f" {room_bytes / 1e9:.0f} GB on each device: raise hardware.per_engine"
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
        expected = sum(rate**i for i in range(tokens + 1))
        if expected < length:
            low = rate
        else:
            high = rate
    return low


def summary(runs: dict[str, Run]) -> dict[str, Any]:
    """Return the figures of each arm, as plain numbers; ratios are relative to the
    first.
    """
    found: dict[str, Any] = {}
    base: dict[str, Any] = {}
    for name, run in runs.items():
        total = _total(run.steps)
        base = base or total
        figures: dict[str, Any] = {}
        for key in ("rollout_s", "step_s", "exposed_s", "idle"):
            figures[key] = total[key] / len(run.steps)
        for key in ("rollout", "step"):
            base_s = max(base[f"{key}_s"], 1e-12)
            figures[f"{key}_of_first"] = total[f"{key}_s"] / base_s
        for key in ("tokens", "drafted", "accepted", "preempted", "ahead"):
            figures[key] = total[key]
        figures["tokens_per_forward"] = total["tokens"] / max(total["forwards"], 1)
        figures["by_step"] = [
            vars(step) | {"tokens_per_forward": step.tokens_per_forward}
            for step in run.steps
        ]
        found[name] = figures
    return found


def _total(steps: Sequence[StepResult]) -> dict[str, Any]:
    """Return the sum of each figure over the steps of a run."""
    names = vars(steps[0])
    return {name: sum(getattr(step, name) for step in steps) for name in names}


def simulate(
    config: SimConfig,
    responses: Sequence[RecordedResponse] | None = None,
    progress: Progress = lambda _: None,
) -> Any:
    """Run every arm of a config; return `summary`."""
    return summary(Simulation(config, responses).run_all(progress))
