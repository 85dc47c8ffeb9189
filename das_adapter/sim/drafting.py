"""Who drafts in a simulated engine: nobody, a drafter of fixed length, or das-adapter's own controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from das_adapter.config import DasConfig
from das_adapter.core.controller import Controller, Decoded, TimedStep
from das_adapter.core.ladder import Ladder
from das_adapter.core.latency import Calibration, Capacity
from das_adapter.core.length import Responses
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.siblings import Moments, Siblings
from das_adapter.sim.requests import Requests
from das_adapter.sim.sources import Given, Offer, Source, Walker
from das_adapter.sim.steps import Steps

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FADE = 0.9
"""Share of the siblings' counts that a weight sync keeps, as a run's ledger does."""
SHARED = 16
"""Engines beyond which all share one latency model and one length model: they are alike."""


DraftingSeconds = Callable[[Floats, Floats], Floats]
"""Of drafting in steps, float64 [n], by their requests and the tokens of context that these have together."""


class Ticked(NamedTuple):
    """What a step brought to one engine."""

    engine: int
    rows: Ints
    """Requests that got tokens, [b]."""
    got: Ints
    """int64 [b]."""
    carried: Ints
    """Draft tokens that each had in the step, int64 [b]."""
    copied: Ints
    """Those of the policy copy, int64 [b]."""
    tokens: int
    """In the forward pass, draft tokens included."""
    seconds: float
    timed: bool
    """Whether it read no prompts."""


class Walk(NamedTuple):
    """How engines go on until their drafter is asked again."""

    walker: Walker
    steps: Ints
    """Steps that each engine may take, int64 [engines]."""
    least: Floats
    """Logarithm of the chance under which each request's draft ends, float64 [requests]; inf: it drafts nothing."""
    limit: Ints
    """Most tokens of each request's draft, int64 [requests]."""
    seconds: DraftingSeconds


class Drafting(Protocol):
    """Decides on the drafts of running requests: sets their `draft`, `hits`, `copied` and `copy_hits`."""

    plain: bool
    """Whether nobody ever drafts."""

    def walk(self, rows: Ints, requests: Floats) -> Walk | None:
        """Say how engines may go on, by engine so many of these running requests; None: each step is asked for."""
        ...

    def walked(self, steps: Ints) -> None:
        """Take how many steps each engine went on, int64 [engines]."""
        ...

    def begin(self, rows: Ints) -> None:
        """Take requests that were admitted."""
        ...

    def step(self, ticks: list[Ticked]) -> list[float]:
        """Take a step of each of some engines, and decide on the drafts of the next; return the seconds that this takes
        each of them."""
        ...

    def end(self, rows: Ints) -> None:
        """Take requests that ended."""
        ...

    def sync(self, version: int, rows: Ints, responses: Responses) -> None:
        """Learn from these finished requests, at a weight sync."""
        ...


class Nobody:
    """No drafts."""

    plain = True

    def walk(self, rows: Ints, requests: Floats) -> Walk | None:
        """See `Drafting`."""
        return None

    def walked(self, steps: Ints) -> None:
        """See `Drafting`."""

    def begin(self, rows: Ints) -> None:
        """See `Drafting`."""

    def step(self, ticks: list[Ticked]) -> list[float]:
        """See `Drafting`."""
        return [0.0] * len(ticks)

    def end(self, rows: Ints) -> None:
        """See `Drafting`."""

    def sync(self, version: int, rows: Ints, responses: Responses) -> None:
        """See `Drafting`."""


@dataclass
class Fixed:
    """A drafter that vLLM runs by itself: so many draft tokens for every request in every step."""

    requests: Requests
    source: Source
    tokens: int
    pass_seconds: DraftingSeconds | None = None
    """Of one pass of the drafter; each draft token takes one. None: drafting takes no time."""
    plain = False

    def walk(self, rows: Ints, requests: Floats) -> Walk | None:
        """See `Drafting`."""
        walker = self.source.walker()
        if walker is None:
            return None
        return Walk(
            walker,
            np.full(len(requests), 2**30),
            np.full(len(rows), -np.inf),
            np.full(len(rows), self.tokens),
            self._passes,
        )

    def walked(self, steps: Ints) -> None:
        """See `Drafting`."""

    def begin(self, rows: Ints) -> None:
        """See `Drafting`."""
        self.source.begin(rows)

    def step(self, ticks: list[Ticked]) -> list[float]:
        """See `Drafting`."""
        rows = np.concatenate([tick.rows for tick in ticks])
        r = self.requests
        room = np.maximum(np.minimum(r.length[rows], r.most[rows]) - 1 - r.written[rows], 0)
        offer = self.source.offer(rows, np.minimum(self.tokens, room), 0.0)
        r.draft[rows], r.hits[rows] = np.diff(offer.offsets), offer.hits
        counts = np.array([len(tick.rows) for tick in ticks], dtype=float)
        context = [float((r.prompt[t.rows] + r.written[t.rows] - t.got).sum()) for t in ticks]  # as the step read it
        passes: list[float] = self._passes(counts, np.array(context)).tolist()
        return passes

    def _passes(self, requests: Floats, context: Floats) -> Floats:
        if self.pass_seconds is None:
            return np.zeros_like(requests)
        return self.tokens * self.pass_seconds(requests, context)

    def end(self, rows: Ints) -> None:
        """See `Drafting`."""
        self.source.end(rows)

    def sync(self, version: int, rows: Ints, responses: Responses) -> None:
        """See `Drafting`."""
        self.source.sync(version, rows)


@dataclass
class Overhead:
    """What das-adapter's own work takes in a step, seconds; `benchmarks/results/controller_overhead.json` and
    `index.json` have them."""

    step: float = 4e-5
    request: float = 3e-6
    """Of searching the history, where it is searched."""


@dataclass
class Controlled:
    """Every drafter as a run has it: the package's controller decides, one for each engine."""

    das: DasConfig
    requests: Requests
    engines: int
    steps: Steps
    limit: int
    """Longest response there can be, tokens."""
    history: Source | None = None
    copy: Given | None = None
    """What the tokens of the policy copy, or of a neural drafter, are worth; None: no model drafts."""
    pass_seconds: DraftingSeconds | None = None
    """Of one pass of a neural drafter, for all of the batch; None: the passes are the policy copy's."""
    prior: Calibration | None = None
    """What the controllers know of step times before the first."""
    graphs: tuple[int, ...] = ()
    """Tokens for which CUDA graphs are captured, as in `StepModel.sizes`."""
    overhead: Overhead = field(default_factory=Overhead)
    stride: int = 1
    """A controller that knows what steps take is asked every so many of them, and again at once if it begins or stops
    drafting, which may be a probe; until then a request drafts what has at least the chance at which the controller
    ended its draft."""
    plain = False

    def __post_init__(self) -> None:
        das = self.das
        self.controllers = [
            Controller(
                das.budget,
                das.toggle,
                self.limit,
                das.history.window,
                self.prior and self.prior.steps,
                ModelDrafts(das.model_tokens, narrows=not das.neural) if self.copy else None,
                das.num_draft_tokens,
                sizes=self.graphs,
            )
            for _ in range(self.engines)
        ]
        for controller in self.controllers:
            if controller.drafts is not None and self.prior is not None:
                controller.drafts.expect(self.prior.passes)
        self._shared = self.engines > SHARED
        if self._shared:
            for controller in self.controllers[1:]:
                controller.times, controller.lengths = self.controllers[0].times, self.controllers[0].lengths
        self.siblings = [Siblings() for _ in range(self.engines)]
        self.ladder = Ladder(tuple(das.self.ladder)) if das.self.ladder and self.copy else None
        self.moments = Moments()
        self.capacity: Capacity | None = None
        self._slot = np.zeros(0, dtype=np.int64)
        self._finished = np.zeros(0, dtype=np.int64)  # siblings that had finished when a request began
        self._ticks = np.zeros(self.engines, dtype=np.int64)
        self._least: Floats = np.zeros(0)  # logarithm of the chance at which each request's draft was ended
        self._limit = np.zeros(0, dtype=np.int64)  # most tokens of its drafts
        self._since = np.zeros(self.engines, dtype=np.int64)  # steps since its controller was asked
        self._known = np.zeros(self.engines, dtype=bool)  # whether a controller knows what steps take
        self._on = np.ones(self.engines, dtype=bool)  # whether an engine drafts
        self._kept = np.ones(self.engines, dtype=bool)  # whether its controller had anything verified when last asked
        self._counts = np.zeros(2, dtype=np.int64)  # of the copy's tokens: accepted, drafted
        if self.ladder:
            self._agree(self.ladder.length)

    def begin(self, rows: Ints) -> None:
        """See `Drafting`."""
        more = len(self.requests) - len(self._slot)
        if more > 0:
            self._slot = np.concatenate([self._slot, np.full(more, -1)])
            self._finished = np.concatenate([self._finished, np.full(more, -1)])
            self._least = np.concatenate([self._least, np.full(more, np.inf)])
            self._limit = np.concatenate([self._limit, np.zeros(more, np.int64)])
        if self.history:
            self.history.begin(rows)
        engines = np.unique(self.requests.engine[rows])
        self._ticks[engines] = engines - 1  # the next steps are asked for
        for row in rows.tolist():
            if self._finished[row] < 0:
                problem, engine = int(self.requests.problem[row]), int(self.requests.engine[row])
                self._finished[row] = self.siblings[engine].begin(problem)

    def step(self, ticks: list[Ticked]) -> list[float]:
        """See `Drafting`."""
        if self.stride == 1:
            return [self._plan(tick) for tick in ticks]
        later, seconds, asked = [], [], self._until_asked() == 0
        for tick in ticks:
            due = asked[tick.engine]
            self._ticks[tick.engine] += 1
            self._since[tick.engine] += 1
            if not due:
                later.append(tick.rows)
            later_s = self.overhead.step + self.overhead.request * len(tick.rows) * bool(self.history)
            seconds.append(self._plan(tick) if due else later_s)
        if later and self.history:
            r, rows = self.requests, np.concatenate(later)
            room = np.maximum(np.minimum(r.length[rows], r.most[rows]) - 1 - r.written[rows], 0)
            most = np.where(self._least_of(rows) < np.inf, self._limit[rows], 0)
            offer = self.history.offer(rows, np.minimum(most, room), 0.0)
            drafted = np.repeat(np.arange(len(rows)), np.diff(offer.offsets))
            likely = offer.chances >= np.exp(self._least[rows])[drafted]
            r.hits[rows], r.draft[rows] = offer.hits, np.bincount(drafted[likely], minlength=len(rows))
        return seconds

    def walk(self, rows: Ints, requests: Floats) -> Walk | None:
        """See `Drafting`."""
        walker = self.history.walker() if self.history and self.stride > 1 and self.copy is None else None
        if walker is None:
            return None
        own = self.overhead
        return Walk(
            walker,
            self._until_asked(),
            self._least_of(rows),
            self._limit[rows],
            lambda requests, context: own.step + own.request * requests,
        )

    def walked(self, steps: Ints) -> None:
        """See `Drafting`."""
        self._ticks += steps
        self._since += steps

    def _until_asked(self) -> Ints:
        """Steps of each engine before its controller is asked."""
        first = (np.arange(self.engines) - self._ticks - 1) % self.stride
        return np.where(self._known & ((first < self.stride - 1) | (self._kept == self._on)), first, 0)

    def _least_of(self, rows: Ints) -> Floats:
        return np.where(self._on[self.requests.engine[rows]], self._least[rows], np.inf)

    def end(self, rows: Ints) -> None:
        """See `Drafting`."""
        r = self.requests
        known = self.history.known(rows) if self.history else np.zeros(len(rows), bool)
        if self.history:
            self.history.end(rows)
        for row, knew in zip(rows.tolist(), known.tolist(), strict=True):
            engine = int(r.engine[row])
            if self._slot[row] >= 0:
                self.controllers[engine].close(int(self._slot[row]))
                self._slot[row] = -1
            problem, finished = int(r.problem[row]), int(self._finished[row])
            self.siblings[engine].end(problem, finished, knew, float(r.written[row]), float(r.forwards[row]))

    def sync(self, version: int, rows: Ints, responses: Responses) -> None:
        """See `Drafting`."""
        if self.history:
            self.history.sync(version, rows)
        capacities, self.moments = [], self.moments.faded(FADE)
        for engine, controller in enumerate(self.controllers):
            self.moments += self.siblings[engine].take()
            self.siblings[engine].clear()
            if (model := controller.times.present) is not None:
                capacities.append(model.capacity())
            controller.sync(responses[:0] if self._shared and engine else responses)
        self.capacity = Capacity.median(capacities)
        if self.ladder:
            accepted, drafted = self._counts.tolist()
            self._agree(self.ladder.observe(accepted, drafted))
            self._counts[:] = 0

    def _agree(self, length: int) -> None:
        for controller in self.controllers:
            assert controller.drafts is not None
            controller.drafts.agreed = length

    def _plan(self, tick: Ticked) -> float:
        """Ask an engine's controller; return the seconds of its work and of the policy copy's passes."""
        r, rows, controller = self.requests, tick.rows, self.controllers[tick.engine]
        slots = self._slot[rows]
        for i in np.flatnonzero(slots < 0).tolist():
            row = int(rows[i])
            slots[i] = controller.open(int(r.problem[row]), int(r.written[row]), int(r.most[row]))
        self._slot[rows] = slots
        if self.stride > 1:
            controller.requests.written[slots] = r.written[rows] - tick.got
        room = np.minimum(r.length[rows], r.most[rows]) - 1 - r.written[rows]
        offered: list[Offer] = []
        asked: list[tuple[Ints, float]] = []

        def history(limits: Ints, floor: float) -> tuple[npt.NDArray[np.float32], Ints]:
            assert self.history is not None
            asked.append((limits.copy(), floor))
            offered.append(self.history.offer(rows, np.minimum(limits, np.maximum(room, 0)), floor))
            return offered[-1].chances, offered[-1].offsets

        carried = tick.carried if tick.carried.any() else None
        copied = tick.copied if self.copy else None
        steps, self._since[tick.engine] = max(1, int(self._since[tick.engine])), 0
        context = r.prompt[rows] + r.written[rows]
        decoded = Decoded(slots, tick.got, carried, copied, room, steps, context)
        plan = controller.plan(decoded, history if self.history else None)
        r.draft[rows] = plan.history
        r.hits[rows] = offered[-1].hits if offered else 0
        if self.stride > 1:
            self._go_on(tick.engine, rows, plan.history, room, offered, asked)
        r.copied[rows] = 0
        passes = 0.0
        if self.copy is not None and controller.drafts is not None:
            if copied is not None and copied.any():
                self._counts += [np.minimum(tick.got - 1, copied).sum(), copied.sum()]
            drafted = np.minimum(plan.model, np.maximum(room, 0))
            r.copied[rows], r.copy_hits[rows] = drafted, self.copy.offer(rows, drafted, 0.0).hits
            for place in range(int(drafted.max(initial=0))):
                mine = drafted > (0 if self.pass_seconds else place)
                read, many = float(context[mine].sum()), np.array([float(mine.sum())])
                one = (self.pass_seconds or self.steps.copy_pass)(many, np.array([read]))
                controller.drafts.timed_pass(int(mine.sum()), float(one[0]), read)
                passes += float(one[0])
        own = self.overhead.step + (self.overhead.request * len(rows) if offered else 0.0)
        if tick.timed:
            step = TimedStep(slots, tick.got, tick.tokens, tick.seconds + own, passes, context=int(context.sum()))
            controller.timed(step)
            self._known[slice(None) if self._shared else tick.engine] = controller.times.model is not None
        return own + passes

    def _go_on(
        self, engine: int, rows: Ints, kept: Ints, room: Ints, offered: list[Offer], asked: list[tuple[Ints, float]]
    ) -> None:
        """Note what requests draft until the controller is asked again. One answer alone against those before it is a
        probe."""
        some = bool(kept.any())
        if some == self._kept[engine]:
            self._on[engine] = some
        self._kept[engine] = some
        if not some:
            return
        (limits, floor), (chances, offsets, _) = asked[-1], offered[-1]
        ended = np.append(chances, 0.0)[offsets[:-1] + kept] * (1.0 + 1e-6)  # the first token that was left out
        least = np.where(kept < np.diff(offsets), ended, floor)
        with np.errstate(divide="ignore"):
            least = np.log(least)
        least[(limits <= 0) & (room > 0)] = np.inf
        self._least[rows], self._limit[rows] = least, np.where(limits < room, limits, self.das.num_draft_tokens)
