"""Notes with which keys an engine draws tokens: that of each token is its true
position's, and is used once.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from jobs import Request

Key = tuple[int, int]
"""Seed of a request, and position of the token that the policy has read."""


class Audit:
    """Of one engine in this process, to be made before it; of drafts only those that
    the policy's own draw confirms are kept.
    """

    def __init__(self, runner: int) -> None:
        """
        Args:
            runner: vLLM's model runner, 1 or 2.
        """
        self.drawn: dict[Key, int] = {}
        """The token that was drawn last with each key."""
        self.kept = Counter[Key]()
        """How many tokens that requests got were drawn with each key."""
        (self._watch_v1 if runner == 1 else self._watch_v2)()

    def clear(self) -> None:
        """Forget what was drawn."""
        self.drawn.clear()
        self.kept.clear()

    def misplaced(self, request: Request, text: list[int]) -> int:
        """Count the tokens of a request that were not drawn with the key of their true
        position.
        """
        if request.params.get("temperature") == 0.0:
            return 0
        return sum(
            self.drawn.get(key) != token
            for key, token in zip(_keys(request, text), text, strict=False)
        )

    def reused(self, request: Request, text: list[int]) -> int:
        """Count the keys of a request's positions with which not exactly one token was
        written.
        """
        return sum(self.kept[key] != 1 for key in _keys(request, text))

    def _watch_v1(self) -> None:
        from das_adapter.engine.v1 import verification
        from das_adapter.engine.v1.worker import HostWorkerState

        draw = verification.keyed_sample
        key = HostWorkerState.keys
        count = HostWorkerState.count
        # keys of each request's rows, of steps whose tokens are not on the host yet
        steps = deque[list[list[Key]]]()

        def keyed_sample(logits: Any, keys: Any) -> Any:
            found = draw(logits, keys)
            self.drawn.update(zip(_pairs(*keys), found.tolist(), strict=True))
            return found

        def keys(state: Any, metadata: Any) -> Any:
            found = key(state, metadata)
            rows = _pairs(*found)
            at = 0
            steps.append([])
            for drafted in (
                [0] * len(rows) if metadata is None else metadata.num_draft_tokens
            ):
                steps[-1].append(rows[at : at + drafted + 1])
                at += drafted + 1
            return found

        def counted(state: Any, sampled: list[list[int]], *args: Any) -> None:
            # none where keys failed
            for rows, tokens in zip(
                steps.popleft() if steps else (), sampled, strict=False
            ):
                self.kept.update(rows[: len(tokens)])
            count(state, sampled, *args)

        verification.keyed_sample = keyed_sample
        # type: ignore[method-assign]
        HostWorkerState.keys = keys
        HostWorkerState.count = counted

    def _watch_v2(self) -> None:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        from vllm.v1.worker.gpu.sample import gumbel, sampler

        draw = gumbel.gumbel_sample
        step = GPUModelRunner.sample
        rows: list[tuple[Key, int]] | None = (
            None  # keys and tokens of a step's rows; None: a drafter draws
        )

        def gumbel_sample(
            logits: Any,
            slots: Any,
            temperature: Any,
            seeds: Any,
            positions: Any,
            *args: Any,
            **others: Any,
        ) -> Any:
            tokens = draw(logits, slots, temperature, seeds, positions, *args, **others)
            if rows is not None:
                rows.extend(
                    zip(_pairs(seeds[slots], positions), tokens.tolist(), strict=True)
                )
            return tokens

        def sample(runner: Any, hidden: Any, batch: Any, grammar: Any) -> Any:
            nonlocal rows
            rows = []
            found = step(runner, hidden, batch, grammar)
            self.drawn.update(rows)
            firsts = batch.cu_num_logits.tolist()
            for first, count in zip(firsts, found[1].tolist(), strict=False):
                self.kept.update(key for key, _ in rows[first : first + count])
            rows = None
            return found

        gumbel.gumbel_sample = sampler.gumbel_sample = gumbel_sample
        GPUModelRunner.sample = sample


def _pairs(seeds: Any, positions: Any) -> list[Key]:
    return list(zip(seeds.tolist(), positions.tolist(), strict=True))


def _keys(request: Request, text: list[int]) -> list[Key]:
    """Return the keys of the true positions of a request's tokens; none of a request
    whose seed is not known here.
    """
    first = len(request.prompt) - 1
    return (
        []
        if request.seed is None
        else [(request.seed, first + i) for i in range(len(text))]
    )
