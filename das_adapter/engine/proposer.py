"""vLLM's proposers (`speculative_config.method: custom_class`): what all of them share, and the history drafter."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig

from das_adapter.config import parse
from das_adapter.core.index import SuffixIndex
from das_adapter.core.noise import prompt_identity
from das_adapter.engine.args import PROBLEM_ARG, RECORD_ARG, SETTINGS_KEY
from das_adapter.engine.metrics import Counters, collapsed
from das_adapter.errors import DasError

logger = logging.getLogger("das_adapter")


class Proposer:
    """A drafter that can fail, or draft nothing useful, without harm to the rollout.

    `runner` (vLLM's model runner) and `seed` (the noise seed of a request id) are bound by `engine.worker`, before the
    first step. The class has no attribute `model`, by which vLLM and the hosts would take it for a drafter with
    weights.
    """

    NAME = ""

    def __init__(self, vllm_config: VllmConfig):
        config = parse(vllm_config.additional_config[SETTINGS_KEY])
        assert config is not None and vllm_config.speculative_config is not None
        self.config = config
        self.vllm_config = vllm_config
        self.counters = Counters()
        self.runner: Any = None
        self.seed: Callable[[str], int] = hash
        self._max_draft = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len = vllm_config.model_config.max_model_len
        self._vocab = vllm_config.model_config.get_vocab_size()
        self._paused = False

    def load_model(self, policy: Any) -> None:
        """Called by vLLM with the policy, once it is loaded."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for every request of the batch.

        Args:
            sampled_token_ids: tokens each request got in this step; empty while its prompt is read.
            num_tokens_no_spec: int [max_batch], tokens known of each request.
            token_ids_cpu: int32 [max_batch, max_model_len], the tokens.
            slot_mappings: not used.

        Returns:
            Per request at most `num_speculative_tokens` draft tokens; none of them after a drafter's failure.
        """
        if self.counters.error is None and not self._paused:
            begin = time.perf_counter()
            try:
                drafts = self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
                self._pause_if_collapsed()
                return drafts
            except Exception as error:
                self.counters.error = repr(error)
                logger.exception("das: the %s drafter failed and is off; decoding goes on without drafts", self.NAME)
            finally:
                self.counters.propose_seconds.append(time.perf_counter() - begin)
        return [[] for _ in sampled_token_ids]

    def _pause_if_collapsed(self) -> None:
        """Drafts that are all rejected cost time and bring nothing: leave them until the next weight sync."""
        if collapsed(vars(self.counters)):
            self._paused = True
            logger.error(
                "das: acceptance collapsed (%d of %d draft tokens); no drafts until the next weight sync",
                self.counters.accepted_tokens,
                self.counters.draft_tokens,
            )

    def refresh(self, version: int, trajectories: Sequence[tuple[int, bytes, int]]) -> dict[str, Any]:
        """A weight sync; see the drafters. Returns what to tell the host."""
        self._paused = False
        return {}

    def stats(self) -> dict[str, Any]:
        """Figures beside the counters'."""
        return {}

    def end(self, request: Any) -> int:
        """The length at which a request stops at the latest."""
        limit = request.sampling_params.max_tokens or self._max_model_len
        return min(self._max_model_len, len(request.prompt_token_ids) + limit)

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        raise NotImplementedError


class HistoryProposer(Proposer):
    """Drafts each request's continuation from its problem's rollouts, its live siblings and its own text."""

    NAME = "history"

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self.index = SuffixIndex()
        self.expected: dict[int, float] = {}
        """Per row of the batch with a draft: how many of its tokens should be accepted."""
        self._live: dict[str, _Live] = {}
        self._unique = 0

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        requests, req_ids = self.runner.requests, self.runner.input_batch.req_ids
        if len(self._live) > len(sampled) or any(req_id not in self._live for req_id in req_ids):
            self._close([req_id for req_id in self._live if req_id not in requests])
        rows, handles, budgets, grown, new = [], [], [], [], []
        for row, (req_id, got) in enumerate(zip(req_ids, sampled, strict=False)):
            if not got:
                continue
            length = int(lengths[row])
            live = self._live.get(req_id)
            if live is None or live.length > length:
                live = self._open(req_id, requests[req_id], tokens[row, :length])
            else:
                grown.append(live.handle)
                new.append(tokens[row, live.length : length])
            live.length = length
            rows.append(row)
            handles.append(live.handle)
            # The next step writes the draft and one token more: neither may pass the request's end.
            budgets.append(min(self._max_draft, live.end - length - 1))
        if grown:
            offsets = np.cumsum([0, *map(len, new)], dtype=np.int64)
            self.index.extend_many(grown, np.concatenate(new), offsets)
        drafts: list[list[int]] = [[] for _ in sampled]
        if handles:
            flat, chances, offsets = self.index.draft_flat(
                handles, np.maximum(budgets, 0), self.config.budget.min_chance
            )
            ids, at = flat.tolist(), offsets.tolist()
            self.expected = {}
            for row, begin, end in zip(rows, at, at[1:], strict=False):
                drafts[row] = ids[begin:end]
                if begin < end:
                    self.expected[row] = float(chances[begin:end].sum())
        return drafts

    def _open(self, req_id: str, request: Any, tokens: np.ndarray) -> _Live:
        self._close([req_id])
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        handle = self.index.open(self._problem(request, prompt), prompt, prefix=tokens[len(prompt) :])
        recorded = (request.sampling_params.extra_args or {}).get(RECORD_ARG, 1)
        keep = bool(recorded) and self.config.history.scope != "request"
        live = self._live[req_id] = _Live(handle, len(tokens), self.end(request), keep)
        return live

    def _problem(self, request: Any, prompt: np.ndarray) -> int:
        if self.config.history.scope == "global":
            return 0
        if self.config.history.scope == "request":
            self._unique += 1
            return self._unique
        extra = request.sampling_params.extra_args or {}
        return int(extra[PROBLEM_ARG]) if PROBLEM_ARG in extra else prompt_identity(prompt)

    def _close(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            if live := self._live.pop(req_id, None):
                self.index.close(live.handle, keep=live.keep)

    def refresh(self, version: int, trajectories: Sequence[tuple[int, bytes, int]]) -> dict[str, Any]:
        """Take the finished trajectories of all replicas over at a weight sync (DAS, section 4.1).

        Args:
            version: weight version from now on.
            trajectories: (problem, int32 token ids of the response, weight version that wrote it).

        History older than the window goes, then the oldest versions until `history.max_bytes` is kept.
        """
        super().refresh(version, trajectories)
        self._close([req_id for req_id in self._live if req_id not in self.runner.requests])
        scope = self.config.history.scope
        if scope != "request":
            for problem, text, written in trajectories:
                tokens = np.frombuffer(text, dtype=np.int32)
                if len(tokens) and tokens.max() >= self._vocab:
                    raise DasError(f"history: found token {tokens.max()}, the policy's vocabulary has {self._vocab}: "
                                   "the history was written with another tokenizer")  # fmt: skip
                self.index.add(problem if scope == "problem" else 0, tokens, written)
            self.index.seal()
            self.index.expire(version - self.config.history.window)
            self.index.shrink(self.config.history.max_bytes)
        self.index.clear_live()
        return {}

    def stats(self) -> dict[str, Any]:
        return {"history_tokens": self.index.tokens, "history_bytes": self.index.nbytes}


class KeyedHistoryProposer(HistoryProposer):
    """The same drafts, verified with keyed noise: its name tells vLLM's front end that any sampling parameter goes."""


class _Live:
    """A request that is being drafted for: `end` is the length at which it stops, `keep` whether it is history."""

    __slots__ = ("end", "handle", "keep", "length")

    def __init__(self, handle: int, length: int, end: int, keep: bool):
        self.handle, self.length, self.end, self.keep = handle, length, end, keep
