"""The `das:` block as frozen dataclasses. Importing this costs nothing: no torch, no vLLM, no host framework."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from das_adapter.errors import ConfigError

Drafter = Literal["none", "history", "self", "history+self", "eagle3", "mtp", "draft_model", "ngram"]
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class HistoryConfig:
    scope: Literal["problem", "global", "request"] = "problem"
    """Whose text a request drafts from: its own problem's rollouts, all problems' rollouts, or only its own text."""
    window: int = 16
    """Weight versions a trajectory stays in the history (one version per weight sync). At least 1."""
    max_bytes: int = 8 * 2**30
    """Bytes the sealed history may take per node; problems not seen for longest go first, then the oldest versions.
    Accepts 512MiB, 8GiB, ..."""
    persist: str | None = None
    """Directory `das_history` of a checkpoint of another run, whose history this run starts with; None: it starts with
    none, or with its own where it resumes."""

    def __post_init__(self) -> None:
        _at_least("history.window", self.window, 1)
        _at_least("history.max_bytes", self.max_bytes, 2**16)


@dataclass(frozen=True)
class BudgetConfig:
    policy: Literal["optimal", "classes", "uniform", "unlimited"] = "optimal"
    """How draft tokens are shared out. `optimal`: where a token shortens the rollout by more than it costs.
    `classes`: the maximum for requests that become long, a third of it for medium ones, none for short ones.
    `uniform`: the same maximum for everyone. `unlimited`: as far as the drafter goes."""
    max_draft_tokens: int = 16
    """Most draft tokens per request and decode step (vLLM's num_speculative_tokens). 1 to 128."""
    min_chance: float = 0.15
    """A draft is cut where the estimated chance that it survives so far falls under this (`classes`, `uniform`).
    0 to 1."""

    def __post_init__(self) -> None:
        _at_least("budget.max_draft_tokens", self.max_draft_tokens, 1, 128)
        _at_least("budget.min_chance", self.min_chance, 0.0, 1.0)


@dataclass(frozen=True)
class ToggleConfig:
    mode: Literal["off", "threshold", "roofline"] = "roofline"
    """When a batch is speculated on at all. `roofline`: when the latency model, fitted to the engine's own steps,
    predicts a speed-up. `threshold`: when few enough requests are running. `off`: always, even at a loss."""
    margin: float = 0.05
    """Predicted speed-up above 1 at which `roofline` turns speculation on; it turns off at 1. 0 to 1."""
    threshold: int = 32
    """Running requests of an engine up to which `threshold` speculates. At least 1."""
    calibration: str | None = None
    """File of `das-adapter calibrate` to start from; None: the first decode steps are the calibration."""

    def __post_init__(self) -> None:
        _at_least("toggle.margin", self.margin, 0.0, 1.0)
        _at_least("toggle.threshold", self.threshold, 1)


@dataclass(frozen=True)
class RoutingConfig:
    policy: Literal["longest_first", "least_loaded", "host"] = "longest_first"
    """Which replica a request goes to. `longest_first`: requests predicted to be long are spread over the replicas and
    start first. `least_loaded`: the replica with the fewest requests in flight. `host`: the host's own balancer."""


@dataclass(frozen=True)
class SelfConfig:
    weights: Literal["int4", "int8", "fp8"] = "int4"
    """What the copy of the policy is rounded to. CPU: int4, int8; GPU: int4, fp8."""
    max_tokens: int = 5
    """Most tokens the copy drafts for a request in a step; how many of them pay is measured. 1 to 16."""
    ladder: list[int] | None = None
    """Draft lengths, rising, of which all replicas use the same one: it goes up where nearly all that is drafted is
    accepted, and down where much is not (EfficientRollout, algorithm 1). None: the length that pays is chosen at every
    step."""

    def __post_init__(self) -> None:
        _at_least("self.max_tokens", self.max_tokens, 1, 16)
        if self.ladder is not None:
            if not self.ladder or self.ladder != sorted(set(self.ladder)):
                raise ConfigError(f"self.ladder: found {self.ladder}, allowed: rising draft lengths such as [3, 5, 7]")
            _at_least("self.ladder", self.ladder[0], 1)
            _at_least("self.ladder", self.ladder[-1], 1, self.max_tokens)


@dataclass(frozen=True)
class DraftConfig:
    """The neural drafter of `eagle3`, `mtp` and `draft_model`."""

    model: str | None = None
    """Checkpoint of the drafter. None: `mtp` drafts with the layers in the policy's own checkpoint."""
    tokens: int = 3
    """Draft tokens per request and decode step. 1 to 16."""
    weights: Literal["checkpoint", "trainer"] = "checkpoint"
    """Where the drafter's weights come from: its checkpoint for the whole run, or the trainer at each weight sync,
    with `draft.` before their names (`mtp`: under the names the policy's checkpoint has for them)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keys of vLLM's speculative_config."""

    def __post_init__(self) -> None:
        _at_least("draft.tokens", self.tokens, 1, 16)
        for key in ("method", "model", "num_speculative_tokens"):
            if key in self.options:
                raise ConfigError(f"draft.options.{key}: found {self.options[key]!r}; das.drafter, das.draft.model and "
                                  "das.draft.tokens set it: remove it")  # fmt: skip


@dataclass(frozen=True)
class VerifyConfig:
    noise: Literal["keyed", "stock"] | None = None
    """Sampling noise: `keyed` makes tokens independent of the drafter, `stock` keeps vLLM's sampler.
    None: keyed where a drafter drafts, stock for `drafter: none`."""
    seed: int = 0
    """Run seed of the keyed noise; runs with equal seeds draw equal tokens. 0 to 2^63 - 1."""
    allow_lossy: bool = False
    """Let settings of vLLM through under which the tokens no longer have the policy's distribution."""

    def __post_init__(self) -> None:
        _at_least("verify.seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True)
class DasConfig:
    drafter: Drafter = "history"
    """Where draft tokens come from: nothing, the run's own history, a rounded copy of the policy (`self`), whichever
    of the two is worth more (`history+self`), a neural drafter (`eagle3`, `mtp`, `draft_model`: vLLM's own methods), or
    vLLM's prompt look-up (`ngram`)."""
    history: HistoryConfig = field(default_factory=HistoryConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    toggle: ToggleConfig = field(default_factory=ToggleConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    self: SelfConfig = field(default_factory=SelfConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    log_dir: str | None = None
    """Directory into which every engine writes its decisions, for `das-adapter report`; None: nowhere."""

    @property
    def own(self) -> bool:
        """Whether das-adapter drafts; else one of vLLM's methods or nothing does."""
        return self.drafter in ("history", "self", "history+self")

    @property
    def recalls(self) -> bool:
        """Whether the run's history is drafted from."""
        return self.drafter in ("history", "history+self")

    @property
    def neural(self) -> bool:
        """Whether a drafter with weights of its own drafts."""
        return self.drafter in ("eagle3", "mtp", "draft_model")

    @property
    def copies_policy(self) -> bool:
        """Whether a rounded copy of the policy drafts."""
        return self.drafter in ("self", "history+self")

    @property
    def num_draft_tokens(self) -> int:
        """Most draft tokens of a request in a step (vLLM's num_speculative_tokens)."""
        if self.neural:
            return self.draft.tokens
        return self.self.max_tokens if self.drafter == "self" else self.budget.max_draft_tokens

    @property
    def keyed(self) -> bool:
        """Whether tokens are sampled with keyed noise."""
        return self.verify.noise == "keyed" or (self.verify.noise is None and self.drafter != "none")

    @property
    def active(self) -> bool:
        """False: the host must behave as if das-adapter were not installed."""
        return self.drafter != "none" or self.keyed

    def to_dict(self) -> dict[str, Any]:
        """Plain containers that `parse` reads back to an equal config."""
        return dataclasses.asdict(self)


def parse(block: Any) -> DasConfig | None:
    """Read a `das:` block.

    Args:
        block: None (no block), a mapping (an OmegaConf node too) or a `DasConfig`.

    Returns:
        The config; None when there is no block or when it leaves the host as it is (`drafter: none` without
        keyed noise).

    Raises:
        ConfigError: an unknown or ill-typed key, a value out of range, or keys that contradict each other.
    """
    if block is None:
        return None
    config = block if isinstance(block, DasConfig) else _build(DasConfig, _plain(block), "das")
    if config.drafter != "none" and config.history.scope == "request" and config.history != HistoryConfig("request"):
        raise ConfigError("das.history.window / max_bytes / persist have no effect with das.history.scope='request': "
                          "remove them")  # fmt: skip
    if config.toggle.mode != "threshold" and config.toggle.threshold != ToggleConfig.threshold:
        raise ConfigError(f"das.toggle.threshold={config.toggle.threshold} has an effect only with "
                          f"das.toggle.mode='threshold' (found {config.toggle.mode!r}): remove it")  # fmt: skip
    _check_draft(config)
    return config if config.active else None


LOSSY = {"rejection_sample_method": ("standard", "block")}
"""Keys of vLLM's speculative_config that decide acceptance, and their values that keep the policy's distribution."""


def _check_draft(config: DasConfig) -> None:
    draft = config.draft
    if not config.neural:
        if draft != DraftConfig():
            raise ConfigError(f"das.draft has no effect with das.drafter={config.drafter!r}: remove it, or choose "
                              "'eagle3', 'mtp' or 'draft_model'")  # fmt: skip
    elif draft.model is None and config.drafter != "mtp":
        raise ConfigError(f"das.draft.model: found None, das.drafter={config.drafter!r} needs the drafter's checkpoint")
    if config.self != SelfConfig() and not config.copies_policy:
        raise ConfigError(f"das.self has no effect with das.drafter={config.drafter!r}: remove it, or choose 'self' or "
                          "'history+self'")  # fmt: skip
    if config.drafter == "history+self" and config.self.max_tokens > config.budget.max_draft_tokens:
        raise ConfigError(f"das.self.max_tokens: found {config.self.max_tokens}, allowed: at most "
                          f"das.budget.max_draft_tokens={config.budget.max_draft_tokens}")  # fmt: skip
    for key, value in draft.options.items():
        lossy = value not in LOSSY[key] if key in LOSSY else bool(re.search("synthetic|lenien|typical|posterior", key))
        if lossy and not config.verify.allow_lossy:
            raise ConfigError(f"das.draft.options.{key}: found {value!r}, with which tokens lose the policy's "
                              "distribution: remove it, or set das.verify.allow_lossy=true")  # fmt: skip
        if lossy and config.keyed:
            raise ConfigError(f"das.draft.options.{key}: found {value!r}, which needs das.verify.noise='stock' "
                              "(found 'keyed')")  # fmt: skip


def _plain(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {str(k): _plain(v) for k, v in node.items()}
    if hasattr(node, "items"):  # an OmegaConf node that is no Mapping
        return {str(k): _plain(v) for k, v in node.items()}
    return node


def _build(cls: type, found: Any, where: str) -> Any:
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: found {found!r}, expected a block with the keys {_names(cls)}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in found.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"{where}.{key}: unknown key{hint} Allowed: {_names(cls)}")
        values[key] = _value(hints[key], value, f"{where}.{key}")
    try:
        return cls(**values)
    except ConfigError as e:
        raise ConfigError(f"das.{e}") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = next(o for o in options if o is not type(None))
    if typing.get_origin(kind) is dict:
        kind = dict
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        if not isinstance(value, list):
            raise ConfigError(f"{where}: found {value!r}, expected a list")
        return [_value(item, x, f"{where}[{i}]") for i, x in enumerate(value)]
    if typing.get_origin(kind) is Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            near = difflib.get_close_matches(str(value), allowed, n=1)
            hint_ = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}: found {value!r}{hint_} Allowed: {', '.join(map(repr, allowed))}")
        return value
    if where.endswith("_bytes") and isinstance(value, str):
        return _bytes(value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where}: found {value!r} ({type(value).__name__}), expected {kind.__name__}")
    return value


def _bytes(text: str, where: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{where}: found {text!r}, expected a size such as 512MiB or 8GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _at_least(key: str, value: float, low: float, high: float | None = None) -> None:
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{key}: found {value}, allowed: {low} to {high}" if high is not None
                          else f"{key}: found {value}, allowed: {low} or more")  # fmt: skip


def _names(cls: type) -> str:
    return ", ".join(f.name for f in dataclasses.fields(cls))
