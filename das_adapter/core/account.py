"""The one account of a rollout's time, and the one state of an engine: the five rules
in docs/how_it_works.md.
"""

from __future__ import annotations

import math
import sys
from enum import Enum
from typing import Any, Literal, get_args

from das_adapter.config import Speculate
from das_adapter.core import tuning
from das_adapter.core.backoff import Backoff, RolloutRest
from das_adapter.core.plain_time import PlainTime
from das_adapter.core.steps import Floats, Ints, TimedStep


class State(Enum):
    """What an engine does about drafts."""

    DRAFTING = "drafting"
    PROBING = "probing"
    RESTING = "resting"
    STOPPED = "stopped"
    FAILED = "failed"


_OVER = State.STOPPED, State.FAILED
"""Those that only a weight sync ends."""
Probe = Literal["plain", "drafted"]
"""How a step is taken the other way, so that both kinds of step stay known: without
drafts, while it drafts; with a few, while nothing is worth drafting.
"""


def collapsed(drafts: float, accepted: float) -> str | None:
    """Say that drafts are useless, given their number and that of their tokens that
    were accepted; None: they are not.
    """
    if drafts < tuning.COLLAPSE_DRAFTS or accepted >= tuning.COLLAPSE_RATE * drafts:
        return None
    return (
        f"acceptance collapsed: {accepted:.0f} accepted tokens of {drafts:.0f} drafts"
    )


class Account:
    """Keeps the time of an engine's rollout, and decides when a drafter is asked."""

    def __init__(self, time: PlainTime, speculate: Speculate = "auto") -> None:
        self.time = time
        self.state = State.DRAFTING
        """What it does."""
        self.reason: str | None = None
        """Why, where there is more to say."""
        self.step = 0
        """Decode steps since the engine's start."""
        self.look = Backoff(tuning.LOOK_FIRST_STEPS, tuning.LOOK_STEPS)
        self.look_share = tuning.LOOK_SHARE
        """Share of the time that looks may take while nothing is worth drafting; 0:
        they are as rare as can be.
        """
        self.probe_wait = tuning.PROBE_STEPS
        self._speculate = speculate
        self._rest, self.model_rest = RolloutRest(), RolloutRest()
        """Of all drafting; of the model that drafts."""
        self._news: str | None = None
        self._waited: dict[Probe, int] = dict.fromkeys(get_args(Probe), 0)
        """Steps after which a probe may be due: drafted ones in a row, plain ones in a
        row.
        """
        self._restart()

    def _restart(self) -> None:
        self.time.restart()
        self._on = False
        self._drafted_steps = 0
        self._model_took = 0.0
        self._model_saved = 0.0

    # What is asked

    def advance(self, steps: int) -> None:
        """Count decode steps."""
        self.step += steps

    def asks(self, requests: int, drafted: bool) -> bool:
        """Return whether a drafter is asked at all at the end of this step of so many
        requests, which has verified drafts or not; where none is, a step without drafts
        is a baseline step.
        """
        return not self.idle and (drafted or self.looks(requests))

    def looks(self, requests: int) -> bool:
        """Return whether drafts are looked for at the end of this step."""
        return self.look.due(self.step, requests)

    def rest_steps(self, requests: int) -> int:
        """Return for how many steps after this one no drafter is asked, as far as can
        be said now.
        """
        if self.idle:
            return sys.maxsize
        return max(0, self.look.due_in(self.step, requests) - 1)

    @property
    def idle(self) -> bool:
        """Whether no drafter is asked before the next weight sync: drafting has stopped
        or failed, or this rollout is at rest.
        """
        return self.state in _OVER or self._rest.reason is not None

    def draws(self, running: int, gain: float | None, optimal: bool) -> bool:
        """Decide whether a step is drafted in; `gain`: predicted, as a share of its
        time, None: there is nothing to draft; `optimal`: whether the drafts were chosen
        for it.
        """
        worth = gain is not None and gain >= tuning.LEAST_GAIN
        if self._speculate == "always":
            return worth or not optimal
        if self._speculate == "auto":
            self._on = gain is not None and gain >= (0.0 if self._on else tuning.MARGIN)
        else:
            self._on = running <= self._speculate * (
                tuning.STAY_ON_FACTOR if self._on else 1.0
            )
        return self._on and (worth or not optimal)

    def due(self, kind: Probe, unseen: bool = False) -> bool:
        """Return whether the next step is due to be taken the other way; `unseen`: no
        such step is known, and no step is waited for.
        """
        if kind == "plain":
            return self._waited[kind] >= tuning.PROBE_STEPS
        return self._waited[kind] >= (0 if unseen else self.probe_wait) and isinstance(
            self._speculate, str
        )

    def probe(self, kind: Probe, unseen: bool = False) -> bool:
        """As `due`; if it is, the next step of its kind waits again."""
        due = self.due(kind, unseen)
        if due:
            self._waited[kind] = 0
            if kind == "drafted" and not unseen:
                self.probe_wait = min(2 * self.probe_wait, tuning.RARE_STEPS)
        return due

    def decided(
        self,
        running: int,
        drafted: bool,
        probing: bool,
        plain: bool = False,
        seconds: float = 0.0,
    ) -> None:
        """Take what was decided for a step; `probing`, `plain`: to see what a drafted,
        or a plain, step costs; `seconds`: what it takes without drafts, 0: not
        known.
        """
        if drafted and not probing:
            self.probe_wait = tuning.PROBE_STEPS
        share = self.look_share * seconds
        wait_steps = math.inf
        if share:
            look_s = tuning.LOOK_S + tuning.LOOK_REQUEST_S * running
            wait_steps = look_s / share
        self.look.done(self.step, running, drafted or probing, wait_steps)
        nothing = State.PROBING if probing or plain else State.RESTING
        if self.state not in _OVER:  # since the drafter was asked
            self.state = State.DRAFTING if drafted and not probing else nothing
            self.reason = None

    # What is told

    def timed(self, step: TimedStep, predicted: float | None) -> None:
        """As `PlainTime.record_step`."""
        plain = self._waited["plain"]
        drawn = self._waited["drafted"]
        self._waited = {
            "plain": plain + 1 if step.drafted else 0,
            "drafted": 0 if step.drafted else drawn + 1,
        }
        self.time.record_step(step, predicted)
        self.model(took=step.drafting_seconds * step.asked)
        self._drafted_steps += step.drafted
        guarded = (
            self._speculate != "always" and self.time.batch.steps >= tuning.GUARD_STEPS
        )
        if guarded and step.drafted and self._drafted_steps % tuning.GUARD_STEPS == 0:
            if reason := self._loss():
                self.stop(reason)

    def count(self, slots: Ints, steps: Floats) -> None:
        """As `PlainTime.record_baseline_steps`; these steps are not `timed`."""
        self._waited["drafted"] += int(steps[0])
        self.time.record_baseline_steps(slots, steps)

    def model(self, took: float = 0.0, saved: float = 0.0) -> None:
        """Take seconds that the passes of the model that drafts took, or that its
        accepted tokens were worth. Beside prompts they are told to `time` as well: such
        steps are not timed.
        """
        self._model_took += took
        self._model_saved += saved

    def stop(self, reason: str, state: State = State.STOPPED) -> None:
        """Draft no more until the next weight sync."""
        if self.state is not State.FAILED and self.state is not state:
            self.state = state
            self.reason = reason
            self._news = (
                None
                if state is State.FAILED
                else f"das: {reason}: no drafts until the next weight sync"
            )

    def sync(self, model_may_rest: bool = True) -> None:
        """Judge the rollout that a weight sync ends, and begin the next. Two weight
        syncs without a step between them are one.
        """
        if self.time.passed_s or self._model_took:
            self._judge(model_may_rest)
        self.forget()

    def forget(self) -> None:
        """Begin the next rollout, and judge nothing by the one before."""
        self._restart()
        self.probe_wait = tuning.PROBE_STEPS
        self.look.restart()
        self.state, self.reason = (
            (State.RESTING if self._rest.reason else State.DRAFTING),
            self._rest.reason,
        )

    def take_news(self) -> str | None:
        """Return what has changed for the worse since the last call, as a line of the
        log.
        """
        news = self._news
        self._news = None
        return news

    def figures(self) -> dict[str, Any]:
        """Return the figures since the last weight sync, as plain numbers."""
        return {
            "time_saved_s": self.time.saved_s(),
            "of_stock": (
                self.time.of_stock() if self._speculate == "auto" else None
            ),  # else the user decides
            "state": self.state.value,
            "reason": None if self.state is State.FAILED else self.reason,
        }

    # Inside

    def _loss(self) -> str | None:
        """Say that the drafts of the present batch cost more than they save; None: they
        do not. The estimate is as good as the models of step times, which are brought
        up to date before it is held against the drafts.
        """
        batch = self.time.batch
        for _ in range(2):
            saved = self.time.batch_saved_s(batch)
            if (
                saved
                >= -tuning.GUARD_LOSS * batch.drafted_seconds
                - tuning.ROLLOUT_LOSS * batch.seconds
            ):
                return None
            self.time.fit()
        return (
            f"speculation cost {-saved:.2f} s in {batch.drafted_seconds:.2f} s of"
            " drafted steps"
        )

    def _judge(self, model_may_rest: bool) -> None:
        """Say which of the next rollouts begin at rest."""
        if self._speculate != "auto":
            return
        took = self._model_took
        saved = self._model_saved
        reason = self.time.explain_loss()
        lost = (
            model_may_rest and took - saved > tuning.ROLLOUT_LOSS * self.time.plain_s()
        )
        words = (
            f"its passes took {took:.2f} s of a rollout, and its tokens saved"
            f" {saved:.2f} s"
            if lost
            else None
        )
        if self.model_rest.judge_rollout(words, saved - took if took else None):
            self._news = f"das: the model that drafts rests for a while: {words}"
        saved_s = self.time.saved_s() if self.time.known else None
        if reason is None and saved_s is not None and saved_s <= 0.0:
            # of so few steps only what they saved counts
            saved_s = None
        if self._rest.judge_rollout(reason or None, saved_s):
            self._news = f"das: drafting rests for a while: {reason}"
