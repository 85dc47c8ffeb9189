"""How long a decode step takes, as a function of what is in it: fitted from the
engine's own steps.

DAS, section 4.2, fits t = c_base + c_tok · n. Real curves bend (below some batch a step
costs the same whatever is in it), rise with the context that attention reads, and go up
in steps where CUDA graphs are captured for some sizes only; so the fit chooses the best
of a few small models, of which the line is one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from das_adapter.core import tuning
from das_adapter.core.steps import Floats


@dataclass(frozen=True)
class StepModel:
    """Seconds of a decode step, as a function of what is in it:

        base + token·n + bend·max(0, n - knee) + request·b + context·s
             + attention·s·n/b + draft (if drafted) + launch (if no graph holds n)

    b: requests; n: tokens in the forward pass, drafts included, padded to the next of
    `sizes`; s: tokens of context that all requests have together.
    """

    base: float
    token: float
    bend: float = 0.0
    knee: float = 0.0
    request: float = 0.0
    draft: float = 0.0
    context: float = 0.0
    """Seconds of reading one token's keys and values."""
    attention: float = 0.0
    """Seconds in which one token of the forward pass attends to one of the context."""
    launch: float = 0.0
    """Seconds more of a step that no graph holds: its kernels are launched one by
    one.
    """
    sizes: tuple[int, ...] = ()
    """Tokens for which CUDA graphs are captured, rising: a step is padded to the next
    of them.
    """
    drafted_sizes: tuple[int, ...] | None = None
    """`sizes` of steps with drafts; None: there is no difference."""

    def native_costs(
        self, requests: int
    ) -> tuple[float, float, float, float, float, tuple[int, ...]]:
        """Return what the native `allocate` is told of the costs of tokens beside so
        many requests: (token, bend, knee, first draft token, launch, sizes). Where
        steps with drafts have sizes of their own, the first draft token takes the step
        from one of the others to these.
        """
        first = self.draft
        if self.drafted_sizes is not None:
            drafted_s = self.step(requests, requests, True)
            first = drafted_s - self.plain_step(requests)
        sizes = self.captured_sizes(True)
        return self.token, self.bend, self.knee, first, self.launch, sizes

    def captured_sizes(self, drafted: bool) -> tuple[int, ...]:
        """Return the sizes of steps with drafts, or without."""
        if drafted and self.drafted_sizes is not None:
            return self.drafted_sizes
        return self.sizes

    def at_context(self, context: float) -> StepModel:
        """Fold a fixed context length, tokens a request, into the token and request
        coefficients.
        """
        if not self.context and not self.attention:
            return self
        token = self.token + self.attention * context
        request = self.request + self.context * context
        # at every step: `replace` takes ten times as long
        at = StepModel.__new__(StepModel)
        vars(at).update(
            vars(self), token=token, request=request, context=0.0, attention=0.0
        )
        return at

    def scaled(self, factor: float) -> StepModel:
        """Return the model with all times multiplied but `launch`, which the host alone
        decides.
        """
        kept = ("knee", "launch", "sizes", "drafted_sizes")
        scaled = {}
        for name, value in vars(self).items():
            if name not in kept:
                scaled[name] = factor * value
        return replace(self, **scaled)

    def padded(self, tokens: npt.ArrayLike, drafted: npt.ArrayLike = False) -> Floats:
        """Return the tokens that steps of so many compute, with drafts or without."""
        n = np.asarray(tokens, dtype=float)
        plain = _padded(n, self.sizes)
        if self.drafted_sizes is None:
            return plain
        with_drafts = _padded(n, self.drafted_sizes)
        return np.where(drafted, with_drafts, plain)

    def padded_size(self, tokens: float, drafted: bool = False) -> float:
        """Return the tokens that one step of so many computes, with drafts or
        without.
        """
        sizes = self.captured_sizes(drafted)
        place = bisect_left(sizes, tokens)
        if place == len(sizes):
            return tokens
        return sizes[place]

    def largest_graph(self, drafted: bool) -> float:
        """Return the most tokens that a graph holds, of steps with drafts or
        without.
        """
        sizes = self.captured_sizes(drafted)
        return sizes[-1] if sizes else math.inf

    def exceeds_graphs(
        self, tokens: npt.ArrayLike, drafted: npt.ArrayLike
    ) -> npt.NDArray[np.bool_]:
        """Return whether steps have more tokens than any graph holds."""
        with_drafts = self.largest_graph(True)
        plain = self.largest_graph(False)
        return np.asarray(tokens) > np.where(drafted, with_drafts, plain)

    def seconds(
        self,
        tokens: npt.ArrayLike,
        requests: npt.ArrayLike,
        drafted: npt.ArrayLike,
        context: npt.ArrayLike = 0.0,
    ) -> Floats:
        """Return the seconds of steps. Arguments broadcast.

        Args:
            tokens: in the forward pass.
            requests: in the step.
            drafted: whether any token was drafted.
            context: tokens of context that all requests have together.
        """
        n = self.padded(tokens, drafted)
        b = np.asarray(requests, dtype=float)
        s = np.asarray(context, dtype=float)
        bend_s = self.bend * np.maximum(0.0, n - self.knee)
        attention_s = self.attention * s * n / np.maximum(b, 1e-9)
        context_s = self.context * s + attention_s
        launch_s = self.launch * self.exceeds_graphs(tokens, drafted)
        once_s = self.draft * np.asarray(drafted) + launch_s
        tokens_s = self.base + self.token * n + bend_s
        requests_s = tokens_s + self.request * b
        return np.asarray(requests_s + context_s + once_s)

    def step(
        self, tokens: float, requests: float, drafted: bool, context: float = 0.0
    ) -> float:
        """Return the seconds of one step; see `seconds`."""
        n = self.padded_size(tokens, drafted)
        total = self.base + self.token * n
        if n > self.knee:
            total += self.bend * (n - self.knee)
        total += self.request * requests
        if context:
            attention = self.attention * n / requests
            total += (self.context + attention) * context
        once = self.draft if drafted else 0.0
        if tokens > self.largest_graph(drafted):
            once += self.launch
        return total + once

    def plain_step(self, requests: float) -> float:
        """Return the seconds of one step without drafts."""
        return self.step(requests, requests, False)

    def verifying_s(self, requests: float, num_draft_tokens: float) -> float:
        """Return the seconds that draft tokens add to a step."""
        tokens = requests + num_draft_tokens
        drafted_s = self.step(tokens, requests, num_draft_tokens > 0)
        return drafted_s - self.plain_step(requests)

    def plain_seconds(self, requests: npt.ArrayLike) -> Floats:
        """Return the time of steps without drafts."""
        return self.seconds(requests, requests, False)

    def slope(self, tokens: float) -> float:
        """Return the seconds that one more token adds to a step of about `tokens`,
        padding apart.
        """
        beyond_knee = tokens >= self.knee
        return self.token + (self.bend if beyond_knee else 0.0)

    def marginal_price(self, tokens: float) -> float:
        """Return the seconds that one more draft token adds to a step of `tokens`: none
        where it takes the place of padding.
        """
        is_padded = self.padded_size(tokens, True) != tokens
        return 0.0 if is_padded else self.slope(tokens)


def _padded(n: Floats, sizes: tuple[int, ...]) -> Floats:
    """Return the next of the sizes, rising, for each number; itself beyond the last."""
    if not sizes:
        return n
    place = np.searchsorted(sizes, n)
    padded = np.take(sizes, place, mode="clip")
    return np.where(place < len(sizes), padded, n)


ASSUMED = StepModel(
    base=tuning.ASSUMED_STEP_S,
    token=tuning.ASSUMED_STEP_S / tuning.ASSUMED_DOUBLING_TOKENS,
)
"""The model until an engine's first steps, where no roofline tells."""
ASSUMED_ON_GPU = StepModel(
    base=tuning.ASSUMED_STEP_S,
    token=0.0,
    bend=tuning.ASSUMED_STEP_S / tuning.ASSUMED_KNEE_TOKENS,
    knee=tuning.ASSUMED_KNEE_TOKENS,
)
"""The model until the first steps on a GPU, where no roofline tells."""


@dataclass
class _Cell:
    """Steps of one kind: their mean sizes, and the latest times."""

    drafted: bool
    graph_kind: tuple[int, int, bool, bool]
    """The kind of step, whatever its context."""
    tokens: float
    requests: float
    context: float
    seconds: deque[float]

    def add(
        self, tokens: float, requests: float, context: float, seconds: float
    ) -> None:
        rate = tuning.CELL_RATE
        self.tokens += rate * (tokens - self.tokens)
        self.requests += rate * (requests - self.requests)
        self.context += rate * (context - self.context)
        self.seconds.append(seconds)


class StepTimes:
    """Step times as they are observed, and the model fitted to them.

    The latest few times of each kind of step are kept (tokens, requests, context,
    drafted or not; larger numbers in steps of an eighth, the context of a request in
    half octaves). The model is fitted to their medians, so that a pause of the process
    changes nothing. Steps that read prompts do not belong here.
    """

    def __init__(
        self,
        prior: StepModel | None = None,
        kinds: int = 2,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """
        Args:
            prior: the model until the first fit; None: `ASSUMED`.
            kinds: how many kinds of step must have been seen twice, whatever their
                context, before that.
            sizes: `StepModel.sizes` of the engine.
        """
        launch = tuning.LAUNCH_S if sizes else 0.0
        self._prior = replace(prior or ASSUMED, sizes=sizes, launch=launch)
        self.model = self._prior
        self._assumed = prior is None
        self.known = not self._assumed
        """Whether there was a prior, or a step."""
        self.observed = 0
        """Steps that were timed."""
        self.recent_error = 0.0
        """Relative error of the last few predictions since the last fit: large outside
        the fitted range, or where times scatter.
        """
        self._kinds = kinds
        self._fitted_at = 0
        self._refit_steps = tuning.REFIT_SOON_STEPS
        self._cells: dict[tuple[int, int, bool, bool, int], _Cell] = {}
        self._error = 0.0
        self._num_predictions = 0

    def set_prior(self, model: StepModel) -> None:
        """Assume, before the first step, how times relate to each other, in place of
        `ASSUMED`.
        """
        sizes = self._prior.sizes
        launch = self._prior.launch
        self._prior = replace(model, sizes=sizes, launch=launch)
        self.model = self._prior

    def set_drafted_sizes(self, sizes: tuple[int, ...]) -> None:
        """Set `StepModel.drafted_sizes` of the engine, before its first step."""
        self.model = replace(self.model, drafted_sizes=sizes)
        self._prior = replace(self._prior, drafted_sizes=sizes)

    def add(
        self,
        tokens: int,
        requests: int,
        drafted: bool,
        seconds: float,
        context: float = 0.0,
    ) -> float | None:
        """Record the time of one decode step; return what was predicted, None where
        nothing was known. `context`: tokens of context that all requests have
        together.
        """
        predicted = None
        if self.known:
            predicted = self.model.step(tokens, requests, drafted, context)
        if predicted is not None and seconds > 0:
            self._record_error(predicted / seconds - 1.0)
        self.observed += 1
        size = int(self._prior.padded_size(tokens, drafted))
        launched = tokens > self._prior.largest_graph(drafted)
        mean_context = context / max(requests, 1)
        half_octaves = round(2 * math.log2(mean_context)) if mean_context > 1 else 0
        kind = _eighths(size), _eighths(requests), drafted, launched
        cell = self._cells.get((*kind, half_octaves))
        if cell is None:
            times = deque[float](maxlen=tuning.STEP_TIMES)
            cell = _Cell(drafted, kind, size, requests, context, times)
            self._cells[*kind, half_octaves] = cell
        cell.add(size, requests, context, seconds)
        return predicted

    def _record_error(self, relative_error: float) -> None:
        error = min(1.0, abs(relative_error))
        self._error += error
        self._num_predictions += 1
        change = error - self.recent_error
        self.recent_error += change / tuning.RECENT_PREDICTIONS

    def pop_error(self) -> float | None:
        """Return the mean relative error of the predictions since the last call, each
        made before its step was fitted; None: there were none.
        """
        error = self._error
        num_predictions = self._num_predictions
        self._error = 0.0
        self._num_predictions = 0
        return error / num_predictions if num_predictions else None

    def keep_fitted(self) -> None:
        """Fit the model at the first step, and again after enough new ones, earlier
        where its recent predictions were wrong: soon, and where that did not help, each
        time after twice as many.
        """
        new_steps = self.observed - self._fitted_at
        is_wrong = self.recent_error > tuning.REFIT_ERROR
        doubled = max(tuning.REFIT_USUAL_STEPS, self._fitted_at)
        due = min(doubled, tuning.REFIT_STEPS)
        if is_wrong:
            due = min(self._refit_steps, due)
        if self.known and new_steps < due:
            return
        next_steps = 2 * self._refit_steps if is_wrong else tuning.REFIT_SOON_STEPS
        self.fit()
        self._refit_steps = next_steps

    def fit(self) -> StepModel:
        """Fit the model again and return it.

        While too few kinds of step were seen twice, or all of about one size, it is the
        prior, whose times are multiplied to meet those that were seen. Where there was
        no prior, steps of about one size say that smaller ones take as long. Beyond the
        largest step that was seen times rise as the prior's do: that small steps take
        equally long does not say that tokens cost nothing.
        """
        self._fitted_at = self.observed
        self._refit_steps = tuning.REFIT_SOON_STEPS
        self.recent_error = 0.0
        if not self._cells:
            return self.model
        self.known = True
        cells = [
            cell
            for cell in self._cells.values()
            if len(cell.seconds) >= tuning.FIT_TIMES
        ]
        few = len({cell.graph_kind for cell in cells}) < self._kinds
        if few:
            cells = list(self._cells.values())
        tokens = np.array([cell.tokens for cell in cells])
        requests = np.array([cell.requests for cell in cells])
        context = np.array([cell.context for cell in cells])
        drafted = np.array([cell.drafted for cell in cells], dtype=bool)
        seconds = np.array([float(np.median(cell.seconds)) for cell in cells])
        prior = self._prior
        if np.any(prior.exceeds_graphs(tokens, drafted)):
            # these times say what launching kernels costs
            prior = replace(prior, launch=0.0)
        alike = tokens.max() < tuning.ALIKE_STEPS * tokens.min()
        if few or (alike and not self._assumed):
            expected_s = prior.seconds(tokens, requests, drafted, context)
            self.model = prior.scaled(float(np.median(seconds / expected_s)))
            return self.model
        if alike and self._kinds > 1:
            tokens = np.full_like(tokens, tokens.max())
        weights = np.sqrt([len(cell.seconds) for cell in cells])
        self.model = fit(tokens, requests, drafted, seconds, context, weights, prior)
        if self._kinds > 1 and not self.model.bend:
            largest = max((cell.tokens, cell.requests, cell.context) for cell in cells)
            self._bend_beyond(*largest)
        return self.model

    def _bend_beyond(self, tokens: float, requests: float, context: float) -> None:
        """Let times rise at least as the prior's do beyond the largest step that was
        seen; see `StepModel.step`.
        """
        model = replace(self.model, launch=0.0)
        prior = replace(self._prior, launch=0.0)
        far = model.padded_size(2 * tokens, True)
        prior_near_s = prior.step(tokens, requests, True, context)
        prior_far_s = prior.step(far, requests, True, context)
        near_s = model.step(tokens, requests, True, context)
        far_s = model.step(far, requests, True, context)
        rise = prior_far_s / prior_near_s
        missing_s = rise * near_s - far_s
        if missing_s > 0:
            bend = missing_s / (far - tokens)
            self.model = replace(self.model, knee=tokens, bend=bend)


def _eighths(n: int) -> int:
    """Round a number down to an eighth of its power of two, if it is not small."""
    shift = max(0, n.bit_length() - 4)
    return n >> shift << shift


def fit(
    tokens: Floats,
    requests: Floats,
    drafted: npt.NDArray[np.bool_],
    seconds: Floats,
    context: npt.ArrayLike = 0.0,
    weights: npt.ArrayLike = 1.0,
    prior: StepModel = ASSUMED,
) -> StepModel:
    """Fit the small model that is best by relative error, with a penalty on every
    further coefficient (BIC). The time of the model never falls with the number of
    tokens, requests, drafts, or with the context.

    Args:
        tokens, requests, drafted, context: see `StepModel.seconds`, shape (n,) each or
            one for all.
        seconds: of the steps, shape (n,).
        weights: of the observations, shape (n,) or one for all.
        prior: its sizes are kept, and its `launch` where that is not fitted.
    """
    t = np.asarray(seconds, dtype=float)
    n = prior.padded(tokens, drafted)
    b = np.asarray(requests, dtype=float)
    d = np.asarray(drafted, dtype=float)
    s = np.broadcast_to(np.asarray(context, dtype=float), t.shape)
    launched = np.broadcast_to(prior.exceeds_graphs(tokens, drafted), t.shape)
    relative = np.broadcast_to(np.asarray(weights, dtype=float), t.shape) / t
    columns = {
        "base": np.ones_like(n),
        "token": n,
        "request": b,
        "draft": d,
        "context": s,
        "attention": s * n / b,
        "launch": launched,
    }
    line = ("base", "token") if n.max() > n.min() else ("base",)
    extras = _told_apart(n, b, d, s, launched)
    inside = [float(knee) for knee in tuning.KNEES if n.min() < knee < n.max()]
    best_score = np.inf
    best_knee = 0.0
    found: dict[str, float] = {}
    for knee in (0.0, *inside):
        bend = ("bend",) if knee else ()
        columns["bend"] = np.maximum(0.0, n - knee)
        for extra in ((), extras):
            names = (*line, *bend, *extra)
            if len(names) >= max(len(t), 3):
                continue
            coefficients, loss = _robust(names, columns, t, relative)
            penalty = len(coefficients) * np.log(len(t))
            score = len(t) * np.log(loss + 1e-6) + penalty
            if score < best_score:
                best_score = score
                best_knee = knee
                found = coefficients
    coefficients = {"base": 0.0, "token": 0.0, "launch": prior.launch, **found}
    return StepModel(
        knee=best_knee if found.get("bend") else 0.0,
        sizes=prior.sizes,
        drafted_sizes=prior.drafted_sizes,
        **coefficients,
    )


def _told_apart(
    n: Floats, b: Floats, d: Floats, s: Floats, launched: npt.NDArray[np.bool_]
) -> tuple[str, ...]:
    """Return the coefficients beside base and token that these steps tell apart, by
    their columns in `fit`.
    """
    extras: list[str] = []
    some_drafted = 0 < d.sum() < len(d)
    if some_drafted and (
        _varies(n[d == 0], tuning.TELLS_DRAFT) or _varies(n[d == 1], tuning.TELLS_DRAFT)
    ):
        # else it can't be told from what the tokens of drafts cost
        extras.append("draft")
    if 0 < launched.sum() < len(launched):
        extras.append("launch")
    if d.any() and _varies(b, tuning.TELLS_REQUEST):
        # else a request's share can't be told from the base
        extras.append("request")
    if s.any() and _varies(s / b, tuning.TELLS_CONTEXT):
        # else a context's share can't be told from a request's
        extras.append("context")
        if d.any():
            extras.append("attention")
    return tuple(extras)


def _varies(values: Floats, ratio: float) -> bool:
    """Return whether the largest value is so many times the smallest, or more."""
    return bool(values.max() >= ratio * values.min())


def _robust(
    names: tuple[str, ...], columns: Mapping[str, Floats], t: Floats, weight: Floats
) -> tuple[dict[str, float], float]:
    """Fit least squares with Huber's weights on the relative residuals; leave out a
    coefficient below its bound. Return the coefficients and the loss.
    """
    kept = list(names)
    huber = np.ones_like(t)
    while True:
        x = np.stack([columns[name] for name in kept], axis=1)
        for _ in range(3):
            found = _least_squares(x, t, weight * np.sqrt(huber))
            residual = np.abs(x @ found / t - 1.0)
            median = float(np.sort(residual)[len(residual) // 2])
            scale = max(tuning.HUBER_MEDIANS * median, tuning.HUBER_FLOOR)
            if residual.max() <= scale and huber.min() == 1.0:
                break
            huber = np.minimum(1.0, scale / np.maximum(residual, 1e-12))
        coefficients = dict(zip(kept, found.tolist(), strict=True))
        below = _below_bound(coefficients)
        if not below or len(kept) == 1:
            loss = np.minimum(residual, 1.0) ** 2 * huber
            return coefficients, float(np.mean(loss))
        kept.remove(below[-1])


def _least_squares(x: Floats, t: Floats, weight: Floats) -> Floats:
    """Return the coefficients of x that fit t best, float64 [columns]."""
    size = np.maximum(np.abs(x).max(axis=0), 1e-12)
    a = x / size * weight[:, None]
    gram = a.T @ a
    diagonal = len(size) + 1
    gram.flat[::diagonal] *= 1 + 1e-9
    scaled = np.linalg.solve(gram, a.T @ (t * weight))
    return np.asarray(scaled / size)


def _below_bound(coefficients: Mapping[str, float]) -> list[str]:
    """Return the coefficients that are negative; times may rise more slowly beyond the
    knee, but not fall.
    """
    below = []
    for name, value in coefficients.items():
        bound = -coefficients.get("token", 0.0) if name == "bend" else 0.0
        if value < bound:
            below.append(name)
    return below
