"""How long a decode step takes, as a function of what is in it: fitted from the
engine's own steps.

DAS, section 4.2, fits t = c_base + c_tok · n. Real curves bend (below some batch a step
costs the same whatever is in it), rise with the context that attention reads, and go up
in steps where CUDA graphs are captured for some sizes only; so the fit chooses the best
of a few small models, of which the line is one.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from das_adapter.core import tuning
from das_adapter.core.steps import Bools, Floats


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
        first_s = self.draft
        if self.drafted_sizes is not None:
            drafted_s = self.step(requests, requests, True)
            plain_s = self.plain_step(requests)
            first_s = drafted_s - plain_s
        sizes = self.captured_sizes(True)
        return (
            self.token,
            self.bend,
            self.knee,
            first_s,
            self.launch,
            sizes,
        )

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
        attention_s = self.attention * context
        context_s = self.context * context
        # at every step: `replace` takes ten times as long
        model = StepModel.__new__(StepModel)
        fields = vars(model)
        fields.update(vars(self))
        fields["token"] = self.token + attention_s
        fields["request"] = self.request + context_s
        fields["context"] = 0.0
        fields["attention"] = 0.0
        return model

    def scaled(self, factor: float) -> StepModel:
        """Return the model with all times multiplied but `launch`, which the host alone
        decides.
        """
        not_times = ("knee", "launch", "sizes", "drafted_sizes")
        scaled = {}
        for name, value in vars(self).items():
            if name in not_times:
                continue
            scaled[name] = factor * value
        return replace(self, **scaled)

    def padded(
        self,
        tokens: npt.ArrayLike,
        drafted: npt.ArrayLike = False,
    ) -> Floats:
        """Return the tokens that steps of so many compute, with drafts or without."""
        n = np.asarray(tokens, dtype=float)
        without_drafts = _padded(n, self.sizes)
        if self.drafted_sizes is None:
            return without_drafts
        with_drafts = _padded(n, self.drafted_sizes)
        return np.where(drafted, with_drafts, without_drafts)

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
        if not sizes:
            return math.inf
        return sizes[-1]

    def exceeds_graphs(
        self,
        tokens: npt.ArrayLike,
        drafted: npt.ArrayLike,
    ) -> Bools:
        """Return whether steps have more tokens than any graph holds."""
        n = np.asarray(tokens)
        with_drafts = self.largest_graph(True)
        without_drafts = self.largest_graph(False)
        largest = np.where(drafted, with_drafts, without_drafts)
        return n > largest

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
        has_drafts = np.asarray(drafted)
        is_launched = self.exceeds_graphs(tokens, drafted)
        beyond_knee = np.maximum(0.0, n - self.knee)
        min_one = np.maximum(b, 1e-9)
        # the order of the sums decides the last bit
        bend_s = self.bend * beyond_knee
        line_s = self.base + self.token * n
        requests_s = self.request * b
        tokens_and_requests_s = line_s + bend_s + requests_s
        attention_s = self.attention * s * n / min_one
        context_s = self.context * s + attention_s
        draft_s = self.draft * has_drafts
        launch_s = self.launch * is_launched
        once_s = draft_s + launch_s
        return np.asarray(tokens_and_requests_s + context_s + once_s)

    def step(
        self,
        tokens: float,
        requests: float,
        drafted: bool,
        context: float = 0.0,
    ) -> float:
        """Return the seconds of one step; see `seconds`."""
        n = self.padded_size(tokens, drafted)
        total_s = self.base + self.token * n
        if n > self.knee:
            beyond_knee = n - self.knee
            total_s += self.bend * beyond_knee
        total_s += self.request * requests
        if context:
            attention = self.attention * n / requests
            context_token_s = self.context + attention
            total_s += context_token_s * context
        once_s = 0.0
        if drafted:
            once_s = self.draft
        if tokens > self.largest_graph(drafted):
            once_s += self.launch
        return total_s + once_s

    def plain_step(self, requests: float) -> float:
        """Return the seconds of one step without drafts."""
        return self.step(requests, requests, False)

    def verifying_s(self, requests: float, num_draft_tokens: float) -> float:
        """Return the seconds that draft tokens add to a step."""
        tokens = requests + num_draft_tokens
        drafted = num_draft_tokens > 0
        verifying_step_s = self.step(tokens, requests, drafted)
        plain_step_s = self.plain_step(requests)
        return verifying_step_s - plain_step_s

    def plain_seconds(self, requests: npt.ArrayLike) -> Floats:
        """Return the time of steps without drafts."""
        return self.seconds(requests, requests, False)

    def slope(self, tokens: float) -> float:
        """Return the seconds that one more token adds to a step of about `tokens`,
        padding apart.
        """
        if tokens < self.knee:
            return self.token
        return self.token + self.bend

    def marginal_price(self, tokens: float) -> float:
        """Return the seconds that one more draft token adds to a step of `tokens`: none
        where it takes the place of padding.
        """
        if self.padded_size(tokens, True) != tokens:
            return 0.0
        return self.slope(tokens)


def _padded(n: Floats, sizes: tuple[int, ...]) -> Floats:
    """Return the next of the sizes, rising, for each number; itself beyond the last."""
    if not sizes:
        return n
    place = np.searchsorted(sizes, n)
    next_size = np.take(sizes, place, mode="clip")
    has_graph = place < len(sizes)
    return np.where(has_graph, next_size, n)


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


StepKind = tuple[int, int, bool, bool]
"""Steps that are alike, whatever their context: rounded tokens and requests, whether
drafts were verified, and whether no graph held the step.
"""


@dataclass
class _Cell:
    """Steps of one kind and about one context: their mean sizes, and the latest
    times.
    """

    step_kind: StepKind
    drafted: bool
    tokens: float
    requests: float
    context: float
    seconds: deque[float]

    def add(
        self,
        tokens: float,
        requests: float,
        context: float,
        seconds: float,
    ) -> None:
        rate = tuning.CELL_RATE
        more_tokens = tokens - self.tokens
        more_requests = requests - self.requests
        more_context = context - self.context
        self.tokens += rate * more_tokens
        self.requests += rate * more_requests
        self.context += rate * more_context
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
        min_step_kinds: int = 2,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """
        Args:
            prior: the model until the first fit; None: `ASSUMED`.
            min_step_kinds: how many kinds of step must have been seen, whatever their
                context, before that: twice each, if so many were.
            sizes: `StepModel.sizes` of the engine.
        """
        launch_s = tuning.LAUNCH_S if sizes else 0.0
        known_model = prior or ASSUMED
        self._prior = replace(known_model, sizes=sizes, launch=launch_s)
        self.model = self._prior
        self._assumed = prior is None
        self.known = not self._assumed
        """Whether there was a prior, or a step."""
        self._most_tokens = sys.maxsize
        """Most tokens of a step of which there are logits."""
        self.observed = 0
        """Steps that were timed."""
        self.recent_error = 0.0
        """Relative error of the last few predictions since the last fit: large outside
        the fitted range, or where times scatter.
        """
        self.largest_tokens = 0.0
        """Tokens of the largest step that the model was fitted to."""
        self._has_news = False
        """Whether steps of a kind were seen often enough since, which are larger or
        were predicted wrongly.
        """
        self._min_step_kinds = min_step_kinds
        self._fitted_at = 0
        """Steps that had been timed at the last fit."""
        self._refit_steps = tuning.REFIT_SOON_STEPS
        """Steps after which the model is fitted anew if its predictions are wrong."""
        self._cells: dict[tuple[StepKind, int], _Cell] = {}
        """Steps by kind and by the context of a request in half octaves."""
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

    def set_vocabulary(self, tokens: int) -> None:
        """Bound the tokens of a drafted step by the memory of their logits."""
        self._most_tokens = tuning.LOGITS_BYTES // (4 * tokens)

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
        predicted_s = None
        is_wrong = False
        if self.known:
            predicted_s = self.model.step(tokens, requests, drafted, context)
            if seconds > 0:
                relative_error = predicted_s / seconds - 1.0
                is_wrong = abs(relative_error) > tuning.REFIT_ERROR
                self._record_error(relative_error)
        self.observed += 1
        size = int(self._prior.padded_size(tokens, drafted))
        launched = tokens > self._prior.largest_graph(drafted)
        step_kind = (
            _eighths(size),
            _eighths(requests),
            drafted,
            launched,
        )
        mean_context = context / max(requests, 1)
        half_octaves = 0
        if mean_context > 1:
            octaves = math.log2(mean_context)
            half_octaves = round(2 * octaves)
        key = step_kind, half_octaves
        cell = self._cells.get(key)
        if cell is None:
            cell = _Cell(
                step_kind=step_kind,
                drafted=drafted,
                tokens=size,
                requests=requests,
                context=context,
                seconds=deque(maxlen=tuning.STEP_TIMES),
            )
            self._cells[key] = cell
        cell.add(size, requests, context, seconds)
        is_larger = size >= tuning.ALIKE_STEPS * self.largest_tokens
        is_new = len(cell.seconds) == tuning.FIT_TIMES
        # among many steps a wrong one is rather noise
        rare_steps = tuning.NEWS_SHARE * self._fitted_at
        is_news = is_wrong and self.observed - self._fitted_at >= rare_steps
        if is_new and (is_larger or is_news):
            self._has_news = True
        return predicted_s

    def max_tokens(self, requests: int) -> int:
        """Return the most tokens of a step of so many requests, drafts included, whose
        time can be told from those of the steps that were seen, and whose logits have
        memory: none but the requests' own, before a kind of step was seen often enough.
        """
        if not self.largest_tokens:
            return requests
        largest = max(self.largest_tokens, float(requests))
        known = int(tuning.STEP_GROWTH * largest)
        return max(requests, min(known, self._most_tokens))

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
        if not num_predictions:
            return None
        return error / num_predictions

    def keep_fitted(self) -> None:
        """Fit the model at the first step, when steps of a new kind were seen that are
        larger than all before or were predicted wrongly, and again after enough new
        ones, earlier where recent predictions were wrong: soon, and where that did not
        help, each time after twice as many.
        """
        new_steps = self.observed - self._fitted_at
        is_wrong = self.recent_error > tuning.REFIT_ERROR
        doubled = max(tuning.REFIT_FIRST_STEPS, self._fitted_at)
        due = min(doubled, tuning.REFIT_STEPS)
        if is_wrong:
            due = min(self._refit_steps, due)
        if self.known and new_steps < due and not self._has_news:
            return
        refit_steps = tuning.REFIT_SOON_STEPS
        if is_wrong:
            refit_steps = 2 * self._refit_steps
        self.fit()
        self._refit_steps = refit_steps

    def fit(self) -> StepModel:
        """Fit the model again and return it.

        While too few kinds of step were seen, or all of about one size, it is the
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
        all_cells = list(self._cells.values())
        cells = []
        for cell in all_cells:
            if len(cell.seconds) >= tuning.FIT_TIMES:
                cells.append(cell)
        if cells:
            self.largest_tokens = max(cell.tokens for cell in cells)
        self._has_news = False
        if len({cell.step_kind for cell in cells}) < self._min_step_kinds:
            cells = all_cells
        step_kinds = {cell.step_kind for cell in cells}
        too_few = len(step_kinds) < self._min_step_kinds
        steps = _Steps.of(cells)
        tokens = steps.tokens
        prior = self._prior
        is_launched = prior.exceeds_graphs(tokens, steps.drafted)
        if np.any(is_launched):
            # these times say what launching kernels costs
            prior = replace(prior, launch=0.0)
        largest_tokens = tokens.max()
        alike_tokens = tuning.ALIKE_STEPS * tokens.min()
        are_alike = largest_tokens < alike_tokens
        if too_few or (are_alike and not self._assumed):
            self.model = steps.scale(prior)
            return self.model
        if are_alike and self._min_step_kinds > 1:
            steps.tokens = np.full_like(tokens, largest_tokens)
        self.model = steps.fit(prior)
        if self._min_step_kinds > 1 and not self.model.bend:
            self._bend_beyond(*_largest_step(cells))
        return self.model

    def _bend_beyond(
        self,
        tokens: float,
        requests: float,
        context: float,
    ) -> None:
        """Let times rise at least as the prior's do beyond the largest step that was
        seen; see `StepModel.step`.
        """
        model = replace(self.model, launch=0.0)
        prior = replace(self._prior, launch=0.0)
        far_tokens = model.padded_size(2 * tokens, True)
        near = (tokens, requests, True, context)
        far = (far_tokens, requests, True, context)
        prior_near_s = prior.step(*near)
        prior_far_s = prior.step(*far)
        rise = prior_far_s / prior_near_s
        near_s = model.step(*near)
        far_s = model.step(*far)
        expected_far_s = rise * near_s
        missing_s = expected_far_s - far_s
        if missing_s > 0:
            more_tokens = far_tokens - tokens
            bend = missing_s / more_tokens
            self.model = replace(self.model, knee=tokens, bend=bend)


@dataclass
class _Steps:
    """The steps to which a model is fitted; arrays [cells]."""

    tokens: Floats
    requests: Floats
    context: Floats
    drafted: Bools
    seconds: Floats
    """Median time of a cell."""
    num_times: list[int]
    """Number of times that a cell has."""

    @classmethod
    def of(cls, cells: Sequence[_Cell]) -> _Steps:
        """Return the steps of some cells."""
        tokens = [cell.tokens for cell in cells]
        requests = [cell.requests for cell in cells]
        context = [cell.context for cell in cells]
        drafted = [cell.drafted for cell in cells]
        num_times = [len(cell.seconds) for cell in cells]
        medians = []
        for cell in cells:
            median_s = np.median(cell.seconds)
            medians.append(float(median_s))
        return cls(
            tokens=np.array(tokens),
            requests=np.array(requests),
            context=np.array(context),
            drafted=np.array(drafted, dtype=bool),
            seconds=np.array(medians),
            num_times=num_times,
        )

    def scale(self, prior: StepModel) -> StepModel:
        """Return the prior, multiplied so that it meets these steps."""
        expected_s = prior.seconds(
            self.tokens, self.requests, self.drafted, self.context
        )
        ratios = self.seconds / expected_s
        factor = np.median(ratios)
        return prior.scaled(float(factor))

    def fit(self, prior: StepModel) -> StepModel:
        """Fit a model to these steps; see the function `fit`."""
        weights = np.sqrt(self.num_times)
        return fit(
            tokens=self.tokens,
            requests=self.requests,
            drafted=self.drafted,
            seconds=self.seconds,
            context=self.context,
            weights=weights,
            prior=prior,
        )


def _largest_step(cells: Iterable[_Cell]) -> tuple[float, float, float]:
    """Return tokens, requests and context of the step with most tokens."""
    steps = []
    for cell in cells:
        step = cell.tokens, cell.requests, cell.context
        steps.append(step)
    return max(steps)


def _eighths(n: int) -> int:
    """Round a number down to an eighth of its power of two, if it is not small."""
    num_bits = n.bit_length()
    shift = max(0, num_bits - 4)
    return n >> shift << shift


def fit(
    tokens: Floats,
    requests: Floats,
    drafted: Bools,
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
    s = np.asarray(context, dtype=float)
    s = np.broadcast_to(s, t.shape)
    launched = prior.exceeds_graphs(tokens, drafted)
    launched = np.broadcast_to(launched, t.shape)
    weight = np.asarray(weights, dtype=float)
    relative_weight = np.broadcast_to(weight, t.shape) / t
    columns = {
        "base": np.ones_like(n),
        "token": n,
        "request": b,
        "draft": d,
        "context": s,
        "attention": s * n / b,
        "launch": launched,
    }
    smallest = n.min()
    largest = n.max()
    line: tuple[str, ...] = ("base",)
    if largest > smallest:
        line = ("base", "token")
    extras = told_apart(n, b, d, s, launched)
    knees = [0.0]
    for knee in tuning.KNEES:
        if smallest < knee < largest:
            knees.append(float(knee))
    # where several fit alike, the largest: the next steps show whether it is right
    knees.reverse()
    num_steps = len(t)
    max_coefficients = max(num_steps, 3) - 1
    best_score = np.inf
    best_knee = 0.0
    best: Coefficients = {}
    for knee in knees:
        bend = ("bend",) if knee else ()
        beyond_knee = n - knee
        columns["bend"] = np.maximum(0.0, beyond_knee)
        for extra in ((), extras):
            names = (*line, *bend, *extra)
            if knee and len(names) > max_coefficients:
                # few steps: times are flat up to the knee
                names = ("base", *bend, *extra)
            if len(names) > max_coefficients:
                continue
            coefficients, loss = _robust(names, columns, t, relative_weight)
            log_loss = np.log(loss + 1e-6)
            penalty = len(coefficients) * np.log(num_steps)
            score = num_steps * log_loss + penalty
            if score < best_score - 1e-6:
                best_score = score
                best_knee = knee
                best = coefficients
    if not best.get("bend"):
        best_knee = 0.0
    coefficients = {
        "base": 0.0,
        "token": 0.0,
        "launch": prior.launch,
        **best,
    }
    return StepModel(
        knee=best_knee,
        sizes=prior.sizes,
        drafted_sizes=prior.drafted_sizes,
        **coefficients,
    )


def told_apart(
    n: Floats,
    b: Floats,
    d: Floats,
    s: Floats,
    launched: Bools,
) -> tuple[str, ...]:
    """Return the coefficients beside base and token that these steps tell apart, by
    their columns in `fit`.
    """
    extras: list[str] = []
    some_drafted = 0 < d.sum() < len(d)
    some_launched = 0 < launched.sum() < len(launched)
    any_drafted = d.any()
    if some_drafted and _varies(n[d == 1], tuning.TELLS_DRAFT):
        # else it can't be told from what the tokens of drafts cost
        extras.append("draft")
    if some_launched:
        extras.append("launch")
    if any_drafted and _varies(b, tuning.TELLS_REQUEST):
        # else a request's share can't be told from the base
        extras.append("request")
    if s.any() and _varies(s / b, tuning.TELLS_CONTEXT):
        # else a context's share can't be told from a request's
        extras.append("context")
        if any_drafted:
            extras.append("attention")
    return tuple(extras)


def _varies(values: Floats, ratio: float) -> bool:
    """Return whether the largest value is so many times the smallest, or more."""
    smallest = values.min()
    largest = values.max()
    return bool(largest >= ratio * smallest)


Coefficients = dict[str, float]
"""Coefficients of a model by the names of their columns."""


def _robust(
    names: Sequence[str],
    columns: Mapping[str, Floats],
    t: Floats,
    weight: Floats,
) -> tuple[Coefficients, float]:
    """Fit least squares with Huber's weights on the relative residuals; leave out a
    coefficient below its bound. Return the coefficients and the loss.
    """
    kept = list(names)
    huber = np.ones_like(t)
    while True:
        kept_columns = [columns[name] for name in kept]
        x = np.stack(kept_columns, axis=1)
        for _ in range(3):
            robust_weight = weight * np.sqrt(huber)
            fitted = _least_squares(x, t, robust_weight)
            relative = x @ fitted / t
            residual = np.abs(relative - 1.0)
            scale = _huber_scale(residual)
            all_near = residual.max() <= scale
            if all_near and huber.min() == 1.0:
                break
            positive = np.maximum(residual, 1e-12)
            huber = np.minimum(1.0, scale / positive)
        values = fitted.tolist()
        coefficients = dict(zip(kept, values, strict=True))
        below = _below_bound(coefficients)
        if not below or len(kept) == 1:
            bounded = np.minimum(residual, 1.0)
            losses = bounded**2 * huber
            loss = np.mean(losses)
            return coefficients, float(loss)
        kept.remove(below[-1])


def _huber_scale(residual: Floats) -> float:
    """Return the residual beyond which a step counts less."""
    in_order = np.sort(residual)
    middle = len(residual) // 2
    median = float(in_order[middle])
    return max(tuning.HUBER_MEDIANS * median, tuning.HUBER_FLOOR)


def _least_squares(
    x: Floats,
    t: Floats,
    weight: Floats,
) -> Floats:
    """Return the coefficients of x that fit t best, float64 [columns]."""
    magnitude = np.abs(x)
    largest = magnitude.max(axis=0)
    size = np.maximum(largest, 1e-12)
    row_weight = weight[:, None]
    a = x / size * row_weight
    weighted_t = t * weight
    gram = a.T @ a
    diagonal = len(size) + 1
    gram.flat[::diagonal] *= 1 + 1e-9
    right_side = a.T @ weighted_t
    scaled = np.linalg.solve(gram, right_side)
    return np.asarray(scaled / size)


def _below_bound(coefficients: Coefficients) -> list[str]:
    """Return the coefficients that are negative; times may rise more slowly beyond the
    knee, but not fall.
    """
    token = coefficients.get("token", 0.0)
    below = []
    for name, value in coefficients.items():
        bound = 0.0
        if name == "bend":
            bound = -token
        if value < bound:
            below.append(name)
    return below
