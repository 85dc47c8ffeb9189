"""Build a simulation from its config and run its arms."""

from __future__ import annotations

import math
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
from das_adapter.engine.recurrent import most_draft_tokens
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
        self,
        config: SimConfig,
        responses: Sequence[RecordedResponse] | None = None,
    ) -> None:
        """Use recorded responses, or read those of `rollout.dump`.

        Raises:
            ConfigError, DasError: a value that does not fit, with its key.
        """
        self.config = config
        rollout = config.rollout
        acceptance = config.acceptance
        self._blocks = {name: _das(name, arm) for name, arm in config.arms.items()}
        if responses is None and rollout.dump is not None:
            path = Path(rollout.dump)
            responses = read(path, rollout.tokenizer)
        drafters = {das.drafter for das in self._blocks.values()}
        if acceptance.length is None and "ngram" in drafters:
            raise ConfigError(
                "acceptance.length: found null, needed with drafter: ngram"
            )
        self._ahead_arms = set[str]()
        for name, das in self._blocks.items():
            if das.history.run_ahead != "off":
                self._ahead_arms.add(name)
        if responses is not None and self._ahead_arms:
            responses = written_ahead(responses, acceptance.agreement)
        self.responses = responses
        if responses is None and acceptance.history != "given":
            raise ConfigError(
                "acceptance.history: found index, which needs rollout.dump"
            )
        self.steps = step_times(config)
        self.engines = _num_engines(config.hardware)
        self.kv_blocks = kv_blocks(config, self.steps)
        self.state_bytes = 0.0
        """Bytes of a request's recurrent state on each device; 0: it has none."""
        if isinstance(self.steps, Instance):
            self.state_bytes = self.steps.roof.state_bytes
        if self.state_bytes:
            for name, das in self._blocks.items():
                self._blocks[name] = _beside_recurrent_state(name, das)

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
        pipeline = Pipeline(
            fleet=fleet,
            workload=workload,
            router=router,
            timing=self.config.pipeline,
            ahead=name in self._ahead_arms,
        )
        return pipeline.run()

    def fleet(self, name: str) -> tuple[Fleet, Workload]:
        """Return fresh engines with the drafter of an arm, and the requests to send."""
        requests = Requests()
        workload = self._workload()
        drafting = self._drafting(name, requests, workload)
        fleet = Fleet(
            engines=self.engines,
            requests=requests,
            steps=self.steps,
            drafting=drafting,
            slots=self.config.engine.max_num_seqs,
            kv=self.kv_blocks,
            state=self._state_blocks(name),
        )
        return fleet, workload

    def num_states(self, name: str) -> int:
        """Return how many recurrent states a request of an arm has: one, and one for
        each token of the longest draft.
        """
        das = self._blocks[name]
        if das.drafter == "none":
            return 1
        return 1 + das.num_draft_tokens

    def _state_blocks(self, name: str) -> int:
        """Return the KV blocks that the recurrent states of an arm's request take."""
        if not self.state_bytes:
            return 0
        assert isinstance(self.steps, Instance)
        block_bytes = self.steps.roof.kv_bytes * BLOCK
        return math.ceil(self.num_states(name) * self.state_bytes / block_bytes)

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
            cap = max([rollout.cap, *lengths])
            workload = recorded(responses, cap)
        disagreement = 1.0 - self.config.acceptance.agreement
        for number, step in enumerate(workload.steps):
            count = len(step["problem"])
            rng = np.random.default_rng((rollout.seed, number, 1))
            first_different = rng.geometric(disagreement, count)
            step["num_same"] = first_different - 1
        return workload

    def _drafting(
        self,
        name: str,
        requests: Requests,
        workload: Workload,
    ) -> Drafting:
        """Return the drafter of an arm.

        Raises:
            ConfigError: its stride is for other drafters.
        """
        das = self._blocks[name]
        if das.drafter == "none":
            return no_drafts(requests)
        if _in_every_step(das):
            return self._drafting_of_vllm(das, requests)
        history = self._history(das, requests, workload)
        model: Given | None = None
        pass_seconds: Seconds | None = None
        if das.copies_policy:
            model = self._copy(requests)
            pass_seconds = self._copy_pass(das)
        elif das.neural:
            model = self._model(das, requests)
            pass_seconds = self._neural_pass(das)
        elif das.drafter == "ngram":
            history = self._model(das, requests)
        stride = self.config.arms[name].stride
        only_given = model is None and isinstance(history, Given)
        if stride > 1 and not only_given:
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

    def _drafting_of_vllm(self, das: DasConfig, requests: Requests) -> Fixed:
        """Return a drafter that vLLM runs by itself, in every step."""
        source = self._model(das, requests)
        if not das.neural:
            return Fixed(requests, source, das.num_draft_tokens)
        num_passes = das.model_tokens
        if das.parallel:
            num_passes = 1
        return Fixed(
            requests=requests,
            source=source,
            tokens=das.model_tokens,
            pass_seconds=self._neural_pass(das),
            passes=num_passes,
        )

    def _history(
        self,
        das: DasConfig,
        requests: Requests,
        workload: Workload,
    ) -> Source:
        """Return the drafts of the history."""
        acceptance = self.config.acceptance
        if not das.uses_history:
            return Source(requests)
        if acceptance.history == "index":
            return Indexed(
                requests=requests,
                texts=workload.texts,
                engines=self.engines,
                history=das.history,
            )
        return Given(
            requests,
            acceptance.rates,
            longest=das.num_draft_tokens,
            seed=self.config.rollout.seed,
            agreement=acceptance.agreement,
        )

    def _copy(self, requests: Requests) -> Given:
        """Return the drafts of the policy copy."""
        config = self.config
        rates = [[config.acceptance.copy_rate]]
        return Given(
            requests,
            rates,
            longest=COPY_LONGEST,
            seed=config.rollout.seed + 1,
        )

    def _model(self, das: DasConfig, requests: Requests) -> Given:
        """Return the drafts of a neural drafter, or of n-grams."""
        tokens = das.num_draft_tokens
        if das.neural:
            tokens = das.model_tokens
        length = self.config.acceptance.length
        if length is None:
            length = 1.0 + 0.5 * tokens
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
        if das.speculate != "auto":
            return None
        if not isinstance(self.steps, Instance):
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
        copy_bytes = WEIGHT_BYTES[das.self.weights]
        share = copy_bytes / policy_bytes
        steps = replace(self.steps, copy_share=share)
        return steps.copy_pass

    def _neural_pass(self, das: DasConfig) -> Seconds:
        """Return the time of a pass of a neural drafter."""
        share = self.config.acceptance.pass_share
        return self.steps.neural_pass(share, das.drafter)


def _in_every_step(das: DasConfig) -> bool:
    """Say whether vLLM drafts by itself, as many tokens in every step."""
    if das.uses_history or das.copies_policy:
        return False
    return das.speculate == "always" and das.budget == "unlimited"


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
        block = parse_das(arm.das)
    except ConfigError as error:
        raise ConfigError(f"arms.{name}: {error}") from None
    if block is None:
        return DasConfig(drafter="none")
    return block


def _beside_recurrent_state(name: str, das: DasConfig) -> DasConfig:
    """Return the block of an arm as engines take it beside a policy with recurrent
    state.

    Raises:
        ConfigError: they refuse it.
    """
    if das.drafter == "none":
        return das
    policy = "a policy with recurrent state"
    if das.copies_policy:
        raise ConfigError(
            f"arms.{name}: das.drafter={das.drafter!r} does not work with {policy};"
            " das.drafter='history' does"
        )
    most = most_draft_tokens(das, policy)
    return das.model_copy(update={"max_draft_tokens": most})


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
    given = line.keys()
    allowed = set(COEFFICIENTS)
    needed = {"base", "token"}
    if not needed <= given <= allowed:
        names = ", ".join(COEFFICIENTS)
        raise ConfigError(
            f"steps.line: found {line}, allowed: {names}; needed: base and token"
        )
    return StepModel(**line)


def kv_blocks(config: SimConfig, steps: Steps) -> int:
    """Return the blocks of an engine's KV cache.

    Raises:
        DasError: the weights leave no room for it.
    """
    kv_tokens = config.engine.kv_tokens
    if kv_tokens is not None:
        return kv_tokens // BLOCK
    if not isinstance(steps, Instance):
        return UNLIMITED
    roof = steps.roof
    memory = device(config.hardware.gpu).memory
    usable_bytes = MEMORY * memory
    weight_bytes = roof.weight_bytes + roof.table_bytes + roof.expert_bytes
    room_bytes = usable_bytes - weight_bytes
    block_bytes = roof.kv_bytes * BLOCK
    blocks = int(room_bytes / block_bytes)
    if blocks < MIN_KV_BLOCKS:
        raise DasError(
            f"hardware: the weights take {weight_bytes / 1e9:.0f} of"
            f" {usable_bytes / 1e9:.0f} GB on each device: raise hardware.per_engine"
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
        survival = [rate**place for place in range(tokens + 1)]
        expected = sum(survival)
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
    first: dict[str, Any] = {}
    for name, run in runs.items():
        total = _total(run.steps)
        if not first:
            first = total
        found[name] = _figures(run, total, first)
    return found


def _figures(run: Run, total: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of an arm, by its totals and those of the first."""
    num_steps = len(run.steps)
    figures: dict[str, Any] = {}
    for key in ("rollout_s", "step_s", "exposed_s", "idle"):
        figures[key] = total[key] / num_steps
    for key in ("rollout", "step"):
        seconds = total[f"{key}_s"]
        first_s = max(first[f"{key}_s"], 1e-12)
        figures[f"{key}_of_first"] = seconds / first_s
    for key in ("tokens", "drafted", "accepted", "preempted", "ahead"):
        figures[key] = total[key]
    forwards = max(total["forwards"], 1)
    figures["tokens_per_forward"] = total["tokens"] / forwards
    by_step = []
    for step in run.steps:
        of_step = dict(vars(step))
        of_step["tokens_per_forward"] = step.tokens_per_forward
        by_step.append(of_step)
    figures["by_step"] = by_step
    return figures


def _total(steps: Sequence[StepResult]) -> dict[str, Any]:
    """Return the sum of each figure over the steps of a run."""
    total: dict[str, Any] = {}
    for name in vars(steps[0]):
        values = [getattr(step, name) for step in steps]
        total[name] = sum(values)
    return total


def simulate(
    config: SimConfig,
    responses: Sequence[RecordedResponse] | None = None,
    progress: Progress = lambda _: None,
) -> Any:
    """Run every arm of a config; return `summary`."""
    simulation = Simulation(config, responses)
    runs = simulation.run_all(progress)
    return summary(runs)
