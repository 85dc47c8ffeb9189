"""Draft tokens from vLLM's own neural drafters (EAGLE, MTP, a draft model), in the steps in which they pay.

Such a drafter has a KV cache of its own, which has to contain what the policy has written; EAGLE and MTP read the
policy's hidden states beside the text. In a step without drafts it does not run: it reads what it has missed in one
pass when it is wanted again, or, for its hidden states must be kept until then, when `KEPT_BYTES` of them are waiting.
So its drafts are those of a drafter that runs in every step. Prompts it reads with the policy.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.engine.v1.attention import queries
from das_adapter.engine.v1.model_source import Drafter, ModelSource
from das_adapter.engine.v1.neural import KeyedDrafts
from das_adapter.errors import ConfigError
from das_adapter.patching import patch

KEPT_BYTES = 2**27
"""Hidden states that are kept at most for a drafter that does not run: as long as it is not wanted, reading them would
only take time. Decode steps leave more of a GPU free, where vLLM has reserved the activations of whole prompts."""
_PROPOSERS = ("EagleProposer", "DraftModelProposer")


class _Kept(NamedTuple):
    """Hidden states of the policy's tokens in one step."""

    rows: dict[str, int]
    """Requests of the step; steps of the same requests share it."""
    begins: np.ndarray
    ends: np.ndarray
    """Positions of each request's tokens, int64 [requests]."""
    places: np.ndarray
    """Where each request's tokens begin in `hidden`."""
    hidden: torch.Tensor
    """[tokens, size]."""


class NeuralSource(ModelSource):
    """Runs the drafter that vLLM has loaded, for any rows of the batch and draft lengths."""

    follows, counts_as = True, "neural_counts"

    def __init__(self, drafter: Drafter, drafts: ModelDrafts):
        super().__init__(drafter, drafts)
        self.held: dict[str, Any] | None = None
        """What vLLM would have drafted with in the present step: arguments of `propose_draft_token_ids`."""
        self.noise: KeyedDrafts | None = None
        self._limit = 0
        self._whole = True
        """Whether every block of the prefix cache contains what the drafter would have written there."""
        self.forget()

    def load(self, policy: torch.nn.Module) -> None:
        """Take over vLLM's drafter.

        Raises:
            ConfigError: it is none that can miss a step.
        """
        runner, kind = self._drafter.runner, type(self._drafter.runner.drafter).__name__
        if kind not in _PROPOSERS:
            raise ConfigError(
                f"das.drafter={self._drafter.config.drafter!r}: found vLLM's {kind}, which has to draft "
                "in every step: das.budget=unlimited with das.speculate=always"
            )
        self._limit = runner.effective_drafter_max_model_len
        # vLLM would give the whole batch junk drafts when one request comes near it.
        runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens + 1

    def refresh(self, length: int | None) -> float:
        self._whole = True  # hosts empty the prefix cache at a weight sync
        return super().refresh(length)

    def forget(self) -> None:
        self._req_ids: list[str] = []
        self._rows: dict[str, int] = {}
        self._read = self._ends = np.zeros(0, dtype=np.int64)
        """Tokens of each request of the batch that the drafter has read (-1: not known), and the policy."""
        self._kept: list[_Kept] = []
        self._waiting = 0
        """Bytes in `_kept`."""
        self._whole = False

    def _draft(self, rows: np.ndarray, counts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> list[list[int]]:
        held, self.held = self.held, None
        if held is None:
            self.forget()
            return [[] for _ in rows]
        runner, hidden = self._drafter.runner, self._proposer.pass_hidden_states_to_model
        self._see_batch(runner.input_batch.req_ids)
        batch = len(self._req_ids)
        begins = runner.input_batch.num_computed_tokens_cpu[:batch].astype(np.int64)
        scheduled = np.diff(runner.query_start_loc.np[: batch + 1]).astype(np.int64)
        ends = np.minimum(lengths[:batch].astype(np.int64) - 1, begins + scheduled)
        unknown = (self._read < 0) | (begins < self._read)
        self._read[unknown] = begins[unknown] if hidden or self._whole else 0
        fits = ends + self.drafts.most < self._limit
        if hidden:
            self._keep(held, begins, ends, scheduled)
            reads = fits & (unknown | (begins < runner.input_batch.num_prompt_tokens[:batch]))
            reads[rows] = False
            if self._waiting > KEPT_BYTES:
                reads = fits
            if reads.any():
                self._read_up(np.flatnonzero(reads), ends, 1, held, tokens)
        able = fits[rows]
        drafts: list[list[int]] = [[] for _ in rows]
        if able.any():
            longest = int(counts[able].max())
            begin, read = time.perf_counter(), int((ends - self._read)[rows[able]].sum())
            found = self._read_up(rows[able], ends, longest, held, tokens).tolist()
            if read <= len(rows) * (self.drafts.most + 1):  # else it was behind: that is not what drafts cost
                context = float(ends[rows[able]].sum())
                self.drafts.timed_pass(int(able.sum()), (time.perf_counter() - begin) / longest, context)
            for i, ids in zip(np.flatnonzero(able).tolist(), found, strict=True):
                drafts[i] = ids[: counts[i]]
        self._ends = ends
        if (self._read == ends)[fits].all():
            self._kept, self._waiting = [], 0
        return drafts

    @property
    def _proposer(self) -> Any:
        return self._drafter.runner.drafter

    def _see_batch(self, req_ids: list[str]) -> None:
        """Follow the requests of the batch to their rows."""
        if req_ids == self._req_ids:
            return
        behind = dict(zip(self._req_ids, (self._read < self._ends).tolist(), strict=True))
        known = dict(zip(self._req_ids, self._read.tolist(), strict=True))
        self._req_ids, self._rows = list(req_ids), {req_id: row for row, req_id in enumerate(req_ids)}
        self._read = np.array([known.pop(req_id, -1) for req_id in req_ids], dtype=np.int64)
        if any(behind[req_id] for req_id in known):  # a request has gone that the drafter has not read to its end
            self._whole = False
        self._kept = [kept for kept in self._kept if any(req_id in kept.rows for req_id in req_ids)]
        self._waiting = sum(kept.hidden.nbytes for kept in self._kept)

    def _keep(self, held: dict[str, Any], begins: np.ndarray, ends: np.ndarray, scheduled: np.ndarray) -> None:
        """Keep the hidden states of the tokens that the step has added to each request's text."""
        runner, counts = self._drafter.runner, ends - begins
        places = np.cumsum(counts) - counts
        parts = [held["hidden_states"]]
        if getattr(runner, "use_aux_hidden_state_outputs", False):
            parts = held["aux_hidden_states"]
        elif (other := getattr(runner.get_model(), "get_mtp_target_hidden_states", lambda: None)()) is not None:
            parts = [other]
        total = int(counts.sum())
        valid: slice | torch.Tensor = slice(0, total)
        if total < scheduled.sum():  # rejected draft tokens are left out
            valid = torch.from_numpy(_stretches(np.cumsum(scheduled) - scheduled, counts)).to(runner.device)
        if len(parts) > 1 or total < scheduled.sum():
            hidden = torch.cat([part[valid] for part in parts], dim=-1)
        else:
            hidden = parts[0][valid].clone()  # vLLM writes the next step's there
        self._kept.append(_Kept(self._rows, begins, ends, places, hidden))
        self._waiting += hidden.nbytes

    def _read_up(
        self, rows: np.ndarray, ends: np.ndarray, passes: int, held: dict[str, Any], tokens: np.ndarray
    ) -> torch.Tensor:
        """Let the drafter read what it has missed of some rows, and draft `passes` tokens, [rows, passes]."""
        most = self._proposer.max_num_tokens - len(rows)
        while True:
            begins = np.minimum(self._read[rows], ends[rows] - 1)
            left = ends[rows] - begins
            now = np.minimum(left, most - np.minimum(np.cumsum(left) - left, most))
            if (now == left).all():
                return self._propose(rows, begins, ends[rows], passes, held, tokens)
            some = now > 0
            self._propose(rows[some], begins[some], (begins + now)[some], 1, held, tokens)

    @torch.inference_mode()
    def _propose(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        ends: np.ndarray,
        passes: int,
        held: dict[str, Any],
        tokens: np.ndarray,
    ) -> torch.Tensor:
        """Let the drafter read positions `begins` to `ends` of some rows, and draft, [rows, passes]."""
        runner, proposer = self._drafter.runner, self._proposer
        hidden = None
        if proposer.pass_hidden_states_to_model:
            hidden, begins = self._hidden(rows, begins, ends)
        which = torch.from_numpy(rows).to(runner.device)
        table = runner.input_batch.block_table[max(0, getattr(proposer, "kv_cache_gid", 0))]
        asked = queries(table.get_device_tensor(len(self._req_ids))[which], table.block_size, begins, ends)
        metadata = held["common_attn_metadata"]
        fields = {field.name for field in dataclasses.fields(metadata)}
        text = np.concatenate([tokens[row, b:e] for row, b, e in zip(rows, begins, ends, strict=True)])
        sampling = held["sampling_metadata"]
        of_rows = {
            name: value[which]
            for name in ("temperature", "top_k", "top_p")
            if (value := getattr(sampling, name)) is not None
        }
        if self.noise:
            self.noise.rows = which
        found: torch.Tensor = proposer.propose(
            num_speculative_tokens=passes,
            target_token_ids=torch.from_numpy(text).to(runner.device),
            target_positions=asked.positions,
            target_hidden_states=hidden,
            next_token_ids=torch.from_numpy(tokens[rows, ends]).to(runner.device),
            token_indices_to_sample=None,
            common_attn_metadata=dataclasses.replace(
                metadata, **{name: value for name, value in asked.metadata.items() if name in fields}
            ),
            sampling_metadata=dataclasses.replace(sampling, **of_rows),
        )
        self._read[rows] = ends
        self.passes += passes
        probabilities = getattr(proposer, "take_last_draft_probs", lambda: None)()
        if probabilities is not None:  # of vLLM's own rejection sampling
            runner._draft_probs = probabilities
            runner._draft_prob_req_ids = [self._req_ids[row] for row in rows.tolist()]
        return found

    def _hidden(self, rows: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """Return the hidden states [tokens, size] of some rows' positions, and where they begin: later than `begins`
        if a step in between was not seen."""
        offsets = np.cumsum([0, *(len(kept.hidden) for kept in self._kept)])
        at, pieces = begins.copy(), list[np.ndarray]()
        for i, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
            expected, mine = int(begins[i]), list[np.ndarray]()
            for kept, offset in zip(self._kept, offsets.tolist(), strict=False):
                j = kept.rows.get(self._req_ids[row])
                if j is None or kept.ends[j] <= expected or kept.begins[j] >= end:
                    continue
                if kept.begins[j] > expected:
                    expected, mine = int(kept.begins[j]), []
                    at[i] = expected
                stop = min(int(kept.ends[j]), end)
                first = offset + int(kept.places[j] - kept.begins[j])
                mine.append(np.arange(first + expected, first + stop))
                expected = stop
            pieces += mine
        places = np.concatenate(pieces)
        order = np.argsort(places, kind="stable")  # step by step, so that no more is copied than is read
        parts = np.split(places[order], np.searchsorted(places[order], offsets[1:-1]))
        device = self._kept[0].hidden.device
        read = torch.cat(
            [
                kept.hidden[torch.from_numpy(part - offset).to(device)]
                for kept, part, offset in zip(self._kept, parts, offsets.tolist(), strict=False)
                if len(part)
            ]
        )
        return read[torch.from_numpy(np.argsort(order)).to(device)], at


def _stretches(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return begin, begin + 1, ... for each of some stretches, one after the other, int64."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(begins - before, counts)


@patch(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    since="0.24",
    needs="sampled_token_ids, sampling_metadata, hidden_states, aux_hidden_states, common_attn_metadata",
)
def hold_drafts(stock: Any, source: NeuralSource) -> Any:
    """Without it a neural drafter drafts in every step, before the host knows the step's tokens. Remove this patch when
    vLLM's V1 runner lets each step choose whether to draft."""
    signature = inspect.signature(stock)

    def propose(*args: Any, **kwargs: Any) -> list[list[int]]:
        source.held = dict(signature.bind(*args, **kwargs).arguments)
        return [[] for _ in range(len(source.held["sampled_token_ids"]))]

    return propose


@patch("vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync", since="0.24")
def draft_when_tokens_are_known(stock: Any, runner: Any, propose: Callable[..., list[list[int]]]) -> Any:
    """Without it nobody would draft in the place of a drafter that `hold_drafts` keeps waiting. Remove this patch when
    `hold_drafts` is removed."""

    def bookkeeping(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        before = batch.num_tokens_no_spec[: batch.num_reqs].tolist()
        result = stock(*args, **kwargs)
        after = batch.num_tokens_no_spec[: batch.num_reqs].tolist()
        sampled = [batch.token_ids_cpu[row, a:b].tolist() for row, (a, b) in enumerate(zip(before, after, strict=True))]
        runner._draft_token_ids = propose(sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)
        runner._draft_token_req_ids = batch.req_ids.copy()
        return result

    return bookkeeping
