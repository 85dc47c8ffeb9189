"""What decides on an engine's drafts, on both of vLLM's runners: the live requests,
core's controller and its account of the rollout's time, the history, and the decision
log.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from das_adapter import __version__, compat
from das_adapter.config import DasConfig
from das_adapter.core.account import State, collapsed
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.policy import DraftPolicy
from das_adapter.core.steps import TimedStep
from das_adapter.engine.failures import log_failure
from das_adapter.engine.history import HistorySource
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.timing import assumed, before_the_first_step, captured_tokens
from das_adapter.protocol import decision_log
from das_adapter.protocol.decision_log import DecisionLog
from das_adapter.protocol.messages import Refresh, Refreshed
from das_adapter.protocol.metrics import Counters, EngineStats

logger = logging.getLogger("das_adapter")
_NO_TOKENS = np.zeros(0, dtype=np.int32)
_OF_ROLLOUT = ("state", "reason", "of_stock", "latency_model_error", "error", "alarm")
"""Figures of a rollout that has ended which are told in the place of those of the next
one.
"""
_ADDED = (
    *(
        "steps",
        "request_forwards",
        "drafted_forwards",
        "draft_tokens",
        "accepted_tokens",
        "tokens",
        "busy_seconds",
    ),
    *(
        "time_saved_s",
        "history_requests",
        "history_hits",
        "self_counts",
        "neural_counts",
        "drafter_passes",
    ),
)
"""Figures that add up over rollouts."""


def _run(config: DasConfig, vllm_config: Any) -> decision_log.RunRecord:
    """Return what an engine runs."""
    return decision_log.RunRecord(
        model=str(getattr(vllm_config.model_config, "model", "")),
        drafter=config.drafter,
        vllm=compat.version("vllm") or "",
        das_adapter=__version__,
    )


class EngineController:
    """The policy of drafts of one engine, with the live requests, the history and the
    logs. A runner opens and closes requests here, calls `policy` in each decode step as
    `core/policy.py` says, and says here how long the step took. Nothing here knows a
    runner.
    """

    def __init__(
        self,
        config: DasConfig,
        vllm_config: Any,
        drafts: ModelDrafts | None = None,
        *,
        lengths: Sequence[int] | None = None,
        leads: bool = True,
        look_steps: int = 1,
    ) -> None:
        """`drafts`: of the model that drafts; `lengths`: draft lengths to choose from
        where all requests of a step share one (V2); `leads`: whether this rank decides,
        has the history and writes the decision log; `look_steps`: see `Account`.
        """
        self.config = config
        self.counters = Counters()
        self._untold: dict[str, Any] = {}
        """What was taken of rollouts that ended since the last `stats`."""
        self._told: dict[str, Any] = {}
        """What was taken of this rollout: seconds saved, and why something is wrong."""
        self.live: dict[str, LiveRequest] = {}
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self.history = (
            HistorySource(config.looked_up, self._vocabulary)
            if config.looked_up and leads
            else None
        )
        self.drafts = drafts
        self.log: DecisionLog | None = None
        if config.log_dir and leads:
            self.log = DecisionLog(config.log_dir, _run(config, vllm_config))
        self.rehearsing = False
        """Whether drafts are tried before the first request."""
        self._log_of_run = self.log
        self._gave_up: str | None = None
        """Why nothing will be drafted in this engine, weight sync or not; None: drafts
        can come.
        """
        known = before_the_first_step(config, vllm_config)
        sizes = captured_tokens(vllm_config)
        if known and drafts is not None:
            drafts.set_pass_prior(known.passes)
        self.policy = DraftPolicy(
            config,
            vllm_config.model_config.max_model_len,
            known and known.steps,
            drafts,
            lengths,
            sizes,
            look_steps,
        )
        self.policy.latency.set_vocabulary(self._vocabulary)
        if known is None:
            self.policy.latency.set_prior(assumed())

    # Requests

    def open(
        self,
        request: LiveRequest,
        length: int,
        prompt: np.ndarray = _NO_TOKENS,
        text: np.ndarray = _NO_TOKENS,
    ) -> None:
        """Open a request that joins the batch, and give it a slot; `length`: of its
        text before the present step, prompt included; `prompt`, `text`: all of it so
        far, int32 token ids, where the host looks up its drafts.
        """
        start = request.start
        request.slot = self.policy.begin(
            request.problem, length - start, request.end - start, request.record
        )
        if self.history is not None:
            try:
                self.history.open(request, prompt, text)
            except Exception:
                self.policy.end(request.slot)
                raise
        self.live[request.req_id] = request

    def close(self, req_ids: Iterable[str]) -> None:
        """Close those of these requests that are live: they have ended, or vLLM took
        them out of the batch and may bring them back, which opens them again. Their
        texts become history.
        """
        for req_id in req_ids:
            request = self.live.pop(req_id, None)
            if request is None:
                continue
            if self.history is not None:
                self.history.close(request)
            ended = self.policy.end(request.slot)
            if self.log is not None:
                times = request.began, time.time()
                self.log.add(
                    decision_log.RequestRecord(
                        request.problem, *ended, *times, request.record
                    )
                )

    # The rehearsal

    def rehearse(self) -> None:
        """Draft in every step, and learn nothing from it, until `rehearsed`."""
        self.rehearsing, self._log_of_run, self.log = True, self.log, None
        self.policy.rehearse()

    def rehearsed(self) -> None:
        """End the rehearsal, and forget what was counted in it."""
        self.close(list(self.live))
        self.policy.rehearsed()
        self._take()
        self._told = {}
        # it has learned what is accepted
        if self.history is not None and self.config.looked_up is not None:
            self.history = HistorySource(self.config.looked_up, self._vocabulary)
        self.rehearsing, self.log = False, self._log_of_run

    # A decode step

    def timed(self, step: TimedStep, ended: float) -> None:
        """Record a decode step that has `ended`, in seconds since the epoch."""
        if self.rehearsing:
            return
        predicted = self.policy.timed(step)
        if self.log is not None:
            running = len(step.slots)
            begin = ended - step.seconds - step.drafting_seconds
            drafted = step.tokens - running
            accepted = int(step.got.sum()) - running
            record = (
                running,
                step.tokens,
                drafted,
                accepted,
                step.seconds,
                predicted,
                step.passes,
                self.policy.num_validating(step.slots),
            )
            self.log.add(decision_log.StepRecord(begin, *record))
        self._tell()

    # Failures

    @property
    def failed(self) -> bool:
        """Whether the drafter has failed since the last weight sync."""
        return self.counters.error is not None

    def fail(self, error: Exception) -> None:
        """Draft no more until the next weight sync, and say so once."""
        if self.failed:
            return
        self._stop(repr(error))
        consequence = "no drafts until the next weight sync"
        if self.rehearsing:
            consequence = "the engine goes on as stock"
        log_failure(error, self.config.drafter, consequence)

    def give_up(self, reason: str) -> None:
        """Draft no more: the drafting path can't run on this vLLM."""
        self._gave_up = reason
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        self.counters.error = reason
        self.policy.stop(reason, State.FAILED)

    @contextlib.contextmanager
    def surviving(self) -> Iterator[None]:
        """Go on without drafts where what is done inside fails."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def stop_if_collapsed(self) -> None:
        """Draft no more until the next weight sync if nearly all drafts are
        rejected.
        """
        counts = self.counters
        if reason := collapsed(counts.drafted_forwards, counts.accepted_tokens):
            self.policy.stop(reason)
            counts.alarm = reason
        self._tell()

    def _tell(self) -> None:
        if news := self.policy.pop_news():
            logger.warning("%s", news)

    # Commands of the host

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring the history up to date and start again, at a weight sync (DAS, section
        4.1).
        """
        # hosts that ask behind the weight sync shall hear of the rollout that it ends
        if self.counters.steps:
            told = self._told
            self._untold = self._take()
            for name in ("error", "alarm"):
                if self._untold[name] == told.get(name):
                    self._untold[name] = None
            # the last ones
            self.counters.propose_seconds.extend(self._untold.pop("propose_seconds"))
        self._told = {}
        self.counters.error = None
        answer = Refreshed()
        if self.history is not None:
            answer["generation"] = self.history.refresh(message)
        model = self.policy.latency.model
        figures = self.policy.figures()
        saved_s = figures["time_saved_s"]
        stopped = self.policy.idle_reason
        self.policy.weight_sync(message.responses)
        if self.log is not None:
            sync = decision_log.WeightSyncRecord(
                message.version, asdict(model), saved_s, stopped
            )
            self.log.add(sync)
        if self._gave_up is not None:
            self._stop(self._gave_up)
        self._tell()
        return answer

    def stats(self) -> EngineStats:
        """Return the counts, and the figures of the controller, the account, the
        history and the model, since the last call.
        """
        stats = self._take()
        self._untold = {}
        return stats

    def _take(self) -> EngineStats:
        """Take the counts and figures since the last call, and log them; return them
        with those of rollouts that ended since the last `stats`: counts of all, and
        else what is known of the latter.
        """
        history = self.history.stats() if self.history else {}
        stats = self.counters.read_and_reset() | self.policy.figures() | history
        told = self._told
        self._told = {name: stats[name] for name in ("time_saved_s", "error", "alarm")}
        stats["time_saved_s"] -= told.get("time_saved_s", 0.0)
        stats["latency_model_error"] = self.policy.latency.pop_error()
        if self.drafts is not None:
            stats["neural_counts" if self.config.neural else "self_counts"] = (
                self.drafts.counts.tolist()
            )
            self.drafts.counts[:] = 0
            stats["drafter_passes"] = self.drafts.passes_made
            self.drafts.passes_made = 0
            if self.config.copies_policy:
                stats["self_acceptance"] = self.drafts.acceptance.rate
        if self.log is not None:
            self.log.add(decision_log.CountsRecord({**stats, "propose_seconds": []}))
        if ended := self._untold:
            stats |= {name: ended[name] for name in _OF_ROLLOUT if ended[name]}
            stats |= {
                name: np.add(ended[name], stats[name]).tolist()
                for name in _ADDED
                if name in stats
            }
        return stats
