"""Kernels of vLLM's V2 model runner in NumPy: Triton's interpreter takes a millisecond
or more for each request and each row of logits. A job that is `interpreted` runs both
and compares them, bit for bit.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from reference_noise import gumbel

U = np.uint32
F = np.float32
NEVER = F(-np.inf)


COMPARED: dict[str, int] = {}
"""How often what stands in was compared with what it stands for."""


class Launch:
    """Stands in the place of a kernel, `kernel[grid](*args, **named)`: computes with
    its tensors and what is named.
    """

    def __init__(self, compute: Callable[..., None], kernel: Any) -> None:
        """
        Args:
            compute: called with the tensors among the arguments, None where one is
                missing, and what is named.
            kernel: is run as well, and the results are compared; None: it is not.
        """
        self._compute = compute
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **named: Any) -> None:
            tensors = [x for x in args if x is None or isinstance(x, Tensor)]
            if self._kernel is None:
                return self._compute(*tensors, **named)
            copies = [None if x is None else x.clone() for x in tensors]
            named_tensors = {k: x for k, x in named.items() if isinstance(x, Tensor)}
            named_copies = {k: x.clone() for k, x in named_tensors.items()}
            self._kernel[grid](*args, **named)
            self._compute(*copies, **{**named, **named_copies})
            return compare(
                self._compute,
                [*copies, *named_copies.values()],
                [*tensors, *named_tensors.values()],
            )

        return run


def compare(
    compute: Callable[..., Any], found: Sequence[Tensor | None], expected: Sequence[Any]
) -> None:
    """Hold what stands in against what it stands for."""
    for a, b in zip(found, expected, strict=True):
        assert (
            a is None
            or a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
        ), compute.__doc__
    COMPARED[compute.__name__] = COMPARED.get(compute.__name__, 0) + 1


def install(compared: bool) -> None:
    """Put them in the place of vLLM's; `compared`: compute both."""
    import vllm.v1.worker.cpu.model_runner  # noqa: F401  # first, it replaces parts of torch
    from vllm.v1.worker.gpu import block_table, input_batch, structured_outputs
    from vllm.v1.worker.gpu.sample import (
        bad_words,
        gumbel,
        logit_bias,
        logprob,
        min_p,
        penalties,
        sampler,
    )
    from vllm.v1.worker.gpu.spec_decode import (
        rejection_sampler,
        rejection_sampler_utils,
    )

    from das_adapter.engine.v2 import confidence, ranking, sampling_limits

    for owners, compute, written in (
        ((gumbel, sampler), gumbel_sample, lambda *_: []),
        (
            (block_table.BlockTables,),
            gather_block_tables,
            lambda tables, *_: tables.input_block_tables,
        ),
        (
            (block_table.BlockTables,),
            compute_slot_mappings,
            lambda tables, *_: [tables.slot_mappings],
        ),
    ):
        stock = getattr(owners[0], compute.__name__)
        for owner in owners:
            setattr(
                owner,
                compute.__name__,
                both(compute, stock, written) if compared else compute,
            )
    for module, name, compute in (
        (gumbel, "_temperature_kernel", temper),
        (logprob, "_topk_log_softmax_kernel", log_softmax),
        (logprob, "_ranks_kernel", rank),
        (logprob, "_fill_logprob_token_ids_kernel", choose_ids),
        (penalties, "_penalties_kernel", penalise),
        (logit_bias, "_bias_kernel", bias_logits),
        (bad_words, "_bad_words_kernel", forbid_words),
        (min_p, "_min_p_kernel", cut_improbable),
        (input_batch, "_prepare_prefill_inputs_kernel", read_prompts),
        (input_batch, "_prepare_pos_seq_lens_kernel", place),
        (input_batch, "_combine_sampled_and_draft_tokens_kernel", read_drafts),
        (input_batch, "_expand_idx_mapping_kernel", expand),
        (input_batch, "_get_num_sampled_and_rejected_kernel", count),
        (input_batch, "_post_update_kernel", append),
        (rejection_sampler, "_flatten_sampled_kernel", flatten),
        (sampling_limits, "leave_out", leave_out),
        (confidence, "sum_others", sum_others),
        (confidence, "write_kind", write_kind),
        (ranking, "admit", admit),
    ):
        setattr(
            module, name, Launch(compute, getattr(module, name) if compared else None)
        )
    # the interpreter cannot run it
    structured_outputs._apply_grammar_bitmask_kernel = Launch(mask, None)
    for module in (gumbel, rejection_sampler_utils):
        # the noise of vLLM 0.29 and 0.30 has it, and what is drawn after a rejection
        if hasattr(module, "tldevice"):
            module.tldevice = SimpleNamespace(log1p=log1p)


def both(
    compute: Callable[..., Any], stock: Callable[..., Any], written: Callable[..., Any]
) -> Callable[..., Any]:
    """Compute a function's or a method's answer both ways; `written`: what else it
    writes to.
    """

    @functools.wraps(stock)
    def run(*args: Any, **kwargs: Any) -> Any:
        answers = []
        for way in (compute, stock):
            for target in written(*args):
                target.zero_()
            made = way(*args, **kwargs)
            answers.append(
                [
                    x.clone()
                    for x in (
                        *written(*args),
                        *((made,) if torch.is_tensor(made) else made),
                    )
                ]
            )
        compare(compute, *answers)
        return made

    return run


def gather_block_tables(
    self: Any,
    idx_mapping: Tensor,
    num_reqs_padded: int,
    out: tuple[Tensor, ...] | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    """`BlockTables.gather_block_tables`, of groups without a sliding window."""
    targets = self.input_block_tables if out is None else out
    for source, target, counts in zip(
        self.block_tables, targets, self.num_blocks.gpu, strict=True
    ):
        for row, slot in enumerate(idx_mapping.tolist()):
            target[row, : counts[slot]] = source.gpu[slot, : counts[slot]]
        target[len(idx_mapping) : num_reqs_padded] = 0
    return tuple(table[:num_reqs_padded] for table in targets)


def compute_slot_mappings(
    self: Any,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    num_tokens_padded: int,
    out: Tensor | None = None,
) -> Tensor:
    """`BlockTables.compute_slot_mappings`."""
    target = self.slot_mappings if out is None else out
    starts = query_start_loc[: len(idx_mapping) + 1].numpy()
    slots = np.repeat(idx_mapping.numpy(), np.diff(starts))
    pos = positions[: starts[-1]].numpy()
    target.fill_(-1)
    for group, (table, size) in enumerate(
        zip(self.block_tables, self.block_sizes, strict=True)
    ):
        mapping = (
            table.gpu.numpy()[slots, pos // size].astype(np.int64) * size + pos % size
        )
        target[group, : len(mapping)] = torch.from_numpy(
            np.where(slots < 0, -1, mapping)
        )
    return target[:, :num_tokens_padded]


def read_prompts(
    input_ids: Tensor,
    following: Tensor,
    slots: Tensor,
    starts: Tensor,
    texts: Tensor,
    prefill: Tensor,
    computed: Tensor,
    **_: int,
) -> None:
    """`_prepare_prefill_inputs_kernel`."""
    for row, slot in enumerate(slots.tolist()):
        done = int(computed[slot])
        whole = int(prefill[slot])
        (begin, end) = starts[row : row + 2].tolist()
        if done < whole:
            after = done + end - begin
            input_ids[begin:end] = texts[slot, done:after]
            for i in range(len(following)):
                following[i, slot] = texts[slot, after + i] if after + i < whole else 0


def place(
    pos: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    starts: Tensor,
    computed: Tensor,
    **_: int,
) -> None:
    """`_prepare_pos_seq_lens_kernel`."""
    seq_lens[len(slots) :] = 0
    for row, done in enumerate(computed[slots].tolist()):
        begin, end = starts[row : row + 2].tolist()
        seq_lens[row] = done + end - begin
        pos[begin:end] = torch.arange(done, done + end - begin)


def read_drafts(
    input_ids: Tensor,
    slots: Tensor,
    last: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    prefill: Tensor,
    drafts: Tensor,
    cu_num_logits: Tensor,
    logits_indices: Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_: int,
) -> None:
    """`_combine_sampled_and_draft_tokens_kernel`."""
    assert NUM_NEW_SAMPLED_TOKENS == 1
    for row, slot in enumerate(slots.tolist()):
        first, after = cu_num_logits[row : row + 2].tolist()
        end = int(starts[row + 1])
        length = int(seq_lens[row])
        whole = int(prefill[slot])
        begin = end - (after - first)
        logits_indices[first:after] = torch.arange(begin, end)
        if length > whole:
            if length - (after - first) >= whole:
                input_ids[begin] = last[slot].view(-1)[0]
            input_ids[begin + 1 : end] = drafts[slot, : after - first - 1]


def expand(
    slots: Tensor, expanded: Tensor, local: Tensor, cu_num_logits: Tensor, **_: int
) -> None:
    """`_expand_idx_mapping_kernel`."""
    counts = cu_num_logits[: len(slots) + 1].diff()
    expanded.copy_(slots.repeat_interleave(counts))
    local.copy_(torch.cat([torch.arange(n) for n in counts.tolist()]))


def count(
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    slots: Tensor,
    prefill: Tensor,
) -> None:
    """`_get_num_sampled_and_rejected_kernel`."""
    reading = seq_lens[: len(slots)] < prefill[slots]
    num_sampled[reading] = 0
    num_rejected.copy_(
        (cu_num_logits[: len(slots) + 1].diff() - num_sampled) * ~reading
    )


def append(
    slots: Tensor,
    computed: Tensor,
    last: Tensor,
    written: Tensor | None,
    sampled: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    starts: Tensor | None,
    texts: Tensor,
    total_len: Tensor,
    drafts: Tensor | None = None,
    *_: Any,
    **__: int,
) -> None:
    """`_post_update_kernel`, of the last pipeline rank."""
    assert written is not None and starts is not None and drafts is None
    for row, slot in enumerate(slots.tolist()):
        got = int(num_sampled[row])
        length = int(total_len[slot])
        if slot < 0:
            continue
        new = sampled[row, :got]
        if got:
            last[slot] = new[-1]
            total_len[slot] = length + got
            texts[slot, length : length + got] = new
            np.add.at(written[slot].numpy(), new.numpy(), 1)
        computed[slot] += starts[row + 1] - starts[row] - num_rejected[row]


def mask(
    logits: Tensor,
    places: Tensor,
    cu_num_logits: Tensor,
    bits: Tensor,
    MASK_STRIDE: int,
    **_: int,
) -> None:
    """`_apply_grammar_bitmask_kernel`."""
    for row, place in enumerate(places.tolist()):
        request, local = divmod(place, MASK_STRIDE)
        first, after = cu_num_logits[request : request + 2].tolist()
        if first + local < after:
            allowed = np.unpackbits(
                bits[row].numpy().view(np.uint8), bitorder="little"
            )[: logits.shape[1]]
            logits.numpy()[first + local, allowed == 0] = NEVER


def flatten(
    flat: Tensor, sampled: Tensor, num_sampled: Tensor, cu_num_logits: Tensor, **_: int
) -> None:
    """`_flatten_sampled_kernel`."""
    for row, (got, first) in enumerate(
        zip(num_sampled.tolist(), cu_num_logits.tolist(), strict=False)
    ):
        flat[first : first + got] = sampled[row, :got]


def leave_out(
    logits: Tensor,
    slots: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    **_: int,
) -> None:
    """`leave_out` of `das_adapter.engine.v2.sampling_limits`."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    limits = (temperature, top_k, top_p, min_p)
    heat, k, p, least = (of[slots.clamp(min=0)] for of in limits)
    some = (slots >= 0) & (heat > 0) & ((k < logits.shape[1]) | (p < 1) | (least > 0))
    if some.any():
        rows = logits[some].float() / heat[some, None]
        rows.masked_fill_(
            rows - rows.amax(1, keepdim=True) < least[some, None].log(), -torch.inf
        )
        within = apply_top_k_top_p_pytorch(rows, k[some], p[some])
        logits[some] = logits[some].masked_fill(within == -torch.inf, -torch.inf)


def sum_others(
    parts: Tensor,
    logits: Tensor,
    drawn: Tensor,
    slots: Tensor,
    temperature: Tensor,
    BLOCK: int,
    **_: int,
) -> None:
    """`sum_others` of `das_adapter.engine.v2.confidence`."""
    known = slots >= 0
    rows = logits[known].float().numpy()
    token = drawn[known, None].numpy()
    heat = temperature[slots[known]].numpy()
    heat = np.where(heat > 0, heat, F(1))[:, None]
    own = np.take_along_axis(rows, token, 1)
    np.put_along_axis(rows, token, NEVER, 1)
    beside = np.full((len(rows), parts.shape[1] * BLOCK), F(0))
    beside[:, : rows.shape[1]] = np.exp(np.minimum((rows - own) / heat, F(40)))
    parts[known] = torch.from_numpy(
        beside.reshape(len(rows), parts.shape[1], BLOCK).sum(2)
    )


def write_kind(
    kinds: Tensor,
    chances: Tensor,
    parts: Tensor,
    slots: Tensor,
    steps: Tensor,
    table: Tensor,
    EACH: int,
    **_: int,
) -> None:
    """`write_kind` of `das_adapter.engine.v2.confidence`."""
    from das_adapter.core.confidence import EVEN, KINDS

    rows = (slots >= 0).nonzero()[:, 0]
    odds = -np.log2(np.maximum(parts[rows].numpy().sum(1), F(1e-9)))
    kind = torch.from_numpy(
        np.clip(np.floor(odds).astype(np.int64) + EVEN, 0, KINDS - 1)
    )
    step = steps[rows] if EACH > 1 else steps.expand(len(rows))
    kinds[rows // EACH, step.long()] = kind.to(torch.uint8)
    chances[rows // EACH, step.long()] = table[kind]


def admit(
    shares: Tensor,
    slots: Tensor,
    keys: Tensor,
    chances: Tensor,
    admitted: Tensor,
    cu_num_logits: Tensor,
    query_start_loc: Tensor,
    budget: int,
    requests: int,
    bonus: int,
    PADDED: int,
    **_: int,
) -> None:
    """`admit` of `das_adapter.engine.v2.ranking`."""
    from das_adapter.engine.v2 import ranking

    most, others, _ = shares.numpy()
    number = most
    if budget >= 0:
        key = keys.numpy()[:requests]
        key[:] = -1
        key[:, : chances.shape[1]] = ranking.keys_of(
            shares.numpy(), chances.numpy()[slots.numpy()]
        )
        number = ranking.most_likely(key, budget)
    admitted.numpy()[:requests] = number
    for begins, counts in (
        (cu_num_logits, number + bonus),
        (query_start_loc, number + others),
    ):
        begins[0] = 0
        begins.numpy()[1 : requests + 1] = np.cumsum(counts)
    query_start_loc[requests + 1 :] = query_start_loc[requests].clone()


def gumbel_sample(
    logits: Tensor,
    slots: Tensor,
    temperature: Tensor,
    seed: Tensor,
    pos: Tensor,
    apply_temperature: bool,
    is_drafting: bool = False,
    logits_cache: Tensor | None = None,
    logits_cache_col: Tensor | None = None,
    use_fp64: bool = False,
) -> Tensor:
    """Draw one token a row, as vLLM's `gumbel_sample` does."""
    assert not use_fp64
    if logits_cache is not None and logits_cache_col is not None:
        known = slots >= 0
        column = logits_cache_col.long().expand(len(slots))
        logits_cache[slots[known], column[known]] = logits[known]
    rows = logits.float().numpy()
    at = slots.numpy()
    own = temperature.numpy()[at]
    if apply_temperature:
        rows = rows / np.where(own == 0, F(1), own)[:, None]
    drawn = rows + keyed_noise()(
        seed.numpy()[at], pos.numpy() + (is_drafting << 30), rows.shape[1]
    )
    greedy = own == 0
    return torch.from_numpy(np.where(greedy[:, None], rows, drawn).argmax(1))


def keyed_noise() -> Callable[..., Any]:
    """Return the noise of this vLLM, of seeds and positions int64 [rows] and a size of
    the vocabulary.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    return _philox_noise if hasattr(gumbel, "tldevice") else _murmur_noise


def log1p(x: Any) -> Any:
    """`libdevice.log1p`, which Triton's interpreter lacks."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


def _philox_noise(seed: np.ndarray, pos: np.ndarray, vocab: int) -> Any:
    """Of vLLM 0.29 and 0.30: the key is a draw of its own."""
    keys = _philox(seed.astype(np.uint64), pos.astype(np.uint64)).astype(np.uint64)
    drawn = _philox(keys[:, None], np.arange(vocab, dtype=np.uint64)[None, :]).view(
        np.int32
    )
    u = np.maximum(
        np.where(drawn < 0, ~drawn, drawn).astype(F) * F(4.6566127342e-10),
        F(4.6566127342e-10),
    )
    return -np.log(-np.log1p(-u))


def _philox(key: Any, offset: Any) -> Any:
    """The first word of Philox4x32-10, as `tl.randint`."""
    low = np.uint64(0xFFFFFFFF)
    high = np.uint64(32)
    k0 = key & low
    k1 = key >> high
    zero = np.zeros_like(key + offset)
    c0 = (offset & low) + zero
    c1 = (offset >> high) + zero
    c2 = zero
    c3 = zero
    for _ in range(10):
        a = c0 * np.uint64(0xD2511F53)
        b = c2 * np.uint64(0xCD9E8D57)
        c0 = (b >> high) ^ c1 ^ k0
        c1 = b & low
        c2 = (a >> high) ^ c3 ^ k1
        c3 = a & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return c0.astype(U)


def _murmur_noise(seed: np.ndarray, pos: np.ndarray, vocab: int) -> Any:
    return gumbel(seed, pos, np.arange(vocab), log=np.log)


def temper(logits: Tensor, slots: Tensor, temperature: Tensor, **_: int) -> None:
    """`_temperature_kernel`."""
    rows = logits.numpy()
    own = temperature.numpy()[slots.numpy()]
    hot = (own != 0) & (own != 1)
    rows[hot] /= own[hot, None]


def log_softmax(
    output: Tensor, logits: Tensor, ids: Tensor, BLOCK_SIZE: int, **_: int
) -> None:
    """`_topk_log_softmax_kernel`."""
    rows = logits.float().numpy()
    most = rows.max(1)
    total = np.zeros(len(rows), dtype=F)
    for begin in range(0, rows.shape[1], BLOCK_SIZE):
        part = rows[:, begin : begin + BLOCK_SIZE]
        block = np.zeros((len(rows), BLOCK_SIZE), dtype=F)
        block[:, : part.shape[1]] = np.exp(part - most[:, None])
        total += block.sum(1)
    chosen = np.take_along_axis(rows, ids.numpy(), 1)
    output.copy_(torch.from_numpy(chosen - most[:, None] - np.log(total)[:, None]))


def rank(output: Tensor, logits: Tensor, tokens: Tensor, **_: int) -> None:
    """`_ranks_kernel`."""
    rows = logits.numpy()
    output.copy_(
        torch.from_numpy(
            (rows >= np.take_along_axis(rows, tokens.numpy()[:, None], 1)).sum(1)
        )
    )


def choose_ids(
    output: Tensor,
    valid: Tensor,
    tokens: Tensor,
    likely: Tensor,
    slots: Tensor,
    chosen: Tensor,
    chosen_ids: Tensor,
    NUM_TOPK: int,
    **_: int,
) -> None:
    """`_fill_logprob_token_ids_kernel`."""
    for row, slot in enumerate(slots.tolist()):
        count = int(chosen[slot])
        others = chosen_ids[slot, :count] if count else likely[row, :NUM_TOPK]
        output[row, : 1 + len(others)] = torch.cat((tokens[row : row + 1], others))
        valid[row, : 1 + len(others)] = True


def penalise(
    logits: Tensor,
    slots: Tensor,
    fed: Tensor,
    local: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    in_prompt: Tensor,
    written: Tensor,
    **_: int,
) -> None:
    """`_penalties_kernel`."""
    rows = logits.numpy()
    places = local.tolist()
    for row, slot in enumerate(slots.tolist()):
        again, often, there = (F(x[slot]) for x in (repetition, frequency, presence))
        if (again, often, there) == (1, 0, 0):
            continue
        counts = written[slot].numpy().copy()
        np.add.at(counts, fed[row - places[row] + 1 : row + 1].numpy(), 1)
        if again != 1:
            bits = np.unpackbits(
                in_prompt[slot].numpy().view(np.uint8), bitorder="little"
            )[: rows.shape[1]]
            scale = np.where((bits > 0) | (counts > 0), again, F(1))
            rows[row] *= np.where(rows[row] > 0, F(1) / scale, scale)
        rows[row] -= often * counts.astype(F)
        rows[row] -= there * (counts > 0).astype(F)


def bias_logits(
    logits: Tensor,
    slots: Tensor,
    allowed: Tensor,
    allowed_ids: Tensor,
    biased: Tensor,
    biased_ids: Tensor,
    bias: Tensor,
    pos: Tensor,
    least: Tensor,
    stops: Tensor,
    restored: Tensor,
    stop_ids: Tensor,
    CHECK_ALL_MASKED_ROWS: bool,
    **_: int,
) -> None:
    """`_bias_kernel`: allowed tokens, bias, and no stop before `min_tokens`."""
    for row, slot, place in zip(
        logits.numpy(), slots.tolist(), pos.tolist(), strict=True
    ):
        if count := int(allowed[slot]):
            some = allowed_ids[slot, :count].numpy()
            kept = row[some]
            row[:] = NEVER
            row[some] = kept
        if count := int(biased[slot]):
            some = biased_ids[slot, :count].numpy()
            row[some] = row[some] + bias[slot, :count].numpy()
        if (count := int(stops[slot])) and place + 1 < int(least[slot]):
            some = stop_ids[slot, :count].numpy()
            kept = row[some]
            row[some] = NEVER
            if CHECK_ALL_MASKED_ROWS and restored[slot] and row.max() == NEVER:
                row[some[np.isfinite(kept)]] = kept[np.isfinite(kept)]


def forbid_words(
    logits: Tensor,
    slots: Tensor,
    words: Tensor,
    offsets: Tensor,
    number: Tensor,
    texts: Tensor,
    prompt_len: Tensor,
    total_len: Tensor,
    fed: Tensor,
    local: Tensor,
) -> None:
    """`_bad_words_kernel`."""
    rows = logits.numpy()
    places = local.tolist()
    for row, slot in enumerate(slots.tolist()):
        for word in range(int(number[slot])):
            begin, end = offsets[slot, word : word + 2].tolist()
            *before, last = words[slot, begin:end].tolist()
            written = texts[slot, int(prompt_len[slot]) : int(total_len[slot])].tolist()
            written += fed[row - places[row] + 1 : row + 1].tolist()
            if (
                len(before) <= len(written)
                and written[len(written) - len(before) :] == before
            ):
                rows[row, last] = NEVER


def cut_improbable(logits: Tensor, slots: Tensor, min_p: Tensor, **_: int) -> None:
    """`_min_p_kernel`."""
    rows = logits.numpy()
    least = min_p.numpy()[slots.numpy()]
    some = np.flatnonzero(least)
    threshold = rows[some].max(1) + np.log(least[some])
    rows[some] = np.where(rows[some] < threshold[:, None], NEVER, rows[some])
