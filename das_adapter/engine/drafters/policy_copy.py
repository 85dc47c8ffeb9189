"""The self-drafter: the policy with rounded linear layers drafts, on the policy's own KV cache (EfficientRollout, arXiv
2606.18967, section 3).

The copy shares everything with the policy but its linear layers: embeddings, norms, head and attention modules are the
same objects, so a draft token's keys and values land in the policy's cache, in slots that the verifying forward pass
overwrites. Nothing has to be read twice, no second cache is held, and drafting can start or stop at any step.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from das_adapter.core.noise import row_keys
from das_adapter.core.sources import Acceptance, Line, Probe, choose
from das_adapter.engine import cpu_patches as cpu
from das_adapter.engine.drafters.history import Proposer
from das_adapter.engine.drafters.quantised import QuantisedWeight, quantised
from das_adapter.engine.sampling.draft_sample import draw
from das_adapter.errors import DasError, UnsupportedHost

_FIELDS = {f.name for f in dataclasses.fields(CommonAttentionMetadata)}


class PolicyCopy:
    """A second tree of the policy's modules whose linear layers are rounded."""

    def __init__(self, policy: torch.nn.Module, weights: str):
        self.layers: list[tuple[torch.nn.Module, QuantisedWeight]] = []
        self.model = self._copy(policy, weights)
        if not self.layers:
            raise DasError("das.drafter='self': found no linear layer with unquantised weights in "
                           f"{type(policy).__name__}; the policy may be quantised already")  # fmt: skip

    def _copy(self, module: torch.nn.Module, weights: str) -> torch.nn.Module:
        if isinstance(module, LinearBase):
            if not isinstance(module.quant_method, UnquantizedLinearMethod):
                return module
            rounded = quantised(module.weight, weights)
            self.layers.append((module, rounded))
            twin = copy.copy(module)
            twin.quant_method = _Rounded(rounded)
            return twin
        children = {name: child and self._copy(child, weights) for name, child in module._modules.items()}
        if all(child is module._modules[name] for name, child in children.items()):
            return module
        twin = copy.copy(module)  # shares parameters and buffers
        twin._modules = children
        if hasattr(twin, "do_not_compile"):
            twin.do_not_compile = True
        return twin

    def renew(self) -> None:
        """Round the policy's present weights; tensors stay where they are."""
        for layer, rounded in self.layers:
            rounded.renew(layer.weight)

    @property
    def nbytes(self) -> int:
        """Memory beside the policy's."""
        return sum(t.nbytes for _, rounded in self.layers for t in rounded.tensors())


class _Rounded(UnquantizedLinearMethod):
    """What a copied layer computes with; bias and tensor-parallel collectives are the layer's own."""

    def __init__(self, rounded: QuantisedWeight):
        super().__init__()
        self._rounded = rounded

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self._rounded.linear(x)
        return y if bias is None else y.add_(bias)


class SelfProposer(Proposer):
    """Drafts with a rounded copy of the policy, with the noise that the policy's sampler will use."""

    NAME = "self"

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self.drafter = SelfDrafter(vllm_config, self.config.self.weights, self.config.keyed)
        self.clock = StepClock(self)

    def load_model(self, policy: Any) -> None:
        self.drafter.load(policy)

    def refresh(self, version: int, draft_length: int | None = None, **news: Any) -> dict[str, Any]:
        return super().refresh(version, **news) | self.drafter.refresh(draft_length)

    def stats(self) -> dict[str, Any]:
        return super().stats() | self.drafter.stats()

    def _propose(self, sampled: list[list[int]], lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        self.clock.begin(sampled)
        nothing = np.zeros(len(sampled))
        drafts = self.drafter.propose(self, sampled, lengths, tokens, nothing, nothing.astype(np.int64))
        self.clock.end(drafts)
        return drafts


class KeyedSelfProposer(SelfProposer):
    """The same drafts, verified with keyed noise: its name tells vLLM's front end that any sampling parameter goes."""


class SelfDrafter:
    """Runs the copy for some rows of the runner's batch, and learns what that costs and brings."""

    def __init__(self, vllm_config: VllmConfig, weights: str, keyed: bool):
        self._config, self._weights, self._keyed = vllm_config, weights, keyed
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise UnsupportedHost("das.drafter='self': found pipeline_parallel_size > 1, allowed: 1")
        self.copy: PolicyCopy
        self._policy: torch.nn.Module
        self.acceptance = Acceptance()
        self.policy_seconds, self.copy_seconds = Line(1.0), Line(0.4)
        self.requantise_seconds = 0.0
        self.length: int | None = None
        """Of every draft, where replicas have agreed on one."""
        self.counts = 0, 0
        """Tokens drafted and accepted in training rollouts since the host last asked."""
        self.drafted: dict[str, int] = {}
        """Tokens of each request's present draft that are the copy's."""
        self._probe = Probe()

    def load(self, policy: torch.nn.Module) -> None:
        """Make the copy (inside the memory pool of the weights, so that it sleeps and wakes with them)."""
        self._policy = policy
        self.copy = PolicyCopy(policy, self._weights)

    def refresh(self, length: int | None = None) -> dict[str, Any]:
        """A weight sync: round the new weights; from now on drafts have this length (None: any)."""
        cpu.repack(self._policy)
        begin = time.perf_counter()
        self.copy.renew()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.requantise_seconds = time.perf_counter() - begin
        self.acceptance.forget()
        self.drafted, self.length = {}, length
        return {"requantise_s": self.requantise_seconds}

    def stats(self) -> dict[str, Any]:
        """Figures for the host."""
        counts, self.counts = self.counts, (0, 0)
        return {"requantise_s": self.requantise_seconds, "drafter_bytes": self.copy.nbytes,
                "self_acceptance": self.acceptance.rate, "self_counts": counts}  # fmt: skip

    def propose(
        self,
        proposer: Proposer,
        sampled: list[list[int]],
        lengths: np.ndarray,
        tokens: np.ndarray,
        expected: np.ndarray,
        drafted: np.ndarray,
        policy: Callable[[float], float] | None = None,
    ) -> list[list[int]]:
        """Draft where that makes the batch faster.

        Args:
            proposer: whose runner, seeds and limits count.
            sampled, lengths, tokens: as in `Proposer.propose`.
            expected: float64 [batch], tokens that would be accepted of another source's draft.
            drafted: int64 [batch], tokens of that draft.
            policy: seconds of a step of the policy by its tokens, where it is known better than here.

        Returns:
            Per request the copy's draft, empty where the other source's stands.
        """
        runner = proposer.runner
        req_ids = runner.input_batch.req_ids[: len(sampled)]
        room = np.zeros(len(sampled), dtype=np.int64)
        for row, (req_id, got) in enumerate(zip(req_ids, sampled, strict=True)):
            if (count := self.drafted.pop(req_id, 0)) and got:
                accepted = min(count, len(got) - 1)
                self.acceptance.observe(count, accepted)
                if not proposer.validates(req_id):
                    self.counts = self.counts[0] + count, self.counts[1] + accepted
            if got:  # the next step writes the draft and one token more
                room[row] = max(0, proposer.end(runner.requests[req_id]) - int(lengths[row]) - 1)
        if len(self.drafted) > 4 * len(sampled):
            self.drafted = {}
        most = self.length or proposer.config.self.max_tokens
        choices = [most] if self.length else list(range(1, most + 1))
        policy, drafting = policy or self.policy_seconds, self.copy_seconds
        if not drafting.seen:
            drafting = Line(0.4 * policy(len(sampled)))
        toggle, full = proposer.config.toggle, np.minimum(room, most)
        if toggle.mode == "threshold" and len(sampled) > toggle.threshold:
            counts = np.zeros_like(room)
        elif toggle.mode == "off":
            counts = np.where(self.acceptance.expected(full) > expected, full, 0)
        else:
            pace = proposer.clock.pace * len(sampled)
            counts = choose(expected, drafted, room, self.acceptance, policy, drafting, choices, pace)
            if self._probe.due(len(sampled), bool(counts.any())):
                one = np.minimum(room, choices[0])
                counts = np.where(self.acceptance.expected(one) > expected, one, 0)
        drafts = self.draft(proposer, self._agreed(counts), lengths, tokens)
        self.drafted.update({req_ids[row]: len(draft) for row, draft in enumerate(drafts) if draft})
        return drafts

    def _agreed(self, counts: np.ndarray) -> np.ndarray:
        """Tensor-parallel ranks run the copy together: each drafts what the first one, by its clock, has chosen."""
        if self._config.parallel_config.tensor_parallel_size == 1:
            return counts
        from vllm.distributed import get_tp_group

        agreed: np.ndarray = get_tp_group().broadcast_object(counts, src=0)
        return agreed

    @torch.inference_mode()
    def draft(self, proposer: Proposer, counts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        """Draft `counts` [batch] tokens for each row of the runner's batch (`lengths` tokens of `tokens` are known)."""
        drafts: list[list[int]] = [[] for _ in counts]
        runner = proposer.runner
        rows = np.flatnonzero(counts)
        ids = tokens[rows, lengths[rows] - 1]
        seeds = np.fromiter((proposer.seed(runner.input_batch.req_ids[row]) for row in rows), np.uint64, len(rows))
        for step in range(counts.max(initial=0)):
            left = counts[rows] > step
            rows, ids, seeds = rows[left], ids[left], seeds[left]
            begin = time.perf_counter()
            positions = lengths[rows].astype(np.int64) - 1 + step
            logits = self._forward(runner, rows, ids, positions)
            if self._keyed:
                keys = torch.from_numpy(row_keys(seeds, positions + 1).view(np.int64)).to(logits.device)
                which = torch.from_numpy(rows).to(logits.device)
                ids = draw(logits, keys, runner.input_batch.sampling_metadata, which).cpu().numpy()
            else:  # vLLM's own noise accepts a token as often as the policy would write it
                ids = logits.argmax(dim=-1).cpu().numpy()
            for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                drafts[row].append(token)
            self.copy_seconds.observe(len(rows), time.perf_counter() - begin)
        return drafts

    def _forward(self, runner: Any, rows: np.ndarray, ids: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Logits [rows, vocab] after one token a row, whose keys and values go where the policy's will."""
        if runner.uses_mrope:
            raise UnsupportedHost("das.drafter='self': found a policy with multimodal rotary positions, which it lacks")
        device, n = runner.device, len(rows)
        host = torch.from_numpy(positions)
        at, which = host.to(device), torch.from_numpy(rows).to(device)
        everything = {
            "query_start_loc": torch.arange(n + 1, dtype=torch.int32, device=device),
            "query_start_loc_cpu": torch.arange(n + 1, dtype=torch.int32),
            "seq_lens": (at + 1).int(), "_seq_lens_cpu": (host + 1).int(), "seq_lens_cpu_upper_bound": (host + 1).int(),
            "_num_computed_tokens_cpu": host.int(), "positions": at, "num_reqs": n, "num_actual_tokens": n,
            "max_query_len": 1, "max_seq_len": int(positions.max()) + 1, "causal": True,
            "is_prefilling": torch.zeros(n, dtype=torch.bool),
        }  # fmt: skip
        metadata, slots = {}, {}
        for gid, groups in enumerate(runner.attn_groups):
            if not isinstance(runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec, AttentionSpec):
                raise UnsupportedHost("das.drafter='self': found a policy with recurrent state, which drafts spoil")
            table = runner.input_batch.block_table[gid]
            blocks = table.get_device_tensor(runner.input_batch.num_reqs)[which]
            block = blocks.gather(1, (at // table.block_size)[:, None]).squeeze(1).long()
            slot = block * table.block_size + at % table.block_size
            common = {**everything, "block_table_tensor": blocks, "slot_mapping": slot}
            cam = CommonAttentionMetadata(**{k: v for k, v in common.items() if k in _FIELDS})
            for group in groups:
                built = group.get_metadata_builder().build(0, cam)
                metadata.update(dict.fromkeys(group.layer_names, built))
                slots.update(dict.fromkeys(group.layer_names, slot))
        with set_forward_context(metadata, self._config, num_tokens=n, cudagraph_runtime_mode=CUDAGraphMode.NONE,
                                 slot_mapping=slots, skip_compiled=True):  # fmt: skip
            hidden = self.copy.model(torch.from_numpy(ids).to(device), at)
        return self.copy.model.compute_logits(hidden).float()


class StepClock:
    """Times the policy's steps, from the end of one proposal to the begin of the next, and what all of it brings."""

    FADE = 0.95

    def __init__(self, proposer: Any):
        self.pace = 0.0
        """Tokens that a request gets per second, lately."""
        self._proposer = proposer
        self._brought = self._took = self._began = 0.0
        self._ended: float | None = None
        self._tokens = 0
        self._requests: list[str] = []

    def begin(self, sampled: list[list[int]]) -> None:
        """A proposal begins; `sampled` holds what the step that ends now brought."""
        requests = list(self._proposer.runner.input_batch.req_ids)
        now = time.perf_counter()
        if self._ended is not None and requests and requests == self._requests and all(sampled):  # no prompt was read
            self._proposer.drafter.policy_seconds.observe(self._tokens, now - self._ended)
            self._brought = self.FADE * self._brought + sum(map(len, sampled)) / len(sampled)
            self._took = self.FADE * self._took + now - self._began
            self.pace = self._brought / self._took
        self._requests, self._began = requests, now

    def end(self, drafts: list[list[int]]) -> None:
        """A proposal ends; the next step verifies these drafts."""
        self._tokens = len(drafts) + sum(map(len, drafts))
        self._ended = time.perf_counter()
