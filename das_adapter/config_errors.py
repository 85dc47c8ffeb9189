"""What is wrong with a `das:` block, in words: the full key, what was found, and what
is allowed or to be written.
"""

from __future__ import annotations

import difflib
import functools
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
MOST_BY_MODEL = 16
"""Most draft tokens of a model: each takes a pass of it, and the sixteenth is hardly
ever accepted.
"""
LOSSY = {"rejection_sample_method": ("standard", "block")}
"""Keys of vLLM's speculative_config that decide acceptance, and their values that keep
the policy's distribution.
"""


def message(error: ErrorDetails, model: Any, above: tuple[str, ...] = ("das",)) -> str:
    """Say one of pydantic's errors about a block that `model`, a `BaseModel`, read;
    `above`: keys over it.
    """
    *parents, name = error["loc"] or ("",)
    key = ".".join(map(str, (*above, *error["loc"])))
    if error["type"] != "extra_forbidden":
        return (
            f"{key}: found {error['input']!r}:"
            f" {error['msg'].removeprefix('Value error, ')}"
        )
    for parent in parents:
        # of a block; else it is a mapping of blocks
        fields = getattr(model, "model_fields", None)
        model = get_args(model)[1] if fields is None else fields[str(parent)].annotation
    near = difflib.get_close_matches(str(name), model.model_fields, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    hint = f"; write {SUCCESSORS[key]} in its place." if key in SUCCESSORS else hint
    return f"{key}: unknown key{hint} Allowed: {', '.join(model.model_fields)}"


def wrong(key: str, found: Any, allowed: str) -> ConfigError:
    """Make the error of a key's value."""
    return ConfigError(f"das.{key}: found {found!r}, {allowed}")


def check_host(block: str, key: str, found: Any, *allowed: Any) -> None:
    """Refuse a value of a key of the host's own config with which a block, named by its
    key, can't run.
    """
    if found not in allowed:
        raise ConfigError(
            f"{block}: found {key}={found!r} beside it, allowed:"
            f" {' or '.join(map(repr, allowed))}"
        )


def refuse_elsewhere(config: Any, block: str) -> None:
    """Refuse a block in a host's whole config where no host reads it, but for one to
    which the right place refers, and one among engine arguments; `block`: the key of
    the right place.
    """

    def at(place: Iterable[Any]) -> Any:
        return functools.reduce(within, place, config)

    def within(node: Any, key: Any) -> Any:
        return node.get(key) if isinstance(node, Mapping) else getattr(node, key, None)

    right = tuple(block.split("."))
    for place in _places_of_blocks(config):
        if place != right and at(place) not in (None, at(right)):
            key = ".".join(map(str, place))
            raise ConfigError(
                f"{key}: found a block in a place where it has no effect; write it to"
                f" {block}"
            )


def _places_of_blocks(
    node: Any, above: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to what is under `das` in a host's config: whatever it
    is at the top, mappings below.
    """
    items: Iterable[tuple[Any, Any]]
    if not isinstance(node, Mapping):
        items = {
            **vars(node),
            **(getattr(node, "model_extra", None) or {}),
        }.items()  # pydantic's
    elif hasattr(
        node, "items_ex"
    ):  # OmegaConf's: what a key refers to has a place of its own, or none
        items = node.items_ex(resolve=False) if len(node) else []
    else:
        items = node.items()
    for key, value in items:
        if key == "das":
            yield from [(*above, key)] * (isinstance(value, Mapping) or not above)
        elif isinstance(value, Mapping | BaseModel) and key != "additional_config":
            yield from _places_of_blocks(value, (*above, key))


def check_effects(
    config: BaseModel, needs: Mapping[str, Mapping[str, Sequence[str | None]]]
) -> None:
    """Refuse a key that was set and has no effect; `needs`: see `config.NEEDS`."""
    for key, value in _set_keys(config):
        for setting, found, values in lacking(config, needs, key):
            allowed = " or ".join(repr(value) for value in values if value is not None)
            raise ConfigError(
                f"das.{key}={value!r} has an effect only with das.{setting}={allowed}"
                f" (found {found!r}): remove it"
            )


def lacking(
    config: BaseModel, needs: Mapping[str, Mapping[str, Sequence[str | None]]], key: str
) -> Iterator[tuple[str, Any, Sequence[str | None]]]:
    """Yield what a key lacks to have an effect: each setting, its value, and those that
    are needed; `needs`: see `config.NEEDS`.
    """
    for setting, values in {
        **needs.get(key.partition(".")[0], {}),
        **needs.get(key, {}),
    }.items():
        found: Any = functools.reduce(getattr, setting.split("."), config)
        if found not in values:
            yield setting, found, values


def check_draft(config: Any) -> None:
    """Refuse what does not fit the model that drafts in a block
    (`config.DasConfig`).
    """
    drafter = f"das.drafter={config.drafter!r}"
    if config.neural and config.method != "mtp" and config.draft.model is None:
        raise wrong("draft.model", None, f"{drafter} needs the drafter's checkpoint")
    if config.by_model and config.model_tokens > MOST_BY_MODEL:
        raise wrong(
            "max_draft_tokens",
            config.max_draft_tokens,
            f"allowed with {drafter}: 1 to {MOST_BY_MODEL}",
        )
    always = "das.budget='unlimited' and das.speculate='always'"
    if config.in_every_step and config.log_dir is not None:
        raise wrong(
            "log_dir",
            config.log_dir,
            f"allowed: null, because nothing is decided with {always}",
        )
    check_options(
        config.draft.options,
        None if config.in_every_step else f"das.drafter={config.method!r}, {always}",
    )


def check_options(options: Mapping[str, Any], needed: str | None) -> None:
    """Refuse keys of vLLM's speculative_config that das-adapter sets, or with which
    tokens lose their distribution.

    `needed`: what the keys of `IN_EVERY_STEP` need; None: they are allowed.
    """
    for key, value in options.items():
        refused = None
        if key in ("method", "model", "num_speculative_tokens"):
            refused = "which das.drafter, das.draft.model and das.max_draft_tokens set"
        elif value and key in IN_EVERY_STEP and needed:
            refused = f"allowed only with {needed}"
        elif (
            value not in LOSSY[key]
            if key in LOSSY
            else re.search("synthetic|lenien|typical|posterior", key)
        ):
            refused = "with which tokens lose the policy's distribution"
        if refused:
            raise wrong(f"draft.options.{key}", value, f"{refused}: remove it")


def resembles_das(key: str) -> bool:
    """Return whether a key of the host's config is probably meant to be `das`."""
    word = re.split("[_-]", key.lower())[0]
    return len(word) > 2 and bool(difflib.get_close_matches(word, ["das"], cutoff=0.8))


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
    there = next(place for place in (path, *path.parents) if place.exists())
    return None if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else there
