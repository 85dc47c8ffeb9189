"""What differs between the releases of vLLM that have a V2 model runner, 0.29 and on.

Each function says when it can go: what is left then stands behind its last condition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

DRAFT_MODELS = ("StandaloneARSpeculator", "PlainDraftModelSpeculator")
"""Speculators of draft models; the second is vLLM 0.31's: remove it when 0.32 is the
oldest vLLM with a V2 runner.
"""


def one_pass_speculator() -> tuple[Any, Callable[..., None]]:
    """Return the class of vLLM's EAGLE, which makes passes of one token a request, and
    what prepares the inputs of these. Remove this when 0.32 is the oldest vLLM with a
    V2 runner.
    """
    try:
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator
    except ImportError:  # so vLLM up to 0.31 calls it
        from vllm.v1.worker.gpu.spec_decode.autoregressive import speculator as before

        return before.AutoRegressiveSpeculator, before.prepare_decode_inputs
    return speculator.TargetDependentARSpeculator, speculator.prepare_decode_inputs


def has_graphs_of_all_passes(speculator: Any) -> bool:
    """Return whether vLLM, before 0.32, may hold all passes of a speculator in one CUDA
    graph, and says how many there are in an attribute. Remove this when 0.32 is the
    oldest vLLM with a V2 runner.
    """
    return hasattr(speculator, "use_fused_multi_step_decode")


def number_of_passes(speculator: Any) -> tuple[int, ...]:
    """Return the last arguments of `_generate_draft`: from vLLM 0.32 on the passes of
    which there is a graph. Remove this when 0.32 is the oldest vLLM with a V2 runner.
    """
    if has_graphs_of_all_passes(speculator):
        return ()
    return (speculator.num_speculative_steps,)


def is_watermarked(speculator: Any) -> bool:
    """Return whether a drafter draws its tokens by a watermark's key. Remove this when
    0.30 is the oldest vLLM with a V2 runner: 0.29 has no attribute.
    """
    return getattr(speculator, "draft_watermarker", None) is not None


def predict_acceptance(
    speculator: Any, logits: torch.Tensor, slots: Any, step: torch.Tensor
) -> None:
    """Have vLLM estimate whether drafted tokens are accepted, where the user has chosen
    its adaptive verification. Remove this when 0.30 is the oldest vLLM with a V2
    runner: 0.29 estimates nothing.
    """
    if hasattr(speculator, "_maybe_predict_acceptance"):
        speculator._maybe_predict_acceptance(logits, slots, step)


def draft_logits_of(speculator: Any) -> Callable[[Any, int], Any]:
    """Return what computes a drafter's logits from its hidden states and the number of
    the pass. Remove this when 0.32 is the oldest vLLM with a V2 runner: before it no
    pass has an output layer of its own.
    """

    def of_the_only_layer(hidden: Any, _: int) -> Any:
        return speculator.model.compute_logits(hidden)

    return getattr(speculator, "compute_draft_logits", of_the_only_layer)


def without_graphs(batch: Any) -> dict[str, bool]:
    """Return the field of an `InputBatch`, for which a drafter replays no CUDA graph of
    one length, with its value. Remove this when 0.31 is the oldest vLLM with a V2
    runner: before it a drafter asks whether a prompt is read.
    """
    if hasattr(batch, "decode_graph_eligible"):
        return {"decode_graph_eligible": False}
    return {"has_prefill": True}


def single_token_attention(
    speculator: Any, graph: Any, requests: int, longest: torch.Tensor, step: int
) -> Any:
    """Describe a pass of one token a request to vLLM's attention. Remove this when 0.30
    is the oldest vLLM with a V2 runner.
    """
    if not hasattr(speculator, "_build_draft_attn_metadata"):
        return speculator._build_uniform_attn_metadata(
            graph, requests, 1, longest, step
        )
    num_padded = graph.num_reqs or requests
    return speculator._build_draft_attn_metadata(
        requests, num_padded, graph.num_tokens, longest, step
    )


def first_pass_attention(
    speculator: Any, batch: Any, begins: np.ndarray, longest: torch.Tensor
) -> Any:
    """Describe the first pass of a drafter over a batch without CUDA graphs to vLLM's
    attention; `begins`: int32 [requests + 1], first token of each request. Remove this
    when 0.30 is the oldest vLLM with a V2 runner.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    requests = batch.num_reqs
    tokens = batch.num_tokens
    common: dict[str, Any] = {
        "num_reqs": requests,
        "query_start_loc_np": begins,
        "seq_lens_cpu_upper_bound": longest,
        "step": 0,
    }
    if not hasattr(speculator, "_build_attn_metadata"):
        return speculator._build_draft_attn_metadata(
            num_reqs_padded=requests, num_tokens_padded=tokens, **common
        )
    eager = BatchExecutionDescriptor(
        cg_mode=CUDAGraphMode.NONE, num_tokens=tokens, num_reqs=requests
    )
    return speculator._build_attn_metadata(batch_desc=eager, **common)
