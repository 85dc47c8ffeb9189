"""A simulation as a YAML file. Unknown keys are errors that name themselves and what is
allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from das_adapter.config_errors import message
from das_adapter.errors import ConfigError

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Rates = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=1)]


class _Block(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class HardwareBlock(_Block):
    """What the rollouts run on."""

    gpu: str = "h100"
    """Device, one of the table in `das_adapter/core/hardware.py`."""
    gpus: Annotated[int, Field(ge=1)] = 8
    """Devices that generate."""
    per_engine: Annotated[int, Field(ge=1)] = 1
    """Devices of an engine, over which layers and routed experts are spread."""


class StepsBlock(_Block):
    """How long a decode step takes."""

    kind: Literal["roofline", "line"] = "roofline"
    """`roofline`: from model and hardware; `line`: base + token·n + bend·max(0, n -
    knee) + request·b + context·c seconds, with c tokens of context, and `draft` with
    drafts.
    """
    line: dict[str, float] = {}
    """`line`: the coefficients."""
    overhead_ms: Annotated[float, Field(ge=0)] = 1.0
    """`roofline`: milliseconds of each step that no kernel accounts for."""
    draft_overhead_ms: Annotated[float, Field(ge=0)] = 0.0
    """`roofline`: more of them in a step that verifies drafts."""
    pass_overhead_ms: Annotated[float, Field(ge=0)] = 0.5
    """`roofline`: milliseconds of a drafter's pass that no kernel accounts for."""


class EngineBlock(_Block):
    """What an engine holds; vLLM's keys."""

    max_num_seqs: Annotated[int, Field(ge=1)] = 256
    """Requests that run at once."""
    kv_tokens: Annotated[int, Field(ge=16)] | None = None
    """Tokens that the KV cache holds; null: what the weights leave of nine tenths of
    the memory (without a device: no limit).
    """


class LengthsBlock(_Block):
    """How long responses are: log-normal, ended at the cap."""

    mean: Positive = 2000.0
    """Mean tokens, with the cap applied."""
    sigma: Positive = 0.8
    """Standard deviation of the logarithm, without the cap."""
    within: Share = 0.5
    """Share of its variance that samples of one problem have in common, also from one
    visit of it to the next.
    """


class RolloutBlock(_Block):
    """What is written."""

    dump: str | None = None
    """Recorded rollouts (veRL's or NeMo-RL's dumps, .npz, .jsonl); null: lengths are
    drawn.
    """
    tokenizer: str | None = None
    """Of a dump that holds text."""
    dataset: Annotated[int, Field(ge=1)] = 1024
    """Problems in all; an epoch visits each once."""
    problems: Annotated[int, Field(ge=1)] = 128
    """Problems of a step."""
    samples: Annotated[int, Field(ge=1)] = 8
    """Samples of each."""
    prompt: Annotated[int, Field(ge=1)] = 256
    """Tokens of a prompt."""
    cap: Annotated[int, Field(ge=2)] = 8192
    """Maximum tokens of a response."""
    steps: Annotated[int, Field(ge=1)] = 1
    """Steps of the run."""
    lengths: LengthsBlock = LengthsBlock()
    seed: Annotated[int, Field(ge=0)] = 0
    """Of lengths, orders and luck."""


class AcceptanceBlock(_Block):
    """How much of the drafts survives."""

    history: Literal["given", "index"] = "given"
    """Drafts from the history. `index`: the dump is written again, and searched;
    `given`: by `rates`.
    """
    rates: Annotated[list[Rates], Field(min_length=1)] = [[0.5], [0.65]]
    """`given`: chance of each draft position, if those before survived, by visit of the
    problem; the last goes on.
    """
    agreement: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Chance that a token that was written ahead (`history.run_ahead`) is the same
    under the weights of its step.
    """
    copy_rate: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Chance of a token of the policy copy, if those before survived."""
    length: Annotated[float, Field(ge=1)] | None = None
    """Tokens that a neural drafter's or n-gram's request gets from a step, with its
    number of draft tokens; null: 1 and half of these, for neural drafters alone.
    """
    pass_share: Annotated[float, Field(ge=0)] | None = None
    """Time of a pass of a neural drafter, of a plain step of the policy with as many
    requests; null: 0.05. Of what reading the context takes, EAGLE-3 and MTP have the
    share of one layer with `roofline`, others this one.
    """


class PipelineBlock(_Block):
    """What a step takes beside the rollout."""

    kind: Literal["sync", "async"] = "sync"
    """`sync`: rollout, then training; `async`: requests run on across weight syncs."""
    lag: Annotated[int, Field(ge=0)] = 1
    """`async`: maximum number of weight versions between sending a request and training
    on it.
    """
    train_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds of rewards, log-probabilities and the update."""
    sync_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds of the weight sync."""


class ArmBlock(_Block):
    """One way to draft."""

    das: dict[str, Any] = {}
    """The `das:` block, as in a run."""
    stride: Annotated[int, Field(ge=1)] = 1
    """Steps between two calls of the controller; more than 1 for large fleets that
    draft from the history alone.
    """


class SimConfig(_Block):
    """A simulation."""

    model: str | dict[str, Any] = "Qwen/Qwen2.5-7B"
    """Name in the table of `das_adapter/sim/models.py`, path of a config.json, or the
    sizes themselves.
    """
    precision: Literal["bf16", "fp8"] = "bf16"
    """Of weights and matrix products."""
    hardware: HardwareBlock = HardwareBlock()
    steps: StepsBlock = StepsBlock()
    engine: EngineBlock = EngineBlock()
    rollout: RolloutBlock = RolloutBlock()
    acceptance: AcceptanceBlock = AcceptanceBlock()
    pipeline: PipelineBlock = PipelineBlock()
    arms: Annotated[dict[str, ArmBlock], Field(min_length=1)] = {
        "off": ArmBlock(das={"drafter": "none"}),
        "history": ArmBlock(),
    }
    """By name; the first is the one that the others are compared with."""


def parse(content: Any, where: str = "simulation") -> SimConfig:
    """Read a simulation from plain containers.

    Raises:
        ConfigError: an unknown key, or a value that is not allowed.
    """
    try:
        return SimConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"{where}: {message(e, SimConfig, ())}" for e in error.errors())
        ) from None


def read(path: str | Path) -> SimConfig:
    """Read a simulation from a YAML file.

    Raises:
        ConfigError: as `parse`; or the file is no YAML.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    # YAML reads `off:` as a truth value
    if isinstance(content, dict) and isinstance(content.get("arms"), dict):
        content["arms"] = {
            {False: "off", True: "on"}.get(key, key): arm
            for key, arm in content["arms"].items()
        }
    return parse(content if content is not None else {}, str(path))


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
        for key, value in chosen.items():
            block, *path = content, *key.split(".")
            for part in path[:-1]:
                block = block.setdefault(part, {})
                if not isinstance(block, dict):
                    raise ConfigError(f"{key}: {part} is no block")
            block[path[-1]] = value
        yield chosen, parse(content, " ".join(f"{k}={v}" for k, v in chosen.items()))
