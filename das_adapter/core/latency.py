"""How long a decode step takes, as a function of what is in it: fitted from the engine's own steps, or from a roofline
of model and hardware before the first step.

DAS, section 4.2, fits t = c_base + c_tok · n. Real curves bend (below some batch a step costs the same whatever is in
it), so the fit chooses the best of a few small models, of which the line is one.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.errors import DasError

Floats = npt.NDArray[np.float64]
SURPRISE = 0.25
"""Relative error of recent predictions at which the latency model is fitted again at once."""
KNEES = (4, 8, 16, 32, 64, 128, 256)
"""Tokens in a step at which a fitted curve may bend."""


class Capacity(NamedTuple):
    """What is in a decode step that takes twice as long as an empty one, if it grows in one respect alone."""

    requests: float
    tokens: float
    """In the forward pass, drafts included."""

    @classmethod
    def median(cls, of: Sequence[Sequence[float]]) -> Capacity | None:
        """Return the median of several engines', each by itself; None of none."""
        return cls(*np.median(of, axis=0).tolist()) if of else None


@dataclass(frozen=True)
class StepModel:
    """Seconds of a decode step with n tokens (drafts included) of b requests:
    base + token·n + bend·max(0, n - knee) + request·b, and `draft` once if anything was drafted."""

    base: float
    token: float
    bend: float = 0.0
    knee: float = 0.0
    request: float = 0.0
    draft: float = 0.0

    def seconds(self, tokens: npt.ArrayLike, requests: npt.ArrayLike, drafted: npt.ArrayLike) -> Floats:
        """Return step times. Arguments broadcast: tokens in the forward pass, requests, whether any was drafted."""
        n, b = np.asarray(tokens, dtype=float), np.asarray(requests, dtype=float)
        bent = self.bend * np.maximum(0.0, n - self.knee)
        return np.asarray(self.base + self.token * n + bent + self.request * b + self.draft * np.asarray(drafted))

    def step(self, tokens: float, requests: float, drafted: bool) -> float:
        """Return the seconds of one step, for plain numbers."""
        bent = self.bend * (tokens - self.knee) if tokens > self.knee else 0.0
        return self.base + self.token * tokens + bent + self.request * requests + (self.draft if drafted else 0.0)

    def plain(self, requests: npt.ArrayLike) -> Floats:
        """Return the time of steps without drafts."""
        return self.seconds(requests, requests, False)

    def capacity(self, tokens: int = 64) -> Capacity:
        """Return what doubles a step, by the line through one token and so many; 1 to 1024 of each."""
        slopes = self.request, (self.step(tokens, 0, False) - self.step(1, 0, False)) / (tokens - 1)
        empty = self.step(1, 0, False) - slopes[1]
        return Capacity(*(min(1024.0, max(1.0, empty / slope)) if slope > 0 else 1024.0 for slope in slopes))

    def slope(self, tokens: float) -> float:
        """Return the seconds that one more token adds to a step of `tokens`."""
        return self.token + (self.bend if tokens >= self.knee else 0.0)

    def to_dict(self) -> dict[str, float]:
        """Return the fields as plain numbers."""
        return asdict(self)


@dataclass
class _Cell:
    tokens: float
    requests: float
    seconds: deque[float]


class StepTimes:
    """Step times as they are observed, and the model fitted to them.

    The latest few times of each kind of step are kept (tokens, requests, drafted or not; larger numbers in steps of an
    eighth). The model is fitted to their medians, so that a pause of the process changes nothing. Steps that read
    prompts do not belong here.
    """

    KEEP = 15
    """Times kept per kind of step."""

    def __init__(self, prior: StepModel | None = None, kinds: int = 2) -> None:
        """
        Args:
            prior: the model until the first fit (`Roofline.line`, or a calibration's).
            kinds: how many kinds of step must have been seen twice before the model is fitted.
        """
        self.model = prior
        self.observed = 0
        self.surprise = 0.0
        """Relative error of the last few predictions: large outside the fitted range."""
        self._kinds = kinds
        self._fitted_at = 0
        self._cells: dict[tuple[int, int, bool], _Cell] = {}
        self._plain = [0] * 32  # steps without drafts, by the power of two of their requests
        self._error = 0.0
        self._judged = 0

    def add(self, tokens: int, requests: int, drafted: bool, seconds: float) -> None:
        """Take the time of one decode step."""
        if self.model is not None and seconds > 0:
            error = min(1.0, abs(self.model.step(tokens, requests, drafted) / seconds - 1.0))
            self._error += error
            self._judged += 1
            self.surprise += (error - self.surprise) / 8
        self.observed += 1
        self._plain[requests.bit_length()] += not drafted
        key = (_eighths(tokens), _eighths(requests), drafted)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(tokens, requests, deque(maxlen=self.KEEP))
        cell.tokens += 0.2 * (tokens - cell.tokens)
        cell.requests += 0.2 * (requests - cell.requests)
        cell.seconds.append(seconds)

    def plain_steps(self, requests: int) -> int:
        """Return how many steps without drafts were seen with about so many requests."""
        return self._plain[requests.bit_length()]

    def take_error(self) -> float:
        """Return the mean relative error of the predictions since the last call, each made before its step was fitted;
        0 if there were none."""
        error, self._error, judged, self._judged = self._error, 0.0, self._judged, 0
        return error / judged if judged else 0.0

    def keep_fitted(self) -> None:
        """Fit the model again after enough new steps, earlier where its recent predictions were wrong."""
        since, surprised = self.observed - self._fitted_at, self.surprise > SURPRISE
        if since >= (8 if surprised else min(max(16, self._fitted_at), 4096)):
            self._fitted_at = self.observed
            self.fit()

    def fit(self) -> StepModel | None:
        """Fit the model again and return it; the prior, or None, while too few kinds of step were seen twice."""
        cells = [(c, drafted) for (_, _, drafted), c in self._cells.items() if len(c.seconds) >= 2]
        if len(cells) == self._kinds == 1:
            self.model = StepModel(base=float(np.median(cells[0][0].seconds)), token=0.0)
        elif len(cells) >= self._kinds:
            self.model = fit(
                np.array([c.tokens for c, _ in cells]),
                np.array([c.requests for c, _ in cells]),
                np.array([drafted for _, drafted in cells]),
                np.array([float(np.median(c.seconds)) for c, _ in cells]),
                np.sqrt([len(c.seconds) for c, _ in cells]),
            )
        return self.model


def _eighths(n: int) -> int:
    """n, with larger numbers rounded to an eighth of their power of two."""
    shift = max(0, n.bit_length() - 4)
    return n >> shift << shift


def fit(
    tokens: Floats,
    requests: Floats,
    drafted: npt.NDArray[np.bool_],
    seconds: Floats,
    weights: npt.ArrayLike = 1.0,
) -> StepModel:
    """Fit the small model that is best by relative error, with a penalty on every further coefficient (BIC).

    Args:
        tokens, requests, seconds: shape (n,).
        drafted: shape (n,).
        weights: of each observation, shape (n,) or one for all.

    Returns:
        A model whose time never falls with the number of tokens, requests or drafts.
    """
    n, b = np.asarray(tokens, dtype=float), np.asarray(requests, dtype=float)
    d, t = np.asarray(drafted, dtype=float), np.asarray(seconds, dtype=float)
    weight = np.broadcast_to(np.asarray(weights, dtype=float), t.shape) / t
    one = np.ones_like(n)
    shapes: list[tuple[tuple[str, ...], float]] = [(("base", "token"), 0.0)]
    for knee in map(float, KNEES):
        if n.min() < knee < n.max():
            shapes += [(("base", "bend"), knee), (("base", "token", "bend"), knee)]
    extras: list[tuple[str, ...]] = [()]
    if 0 < d.sum() < len(d):
        extras.append(("draft",))
    if d.any() and b.max() >= 4 * b.min():  # else a request's share can't be told from the base
        extras += [(*e, "request") for e in extras]
    best, least = None, np.inf
    for names, bends_at in shapes:
        columns = {"base": one, "token": n, "bend": np.maximum(0.0, n - bends_at), "request": b, "draft": d}
        for extra in extras:
            chosen = (*names, *extra)
            if len(chosen) >= len(t) and len(chosen) > 2:
                continue
            found, loss = _robust(chosen, columns, t, weight)
            score = len(t) * np.log(loss + 1e-6) + len(found) * np.log(len(t))
            if score < least:
                best, least = StepModel(**{"base": 0.0, "token": 0.0, "knee": bends_at, **found}), score
    assert best is not None
    return best if best.bend else replace(best, knee=0.0)


def _robust(
    names: tuple[str, ...], columns: Mapping[str, Floats], t: Floats, weight: Floats
) -> tuple[dict[str, float], float]:
    """Fit least squares with Huber's weights on the relative residuals; leave out a coefficient below its bound."""
    keep, huber = list(names), np.ones_like(t)
    while True:
        x = np.stack([columns[name] for name in keep], axis=1)
        for _ in range(3):
            w = weight * np.sqrt(huber)
            a = x * w[:, None]
            gram = a.T @ a
            gram[np.diag_indices_from(gram)] *= 1 + 1e-9
            found = np.linalg.solve(gram, a.T @ (t * w))
            residual = np.abs(x @ found / t - 1.0)
            scale = max(1.5 * float(np.median(residual)), 0.2)
            huber = np.minimum(1.0, scale / np.maximum(residual, 1e-12))
        floor = {"bend": -float(found[keep.index("token")]) if "token" in keep else 0.0}
        below = [name for name, value in zip(keep, found, strict=True) if value < floor.get(name, 0.0)]
        if not below or len(keep) == 1:
            loss = float(np.mean(np.minimum(residual, 1.0) ** 2 * huber))
            return dict(zip(keep, np.maximum(found, -np.inf).tolist(), strict=True)), loss
        keep.remove(below[-1])


@dataclass(frozen=True)
class Hardware:
    """Speed of a device with real kernels."""

    bandwidth: float
    """Bytes per second from device memory."""
    flops: float
    """16-bit floating-point operations per second."""


READ, COMPUTE = 0.79, 0.75
"""Share of the data sheet's peaks that decode steps reach: EfficientRollout's fits on an A100, over its peaks."""
HARDWARE = {
    name: Hardware(READ * tb * 1e12, COMPUTE * tf * 1e12)
    for name, tb, tf in (
        ("a100", 2.039, 312.0),
        ("h100", 3.35, 989.0),
        ("h200", 4.8, 989.0),
        ("h20", 4.0, 148.0),
        ("b200", 8.0, 2250.0),
        ("gb200", 8.0, 2500.0),
        ("l40s", 0.864, 362.0),
    )
}
"""Peaks of the makers' data sheets (dense, bfloat16), at the shares above."""


@dataclass(frozen=True)
class Roofline:
    """Time of a decode step from what it reads and computes (EfficientRollout, section 3; code of 2026-06)."""

    weight_bytes: float
    linear_bytes: float
    """Bytes of the weights in linear layers, which a policy copy quantises."""
    kv_bytes: float
    """Bytes read per request and token of context."""
    dense_flops: float
    """Per token."""
    attention_flops: float
    """Per token and token of context."""
    hardware: Hardware
    plain_us: float = 0.0
    draft_us: float = 0.0
    verify_us: float = 0.0
    """Host time per request of a plain, a draft and a verification step, microseconds."""
    draft_read: float = 1.0
    """How much longer reading a policy copy's weights takes than their bytes imply, a factor (eta_d)."""
    expert_bytes: float = 0.0
    """Bytes of all routed experts, of which a step reads those that its tokens choose; not in `weight_bytes`."""
    expert_share: float = 0.0
    """Share of a layer's routed experts that a token chooses."""
    experts: int = 1
    """Routed experts of a layer on each device."""
    expert_devices: int = 1
    """Devices that a layer's routed experts are spread over; a step waits for the one that reads most of them."""

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        hardware: Hardware,
        tensor_parallel: int = 1,
        bytes_per_weight: float = 2.0,
        data_parallel: bool = False,
        **fitted: float,
    ) -> Roofline:
        """Build it from a Hugging Face config of a decoder, dense or with routed experts in every layer (Llama, Qwen2,
        Qwen3, Mistral, Mixtral, Qwen3-MoE).

        Args:
            config: `config.json` as a mapping.
            hardware: of one device.
            tensor_parallel: devices that a layer, and its experts, are spread over.
            bytes_per_weight: 2 in 16 bits, 1 in FP8. Embeddings and head stay in 16 bits, the KV cache too.
            data_parallel: each device has the attention and the embeddings whole, for requests of its own, and only
                experts are spread.
            fitted: fields that were measured instead (`kv_bytes`, `plain_us`, ...).

        Raises:
            KeyError: the config lacks a size.
        """
        hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        width = config.get("head_dim") or hidden // heads
        attention = hidden * width * (2 * heads + 2 * kv_heads)
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        chosen = config["num_experts_per_tok"] if experts else 0
        feed_forward = 3 * hidden * (config.get("moe_intermediate_size") or config["intermediate_size"])
        linear = layers * (attention + (0 if experts else feed_forward))
        embeddings = hidden * vocab * (1 if config.get("tie_word_embeddings") else 2)
        whole = 1 if data_parallel else tensor_parallel
        values: dict[str, Any] = {
            "weight_bytes": (bytes_per_weight * linear + 2 * embeddings) / whole,
            "linear_bytes": bytes_per_weight * linear / whole,
            "kv_bytes": 4 * layers * kv_heads * width / tensor_parallel,
            "dense_flops": 2 * (linear + layers * chosen * feed_forward + hidden * vocab) / tensor_parallel,
            "attention_flops": 4 * layers * heads * width / tensor_parallel,
        }
        if experts:
            values["expert_bytes"] = bytes_per_weight * layers * experts * feed_forward / tensor_parallel
            values["expert_share"] = chosen / experts
            values["expert_devices"] = min(tensor_parallel, experts)
            values["experts"] = experts // values["expert_devices"]
        return cls(hardware=hardware, **{**values, **fitted})

    def seconds(self, requests: npt.ArrayLike, context: npt.ArrayLike, drafts: npt.ArrayLike) -> Floats:
        """Return the times of steps that verify so many tokens of each request, mean; 0 drafts is a plain step.
        Arguments broadcast: requests, mean tokens of context, drafts."""
        b, s, d = (np.asarray(x, dtype=float) for x in (requests, context, drafts))
        read = (self.read_bytes(b * (d + 1)) + self.kv_bytes * b * s) / self.hardware.bandwidth
        host = np.where(d > 0, self.verify_us, self.plain_us)
        return np.asarray(np.maximum(read, (d + 1) * self._compute(b, s)) + host * b * 1e-6)

    def verify(self, requests: float, context: float, drafts: float) -> float:
        """Return the seconds of a step that verifies `drafts` tokens of each request; 0 drafts is a plain step."""
        return float(self.seconds(requests, context, drafts))

    def read_bytes(self, tokens: npt.ArrayLike) -> Floats:
        """Return the bytes of weights that a step of so many tokens reads: of the experts those that any token chooses,
        on the device where these are most, if each token's choice is independent and even."""
        touched = 1.0 - (1.0 - self.expert_share) ** np.asarray(tokens, dtype=float)
        if self.expert_devices > 1:
            touched = _fullest(touched, self.experts, self.expert_devices)
        return np.asarray(self.weight_bytes + self.expert_bytes * touched)

    def draft(self, requests: float, context: float, share: float) -> float:
        """Return the seconds of one pass of a policy copy whose linear weights take `share` of the policy's bytes."""
        return float(self.drafts(requests, context, share))

    def drafts(self, requests: npt.ArrayLike, context: npt.ArrayLike, share: float) -> Floats:
        """Return the times of such passes; arguments as in `seconds`. Experts are not quantised."""
        b, s = np.asarray(requests, dtype=float), np.asarray(context, dtype=float)
        weights = self.read_bytes(b) - (1 - share) * self.linear_bytes
        read = (self.draft_read * weights + self.kv_bytes * b * s) / self.hardware.bandwidth
        return np.asarray(np.maximum(read, self._compute(b, s)) + self.draft_us * b * 1e-6)

    def speedup(self, requests: float, context: float, drafts: int, length: float, share: float | None) -> float:
        """Return the speed-up at a mean acceptance length (accepted + 1); `share` None: drafting takes no time."""
        drafting = 0.0 if share is None else drafts * self.draft(requests, context, share)
        plain = self.verify(requests, context, 0)
        return length * plain / (drafting + self.verify(requests, context, drafts))

    def line(self, context: float = 1024.0) -> StepModel:
        """Return it as a `StepModel`: flat until the compute roof crosses the weights' read time, then a line."""
        read = float(self.read_bytes(1)) / self.hardware.bandwidth
        token = float(self._compute(1, context))
        per_request = self.kv_bytes * context / self.hardware.bandwidth + self.plain_us * 1e-6
        return StepModel(base=read, token=0.0, bend=token, knee=read / token, request=per_request)

    def _compute(self, requests: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        token = self.dense_flops + np.asarray(context, dtype=float) * self.attention_flops
        return np.asarray(np.asarray(requests, dtype=float) * token / self.hardware.flops)


def _fullest(chance: Floats, count: int, groups: int) -> Floats:
    """Return the share of the things that happen in the group where most do, mean: there are so many in each group, and
    each happens with this chance by itself."""
    at_most, found = np.zeros_like(chance), np.zeros_like(chance)
    for happen in range(count):
        at_most += math.comb(count, happen) * chance**happen * (1.0 - chance) ** (count - happen)
        found += 1.0 - np.minimum(at_most, 1.0) ** groups
    return np.asarray(found / count)


def read_calibration(path: str) -> StepModel:
    """Read the fitted line of a calibration file, for `toggle.calibration`.

    Raises:
        DasError: the file does not exist, or `das-adapter calibrate` did not write it.
    """
    try:
        return StepModel(**json.loads(Path(path).read_text())["line"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DasError(f"das.toggle.calibration={path!r}: found {error!r}, expected a file that "
                       "das-adapter calibrate wrote") from None  # fmt: skip
