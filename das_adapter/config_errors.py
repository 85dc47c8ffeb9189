"""What is wrong with a `das:` block, in words: the full key, what was found, and what is allowed or to be written."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from das_adapter.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

RETIRED = {
    "toggle": "write `speculate: auto`",
    "toggle.mode": "write `speculate: {value}`",
    "toggle.threshold": "write `speculate: {value}`",
    "toggle.margin": "it is a constant now, 0.05: remove it",
    "toggle.calibration": "write `calibration: {value}`",
    "budget.policy": "write `budget: {value}`",
    "budget.max_draft_tokens": "write `max_draft_tokens: {value}`",
    "budget.admission": "drafts are never admitted by request now: remove it",
    "budget.min_chance": "it is a constant now, 0.15, which `budget: unlimited` does without: remove it",
    "routing.policy": "write `routing: {value}`",
    "routing.leaders": "leaders go first wherever that pays: remove it",
    "history.window": "it is a constant now, 8 visits: remove it",
    "history.persist": "write `load: {value}` under `history`",
    "self.max_tokens": "write `max_draft_tokens: {value}`",
    "draft.tokens": "write `max_draft_tokens: {value}`",
    "verify.allow_lossy": "options that change the policy's distribution are always refused: remove it",
}
"""What to do about each key that earlier versions had; `{value}`: see `_VALUES`."""
_VALUES = {
    ("toggle.mode", "roofline"): "auto",
    ("toggle.mode", "off"): "always",
    ("toggle.mode", "False"): "always",
    ("toggle.mode", "threshold"): "N` with N as das.toggle.threshold was (32 by default), as in `speculate: 32",
    ("budget.policy", "classes"): "das",
}
"""What is written today for an old key's value; the others are as they were."""
IN_EVERY_STEP = ("parallel_drafting", "disable_padded_drafter_batch")
"""Keys of vLLM's speculative_config with which a neural drafter has to draft in every step, as vLLM has it."""
LOSSY = {"rejection_sample_method": ("standard", "block")}
"""Keys of vLLM's speculative_config that decide acceptance, and their values that keep the policy's distribution."""
_EXPECTED = {
    "int_type": "an integer",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a mapping",
    "string_too_short": "a path",
}


def retired(block: dict[str, Any]) -> list[str]:
    """Say what to write for every key of a block that is no longer one."""
    said = []
    for key, value in _leaves(block):
        if key in RETIRED:
            plain = value if isinstance(value, str) else json.dumps(value)
            sentence = RETIRED[key].format(value=_VALUES.get((key, str(value)), plain))
            said.append(f"das.{key}: found {value!r}; the key is retired: {sentence}")
    return said


def _leaves(block: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, inner in block.items():
        if isinstance(inner, dict) and inner:
            yield from ((f"{name}.{key}", value) for key, value in inner.items())
        else:
            yield name, inner


def message(error: ErrorDetails, model: type[BaseModel]) -> str:
    """Say one of pydantic's errors about a block that `model` read."""
    loc, kind, found = error["loc"], error["type"], error["input"]
    key = "das" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    block = _innermost(model, loc)
    if kind == "extra_forbidden":
        return f"{key}: unknown key{_suggestion(loc[-1], block.model_fields)}{', '.join(block.model_fields)}"
    if kind == "model_type":
        return f"{key}: found {found!r}, expected a block with the keys {', '.join(block.model_fields)}"
    if kind == "literal_error":
        allowed = error["ctx"]["expected"]
        hint = _suggestion(found, re.findall("'(.+?)'", allowed))
        return f"{key}: found {found!r}{hint}{allowed}"
    if kind in ("greater_than_equal", "less_than_equal"):
        return f"{key}: found {found}, allowed: {bounds(block.model_fields[str(loc[-1])])}"
    if kind == "value_error":
        return f"{key}: found {found!r}, {error['ctx']['error']}"
    return f"{key}: found {found!r} ({type(found).__name__}), expected {_EXPECTED.get(kind, error['msg'])}"


def wrong(key: str, found: Any, allowed: str) -> ConfigError:
    """Make the error of a key's value."""
    return ConfigError(f"das.{key}: found {found!r}, {allowed}")


def check_effects(config: BaseModel, needs: Mapping[str, Mapping[str, Sequence[str | None]]]) -> None:
    """Refuse a key that was set and has no effect; `needs`: see `config.NEEDS`."""
    for key, value in _set_keys(config):
        for setting, values in {**needs.get(key.partition(".")[0], {}), **needs.get(key, {})}.items():
            found: Any = functools.reduce(getattr, setting.split("."), config)
            if found not in values:
                *most, last = (repr(value) for value in values if value is not None)
                either = f"{', '.join(most)} or {last}" if most else last
                raise ConfigError(
                    f"das.{key}={value!r} has an effect only with das.{setting}={either} (found {found!r}): remove it"
                )


def check_options(options: Mapping[str, Any], needed: str | None) -> None:
    """Refuse keys of vLLM's speculative_config that das-adapter sets, or with which tokens lose their distribution.

    `needed`: what the keys of `IN_EVERY_STEP` need; None: they are allowed.
    """
    for key, value in options.items():
        refused = None
        if key in ("method", "model", "num_speculative_tokens"):
            refused = "which das.drafter, das.draft.model and das.max_draft_tokens set"
        elif value and key in IN_EVERY_STEP and needed:
            refused = f"allowed only with {needed}"
        elif value not in LOSSY[key] if key in LOSSY else re.search("synthetic|lenien|typical|posterior", key):
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


def bounds(field: FieldInfo) -> str:
    """Describe the range of a key's values, such as "1 to 128"; empty where it has none."""
    found = {name: getattr(m, name) for m in field.metadata for name in ("ge", "le") if hasattr(m, name)}
    if not found:
        return ""
    high = "2^63 - 1" if found.get("le") == 2**63 - 1 else found.get("le")
    return f"{found['ge']} or more" if high is None else f"{found['ge']} to {high}"


def _innermost(model: type[BaseModel], loc: Iterable[int | str]) -> type[BaseModel]:
    """Return the innermost block that a key names or lies in."""
    for part in loc:
        inner = getattr(model.model_fields.get(str(part)), "annotation", None)
        model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else model
    return model


def _suggestion(word: Any, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(word), list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}? Allowed: " if near else ". Allowed: "
