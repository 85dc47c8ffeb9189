"""Parts of das-adapter that are broken or slowed down on the V1 runner, to see that
they are needed or that nothing depends on them.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from between_rounds import drafter_without_weights
from noting import NOTED, note_token
from steady_clock import Clock, slow_policy, taking

from das_adapter.core import tuning
from das_adapter.core.account import Account
from das_adapter.cpu import vllm_fixes
from das_adapter.engine import rehearsal
from das_adapter.engine.history import HistorySource
from das_adapter.engine.policy_copy import PolicyCopy
from das_adapter.engine.rehearsal import TOKEN
from das_adapter.engine.v1 import neural_drafts, verification
from das_adapter.engine.v1.copy_drafts import CopySource
from das_adapter.engine.v1.model_source import ModelSource
from das_adapter.engine.v1.proposer import Proposer
from das_adapter.engine.v1.worker import HostWorkerState


def garbage_drafts() -> None:
    """Draft arbitrary tokens, while drafters are asked."""
    Proposer.begin_drafts = _garbage


def _garbage(self: Any, sampled: list[list[int]], *_: Any) -> list[list[int]]:
    if self.engine.policy.idle:
        return [[] for _ in sampled]
    if self.engine.rehearsing:
        return [[TOKEN] if tokens else [] for tokens in sampled]
    rng = random.Random(len(sampled))
    return [
        [rng.randrange(90) for _ in range(rng.randrange(17))] if tokens else []
        for tokens in sampled
    ]


def failing_drafter() -> None:
    """Draft arbitrary tokens, and fail once there is a history or a long text."""

    def propose(self: Any, sampled: list[list[int]], *args: Any) -> list[list[int]]:
        if self.engine.history.index.tokens or max(args[0][: len(sampled)]) > 60:
            raise RuntimeError("the drafter is broken on purpose")
        return _garbage(self, sampled)

    Proposer.begin_drafts = propose


def failing_once() -> None:
    """Fail at a long text of a client's while there is no history."""
    stock = Proposer.begin_drafts

    def propose(self: Any, sampled: list[list[int]], *args: Any) -> Any:
        is_long = max(args[0][: len(sampled)]) > 60 and not self.engine.rehearsing
        if is_long and not self.engine.history.index.tokens:
            self.engine.live.clear()  # whatever state it is in
            raise RuntimeError("the drafter is broken on purpose")
        return stock(self, sampled, *args)

    Proposer.begin_drafts = propose


def failing_search() -> None:
    """Fail where the host's search for drafts is read."""

    def found(_: Any) -> Any:
        raise RuntimeError("the search is broken on purpose")

    HistorySource.found_drafts = found


def dear_drafter() -> None:
    """Let a look for drafts take ten times as long as a step, and look in every other
    step.
    """
    tuning.JUDGED_STEPS = 24
    tuning.LOOK_STEPS = 2
    clock = Clock()
    Proposer.time_step = taking(clock, 0.003, Proposer.time_step)
    HistorySource.begin_search = taking(clock, 0.03, HistorySource.begin_search)


def failing_pass() -> None:
    """Let the second rank fail in the fifth of the drafts that all ranks make
    together.
    """
    stock = CopySource._draft

    def draft(self: Any, *args: Any) -> Any:
        self.drafted = getattr(self, "drafted", 0) + 1
        if not self._drafter.leads and self.drafted == 5:
            raise RuntimeError("the pass is broken on purpose")
        return stock(self, *args)

    CopySource._draft = draft


def small_chunks() -> None:
    """Verify in chunks of few rows, and note of how many chunks a step was put together
    at most.
    """
    joined = verification._joined

    def note(parts: Any) -> Any:
        NOTED["chunks"] = max(NOTED.get("chunks", 0), len(parts))
        return joined(parts)

    verification._CHUNK_BYTES = 4 * 96 * 20  # 20 rows of the policy's vocabulary
    verification._joined = note


def noted_verification() -> None:
    """Note a model's draft tokens that vLLM's rejection sampler comes to, and the
    history's, and of how many the token is certain where others of the step are not.
    """
    from vllm.v1.sample import rejection_sampler

    verify = rejection_sampler.rejection_sample
    tell = ModelSource.tell_probabilities
    by_model = list[bool]()

    def told(self: Any, sampler: Any, given: Any) -> Any:
        by_model[:] = [
            req_id in self.drawn_with
            for req_id in self._drafter.runner.input_batch.req_ids
        ]
        return tell(self, sampler, given)

    def verified(
        tokens: Any,
        counts: Any,
        most: Any,
        ends: Any,
        told: Any,
        logits: Any,
        *args: Any,
        **more: Any,
    ) -> Any:
        p = logits.softmax(dim=-1)
        begin = 0
        written = verify(tokens, counts, most, ends, told, logits, *args, **more)
        certain = p.new_zeros(p.shape).scatter_(1, tokens.long()[:, None], 1.0)
        q = certain if told is None else told
        for row, count in enumerate(counts):
            whose = "model" if by_model[row] else "history"
            for place, at in enumerate(range(begin, begin + count)):
                NOTED[f"{whose}, beside others"] += told is not None
                NOTED[f"{whose}, certain"] += told is not None and bool(
                    q[at].equal(certain[at])
                )
                if not note_token(
                    whose, int(tokens[at]), int(written[row, place]), p[at], q[at]
                ):
                    break
            begin += count
        return written

    ModelSource.tell_probabilities = told
    rejection_sampler.rejection_sample = verified


def both(*sabotage: Callable[[], None]) -> None:
    """Do one after another."""
    for act in sabotage:
        act()


def any_length(kept_bytes: int) -> None:
    """Ask the model for arbitrary numbers of tokens: in a few steps for some requests,
    then for a while for none.
    """
    stock = Proposer.begin_drafts
    Account.ask = lambda *_: True

    def propose(self: Any, sampled: list[list[int]], lengths: Any, tokens: Any) -> Any:
        drafts = stock(self, sampled, lengths, tokens)
        if not self.leads:
            return drafts
        self.proposed = getattr(self, "proposed", 0) + 1
        rng = random.Random(self.proposed)
        for row, (req_id, new) in enumerate(
            zip(self.runner.input_batch.req_ids, sampled, strict=True)
        ):
            room = self.engine.live[req_id].end - 1 - int(lengths[row]) if new else 0
            wanted = (
                rng.randrange(self.config.model_tokens + 1)
                if self.proposed % 16 < 6
                else 0
            )
            self.model_tokens[row] = max(0, min(room, wanted))
            if new:
                self._by_model[self.engine.live[req_id].slot] = self.model_tokens[row]
        return drafts

    Proposer.begin_drafts = propose
    neural_drafts.KEPT_BYTES = kept_bytes


def failing_rank() -> None:
    """Let the first rank fail until the first weight sync, the second one from then
    on.
    """
    stock = Proposer.begin_drafts
    stock_refresh = Proposer.refresh

    def propose(self: Any, sampled: list[list[int]], *args: Any) -> Any:
        self.proposed = getattr(self, "proposed", 0) + 1
        if self.leads == (not self._synced_once) and self.proposed > 4:
            raise RuntimeError("the rank is broken on purpose")
        return stock(self, sampled, *args)

    def refresh(self: Any, message: Any) -> Any:
        self._synced_once = True
        return stock_refresh(self, message)

    Proposer._synced_once = False
    Proposer.begin_drafts = propose
    Proposer.refresh = refresh


def stale_copy() -> None:
    """Never quantise the policy's weights again."""
    PolicyCopy.quantise = lambda self: None


def no_room_at_the_end() -> None:
    """Draft nothing near max_model_len but what vLLM makes of it."""
    HostWorkerState.draft_up_to_the_end = lambda self: None


def no_cpu_fix() -> None:
    """Leave vLLM's CPU sampler as it is."""
    vllm_fixes.expand_draft_parameters = SimpleNamespace(apply=lambda: None)


def failing_later(owner: Any, name: str) -> None:
    """Fail once, after drafts have been verified in some steps: in a method of
    das-adapter.
    """
    stock = getattr(owner, name)
    calls = itertools.count()

    @functools.wraps(stock)
    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 12:
            raise RuntimeError("the drafter is broken on purpose")
        return stock(*args, **kwargs)

    setattr(owner, name, fails)


def without_rehearsal(act: Callable[[], None]) -> None:
    """Do something else, and try no drafts before the first request."""
    act()
    rehearsal.may_rehearse = lambda *_: False


PLACES = {
    "the keys of the noise": (HostWorkerState, "keys"),
    "the verification": (verification.KeyedRejectionSampler, "forward"),
    "the drafter": (Proposer, "propose"),
    "the counts": (HostWorkerState, "count"),
}
"""Of the way of a draft, where it may fail in a later step."""
SABOTAGE = {
    **{
        f"failing once in {place}": functools.partial(failing_later, *found)
        for place, found in PLACES.items()
    },
    "a rank fails": failing_rank,
    "a rank fails in the passes": failing_pass,
    "any draft length": functools.partial(any_length, 300_000),
    "any draft length, noted verification": functools.partial(
        both, noted_verification, functools.partial(any_length, 300_000)
    ),
    "any draft length, reading along": functools.partial(any_length, -1),
    "dear drafter": dear_drafter,
    "drafter that fails once": failing_once,
    "drafter without weights": drafter_without_weights,
    "failing drafter": failing_drafter,
    "failing search": failing_search,
    "garbage drafts": garbage_drafts,
    "no CPU fix": no_cpu_fix,
    "no room near max_model_len": no_room_at_the_end,
    "slow policy": slow_policy,
    "slow policy, no rehearsal": functools.partial(without_rehearsal, slow_policy),
    "small chunks": small_chunks,
    "stale copy": stale_copy,
}
