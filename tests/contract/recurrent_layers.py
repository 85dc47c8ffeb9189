"""The recurrent layers of a GPU in PyTorch, on a CPU: Gated DeltaNet, Mamba2 and short
convolutions as vLLM's Triton kernels compute them, which go on from the state after the
last accepted token. vLLM's kernels for a CPU do not, or take bfloat16 alone.

Each token is computed by itself: the sums do not depend on how many are computed at
once. `interpreted_recurrent.py` holds them against the kernels.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NULL = 0
"""Block that holds no request's state."""


def install() -> None:
    """Put them in the place of vLLM's layers."""
    from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as deltanet

    for module in (mamba_mixer2, short_conv, deltanet):
        module.causal_conv1d_fn = convolve_prompts
        module.causal_conv1d_update = convolve_steps
    mamba_mixer2.selective_state_update = update_mamba2
    short_conv.ShortConv.forward_native = short_conv.ShortConv.forward_cuda
    deltanet.fused_post_conv_prep = prepare_prompts
    deltanet.fused_sigmoid_gating_delta_rule_update = update_deltanet
    deltanet.ChunkGatedDeltaRule.forward_native = read_prompts
    os.environ["VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE"] = "0"
    layer = deltanet.QwenGatedDeltaNetAttention
    for name, method in (
        ("forward_cpu", layer.forward_cuda),
        ("_warmup_prefill_kernels", lambda *_: None),
    ):
        setattr(layer, name, method)


def rows(starts: Tensor) -> Iterator[tuple[int, int, int]]:
    """Return each sequence's number and its bounds."""
    bounds = starts.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin < end:
            yield row, begin, end


def convolve(
    before: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor | None, activation: Any
) -> Tensor:
    """Return a causal convolution of tokens, [n, channels], behind so many as the
    filter is wide, less one.
    """
    count = len(tokens)
    text = torch.cat([before, tokens])
    sums = torch.zeros_like(tokens) if bias is None else bias.expand_as(tokens).clone()
    for place in range(weight.shape[1]):
        sums += text[place : place + count] * weight[:, place]
    return sums / (1 + torch.exp(-sums)) if activation else sums


def convolve_prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: Any = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_fn`: x is [channels, tokens]."""
    out = torch.empty_like(x)
    kept = weight.shape[1] - 1
    for row, begin, end in rows(query_start_loc):
        state = conv_states[int(cache_indices[row])][:, :kept]
        before = state.T.clone() * bool(has_initial_state[row])
        tokens = x[:, begin:end].T
        out[:, begin:end] = convolve(before, tokens, weight, bias, activation).T
        state.copy_(torch.cat([before, tokens])[-kept:].T)
    return out


def convolve_steps(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_update`: x is [tokens, channels]. The state of a request with
    drafts is that of all its tokens: the next step reads it at the last accepted one.
    """
    assert conv_state_indices is not None
    if query_start_loc is None:
        query_start_loc = torch.arange(len(x) + 1)
    out = torch.empty_like(x)
    kept = weight.shape[1] - 1
    for row, begin, end in rows(query_start_loc[: len(conv_state_indices) + 1]):
        slot = int(conv_state_indices[row].view(-1)[0])
        if slot == NULL:
            continue
        state = conv_state[slot]
        offset = 0
        if num_accepted_tokens is not None:
            offset = int(num_accepted_tokens[row]) - 1
        before = state[:, offset : offset + kept].T.clone()
        tokens = x[begin:end]
        out[begin:end] = convolve(before, tokens, weight, bias, activation)
        written = torch.cat([before, tokens])[1:]
        if num_accepted_tokens is None:
            written = written[-kept:]
        state[:, : len(written)] = written.T
    return out


def slots_of(indices: Tensor, row: int, accepted: Tensor | None) -> tuple[int, Any]:
    """Return where a request's state is, and where the states after its next tokens
    belong.
    """
    own = indices[row].view(-1).tolist()
    first = 0 if accepted is None else int(accepted[row]) - 1
    return own[first], own


def update_mamba2(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    state_batch_indices: Tensor,
    out: Tensor,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> None:
    """`selective_state_update`: the state is [slots, heads, dim, n], x [tokens, heads,
    dim], B and C [tokens, groups, n].
    """
    if cu_seqlens is None:
        cu_seqlens = torch.arange(len(x) + 1)
    heads = x.shape[1]
    for row, begin, end in rows(cu_seqlens[: len(state_batch_indices) + 1]):
        slot, written = slots_of(state_batch_indices, row, num_accepted_tokens)
        if slot == NULL:
            continue
        now = state[slot].float()
        for place, token in enumerate(range(begin, end)):
            step = functional.softplus(dt[token].float() + dt_bias.float())
            group = heads // B.shape[1]
            b = B[token].float().repeat_interleave(group, 0)[:, None]
            c = C[token].float().repeat_interleave(group, 0)[:, None]
            read = x[token].float()
            now = now * torch.exp(A.float() * step[..., None])
            now = now + b * step[..., None] * read[..., None]
            out[token] = ((now * c).sum(-1) + read * D.float()).to(out.dtype)
            if num_accepted_tokens is not None and written[place] != NULL:
                state[written[place]] = now.to(state.dtype)
        if num_accepted_tokens is None:
            state[slot] = now.to(state.dtype)


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what a token reads, [heads, v], and the state after it, [heads, v, k];
    `decay`, `beta`: of each head.
    """
    state = state * torch.exp(decay)[:, None, None]
    missing = (v - (state * k[:, None]).sum(-1)) * beta[:, None]
    state = state + missing[..., None] * k[:, None]
    return (state * q[:, None]).sum(-1), state


def unit(x: Tensor) -> Tensor:
    """Return x with a length of 1 in the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, ...]:
    """Return the logarithm of the decay of each head, and its beta."""
    step = functional.softplus(a.float() + dt_bias.float())
    return -torch.exp(A_log.float()) * step, torch.sigmoid(b.float())


def update_deltanet(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`fused_sigmoid_gating_delta_rule_update`: q and k are [1, tokens, heads, k], v is
    [1, tokens, value heads, v], the state [slots, value heads, v, k].
    """
    out = torch.zeros_like(v)
    group = v.shape[2] // k.shape[2]
    decay, beta = gates(a, b, A_log, dt_bias)
    queries = unit(q[0].float()) * k.shape[-1] ** -0.5
    keys = unit(k[0].float())
    for row, begin, end in rows(cu_seqlens):
        slot, written = slots_of(ssm_state_indices, row, num_accepted_tokens)
        if slot <= NULL:
            continue
        now = initial_state[slot].float()
        for place, token in enumerate(range(begin, end)):
            read, now = delta_rule(
                now,
                queries[token].repeat_interleave(group, 0),
                keys[token].repeat_interleave(group, 0),
                v[0, token].float(),
                decay[token],
                beta[token],
            )
            out[0, token] = read.to(out.dtype)
            if written[place] > NULL:
                initial_state[written[place]] = now.to(initial_state.dtype)
    return out, initial_state


def prepare_prompts(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    **_: Any,
) -> tuple[Tensor, ...]:
    """`fused_post_conv_prep`."""
    sizes = [num_k_heads * head_k_dim] * 2 + [len(A_log) * head_v_dim]
    q, k, v = conv_output.split(sizes, dim=-1)
    q = unit(q.reshape(len(q), num_k_heads, head_k_dim).float())
    k = unit(k.reshape(len(k), num_k_heads, head_k_dim).float())
    v = v.reshape(len(v), len(A_log), head_v_dim)
    return q.to(v.dtype), k.to(v.dtype), v, *gates(a, b, A_log, dt_bias)


def read_prompts(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`ChunkGatedDeltaRule.forward_native`, token by token; the state is [sequences,
    heads, v, k].
    """
    out = torch.zeros_like(v)
    states = initial_state.float().clone()
    group = v.shape[2] // k.shape[2]
    for row, begin, end in rows(cu_seqlens):
        for token in range(begin, end):
            read, states[row] = delta_rule(
                states[row],
                q[0, token].float().repeat_interleave(group, 0) * q.shape[-1] ** -0.5,
                k[0, token].float().repeat_interleave(group, 0),
                v[0, token].float(),
                g[0, token].float(),
                beta[0, token].float(),
            )
            out[0, token] = read.to(out.dtype)
    return out, states
