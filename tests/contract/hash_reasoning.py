"""A plug-in of vLLM's: a reasoning parser for the tiny policy, whose reasoning ends with
`####`. It looks at the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.reasoning import ReasoningParser, ReasoningParserManager

MARK = "####"


class HashReasoning(ReasoningParser):
    """Everything behind the mark is the answer."""

    def __init__(self, tokenizer: Any, *args: Any, **more: Any) -> None:
        super().__init__(tokenizer, *args, **more)
        self._mark = list(tokenizer.encode(MARK, add_special_tokens=False))

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether the mark is in these tokens."""
        ids = list(input_ids)
        size = len(self._mark)
        begins = range(len(ids) - size + 1)
        return any(ids[i : i + size] == self._mark for i in begins)

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Sequence[int]
    ) -> bool:
        """Return whether the mark is in the text so far."""
        return self.is_reasoning_end(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Nobody asks for them."""
        return []

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[None, str]:
        """Nobody asks for it."""
        return None, model_output

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        *ids: Sequence[int],
    ) -> Any:
        """Return what a step adds to the reasoning, the mark included, and to the
        answer, as vLLM's `DeltaMessage`, which lies elsewhere in other versions.
        """
        from vllm.entrypoints.generate.base.protocol import DeltaMessage

        begin = current_text.find(MARK)
        end = len(current_text) if begin < 0 else begin + len(MARK)
        before = len(previous_text)
        found = DeltaMessage()
        if end > before:
            found.reasoning = current_text[before:end]
        if end < len(current_text):
            found.content = current_text[max(end, before) :]
        return found


ReasoningParserManager.register_module("hash", module=HashReasoning)
