"""What a controller decides for an engine, written down and said aloud where it stops the drafts."""

from __future__ import annotations

import logging
import time

import numpy as np

from das_adapter.core.controller import Controller, TimedStep
from das_adapter.engine.drafters.base import LiveRequest
from das_adapter.engine.drafters.history import HistorySource
from das_adapter.protocol import decision_log
from das_adapter.protocol.decision_log import DecisionLog
from das_adapter.protocol.messages import Refresh

logger = logging.getLogger("das_adapter")


def sync(controller: Controller, log: DecisionLog | None, message: Refresh, slots: np.ndarray) -> None:
    """Take what a weight sync brings; `slots`: those of the live requests, int64 [n]."""
    if log is not None:
        model, saved = controller.times.model, controller.time_saved(slots)
        fitted = None if model is None else model.to_dict()
        log.sync(decision_log.WeightSync(message.version, time.time(), fitted, saved, controller.stopped))
    controller.sync(message.responses)


def timed(controller: Controller, log: DecisionLog | None, step: TimedStep) -> None:
    """Take a decode step that has ended."""
    if log is not None:
        model, running = controller.times.model, len(step.slots)
        drafted, accepted = step.tokens - running, int(step.got.sum()) - running
        predicted = None if model is None else model.step(step.tokens, running, drafted > 0)
        begin = time.time() - step.seconds - step.drafting_seconds
        log.add(decision_log.Step(begin, running, step.tokens, drafted, accepted, step.seconds, predicted, step.passes))
    stopped = controller.stopped
    controller.timed(step)
    if controller.stopped and not stopped:
        logger.error("das: %s: no drafts until the next weight sync", controller.stopped)


def close(controller: Controller, log: DecisionLog | None, history: HistorySource | None, live: LiveRequest) -> None:
    """Take a request that is over; its text becomes history."""
    requests = controller.requests
    if history is not None:
        forwards = float(requests.steps[live.slot])
        history.close(live, forwards + float(requests.accepted[live.slot]), forwards)
    if log is not None:
        counts = requests.counts(live.slot)
        log.add(decision_log.Request(*counts[:2], live.begin, time.time(), *counts[2:]))
    controller.close(live.slot)
