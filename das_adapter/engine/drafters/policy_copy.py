"""Draft tokens from a quantised copy of the policy, on the policy's own KV cache (EfficientRollout, arXiv 2606.18967,
section 3).

The copy shares everything with the policy but its linear layers: embeddings, norms, head and attention modules are the
same objects, so a draft token's keys and values land in the policy's cache, in slots that the verifying forward pass
overwrites. The copy reads no prompt, has no cache of its own, and can start or stop drafting at any step.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.v1.attention.backend import CommonAttentionMetadata

from das_adapter.core.policy_copy import CopyDrafts
from das_adapter.engine import cpu_patches
from das_adapter.engine.drafters.base import Drafter
from das_adapter.engine.drafters.quantised import QuantisedWeight, quantised
from das_adapter.engine.sampling.draft_sample import draw
from das_adapter.engine.sampling.keyed_sample import Keys
from das_adapter.errors import DasError

_FIELDS = {f.name for f in dataclasses.fields(CommonAttentionMetadata)}


class OutOfStep(DasError):
    """A rank failed where the others wait for it: the engine must stop, because it can't go on."""


class PolicyCopy:
    """A second tree of the policy's modules whose linear layers are quantised."""

    def __init__(self, policy: torch.nn.Module, weights: str):
        self.layers: list[tuple[Any, QuantisedWeight]] = []
        self.model: Any = self._copy(policy, weights)
        if not self.layers:
            raise DasError("das.drafter: `self` needs linear layers with unquantised weights, found none in "
                           f"{type(policy).__name__}; the policy may be quantised already")  # fmt: skip

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


class CopySource:
    """Runs the policy copy for some rows of the runner's batch, with the noise that the policy's sampler will use."""

    def __init__(self, drafter: Drafter, vllm_config: VllmConfig, drafts: CopyDrafts):
        """
        Args:
            drafter: its runner and seeds are used.
            vllm_config: of the engine.
            drafts: learns how long the copy's passes take.
        """
        self.drafts = drafts
        self.copy: PolicyCopy
        self._drafter, self._vllm_config = drafter, vllm_config
        self._policy: torch.nn.Module
        self._requantise_s = 0.0
        self._counts = 0, 0
        self._drafted: dict[str, int] = {}
        """Tokens of each request's present draft that are the copy's."""

    def load(self, policy: torch.nn.Module) -> None:
        """Make the copy (inside the memory pool of the weights, so that it sleeps and wakes with them)."""
        self._policy = policy
        self.copy = PolicyCopy(policy, self._drafter.config.self.weights)

    def refresh(self, length: int | None) -> float:
        """Quantise the new weights at a weight sync; return the seconds. `length`: of drafts from now on; None: any."""
        cpu_patches.repack(self._policy)
        begin = time.perf_counter()
        self.copy.quantise()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._requantise_s = time.perf_counter() - begin
        self._drafted, self.drafts.agreed = {}, length
        return self._requantise_s

    def stats(self) -> dict[str, Any]:
        """Return the figures of the copy."""
        counts, self._counts = self._counts, (0, 0)
        return {"requantise_s": self._requantise_s, "drafter_bytes": self.copy.nbytes,
                "self_acceptance": self.drafts.acceptance.rate, "self_counts": counts}  # fmt: skip

    def verified(self, req_ids: Sequence[str], got: np.ndarray) -> np.ndarray:
        """Return how many draft tokens of the copy each of these requests carried into the step, int64 [requests].

        Args:
            req_ids: [requests].
            got: tokens that each got, int64 [requests].
        """
        copied = np.array([self._drafted.pop(req_id, 0) for req_id in req_ids], dtype=np.int64)
        self._drafted = {}  # of requests that are gone
        training = [self._drafter.label(req_id).record for req_id in req_ids] if copied.any() else []
        counted = copied * training if training else copied
        drafted, accepted = self._counts
        self._counts = drafted + int(counted.sum()), accepted + int(np.minimum(counted, got - 1).sum())
        return copied

    def draft(self, counts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, drafts: list[list[int]]) -> None:
        """Draft `counts` [batch] tokens for each row of the batch, into `drafts`; `lengths` and `tokens` as in
        `Drafter.propose`.

        Every tensor-parallel rank must call it at every step, one that has failed too; the first rank's counts hold.

        Raises:
            OutOfStep: this rank failed in the passes, in which the other ranks wait for it.
        """
        counts = self._agreed(counts)
        rows = np.flatnonzero(counts)
        if not len(rows):
            return
        try:
            written = self._draft(rows, counts[rows], lengths, tokens)
        except Exception as error:
            if self._drafter.ranks == 1:
                raise
            raise OutOfStep("das: a rank failed while all ranks drafted with the policy copy") from error
        for row, ids in zip(rows.tolist(), written, strict=True):
            drafts[row] = ids
            self._drafted[self._drafter.runner.input_batch.req_ids[row]] = len(ids)

    def _agreed(self, counts: np.ndarray) -> np.ndarray:
        """Return the first rank's counts, as tensor-parallel ranks run the copy together; zeros if any rank has
        failed."""
        if self._drafter.ranks == 1:
            return counts
        from vllm.distributed import get_tp_group

        mine = torch.from_numpy(np.append(counts, int(self._drafter.counters.error is None)))
        everyones = [torch.empty_like(mine) for _ in range(self._drafter.ranks)]
        torch.distributed.all_gather(everyones, mine, group=get_tp_group().cpu_group)
        if not all(int(rank[-1]) for rank in everyones):
            return np.zeros_like(counts)
        agreed: np.ndarray = everyones[0][:-1].numpy()
        return agreed

    @torch.inference_mode()
    def _draft(self, rows: np.ndarray, counts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        """Draft for `rows`: each pass drafts one token for the rows whose draft is not complete."""
        runner, keyed = self._drafter.runner, self._drafter.config.keyed
        drafts: list[list[int]] = [[] for _ in rows]
        at = np.arange(len(rows))
        ids = tokens[rows, lengths[rows] - 1]
        seeds = np.fromiter((self._drafter.seed(runner.input_batch.req_ids[row]) for row in rows), np.int64, len(rows))
        for step in range(counts.max(initial=0)):
            left = counts[at] > step
            at, ids = at[left], ids[left]
            begin = time.perf_counter()
            positions = lengths[rows[at]].astype(np.int64) - 1 + step
            logits = self._forward(runner, rows[at], ids, positions)
            if keyed:
                keys = Keys(*(torch.from_numpy(x).to(logits.device) for x in (seeds[at], positions)))
                which = torch.from_numpy(rows[at]).to(logits.device)
                ids = draw(logits, keys, runner.input_batch.sampling_metadata, which).cpu().numpy()
            else:  # with vLLM's own noise the most likely token is accepted most often
                ids = logits.argmax(dim=-1).cpu().numpy()
            for i, token in zip(at.tolist(), ids.tolist(), strict=True):
                drafts[i].append(token)
            self.drafts.timed_pass(len(at), time.perf_counter() - begin)
        return drafts

    def _forward(self, runner: Any, rows: np.ndarray, ids: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Return logits [rows, vocab] after one token a row, whose keys and values go where the policy's will go."""
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
        with set_forward_context(metadata, self._vllm_config, num_tokens=n, cudagraph_runtime_mode=CUDAGraphMode.NONE,
                                 slot_mapping=slots, skip_compiled=True):  # fmt: skip
            hidden = self.copy.model(torch.from_numpy(ids).to(device), at)
        return self.copy.model.compute_logits(hidden)
