"""Draft tokens from the policy copy on the V1 runner, pass by pass."""

from __future__ import annotations

import time

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from das_adapter.core.steps import Ints
from das_adapter.engine.policy_copy import PolicyCopy
from das_adapter.engine.v1.keyed_sample import Keys
from das_adapter.engine.v1.model_source import Drafts, ModelSource, queries
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
        config = self._drafter.config
        self.copy = PolicyCopy(policy, config.self.weights)

    @torch.inference_mode()
    def _draft(
        self,
        rows: Ints,
        counts: Ints,
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> Drafts:
        """Draft for `rows`: each pass drafts one token for the rows whose draft is not
        complete.
        """
        batch = self.runner.input_batch
        drafts: Drafts = [[] for _ in rows]
        drawn_with: list[list[torch.Tensor]] = [[] for _ in rows]
        num_rows = len(rows)
        going = np.arange(num_rows)
        last_tokens = lengths[rows] - 1
        ids = tokens[rows, last_tokens]
        req_ids = [batch.req_ids[row] for row in rows]
        seeds = self._seeds(req_ids)
        longest = counts.max(initial=0)
        for step in range(longest):
            goes_on = counts[going] > step
            going = going[goes_on]
            ids = ids[goes_on]
            begin = time.perf_counter()
            going_rows = rows[going]
            going_lengths = lengths[going_rows].astype(np.int64)
            last_positions = going_lengths - 1
            positions = last_positions + step
            input_ids = ids.astype(np.int64)
            hidden = self._pass(going_rows, input_ids, positions)
            logits = self.copy.model.compute_logits(hidden)
            keys = None
            if seeds is not None:
                going_seeds = beside(seeds[going], logits)
                device_positions = beside(positions, logits)
                keys = Keys(going_seeds, device_positions)
            device_rows = beside(going_rows, logits)
            sampling = of_rows(batch.sampling_metadata, device_rows)
            drawn, probabilities = draw(logits, keys, sampling)
            host_drawn = drawn.cpu()
            ids = host_drawn.numpy()
            for n, i in enumerate(going.tolist()):
                token = int(ids[n])
                drafts[i].append(token)
                if probabilities is not None:
                    drawn_with[i].append(probabilities[n])
            pass_s = time.perf_counter() - begin
            num_drafting = len(going)
            context_tokens = float(positions.sum())
            self.drafts.record_pass(num_drafting, pass_s, context_tokens)
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
            request = self.runner.requests[req_id]
            seeds.append(request.sampling_params.seed)
        return np.array(seeds, dtype=np.int64)

    def _pass(
        self,
        rows: Ints,
        ids: np.ndarray,
        positions: Ints,
    ) -> torch.Tensor:
        """Return hidden states [rows, width] of some rows of the batch after one more
        token of each; `rows`, and the tokens' `ids` and `positions`: int64 [rows].
        """
        runner = self.runner
        batch = runner.input_batch
        device = runner.device
        host_rows = torch.from_numpy(rows)
        device_rows = host_rows.to(device)
        metadata = {}
        slots = {}
        for gid, groups in enumerate(runner.attn_groups):
            table = batch.block_table[gid]
            batch_blocks = table.get_device_tensor(batch.num_reqs)
            blocks = batch_blocks[device_rows]
            ends = positions + 1
            attention = queries(
                blocks,
                table.block_size,
                positions,
                ends,
            )
            for group in groups:
                builder = group.get_metadata_builder()
                built = builder.build(0, attention)
                for name in group.layer_names:
                    metadata[name] = built
                    slots[name] = attention.slot_mapping
        host_ids = torch.from_numpy(ids)
        host_positions = torch.from_numpy(positions)
        device_ids = host_ids.to(device)
        device_positions = host_positions.to(device)
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=len(rows),
            slot_mapping=slots,
            skip_compiled=True,
        ):
            model = self.copy.model
            hidden: torch.Tensor = model(device_ids, device_positions)
        return hidden
