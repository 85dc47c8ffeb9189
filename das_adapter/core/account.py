"""The one account of a rollout's time, and the one state of an engine: the five rules
in docs/how_it_works.md.
"""

from __future__ import annotations

import math
import sys
from enum import Enum
from typing import Any, Literal

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
    min_accepted = tuning.COLLAPSE_RATE * drafts
    if drafts < tuning.COLLAPSE_DRAFTS or accepted >= min_accepted:
        return None
    return (
        f"acceptance collapsed: {accepted:.0f} accepted tokens of {drafts:.0f} drafts"
    )


class Account:
    """Keeps the time of an engine's rollout, and decides when a drafter is asked."""

    def __init__(
        self,
        time: PlainTime,
        speculate: Speculate = "auto",
        look_steps: int = 1,
    ) -> None:
        """
        Args:
            time: what plain steps take.
            speculate: the key of the block.
            look_steps: steps in which the host works for one look for drafts.
        """
        self.time = time
        self.state = State.DRAFTING
        """What it does."""
        self.reason: str | None = None
        """Why, where there is more to say."""
        self.step = 0
        """Decode steps since the engine's start."""
        self._look_steps = look_steps
        self.look = Backoff(tuning.LOOK_FIRST_STEPS, tuning.LOOK_STEPS)
        self.probe_wait = tuning.PROBE_STEPS
        """Plain steps in a row after which a drafted one is due."""
        self.model_rest = RolloutRest()
        """Rollouts in which the model that drafts rests."""
        self._rest = RolloutRest()
        """Rollouts in which all drafting rests."""
        self._speculate = speculate
        self._news: str | None = None
        self._drafted_in_a_row = 0
        """Steps with drafts since the last one without."""
        self._plain_in_a_row = 0
        """Steps without drafts since the last one with some."""
        self._restart()

    def _restart(self) -> None:
        self.time.restart()
        self._on = False
        """Whether a number of requests, `speculate`, lets it draft."""
        self._drafted_steps = 0
        self._measuring = False
        """Whether plain steps are timed before a loss that is suspected is judged."""
        self._model_took_s = 0.0
        self._model_saved_s = 0.0

    # What is asked

    def advance(self, steps: int) -> None:
        """Count decode steps."""
        self.step += steps

    def asks(self, requests: int, drafted: bool) -> bool:
        """Return whether a drafter is asked at all at the end of this step of so many
        requests, which has verified drafts or not; where none is, a step without drafts
        is a baseline step.
        """
        if self.idle:
            return False
        return drafted or self.looks(requests)

    def looks(self, requests: int) -> bool:
        """Return whether drafts are looked for at the end of this step."""
        if self._measuring:
            return False
        return self.look.due(self.step, requests)

    def rest_steps(self, requests: int) -> int:
        """Return for how many steps after this one no drafter is asked, as far as can
        be said now.
        """
        if self.idle:
            return sys.maxsize
        if self._measuring:
            return 2 * tuning.JUDGED_SAMPLES
        next_look = self.look.due_in(self.step, requests)
        return max(0, next_look - 1)

    @property
    def idle(self) -> bool:
        """Whether no drafter is asked before the next weight sync: drafting has stopped
        or failed, or this rollout is at rest.
        """
        is_over = self.state in _OVER
        return is_over or self._rest.reason is not None

    def drafts_pay(self, running: int, gain: float | None, optimal: bool) -> bool:
        """Decide whether a step is drafted in; `gain`: predicted, as a share of its
        time, None: there is nothing to draft; `optimal`: whether the drafts were chosen
        for it.
        """
        gains = gain is not None and gain >= tuning.LEAST_GAIN
        may_draft = gains or not optimal
        if self._speculate == "always":
            return may_draft
        if self._speculate == "auto":
            min_gain = tuning.LEAST_GAIN if optimal else 0.0
            return gain is not None and gain >= min_gain
        factor = tuning.STAY_ON_FACTOR if self._on else 1.0
        max_requests = self._speculate * factor
        self._on = running <= max_requests
        return self._on and may_draft

    def due(self, probe: Probe, unseen: bool = False) -> bool:
        """Return whether the next step is due to be taken the other way; `unseen`: no
        such step is known, and no step is waited for.
        """
        if probe == "plain":
            return self._drafted_in_a_row >= tuning.PROBE_STEPS
        if not isinstance(self._speculate, str):
            return False
        wait = 0 if unseen else self.probe_wait
        return self._plain_in_a_row >= wait

    def probe(self, probe: Probe, unseen: bool = False) -> bool:
        """Return whether a step is `due` to be taken the other way; if it is, the next
        such step waits again.
        """
        if not self.due(probe, unseen):
            return False
        if probe == "plain":
            self._drafted_in_a_row = 0
            return True
        self._plain_in_a_row = 0
        if not unseen:
            doubled = 2 * self.probe_wait
            self.probe_wait = min(doubled, tuning.RARE_STEPS)
        return True

    def decided(
        self,
        running: int,
        drafted: bool,
        probing: bool,
        plain_due: bool = False,
        seconds: float = 0.0,
    ) -> None:
        """Record what was decided for a step; `probing`, `plain_due`: to see what a
        drafted, or a plain, step costs; `seconds`: what it takes without drafts, 0: not
        known.
        """
        drafts = drafted and not probing
        if drafts:
            self.probe_wait = tuning.PROBE_STEPS
        looks_s = tuning.LOOK_SHARE * seconds
        wait_steps = math.inf
        if looks_s:
            requests_s = tuning.LOOK_REQUEST_S * running
            look_s = self._look_steps * (tuning.LOOK_S + requests_s)
            wait_steps = look_s / looks_s
        again_soon = drafted or probing
        self.look.done(self.step, running, again_soon, wait_steps)
        if self.state in _OVER:  # since the drafter was asked
            return
        self.reason = None
        if drafts:
            self.state = State.DRAFTING
        elif probing or plain_due:
            self.state = State.PROBING
        else:
            self.state = State.RESTING

    # What is told

    def record_step(self, step: TimedStep, predicted: float | None) -> None:
        """Record a step that was timed, as `PlainTime.record_step` does."""
        drafted = step.drafted
        if drafted:
            self._drafted_in_a_row += 1
            self._plain_in_a_row = 0
        else:
            self._plain_in_a_row += 1
            self._drafted_in_a_row = 0
        self.time.record_step(step, predicted)
        requests = len(step.slots)
        if step.asked:
            self.record_model(took_s=step.drafting_seconds)
        if self._measuring and self.time.known_at(requests):
            self._measuring = False
            self._judge_batch(requests)
        if not drafted:
            return
        self._drafted_steps += 1
        if self._speculate == "always":
            return
        batch_steps = self.time.batch.steps
        is_checked = self._drafted_steps % tuning.GUARD_STEPS == 0
        if is_checked and batch_steps >= tuning.GUARD_STEPS:
            self._judge_batch(requests)

    def record_baseline_steps(self, slots: Ints, sums: Floats) -> None:
        """Record steps as `PlainTime.record_baseline_steps` does; they are not given
        to `record_step`.
        """
        self._plain_in_a_row += int(sums[0])
        self.time.record_baseline_steps(slots, sums)

    def record_model(self, took_s: float = 0.0, saved_s: float = 0.0) -> None:
        """Record seconds that the passes of the model that drafts took, or that its
        accepted tokens were worth. Beside prompts `time` is told them as well: such
        steps are not timed.
        """
        self._model_took_s += took_s
        self._model_saved_s += saved_s

    def stop(self, reason: str, state: State = State.STOPPED) -> None:
        """Draft no more until the next weight sync."""
        if self.state in (State.FAILED, state):
            return
        self.state = state
        self.reason = reason
        self._news = None
        if state is not State.FAILED:
            self._news = f"das: {reason}: no drafts until the next weight sync"

    def sync(self, model_may_rest: bool = True) -> None:
        """Judge the rollout that a weight sync ends, and begin the next. Two weight
        syncs without a step between them are one.
        """
        if self.time.passed_s or self._model_took_s:
            self._judge(model_may_rest)
        self.forget()

    def forget(self) -> None:
        """Begin the next rollout, and judge nothing by the one before."""
        self._restart()
        self.probe_wait = tuning.PROBE_STEPS
        self.look.restart()
        self.reason = self._rest.reason
        self.state = State.DRAFTING
        if self.reason:
            self.state = State.RESTING

    def pop_news(self) -> str | None:
        """Return what has changed for the worse since the last call, as a line of the
        log.
        """
        news = self._news
        self._news = None
        return news

    def figures(self) -> dict[str, Any]:
        """Return the figures since the last weight sync, as plain numbers."""
        of_stock = None  # with other settings the user decides
        saved_s = self.time.saved_s()
        if self._speculate == "auto":
            of_stock = self.time.of_stock()
        reason = self.reason
        if self.state is State.FAILED:
            reason = None
        return {
            "time_saved_s": saved_s,
            "of_stock": of_stock,
            "state": self.state.value,
            "reason": reason,
        }

    # Inside

    def _judge_batch(self, requests: int) -> None:
        """Stop drafting where it has lost in the present batch, of so many requests;
        where plain steps of that size are not known, some are taken first.
        """
        reason = self._explain_batch_loss()
        if reason is None:
            return
        if self.time.known_at(requests):
            self.stop(reason)
        else:
            self._measuring = True

    def _explain_batch_loss(self) -> str | None:
        """Say that the drafts of the present batch cost more than they save; None: they
        do not. The estimate is as good as the models of step times, which are brought
        up to date before it is held against the drafts.
        """
        batch = self.time.batch
        drafted_loss_s = tuning.GUARD_LOSS * batch.drafted_seconds
        rollout_loss_s = tuning.ROLLOUT_LOSS * batch.seconds
        max_loss_s = drafted_loss_s + rollout_loss_s
        for _ in range(2):
            saved_s = self.time.batch_saved_s(batch)
            if saved_s >= -max_loss_s:
                return None
            self.time.fit()
        return (
            f"speculation cost {-saved_s:.2f} s in {batch.drafted_seconds:.2f} s of"
            " drafted steps"
        )

    def _judge(self, model_may_rest: bool) -> None:
        """Say which of the next rollouts begin at rest."""
        if self._speculate != "auto":
            return
        took_s = self._model_took_s
        saved_s = self._model_saved_s
        loss_s = took_s - saved_s
        # None: too little is known; empty: it has not lost
        rollout_reason = self.time.explain_loss()
        model_reason = None
        if model_may_rest:
            max_loss_s = tuning.ROLLOUT_LOSS * self.time.plain_s()
            if loss_s > max_loss_s:
                model_reason = (
                    f"its passes took {took_s:.2f} s of a rollout, and its tokens saved"
                    f" {saved_s:.2f} s"
                )
        model_saved_s = None
        if took_s:
            model_saved_s = saved_s - took_s
        if self.model_rest.judge_rollout(model_reason, model_saved_s):
            self._news = f"das: the model that drafts rests for a while: {model_reason}"
        rollout_saved_s = self.time.saved_s() if self.time.known else None
        too_few_steps = rollout_reason is None
        if too_few_steps and rollout_saved_s is not None and rollout_saved_s <= 0.0:
            # only what they saved counts
            rollout_saved_s = None
        if self._rest.judge_rollout(rollout_reason or None, rollout_saved_s):
            self._news = f"das: drafting rests for a while: {rollout_reason}"
