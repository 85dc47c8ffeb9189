"""Work for drafters: made-up rollouts, and recorded ones of which the last sample of
each group is written again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from das_adapter.core.index.values import Int32
from das_adapter.sim.rollouts import RecordedResponse

SETTINGS = ("growing", "finished", "earlier+growing", "earlier+finished")


@dataclass(eq=False)
class Group:
    """One response to write again, and what it may draft from."""

    problem: int
    prompt: Int32
    target: Int32
    siblings: list[Int32]
    earlier: list[tuple[int, Int32]] = field(default_factory=list)
    """(step, tokens) of the same prompt's rollouts by earlier policies."""


def synthetic(
    problems: int,
    samples: int,
    mean_tokens: int,
    seed: int = 0,
    vocabulary: int = 32_000,
) -> list[RecordedResponse]:
    """Make up rollouts: a problem's samples follow the same chain of passages, vary
    some of them, and change 6 % of the tokens; lengths are log-normal (p99 about four
    times the mean), tokens follow Zipf's law. Acceptance on them is a property of this
    generator: use it only to compare drafters.
    """
    rng = np.random.default_rng(seed)

    def words(count: int) -> Int32:
        return np.minimum(rng.zipf(1.2, count), vocabulary - 1).astype(np.int32)

    shared = [words(20) for _ in range(500)]
    rollouts = []
    for problem in range(problems):
        prompt = words(100)
        passages = [[words(40) for _ in range(3)] for _ in range(8 * mean_tokens // 40)]
        for _ in range(samples):
            length = max(16, int(rng.lognormal(np.log(mean_tokens) - 0.3, 0.77)))
            parts: list[Int32] = []
            for variants in itertools.islice(passages, length // 40 + 1):
                parts.append(variants[min(2, int(rng.exponential(0.5)))])
                if rng.random() < 0.1:
                    parts.append(shared[rng.integers(len(shared))])
            tokens = np.concatenate(parts)[:length]
            changed = rng.random(len(tokens)) < 0.06
            tokens = np.where(changed, words(len(tokens)), tokens)
            rollouts.append(RecordedResponse(problem, 0, 0, prompt, tokens))
    return rollouts


def groups(
    rollouts: Sequence[RecordedResponse], samples: int | None = None, most: int = 5
) -> list[Group]:
    """Form groups of `samples` responses of one problem, step and run, at most `most`
    of each.

    Args:
        samples: None: 8 where the smallest set of siblings has that many, else as many
            as it has.
    """
    members: dict[int, dict[tuple[int, int], list[RecordedResponse]]] = {}
    for r in rollouts:
        members.setdefault(r.problem, {}).setdefault((r.step, r.run), []).append(r)
    if samples is None:
        samples = min(
            8,
            min(
                len(texts)
                for policies in members.values()
                for texts in policies.values()
            ),
        )
    found: list[Group] = []
    for policies in members.values():
        for (step, _run), own in sorted(policies.items()):
            earlier = [
                (r.step, r.tokens)
                for (s, _), texts in policies.items()
                if s < step
                for r in texts
            ]
            for c in range(min(most, len(own) // samples)):
                *siblings, target = own[c * samples : (c + 1) * samples]
                found.append(
                    Group(
                        len(found),
                        target.prompt,
                        target.tokens,
                        [s.tokens for s in siblings],
                        earlier,
                    )
                )
    return found


def batches(found: Sequence[Group], size: int) -> Iterator[list[Group]]:
    """Yield the groups, `size` at a time."""
    for i in range(0, len(found), size):
        yield list(found[i : i + size])
