"""Policies with recurrent state, and drafts beside them.

A recurrent layer keeps one state for each request, where attention keeps a row for each
token. To go on after rejected draft tokens, vLLM keeps as many more states as a draft
has tokens (its slots), and the next step begins with that of the last accepted token.
That holds on the V2 model runner, for the layers whose metadata it gives the number of
accepted tokens.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from das_adapter import compat
from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.errors import ConfigError
from das_adapter.patching import patch

logger = logging.getLogger("vllm.das_adapter")

BUILDERS = (
    "GDNAttentionMetadataBuilder",
    "Mamba2AttentionMetadataBuilder",
    "ShortConvAttentionMetadataBuilder",
)
"""vLLM's builders of metadata for the recurrent layers beside which drafts can stand:
Gated DeltaNet, Mamba2, short convolutions.
"""
UNFIT_DEVICES = {"cpu"}
"""Devices on which vLLM's kernels go on from another token than the last accepted
one.
"""


def is_recurrent(model_config: Any) -> bool:
    """Return whether a policy (vLLM's `ModelConfig`) has recurrent layers."""
    return bool(model_config.is_hybrid or model_config.is_attention_free)


def shorter_drafts(config: DasConfig, vllm_config: Any) -> int | None:
    """Return how many tokens a draft may have at most with this policy, where that is
    less than the block asks for or leaves open; None: as many as there are.

    Raises:
        ConfigError: the block asks for more than any such policy allows.
    """
    if config.drafter == "none" or not is_recurrent(vllm_config.model_config):
        return None
    most = most_draft_tokens(config, "a policy with recurrent state")
    return most if most < config.num_draft_tokens else None


def most_draft_tokens(config: DasConfig, policy: str) -> int:
    """Return how many tokens a draft has at most with a policy with recurrent state,
    which an error calls `policy`. ConfigError: the block asks for more.
    """
    asked = config.max_draft_tokens
    if asked is None:
        return min(config.num_draft_tokens, tuning.RECURRENT_DRAFT)
    if asked > tuning.RECURRENT_DRAFT_MOST:
        raise ConfigError(
            f"das.max_draft_tokens: found {asked}, allowed with {policy}: at most"
            f" {tuning.RECURRENT_DRAFT_MOST}, because each request keeps a whole state"
            " for each of them"
        )
    return config.num_draft_tokens


def recurrent_layers(vllm_config: Any) -> list[Any]:
    """Return the recurrent layers of a policy that is loaded (vLLM's `MambaBase`)."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "mamba_type")]


def refuse_layers(config: DasConfig, layers: Iterable[Any]) -> None:
    """Refuse, with a ConfigError, recurrent layers that go on from rejected tokens."""
    wrong = Counter[str]()
    for layer in layers:
        builder = layer.get_attn_backend().get_builder_cls().__name__
        if builder not in BUILDERS:
            wrong[type(layer).__name__] += 1
    if wrong:
        found = ", ".join(f"{count} of {name}" for name, count in wrong.items())
        raise ConfigError(
            f"das.drafter={config.drafter!r}: found recurrent layers ({found}) that"
            " vLLM does not tell which draft tokens were accepted: other tokens would"
            " be written; allowed: das.drafter='none'"
        )


def state_bytes(layers: Iterable[Any]) -> int:
    """Return the bytes of one slot of a request on this rank: a state of each layer."""
    total = 0
    for layer in layers:
        shapes_and_types = zip(
            layer.get_state_shape(), layer.get_state_dtype(), strict=True
        )
        for shape, dtype in shapes_and_types:
            total += math.prod(shape) * dtype.itemsize
    return total


def tell_memory(vllm_config: Any, num_bytes: int) -> None:
    """Say in the log what the slots for drafts take; `num_bytes`: of one slot."""
    num_drafted = vllm_config.num_speculative_tokens
    requests = vllm_config.scheduler_config.max_num_seqs
    slot_mib = num_bytes / 2**20
    logger.info(
        "das: recurrent state: %.1f MiB a request on each rank, of which %.1f MiB are"
        " for max_draft_tokens=%d; %.1f GiB where max_num_seqs=%d requests run",
        (1 + num_drafted) * slot_mib,
        num_drafted * slot_mib,
        num_drafted,
        requests * (1 + num_drafted) * slot_mib / 1024,
        requests,
    )


def tell_room(vllm_config: Any, kv_cache_config: Any) -> None:
    """Say in the log how many requests' states the KV cache holds (vLLM's
    `KVCacheConfig`), and warn where fewer requests run at once because of the slots for
    drafts.
    """
    state_blocks = 0
    plain_blocks = 0
    for group in kv_cache_config.kv_cache_groups:
        num_slots = getattr(group.kv_cache_spec, "num_speculative_blocks", None)
        if num_slots is not None:
            state_blocks += 1 + num_slots
            plain_blocks += 1
    if state_blocks == plain_blocks:
        return
    room = kv_cache_config.num_blocks // state_blocks
    plain_room = kv_cache_config.num_blocks // plain_blocks
    requests = vllm_config.scheduler_config.max_num_seqs
    if room >= min(requests, plain_room):
        logger.info(
            "das: the KV cache has room for the recurrent states of %d requests,"
            " without drafts of %d",
            room,
            plain_room,
        )
        return
    logger.warning(
        "das: the KV cache has room for the recurrent states of %d requests, without"
        " drafts of %d, and max_num_seqs is %d: where that many are sent at once, some"
        " wait because of the drafts; take a smaller das.max_draft_tokens (found %d),"
        " or das.drafter='none' (das-adapter estimate says what takes least time)",
        room,
        plain_room,
        requests,
        vllm_config.num_speculative_tokens,
    )


@patch(
    "vllm.v1.attention.backends.mamba_attn:"
    "BaseMambaAttentionMetadataBuilder.build_for_cudagraph_capture",
    since="0.29",
    needs="common_attn_metadata",
)
def capture_any_length(stock: Any) -> Any:
    """Without it an engine with Mamba2 or short convolutions does not start on a GPU
    where steps have drafts of several lengths: vLLM asserts that the steps whose CUDA
    graphs it captures have the longest ones. Remove this patch when vLLM captures
    graphs of several draft lengths for them.
    """

    def build_for_cudagraph_capture(self: Any, common_attn_metadata: Any) -> Any:
        longest = 1 + self.num_spec_tokens
        if common_attn_metadata.max_query_len < longest:
            common_attn_metadata = dataclasses.replace(
                common_attn_metadata, max_query_len=longest
            )
        return stock(self, common_attn_metadata)

    return build_for_cudagraph_capture


@patch(
    "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
    since="0.29",
    needs="common_attn_metadata, num_decode_draft_tokens_cpu",
)
def begin_with_accepted_state(stock: Any) -> Any:
    """Without it a request with Gated DeltaNet that has no draft in a step goes on from
    before its last accepted draft tokens: before 0.32 vLLM computes it as without
    speculation. Remove this patch when 0.32 is the oldest vLLM with a V2 runner.
    """
    installed = compat.version("vllm")
    if installed is not None and compat.numbers(installed) >= (0, 32):
        return stock

    def build(
        self: Any,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Any = None,
        **kwargs: Any,
    ) -> Any:
        drafted = num_decode_draft_tokens_cpu
        if drafted is not None:
            # vLLM reads the signs, and whether all are 0
            tokens = common_attn_metadata.query_start_loc_cpu.diff()
            decodes = (tokens > 0) & (tokens <= 1 + self.num_spec)
            prefills = common_attn_metadata.is_prefilling
            if prefills is not None:  # else graphs are captured
                decodes &= ~prefills[: len(tokens)]
            drafted = drafted.masked_fill(decodes & (drafted <= 0), 1)
        return stock(
            self,
            common_prefix_len,
            common_attn_metadata,
            num_accepted_tokens,
            drafted,
            **kwargs,
        )

    return build
