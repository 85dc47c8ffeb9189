"""The `das:` block as pydantic models. Importing this loads no torch, no vLLM and no
host framework.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
)

from das_adapter.config_errors import (
    check_draft,
    check_effects,
    message,
    resembles_das,
    unwritable,
    wrong,
)
from das_adapter.errors import ConfigError
from das_adapter.tables import no_yaml

_Neural = Literal["eagle3", "mtp", "draft_model", "dflash", "dspark"]
_WithHistory = Literal[
    "history+eagle3",
    "history+mtp",
    "history+draft_model",
    "history+dflash",
    "history+dspark",
]
Drafter = Literal[
    "none", "history", "self", "history+self", _Neural, _WithHistory, "ngram"
]
_HISTORY = ("history", "history+self", *get_args(_WithHistory))
_COPY = ("self", "history+self")
_NEURAL = (*get_args(_Neural), *get_args(_WithHistory))
_PARALLEL = ("dflash", "dspark")


_BEHIND_HISTORY = "history+"
"""Begin of the names of drafters that draft beside the history."""
_TOKENS_LOOKED_UP = 32
"""Most draft tokens of a request in a step where they are looked up, by default."""
_TOKENS_OF_COPY = 5
"""Draft tokens of the policy copy, by default."""
_TOKENS_IN_PARALLEL = 7
"""Draft tokens of a neural drafter that drafts all in one pass, by default."""
_TOKENS_OF_NEURAL = 3
"""Draft tokens of other neural drafters, by default."""
_SIZE = re.compile(r"\d+(\.\d+)? *([kmgtpe]i?)?b?", re.IGNORECASE)


def _read_speculate(when: Any) -> Any:
    if when in ("auto", "always"):
        return when
    if type(when) is int and when >= 1:
        return when
    raise ValueError(
        "allowed: 'auto', 'always', or a number of running requests, 1 or more"
    )


def _read_size(size: Any) -> Any:
    if isinstance(size, int | str) and _SIZE.fullmatch(str(size)):
        return size
    raise ValueError(
        "allowed: a number of bytes, 65536 or more, or a size such as 512MiB"
    )


def _read_load(load: Any) -> Any:
    if load is None or load is False:
        return load
    if isinstance(load, str) and load:
        return load
    raise ValueError("allowed: null, a directory, or false")


def _read_off(value: Any) -> Any:
    return "off" if value is False else value  # as YAML reads `off`


Budget = Literal["optimal", "das", "uniform", "unlimited"]
Speculate = Literal["auto", "always"] | int
Size = Annotated[ByteSize, BeforeValidator(_read_size), Field(ge=2**16)]
UserPath = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""Path (or name on the hub) in which a leading `~` is expanded."""


class _Block(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        strict=True,
        allow_inf_nan=False,
    )


_SHARED = ("problem", "trusted", "global")
"""Scopes of a history that outlives its requests."""


class HistoryConfig(_Block):
    """What `history`, alone or with a second drafter, drafts from."""

    scope: Literal["problem", "trusted", "global", "request"] = "problem"
    """Whose text a request drafts from. `problem`: responses to its own prompt;
    `global`: responses to all prompts, at most the newest 134 million tokens;
    `request`: its own text alone. `trusted`: also responses to the first turn that its
    prompt begins with, or to the problem that it names (`das_problem`), whatever its
    `cache_salt`; only for an engine without a trainer integration whose clients trust
    each other.
    """
    others: Annotated[Literal["auto", "off"], BeforeValidator(_read_off)] = "auto"
    """Whether a request also drafts from the newest responses to other prompts, at most
    2 million tokens of a node, where they promise more. `auto`: where one trainer sends
    all requests: through veRL or NeMo-RL, through vLLM's `LLM` class, or with
    `scope: trusted`.
    """
    max_bytes: Size = ByteSize(8 * 2**30)
    """Size of a node's history, such as 512MiB. When it is full, the largest problems
    lose their least useful text first (problems above a million tokens their oldest
    text). Every problem keeps a little, if 256 bytes of each fit.
    """
    device_bytes: Size = ByteSize(2**30)
    """GPU memory that each engine on vLLM's V2 runner takes for the history of the
    problems of a rollout (8 bytes a token) and for finished samples. It stays taken
    while the engine sleeps. The V1 runner takes none.
    """
    run_ahead: Annotated[Literal["auto", "off"], BeforeValidator(_read_off)] = "off"
    """Whether idle engines write what the requests of the next steps will begin with;
    in synchronous runs of veRL and NeMo-RL.
    """
    load: Annotated[UserPath | Literal[False] | None, BeforeValidator(_read_load)] = (
        None
    )
    """Directory `das_history` of another run's checkpoint, to start with its history.
    None: the run starts empty, or with its own history if it resumes. `false`: the
    history is neither saved in checkpoints nor read from them.
    """


class SelfConfig(_Block):
    """The quantised copy of the policy, with which `self` and `history+self` draft."""

    weights: Literal["int4", "int8", "fp8"] = "int4"
    """Format of the quantised copy: `int4` or `int8` on a CPU, `int4` or `fp8` on a
    GPU. The copy sleeps and wakes with the policy's weights.
    """


class DraftConfig(_Block):
    """The neural drafter of `eagle3`, `mtp`, `draft_model`, `dflash` and `dspark`,
    alone or beside the history.
    """

    model: UserPath | None = None
    """Checkpoint of the neural drafter: a directory or a name on the hub. None: `mtp`
    drafts with the layers in the policy's own checkpoint.
    """
    weights: Literal["checkpoint", "trainer"] = "checkpoint"
    """Where the drafter's weights come from. `checkpoint`: its own; where `model` is a
    directory, new files in it are read at the next weight sync.
    `trainer`: the trainer sends them at each weight sync, with `draft.` before their
    names (`mtp`: under their names in the policy's checkpoint).
    """
    options: dict[str, Any] = {}
    """Further keys of vLLM's `speculative_config`."""


class VerifyConfig(_Block):
    """How draft tokens are verified."""

    noise: Literal["keyed", "stock"] | None = None
    """Sampling noise. `keyed`: tokens do not depend on the drafter. `stock`: vLLM's own
    sampler. None: `keyed` with any drafter, `stock` with `drafter: none`.
    """
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of the keyed noise: runs with equal seeds draw equal tokens."""


class DasConfig(_Block):
    """The whole `das:` block."""

    drafter: Drafter = "history"
    """Where draft tokens come from. `history`: the run's responses; `self`: a quantised
    copy of the policy; `eagle3`, `mtp`, `draft_model`, `dflash`, `dspark`: a neural
    drafter; `history+self`, `history+eagle3`, ...: the better of two for each request;
    `ngram`: the request's own text alone. `none`: nowhere; the other keys may stay as
    they are.
    """
    max_draft_tokens: Annotated[int | None, Field(ge=1, le=128)] = None
    """Most draft tokens of a request in a step (vLLM's `num_speculative_tokens`). None:
    32 with the history or `ngram`, 5 with `self`, 7 with `dflash` and `dspark`, 3 with
    other neural drafters. A model drafts at most 16, and with the history no more than
    those 5, 7 or 3. The controller measures how many of them pay.
    """
    speculate: Annotated[Speculate, BeforeValidator(_read_speculate)] = "auto"
    """When to draft. `auto`: when the measured step times predict a speed-up (before
    the first steps, on a known GPU, the roofline of model and device). `always`:
    whatever was measured, and with a `budget` other than `optimal` even at a predicted
    loss. A number N: draft while at most N requests run; stop above 1.25 N.
    """
    budget: Budget = "optimal"
    """How draft tokens are shared among requests. `optimal`: a token where it shortens
    the rollout by more than it costs. `das`: the optimum of the DAS paper for the whole
    rollout, none for requests that end early anyway. `uniform`: the maximum for all.
    `unlimited`: as far as the drafter goes, however unlikely its tokens are.
    """
    routing: Literal["longest_first", "least_loaded", "host"] = "longest_first"
    """Which engine a request goes to. `longest_first`: the samples of a prompt go to
    one engine, where they draft from each other, and are spread if the rollout is
    predicted to end earlier that way. Requests predicted to be long start first; where
    requests wait, one sample of each prompt starts early. `least_loaded`: the engine
    with the fewest requests. `host`: the trainer's own balancer decides.
    """
    log_dir: UserPath | None = None
    """Directory for the decision logs of engines, which `das-adapter report` shows. A
    relative path starts in the directory of the trainer's driver. All nodes must see
    it. None: no logs.
    """
    history: HistoryConfig = HistoryConfig()
    self: SelfConfig = SelfConfig()
    draft: DraftConfig = DraftConfig()
    verify: VerifyConfig = VerifyConfig()

    @property
    def in_every_step(self) -> bool:
        """Whether a neural drafter drafts in every step, as vLLM has it."""
        return (
            self.neural
            and not self.uses_history
            and self.speculate == "always"
            and self.budget == "unlimited"
        )

    @property
    def controlled(self) -> bool:
        """Whether das-adapter's controller decides on the draft tokens; then they may
        be any number in a step.
        """
        return self.drafter != "none" and not self.in_every_step

    @property
    def uses_history(self) -> bool:
        """Whether drafts come from the run's history."""
        return self.drafter in _HISTORY

    @property
    def looked_up(self) -> HistoryConfig | None:
        """Where drafts are looked up: the run's history, the request's own text
        (`ngram`), or, None, nowhere.
        """
        if self.drafter == "ngram":
            return HistoryConfig(scope="request")
        return self.history if self.uses_history else None

    @property
    def shares_history(self) -> bool:
        """Whether rollouts outlive their request: engines share a history."""
        return self.uses_history and self.history.scope != "request"

    @property
    def saves_history(self) -> bool:
        """Whether checkpoints contain the history."""
        return self.shares_history and self.history.load is not False

    @property
    def saves_prompts(self) -> bool:
        """Whether checkpoints contain the prompts of problems beside their history,
        which has to tell them apart.
        """
        return self.saves_history and self.history.scope != "global"

    @property
    def neural(self) -> bool:
        """Whether a drafter with weights of its own drafts."""
        return self.drafter in _NEURAL

    @property
    def method(self) -> str:
        """What vLLM calls the neural drafter."""
        return self.drafter.removeprefix(_BEHIND_HISTORY)

    @property
    def parallel(self) -> bool:
        """Whether the neural drafter drafts all its tokens in one pass."""
        return self.method in _PARALLEL

    @property
    def copies_policy(self) -> bool:
        """Whether a quantised copy of the policy drafts."""
        return self.drafter in _COPY

    @property
    def by_model(self) -> bool:
        """Whether a model drafts: the policy copy, or a neural drafter."""
        return self.copies_policy or self.neural

    @property
    def model_tokens(self) -> int:
        """Most tokens that a model drafts for a request in a step: the policy copy, or
        the neural drafter.
        """
        if self.parallel:
            default = _TOKENS_IN_PARALLEL
        elif self.neural:
            default = _TOKENS_OF_NEURAL
        else:
            default = _TOKENS_OF_COPY
        if self.looked_up:
            return min(default, self.num_draft_tokens)
        return self.max_draft_tokens or default

    @property
    def num_draft_tokens(self) -> int:
        """Most draft tokens of a request in a step (vLLM's num_speculative_tokens)."""
        if self.looked_up:
            return self.max_draft_tokens or _TOKENS_LOOKED_UP
        return self.model_tokens

    @property
    def keyed(self) -> bool:
        """Whether tokens are sampled with keyed noise."""
        if self.verify.noise is None:
            return self.drafter != "none"
        return self.verify.noise == "keyed"

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers that `parse` reads back to an equal config: the
        values that are not the default.
        """
        return self.model_dump(mode="json", exclude_defaults=True)


NEEDS: dict[str, dict[str, tuple[str | None, ...]]] = {
    "history": {"drafter": _HISTORY},
    "history.max_bytes": {"history.scope": _SHARED},
    "history.device_bytes": {"history.scope": _SHARED},
    "history.others": {"history.scope": ("problem", "trusted")},
    "history.run_ahead": {
        "history.scope": _SHARED,
        "routing": ("longest_first", "least_loaded"),
    },
    "history.load": {"history.scope": _SHARED},
    "self": {"drafter": _COPY},
    "draft": {"drafter": _NEURAL},
    "verify.seed": {"verify.noise": ("keyed", None)},
}
"""The values of other keys that a key needs to have an effect. The entry of a block
holds for each of its keys, unless the key's own entry names the same setting. Keys
without an entry act with every drafter.
"""


def parse(block: Any) -> DasConfig | None:
    """Read a `das:` block: None, a mapping (an OmegaConf node too) or a `DasConfig`.

    Returns:
        The config; None when there is no block or when it leaves the host as it is
        (`drafter: none` without keyed noise).

    Raises:
        ConfigError: names each key that is unknown, ill-typed, out of range or without
            effect.
    """
    if block is None:
        return None
    try:
        config = DasConfig.model_validate(_to_plain_containers(block))
    except ValidationError as error:
        messages = [message(one, DasConfig) for one in error.errors()]
        raise ConfigError("\n".join(messages)) from None
    if config.drafter == "none":
        return config if config.keyed else None
    check_effects(config, NEEDS)
    check_draft(config)
    return config


def read(source: str) -> Any:
    """Read a block that an environment variable holds: JSON, or the path of a YAML
    file, in which `das:` may stand above it; None where it is empty. `parse` takes the
    answer. ConfigError: no such file, or not readable as YAML.
    """
    if not source.strip():
        return None
    block = read_mapping(source)
    if "das" in block:
        return block_of(block, source)
    return block


def read_mapping(source: str) -> Mapping[str, Any]:
    """Read JSON, or a YAML file (which may hold JSON) whose path is given. ConfigError:
    as of `read`.
    """
    import yaml

    try:
        text = source
        if not source.lstrip().startswith("{"):
            path = Path(source).expanduser()
            text = path.read_text()
        try:  # YAML knows no tabs between JSON's values
            block = json.loads(text)
        except ValueError:
            block = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"found {source!r}, allowed: a das: block as JSON, or a YAML file's path:"
            f" {no_yaml(error)}"
        ) from None
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{source}: found {block!r}, expected a das: block, such as `drafter:"
            " history`"
        )
    return block


def block_of(parent: Any, where: str) -> Any:
    """Return the `das:` block in a node of a host's config, None where there is none;
    `where`: the node's full key. ConfigError: the block is empty, or a key is probably
    meant to be `das`.
    """
    if not isinstance(parent, Mapping):
        return None
    if "das" not in parent:
        for key in parent:
            if resembles_das(str(key)):
                raise ConfigError(f"{where}.{key}: unknown key; did you mean 'das'?")
        return None
    if parent["das"] is None:
        raise ConfigError(
            f"{where}.das: found an empty block: write `drafter: none`, or `das: {{}}`"
            " for the defaults"
        )
    return parent.get("das")


def check_files(config: DasConfig) -> None:
    """Refuse files and directories of the block that are not on this machine, or can't
    be written to.
    """
    if config.drafter == "none":
        return
    load = config.history.load
    if load and not os.path.isdir(load):
        raise wrong("history.load", load, "expected a directory that exists")
    if config.log_dir is not None:
        obstacle = unwritable(config.log_dir)
        if obstacle is not None:
            raise wrong(
                "log_dir",
                config.log_dir,
                f"expected a directory that can be written to: {obstacle} is none",
            )


def make_absolute(block: MutableMapping[str, Any], config: DasConfig) -> None:
    """Make the directories of a block absolute in the containers of its host, whose
    other processes may have other working directories than its driver.
    """
    if config.log_dir is not None:
        block["log_dir"] = os.path.abspath(config.log_dir)
    if config.history.load:
        block["history"]["load"] = os.path.abspath(config.history.load)


def _to_plain_containers(node: Any) -> Any:
    """Return a host's containers (OmegaConf's, say) as plain ones, with strings as
    keys.
    """
    if isinstance(node, Mapping):
        mapping = {}
        for key, value in node.items():
            mapping[str(key)] = _to_plain_containers(value)
        return mapping
    if isinstance(node, Sequence) and not isinstance(node, str | bytes):
        return [_to_plain_containers(value) for value in node]
    return node
