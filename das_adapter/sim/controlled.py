"""A simulated engine's drafter as a run has it: the package's own controller decides.
No other file of the simulator calls the controller.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.core.controller import Controller
from das_adapter.core.length import Responses
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.roofline import Prior
from das_adapter.core.steps import Decoded, TimedStep
from das_adapter.sim.drafting import Drafting, Ticked, Walk
from das_adapter.sim.requests import Ints, Requests
from das_adapter.sim.sources import Given, Offer, Source
from das_adapter.sim.steps import Seconds

SHARED = 16
"""Engines beyond which all share one latency model and one length model: they are
alike.
"""


class Controlled(Drafting):
    """The package's controller, one for each engine."""

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
            prior: what the controllers know of step times before the first.
            stride: a controller that knows what steps take is asked once in so many of
                them, and again at once if it begins or stops drafting, which may be a
                probe; in between, a request drafts tokens whose chance is at least that
                at which the controller ended its draft.
        """
        self._das = das
        self._requests = requests
        self._stride = stride
        self.history = history
        self.copy = copy
        self.pass_seconds = pass_seconds
        self.controllers = [self._controller(limit, prior) for _ in range(engines)]
        self._shared = engines > SHARED
        for controller in self.controllers[1:] if self._shared else ():
            first = self.controllers[0]
            controller.account.time.engine = first.times
            controller.lengths = first.lengths
        # steps since the controller was asked
        self._walked = np.zeros(engines, dtype=np.int64)
        self._left = np.zeros(engines, dtype=np.int64)  # steps until it is asked again
        self._on = np.ones(engines, dtype=bool)  # whether an engine drafts
        # whether the controller chose to verify anything when last asked
        self._kept = np.ones(engines, dtype=bool)
        # whether it was asked once more because its answer differed
        self._again = np.zeros(engines, dtype=bool)

    def _controller(self, limit: int, prior: Prior | None) -> Controller:
        das = self._das
        model = (
            ModelDrafts(das.model_tokens, not das.neural, parallel=das.parallel)
            if self.copy
            else None
        )
        if model is not None and prior is not None:
            model.set_pass_prior(prior.passes)
        return Controller(das, limit, prior and prior.steps, model)

    def walk(self, rows: Ints) -> Walk | None:
        if not self._left.any():
            return None
        r = self._requests
        assert isinstance(self.history, Given)
        least = np.where(self._on[r.engine[rows]], r.least[rows], np.inf)
        return Walk(
            self.history,
            self._left,
            least,
            r.limit[rows],
            lambda b, _: tuning.LOOK_S + tuning.LOOK_REQUEST_S * b,
        )

    def walked(self, steps: Ints) -> None:
        self._left -= steps
        self._walked += steps

    def begin(self, rows: Ints) -> None:
        self.history.begin(rows)

    def step(self, ticks: list[Ticked]) -> list[float]:
        return [self._plan(tick) for tick in ticks]

    def end(self, rows: Ints) -> None:
        r = self._requests
        self.history.end(rows)
        for row in rows[r.slot[rows] >= 0].tolist():
            self.controllers[r.engine[row]].close(int(r.slot[row]))

    def sync(self, version: int, rows: Ints, responses: Responses) -> None:
        self.history.sync(version, rows)
        for engine, controller in enumerate(self.controllers):
            controller.sync(responses[:0] if self._shared and engine else responses)

    def _plan(self, tick: Ticked) -> float:
        """Ask an engine's controller; return the seconds of its work and of the
        drafting model's passes.
        """
        r = self._requests
        rows = tick.rows
        controller = self.controllers[tick.engine]
        history = self.history
        copy = self.copy
        for row in rows[r.slot[rows] < 0].tolist():
            r.slot[row] = controller.open(
                int(r.problem[row]), int(r.written[row]), int(r.most[row])
            )
        slots = r.slot[rows]
        controller.requests.written[slots] = r.written[rows] - tick.got
        room = r.room(rows)
        context = r.prompt[rows] + r.written[rows]
        asked: list[tuple[Ints, float, Offer]] = []

        def search(limits: Ints, floor: float) -> tuple[npt.NDArray[np.float32], Ints]:
            offer = history.offer(rows, np.minimum(limits, room), floor)
            asked.append((limits.copy(), floor, offer))
            return offer.chances, offer.offsets

        drafts = (
            tick.carried if tick.carried.any() else None,
            (tick.copied if copy else None),
        )
        left = np.minimum(r.length[rows], r.most[rows]) - 1 - r.written[rows]
        steps = 1 + int(self._walked[tick.engine])
        decoded = Decoded(slots, tick.got, *drafts, left, steps, context)
        plan = controller.plan(decoded, search if self._das.looked_up else None)
        r.draft[rows] = plan.history
        r.hits[rows] = asked[-1][2].hits if asked else 0
        self._keep_drafting(tick.engine, rows, plan.history, asked)
        passes = (
            self._copied(controller, tick, np.minimum(plan.model, room), context)
            if copy
            else 0.0
        )
        own = tuning.LOOK_S + (tuning.LOOK_REQUEST_S * len(rows) if asked else 0.0)
        if tick.timed:
            times = tick.tokens, tick.seconds + own, passes
            controller.timed(
                TimedStep(slots, tick.got, *times, context=int(context.sum()))
            )
        self._rest(tick.engine, known=controller.times.known)
        return own + passes

    def _rest(self, engine: int, known: bool) -> None:
        """Ask the controller after `stride` steps again; at once if it does not know
        what steps take, and once more if its answer differs from those before it.
        """
        differs = (
            known and self._kept[engine] != self._on[engine] and not self._again[engine]
        )
        self._again[engine] = differs
        self._left[engine] = 0 if differs or not known else self._stride - 1
        self._walked[engine] = 0

    def _copied(
        self, controller: Controller, tick: Ticked, drafted: Ints, context: Ints
    ) -> float:
        """Let the model draft so many tokens; return the seconds of its passes."""
        r = self._requests
        rows = tick.rows
        assert (
            self.copy is not None
            and self.pass_seconds is not None
            and controller.drafts is not None
        )
        r.copied[rows] = drafted
        r.copy_hits[rows] = self.copy.offer(rows, drafted, 0.0).hits
        passes = 0.0
        for place in range(controller.drafts.passes_for(int(drafted.max(initial=0)))):
            mine = drafted > (0 if self._das.neural else place)
            count = int(mine.sum())
            read = float(context[mine].sum())
            seconds = float(
                self.pass_seconds(np.array([float(count)]), np.array([read]))[0]
            )
            controller.drafts.record_pass(count, seconds, read)
            passes += seconds
        return passes

    def _keep_drafting(
        self,
        engine: int,
        rows: Ints,
        kept: Ints,
        asked: list[tuple[Ints, float, Offer]],
    ) -> None:
        """Note what requests draft until the controller is asked again. One answer
        alone against those before it is a probe.
        """
        some = bool(kept.any())
        if some == self._kept[engine]:
            self._on[engine] = some
        self._kept[engine] = some
        if not some or self._stride == 1:
            return
        limits, floor, (chances, offsets, _) = asked[-1]
        r = self._requests
        room = r.room(rows)
        # the first token that was left out
        ended = np.append(chances, 0.0)[offsets[:-1] + kept] * (1.0 + 1e-6)
        with np.errstate(divide="ignore"):
            least = np.log(np.where(kept < np.diff(offsets), ended, floor))
        least[(limits <= 0) & (room > 0)] = np.inf
        r.least[rows] = least
        r.limit[rows] = np.where(limits < room, limits, self._das.num_draft_tokens)
