"""Structured outputs behind reasoning are allowed where vLLM holds their grammar."""

from __future__ import annotations

from typing import Any

import pytest

from das_adapter.engine.reasoning import changed_by_drafts, told_of_step


class Manager:
    """vLLM's manager of grammars from 0.30 on."""

    def accept_tokens(self, request: Any, new_token_ids: list[int]) -> bool:
        return True


class ManagerOf024To026(Manager):
    def should_advance(self, request: Any) -> bool:
        return True


class ManagerOf027To029(Manager):
    def should_advance(self, request: Any, new_token_ids: Any = None) -> bool:
        return True


@pytest.mark.parametrize(
    ("manager", "told"),
    [(Manager, True), (ManagerOf024To026, False), (ManagerOf027To029, True)],
)
def test_a_manager_that_is_not_told_the_tokens_of_a_step_loses_a_grammar(
    manager: type, told: bool
) -> None:
    assert told_of_step(manager) == told


class Parser:
    """A parser that looks at the tokens alone."""

    def __init__(self) -> None:
        self.end = 3

    def is_reasoning_end(self, ids: list[int]) -> bool:
        return self.end in ids

    def extract_reasoning(self, text: str) -> str:
        self.text = text
        return text


class Step3p5(Parser):
    """As vLLM's up to 0.29."""

    def is_reasoning_end_streaming(self, ids: list[int], delta: list[int]) -> bool:
        was_pending = self._end_token_pending
        self._end_token_pending = self.end in delta
        return was_pending


class Inherits(Step3p5):
    pass


@pytest.mark.parametrize(
    ("parser", "changed"),
    [(Parser, False), (Step3p5, True), (Inherits, True), (None, False)],
)
def test_a_parser_that_remembers_what_it_was_asked_is_changed_by_drafts(
    parser: type | None, changed: bool
) -> None:
    assert changed_by_drafts(parser) == changed
