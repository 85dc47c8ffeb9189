"""What is wrong with a `das:` block, in words: the full key, what was found, and what
is allowed or to be written.
"""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from das_adapter.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

SUCCESSORS = {
    "das.toggle": "das.speculate",
    "das.history.persist": "das.history.load",
    "das.self.max_tokens": "das.max_draft_tokens",
    "das.draft.tokens": "das.max_draft_tokens",
}
"""What stands in the place of keys that there are no longer."""
IN_EVERY_STEP = (
    "parallel_drafting",
    "disable_padded_drafter_batch",
    "enable_adaptive_verification",
)
"""Keys of vLLM's speculative_config with which a neural drafter has to draft in every
step, as vLLM has it.
"""
MAX_MODEL_TOKENS = 16
"""Most draft tokens of a model: each takes a pass of it, and the sixteenth is hardly
ever accepted.
"""
LOSSLESS = {"rejection_sample_method": ("standard", "block")}
"""Keys of vLLM's speculative_config that decide acceptance, and their values that keep
the policy's distribution.
"""
_LOSSY_KEY = re.compile("synthetic|lenien|typical|posterior")
"""Occurs in the names of keys with which tokens lose the policy's distribution."""
_SET_BY_BLOCK = ("method", "model", "num_speculative_tokens")
"""Keys of vLLM's speculative_config that other keys of the block set."""

Values = Sequence[str | None]
"""Values of a key, one of which another key needs."""
Needs = Mapping[str, Mapping[str, Values]]
"""What keys need to have an effect, see `config.NEEDS`."""
Place = tuple[Any, ...]
"""Keys that lead to a node of a host's config."""


def message(error: ErrorDetails, model: Any, above: Place = ("das",)) -> str:
    """Return the message about one of pydantic's errors in a block that `model`, a
    `BaseModel`, read; `above`: keys over it.
    """
    location = error["loc"]
    key = _dotted((*above, *location))
    if error["type"] != "extra_forbidden":
        found = error["input"]
        reason = error["msg"].removeprefix("Value error, ")
        return f"{key}: found {found!r}: {reason}"
    *parents, name = location or ("",)
    for parent in parents:
        fields = getattr(model, "model_fields", None)
        if fields is None:  # a mapping of blocks
            model = get_args(model)[1]
        else:
            model = fields[str(parent)].annotation
    allowed = list(model.model_fields)
    hint = _hint(key, str(name), allowed)
    names = ", ".join(allowed)
    return f"{key}: unknown key{hint} Allowed: {names}"


def _hint(key: str, name: str, allowed: Sequence[str]) -> str:
    """Return what ends the sentence about an unknown key: what to write instead."""
    successor = SUCCESSORS.get(key)
    if successor is not None:
        return f"; write {successor} in its place."
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "."


def wrong(key: str, found: Any, allowed: str) -> ConfigError:
    """Return the error about a key's value."""
    return ConfigError(f"das.{key}: found {found!r}, {allowed}")


def check_host(block: str, key: str, found: Any, *allowed: Any) -> None:
    """Refuse a value of a key of the host's own config with which a block, named by its
    key, can't run.
    """
    if found not in allowed:
        values = " or ".join(map(repr, allowed))
        raise ConfigError(
            f"{block}: found {key}={found!r} beside it, allowed: {values}"
        )


def refuse_elsewhere(config: Any, block: str) -> None:
    """Refuse a block in a host's whole config where no host reads it, but for one to
    which the right place refers, and one among engine arguments; `block`: the key of
    the right place.
    """
    right_place = tuple(block.split("."))
    for place in _places_of_blocks(config):
        if place == right_place:
            continue
        found = _value_at(config, place)
        right = _value_at(config, right_place)
        if found not in (None, right):
            key = _dotted(place)
            raise ConfigError(
                f"{key}: found a block in a place where it has no effect; write it to"
                f" {block}"
            )


def _dotted(place: Place) -> str:
    """Return keys as a message calls their place."""
    return ".".join(map(str, place))


def _value_at(config: Any, place: Place) -> Any:
    """Return what is at a place of a host's config; None: nothing."""
    value = config
    for key in place:
        if isinstance(value, Mapping):
            value = value.get(key)
        else:
            value = getattr(value, key, None)
    return value


def _places_of_blocks(node: Any, above: Place = ()) -> Iterator[Place]:
    """Yield the keys that lead to what is under `das` in a host's config: whatever it
    is at the top, mappings below.
    """
    for key, value in _items_of(node):
        place = (*above, key)
        if key == "das":
            if isinstance(value, Mapping) or not above:
                yield place
        elif isinstance(value, Mapping | BaseModel) and key != "additional_config":
            yield from _places_of_blocks(value, place)


def _items_of(node: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a node of a host's config."""
    if not isinstance(node, Mapping):
        further = getattr(node, "model_extra", None) or {}  # pydantic's
        return {**vars(node), **further}.items()
    if not hasattr(node, "items_ex"):
        return node.items()
    if not len(node):
        return ()
    # OmegaConf's: what a key refers to has a place of its own, or none
    items: Iterable[tuple[Any, Any]] = node.items_ex(resolve=False)
    return items


def check_effects(config: BaseModel, needs: Needs) -> None:
    """Refuse a key that was set and has no effect."""
    for key, value in _set_keys(config):
        for setting, found, needed in lacking(config, needs, key):
            named = [repr(one) for one in needed if one is not None]
            allowed = " or ".join(named)
            raise ConfigError(
                f"das.{key}={value!r} has an effect only with das.{setting}={allowed}"
                f" (found {found!r}): remove it"
            )


def lacking(
    config: BaseModel, needs: Needs, key: str
) -> Iterator[tuple[str, Any, Values]]:
    """Yield what a key lacks to have an effect: each setting, its value, and those that
    are needed.
    """
    block = key.partition(".")[0]
    of_block = needs.get(block, {})
    of_key = needs.get(key, {})
    for setting, values in {**of_block, **of_key}.items():
        read = operator.attrgetter(setting)
        found: Any = read(config)
        if found not in values:
            yield setting, found, values


def check_draft(config: Any) -> None:
    """Refuse what does not fit the model that drafts in a block
    (`config.DasConfig`).
    """
    drafter = f"das.drafter={config.drafter!r}"
    has_checkpoint = config.draft.model is not None
    needs_checkpoint = config.neural and config.method != "mtp"
    if needs_checkpoint and not has_checkpoint:
        reason = f"{drafter} needs the drafter's checkpoint"
        raise wrong("draft.model", None, reason)
    if config.by_model and config.model_tokens > MAX_MODEL_TOKENS:
        raise wrong(
            "max_draft_tokens",
            config.max_draft_tokens,
            f"allowed with {drafter}: 1 to {MAX_MODEL_TOKENS}",
        )
    always = "das.budget='unlimited' and das.speculate='always'"
    if config.in_every_step and config.log_dir is not None:
        raise wrong(
            "log_dir",
            config.log_dir,
            f"allowed: null, because nothing is decided with {always}",
        )
    needed = None
    if not config.in_every_step:
        needed = f"das.drafter={config.method!r}, {always}"
    check_options(config.draft.options, needed)


def check_options(options: Mapping[str, Any], needed: str | None) -> None:
    """Refuse keys of vLLM's speculative_config that das-adapter sets, or with which
    tokens lose their distribution.

    `needed`: what the keys of `IN_EVERY_STEP` need; None: they are allowed.
    """
    for key, value in options.items():
        reason = None
        if key in _SET_BY_BLOCK:
            reason = "which das.drafter, das.draft.model and das.max_draft_tokens set"
        elif key in IN_EVERY_STEP and value and needed:
            reason = f"allowed only with {needed}"
        elif _is_lossy(key, value):
            reason = "with which tokens lose the policy's distribution"
        if reason is not None:
            full_key = f"draft.options.{key}"
            raise wrong(full_key, value, f"{reason}: remove it")


def _is_lossy(key: str, value: Any) -> bool:
    """Return whether tokens lose the policy's distribution with a value of a key of
    vLLM's speculative_config.
    """
    if key in LOSSLESS:
        return value not in LOSSLESS[key]
    return _LOSSY_KEY.search(key) is not None


def resembles_das(key: str) -> bool:
    """Return whether a key of the host's config is probably meant to be `das`."""
    words = re.split("[_-]", key.lower())
    first = words[0]
    if len(first) <= 2:
        return False
    near = difflib.get_close_matches(first, ["das"], cutoff=0.8)
    return bool(near)


def _set_keys(block: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys that were set, with their values."""
    for name, value in block:
        if isinstance(value, BaseModel):
            yield from _set_keys(value, f"{prefix}{name}.")
        elif name in block.model_fields_set:
            yield f"{prefix}{name}", value


def unwritable(directory: str) -> Path | None:
    """Return what keeps a directory from being written to, or made: itself, or the
    first of its parents that is there. None: nothing does.
    """
    path = Path(directory).absolute()
    while not path.exists():
        path = path.parent
    may_write = os.access(path, os.W_OK | os.X_OK)
    if may_write and path.is_dir():
        return None
    return path
