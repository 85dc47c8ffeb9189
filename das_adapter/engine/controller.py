"""What a controller decides for an engine, written down and said aloud where it stops the drafts."""

from __future__ import annotations

import logging
import time

import numpy as np

from das_adapter.core.controller import Controller, TimedStep
from das_adapter.core.stock import StockGuard, UnaskedStep
from das_adapter.engine.history import HistorySource
from das_adapter.engine.requests import LiveRequest
from das_adapter.protocol import decision_log
from das_adapter.protocol.decision_log import DecisionLog
from das_adapter.protocol.messages import Refresh

logger = logging.getLogger("das_adapter")


def sync(
    controller: Controller, guard: StockGuard | None, log: DecisionLog | None, message: Refresh, slots: np.ndarray
) -> None:
    """Take what a weight sync brings; `slots`: those of the live requests, int64 [n]."""
    share = None if guard is None else guard.of_stock()
    news = None if guard is None else guard.sync()
    if news:
        logger.error("das: %s: rollouts begin without drafts until a trial gains time", news)
    if log is not None:
        model, saved = controller.times.model, controller.time_saved(slots)
        fitted = None if model is None else model.to_dict()
        record = decision_log.WeightSync(message.version, time.time(), fitted, saved, controller.stopped, share, news)
        log.sync(record)
    drafts = controller.drafts
    rested = drafts is not None and drafts.silent
    controller.sync(message.responses)
    if drafts is not None and drafts.silent and not rested:
        logger.warning("das: the model that drafts rests for a while: %s", drafts.silent)


def timed(
    controller: Controller, guard: StockGuard | None, log: DecisionLog | None, step: TimedStep | UnaskedStep
) -> None:
    """Take a decode step that has ended."""
    if isinstance(step, UnaskedStep):
        if guard is not None:
            guard.unasked(step)
        if log is not None:
            n = step.requests
            log.add(decision_log.Step(time.time() - step.seconds, n, n, 0, 0, step.seconds, None))
        return
    model, running = controller.times.model, len(step.slots)
    drafted = step.tokens - running
    predicted = None if model is None else model.step(step.tokens, running, drafted > 0, step.context)
    took = step.seconds + step.drafting_seconds
    if guard is not None:
        most = None if predicted is None else predicted + step.drafting_seconds
        guard.asked(step.slots, step.got, took, drafted > 0, most, step.context)
    if log is not None:
        accepted, begin = int(step.got.sum()) - running, time.time() - took
        log.add(decision_log.Step(begin, running, step.tokens, drafted, accepted, step.seconds, predicted, step.passes))
    stopped = controller.stopped
    controller.timed(step)
    if controller.stopped and not stopped:
        logger.error("das: %s: no drafts until the next weight sync", controller.stopped)


def close(
    controller: Controller,
    guard: StockGuard | None,
    log: DecisionLog | None,
    history: HistorySource | None,
    live: LiveRequest,
) -> None:
    """Take a request that is over; its text becomes history."""
    if guard is not None:
        guard.close(live.slot)
    requests = controller.requests
    if history is not None:
        forwards = float(requests.steps[live.slot])
        history.close(live, forwards + float(requests.accepted[live.slot]), forwards)
    if log is not None:
        counts = requests.counts(live.slot)
        log.add(decision_log.Request(*counts[:2], live.begin, time.time(), *counts[2:]))
    controller.close(live.slot)
