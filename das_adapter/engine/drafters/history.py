"""vLLM's proposers (`speculative_config.method: custom_class`): what all of them share, and the history drafter."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.config import VllmConfig

from das_adapter.config import parse
from das_adapter.core.controller import Controller
from das_adapter.core.index import IndexFileError, SuffixIndex
from das_adapter.core.noise import prompt_identity
from das_adapter.core.staleness import Staleness
from das_adapter.errors import DasError
from das_adapter.protocol.decision_log import DecisionLog
from das_adapter.protocol.engine_args import PROBLEM_ARG, RECORD_ARG, SETTINGS_KEY, START_ARG
from das_adapter.protocol.metrics import Counters, collapsed
from das_adapter.tools import calibrate

logger = logging.getLogger("das_adapter")


class Proposer:
    """A drafter that can fail, or draft nothing useful, without harm to the rollout.

    `runner` (vLLM's model runner), `seed` (the noise seed of a request id) and `validates` (whether a request is a
    validation's) are bound by `engine.worker`, before the first step. The class has no attribute `model`, by which vLLM
    and the hosts would take it for a drafter with weights.
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
        self.validates: Callable[[str], bool] = bool
        self.carried: list[int] | None = None
        """Draft tokens that each request of the batch carried into the step being sampled; set by `DasWorker`."""
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
                self._fail(error)
            finally:
                self.counters.propose_seconds.append(time.perf_counter() - begin)
        return [[] for _ in sampled_token_ids]

    def _fail(self, error: Exception) -> None:
        self.counters.error = repr(error)
        logger.exception("das: the %s drafter failed and is off; decoding goes on without drafts", self.NAME)

    def _pause_if_collapsed(self) -> None:
        """Drafts that are all rejected cost time and bring nothing: leave them until the next weight sync."""
        if collapsed(vars(self.counters)):
            self._paused = True
            logger.error(
                "das: acceptance collapsed (%d of %d draft tokens); no drafts until the next weight sync",
                self.counters.accepted_tokens,
                self.counters.draft_tokens,
            )

    def begin_step(self, scheduled: Any, now: float) -> None:
        """The engine starts a forward pass: the one before, if it only decoded, took until now.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
            now: seconds, of a clock that only runs forward.
        """
        if self.counters.error is None:
            try:
                self._begin_step(scheduled, now)
            except Exception as error:
                self._fail(error)

    def _begin_step(self, scheduled: Any, now: float) -> None:
        pass

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        raise NotImplementedError

    def refresh(self, version: int, **news: Any) -> dict[str, Any]:
        """A weight sync; see the drafters for the news. Returns what to tell the host."""
        self._paused = False
        return {}

    def stats(self) -> dict[str, Any]:
        """Figures beside the counters'."""
        return {}

    def end(self, request: Any) -> int:
        """The length at which a request stops at the latest."""
        limit = request.sampling_params.max_tokens or self._max_model_len
        return min(self._max_model_len, len(request.prompt_token_ids) + limit)


class HistoryProposer(Proposer):
    """Drafts each request's continuation from its problem's rollouts, its live siblings and its own text."""

    NAME = "history"

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        config = self.config
        self.index = SuffixIndex()
        self._directory = ""
        """Of the history that a service publishes and the index maps; empty: the index keeps its own."""
        prior = calibrate.read(config.toggle.calibration) if config.toggle.calibration else None
        self.controller = Controller(config.budget, config.toggle, self._max_model_len, config.history.window, prior)
        self.staleness = Staleness(config.history.window)
        first = vllm_config.parallel_config.rank == 0
        self.log = DecisionLog(config.log_dir) if config.log_dir and first else None
        self._step: _Step | None = None
        self.offer: tuple[list[int], np.ndarray, np.ndarray, np.ndarray] | None = None
        """Rows with drafts, the chances of what was found for them, its offsets, and how much of it is drafted."""
        self._live: dict[str, _Live] = {}
        self._synced = False
        """Whether a weight sync lies between the last step and the next."""
        self._unique = 0

    def _begin_step(self, scheduled: Any, now: float) -> None:
        step, self._step = self._step, None
        if self._synced:  # what had ended before the weight sync is not of the live policy
            self._synced = False
            for req_id in scheduled.finished_req_ids & self._live.keys():
                self._live[req_id].keep = False
        counts, new = scheduled.num_scheduled_tokens, scheduled.scheduled_new_reqs
        # A pass of new requests only may have come after a pause without any.
        if step is not None and step.slots is not None and (not new or any(r in counts for r in step.req_ids)):
            self._finish_step(step, now - step.begin)
        drafts = scheduled.scheduled_spec_decode_tokens
        if counts and not new and scheduled.total_num_scheduled_tokens == len(counts) + sum(map(len, drafts.values())):
            self._step = _Step(now, scheduled.total_num_scheduled_tokens, list(counts))

    def _finish_step(self, step: _Step, seconds: float) -> None:
        controller, slots, got = self.controller, step.slots, step.got
        assert slots is not None and got is not None
        drafted = step.tokens - len(slots)
        if self.log is not None:
            model = controller.times.model
            predicted = 0.0 if model is None else model.step(step.tokens, len(slots), drafted > 0)
            accepted = int(got.sum()) - len(slots)
            self.log.step(time.time() - seconds, len(slots), step.tokens, drafted, accepted, seconds, predicted)
        stopped = controller.stopped
        controller.step(slots, got, step.tokens, drafted > 0, seconds)
        if controller.stopped and not stopped:
            logger.error("das: %s: no drafts until the next weight sync", controller.stopped)

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        requests, req_ids = self.runner.requests, self.runner.input_batch.req_ids
        if len(self._live) > len(sampled) or any(req_id not in self._live for req_id in req_ids):
            self._close([req_id for req_id in self._live if req_id not in requests])
        rows, live, got = [], [], []
        for row, (req_id, new) in enumerate(zip(req_ids, sampled, strict=False)):
            if not new:
                continue
            length = int(lengths[row])
            known = self._live.get(req_id)
            if known is None or known.length > length:
                known = self._open(req_id, requests[req_id], tokens[row, :length])
            rows.append(row)
            live.append(known)
            got.append(len(new))
        slots = np.array([x.slot for x in live], dtype=np.int64)
        self._verified(rows, live, slots, np.array(got, dtype=np.int64))
        drafts: list[list[int]] = [[] for _ in sampled]
        self.offer = None
        if self.controller.looks(len(live)):
            self._extend(rows, live, lengths, tokens)
            # The next step writes the draft and one token more: neither may pass the request's end.
            room = np.array([x.end - x.length - 1 for x in live], dtype=np.int64)
            caps = self.controller.caps(slots, room)
            handles = np.array([x.handle for x in live], dtype=np.int64)
            flat, chances, offsets = self.index.draft_flat(handles, caps, self.controller.floor)
            self._check(flat)
            keep = self.controller.cut(slots, chances, offsets)
            if keep.any():
                self.offer = rows, chances, offsets, keep
                ids = flat.tolist()
                for row, begin, count in zip(rows, offsets.tolist(), keep.tolist(), strict=False):
                    drafts[row] = ids[begin : begin + count]
        return drafts

    def _verified(self, rows: list[int], live: list[_Live], slots: np.ndarray, got: np.ndarray) -> None:
        carried = None if self.carried is None else np.asarray(self.carried, dtype=np.int64)[rows]
        self.carried = None
        if carried is not None and not carried.any():
            carried = None
        if carried is not None:
            accepted = np.where(carried > 0, got - 1, 0)
            self.staleness.count((x.age for x in live), carried, accepted)
            if self.log is not None:
                self.log.verified(self.controller.written(slots), carried, accepted)
        self.controller.verified(slots, got, carried)
        if self._step is not None:
            self._step.slots, self._step.got = slots, got

    def _extend(self, rows: list[int], live: list[_Live], lengths: np.ndarray, tokens: np.ndarray) -> None:
        """Tell the index what was written since it was last asked to draft."""
        grown, new = [], []
        for row, x in zip(rows, live, strict=True):
            length = int(lengths[row])
            if length > x.length:
                grown.append(x.handle)
                new.append(tokens[row, x.length : length])
                x.length = length
        if grown:
            self.index.extend_many(grown, np.concatenate(new), np.cumsum([0, *map(len, new)], dtype=np.int64))

    def _open(self, req_id: str, request: Any, tokens: np.ndarray) -> _Live:
        self._close([req_id])
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        extra = request.sampling_params.extra_args or {}
        start = min(int(extra.get(START_ARG, len(prompt))), len(prompt))
        handle = self.index.open(self._problem(request, prompt), prompt[:start], prefix=tokens[start:])
        end = self.end(request)
        recorded = extra.get(RECORD_ARG, 1)
        keep = bool(recorded) and self.config.history.scope != "request"
        problem = _identity(request, prompt)
        slot = self.controller.open(problem, len(tokens) - start, end - start)
        live = self._live[req_id] = _Live(handle, slot, len(tokens), end, keep, self.staleness.age(problem))
        return live

    def _problem(self, request: Any, prompt: np.ndarray) -> int:
        if self.config.history.scope == "global":
            return 0
        if self.config.history.scope == "request":
            self._unique += 1
            return self._unique
        return _identity(request, prompt)

    def _close(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            if live := self._live.pop(req_id, None):
                self.index.close(live.handle, keep=live.keep)
                if self.log is not None:
                    self.log.request(*self.controller.history(live.slot), live.begin)
                self.controller.close(live.slot)

    def refresh(
        self,
        version: int,
        trajectories: Sequence[tuple[int, bytes, int]] = (),
        history: tuple[str, int] | None = None,
        lengths: Iterable[tuple[int, int, int]] = (),
    ) -> dict[str, Any]:
        """Bring the history up to date at a weight sync (DAS, section 4.1): with a service's, or by itself.

        Args:
            version: weight version from now on.
            trajectories: (problem, int32 token ids of the response, weight version that wrote it) for the engine's own
                history, where no service keeps one. What is older than the window goes, then the oldest versions until
                `history.max_bytes` is kept.
            history: (directory, generation) that the node's service has published; an empty directory ends the use of
                it. None: what is mapped stays.
            lengths: (problem, tokens of a response, weight version that wrote it) since the last refresh, beside those
                of `trajectories`.

        Returns:
            `generation` that is mapped; 0: none.
        """
        done = super().refresh(version)
        self._synced = True
        self._close([req_id for req_id in self._live if req_id not in self.runner.requests])
        if history is not None:
            self._map(*history)
        elif not self._directory and self.config.history.scope != "request":
            self._remember(version, trajectories)
        self.index.clear_live()
        if self.log is not None:
            controller, model = self.controller, self.controller.times.model
            saved = controller.time_saved(self._slots())
            self.log.sync(version, None if model is None else model.to_dict(), saved, controller.stopped)
        responses = [(problem, len(text) // 4, written) for problem, text, written in trajectories]
        responses.extend(lengths)
        self.controller.sync(version, responses)
        self.staleness.sync(version, responses)
        return done | {"generation": self.index.generation}

    def _remember(self, version: int, trajectories: Sequence[tuple[int, bytes, int]]) -> None:
        for problem, text, written in trajectories:
            tokens = np.frombuffer(text, dtype=np.int32)
            self._check(tokens)
            self.index.add(problem if self.config.history.scope == "problem" else 0, tokens, written)
        self.index.seal()
        self.index.expire(version - self.config.history.window)
        self.index.shrink(self.config.history.max_bytes)

    def _map(self, directory: str, generation: int) -> None:
        try:
            if not directory:
                self._close(list(self._live))  # they are opened again, with what they have written
                self.index = SuffixIndex()
            elif directory != self._directory:
                self.index.map(directory)
            self._directory = directory
            if directory:
                try:
                    self.index.refresh(generation)
                except FileNotFoundError:  # this engine comes late
                    self.index.refresh()
        except (OSError, IndexFileError) as error:
            logger.error("das: history: %r; drafts come from generation %s", error, self.index.generation)

    def _check(self, tokens: np.ndarray) -> None:
        if len(tokens) and tokens.max() >= self._vocab:
            raise DasError(f"history: found token {tokens.max()}, the policy's vocabulary has {self._vocab}: "
                           "the history was written with another tokenizer")  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Figures of the history and of the controller since the last call, as plain numbers."""
        return {
            "history_tokens": self.index.tokens, "history_bytes": self.index.nbytes,
            "staleness": self.staleness.take(),
            **self.controller.take(self._slots()),
        }  # fmt: skip

    def _slots(self) -> np.ndarray:
        return np.array([x.slot for x in self._live.values()], dtype=np.int64)


class KeyedHistoryProposer(HistoryProposer):
    """The same drafts, verified with keyed noise: its name tells vLLM's front end that any sampling parameter goes."""


def _identity(request: Any, prompt: np.ndarray) -> int:
    """The problem a request asks about."""
    extra = request.sampling_params.extra_args or {}
    return int(extra[PROBLEM_ARG]) if PROBLEM_ARG in extra else prompt_identity(prompt)


@dataclass(slots=True)
class _Live:
    """A request that is being drafted for."""

    handle: int
    """In the index."""
    slot: int
    """In the controller."""
    length: int
    """Tokens the index knows of, prompt included."""
    end: int
    """Length at which it stops."""
    keep: bool
    """Whether its text is history."""
    age: int
    """Of its problem's history, see `Staleness`."""
    begin: float = field(default_factory=time.time)


@dataclass(slots=True)
class _Step:
    """A forward pass that only decodes, while it is timed; `slots` and `got` are known once it was sampled."""

    begin: float
    tokens: int
    req_ids: list[str]
    slots: np.ndarray | None = None
    got: np.ndarray | None = None
