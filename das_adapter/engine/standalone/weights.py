"""How an engine without a host notices that its weights are other ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from das_adapter.patching import patch


@patch("vllm.v1.worker.gpu_worker:Worker.load_model", since="0.24")
def follow_loaded_policy(stock: Any, loaded: Callable[[], None]) -> Any:
    """Without it nobody sees the weights that a trainer loads into the policy. Remove this patch when vLLM tells
    plug-ins that its weights were updated."""
    return _then(stock, loaded)


def _then(stock: Any, changed: Callable[[], None]) -> Any:
    @functools.wraps(stock)
    def update(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        changed()
        return result

    return update


@patch("vllm.model_executor.models.interfaces_base:VllmModel.load_weights", since="0.24", adds=True)
def see_loaded_weights(stock: Any, changed: Callable[[], None]) -> Any:
    """Without it an engine without a host does not know that its weights were updated: trainers' own worker extensions
    call nothing else. Remove this patch when vLLM tells plug-ins that its weights were updated."""
    return _then(stock, changed)


@patch("vllm.v1.worker.gpu_worker:Worker.reload_weights", since="0.24")
def see_reloaded_weights(stock: Any, changed: Callable[[], None]) -> Any:
    """As `see_loaded_weights`, for weights in the kernels' format, which the model's loader does not see. Remove this
    patch when vLLM tells plug-ins that its weights were updated."""
    return _then(stock, changed)


@patch("vllm.v1.worker.gpu_worker:Worker.finish_weight_update", since="0.24", adds=True)
def see_finished_update(stock: Any, changed: Callable[[], None]) -> Any:
    """As `see_reloaded_weights`, for vLLM's own weight transfer. Remove this patch when vLLM tells plug-ins that its
    weights were updated."""
    return stock if stock is None else _then(stock, changed)
