"""A simulated engine's drafter as a run has it: the package's own policy of drafts
chooses. No other file of the simulator calls the policy.
"""

from __future__ import annotations

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.core.latency import StepModel
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
from das_adapter.sim.requests import Floats, Ints, Requests, int_zeros
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
            first = self.policies[0]
            for policy in self.policies[1:]:
                policy.share_with(first)
        # steps since the policy was asked
        self._walked = int_zeros(engines)
        # steps until it is asked again
        self._left = int_zeros(engines)
        # whether an engine drafts
        self._on = np.ones(engines, dtype=bool)
        # whether the policy chose to verify anything when last asked
        self._kept = np.ones(engines, dtype=bool)
        # whether it was asked once more because its answer differed
        self._again = np.zeros(engines, dtype=bool)

    def _policy(self, limit: int, prior: Prior | None) -> DraftPolicy:
        das = self._das
        model: ModelDrafts | None = None
        if self.copy:
            model = ModelDrafts(
                das.model_tokens,
                not das.neural,
                parallel=das.parallel,
            )
        steps: StepModel | None = None
        if prior is not None:
            steps = prior.steps
            if model is not None:
                model.set_pass_prior(prior.passes)
        return DraftPolicy(das, limit, steps, model)

    def free_steps(self, rows: Ints) -> FreeSteps | None:
        if not self._left.any():
            return None
        requests = self._requests
        assert isinstance(self.history, Given)
        engine = requests.engine[rows]
        drafting = self._on[engine]
        log_min_chance = requests.log_min_chance[rows]
        return FreeSteps(
            source=self.history,
            steps=self._left,
            log_min_chance=np.where(drafting, log_min_chance, np.inf),
            max_draft_tokens=requests.max_draft_tokens[rows],
            seconds=_search_seconds,
        )

    def record_free_steps(self, steps: Ints) -> None:
        self._left -= steps
        self._walked += steps

    def begin(self, rows: Ints) -> None:
        self.history.begin(rows)

    def step(self, results: list[EngineStep]) -> list[float]:
        return [self._plan(result) for result in results]

    def end(self, rows: Ints) -> None:
        requests = self._requests
        self.history.end(rows)
        slots = requests.slot[rows]
        for row in rows[slots >= 0].tolist():
            engine = requests.engine[row]
            slot = int(requests.slot[row])
            self.policies[engine].end(slot)

    def sync(self, version: int, rows: Ints, responses: Responses) -> None:
        self.history.sync(version, rows)
        for engine, policy in enumerate(self.policies):
            learned = responses
            if self._shared and engine > 0:
                # the first has told all
                learned = responses[:0]
            policy.weight_sync(learned)

    def _plan(self, result: EngineStep) -> float:
        """Have an engine's policy choose after a step; return the seconds of its work
        and of the drafting model's passes.
        """
        requests = self._requests
        rows = result.rows
        policy = self.policies[result.engine]
        slots = self._slots(policy, rows)
        context = requests.context(rows)
        outcome = self._outcome(result, slots, context)
        decision = policy.next(outcome)
        plan = StepPlan.nothing(len(rows))
        search: Search | None = None
        offer: SimOffer | None = None
        asked = True
        if isinstance(decision, Rest):
            asked = decision.asked
        else:
            search = decision
            offer = self._offer(rows, search)
            chosen = self._choose(policy, search, offer)
            if chosen is not None:
                plan = chosen
        own_s = 0.0
        if asked:
            own_s = tuning.LOOK_S
        if offer is not None:
            own_s += tuning.LOOK_REQUEST_S * len(rows)
        self._keep_drafting(result.engine, rows, plan.history, search, offer)
        requests.num_draft_tokens[rows] = plan.history
        requests.num_draft_hits[rows] = 0
        if offer is not None:
            requests.num_draft_hits[rows] = offer.hits
        passes_s = 0.0
        if self.copy:
            room = requests.room(rows)
            drafted = np.minimum(plan.model, room)
            passes_s = self._copied(policy, rows, drafted, context)
        policy.flush()
        if result.timed:
            has_drafts = result.tokens > len(rows)
            step = TimedStep(
                slots,
                result.got,
                result.tokens,
                result.seconds + own_s,
                passes_s,
                context=int(context.sum()),
                asked=asked or has_drafts,
            )
            policy.timed(step)
        known = policy.latency.known
        self._rest(result.engine, known=known)
        return own_s + passes_s

    def _offer(self, rows: Ints, search: Search) -> SimOffer | None:
        """Return the drafts of the history that a search finds; None: it is asked for
        none.
        """
        if not self._das.looked_up:
            return None
        room = self._requests.room(rows)
        limits = np.minimum(search.max_tokens, room)
        return self.history.offer(rows, limits, search.min_chance)

    def _choose(
        self,
        policy: DraftPolicy,
        search: Search,
        offer: SimOffer | None,
    ) -> StepPlan | None:
        """Return what the policy verifies of an offer; None: it rests."""
        candidates: Candidates | None = None
        if offer is not None:
            candidates = offer.chances, offer.offsets
        chosen = policy.choose(search, candidates)
        if isinstance(chosen, Rest):
            return None
        return chosen

    def _slots(self, policy: DraftPolicy, rows: Ints) -> Ints:
        """Return the slots of running requests; those that have none begin."""
        requests = self._requests
        slots = requests.slot[rows]
        for row in rows[slots < 0].tolist():
            problem = int(requests.problem[row])
            written = int(requests.num_written[row])
            max_tokens = int(requests.max_tokens[row])
            requests.slot[row] = policy.begin(problem, written, max_tokens)
            requests.num_told[row] = written
        return requests.slot[rows]

    def _outcome(
        self,
        result: EngineStep,
        slots: Ints,
        context: Ints,
    ) -> Outcome:
        """Return what a step brought, and what the steps brought that were left out
        before it.
        """
        requests = self._requests
        rows = result.rows
        written = requests.num_written[rows]
        before = written - result.got
        untold = before - requests.num_told[rows]
        unseen: Ints | None = None
        if (untold > 0).any():
            unseen = np.maximum(0, untold)
        requests.num_told[rows] = written
        carried: Ints | None = None
        if result.carried.any():
            carried = result.carried
        by_model: Ints | None = None
        if self.copy:
            by_model = result.copied
        output_tokens = requests.num_output_tokens[rows]
        max_tokens = requests.max_tokens[rows]
        length = np.minimum(output_tokens, max_tokens)
        left_out = self._walked[result.engine]
        return Outcome(
            slots,
            result.got,
            carried=carried,
            by_model=by_model,
            room=length - 1 - written,
            context=context,
            unseen=unseen,
            left_out=int(left_out),
        )

    def _rest(self, engine: int, known: bool) -> None:
        """Ask the policy after `stride` steps again; at once if it does not know
        what steps take, and once more if its answer differs from those before it.
        """
        changed = self._kept[engine] != self._on[engine]
        asked_twice = self._again[engine]
        differs = known and changed and not asked_twice
        self._again[engine] = differs
        self._walked[engine] = 0
        if known and not differs:
            self._left[engine] = self._stride - 1
        else:
            self._left[engine] = 0

    def _copied(
        self,
        policy: DraftPolicy,
        rows: Ints,
        drafted: Ints,
        context: Ints,
    ) -> float:
        """Let the model draft so many tokens; return the seconds of its passes."""
        requests = self._requests
        drafts = policy.drafts
        assert self.copy is not None
        assert self.pass_seconds is not None
        assert drafts is not None
        offer = self.copy.offer(rows, drafted, 0.0)
        requests.num_model_tokens[rows] = drafted
        requests.num_model_hits[rows] = offer.hits
        passes_s = 0.0
        longest = int(drafted.max(initial=0))
        num_passes = drafts.passes_for(longest)
        for place in range(num_passes):
            drafted_before = place
            if self._das.neural:
                drafted_before = 0
            in_pass = drafted > drafted_before
            num_requests = int(in_pass.sum())
            context_tokens = float(context[in_pass].sum())
            of_pass = self.pass_seconds(
                np.array([float(num_requests)]),
                np.array([context_tokens]),
            )
            pass_s = float(of_pass[0])
            drafts.record_pass(num_requests, pass_s, context_tokens)
            passes_s += pass_s
        return passes_s

    def _keep_drafting(
        self,
        engine: int,
        rows: Ints,
        kept: Ints,
        search: Search | None,
        offer: SimOffer | None,
    ) -> None:
        """Note what requests draft until the policy is asked again. One answer alone
        against those before it is a probe.
        """
        drafts = bool(kept.any())
        if drafts == self._kept[engine]:
            self._on[engine] = drafts
        self._kept[engine] = drafts
        if not drafts or self._stride == 1:
            return
        if search is None or offer is None:
            return
        requests = self._requests
        room = requests.room(rows)
        limits = search.max_tokens
        # the chance of the first token that was left out, a little raised
        padded = np.append(offer.chances, 0.0)
        first_places = offer.offsets[:-1] + kept
        first_left_out = padded[first_places] * (1.0 + 1e-6)
        offered = np.diff(offer.offsets)
        cut = kept < offered
        min_chance = np.where(cut, first_left_out, search.min_chance)
        with np.errstate(divide="ignore"):
            log_min_chance = np.log(min_chance)
        not_allowed = limits <= 0
        undrafted = not_allowed & (room > 0)
        log_min_chance[undrafted] = np.inf
        limited = limits < room
        longest = self._das.num_draft_tokens
        requests.log_min_chance[rows] = log_min_chance
        requests.max_draft_tokens[rows] = np.where(limited, limits, longest)


def _search_seconds(requests: Floats, context: Floats) -> Floats:
    """Return the times of the policy's own work and its searches in steps."""
    return tuning.LOOK_S + tuning.LOOK_REQUEST_S * requests
