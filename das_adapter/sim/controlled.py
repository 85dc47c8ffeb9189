"""A simulated engine's drafter as a run has it: the package's own policy of drafts
chooses. No other file of the simulator calls the policy.
"""

from __future__ import annotations

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.core.length import Responses
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.policy import DraftPolicy
from das_adapter.core.roofline import Prior
from das_adapter.core.steps import (
    Candidates,
    Outcome,
    Rest,
    Search,
    StepPlan,
    TimedStep,
)
from das_adapter.sim.drafting import Drafting, EngineStep, FreeSteps
from das_adapter.sim.requests import Ints, Requests
from das_adapter.sim.sources import Given, SimOffer, Source
from das_adapter.sim.steps import Seconds

SHARED = 16
"""Engines beyond which all share one latency model and one length model: they are
alike.
"""


class Controlled(Drafting):
    """The package's policy of drafts, one for each engine."""

    def __init__(
        self,
        das: DasConfig,
        requests: Requests,
        engines: int,
        limit: int,
        history: Source,
        copy: Given | None = None,
        pass_seconds: Seconds | None = None,
        prior: Prior | None = None,
        stride: int = 1,
    ) -> None:
        """
        Args:
            limit: tokens of the longest response that is possible.
            history: what is drafted from.
            copy: what the tokens of the policy copy, or of a neural drafter, are worth;
                None: no model drafts.
            pass_seconds: time of one pass of that model.
            prior: what the policies know of step times before the first.
            stride: a policy that knows what steps take is asked once in so many of
                them, and again at once if it begins or stops drafting, which may be a
                probe; in between, a request drafts tokens whose chance is at least that
                at which the policy ended its draft.
        """
        self._das = das
        self._requests = requests
        self._stride = stride
        self.history = history
        self.copy = copy
        self.pass_seconds = pass_seconds
        self.policies = [self._policy(limit, prior) for _ in range(engines)]
        self._shared = engines > SHARED
        if self._shared:
            for policy in self.policies[1:]:
                policy.share_with(self.policies[0])
        # steps since the policy was asked
        self._walked = np.zeros(engines, dtype=np.int64)
        self._left = np.zeros(engines, dtype=np.int64)  # steps until it is asked again
        self._on = np.ones(engines, dtype=bool)  # whether an engine drafts
        # whether the policy chose to verify anything when last asked
        self._kept = np.ones(engines, dtype=bool)
        # whether it was asked once more because its answer differed
        self._again = np.zeros(engines, dtype=bool)

    def _policy(self, limit: int, prior: Prior | None) -> DraftPolicy:
        das = self._das
        model = (
            ModelDrafts(das.model_tokens, not das.neural, parallel=das.parallel)
            if self.copy
            else None
        )
        if model is not None and prior is not None:
            model.set_pass_prior(prior.passes)
        return DraftPolicy(das, limit, prior and prior.steps, model)

    def free_steps(self, rows: Ints) -> FreeSteps | None:
        if not self._left.any():
            return None
        r = self._requests
        assert isinstance(self.history, Given)
        on = self._on[r.engine[rows]]
        log_min_chance = np.where(on, r.log_min_chance[rows], np.inf)
        return FreeSteps(
            self.history,
            self._left,
            log_min_chance,
            r.max_draft_tokens[rows],
            lambda b, _: tuning.LOOK_S + tuning.LOOK_REQUEST_S * b,
        )

    def record_free_steps(self, steps: Ints) -> None:
        self._left -= steps
        self._walked += steps

    def begin(self, rows: Ints) -> None:
        self.history.begin(rows)

    def step(self, ticks: list[EngineStep]) -> list[float]:
        return [self._plan(tick) for tick in ticks]

    def end(self, rows: Ints) -> None:
        r = self._requests
        self.history.end(rows)
        for row in rows[r.slot[rows] >= 0].tolist():
            self.policies[r.engine[row]].end(int(r.slot[row]))

    def sync(self, version: int, rows: Ints, responses: Responses) -> None:
        self.history.sync(version, rows)
        for engine, policy in enumerate(self.policies):
            policy.weight_sync(responses[:0] if self._shared and engine else responses)

    def _plan(self, tick: EngineStep) -> float:
        """Have an engine's policy choose after a step; return the seconds of its work
        and of the drafting model's passes.
        """
        r = self._requests
        rows = tick.rows
        policy = self.policies[tick.engine]
        slots = self._slots(policy, rows)
        context = r.num_prompt_tokens[rows] + r.num_written[rows]
        plan = StepPlan.nothing(len(rows))
        looked_up: SimOffer | None = None
        own_s = 0.0
        decision = policy.next(self._outcome(tick, slots, context))
        asked = not isinstance(decision, Rest) or decision.asked
        if asked:
            own_s = tuning.LOOK_S
        if not isinstance(decision, Rest):
            candidates: Candidates | None = None
            if self._das.looked_up:
                limits = np.minimum(decision.max_tokens, r.room(rows))
                looked_up = self.history.offer(rows, limits, decision.min_chance)
                candidates = looked_up.chances, looked_up.offsets
                own_s += tuning.LOOK_REQUEST_S * len(rows)
            chosen = policy.choose(decision, candidates)
            if not isinstance(chosen, Rest):
                plan = chosen
            self._keep_drafting(tick.engine, rows, plan.history, decision, looked_up)
        else:
            self._keep_drafting(tick.engine, rows, plan.history, None, None)
        r.num_draft_tokens[rows] = plan.history
        r.num_draft_hits[rows] = 0 if looked_up is None else looked_up.hits
        passes_s = 0.0
        if self.copy:
            drafted = np.minimum(plan.model, r.room(rows))
            passes_s = self._copied(policy, tick, drafted, context)
        policy.flush()
        if tick.timed:
            step = TimedStep(
                slots,
                tick.got,
                tick.tokens,
                tick.seconds + own_s,
                passes_s,
                context=int(context.sum()),
                asked=asked or tick.tokens > len(rows),
            )
            policy.timed(step)
        self._rest(tick.engine, known=policy.latency.known)
        return own_s + passes_s

    def _slots(self, policy: DraftPolicy, rows: Ints) -> Ints:
        """Return the slots of running requests; those that have none begin."""
        r = self._requests
        for row in rows[r.slot[rows] < 0].tolist():
            written = int(r.num_written[row])
            r.slot[row] = policy.begin(
                int(r.problem[row]), written, int(r.max_tokens[row])
            )
            r.num_told[row] = written
        return r.slot[rows]

    def _outcome(self, tick: EngineStep, slots: Ints, context: Ints) -> Outcome:
        """Return what a step brought, and what the steps brought that were left out
        before it.
        """
        r = self._requests
        rows = tick.rows
        unseen = np.maximum(0, r.num_written[rows] - tick.got - r.num_told[rows])
        r.num_told[rows] = r.num_written[rows]
        length = np.minimum(r.num_output_tokens[rows], r.max_tokens[rows])
        return Outcome(
            slots,
            tick.got,
            carried=tick.carried if tick.carried.any() else None,
            by_model=tick.copied if self.copy else None,
            room=length - 1 - r.num_written[rows],
            context=context,
            unseen=unseen if unseen.any() else None,
            left_out=int(self._walked[tick.engine]),
        )

    def _rest(self, engine: int, known: bool) -> None:
        """Ask the policy after `stride` steps again; at once if it does not know
        what steps take, and once more if its answer differs from those before it.
        """
        differs = (
            known and self._kept[engine] != self._on[engine] and not self._again[engine]
        )
        self._again[engine] = differs
        self._left[engine] = 0 if differs or not known else self._stride - 1
        self._walked[engine] = 0

    def _copied(
        self, policy: DraftPolicy, tick: EngineStep, drafted: Ints, context: Ints
    ) -> float:
        """Let the model draft so many tokens; return the seconds of its passes."""
        r = self._requests
        rows = tick.rows
        assert (
            self.copy is not None
            and self.pass_seconds is not None
            and policy.drafts is not None
        )
        r.num_model_tokens[rows] = drafted
        r.num_model_hits[rows] = self.copy.offer(rows, drafted, 0.0).hits
        passes_s = 0.0
        num_passes = policy.drafts.passes_for(int(drafted.max(initial=0)))
        for place in range(num_passes):
            in_pass = drafted > (0 if self._das.neural else place)
            num_requests = int(in_pass.sum())
            context_tokens = float(context[in_pass].sum())
            of_pass = self.pass_seconds(
                np.array([float(num_requests)]), np.array([context_tokens])
            )
            pass_s = float(of_pass[0])
            policy.drafts.record_pass(num_requests, pass_s, context_tokens)
            passes_s += pass_s
        return passes_s

    def _keep_drafting(
        self,
        engine: int,
        rows: Ints,
        kept: Ints,
        search: Search | None,
        looked_up: SimOffer | None,
    ) -> None:
        """Note what requests draft until the policy is asked again. One answer alone
        against those before it is a probe.
        """
        drafts = bool(kept.any())
        if drafts == self._kept[engine]:
            self._on[engine] = drafts
        self._kept[engine] = drafts
        if not drafts or self._stride == 1 or search is None or looked_up is None:
            return
        r = self._requests
        room = r.room(rows)
        limits = search.max_tokens
        chances, offsets, _ = looked_up
        first_left_out = np.append(chances, 0.0)[offsets[:-1] + kept] * (1.0 + 1e-6)
        cut = kept < np.diff(offsets)
        with np.errstate(divide="ignore"):
            log_min_chance = np.log(np.where(cut, first_left_out, search.min_chance))
        log_min_chance[(limits <= 0) & (room > 0)] = np.inf
        r.log_min_chance[rows] = log_min_chance
        r.max_draft_tokens[rows] = np.where(
            limits < room, limits, self._das.num_draft_tokens
        )
