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
        runner = self.runner
        keyed = self._drafter.config.keyed
        drafts: list[list[int]] = [[] for _ in rows]
        drawn_with: list[list[torch.Tensor]] = [[] for _ in rows]
        at = np.arange(len(rows))
        ids = tokens[rows, lengths[rows] - 1]
        req_ids = [runner.input_batch.req_ids[row] for row in rows]
        drawing = (
            [runner.requests[req_id].sampling_params for req_id in req_ids]
            if keyed
            else []
        )
        seeds = np.array([params.seed for params in drawing], dtype=np.int64)
        for step in range(counts.max(initial=0)):
            left = counts[at] > step
            at = at[left]
            ids = ids[left]
            begin = time.perf_counter()
            positions = lengths[rows[at]].astype(np.int64) - 1 + step
            logits = self.copy.model.compute_logits(
                self._pass(rows[at], ids.astype(np.int64), positions)
            )
            keys = (
                Keys(beside(seeds[at], logits), beside(positions, logits))
                if keyed
                else None
            )
            sampling = of_rows(
                runner.input_batch.sampling_metadata, beside(rows[at], logits)
            )
            drawn, probabilities = draw(logits, keys, sampling)
            ids = drawn.cpu().numpy()
            for n, (i, token) in enumerate(zip(at.tolist(), ids.tolist(), strict=True)):
                drafts[i].append(token)
                if probabilities is not None:
                    drawn_with[i].append(probabilities[n])
            self.drafts.record_pass(
                len(at), time.perf_counter() - begin, float(positions.sum())
            )
            self.drafts.passes_made += 1
        self.drawn_with = {
            req: torch.stack(found)
            for req, found in zip(req_ids, drawn_with, strict=True)
            if found
        }
        return drafts

    def _pass(
        self, rows: np.ndarray, ids: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """Return hidden states [rows, width] of some rows of the batch after one more
        token of each; `rows`, and the tokens' `ids` and `positions`: int64 [rows].
        """
        runner = self.runner
        batch = runner.input_batch
        device = runner.device
        which = torch.from_numpy(rows).to(device)
        metadata = {}
        slots = {}
        for gid, groups in enumerate(runner.attn_groups):
            table = batch.block_table[gid]
            blocks = table.get_device_tensor(batch.num_reqs)[which]
            asked = queries(blocks, table.block_size, positions, positions + 1)
            for group in groups:
                metadata.update(
                    dict.fromkeys(
                        group.layer_names, group.get_metadata_builder().build(0, asked)
                    )
                )
                slots.update(dict.fromkeys(group.layer_names, asked.slot_mapping))
        config = runner.vllm_config
        at = torch.from_numpy(positions).to(device)
        with set_forward_context(
            metadata,
            config,
            num_tokens=len(rows),
            slot_mapping=slots,
            skip_compiled=True,
        ):
            hidden: torch.Tensor = self.copy.model(torch.from_numpy(ids).to(device), at)
        return hidden
