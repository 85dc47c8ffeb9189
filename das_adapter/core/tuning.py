"""The one table of the numbers that decide policy: how much is drafted, for whom, when
an engine rests, and which text is kept.

Each number has a unit and a reason: the file of the result that shows it, the paper's
equation it comes from, or "a guess". Sizes of buffers, formats of files and limits of
the hosts are not here: they decide nothing about drafts.

Code reads a number as `tuning.NAME`. The C++ core reads those of its section from a
header that is generated from this file when the package is built.
"""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value", int, float, tuple[float, ...])


def number(value: Value, unit: str, reason: str) -> Value:
    """Return `value`; `unit` and `reason` are for the reader and for
    `docs/tuning.md`.
    """
    return value


# verl/router.py

REQUESTS_PER_LENGTHS = number(
    1024,
    "requests",
    "a guess: after so many requests the ledger is asked for lengths again",
)

# nemo_rl/generation.py

LENGTHS_FOR_S = number(
    10.0,
    "seconds",
    "a guess: so long an asynchronous run uses the same expected lengths",
)
