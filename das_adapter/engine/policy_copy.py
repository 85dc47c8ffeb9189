"""The quantised copy of the policy that drafts on the policy's own KV cache
(EfficientRollout, arXiv 2606.18967, section 3).

The copy shares everything with the policy but its linear layers: embeddings, norms,
head and attention modules are the same objects, so a draft token's keys and values land
in the policy's cache, in slots that the verifying forward pass overwrites. The copy
reads no prompt, has no cache of its own, and can start or stop drafting at any step.
"""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from das_adapter.engine.quantised import QuantisedWeight, quantised
from das_adapter.errors import DasError
from das_adapter.protocol.metrics import EngineStats

REPACK = "_das_repack"
"""Attribute of a linear layer that computes with a packed copy of its weights: packs
the present ones again.
"""


class PolicyCopy:
    """A second tree of the policy's modules whose linear layers are quantised."""

    def __init__(self, policy: torch.nn.Module, weights: str):
        self.weights = weights
        self.layers: list[tuple[Any, QuantisedWeight]] = []
        self.requantise_s = 0.0
        """Seconds that `quantise` took last."""
        self._policy = policy
        self.model: Any = self._copy(policy, weights)
        if not self.layers:
            raise DasError(
                "das.drafter: `self` needs linear layers with unquantised weights,"
                f" found none in {type(policy).__name__}; the policy may be quantised"
                " already"
            )

    def _copy(self, module: torch.nn.Module, weights: str) -> torch.nn.Module:
        if isinstance(module, LinearBase):
            if not isinstance(module.quant_method, UnquantizedLinearMethod):
                return module
            weight = quantised(module.weight, weights)
            self.layers.append((module, weight))
            layer = copy.copy(module)
            layer.quant_method = copy.copy(module.quant_method)
            layer.quant_method.apply = functools.partial(_multiply, weight)
            return layer
        children = {
            name: child and self._copy(child, weights)
            for name, child in module._modules.items()
        }
        if all(child is module._modules[name] for name, child in children.items()):
            return module
        twin: Any = copy.copy(module)  # shares parameters and buffers
        twin._modules = children
        if hasattr(twin, "do_not_compile"):
            twin.do_not_compile = True
        return twin

    def quantise(self) -> None:
        """Quantise the policy's present weights; tensors keep their addresses."""
        for module in self._policy.modules():
            getattr(module, REPACK, lambda: None)()
        begin = time.perf_counter()
        for layer, weight in self.layers:
            weight.quantise(layer.weight)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.requantise_s = time.perf_counter() - begin

    def stats(self) -> EngineStats:
        """Return its figures: the bytes are in addition to the policy's."""
        nbytes = sum(t.nbytes for _, weight in self.layers for t in weight.kept)
        return EngineStats(requantise_s=self.requantise_s, drafter_bytes=nbytes)


def _multiply(
    weight: QuantisedWeight, _: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the product of a copied layer; bias and tensor-parallel collectives are
    the layer's own.
    """
    y = weight.linear(x)
    return y if bias is None else y.add_(bias)
