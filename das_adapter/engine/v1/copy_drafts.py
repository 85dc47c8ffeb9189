"""Draft tokens from the policy copy on the V1 runner, pass by pass."""

from __future__ import annotations

import time

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from das_adapter.engine.policy_copy import PolicyCopy
from das_adapter.engine.v1.keyed_sample import Keys
from das_adapter.engine.v1.model_source import ModelSource, queries
from das_adapter.engine.v1.verification import beside, draw, of_rows


class CopySource(ModelSource):
    """Runs the policy copy, with the noise that the policy's sampler will use where
    that is known.
    """

    copy: PolicyCopy

    def load(self, policy: torch.nn.Module) -> None:
        """Make the copy (inside the memory pool of the weights, so that it sleeps and
        wakes with them).
        """
        self.copy = PolicyCopy(policy, self._drafter.config.self.weights)

    @torch.inference_mode()
    def _draft(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> list[list[int]]:
        """Draft for `rows`: each pass drafts one token for the rows whose draft is not
        complete.
        """
        batch = self.runner.input_batch
        drafts: list[list[int]] = [[] for _ in rows]
        drawn_with: list[list[torch.Tensor]] = [[] for _ in rows]
        going = np.arange(len(rows))
        ids = tokens[rows, lengths[rows] - 1]
        req_ids = [batch.req_ids[row] for row in rows]
        seeds = self._seeds(req_ids)
        for step in range(counts.max(initial=0)):
            goes_on = counts[going] > step
            going = going[goes_on]
            ids = ids[goes_on]
            begin = time.perf_counter()
            going_rows = rows[going]
            positions = lengths[going_rows].astype(np.int64) - 1 + step
            hidden = self._pass(going_rows, ids.astype(np.int64), positions)
            logits = self.copy.model.compute_logits(hidden)
            keys = None
            if seeds is not None:
                keys = Keys(beside(seeds[going], logits), beside(positions, logits))
            sampling = of_rows(batch.sampling_metadata, beside(going_rows, logits))
            drawn, probabilities = draw(logits, keys, sampling)
            ids = drawn.cpu().numpy()
            for n, i in enumerate(going.tolist()):
                drafts[i].append(int(ids[n]))
                if probabilities is not None:
                    drawn_with[i].append(probabilities[n])
            pass_s = time.perf_counter() - begin
            self.drafts.record_pass(len(going), pass_s, float(positions.sum()))
            self.drafts.passes_made += 1
        self.drawn_with = {}
        for req_id, found in zip(req_ids, drawn_with, strict=True):
            if found:
                self.drawn_with[req_id] = torch.stack(found)
        return drafts

    def _seeds(self, req_ids: list[str]) -> np.ndarray | None:
        """Return the seeds of the policy's noise, int64 [requests]; None: it draws with
        vLLM's own noise.
        """
        if not self._drafter.config.keyed:
            return None
        seeds = []
        for req_id in req_ids:
            seeds.append(self.runner.requests[req_id].sampling_params.seed)
        return np.array(seeds, dtype=np.int64)

    def _pass(
        self,
        rows: np.ndarray,
        ids: np.ndarray,
        positions: np.ndarray,
    ) -> torch.Tensor:
        """Return hidden states [rows, width] of some rows of the batch after one more
        token of each; `rows`, and the tokens' `ids` and `positions`: int64 [rows].
        """
        runner = self.runner
        batch = runner.input_batch
        device = runner.device
        device_rows = torch.from_numpy(rows).to(device)
        metadata = {}
        slots = {}
        for gid, groups in enumerate(runner.attn_groups):
            table = batch.block_table[gid]
            blocks = table.get_device_tensor(batch.num_reqs)[device_rows]
            attention = queries(blocks, table.block_size, positions, positions + 1)
            for group in groups:
                built = group.get_metadata_builder().build(0, attention)
                for name in group.layer_names:
                    metadata[name] = built
                    slots[name] = attention.slot_mapping
        device_ids = torch.from_numpy(ids).to(device)
        device_positions = torch.from_numpy(positions).to(device)
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=len(rows),
            slot_mapping=slots,
            skip_compiled=True,
        ):
            hidden: torch.Tensor = self.copy.model(device_ids, device_positions)
        return hidden
