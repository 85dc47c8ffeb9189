"""What sabotaged engines have to tell of how vLLM's rejection sampler verifies
drafts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

NOTED = Counter[str]()
"""What a sabotage has to tell."""


def note_token(whose: str, drafted: int, written: int, p: Any, q: Any) -> bool:
    """Note a draft token that the rejection sampler comes to; return whether it was
    accepted.

    Of each source it is noted how many there are, how many are accepted, how often a
    token is written that the policy writes less often than it is drafted, how often
    either should be, and how often the most likely token would be accepted.

    Args:
        whose: the source.
        drafted, written: token in the draft, and in its place in the text.
        p, q: probabilities of the policy and of the drafter, float32 [vocab].
    """
    NOTED[whose] += 1
    NOTED[f"{whose}, most likely"] += float(p[q.argmax()])
    accepted = written == drafted
    rare = p < q
    _note(f"{whose}, accepted", accepted, float(p.minimum(q).sum()))
    _note(f"{whose}, rare", bool(rare[written]), float(p[rare].sum()))
    return accepted


def _note(event: str, happened: bool, chance: float) -> None:
    """Note how often something happens, how often it should, and the variance of
    that.
    """
    NOTED[event] += happened
    NOTED[f"{event}, expected"] += chance
    NOTED[f"{event}, variance"] += chance * (1 - chance)
