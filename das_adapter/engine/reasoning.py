"""Whether vLLM holds a grammar that begins behind a model's reasoning, where a step
brings several tokens. Its scheduler, not das-adapter, asks the reasoning parser.
"""

from __future__ import annotations

import dis
import inspect
from typing import Any


def lost_grammar(made: Any) -> str | None:
    """Return why structured outputs behind the reasoning of an engine with this config
    (vLLM's `VllmConfig`) may not hold for all tokens of a step, as what is allowed;
    None: they hold.
    """
    asked = getattr(made, "structured_outputs_config", None)
    if asked is None or not asked.reasoning_parser or asked.enable_in_reasoning:
        return None
    from vllm.v1.structured_output import StructuredOutputManager

    if not told_of_step(StructuredOutputManager):
        return "from vLLM 0.27 on"
    name = asked.reasoning_parser
    if changed_by_drafts(_parser(name)):
        return f"that keeps no state (found {name!r}), or from vLLM 0.30 on"
    return None


def told_of_step(manager: type) -> bool:
    """Return whether vLLM's manager of grammars sees all tokens of a step when it
    decides whether reasoning has ended: from 0.27 on; later it has no such method.
    """
    method = getattr(manager, "should_advance", None)
    return method is None or "new_token_ids" in inspect.signature(method).parameters


def changed_by_drafts(parser: type | None) -> bool:
    """Return whether a reasoning parser remembers what it was asked about: vLLM asks it
    about drafts too, which may be rejected.
    """
    for name in dir(parser):
        method = getattr(parser, name)
        if name.startswith("is_reasoning_end") and inspect.isfunction(method):
            operations = {step.opname for step in dis.get_instructions(method)}
            if operations & {"STORE_ATTR", "DELETE_ATTR"}:
                return True
    return False


def _parser(name: str) -> type | None:
    """Return the reasoning parser of a name; None: there is none of that name yet, and
    vLLM says so itself.
    """
    from vllm.reasoning import ReasoningParserManager

    try:
        found: type = ReasoningParserManager.get_reasoning_parser(name)
    except (ImportError, KeyError):
        return None
    return found
