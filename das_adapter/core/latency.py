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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from das_adapter.core.steps import Floats

SURPRISE = 0.25
"""Relative error of recent predictions at which the latency model is fitted again
early.
"""
SOON, MANY = 8, 4096
"""Steps after which the model is fitted again at the earliest, and at the latest: a fit
takes as long as a step of a small policy on a GPU, or longer.
"""
LAUNCH = 0.005
"""Seconds that the host takes longer to launch the kernels of a step one by one, until
such a step was seen: smaller ones do not say it.
"""
KNEES = (4, 8, 16, 32, 64, 128, 256, 512)
"""Tokens in a step at which a fitted curve may bend."""


@dataclass(frozen=True)
class StepModel:
    """Seconds of a decode step with n tokens (drafts included) of b requests that have
    s tokens of context together: base + token·n + bend·max(0, n - knee) + request·b +
    context·s + attention·s·n/b, and `draft` once if anything was drafted, `launch` if
    no graph holds the tokens; n is the smallest of `sizes` that holds them.
    """

    base: float
    token: float
    bend: float = 0.0
    knee: float = 0.0
    request: float = 0.0
    draft: float = 0.0
    context: float = 0.0
    """Of reading a token's keys and values."""
    attention: float = 0.0
    """Of attending to a token of context, for one of the forward pass."""
    launch: float = 0.0
    """Of more tokens than the largest of `sizes`: the kernels are launched one by
    one.
    """
    sizes: tuple[int, ...] = ()
    """Tokens for which CUDA graphs are captured, rising: a step is padded to the next
    of them.
    """
    drafted_sizes: tuple[int, ...] | None = None
    """The same of steps with drafts; None: there is no difference."""

    def native_costs(
        self, requests: int
    ) -> tuple[float, float, float, float, float, tuple[int, ...]]:
        """Return what the native `allocate` is told of the costs of tokens beside so
        many requests; where steps with drafts have sizes of their own, the first draft
        token takes the step from one of the others to these.
        """
        first = self.draft
        if self.drafted_sizes is not None:
            first = self.step(requests, requests, True) - self.step(
                requests, requests, False
            )
        return (
            self.token,
            self.bend,
            self.knee,
            first,
            self.launch,
            self.captured_sizes(True),
        )

    def captured_sizes(self, drafted: bool) -> tuple[int, ...]:
        """Return the sizes of steps with drafts, or without."""
        return (
            self.sizes
            if self.drafted_sizes is None or not drafted
            else self.drafted_sizes
        )

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
        """Return it with all times multiplied but `launch`, which the host alone
        decides.
        """
        kept = ("knee", "launch", "sizes", "drafted_sizes")
        return replace(
            self,
            **{
                name: factor * value
                for name, value in vars(self).items()
                if name not in kept
            },
        )

    def padded(self, tokens: npt.ArrayLike, drafted: npt.ArrayLike = False) -> Floats:
        """Return the tokens that steps of so many compute, with drafts or without."""
        n = np.asarray(tokens, dtype=float)
        if self.drafted_sizes is None:
            return _padded(n, self.sizes)
        return np.where(drafted, _padded(n, self.drafted_sizes), _padded(n, self.sizes))

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
        return np.asarray(tokens) > np.where(
            drafted, self.largest_graph(True), self.largest_graph(False)
        )

    def padded_size(self, tokens: float, drafted: bool = False) -> float:
        """Return the tokens that one step of so many computes, with drafts or
        without.
        """
        sizes = self.captured_sizes(drafted)
        at = bisect_left(sizes, tokens)
        return sizes[at] if at < len(sizes) else tokens

    def seconds(
        self,
        tokens: npt.ArrayLike,
        requests: npt.ArrayLike,
        drafted: npt.ArrayLike,
        context: npt.ArrayLike = 0.0,
    ) -> Floats:
        """Return step times. Arguments broadcast: tokens in the forward pass, requests,
        whether any was drafted, tokens of context that all requests have together.
        """
        n = self.padded(tokens, drafted)
        b = np.asarray(requests, dtype=float)
        s = np.asarray(context, dtype=float)
        bent = self.bend * np.maximum(0.0, n - self.knee)
        read = self.context * s + self.attention * s * n / np.maximum(b, 1e-9)
        once = self.draft * np.asarray(drafted) + self.launch * self.exceeds_graphs(
            tokens, drafted
        )
        return np.asarray(
            self.base + self.token * n + bent + self.request * b + read + once
        )

    def step(
        self, tokens: float, requests: float, drafted: bool, context: float = 0.0
    ) -> float:
        """Return the seconds of one step, for plain numbers."""
        n = self.padded_size(tokens, drafted)
        bent = self.bend * (n - self.knee) if n > self.knee else 0.0
        read = (
            (self.context + self.attention * n / requests) * context if context else 0.0
        )
        once = (self.draft if drafted else 0.0) + (
            self.launch if tokens > self.largest_graph(drafted) else 0.0
        )
        return self.base + self.token * n + bent + self.request * requests + read + once

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
        return self.token + (self.bend if tokens >= self.knee else 0.0)

    def marginal_price(self, tokens: float) -> float:
        """Return the seconds that one more draft token adds to a step of `tokens`: none
        where it takes the place of padding.
        """
        return self.slope(tokens) if self.padded_size(tokens, True) == tokens else 0.0


def _padded(n: Floats, sizes: tuple[int, ...]) -> Floats:
    if not sizes:
        return n
    at = np.searchsorted(sizes, n)
    return np.where(at < len(sizes), np.take(sizes, at, mode="clip"), n)


ASSUMED = StepModel(base=0.02, token=0.02 / 16)
"""Until an engine's first steps, where no roofline tells: sixteen tokens more take as
long as an empty step.
"""
ASSUMED_ON_GPU = StepModel(base=0.02, token=0.0, bend=0.02 / 160, knee=160)
"""The same on a GPU: up to 160 tokens take as long, and then as many more take as long
again, as on an A100.
"""


@dataclass
class _Cell:
    tokens: float
    requests: float
    context: float
    seconds: deque[float]


class StepTimes:
    """Step times as they are observed, and the model fitted to them.

    The latest few times of each kind of step are kept (tokens, requests, context,
    drafted or not; larger numbers in steps of an eighth, the context of a request in
    half octaves). The model is fitted to their medians, so that a pause of the process
    changes nothing. Steps that read prompts do not belong here.
    """

    KEEP = 15
    """Times kept per kind of step."""

    def __init__(
        self,
        prior: StepModel | None = None,
        kinds: int = 2,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """`prior`: the model until the first fit; None: `ASSUMED`; `kinds`: how many
        kinds of step must have been seen twice, whatever their context, before that;
        `sizes`: `StepModel.sizes` of the engine.
        """
        self.model = self._prior = replace(
            prior or ASSUMED, sizes=sizes, launch=LAUNCH if sizes else 0.0
        )
        self._assumed = prior is None
        self.known = not self._assumed
        """Whether there was a prior, or a step."""
        self.observed = 0
        self.recent_error = 0.0
        """Relative error of the last few predictions since the last fit: large outside
        the fitted range, or where times scatter.
        """
        self._kinds = kinds
        self._fitted_at = 0
        self._patience = SOON
        self._cells: dict[tuple[int, int, bool, bool, int], _Cell] = {}
        self._error = 0.0
        self._judged = 0

    def set_prior(self, model: StepModel) -> None:
        """Take how times relate to each other, before the first step, in place of
        `ASSUMED`.
        """
        self.model = self._prior = replace(
            model, sizes=self._prior.sizes, launch=self._prior.launch
        )

    def set_drafted_sizes(self, sizes: tuple[int, ...]) -> None:
        """Take `StepModel.drafted_sizes` of the engine, before its first step."""
        self.model, self._prior = (
            replace(model, drafted_sizes=sizes) for model in (self.model, self._prior)
        )

    def add(
        self,
        tokens: int,
        requests: int,
        drafted: bool,
        seconds: float,
        context: float = 0.0,
    ) -> float | None:
        """Take the time of one decode step; return what was predicted, None where
        nothing was known. `context`: tokens of context that all requests have
        together.
        """
        predicted = (
            self.model.step(tokens, requests, drafted, context) if self.known else None
        )
        if predicted is not None and seconds > 0:
            error = min(1.0, abs(predicted / seconds - 1.0))
            self._error += error
            self._judged += 1
            self.recent_error += (error - self.recent_error) / 8
        self.observed += 1
        mean = context / max(requests, 1)
        launched = tokens > self._prior.largest_graph(drafted)
        tokens = int(self._prior.padded_size(tokens, drafted))
        key = (
            _eighths(tokens),
            _eighths(requests),
            drafted,
            launched,
            round(2 * math.log2(mean)) if mean > 1 else 0,
        )
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(
                tokens, requests, context, deque(maxlen=self.KEEP)
            )
        cell.tokens += 0.2 * (tokens - cell.tokens)
        cell.requests += 0.2 * (requests - cell.requests)
        cell.context += 0.2 * (context - cell.context)
        cell.seconds.append(seconds)
        return predicted

    def pop_error(self) -> float | None:
        """Return the mean relative error of the predictions since the last call, each
        made before its step was fitted; None: there were none.
        """
        error, self._error, judged, self._judged = self._error, 0.0, self._judged, 0
        return error / judged if judged else None

    def keep_fitted(self) -> None:
        """Fit the model at the first step, and again after enough new ones, earlier
        where its recent predictions were wrong: soon, and where that did not help, each
        time after twice as many.
        """
        since = self.observed - self._fitted_at
        surprised = self.recent_error > SURPRISE
        usual = min(max(16, self._fitted_at), MANY)
        if not self.known or since >= (
            min(self._patience, usual) if surprised else usual
        ):
            patience = 2 * self._patience if surprised else SOON
            self.fit()
            self._patience = patience

    def fit(self) -> StepModel:
        """Fit the model again and return it; while too few kinds of step were seen
        twice, or all of about one size, the prior, whose times are multiplied to meet
        those that were seen. Where there was none, steps of about one size say that
        smaller ones take as long. Beyond the largest step that was seen times rise as
        the prior's do: that small steps take equally long does not say that tokens cost
        nothing.
        """
        self._fitted_at = self.observed
        self._patience = SOON
        self.recent_error = 0.0
        found = [(c, key) for key, c in self._cells.items() if len(c.seconds) >= 2]
        few = len({key[:4] for _, key in found}) < self._kinds
        if few:
            found = [(c, key) for key, c in self._cells.items()]
        cells = [c for c, _ in found]
        self.known = self.known or bool(found)
        seconds = np.array([float(np.median(c.seconds)) for c in cells])
        drafted = np.array([key[2] for _, key in found], dtype=bool)
        n, b, s = (
            np.array([getattr(c, name) for c in cells])
            for name in ("tokens", "requests", "context")
        )
        alike = bool(cells) and n.max() < 1.1 * n.min()
        # then these times say what it costs
        seen = bool(np.any(self._prior.exceeds_graphs(n, drafted)))
        prior = replace(self._prior, launch=0.0) if seen else self._prior
        if cells and (few or (alike and not self._assumed)):
            self.model = prior.scaled(
                float(np.median(seconds / prior.seconds(n, b, drafted, s)))
            )
        elif cells:
            weights = np.sqrt([len(c.seconds) for c in cells])
            if alike and self._kinds > 1:
                n = np.full_like(n, n.max())
            self.model = fit(n, b, drafted, seconds, s, weights, prior)
            if self._kinds > 1 and not self.model.bend:
                self._bend_beyond(
                    *max((c.tokens, c.requests, c.context) for c in cells)
                )
        return self.model

    def _bend_beyond(self, n: float, b: float, s: float) -> None:
        """Let times rise at least as the prior's do beyond the largest step that was
        seen; see `StepModel.step`.
        """
        model, prior = (
            replace(known, launch=0.0) for known in (self.model, self._prior)
        )
        far = model.padded_size(2 * n, True)
        rise = prior.step(far, b, True, s) / prior.step(n, b, True, s)
        short = rise * model.step(n, b, True, s) - model.step(far, b, True, s)
        if short > 0:
            self.model = replace(self.model, knee=n, bend=short / (far - n))


def _eighths(n: int) -> int:
    """n, with larger numbers rounded to an eighth of their power of two."""
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
    further coefficient (BIC).

    Arguments are `StepModel.seconds`'s, shape (n,) each or one for all, the weight of
    each observation, and the model whose sizes are kept, and whose `launch` is where it
    is not fitted. The time of the model never falls with the number of tokens,
    requests, drafts, or with the context.
    """
    n = prior.padded(tokens, drafted)
    b = np.asarray(requests, dtype=float)
    d = np.asarray(drafted, dtype=float)
    t = np.asarray(seconds, dtype=float)
    s = np.broadcast_to(np.asarray(context, dtype=float), t.shape)
    weight = np.broadcast_to(np.asarray(weights, dtype=float), t.shape) / t
    out = np.broadcast_to(prior.exceeds_graphs(tokens, drafted), t.shape)
    columns = {
        "base": np.ones_like(n),
        "token": n,
        "request": b,
        "draft": d,
        "context": s,
        "attention": s * n / b,
    }
    columns["launch"] = out
    line = ("base", "token") if n.max() > n.min() else ("base",)
    knees = [float(knee) for knee in KNEES if n.min() < knee < n.max()]
    extras: list[str] = []
    if 0 < d.sum() < len(d) and any(
        k.max() >= 1.25 * k.min() for k in (n[d == 0], n[d == 1])
    ):
        # else it can't be told from what the tokens of drafts cost
        extras.append("draft")
    if 0 < out.sum() < len(out):
        extras.append("launch")
    # else a request's share can't be told from the base
    if d.any() and b.max() >= 4 * b.min():
        extras.append("request")
    if (s / b).max() >= 1.5 * (
        s / b
    ).min() and s.any():  # else a context's share can't be told from a request's
        extras += ["context", "attention"] if d.any() else ["context"]

    def judged(
        knee: float, extra: Sequence[str]
    ) -> tuple[float, float, dict[str, float]]:
        names = (*line, "bend", *extra) if knee else (*line, *extra)
        if len(names) >= max(len(t), 3):
            return np.inf, knee, {}
        found, loss = _robust(
            names, {**columns, "bend": np.maximum(0.0, n - knee)}, t, weight
        )
        return len(t) * np.log(loss + 1e-6) + len(found) * np.log(len(t)), knee, found

    tried = [judged(knee, extra) for knee in (0.0, *knees) for extra in ((), extras)]
    _, knee, found = min(tried, key=itemgetter(0))
    found = {"base": 0.0, "token": 0.0, "launch": prior.launch, **found}
    return StepModel(
        knee=knee if found.get("bend") else 0.0,
        sizes=prior.sizes,
        drafted_sizes=prior.drafted_sizes,
        **found,
    )


def _robust(
    names: tuple[str, ...], columns: Mapping[str, Floats], t: Floats, weight: Floats
) -> tuple[dict[str, float], float]:
    """Fit least squares with Huber's weights on the relative residuals; leave out a
    coefficient below its bound.
    """
    keep = list(names)
    huber = np.ones_like(t)
    while True:
        x = np.stack([columns[name] for name in keep], axis=1)
        size = np.maximum(np.abs(x).max(axis=0), 1e-12)
        for _ in range(3):
            w = weight * np.sqrt(huber)
            a = x / size * w[:, None]
            gram = a.T @ a
            gram.flat[:: len(keep) + 1] *= 1 + 1e-9
            found = np.linalg.solve(gram, a.T @ (t * w)) / size
            residual = np.abs(x @ found / t - 1.0)
            scale = max(1.5 * float(np.sort(residual)[len(residual) // 2]), 0.2)
            if residual.max() <= scale and huber.min() == 1.0:
                break
            huber = np.minimum(1.0, scale / np.maximum(residual, 1e-12))
        floor = {"bend": -float(found[keep.index("token")]) if "token" in keep else 0.0}
        below = [
            name
            for name, value in zip(keep, found, strict=True)
            if value < floor.get(name, 0.0)
        ]
        if not below or len(keep) == 1:
            loss = float(np.mean(np.minimum(residual, 1.0) ** 2 * huber))
            return (
                dict(zip(keep, np.maximum(found, -np.inf).tolist(), strict=True)),
                loss,
            )
        keep.remove(below[-1])
