"""How many draft tokens, for whom: asked by a drafter at every decode step.

An accepted token saves a request one token. What that is worth depends on whether the request decides when the rollout
ends: the chance of that, times a round of the batch that will be left then, plus the request's own share of a round.
A draft token costs what it adds to the step. Where requests keep arriving nobody decides the end, and a token is worth
the engine's time per token.

Everything here follows from what it is told, step times included; it reads no clock. In a tensor-parallel engine
vLLM takes the drafts of one rank and hands them to all, so that what the others decide does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter.config import BudgetConfig, ToggleConfig
from das_adapter.core.acceptance import AcceptanceCurves
from das_adapter.core.budget import Worth, allocate, class_budgets, makespan_weights, plan
from das_adapter.core.latency import StepModel, StepTimes
from das_adapter.core.length import LengthClass, LengthModel, classes, expected_remaining
from das_adapter.core.native import native
from das_adapter.core.toggle import Savings, Toggle

Ints = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float32]

LOOK = 16
"""While drafts don't pay, the controller looks again after 1, 2, 4, ... steps, at most this many."""
FLOOR = 0.005
"""Chance under which no draft token is looked at."""
_NONE: Ints = np.zeros(0, dtype=np.int64)
REPLAN = 64
"""Steps after which the worth of a token is computed anew, at the latest; after an arrival 4, 8, 16, ..."""
PROBE = 128
"""Every so many steps one is taken the other way (plain, or drafted), so that both kinds of step stay known."""
REFILL = 64
"""Steps for which a request that took another's place makes the batch one that refills."""
PACE = 16
"""Steps over which a request's tokens per step are averaged."""
SURPRISE = 0.25
"""Relative error of recent predictions at which the latency model is fitted again at once."""
GUARD = 64
"""Steps between two looks at the time saved."""


@dataclass
class Tally:
    """What was decided since the last `take`."""

    rounds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(LengthClass)))
    """Request forwards by length class."""
    drafts: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(LengthClass)))
    """Draft tokens by length class."""


class Controller:
    """The decisions of one engine. A live request has a slot from `open` to `close`."""

    def __init__(
        self, budget: BudgetConfig, toggle: ToggleConfig, limit: int, window: int = 16, prior: StepModel | None = None
    ) -> None:
        """
        Args:
            budget, toggle: the blocks of the config.
            limit: longest response there can be, tokens.
            window: weight versions that lengths are remembered for.
            prior: latency model until the engine's own steps give one.
        """
        self.budget = budget
        self.times = StepTimes(prior)
        self.lengths = LengthModel(limit, window)
        self.curves = AcceptanceCurves()
        self.toggle = Toggle(toggle.mode, toggle.margin, toggle.threshold)
        self.savings = Savings()
        self.stopped: str | None = None
        """Why speculation is off until the next weight sync; None while it may go on."""
        self.tally = Tally()
        self.planned_rounds = 0.0
        """Decode steps since the weight sync after which DAS's optimum would have ended every request."""
        self._problems: list[int] = []
        self._free: list[int] = []
        self._cdf = np.zeros((0, LengthModel.GRID))
        self._state = np.zeros((12, 0))  # rows as `_grow` names them, a column for each slot
        self._class: Ints = np.zeros(0, dtype=np.int64)
        self._steps = self._synced_at = self._running = 0
        self._saved = 0.0
        self._arrived = 0
        self._last_end = self._last_refill = -(2**30)
        self._gap, self._next_look, self._looked_for = 1, 0, 0
        self._planned_at = -(2**30)
        self._planned_for = 0
        self._replan_gap = REPLAN
        self._drafted_steps = self._drafted_seconds = 0.0
        self._since_plain = self._since_draft = 0
        self._fitted_at = 0
        self._floor = FLOOR
        self._grow()

    # Requests

    def open(self, problem: int, written: int, most: int) -> int:
        """A request joined: tokens of its response that are there already, and the most there can be."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._problems[slot] = problem
        cdf = self._cdf[slot]
        cdf[:] = self.lengths.cdf(problem)
        cdf[np.searchsorted(self.lengths.edges, most) :] = 1.0
        self._state[:, slot] = 0.0
        self._written[slot], self._pace[slot] = written, 1.0
        self._class[slot] = LengthClass.MEDIUM
        self._arrived += 1
        if not self._running:  # another batch (a validation's, say), not one that refills
            self._settle()
        elif self._last_end >= 0:
            self._last_refill = self._steps
        self._running += 1
        return slot

    def close(self, slot: int) -> None:
        """A request left."""
        tokens = int(self._counted[slot])
        self.savings.finished.append(tokens)
        drafted, accepted = int(self._drafted[slot]), int(self._accepted[slot])
        if tokens:
            self.curves.observe(
                self._problems[slot], tokens, drafted, accepted, int(self._first_tried[slot]), int(self._first[slot])
            )
        self._last_end = self._steps
        self._running -= 1
        self._free.append(slot)

    def written(self, slots: Ints) -> npt.NDArray[np.float64]:
        """Tokens of each request's response, shape (b,)."""
        written: npt.NDArray[np.float64] = self._written[slots]
        return written

    def history(self, slot: int) -> tuple[int, int, int, int, int]:
        """Problem, length class, tokens, draft tokens and accepted ones of a request."""
        counts = (self._class[slot], self._written[slot], self._drafted[slot], self._accepted[slot])
        return (self._problems[slot], *map(int, counts))  # type: ignore[return-value]

    def sync(self, version: int, responses: Iterable[tuple[int, int, int]]) -> None:
        """A weight sync: learn the lengths of finished responses (problem, tokens, weight version), and start anew."""
        for problem, length, written in responses:
            self.lengths.observe(problem, length, written)
        self.lengths.refit(version)
        self.curves.forget()
        self.times.fit()
        self.toggle.reset()
        self._settle()
        self._saved = 0.0
        self.stopped = None
        self.planned_rounds, self._synced_at = 0.0, self._steps
        self._gap, self._next_look = 1, 0
        self._counted[:] = 0.0

    # A decode step

    def verified(self, slots: Ints, got: Ints, carried: Ints | None) -> None:
        """What the step brought.

        Args:
            slots: requests that decoded in it, shape (b,).
            got: tokens each got, shape (b,).
            carried: draft tokens each carried into it, shape (b,); None if nobody did.
        """
        self._steps += 1
        drafted = _NONE if carried is None else carried
        tally = self.tally
        native().advance(self._state, slots, got, drafted, PACE, self._class, tally.rounds, tally.drafts)

    def looks(self, running: int) -> bool:
        """Whether to draft at all after this step, if only to see whether it would pay."""
        if self.stopped or not running:
            return False
        return self._always or self._steps >= self._next_look or running < 0.9 * self._looked_for

    def caps(self, slots: Ints, room: Ints) -> Ints:
        """Most draft tokens of each request, shape (b,), before it is known what there is to draft.

        Args:
            slots: requests to draft for, shape (b,).
            room: draft tokens that still fit before each one's end, shape (b,).
        """
        running = len(slots)
        if self._arrived:
            self._replan_gap = 1
        if self._arrived or self._steps - self._planned_at >= self._replan_gap or running < 0.9 * self._planned_for:
            self._replan_gap = min(2 * self._replan_gap, REPLAN)
            self._replan(slots)
        most: Ints = np.minimum(room, self.budget.max_draft_tokens)
        if self.budget.policy == "classes":
            by_class = class_budgets(self._class[slots], self.budget.max_draft_tokens)
            np.minimum(most, by_class, out=most)
        elif self.budget.policy == "optimal":
            model = self.times.model
            if model is None:  # short drafts, for the first measurements
                np.minimum(most, (1, 4, self.budget.max_draft_tokens)[self._steps // 2 % 3], out=most)
            else:
                worth = self._worth.own[slots] + self._worth.tail[slots]
                most[worth <= model.slope(running)] = 0
        np.maximum(most, 0, out=most)
        return most

    @property
    def floor(self) -> float:
        """Chance under which the drafter need not go on."""
        if self.budget.policy == "optimal":
            return FLOOR if self._since_draft >= PROBE else self._floor
        return 0.0 if self.budget.policy == "unlimited" else self.budget.min_chance

    def cut(self, slots: Ints, chances: Chances, offsets: Ints) -> Ints:
        """How many tokens of each draft to verify, shape (b,).

        Args:
            slots: the requests of `caps`, shape (b,).
            chances: survival chance of each draft token as the drafter states it, shape (n,).
            offsets: shape (b + 1,); request i's are `chances[offsets[i]:offsets[i + 1]]`.
        """
        running, arrived, self._arrived = len(slots), self._arrived > 0, 0
        if self._always:
            everything: Ints = np.diff(offsets)
            return everything
        keep, drafted = np.zeros(running, dtype=np.int64), 0
        model, probe = self.times.model, self._probe(running)
        if model is None:
            on = self.toggle.update(running, 1.0 + self.toggle.margin, arrived)
            if on and self._steps % (2 if self.budget.policy == "optimal" else 4):
                keep, drafted = np.diff(offsets), len(chances)
        else:
            worth = Worth(*(part[slots] for part in self._worth))
            found = allocate(chances, offsets, worth, model, self.budget.policy == "optimal")
            drafting = model.step(running + found.total, running, found.total > 0)
            on = self.toggle.update(running, 1.0 + found.gain / drafting if found.total else 0.0, arrived)
            if on and probe != "plain":
                keep, drafted = found.keep, found.total
            if probe == "drafted" and len(chances):
                keep = np.where(np.arange(running) % 4 == 0, np.minimum(np.diff(offsets), 1), 0)
                drafted = int(keep.sum())
        self._gap = 1 if drafted or model is None else min(2 * self._gap, LOOK)
        self._next_look, self._looked_for = self._steps + self._gap, running
        return keep

    def step(self, slots: Ints, got: Ints, tokens: int, drafted: bool, seconds: float) -> None:
        """How long a decode step took; not for steps that also read prompts.

        Args:
            slots: its requests, shape (b,).
            got: tokens each got, shape (b,).
            tokens: in the forward pass.
            drafted: whether anything was.
            seconds: from its start to the next step's.
        """
        running = len(slots)
        self.times.add(tokens, running, drafted, seconds)
        self._since_plain = self._since_plain + 1 if drafted else 0
        self._since_draft = 0 if drafted else self._since_draft + 1
        since, surprised = self.times.observed - self._fitted_at, self.times.surprise > SURPRISE
        if since >= (8 if surprised else min(max(16, self._fitted_at), 4096)):
            self._fitted_at = self.times.observed
            self.times.fit()
        model = self.times.model
        if model is None:
            return
        self._counted[slots] += got
        self.savings.step(seconds, running, int(got.sum()), drafted, model)
        self._drafted_steps += drafted
        self._drafted_seconds += seconds if drafted else 0.0
        if self._refilling:
            self.savings.refilled()
        if drafted and self._drafted_steps % GUARD == 0 and self.toggle.mode != "off":
            self._guard(slots, model)

    # Figures

    def time_saved(self, slots: Ints) -> float:
        """Seconds saved since the last weight sync; `slots` of the requests in the batch, shape (b,)."""
        model = self.times.model
        return self._saved + (0.0 if model is None else self.savings.saved(self._counted[slots], model))

    def take(self, slots: Ints) -> dict[str, Any]:
        """Figures since the last call, as plain numbers."""
        tally, self.tally = self.tally, Tally()
        return {
            "class_rounds": tally.rounds.tolist(),
            "class_drafts": tally.drafts.tolist(),
            "time_saved_s": self.time_saved(slots),
            "latency_model_error": self.times.take_error(),
            "planned_rounds": self.planned_rounds,
            "stopped": self.stopped,
        }

    # Inside

    def _settle(self) -> None:
        """A batch is over: what follows has a beginning of its own."""
        if self.times.model is not None:
            self._saved += self.savings.saved((), self.times.model)
        self.savings = Savings()
        self._last_end = self._last_refill = -(2**30)
        self._drafted_steps = self._drafted_seconds = 0.0

    @property
    def _always(self) -> bool:
        """Whether nothing is asked but the fixed budgets: then no decision depends on a step time."""
        return self.toggle.mode == "off" and self.budget.policy != "optimal"

    @property
    def _refilling(self) -> bool:
        """Requests still arrive while others end."""
        return self._steps - self._last_refill < REFILL

    def _probe(self, running: int) -> str:
        """Whether this step is taken the other way, to see what it costs: "plain", "drafted" or ""."""
        unknown = self.times.plain_steps(running) < 3
        if self._since_plain >= (24 if unknown else PROBE):
            self._since_plain = 0
            return "plain"
        if self._since_draft >= PROBE and self.toggle.mode != "threshold":
            self._since_draft = 0
            return "drafted"
        return ""

    def _replan(self, slots: Ints) -> None:
        """The worth in seconds of an accepted token of each request, and the requests' classes."""
        self._planned_at, self._planned_for = self._steps, len(slots)
        cdf, written, edges = self._cdf[slots], self._written[slots], self.lengths.edges
        self._class[slots] = classes(cdf, edges, written, self.lengths.bounds)
        model, running = self.times.model, len(slots)
        if model is None:
            return
        slope = model.slope(running)
        if not self.planned_rounds and not self._arrived:
            curves = np.array([self.curves.of(self._problems[slot]) for slot in slots.tolist()])
            remaining = expected_remaining(cdf, edges, written)
            flat = max(1e-9, model.step(running, running, False) - slope * running)
            planned = plan(remaining, curves[:, 0], curves[:, 1], flat, max(slope, 1e-9))
            self.planned_rounds = self._steps - self._synced_at + planned.rounds
        if self._refilling:
            last, fade = np.full(running, 1.0 / running), np.zeros(running)
        else:
            last, fade = makespan_weights(cdf, edges, written)
        # A round that is not needed saves what its tokens cost, drafts included but not more than plain decoding's, and
        # the last ones what a step costs that nobody else is in.
        pace, tokens = self._pace[slots], 1.0 + self._load[slots]
        token = model.slope(float(tokens.sum()))
        left = 1.0 / float(last @ last)
        size = left * float(last @ tokens)
        tail = max(0.0, model.step(size, left, size > left) - model.slope(size) * size - model.request * left)
        own = np.minimum((token * tokens + model.request) / pace, token + model.request)
        deciding = last * tail / float(last @ pace)
        self._worth.own[slots], self._worth.tail[slots], self._worth.fade[slots] = own, deciding, fade
        dearest = float((own + deciding).max())
        self._floor = max(FLOOR, min(slope, model.slope(np.inf)) / max(dearest, 1e-12))

    def _guard(self, slots: Ints, model: StepModel) -> None:
        """Speculation that costs more than it saves stops until the next weight sync. The estimate is as good as the
        latency model, so the loss must be beyond a tenth of what the drafted steps took."""
        for _ in range(2):  # before it is held against the drafts, the model is brought up to date
            saved = self.savings.saved(self._counted[slots], model)
            if saved >= -0.1 * self._drafted_seconds:
                return
            model = self.times.fit() or model
        self.stopped = f"speculation cost {-saved:.2f} s in {self._drafted_seconds:.2f} s of drafted steps"

    def _grow(self) -> None:
        old, more = len(self._problems), max(64, len(self._problems))
        self._problems += [0] * more
        self._free += range(old + more - 1, old - 1, -1)
        self._cdf = np.concatenate([self._cdf, np.zeros((more, LengthModel.GRID))])
        self._state = np.concatenate([self._state, np.zeros((12, more))], axis=1)
        # The first eight rows are brought forward by the native `advance`.
        self._written, self._pace, self._load = self._state[:3]
        self._drafted, self._accepted, self._first_tried, self._first = self._state[3:7]
        self._counted, *worth = self._state[8:]
        self._worth = Worth(*worth)
        self._class = np.concatenate([self._class, np.full(more, LengthClass.MEDIUM, dtype=np.int64)])
