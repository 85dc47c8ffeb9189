"""Draft tokens from vLLM's own neural drafters (EAGLE, MTP, a draft model), in the
steps in which they pay.

Such a drafter has a KV cache of its own, which has to contain what the policy has
written; EAGLE and MTP read the policy's hidden states beside the text. In a step
without drafts it does not run: it reads what it has missed in one pass when it is
wanted again. Hidden states must be kept until then: when `KEPT_BYTES` of them are
waiting, it reads all it has missed. So its drafts are those of a drafter that runs in
every step. It reads prompts with the policy.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.core.steps import Ints
from das_adapter.engine.v1.keyed_sample import Keys
from das_adapter.engine.v1.model_source import (
    Drafts,
    ModelSource,
    queries,
    stretches,
)
from das_adapter.engine.v1.verification import draw, of_rows
from das_adapter.errors import ConfigError
from das_adapter.patching import patch

KEPT_BYTES = 2**27
"""Hidden states that are kept at most for a drafter that does not run: as long as it is
not wanted, reading them would only take time. Decode steps leave more of a GPU free,
where vLLM has reserved the activations of whole prompts.
"""
_PROPOSERS = ("EagleProposer", "DraftModelProposer")


class Piece(NamedTuple):
    """Hidden states of some tokens of a request's text."""

    begin: int
    """Position of the first one."""
    states: torch.Tensor
    """Hidden states of the policy, [tokens, size]."""


class NeuralSource(ModelSource):
    """Runs the drafter that vLLM has loaded, for any rows of the batch and draft
    lengths.
    """

    follows = True

    def __init__(self, drafter: Any, drafts: ModelDrafts):
        super().__init__(drafter, drafts)
        self.held: dict[str, Any] = {}
        """Arguments of `propose_draft_token_ids`, with which vLLM would have drafted in
        the present step.
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
        kind = type(runner.drafter).__name__
        if kind not in _PROPOSERS:
            raise ConfigError(
                f"das.drafter={self._drafter.config.drafter!r}: found vLLM's {kind},"
                " which has to draft in every step: das.budget=unlimited with"
                " das.speculate=always"
            )
        self._limit = runner.effective_drafter_max_model_len
        # vLLM would give the whole batch junk drafts when one request comes near it.
        unreached = runner.max_model_len + runner.num_spec_tokens + 1
        runner.effective_drafter_max_model_len = unreached
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
        self._kept: dict[str, list[Piece]] = {}
        """Hidden states of each request's tokens that it has not read, and of the last
        one that it has.
        """

    def _draft(
        self,
        rows: Ints,
        counts: Ints,
        lengths: np.ndarray,
        tokens: np.ndarray,
    ) -> Drafts:
        self._follow_batch()
        batch = self.runner.input_batch
        requests = len(self._req_ids)
        num_begins = requests + 1
        query_begins = self.runner.query_start_loc.np[:num_begins]
        scheduled = np.diff(query_begins).astype(np.int64)
        num_computed = batch.num_computed_tokens_cpu[:requests]
        begins = num_computed.astype(np.int64)
        num_written = lengths[:requests].astype(np.int64)
        last_tokens = num_written - 1
        step_ends = begins + scheduled
        ends = np.minimum(last_tokens, step_ends)
        unknown = self._forget_unknown(begins)
        last_ends = ends + self.drafts.max_draft_tokens
        fits = last_ends < self._limit
        if self._proposer.pass_hidden_states_to_model:
            token_bytes = self._keep(begins, ends, scheduled, fits)
            prompt_ends = batch.num_prompt_tokens[:requests]
            in_prompt = begins < prompt_ends
            reads = fits & (unknown | in_prompt)
            reads[rows] = False
            unread = ends - self._read
            num_unread = unread[fits].sum()
            if num_unread * token_bytes > KEPT_BYTES:
                reads = fits
            if reads.any():
                reading_rows = np.flatnonzero(reads)
                self._read_up(reading_rows, ends, 1, tokens)
        drafts: Drafts = [[] for _ in rows]
        able = fits[rows]
        if able.any():
            able_rows = rows[able]
            able_counts = counts[able]
            found = self._draft_for(
                able_rows,
                able_counts,
                ends,
                num_asked=len(rows),
                tokens=tokens,
            )
            able_places = np.flatnonzero(able)
            for place, draft in zip(able_places.tolist(), found, strict=True):
                drafts[place] = draft
        return drafts

    def _follow_batch(self) -> None:
        """Put what is known of requests into the order of the present batch."""
        req_ids = self.runner.input_batch.req_ids
        if req_ids == self._req_ids:
            return
        num_read = self._read.tolist()
        known = dict(zip(self._req_ids, num_read, strict=True))
        read = []
        kept = {}
        for req_id in req_ids:
            read.append(known.get(req_id, -1))
            kept[req_id] = self._kept.get(req_id, [])
        self._req_ids = list(req_ids)
        self._read = np.array(read, dtype=np.int64)
        self._kept = kept

    def _forget_unknown(self, begins: np.ndarray) -> np.ndarray:
        """Return of which requests it is not known what the drafter has read, bool
        [batch], and let it read them from where the step begins, or from their begin
        where the text alone is read.
        """
        is_new = self._read < 0
        has_read_more = begins < self._read
        unknown = is_new | has_read_more
        if self._proposer.pass_hidden_states_to_model:
            self._read[unknown] = begins[unknown]
        else:  # a prefix that was cached it may not have read
            self._read[unknown] = 0
        unknown_rows = np.flatnonzero(unknown)
        for row in unknown_rows.tolist():
            req_id = self._req_ids[row]
            self._kept[req_id] = []
        return unknown

    def _draft_for(
        self,
        rows: Ints,
        counts: Ints,
        ends: Ints,
        num_asked: int,
        tokens: np.ndarray,
    ) -> Drafts:
        """Return the drafts of some rows, `counts` [rows] tokens each; `num_asked`:
        rows for which drafts were asked, those included that are too long.
        """
        longest = int(counts.max())
        unread = ends - self._read
        num_read = int(unread[rows].sum())
        begin = time.perf_counter()
        device_drafts = self._read_up(rows, ends, longest, tokens)
        longest_drafts = device_drafts.tolist()
        probabilities = self._proposer.take_last_draft_probs()
        if probabilities is not None:
            self.drawn_with = {}
            for i, row in enumerate(rows.tolist()):
                req_id = self._req_ids[row]
                self.drawn_with[req_id] = probabilities[i]
        # else it was behind: that is not what drafts cost
        tokens_of_step = self.drafts.max_draft_tokens + 1
        if num_read <= num_asked * tokens_of_step:
            drafting_s = time.perf_counter() - begin
            context_tokens = float(ends[rows].sum())
            self.drafts.record_pass(
                len(rows),
                drafting_s / longest,
                context_tokens,
            )
        drafts = []
        for ids, count in zip(longest_drafts, counts, strict=True):
            drafts.append(ids[:count])
        return drafts

    @property
    def _proposer(self) -> Any:
        return self.runner.drafter

    def _keep(
        self,
        begins: Ints,
        ends: Ints,
        scheduled: Ints,
        fits: np.ndarray,
    ) -> int:
        """Keep the hidden states of the tokens that the step has added to the text of
        requests; return the bytes of one. Rejected draft tokens are left out, and
        requests that the drafter can't read to their end.
        """
        counts = ends - begins
        first_tokens = np.cumsum(scheduled) - scheduled
        host_valid = torch.from_numpy(stretches(first_tokens, counts))
        valid = host_valid.to(self.runner.device)
        parts = []
        for states in self._policy_hidden_states():
            parts.append(states[valid])
        hidden = torch.cat(parts, dim=-1)
        by_request = torch.split(hidden, counts.tolist())
        for row, own_states in enumerate(by_request):
            if not fits[row]:
                continue
            req_id = self._req_ids[row]
            begin = int(begins[row])
            piece = Piece(begin, own_states)
            self._kept[req_id].append(piece)
        _, width = hidden.shape
        return width * hidden.element_size()

    def _policy_hidden_states(self) -> list[torch.Tensor]:
        """Return what the drafter reads of the policy beside the step's tokens,
        [tokens, size] each; vLLM writes the next step's in their place.
        """
        if getattr(self.runner, "use_aux_hidden_state_outputs", False):
            states: list[torch.Tensor] = self.held["aux_hidden_states"]
            return states
        model = self.runner.get_model()
        if hasattr(model, "get_mtp_target_hidden_states"):
            own = model.get_mtp_target_hidden_states()
            if own is not None:
                return [own]
        return [self.held["hidden_states"]]

    def _read_up(
        self,
        rows: Ints,
        ends: Ints,
        passes: int,
        tokens: np.ndarray,
    ) -> torch.Tensor:
        """Let the drafter read what it has missed of some rows, and draft `passes`
        tokens, [rows, passes].
        """
        own_ends = ends[rows]
        pass_tokens = self._proposer.max_num_tokens - len(rows)
        while True:
            last_tokens = own_ends - 1
            begins = np.minimum(self._read[rows], last_tokens)
            left = own_ends - begins
            before = np.cumsum(left) - left
            room = pass_tokens - np.minimum(before, pass_tokens)
            num_read = np.minimum(left, room)
            if (num_read == left).all():
                return self._propose(
                    rows,
                    begins,
                    own_ends,
                    passes,
                    tokens,
                )
            reads = num_read > 0
            reached = begins + num_read
            self._propose(
                rows[reads],
                begins[reads],
                reached[reads],
                passes=1,
                tokens=tokens,
            )

    @torch.inference_mode()
    def _propose(
        self,
        rows: Ints,
        begins: Ints,
        ends: Ints,
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
        device = runner.device
        device_rows = torch.from_numpy(rows).to(device)
        cache_group = max(0, getattr(proposer, "kv_cache_gid", 0))
        table = runner.input_batch.block_table[cache_group]
        batch_blocks = table.get_device_tensor(len(self._req_ids))
        blocks = batch_blocks[device_rows]
        attention = queries(blocks, table.block_size, begins, ends)
        texts = []
        for i, row in enumerate(rows):
            begin = begins[i]
            end = ends[i]
            texts.append(tokens[row, begin:end])
        host_text = np.concatenate(texts)
        text = torch.from_numpy(host_text).to(device)
        host_next_tokens = tokens[rows, ends]
        next_tokens = torch.from_numpy(host_next_tokens).to(device)
        sampling = of_rows(self.held["sampling_metadata"], device_rows)
        if self.noise:
            self.noise.rows = device_rows
        found: torch.Tensor = proposer.propose(
            num_speculative_tokens=passes,
            target_token_ids=text,
            target_positions=attention.positions,
            target_hidden_states=hidden,
            next_token_ids=next_tokens,
            token_indices_to_sample=None,
            common_attn_metadata=attention,
            sampling_metadata=sampling,
        )
        self._read[rows] = ends
        self.drafts.passes_made += passes
        return found

    def _hidden(
        self,
        rows: Ints,
        begins: Ints,
        ends: Ints,
    ) -> torch.Tensor:
        """Return the hidden states [tokens, size] of some rows' positions, of which the
        last stay for another pass.
        """
        found = []
        for i, row in enumerate(rows.tolist()):
            req_id = self._req_ids[row]
            begin = int(begins[i])
            end = int(ends[i])
            still_kept = []
            for piece in self._kept[req_id]:
                first = max(0, begin - piece.begin)
                stop = max(0, end - piece.begin)
                states = piece.states[first:stop]
                found.append(states)
                piece_end = piece.begin + len(piece.states)
                if piece_end >= end:
                    still_kept.append(piece)
            self._kept[req_id] = still_kept
        return torch.cat(found)


class KeyedDrafts:
    """Draws the tokens of vLLM's own drafters (EAGLE-3, MTP, a draft model) with the
    noise of the policy's sampler.
    """

    def __init__(
        self,
        runner: Any,
        seeds: Callable[[], torch.Tensor],
    ):
        """`seeds`: returns the seeds of the batch's requests, int64 [requests]."""
        self._runner = runner
        self._seeds = seeds
        self.rows: torch.Tensor | None = None
        """Rows of the batch that are drafted for, int64; None: all of it."""
        self._positions = torch.zeros(0, dtype=torch.int64)
        drafter = runner.drafter
        follow_positions.apply(self, owner=drafter)
        draw_with_keyed_noise.apply(self, owner=drafter)

    def first_pass(self, last_tokens: torch.Tensor) -> None:
        """Note for which positions the first pass draws; `last_tokens`: the rows of
        the drafter's inputs at which requests end, int64 [requests].
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
        if self.rows is not None:
            seeds = seeds[self.rows]
        keys = Keys(seeds, self._positions)
        self._positions = self._positions + 1
        tokens, _ = draw(logits, keys, sampling)
        return tokens


@patch(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    since="0.24",
    needs="sampled_token_ids, sampling_metadata, hidden_states, aux_hidden_states",
)
def draft_when_it_pays(
    stock: Any,
    source: NeuralSource,
    propose: Callable[..., Drafts],
) -> Any:
    """Without it a neural drafter drafts in every step. Remove this patch when vLLM's
    V1 runner lets each step choose whether to draft.
    """
    signature = inspect.signature(stock)

    def propose_draft_token_ids(*args: Any, **kwargs: Any) -> Drafts:
        bound = signature.bind(*args, **kwargs)
        source.held = dict(bound.arguments)
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

    def sample_draft_tokens(hidden: torch.Tensor, sampling: Any) -> Any:
        tokens = noise.draw(hidden, sampling)
        return tokens, None

    return sample_draft_tokens
