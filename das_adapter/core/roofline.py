"""How long a decode step takes, from what it reads and computes: before the first step,
and in the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from das_adapter.core import tuning
from das_adapter.core.hardware import Device
from das_adapter.core.latency import StepModel, fit
from das_adapter.core.policy_sizes import policy_sizes
from das_adapter.core.steps import Floats

COPY_SHARE = {"int4": 0.27, "int8": 0.51, "fp8": 0.5}
"""Bytes of a policy copy's linear weights, scales included, as a share of the policy's
in 16 bits, by format.
"""


@dataclass(frozen=True)
class Roofline:
    """Time of a decode step from what it reads and computes (EfficientRollout, section
    3; code of 2026-06).
    """

    weight_bytes: float
    """Bytes of all weights that are read in every step, but for `expert_bytes`."""
    linear_bytes: float
    """Bytes of the weights in linear layers, which a policy copy quantises."""
    kv_bytes: float
    """Bytes read per request and token of context."""
    dense_flops: float
    """Operations of the linear layers and experts for each token."""
    attention_flops: float
    """Operations of attention for each token and token of context."""
    hardware: Device
    expert_bytes: float = 0.0
    """Bytes of all routed experts, of which a step reads those that its tokens choose;
    not in `weight_bytes`.
    """
    expert_share: float = 0.0
    """Share of a layer's routed experts that a token chooses."""
    table_bytes: float = 0.0
    """Bytes of the input embeddings, of which a token reads one row; not in
    `weight_bytes`. 0: they are the head's.
    """
    state_bytes: float = 0.0
    """Bytes of a request's recurrent state, which a step reads once, and writes after
    each token. 0: the policy has none.
    """

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        hardware: Device,
        tensor_parallel: int = 1,
        bytes_per_weight: float = 2.0,
    ) -> Roofline:
        """Build it from a Hugging Face config of a decoder whose `model_type` is in
        `policy_sizes.FAMILIES`: dense or with routed experts, with recurrent layers or
        without.

        Args:
            config: `config.json` as a mapping.
            hardware: of one device.
            tensor_parallel: devices that a layer, and its experts, are spread over.
            bytes_per_weight: 2 in 16 bits, 1 in FP8. Embeddings and head stay in 16
                bits, the KV cache too.

        Raises:
            KeyError: the config lacks a size.
            DasError: its `model_type` is another.
        """
        sizes = policy_sizes(config)
        linear_bytes = bytes_per_weight * sizes.linear
        head_bytes = 2 * sizes.hidden * sizes.vocab
        table_bytes = 0.0 if sizes.tied else head_bytes / tensor_parallel
        kv_devices = min(tensor_parallel, sizes.kv_heads)  # a head is not divided
        kv_width = sizes.attention_layers * sizes.kv_heads * sizes.head_width
        query_width = sizes.attention_layers * sizes.heads * sizes.head_width
        state_bytes = 0.0
        if sizes.state is not None:
            state_bytes = sizes.state.num_bytes / tensor_parallel
        return cls(
            weight_bytes=(linear_bytes + head_bytes) / tensor_parallel,
            linear_bytes=linear_bytes / tensor_parallel,
            kv_bytes=4 * kv_width / kv_devices,
            dense_flops=2 * sizes.of_token / tensor_parallel,
            attention_flops=4 * query_width / tensor_parallel,
            hardware=hardware,
            expert_bytes=bytes_per_weight * sizes.experts / tensor_parallel,
            expert_share=sizes.chosen_share,
            table_bytes=table_bytes,
            state_bytes=state_bytes,
        )

    def seconds(
        self,
        requests: npt.ArrayLike,
        context: npt.ArrayLike,
        drafts: npt.ArrayLike,
        share: float | None = None,
    ) -> Floats:
        """Return the times of steps that verify so many tokens of each request, mean; 0
        drafts is a plain step. Arguments broadcast: requests, mean tokens of context,
        drafts. `share`: for a pass of a policy copy, the bytes of its linear weights as
        a share of the policy's; experts are not quantised.
        """
        b = np.asarray(requests, dtype=float)
        s = np.asarray(context, dtype=float)
        d = np.asarray(drafts, dtype=float)
        tokens_each = d + 1
        weights_s = self.weights_s(b * tokens_each, share)
        kv_s = self.kv_bytes * b * s / self.hardware.bandwidth
        state_s = self._state_s * b * (1 + tokens_each)
        read_s = weights_s + kv_s + state_s
        compute_s = tokens_each * self._compute(b, s)
        slower_s = np.maximum(read_s, compute_s)
        return np.asarray(slower_s)

    def step_model(
        self,
        context: float = tuning.ROOFLINE_CONTEXT_TOKENS,
        share: float | None = None,
    ) -> StepModel:
        """Return it as a `StepModel`: flat until the compute roof crosses the weights'
        read time, then a line; with experts, of which each token reads more, the best
        two lines up to some doublings of a token.

        `context`: tokens of a request's context at which a token's computing is taken;
        `share`: of the passes of a policy copy, see `seconds`.
        """
        kv_s = self.kv_bytes / self.hardware.bandwidth
        if not self.expert_bytes:
            read_s = float(self.weights_s(1, share))
            token_s = float(self._compute(1, context))
            return StepModel(
                base=read_s,
                token=self._state_s,
                bend=max(0.0, token_s - self._state_s),
                knee=read_s / token_s,
                request=self._state_s,
                context=kv_s,
            )
        doublings = np.arange(tuning.ROOFLINE_DOUBLINGS + 1.0)
        tokens: Floats = np.exp2(doublings)
        weights_s = self.weights_s(tokens, share)
        compute_s = self._compute(tokens, context)
        model = fit(
            tokens=tokens,
            requests=tokens,
            drafted=np.zeros(len(tokens), dtype=bool),
            seconds=np.maximum(weights_s, compute_s),
        )
        return replace(
            model,
            token=model.token + self._state_s,
            request=self._state_s,
            context=kv_s,
        )

    @property
    def _state_s(self) -> float:
        """Seconds in which a request's recurrent state is read, or written."""
        return self.state_bytes / self.hardware.bandwidth

    def weights_s(self, tokens: npt.ArrayLike, share: float | None = None) -> Floats:
        """Return the seconds in which the weights are read for so many tokens, a policy
        copy's with its `share`: of the experts those that any token chooses, if each
        token's choice is independent and even.
        """
        n = np.asarray(tokens, dtype=float)
        other_share = 1.0 - self.expert_share
        read_share = 1.0 - other_share**n
        saved_bytes = 0.0
        if share is not None:
            saved_bytes = (1 - share) * self.linear_bytes
        expert_bytes = self.expert_bytes * read_share
        read_bytes = self.weight_bytes + expert_bytes - saved_bytes
        return np.asarray(read_bytes / self.hardware.bandwidth)

    def _compute(self, requests: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        """Return the seconds in which a token of each request is computed."""
        b = np.asarray(requests, dtype=float)
        s = np.asarray(context, dtype=float)
        token_flops = self.dense_flops + s * self.attention_flops
        flops = b * token_flops
        return np.asarray(flops / self.hardware.flops)


class Prior(NamedTuple):
    """The step times that are known of an engine before its first step."""

    steps: StepModel
    passes: StepModel | None = None
    """Times of the policy copy's passes; None: not known."""
