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
        """The policy's linear layers, each with its quantised copy."""
        self.requantise_s = 0.0
        """Time that `quantise` took last."""
        self._policy = policy
        self.model: Any = self._copy(policy, weights)
        if not self.layers:
            raise DasError(
                "das.drafter: `self` needs linear layers with unquantised weights,"
                f" found none in {type(policy).__name__}; the policy may be quantised"
                " already"
            )

    def _copy(self, module: torch.nn.Module, weights: str) -> torch.nn.Module:
        """Return a copy of a module whose linear layers are quantised; the module
        itself where it has none.
        """
        if isinstance(module, LinearBase):
            return self._copy_layer(module, weights)
        children = {}
        is_copied = False
        for name, child in module._modules.items():
            twin_child = child
            if child is not None:
                twin_child = self._copy(child, weights)
            children[name] = twin_child
            if twin_child is not child:
                is_copied = True
        if not is_copied:
            return module
        twin: Any = copy.copy(module)  # shares parameters and buffers
        twin._modules = children
        if hasattr(twin, "do_not_compile"):
            twin.do_not_compile = True
        return twin

    def _copy_layer(self, module: Any, weights: str) -> Any:
        """Return a linear layer that computes with a quantised copy of its weights; the
        layer itself where these are quantised already.
        """
        if not isinstance(module.quant_method, UnquantizedLinearMethod):
            return module
        weight = quantised(module.weight, weights)
        self.layers.append((module, weight))
        layer = copy.copy(module)
        layer.quant_method = copy.copy(module.quant_method)
        layer.quant_method.apply = functools.partial(_multiply, weight)
        return layer

    def quantise(self) -> None:
        """Quantise the policy's present weights; tensors keep their addresses."""
        for module in self._policy.modules():
            repack = getattr(module, REPACK, None)
            if repack is not None:
                repack()
        begin = time.perf_counter()
        for layer, weight in self.layers:
            weight.quantise(layer.weight)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.requantise_s = time.perf_counter() - begin

    def stats(self) -> EngineStats:
        """Return its figures: the bytes are in addition to the policy's."""
        num_bytes = 0
        for _, weight in self.layers:
            for tensor in weight.kept:
                num_bytes += tensor.nbytes
        return EngineStats(requantise_s=self.requantise_s, drafter_bytes=num_bytes)


def _multiply(
    weight: QuantisedWeight,
    _: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the product of a copied layer; bias and tensor-parallel collectives are
    the layer's own.
    """
    y = weight.linear(x)
    if bias is not None:
        y.add_(bias)
    return y
