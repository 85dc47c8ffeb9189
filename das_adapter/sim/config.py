"""A simulation as a YAML file. Unknown keys are errors that name themselves and what is
allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from das_adapter.config_errors import message
from das_adapter.errors import ConfigError
from das_adapter.tables import no_yaml

Share = Annotated[float, Field(ge=0, le=1)]
Chance = Annotated[float, Field(ge=0, lt=1)]
TokensPerStep = Annotated[float, Field(ge=1)]
CacheTokens = Annotated[int, Field(ge=16)]
ResponseCap = Annotated[int, Field(ge=2)]
Rates = Annotated[list[Chance], Field(min_length=1)]
"""Chance of each draft position; the last goes on."""
VisitRates = Annotated[list[Rates], Field(min_length=1)]


class _SimBlock(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class HardwareBlock(_SimBlock):
    """Hardware of the rollouts."""

    gpu: str = "h100"
    """Device, one of the table in `das_adapter/core/hardware.py`."""
    gpus: PositiveInt = 8
    """Devices that generate."""
    per_engine: PositiveInt = 1
    """Devices of an engine, over which layers and routed experts are spread."""


class StepsBlock(_SimBlock):
    """Time of a decode step."""

    kind: Literal["roofline", "line"] = "roofline"
    """`roofline`: from model and hardware; `line`: base + token·n + bend·max(0, n -
    knee) + request·b + context·c seconds, with c tokens of context, and `draft` with
    drafts.
    """
    line: dict[str, float] = {}
    """`line`: the coefficients, by name."""
    overhead_ms: NonNegativeFloat = 1.0
    """`roofline`: milliseconds of each step that no kernel accounts for."""
    draft_overhead_ms: NonNegativeFloat = 0.0
    """`roofline`: further milliseconds of a step that verifies drafts."""
    pass_overhead_ms: NonNegativeFloat = 0.5
    """`roofline`: milliseconds of a drafter's pass that no kernel accounts for."""


class EngineBlock(_SimBlock):
    """Capacity of an engine, under vLLM's keys."""

    max_num_seqs: PositiveInt = 256
    """Requests that run at once."""
    kv_tokens: CacheTokens | None = None
    """Tokens that the KV cache holds; null: what the weights leave of nine tenths of
    the memory (without a device: no limit).
    """


class LengthsBlock(_SimBlock):
    """Lengths of responses: log-normal, ended at the cap."""

    mean: PositiveFloat = 2000.0
    """Mean tokens, with the cap applied."""
    sigma: PositiveFloat = 0.8
    """Standard deviation of the logarithm, without the cap."""
    within: Share = 0.5
    """Share of its variance that samples of one problem have in common, also from one
    visit of it to the next.
    """


class RolloutBlock(_SimBlock):
    """Requests of the run."""

    dump: str | None = None
    """Recorded rollouts (veRL's or NeMo-RL's dumps, .npz, .jsonl); null: lengths are
    drawn.
    """
    tokenizer: str | None = None
    """Name or folder of the tokenizer of a dump that holds text."""
    dataset: PositiveInt = 1024
    """Problems in all; an epoch visits each once."""
    problems: PositiveInt = 128
    """Problems in a step."""
    samples: PositiveInt = 8
    """Samples of each problem in a step."""
    prompt: PositiveInt = 256
    """Tokens in a prompt."""
    cap: ResponseCap = 8192
    """Maximum tokens of a response."""
    steps: PositiveInt = 1
    """Training steps of the run."""
    lengths: LengthsBlock = LengthsBlock()
    seed: NonNegativeInt = 0
    """Seed of drawn lengths, of the orders of requests, and of what is accepted."""


class AcceptanceBlock(_SimBlock):
    """Share of the draft tokens that the policy accepts."""

    history: Literal["given", "index"] = "given"
    """Source of the drafts from the history. `index`: the dump is written again, and
    searched; `given`: they are accepted by `rates`.
    """
    rates: VisitRates = [[0.5], [0.65]]
    """`given`: chance of each draft position, if those before survived, by visit of the
    problem; the last goes on.
    """
    agreement: Chance = 0.99
    """Chance that a token that was written ahead (`history.run_ahead`) is the same
    under the weights of its step.
    """
    copy_rate: Chance = 0.9
    """Chance of a token of the policy copy, if those before survived."""
    length: TokensPerStep | None = None
    """Tokens that a request gets from a step with the number of draft tokens of a
    neural drafter or of n-grams; null: 1 and half of these, for neural drafters alone.
    """
    pass_share: NonNegativeFloat | None = None
    """Time of a pass of a neural drafter, as a share of a plain step of the policy with
    as many requests; null: 0.05. Reading the context takes EAGLE-3 and MTP the share of
    one layer with `roofline`, and other drafters this share.
    """


class PipelineBlock(_SimBlock):
    """Time of a training step beside the rollout."""

    kind: Literal["sync", "async"] = "sync"
    """`sync`: rollout, then training; `async`: requests run on across weight syncs."""
    lag: NonNegativeInt = 1
    """`async`: maximum number of weight versions between sending a request and training
    on it.
    """
    train_s: NonNegativeFloat = 0.0
    """Seconds of rewards, log-probabilities and the update."""
    sync_s: NonNegativeFloat = 0.0
    """Seconds of the weight sync."""


class ArmBlock(_SimBlock):
    """One way to draft."""

    das: dict[str, Any] = {}
    """The `das:` block, as in a run."""
    stride: PositiveInt = 1
    """Steps between two calls of the controller; more than 1 for large fleets that
    draft from the history alone.
    """


Arms = Annotated[dict[str, ArmBlock], Field(min_length=1)]


class SimConfig(_SimBlock):
    """A simulation."""

    model: str | dict[str, Any] = "Qwen/Qwen2.5-7B"
    """Name in the table of `das_adapter/sim/models.py`, path of a config.json, or the
    sizes themselves.
    """
    precision: Literal["bf16", "fp8"] = "bf16"
    """Number format of weights and matrix products."""
    hardware: HardwareBlock = HardwareBlock()
    steps: StepsBlock = StepsBlock()
    engine: EngineBlock = EngineBlock()
    rollout: RolloutBlock = RolloutBlock()
    acceptance: AcceptanceBlock = AcceptanceBlock()
    pipeline: PipelineBlock = PipelineBlock()
    arms: Arms = {
        "off": ArmBlock(das={"drafter": "none"}),
        "history": ArmBlock(),
    }
    """Ways to draft, by name; the others are compared with the first."""


def parse(content: Any, where: str = "simulation") -> SimConfig:
    """Read a simulation from plain containers.

    Raises:
        ConfigError: an unknown key, or a value that is not allowed.
    """
    try:
        return SimConfig.model_validate(content)
    except ValidationError as error:
        errors = error.errors()
    lines = []
    for found in errors:
        text = message(found, SimConfig, ())
        lines.append(f"{where}: {text}")
    raise ConfigError("\n".join(lines))


def read(path: str | Path) -> SimConfig:
    """Read a simulation from a YAML file.

    Raises:
        ConfigError: as `parse`; or the file is no YAML.
    """
    import yaml

    try:
        text = Path(path).read_text()
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: {no_yaml(error)}; expected the YAML file of a simulation"
        ) from None
    if content is None:
        content = {}
    if isinstance(content, dict):
        arms = content.get("arms")
        if isinstance(arms, dict):
            content["arms"] = _with_names(arms)
    return parse(content, str(path))


def _with_names(arms: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return arms by name: YAML reads the names `off` and `on` as truth values."""
    words = {False: "off", True: "on"}
    named = {}
    for key, arm in arms.items():
        name = words.get(key, key)
        named[name] = arm
    return named


def variants(
    config: SimConfig, values: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[dict[str, Any], SimConfig]]:
    """Yield a config for each combination of values of keys such as `hardware.gpus`.

    Raises:
        ConfigError: there is no such key, or a value is not allowed.
    """
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        content = config.model_dump()
        parts = []
        for key, value in chosen.items():
            _set(content, key, value)
            parts.append(f"{key}={value}")
        where = " ".join(parts)
        yield chosen, parse(content, where)


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a key such as `hardware.gpus` in nested containers.

    Raises:
        ConfigError: a part of the key is a value and no block.
    """
    *parents, name = key.split(".")
    block = content
    for parent in parents:
        block = block.setdefault(parent, {})
        if isinstance(block, dict):
            continue
        raise ConfigError(f"{key}: {parent} is no block")
    block[name] = value
