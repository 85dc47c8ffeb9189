"""A plug-in of vLLM's: a tool parser for which the answer behind the reasoning is the
argument of a call.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
)
from vllm.tool_parsers import ToolParser, ToolParserManager


class AnswerIsCall(ToolParser):
    """Calls one tool, `answer`."""

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *more: Any
    ) -> DeltaMessage | None:
        """Return what a step adds to the argument."""
        if not delta_text:
            return None
        if previous_text:
            part = DeltaFunctionCall(arguments=delta_text)
            call = DeltaToolCall(index=0, function=part)
        else:
            part = DeltaFunctionCall(name="answer", arguments=delta_text)
            call = DeltaToolCall(index=0, id="call", type="function", function=part)
        return DeltaMessage(tool_calls=[call])


ToolParserManager.register_module("hash", module=AnswerIsCall)
