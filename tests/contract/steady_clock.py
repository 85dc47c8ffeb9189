"""A clock for das-adapter in tests: what it decides does not depend on the machine."""

from __future__ import annotations

import inspect
import time
from typing import Any


class Clock:
    """Tells das-adapter the time: every look takes 0.1 ms."""

    def __init__(self) -> None:
        self.now = 0.0
        real = time.perf_counter

        def perf_counter() -> float:
            here = inspect.currentframe()
            caller = here and here.f_back
            if not caller or not caller.f_globals["__name__"].startswith(
                "das_adapter.engine."
            ):
                return real()
            self.now += 1e-4
            return self.now

        time.perf_counter = perf_counter


def taking(clock: Clock, seconds: float, stock: Any) -> Any:
    """Let a call take so many seconds of the clock."""

    def call(*args: Any, **named: Any) -> Any:
        clock.now += seconds
        return stock(*args, **named)

    return call


def slow_policy() -> None:
    """Let a step of the policy take 30 ms on the V1 runner, whatever it carries: every
    draft pays.
    """
    from das_adapter.engine.v1.proposer import Proposer

    Proposer.time_step = taking(Clock(), 0.03, Proposer.time_step)
