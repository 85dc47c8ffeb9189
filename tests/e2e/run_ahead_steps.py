"""What must hold of the steps of a run that writes ahead, under either host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Steps = Sequence[dict[str, Any]]


def same(some: Steps, others: Steps, keys: Sequence[str]) -> None:
    """Check that two runs have the same figures in every step."""
    for a, b in zip(some, others, strict=True):
        for key in ("das/token_hash", *keys):
            assert a[key] == b[key], key


def drafted_ahead(steps: Steps) -> list[dict[str, Any]]:
    """Check a run whose first step was not written ahead; return the steps that were,
    which repeat it.
    """
    first, *later = steps
    assert "das/run_ahead_tokens" not in first
    assert all(step["das/health"] == 1 for step in steps)
    written = [step for step in later if "das/run_ahead_tokens" in step]
    # the first step has a tail at least; one that drafts much may have none
    assert written
    tokens = sum(step["das/run_ahead_tokens"] for step in written)
    assert (
        sum(
            step["das/run_ahead_repeated"] * step["das/run_ahead_tokens"]
            for step in written
        )
        > 0.3 * tokens
    )
    return written
