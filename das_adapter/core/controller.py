"""How many draft tokens, for whom, and from where: asked by a drafter at every decode step.

An accepted token saves a request one token. What that is worth depends on whether the request decides when the rollout
ends: the chance of that, times a round of the batch that will be left then, plus the request's own share of a round.
A draft token costs what it adds to the step, and, where a model drafts it, a pass of the model. Where requests
keep arriving nobody decides the end, and a token is worth the engine's time per token.

A decode step is one call, `plan`: what the step brought goes in, the next step's drafts come out. How long it took is
known when the next one begins; then comes `timed`. Everything follows from what the controller is told, step times
included; it reads no clock. In a tensor-parallel engine vLLM takes the drafts of one rank and hands them to all, so
that what the others decide does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.config import Budget, DasConfig
from das_adapter.core.acceptance import AcceptanceCurves
from das_adapter.core.budget import Allocation, Worth, allocate, class_budgets, makespan_weights, plan_rollout
from das_adapter.core.latency import StepModel, StepTimes
from das_adapter.core.length import LengthModel, Responses, classes, expected_remaining
from das_adapter.core.model_drafts import ModelDrafts, ModelPlan
from das_adapter.core.pacing import Backoff
from das_adapter.core.requests import PACE_STEPS, ClassCounts, RequestTable
from das_adapter.core.toggle import MARGIN, Savings, Toggle

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float32]
HistoryDrafts = Callable[[Ints, float], tuple[Chances, Ints]]
"""Drafts from the history: most tokens of each request int64 [b] and the chance under which a draft ends go in; out
come survival chances float32 [n], request after request, and offsets int64 [b + 1]: request i's are `chances[o[i]:o[i +
1]]`."""

CONSIDER_STEPS = 16
"""While drafts don't pay, the controller considers them after 1, 2, 4, ... steps, at most this many."""
REPLAN_STEPS = 64
"""Steps after which the worth of a token is computed anew, at the latest; after an arrival 2, 4, 8, ..."""
PROBE_STEPS = 128
"""After so many steps one is taken the other way (plain, or drafted), so that both kinds of step stay known."""
PROBE_REQUESTS = 4
"""Requests that get a draft token at most in a step that is drafted in only to see what it costs: the same ones each
time, for a neural drafter has to read what they have written since."""
RARE_STEPS = 1024
"""Where nothing is ever drafted but by probes, the wait for the next one doubles up to so many steps."""
REFILL_STEPS = 64
"""Steps for which a request that took another's place makes the batch one that refills."""
GUARD_STEPS = 64
"""Drafted steps between two looks at the time saved."""
LEAST_GAIN = 0.02
"""Predicted gain under which a step is not drafted in, as a share of its time: less than step times vary."""
LEAST_CHANCE = 0.005
"""Chance under which no draft token is considered."""
FIXED_CHANCE = 0.15
"""The same where the budgets are fixed and costs are not asked (`das`, `uniform`): a token that is rejected six times
out of seven is not worth its place in the step."""
_NEVER, _LAST = -(2**30), 2**30
_NO_DRAFTS: Chances = np.zeros(0, dtype=np.float32)
_FREE = StepModel(base=0.0, token=0.0)
"""Costs where nothing is asked but the fixed budgets."""


def least_chance(budget: Budget) -> float:
    """Return the chance under which a draft ends, as far as that never changes."""
    return {"optimal": LEAST_CHANCE, "unlimited": 0.0}.get(budget, FIXED_CHANCE)


class Decoded(NamedTuple):
    """What a decode step brought; arrays int64 [b], request by request."""

    slots: Ints
    got: Ints
    """Tokens."""
    carried: Ints | None
    """Draft tokens that were verified; None if nobody had any."""
    by_model: Ints | None
    """How many of these a model drafted."""
    room: Ints
    """Draft tokens that still fit before the request's end."""
    steps: int = 1
    """Decode steps since the last call; more where a simulation leaves some out."""
    context: Ints | None = None
    """Tokens of each request's text, prompt included; None: not known, and step times that depend on it are taken to
    have none."""


class TimedStep(NamedTuple):
    """What a decode step took. Steps that also read prompts are not timed."""

    slots: Ints
    got: Ints
    """Tokens that each request got, int64 [b]."""
    tokens: int
    """In the policy's forward pass, draft tokens included."""
    seconds: float
    """From its begin to that of the next, without `drafting_seconds`."""
    drafting_seconds: float = 0.0
    """Of the model that drafts, at its end."""
    passes: int = 0
    """Forward passes of that model."""
    context: int = 0
    """Tokens of context that all requests have together."""


class Search(NamedTuple):
    """What to look for, before it is known what there is."""

    limits: Ints
    """Most tokens of each request, int64 [b]."""
    floor: float
    """Chance under which a draft ends."""


class StepPlan(NamedTuple):
    """The drafts of the next step, int64 [b] each."""

    history: Ints
    """Tokens of each request's draft from the history to verify."""
    model: Ints
    """Tokens that a model drafts for each request, instead."""


@dataclass
class Batch:
    """Where the batch stands: steps are counted from the engine's start."""

    step: int = 0
    running: int = 0
    arrivals: int = 0
    """Requests that joined since drafts were last considered."""
    last_end: int = _NEVER
    """Step in which a request left last."""
    last_refill: int = _NEVER
    """Step in which a request joined last while others had left before."""
    synced: int = 0
    """Step of the last weight sync."""
    since_plain: int = 0
    """Drafted steps in a row."""
    since_draft: int = 0
    """Plain steps in a row."""
    drafted_steps: int = 0
    drafted_seconds: float = 0.0

    @property
    def refilling(self) -> bool:
        """Whether requests still arrive while others end."""
        return self.step - self.last_refill < REFILL_STEPS

    def settle(self) -> None:
        """A batch is over: what follows has a beginning of its own."""
        self.last_end = self.last_refill = _NEVER
        self.drafted_steps, self.drafted_seconds = 0, 0.0


class Controller:
    """The decisions of one engine. A live request has a slot from `open` to `close`."""

    def __init__(
        self,
        config: DasConfig,
        limit: int,
        prior: StepModel | None = None,
        drafts: ModelDrafts | None = None,
        common: Sequence[int] | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """
        Args:
            config: says when and how far to draft.
            limit: longest response there can be, tokens.
            prior: latency model until the engine's own steps give one.
            drafts: of the model that drafts (the policy copy, a neural drafter), where there is one.
            common: lengths of which all requests of a step have the same, rising, whatever there is to draft for each;
                None: each has its own.
            sizes: tokens for which the engine has captured CUDA graphs, rising, see `StepModel`.
        """
        self.times = StepTimes(prior, sizes=sizes)
        self.lengths = LengthModel(limit)
        self.toggle = Toggle(config.speculate)
        self.drafts = drafts
        self.requests = RequestTable()
        self.stopped: str | None = None
        """Why speculation is off until the next weight sync; None while it may go on."""
        self.planned_rounds = 0.0
        """Decode steps since the weight sync after which DAS's optimum would have ended every request."""
        self._judged = config.speculate == "auto"
        """Whether whole rollouts of the model that drafts are judged."""
        self._policy, self._most = config.budget, config.num_draft_tokens
        self._common = common
        self._curves = AcceptanceCurves()
        self._batch = Batch()
        self._consider, self._replan = Backoff(1, CONSIDER_STEPS), Backoff(2, REPLAN_STEPS)
        self._least_chance = LEAST_CHANCE
        self._model: StepModel | None = None  # the latency model at the batch's context
        self._probe_wait = PROBE_STEPS
        self._drafting_seconds = 0.0  # a step's, lately
        self._savings, self._saved = Savings(), 0.0
        self._by_class = ClassCounts()

    # Requests

    def open(self, problem: int, written: int, most: int) -> int:
        """Give a request that joined a slot: tokens of its response that are there already, and the most there can
        be."""
        cdf = self.lengths.cdf(problem).copy()
        cdf[np.searchsorted(self.lengths.edges, most) :] = 1.0
        batch = self._batch
        if not batch.running:  # another batch (a validation's, say), not one that refills
            self._settle()
        elif batch.last_end >= 0:
            batch.last_refill = batch.step
        batch.arrivals += 1
        batch.running += 1
        return self.requests.open(problem, written, cdf)

    def close(self, slot: int) -> None:
        """Close the slot of a request that ended, and learn from what became of it."""
        table = self.requests
        tokens = int(table.credited[slot])
        self._savings.finished.append(tokens)
        if tokens:
            drafted, accepted = int(table.drafted[slot]), int(table.accepted[slot])
            drafts, hit = int(table.drafts[slot]), int(table.drafts_hit[slot])
            self._curves.observe(int(table.problem[slot]), tokens, drafted, accepted, drafts, hit)
        self._batch.last_end = self._batch.step
        self._batch.running -= 1
        table.close(slot)

    def sync(self, responses: Responses) -> None:
        """Learn finished responses' lengths, at a weight sync, and start again."""
        self.lengths.observe(responses)
        self.lengths.refit()
        self._curves.sync()
        self.times.fit()
        self.toggle.reset()
        if self.drafts is not None:
            self.drafts.sync()
        self._settle()
        self._saved, self.stopped = 0.0, None
        self.planned_rounds, self._batch.synced = 0.0, self._batch.step
        self._consider.restart()
        self._probe_wait = PROBE_STEPS
        self.requests.credited[:] = 0.0

    # A decode step

    def plan(self, decoded: Decoded, history: HistoryDrafts | None = None) -> StepPlan:
        """Take what a decode step brought, and decide on the drafts of the next: `begin`, then `decide`.

        Args:
            decoded: see there.
            history: asked at most once for drafts from the history; None: it is not drafted from.
        """
        search = self.begin(decoded)
        return self.decide(decoded.slots, search, None if search is None or history is None else history(*search))

    def begin(self, decoded: Decoded) -> Search | None:
        """Take what a decode step brought, and say what to look for; None: nothing is drafted for the next."""
        slots, running = decoded.slots, len(decoded.slots)
        self._batch.step += decoded.steps
        self.requests.advance(slots, decoded.got, decoded.carried, self._by_class)
        if self.drafts is not None and decoded.by_model is not None and decoded.by_model.any():
            mine = decoded.by_model > 0
            drafted = decoded.by_model[mine]
            accepted = np.minimum(drafted, decoded.got[mine] - 1)
            self.drafts.acceptance.observe(drafted, accepted)
            worth = self.requests.worth_own[slots[mine]] + self.requests.worth_tail[slots[mine]]
            self.drafts.saved_s += float(accepted @ worth)
        if self.stopped or not running or not (self._always or self._consider.due(self._batch.step, running)):
            return None
        context = np.zeros(running) if decoded.context is None else decoded.context
        self._model = self.times.model and self.times.model.at(float(context.mean()))
        return Search(self._draft_limits(slots, decoded.room, context), self._floor)

    def decide(self, slots: Ints, search: Search | None, drafts: tuple[Chances, Ints] | None = None) -> StepPlan:
        """Decide on the drafts of the next step.

        Args:
            slots: of its requests, int64 [b].
            search: what `begin` has returned.
            drafts: what was found in the history, see `HistoryDrafts`; None: nothing was looked for.
        """
        if search is None:
            nothing = np.zeros(len(slots), dtype=np.int64)
            return StepPlan(nothing, nothing)
        chances, offsets = drafts or (_NO_DRAFTS, np.zeros(len(slots) + 1, dtype=np.int64))
        return self._share_out(slots, search.limits, chances, offsets)

    def beside(self, seconds: float) -> None:
        """Take what the model that drafts took in a step that also read prompts."""
        if self.drafts is not None and self._judged:
            self.drafts.took_s += seconds

    def missed(self, slots: Ints, tokens: Ints) -> None:
        """Take tokens that requests got, one a step, in steps in which nothing was planned, int64 [requests] each."""
        self.requests.written[slots] += tokens
        np.add.at(self._by_class.steps, self.requests.length_class[slots], tokens)

    def timed(self, step: TimedStep) -> None:
        """Take how long a decode step took."""
        running, drafted = len(step.slots), step.tokens > len(step.slots)
        batch = self._batch
        self.times.add(step.tokens, running, drafted, step.seconds, step.context)
        self.beside(step.drafting_seconds)
        batch.since_plain = batch.since_plain + 1 if drafted else 0
        batch.since_draft = 0 if drafted else batch.since_draft + 1
        self._drafting_seconds += (step.drafting_seconds - self._drafting_seconds) / PACE_STEPS
        self.times.keep_fitted()
        model = self.times.model
        if model is None:
            return
        if self.drafts is not None:
            self.drafts.plain_s += model.step(running, running, False, step.context)
        self.requests.credited[step.slots] += step.got
        got = int(step.got.sum())
        self._savings.step(step.seconds, running, got, drafted, model, step.drafting_seconds, step.context)
        if drafted:
            batch.drafted_steps += 1
            batch.drafted_seconds += step.seconds + step.drafting_seconds
        if batch.refilling:
            self._savings.refilled()
        if drafted and batch.drafted_steps % GUARD_STEPS == 0 and self.toggle.speculate != "always":
            self._guard(step.slots, model)

    # Figures

    def time_saved(self, slots: Ints) -> float:
        """Return the seconds saved since the last weight sync; `slots` of the requests in the batch, shape (b,)."""
        model = self.times.model
        return self._saved + (0.0 if model is None else self._savings.saved(self.requests.credited[slots], model))

    def take(self, slots: Ints) -> dict[str, Any]:
        """Return the figures since the last call, as plain numbers."""
        counts, self._by_class = self._by_class, ClassCounts()
        return {
            "class_steps": counts.steps.tolist(),
            "class_drafts": counts.drafts.tolist(),
            "time_saved_s": self.time_saved(slots),
            "latency_model_error": self.times.take_error(),
            "planned_rounds": self.planned_rounds,
            "stopped": self.stopped,
            "capacity": None if self.times.present is None else self.times.present.capacity(),
        }

    # Inside

    @property
    def _model_drafts(self) -> ModelDrafts | None:
        """The model that drafts, in a rollout in which it runs."""
        return None if self.drafts is None or self.drafts.silent else self.drafts

    @property
    def _always(self) -> bool:
        """Whether nothing is asked but the fixed budgets: then no decision depends on a step time."""
        return self.toggle.speculate == "always" and self._policy != "optimal"

    @property
    def _floor(self) -> float:
        """Chance under which the drafter need not go on."""
        if self._policy == "optimal":
            return LEAST_CHANCE if self._batch.since_draft >= self._probe_wait else self._least_chance
        return least_chance(self._policy)

    def _draft_limits(self, slots: Ints, room: Ints, context: Floats | Ints) -> Ints:
        """Most draft tokens of each request, shape (b,), before it is known what there is to draft; `context`: tokens
        of its text."""
        running, batch = len(slots), self._batch
        if batch.arrivals or self._replan.due(batch.step, running):
            self._replan.done(batch.step, running, again_soon=batch.arrivals > 0)
            self._value_requests(slots, context)
        most: Ints = np.minimum(room, self._most)
        if self._policy == "das":
            np.minimum(most, class_budgets(self.requests.length_class[slots], self._most), out=most)
        elif self._policy == "optimal":
            model = self._model
            if model is None:  # for the first measurements: short drafts for some
                np.minimum(most, (1, 4, self._most)[batch.step // 2 % 3], out=most)
                most[~_first(slots, most > 0, running / 4)] = 0
            else:
                worth = self.requests.worth_own[slots] + self.requests.worth_tail[slots]
                most[worth <= model.marginal(running)] = 0
        np.maximum(most, 0, out=most)
        return most

    def _share_out(self, slots: Ints, limits: Ints, chances: Chances, offsets: Ints) -> StepPlan:
        """Decide how many tokens of each draft are verified, and for whom the model drafts instead."""
        batch, running = self._batch, len(slots)
        arrived, batch.arrivals = batch.arrivals > 0, 0
        if self._always:
            everything = self._everything(limits, chances, offsets)
            if self._common is None:
                return everything
            return StepPlan(self._alike(limits), self._alike(everything.model))
        model, probe = self._model, self._probe(running)
        nothing = np.zeros(running, dtype=np.int64)
        plan, drafted = StepPlan(nothing, nothing), False
        if model is None:
            on = self.toggle.update(running, 1.0 + MARGIN, arrived)
            if on and batch.step % (2 if self._policy == "optimal" else 4):
                plan = self._everything(limits, chances, offsets)
        else:
            found = self._worth_verifying(slots, limits, chances, offsets, model)
            drafting = model.step(running + found.total, running, found.total > 0) + found.passes_s
            on = self.toggle.update(running, 1.0 + found.gain / drafting if found.total else 0.0, arrived)
            wanted = self._policy != "optimal" or found.gain >= LEAST_GAIN * drafting
            if on and wanted and probe != "plain":
                plan, drafted = StepPlan(found.keep, found.drafted), found.total > 0
                self._probe_wait = PROBE_STEPS if drafted else self._probe_wait
            if probe == "drafted" and (len(chances) or self._model_drafts is not None):
                offered = np.diff(offsets) if len(chances) else limits
                some = _first(slots, offered > 0, min(PROBE_REQUESTS, running / 4)).astype(np.int64)
                history, model_drafts = (offered, nothing) if len(chances) else (nothing, offered)
                plan, drafted = StepPlan(np.minimum(history, some), np.minimum(model_drafts, some)), True
        self._consider.done(batch.step, running, again_soon=drafted or model is None)
        return plan if self._common is None else StepPlan(self._alike(plan.history), self._alike(plan.model))

    def _everything(self, limits: Ints, chances: Chances, offsets: Ints) -> StepPlan:
        """Verify all that there is; the model drafts for the requests for which it brings more tokens."""
        everything = np.diff(offsets)
        if self._model_drafts is None:
            return StepPlan(everything, np.zeros_like(everything))
        one = Worth(np.ones(len(limits)), np.zeros(len(limits)), np.zeros(len(limits)))
        found = self._with_model(Allocation(everything, len(chances), 0.0), one, limits, chances, offsets, _FREE)
        return StepPlan(found.keep, found.drafted)

    def _worth_verifying(
        self, slots: Ints, limits: Ints, chances: Chances, offsets: Ints, model: StepModel
    ) -> ModelPlan:
        """The draft tokens that are worth more than they cost; under fixed budgets all of them, and what that gains."""
        table = self.requests
        worth = Worth(table.worth_own[slots], table.worth_tail[slots], table.worth_fade[slots])
        if self._common is not None:
            return self._common_length(limits, chances, offsets, worth, model)
        found = allocate(chances, offsets, worth, model, self._policy == "optimal")
        if self._model_drafts is None:
            return ModelPlan(np.zeros_like(limits), found.keep, found.total, found.gain, 0.0)
        return self._with_model(found, worth, limits, chances, offsets, model)

    def _common_length(
        self, limits: Ints, chances: Chances, offsets: Ints, worth: Worth, model: StepModel
    ) -> ModelPlan:
        """The length that is worth most when all requests have it; under fixed budgets the one that these need. Where
        there is a model, it drafts for all or for nobody: then each request has the better draft of both."""
        running, found = len(limits), np.diff(offsets)
        nothing, plain = np.zeros_like(limits), model.step(running, running, False)
        best = ModelPlan(nothing, nothing, 0, 0.0, 0.0)
        drafts = self._model_drafts
        theirs, begins = (chances, offsets) if drafts is None else drafts.offer(limits)
        there = np.maximum(found, np.diff(begins))
        needed = self._alike(np.minimum(limits, there)).max(initial=0)
        for length in self._common or ():
            if length != needed and (self._policy != "optimal" or length > needed):
                continue
            total, alike = running * length, np.full_like(limits, length)
            verified = model.step(running + total, running, True) - plain
            saved = worth.of_kept(chances, offsets, np.minimum(found, length))
            for by_model in (False,) if drafts is None else (False, True):
                passes = 0.0
                if drafts is not None:  # where somebody else drafts, it still reads what was drafted, in a pass
                    passes = drafts.seconds(np.minimum(alike, drafts.most if by_model else 1), plain)
                if by_model:
                    saved = np.maximum(saved, worth.of_kept(theirs, begins, np.minimum(np.diff(begins), length)))
                gain = float(saved.sum()) - passes - verified
                if gain > best.gain or self._policy != "optimal":
                    drafted, keep = (alike, nothing) if by_model else (nothing, alike)
                    best = ModelPlan(drafted, keep, total, gain, passes)
        return best

    def _alike(self, keep: Ints) -> Ints:
        """Give all requests the shortest common length that is enough for each."""
        most = keep.max(initial=0)
        return np.full_like(keep, next((n for n in self._common or () if n >= most), most) if most else 0)

    def _with_model(
        self, found: Allocation, worth: Worth, limits: Ints, chances: Chances, offsets: Ints, model: StepModel
    ) -> ModelPlan:
        drafts = self._model_drafts
        assert drafts is not None
        lengths = drafts.lengths(self._floor)
        if self._policy != "optimal":  # budgets are fixed: the longest, gain or not
            lengths, found = lengths[-1:], found._replace(gain=-np.inf if not found.total else found.gain)
        theirs = worth.of_kept(chances, offsets, found.keep)
        return drafts.plan(found, theirs, worth, limits, model, lengths, self._policy == "optimal")

    def _probe(self, running: int) -> Literal["plain", "drafted", ""]:
        """Whether this step is taken the other way, to see what it costs."""
        batch = self._batch
        unknown = self.times.plain_steps(running) < 3
        if batch.since_plain >= (24 if unknown else PROBE_STEPS):
            batch.since_plain = 0
            return "plain"
        if batch.since_draft >= self._probe_wait and not isinstance(self.toggle.speculate, int):
            batch.since_draft, self._probe_wait = 0, min(2 * self._probe_wait, RARE_STEPS)
            return "drafted"
        return ""

    def _value_requests(self, slots: Ints, context: Floats | Ints) -> None:
        """Compute the worth in seconds of an accepted token of each request, and the requests' classes."""
        table, batch, edges = self.requests, self._batch, self.lengths.edges
        cdf, written = table.cdf[slots], table.written[slots]
        table.length_class[slots] = classes(cdf, edges, written, self.lengths.bounds)
        model, running = self._model, len(slots)
        if model is None or self.times.model is None:
            return
        slope = model.slope(running)
        if not self.planned_rounds and not batch.arrivals:
            problems, which = np.unique(table.problem[slots], return_inverse=True)
            curves = np.array([self._curves.of(problem) for problem in problems.tolist()])[which]
            remaining = expected_remaining(cdf, edges, written)
            flat = max(1e-9, model.step(running, running, False) - slope * running)
            planned = plan_rollout(remaining, curves[:, 0], curves[:, 1], flat, max(slope, 1e-9))
            self.planned_rounds = batch.step - batch.synced + planned.rounds
        if batch.refilling:
            last, fade = np.full(running, 1.0 / running), np.zeros(running)
        else:
            last, fade = makespan_weights(cdf, edges, written)
        # A round that is not needed saves what its tokens cost, drafts included but not more than plain decoding's, and
        # the last ones what a step costs that nobody else is in.
        pace, tokens = table.pace[slots], 1.0 + table.load[slots]
        token = model.slope(float(tokens.sum()))
        left = 1.0 / float(last @ last)
        size = left * float(last @ tokens)
        tail = max(0.0, model.step(size, left, size > left) - model.slope(size) * size - model.request * left)
        request = self.times.model.request + self.times.model.context * context
        own = np.minimum((token * tokens + request) / pace, token + request)
        round_pace = float(last @ pace)
        deciding = last * min(tail, (tail + self._drafting_seconds) / round_pace)
        table.worth_own[slots], table.worth_tail[slots], table.worth_fade[slots] = own, deciding, fade
        dearest = float((own + deciding).max())
        self._least_chance = max(LEAST_CHANCE, min(slope, model.slope(np.inf)) / max(dearest, 1e-12))

    def _guard(self, slots: Ints, model: StepModel) -> None:
        """Stop speculation that costs more than it saves until the next weight sync. The estimate is as good as the
        latency model, so the loss must be beyond a tenth of what the drafted steps took."""
        spent = self._batch.drafted_seconds
        for _ in range(2):  # before it is held against the drafts, the model is brought up to date
            saved = self._savings.saved(self.requests.credited[slots], model)
            if saved >= -0.1 * spent:
                return
            model = self.times.fit() or model
        self.stopped = f"speculation cost {-saved:.2f} s in {spent:.2f} s of drafted steps"

    def _settle(self) -> None:
        """A batch is over: what it saved is added up."""
        if self.times.model is not None:
            self._saved += self._savings.saved((), self.times.model)
        self._savings = Savings()
        self._batch.settle()


def _first(slots: Ints, able: npt.NDArray[np.bool_], count: float) -> npt.NDArray[np.bool_]:
    """Return which requests have the lowest slots among those that are able, bool [b]; `count`, rounded up, of them."""
    ranks = np.argsort(np.argsort(np.where(able, slots, _LAST)))
    return able & (ranks < count)
