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

# What is written ahead of the next steps (service/run_ahead.py, sim/pipeline.py)

RUN_AHEAD_STEPS = number(
    4,
    "steps that are written ahead",
    "a guess: with one, a step that was written ahead leaves hardly an engine idle to"
    " write the next; a long tail is enough for several; what was written more weight"
    " syncs ago is repeated less",
)
RUN_AHEAD_POLL_S = number(0.2, "s between two looks for idle replicas", "a guess")
RUN_AHEAD_MIN_REPEATED_SHARE = number(
    0.05,
    "share of the tokens written ahead that requests must repeat, or it rests",
    "a guess",
)
RUN_AHEAD_REST_STEPS = number(
    8, "steps of the first rest after a step that was not worth it", "a guess"
)
RUN_AHEAD_MAX_REST_STEPS = number(64, "steps of a rest, at most", "a guess")
