"""The policy copy as a speculator of vLLM's V2 model runner: its drafts are made on the
device, on the policy's own KV cache, and the host goes on scheduling.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

from das_adapter.engine.policy_copy import PolicyCopy
from das_adapter.engine.v2 import versions

OnePass: Any
OnePass, prepare_decode_inputs = versions.one_pass_speculator()


class CopySpeculator(OnePass):
    """Drafts with the policy copy, in the passes of one token a request that vLLM's
    EAGLE makes, and their CUDA graphs.

    EAGLE reads every step of the policy in a pass of its own. The copy does not: what
    the policy has read stands in the cache already. Its first pass reads the token that
    the policy has just sampled, the next one what that pass has drafted. The keys and
    values that a pass writes stand in slots that the verifying pass overwrites
    (`reserve_draft_slots`).
    """

    follows = False
    """Whether it must read what the policy writes, as EAGLE does."""
    copy: PolicyCopy

    def __init__(self, vllm_config: Any, device: torch.device, weights: str) -> None:
        """`vllm_config`, `device`: as vLLM's `init_speculator` gets them; `weights`:
        format of the copy.
        """
        super().__init__(vllm_config, device)
        self._weights = weights
        # EAGLE reads those of every token of a step; the copy does not
        size = self.max_num_reqs, self.hidden_size
        self.hidden_states = torch.zeros(size, dtype=self.dtype, device=device)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Make the copy, inside the memory pool of the weights, so that it sleeps and
        wakes with them.
        """
        super().load_model(target_model)
        # no draft token is an image's
        self.supports_mm_inputs = False
        self.inputs_embeds = None

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Return the copy's modules."""
        self.copy = PolicyCopy(target_model, self._weights)
        return self.copy.model

    def set_attn(self, model_state: Any, kv_cache_config: Any, *others: Any) -> None:
        """Attend with the policy's layers, of which vLLM takes none for a drafter's."""
        groups = kv_cache_config.kv_cache_groups
        self.draft_attn_layer_names = {
            name for group in groups for name in group.layer_names
        }
        super().set_attn(model_state, kv_cache_config, *others)
        self.draft_attn_layer_names = set()

    def _configure_decode_metadata_update(self) -> None:
        """Keep to one pass in a graph: those of a whole draft would be captured for
        every length.
        """

    # so vLLM up to 0.31 calls it
    _configure_fused_multi_step_decode = _configure_decode_metadata_update

    def capture(self) -> None:
        """Capture a pass for the batch sizes that vLLM has graphs of."""
        self.idx_mapping.zero_()
        self.decode_cudagraph_manager.capture(
            self._generate_draft,
            self.model_state,
            self.input_buffers,
            self.block_tables,
            self.attn_groups,
            self.kv_cache_config,
            progress_bar_desc="Capturing CUDA graphs of the policy copy",
        )

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        *_: Any,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """Draft so many tokens for every request of the batch, int64 [requests, most].
        See `BaseSpeculator.propose`.
        """
        requests = input_batch.num_reqs
        buffers = self.input_buffers
        passes = num_speculative_tokens
        if passes is None:
            # vLLM up to 0.31 says it in an attribute
            passes = self.num_speculative_steps
            if dummy_run:  # one pass shows what memory it takes
                passes = 1
        # a request that reads its prompt has no text to go on from
        idle = (num_sampled[:requests] == 0) | dummy_run
        self._copy_request_inputs(
            requests, input_batch.idx_mapping.masked_fill(idle, -1), temperature, seeds
        )
        # position of the token that the policy read last
        read = input_batch.seq_lens[:requests] - num_rejected - 1
        buffers.positions[:requests] = read
        self.sample_src_positions[:requests] = read
        sampled = last_sampled[input_batch.idx_mapping]
        prepare_decode_inputs(
            sampled,
            input_batch.seq_lens,
            num_rejected,
            buffers,
            self.sample_src_positions,
            self.max_model_len,
            self.max_num_reqs,
        )
        longest = input_batch.seq_lens_cpu_upper_bound[:requests]
        self.draft_max_seq_len = min(int(longest.max()) + passes, self.max_model_len)
        for step in range(passes):
            self.current_draft_step.fill_(step)
            if skip_attn_for_dummy_run:  # memory is measured before there is a cache
                self._eagerly(requests, requests, None, None, CUDAGraphMode.NONE)
            else:
                self._pass(input_batch.idx_mapping, idle, step, longest)
        return self.draft_tokens[:requests]

    def _pass(
        self, rows: torch.Tensor, idle: torch.Tensor, step: int, longest: torch.Tensor
    ) -> None:
        """Draft the token `step` of each request; `rows`: of the block tables, int32
        [requests]; `idle`: for which nothing is written, bool [requests]; `longest`: of
        their texts before the first token, int32 [requests].
        """
        requests = len(rows)
        buffers = self.input_buffers
        graph = self.decode_cudagraph_manager.dispatch(requests, requests, 1, 0)
        ranges = buffers.query_start_loc[: requests + 1]
        positions = buffers.positions[:requests]
        slots = self.block_tables.compute_slot_mappings(
            rows, ranges, positions, graph.num_tokens
        )
        slots[:, :requests].masked_fill_(idle, -1)
        attention = versions.single_token_attention(
            self, graph, requests, longest, step + 1
        )
        if graph.cg_mode == CUDAGraphMode.FULL:
            self.decode_cudagraph_manager.run_fullgraph(graph)
            return
        by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
        self._eagerly(requests, graph.num_tokens, attention, by_layer, graph.cg_mode)

    def _eagerly(
        self,
        requests: int,
        tokens: int,
        attention: Any,
        slots: Any,
        mode: CUDAGraphMode,
    ) -> None:
        """Make a pass of which there is no full CUDA graph."""
        passes = versions.number_of_passes(self)
        self._generate_draft(requests, tokens, attention, slots, None, mode, *passes)

    def _run_model(
        self,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the copy's hidden states, [tokens, size]. See
        `TargetDependentARSpeculator._run_model`.
        """
        ids = self.input_buffers.input_ids[:num_tokens]
        positions = self.input_buffers.positions[:num_tokens]
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_tokens,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
            slot_mapping=slot_mappings,
            skip_compiled=True,
        ):
            hidden: torch.Tensor = self.model(ids, positions)
        return hidden, hidden
