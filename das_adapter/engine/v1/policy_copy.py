"""Draft tokens from a quantised copy of the policy, on the policy's own KV cache (EfficientRollout, arXiv 2606.18967,
section 3).

The copy shares everything with the policy but its linear layers: embeddings, norms, head and attention modules are the
same objects, so a draft token's keys and values land in the policy's cache, in slots that the verifying forward pass
overwrites. The copy reads no prompt, has no cache of its own, and can start or stop drafting at any step.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.engine.v1.decode_graphs import DecodePasses, capture_with_policy
from das_adapter.engine.v1.draft_sample import draw
from das_adapter.engine.v1.keyed_sample import Keys
from das_adapter.engine.v1.model_source import ModelSource
from das_adapter.engine.v1.quantised import QuantisedWeight, quantised
from das_adapter.engine.v1.verification import beside
from das_adapter.errors import DasError

REPACK = "_das_repack"
"""Attribute of a linear layer that computes with a packed copy of its weights: packs the present ones again."""


class PolicyCopy:
    """A second tree of the policy's modules whose linear layers are quantised."""

    def __init__(self, policy: torch.nn.Module, weights: str):
        self.layers: list[tuple[Any, QuantisedWeight]] = []
        self.model: Any = self._copy(policy, weights)
        if not self.layers:
            raise DasError(
                "das.drafter: `self` needs linear layers with unquantised weights, found none in "
                f"{type(policy).__name__}; the policy may be quantised already"
            )

    def _copy(self, module: torch.nn.Module, weights: str) -> torch.nn.Module:
        if isinstance(module, LinearBase):
            if not isinstance(module.quant_method, UnquantizedLinearMethod):
                return module
            weight = quantised(module.weight, weights)
            self.layers.append((module, weight))
            layer = copy.copy(module)
            layer.quant_method = _QuantisedMethod(weight)
            return layer
        children = {name: child and self._copy(child, weights) for name, child in module._modules.items()}
        if all(child is module._modules[name] for name, child in children.items()):
            return module
        twin: Any = copy.copy(module)  # shares parameters and buffers
        twin._modules = children
        if hasattr(twin, "do_not_compile"):
            twin.do_not_compile = True
        return twin

    def quantise(self) -> None:
        """Quantise the policy's present weights; tensors keep their addresses."""
        for layer, weight in self.layers:
            weight.quantise(layer.weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the quantised weights, in addition to the policy's."""
        return sum(t.nbytes for _, weight in self.layers for t in weight.tensors())


class _QuantisedMethod(UnquantizedLinearMethod):
    """The quantised product of a copied layer; bias and tensor-parallel collectives are the layer's own."""

    def __init__(self, weight: QuantisedWeight):
        super().__init__()
        self._weight = weight

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self._weight.linear(x)
        return y if bias is None else y.add_(bias)


class CopySource(ModelSource):
    """Runs the policy copy, with the noise that the policy's sampler will use where that is known."""

    counts_as = "self_counts"
    copy: PolicyCopy
    decode: DecodePasses

    def __init__(self, drafter: Any, vllm_config: VllmConfig, drafts: ModelDrafts):
        super().__init__(drafter, drafts)
        self._vllm_config = vllm_config
        self._policy: torch.nn.Module
        self._requantise_s = 0.0

    def load(self, policy: torch.nn.Module) -> None:
        """Make the copy (inside the memory pool of the weights, so that it sleeps and wakes with them)."""
        self._policy = policy
        self.copy = PolicyCopy(policy, self._drafter.config.self.weights)
        self.decode = DecodePasses(self._drafter.runner, self._vllm_config, self.copy.model)
        capture_with_policy.apply(self.decode, owner=self._drafter.runner)

    def refresh(self, length: int | None) -> None:
        """As `ModelSource.refresh`; quantise the new weights."""
        super().refresh(length)
        for module in self._policy.modules():
            getattr(module, REPACK, lambda: None)()
        begin = time.perf_counter()
        self.copy.quantise()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._requantise_s = time.perf_counter() - begin

    def stats(self) -> dict[str, Any]:
        """Return the figures of the copy."""
        return super().stats() | {
            "requantise_s": self._requantise_s,
            "drafter_bytes": self.copy.nbytes,
            "drafter_graphs": len(self.decode.sizes),
            "self_acceptance": self.drafts.acceptance.rate,
        }

    @torch.inference_mode()
    def _draft(self, rows: np.ndarray, counts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        """Draft for `rows`: each pass drafts one token for the rows whose draft is not complete."""
        runner, keyed = self._drafter.runner, self._drafter.config.keyed
        drafts: list[list[int]] = [[] for _ in rows]
        drawn_with: list[list[torch.Tensor]] = [[] for _ in rows]
        at = np.arange(len(rows))
        ids = tokens[rows, lengths[rows] - 1]
        req_ids = [runner.input_batch.req_ids[row] for row in rows]
        seeds = np.array([self._drafter.seed(req_id) for req_id in req_ids] if keyed else [], dtype=np.int64)
        for step in range(counts.max(initial=0)):
            left = counts[at] > step
            at, ids = at[left], ids[left]
            begin = time.perf_counter()
            positions = lengths[rows[at]].astype(np.int64) - 1 + step
            logits = self.copy.model.compute_logits(self.decode(rows[at], ids.astype(np.int64), positions))
            keys = Keys(beside(seeds[at], logits), beside(positions, logits)) if keyed else None
            which, sampling = beside(rows[at], logits), runner.input_batch.sampling_metadata
            drawn, probabilities = draw(logits, keys, sampling, which)
            ids = drawn.cpu().numpy()
            for n, (i, token) in enumerate(zip(at.tolist(), ids.tolist(), strict=True)):
                drafts[i].append(token)
                if probabilities is not None:
                    drawn_with[i].append(probabilities[n])
            self.drafts.timed_pass(len(at), time.perf_counter() - begin, float(positions.sum()))
            self.passes += 1
        self.drawn_with = {req: torch.stack(found) for req, found in zip(req_ids, drawn_with, strict=True) if found}
        return drafts
