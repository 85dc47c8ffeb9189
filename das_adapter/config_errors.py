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
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

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
Item = tuple[Any, Any]
"""A key of a config and its value."""
Items = Iterable[Item]


def message(error: ErrorDetails, model: Any, above: Place = ("das",)) -> str:
    """Return the message about one of pydantic's errors in a block that `model`, a
    `BaseModel`, read; `above`: keys over it.
    """
    location = error["loc"]
    place = (*above, *location)
    key = _dotted(place)
    if error["type"] != "extra_forbidden":
        found = error["input"]
        text = error["msg"]
        reason = text.removeprefix("Value error, ")
        return f"{key}: found {found!r}: {reason}"
    *parents, name = location or ("",)
    for parent in parents:
        model = _model_of(model, str(parent))
    allowed = list(model.model_fields)
    hint = _hint(key, str(name), allowed)
    names = ", ".join(allowed)
    return f"{key}: unknown key{hint} Allowed: {names}"


def _model_of(model: Any, key: str) -> Any:
    """Return the model that reads the block under a key of a model's block."""
    fields = getattr(model, "model_fields", None)
    if fields is None:  # a mapping of blocks
        _, value_type = get_args(model)
        return value_type
    field = fields[key]
    return field.annotation


def _hint(key: str, name: str, allowed: Sequence[str]) -> str:
    """Return what ends the sentence about an unknown key: what to write instead."""
    successor = SUCCESSORS.get(key)
    if successor is not None:
        return f"; write {successor} in its place."
    similar = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    if not similar:
        return "."
    nearest = similar[0]
    return f"; did you mean {nearest!r}?"


def wrong(key: str, found: Any, allowed: str) -> ConfigError:
    """Return the error about a key's value."""
    reason = f"das.{key}: found {found!r}, {allowed}"
    return ConfigError(reason)


def check_host(
    block: str,
    key: str,
    found: Any,
    *allowed: Any,
) -> None:
    """Refuse a value of a key of the host's own config with which a block, named by its
    key, can't run.
    """
    if found in allowed:
        return
    values = " or ".join(map(repr, allowed))
    raise ConfigError(f"{block}: found {key}={found!r} beside it, allowed: {values}")


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
        has_no_effect = found not in (None, right)
        if has_no_effect:
            key = _dotted(place)
            raise ConfigError(
                f"{key}: found a block in a place where it has no effect; write it to"
                f" {block}"
            )


def _dotted(place: Place) -> str:
    """Return keys as a message calls their place."""
    keys = map(str, place)
    return ".".join(keys)


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
        is_mapping = isinstance(value, Mapping)
        if key == "das":
            if is_mapping or not above:
                yield place
            continue
        if key == "additional_config":
            continue
        if is_mapping or isinstance(value, BaseModel):
            yield from _places_of_blocks(value, place)


def _items_of(node: Any) -> Items:
    """Return the keys and values of a node of a host's config."""
    if not isinstance(node, Mapping):
        # pydantic's
        further = getattr(node, "model_extra", None) or {}
        values = {**vars(node), **further}
        return values.items()
    if not hasattr(node, "items_ex"):
        return node.items()
    if not len(node):
        return ()
    # OmegaConf's: what a key refers to has a place of its own, or none
    items: Items = node.items_ex(resolve=False)
    return items


def check_effects(config: BaseModel, needs: Needs) -> None:
    """Refuse a key that was set and has no effect."""
    for key, value in _set_keys(config):
        for lack in lacking(config, needs, key):
            allowed = []
            for needed in lack.needed:
                if needed is not None:
                    allowed.append(repr(needed))
            values = " or ".join(allowed)
            raise ConfigError(
                f"das.{key}={value!r} has an effect only with"
                f" das.{lack.setting}={values} (found {lack.found!r}): remove it"
            )


class Lack(NamedTuple):
    """What a key lacks to have an effect."""

    setting: str
    """Another key."""
    found: Any
    """The other key's value."""
    needed: Values
    """Values of the other key, one of which is needed."""


def lacking(
    config: BaseModel,
    needs: Needs,
    key: str,
) -> Iterator[Lack]:
    """Yield what a key lacks to have an effect."""
    block, _, _ = key.partition(".")
    of_block = needs.get(block, {})
    of_key = needs.get(key, {})
    needs_of_both = {**of_block, **of_key}
    for setting, needed in needs_of_both.items():
        read = operator.attrgetter(setting)
        found: Any = read(config)
        if found not in needed:
            yield Lack(setting, found, needed)


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
        in_every_step = key in IN_EVERY_STEP and value
        if key in _SET_BY_BLOCK:
            reason = "which das.drafter, das.draft.model and das.max_draft_tokens set"
        elif in_every_step and needed:
            reason = f"allowed only with {needed}"
        elif _is_lossy(key, value):
            reason = "with which tokens lose the policy's distribution"
        else:
            continue
        full_key = f"draft.options.{key}"
        raise wrong(full_key, value, f"{reason}: remove it")


def _is_lossy(key: str, value: Any) -> bool:
    """Return whether tokens lose the policy's distribution with a value of a key of
    vLLM's speculative_config.
    """
    lossless = LOSSLESS.get(key)
    if lossless is not None:
        return value not in lossless
    match = _LOSSY_KEY.search(key)
    return match is not None


def resembles_das(key: str) -> bool:
    """Return whether a key of the host's config is probably meant to be `das`."""
    words = re.split("[_-]", key.lower())
    first = words[0]
    if len(first) <= 2:
        return False
    similar = difflib.get_close_matches(first, ["das"], cutoff=0.8)
    return bool(similar)


def _set_keys(block: BaseModel, prefix: str = "") -> Iterator[Item]:
    """Yield the keys that were set, with their values."""
    for name, value in block:
        key = prefix + name
        if isinstance(value, BaseModel):
            yield from _set_keys(value, f"{key}.")
            continue
        is_set = name in block.model_fields_set
        if is_set:
            yield key, value


def unwritable(directory: str) -> Path | None:
    """Return what keeps a directory from being written to, or made: itself, or the
    first of its parents that is there. None: nothing does.
    """
    path = Path(directory)
    path = path.absolute()
    while not path.exists():
        path = path.parent
    may_write = os.access(path, os.W_OK | os.X_OK)
    if may_write and path.is_dir():
        return None
    return path
