"""Draft tokens from vLLM's own neural drafters (EAGLE, MTP, a draft model), in the
steps in which they pay.

Such a drafter has a KV cache of its own, which has to contain what the policy has
written; EAGLE and MTP read the policy's hidden states beside the text. In a step
without drafts it does not run: it reads what it has missed in one pass when it is
wanted again, or, for its hidden states must be kept until then, when `KEPT_BYTES` of
them are waiting. So its drafts are those of a drafter that runs in every step. Prompts
it reads with the policy.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.engine.v1.keyed_sample import Keys
from das_adapter.engine.v1.model_source import ModelSource, queries, stretches
from das_adapter.engine.v1.verification import draw, of_rows
from das_adapter.errors import ConfigError
from das_adapter.patching import patch

KEPT_BYTES = 2**27
"""Hidden states that are kept at most for a drafter that does not run: as long as it is
not wanted, reading them would only take time. Decode steps leave more of a GPU free,
where vLLM has reserved the activations of whole prompts.
"""
_PROPOSERS = ("EagleProposer", "DraftModelProposer")


class NeuralSource(ModelSource):
    """Runs the drafter that vLLM has loaded, for any rows of the batch and draft
    lengths.
    """

    follows = True

    def __init__(self, drafter: Any, drafts: ModelDrafts):
        super().__init__(drafter, drafts)
        self.held: dict[str, Any] = {}
        """What vLLM would have drafted with in the present step: arguments of
        `propose_draft_token_ids`.
        """
        self.noise: KeyedDrafts | None = None
        self._limit = 0
        self.forget()

    def load(self, policy: torch.nn.Module) -> None:
        """Take over vLLM's drafter.

        Raises:
            ConfigError: it is none that can miss a step.
        """
        runner = self.runner
        kind = type(self.runner.drafter).__name__
        if kind not in _PROPOSERS:
            raise ConfigError(
                f"das.drafter={self._drafter.config.drafter!r}: found vLLM's {kind},"
                " which has to draft in every step: das.budget=unlimited with"
                " das.speculate=always"
            )
        self._limit = runner.effective_drafter_max_model_len
        # vLLM would give the whole batch junk drafts when one request comes near it.
        runner.effective_drafter_max_model_len = (
            runner.max_model_len + runner.num_spec_tokens + 1
        )
        # It asks for drafts when the host knows the step's tokens; some drafters can't
        # be built with this setting.
        runner.speculative_config.disable_padded_drafter_batch = True
        draft_when_it_pays.apply(self, self._drafter.propose, owner=runner)

    def forget(self) -> None:
        self._req_ids: list[str] = []
        self._read = np.zeros(0, dtype=np.int64)
        """Tokens of each request of the batch that the drafter has read; -1: not
        known.
        """
        self._kept: dict[str, list[tuple[int, torch.Tensor]]] = {}
        """Hidden states of each request's tokens that it has not read, and of the last
        one that it has: where they begin, and [tokens, size].
        """

    def _draft(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> list[list[int]]:
        runner = self.runner
        hidden = self._proposer.pass_hidden_states_to_model
        req_ids = runner.input_batch.req_ids
        if req_ids != self._req_ids:
            known = dict(zip(self._req_ids, self._read.tolist(), strict=True))
            self._req_ids = list(req_ids)
            self._read = np.array(
                [known.get(req_id, -1) for req_id in req_ids], dtype=np.int64
            )
            self._kept = {req_id: self._kept.get(req_id, []) for req_id in req_ids}
        batch = len(req_ids)
        begins = runner.input_batch.num_computed_tokens_cpu[:batch].astype(np.int64)
        scheduled = np.diff(runner.query_start_loc.np[: batch + 1]).astype(np.int64)
        ends = np.minimum(lengths[:batch].astype(np.int64) - 1, begins + scheduled)
        unknown = (self._read < 0) | (begins < self._read)
        # a prefix that was cached it may not have read
        self._read[unknown] = begins[unknown] if hidden else 0
        for row in np.flatnonzero(unknown).tolist():
            self._kept[req_ids[row]] = []
        fits = ends + self.drafts.max_draft_tokens < self._limit
        if hidden:
            token_bytes = self._keep(begins, ends, scheduled, fits)
            reads = fits & (
                unknown | (begins < runner.input_batch.num_prompt_tokens[:batch])
            )
            reads[rows] = False
            if (ends - self._read)[fits].sum() * token_bytes > KEPT_BYTES:
                reads = fits
            if reads.any():
                self._read_up(np.flatnonzero(reads), ends, 1, tokens)
        able = fits[rows]
        drafts: list[list[int]] = [[] for _ in rows]
        if able.any():
            longest = int(counts[able].max())
            begin = time.perf_counter()
            read = int((ends - self._read)[rows[able]].sum())
            found = self._read_up(rows[able], ends, longest, tokens).tolist()
            drawn_with = self._proposer.take_last_draft_probs()
            if drawn_with is not None:
                self.drawn_with = {
                    req_ids[row]: drawn_with[i]
                    for i, row in enumerate(rows[able].tolist())
                }
            # else it was behind: that is not what drafts cost
            if read <= len(rows) * (self.drafts.max_draft_tokens + 1):
                context = float(ends[rows[able]].sum())
                self.drafts.record_pass(
                    int(able.sum()), (time.perf_counter() - begin) / longest, context
                )
            for i, ids in zip(np.flatnonzero(able).tolist(), found, strict=True):
                drafts[i] = ids[: counts[i]]
        return drafts

    @property
    def _proposer(self) -> Any:
        return self.runner.drafter

    def _keep(
        self,
        begins: np.ndarray,
        ends: np.ndarray,
        scheduled: np.ndarray,
        fits: np.ndarray,
    ) -> int:
        """Keep the hidden states of the tokens that the step has added to the text of
        requests; return the bytes of one. Rejected draft tokens are left out, and
        requests that the drafter can't read to their end.
        """
        runner = self.runner
        counts = ends - begins
        parts = [self.held["hidden_states"]]
        if getattr(runner, "use_aux_hidden_state_outputs", False):
            parts = self.held["aux_hidden_states"]
        elif (
            other := getattr(
                runner.get_model(), "get_mtp_target_hidden_states", lambda: None
            )()
        ) is not None:
            parts = [other]
        valid = torch.from_numpy(
            stretches(np.cumsum(scheduled) - scheduled, counts)
        ).to(runner.device)
        # vLLM writes the next step's in their place
        hidden = torch.cat([part[valid] for part in parts], dim=-1)
        for row, piece in enumerate(torch.split(hidden, counts.tolist())):
            if fits[row]:
                self._kept[self._req_ids[row]].append((int(begins[row]), piece))
        return hidden.shape[1] * hidden.element_size()

    def _read_up(
        self, rows: np.ndarray, ends: np.ndarray, passes: int, tokens: np.ndarray
    ) -> torch.Tensor:
        """Let the drafter read what it has missed of some rows, and draft `passes`
        tokens, [rows, passes].
        """
        most = self._proposer.max_num_tokens - len(rows)
        while True:
            begins = np.minimum(self._read[rows], ends[rows] - 1)
            left = ends[rows] - begins
            now = np.minimum(left, most - np.minimum(np.cumsum(left) - left, most))
            if (now == left).all():
                return self._propose(rows, begins, ends[rows], passes, tokens)
            some = now > 0
            self._propose(rows[some], begins[some], (begins + now)[some], 1, tokens)

    @torch.inference_mode()
    def _propose(
        self,
        rows: np.ndarray,
        begins: np.ndarray,
        ends: np.ndarray,
        passes: int,
        tokens: np.ndarray,
    ) -> torch.Tensor:
        """Let the drafter read positions `begins` to `ends` of some rows, and draft,
        [rows, passes].
        """
        runner = self.runner
        proposer = self._proposer
        hidden = None
        if proposer.pass_hidden_states_to_model:
            hidden = self._hidden(rows, begins, ends)
        which = torch.from_numpy(rows).to(runner.device)
        table = runner.input_batch.block_table[
            max(0, getattr(proposer, "kv_cache_gid", 0))
        ]
        asked = queries(
            table.get_device_tensor(len(self._req_ids))[which],
            table.block_size,
            begins,
            ends,
        )
        text = np.concatenate(
            [tokens[row, b:e] for row, b, e in zip(rows, begins, ends, strict=True)]
        )
        if self.noise:
            self.noise.rows = which
        found: torch.Tensor = proposer.propose(
            num_speculative_tokens=passes,
            target_token_ids=torch.from_numpy(text).to(runner.device),
            target_positions=asked.positions,
            target_hidden_states=hidden,
            next_token_ids=torch.from_numpy(tokens[rows, ends]).to(runner.device),
            token_indices_to_sample=None,
            common_attn_metadata=asked,
            sampling_metadata=of_rows(self.held["sampling_metadata"], which),
        )
        self._read[rows] = ends
        self.drafts.passes_made += passes
        return found

    def _hidden(
        self, rows: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> torch.Tensor:
        """Return the hidden states [tokens, size] of some rows' positions, of which the
        last stay for another pass.
        """
        found = []
        for row, begin, end in zip(
            rows.tolist(), begins.tolist(), ends.tolist(), strict=True
        ):
            kept = self._kept[self._req_ids[row]]
            found += [
                piece[max(0, begin - first) : max(0, end - first)]
                for first, piece in kept
            ]
            self._kept[self._req_ids[row]] = [
                (first, piece) for first, piece in kept if first + len(piece) >= end
            ]
        return torch.cat(found)


class KeyedDrafts:
    """Draws the tokens of vLLM's own drafters (EAGLE-3, MTP, a draft model) with the
    noise of the policy's sampler.
    """

    def __init__(self, runner: Any, seeds: Callable[[], torch.Tensor]):
        self._runner = runner
        self._seeds = seeds
        self.rows: torch.Tensor | None = None
        """Rows of the batch that are drafted for, int64; None: all of it."""
        self._positions = torch.zeros(0, dtype=torch.int64)
        for step_patch in (follow_positions, draw_with_keyed_noise):
            step_patch.apply(self, owner=runner.drafter)

    def first_pass(self, last_tokens: torch.Tensor) -> None:
        """Take the rows of the drafter's inputs at which requests end, int64
        [requests].
        """
        drafter = self._runner.drafter
        # EAGLE's inputs are one token ahead of their positions
        ahead = 1 if drafter.pass_hidden_states_to_model else 0
        self._positions = drafter.positions[last_tokens] + ahead

    def draw(self, hidden: torch.Tensor, sampling: Any) -> torch.Tensor:
        """Draw a token for each request, int64 [requests], from the drafter's hidden
        states [requests, size]; `sampling`: vLLM's SamplingMetadata of these
        requests.
        """
        logits = self._runner.drafter.model.compute_logits(hidden)
        seeds = self._seeds()
        keys = Keys(seeds if self.rows is None else seeds[self.rows], self._positions)
        self._positions = self._positions + 1
        return draw(logits, keys, sampling)[0]


@patch(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    since="0.24",
    needs="sampled_token_ids, sampling_metadata, hidden_states, aux_hidden_states",
)
def draft_when_it_pays(
    stock: Any, source: NeuralSource, propose: Callable[..., list[list[int]]]
) -> Any:
    """Without it a neural drafter drafts in every step. Remove this patch when vLLM's
    V1 runner lets each step choose whether to draft.
    """
    signature = inspect.signature(stock)

    def propose_draft_token_ids(*args: Any, **kwargs: Any) -> list[list[int]]:
        source.held = dict(signature.bind(*args, **kwargs).arguments)
        batch = source.runner.input_batch
        drafts = propose(
            source.held["sampled_token_ids"],
            batch.num_tokens_no_spec,
            batch.token_ids_cpu,
        )
        source.held = {}  # the policy's hidden states take memory
        return drafts

    return propose_draft_token_ids


@patch(
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.set_inputs_first_pass",
    since="0.24",
)
def follow_positions(stock: Any, noise: KeyedDrafts) -> Any:
    """Without it `draw_with_keyed_noise` does not know for which positions it draws.
    Remove this patch when vLLM's V1 drafters draw with noise keyed by position.
    """

    def set_inputs_first_pass(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        noise.first_pass(result[1])
        return result

    return set_inputs_first_pass


@patch(
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._sample_draft_tokens",
    since="0.24",
)
def draw_with_keyed_noise(stock: Any, noise: KeyedDrafts) -> Any:
    """Without it drafters draft the most likely token, which at temperature 1 is often
    not the one that is drawn. Remove this patch when vLLM's V1 drafters draw with noise
    keyed by position.
    """
    return lambda hidden, sampling: (noise.draw(hidden, sampling), None)
