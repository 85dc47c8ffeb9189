"""vLLM's Triton kernels of recurrent layers in the interpreter: what stands in for them
computes the same, whatever was drafted and accepted before. `test_v2_kernels.py` runs it
in a process of its own.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import recurrent_layers
import torch
import v2_cpu  # noqa: F401  # before vLLM: it has Triton take the CPU for a device
import vllm
import vllm.v1.worker.cpu.model_runner  # it replaces parts of torch
from triton.runtime.interpreter import InterpreterBuilder
from vllm.platforms import current_platform
from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder

from das_adapter.engine import recurrent

REQUESTS = 3
DRAFTED = 3
STEPS = 8
SLOTS = 1 + REQUESTS * (1 + DRAFTED)


@pytest.fixture(autouse=True)
def masks_of_bools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter take masks that it has made integers of."""
    for name in ("create_masked_load", "create_masked_store"):
        stock = getattr(InterpreterBuilder, name)
        place = list(inspect.signature(stock).parameters).index("mask")

        def masked(*args: Any, stock: Any = stock, place: int = place) -> Any:
            args[place].data = args[place].data.astype(bool)
            return stock(*args)

        monkeypatch.setattr(InterpreterBuilder, name, masked)


def for_gpu(name: str) -> Any:
    """Return vLLM's module of kernels as it is on a GPU; on a CPU others stand in their
    place.
    """
    path = Path(vllm.__file__).parent / "model_executor/layers/mamba/ops" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_for_gpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with mock.patch.object(type(current_platform), "is_cpu", lambda _: False):
        spec.loader.exec_module(module)
    return module


class Batch:
    """Steps of requests with drafts of random lengths, of which random numbers are
    accepted.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.accepted = torch.ones(REQUESTS, dtype=torch.int32)
        self.slots = torch.arange(1, SLOTS, dtype=torch.int32).view(REQUESTS, -1)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each request's tokens begin in the next step, and how many were
        accepted in the last one.
        """
        accepted = self.accepted
        tokens = self._rng.integers(1, DRAFTED + 2, REQUESTS)
        starts = torch.tensor([0, *np.cumsum(tokens)], dtype=torch.int32)
        self.accepted = torch.tensor(
            [int(self._rng.integers(1, count + 1)) for count in tokens],
            dtype=torch.int32,
        )
        return starts, accepted


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("drafts", [True, False])
def test_convolutions(drafts: bool) -> None:
    kernels = for_gpu("causal_conv1d")
    torch.manual_seed(0)
    channels = 24
    width = 4
    weight = torch.randn(channels, width)
    bias = torch.randn(channels)
    ours = torch.randn(SLOTS, channels, width - 1 + DRAFTED)
    theirs = ours.clone()
    batch = Batch(0)
    for _ in range(STEPS):
        starts, accepted = batch.step()
        more: dict[str, Any] = {
            "query_start_loc": starts,
            "num_accepted_tokens": accepted,
            "max_query_len": 1 + DRAFTED,
        }
        count = int(starts[-1])
        if not drafts:
            more = {}
            count = REQUESTS
        x = torch.randn(count, channels)
        slots = batch.slots[:, 0].contiguous()
        args = (weight, bias, "silu")
        mine = recurrent_layers.convolve_steps(
            x.clone(), ours, *args, conv_state_indices=slots, **more
        )
        stock = kernels.causal_conv1d_update(
            x.clone(), theirs, *args, conv_state_indices=slots, **more
        )
        equal(mine, stock)


@pytest.mark.parametrize("drafts", [True, False])
def test_mamba2(drafts: bool) -> None:
    kernels = for_gpu("mamba_ssm")
    torch.manual_seed(0)
    heads, dim, size, groups = 4, 16, 16, 2
    a = -torch.rand(heads, 1, 1).expand(heads, dim, size)
    d = torch.randn(heads, 1).expand(heads, dim)
    dt_bias = torch.randn(heads, 1).expand(heads, dim)
    ours = torch.randn(SLOTS, heads, dim, size)
    theirs = ours.clone()
    batch = Batch(1)
    for _ in range(STEPS):
        starts, accepted = batch.step()
        more: dict[str, Any] = {"cu_seqlens": starts, "num_accepted_tokens": accepted}
        count = int(starts[-1])
        slots = batch.slots
        if not drafts:
            more = {}
            count = REQUESTS
            slots = slots[:, :1].contiguous()
        x = torch.randn(count, heads, dim)
        dt = torch.randn(count, heads, 1).expand(count, heads, dim)
        b, c = torch.randn(2, count, groups, size)
        mine, stock = torch.zeros(2, count, heads, dim)
        more |= {"state_batch_indices": slots, "dst_state_batch_indices": slots}
        given = (x, dt, a, b, c, d)
        recurrent_layers.update_mamba2(ours, *given, dt_bias, out=mine, **more)
        kernels.selective_state_update(
            theirs, *given, dt_bias=dt_bias, dt_softplus=True, out=stock, **more
        )
        equal(mine, stock)
        equal(ours, theirs)


@pytest.mark.parametrize("drafts", [True, False])
def test_deltanet(drafts: bool) -> None:
    torch.manual_seed(0)
    heads, value_heads, dim = 2, 4, 16
    a_log = torch.randn(value_heads)
    dt_bias = torch.randn(value_heads)
    ours = torch.randn(SLOTS, value_heads, dim, dim)
    theirs = ours.clone()
    batch = Batch(2)
    for _ in range(STEPS):
        starts, accepted = batch.step()
        slots = batch.slots
        more: dict[str, Any] = {"num_accepted_tokens": accepted}
        if not drafts:
            more = {}
            starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
            slots = slots[:, 0].contiguous()
        count = int(starts[-1])
        a, b = torch.randn(2, count, value_heads)
        q, k = torch.randn(2, 1, count, heads, dim)
        v = torch.randn(1, count, value_heads, dim)
        more |= {"cu_seqlens": starts, "ssm_state_indices": slots}
        more["use_qk_l2norm_in_kernel"] = True
        given = (a_log, a, b, dt_bias, q, k, v)
        mine, _ = recurrent_layers.update_deltanet(*given, initial_state=ours, **more)
        stock, _ = fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update(
            *given, initial_state=theirs, **more
        )
        equal(mine, stock)
        equal(ours, theirs)


def common(tokens: list[int], prefills: list[bool] | None = None) -> Any:
    """What all builders of metadata are given, of requests with so many tokens."""
    starts = torch.tensor([0, *np.cumsum(tokens)], dtype=torch.int32)
    count = len(tokens)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.full((count,), 8, dtype=torch.int32),
        num_reqs=count,
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(tokens),
        max_seq_len=8,
        block_table_tensor=torch.zeros(count, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        is_prefilling=None if prefills is None else torch.tensor(prefills),
    )


def test_graphs_of_any_draft_length_are_captured() -> None:
    stock = BaseMambaAttentionMetadataBuilder.build_for_cudagraph_capture
    ours = recurrent.capture_any_length.replacement(stock)
    builder = SimpleNamespace(
        num_spec_tokens=DRAFTED,
        decode_cudagraph_max_bs=8,
        build=lambda _, given, num_accepted_tokens: (given, num_accepted_tokens),
    )
    for tokens in (1, 2, 1 + DRAFTED):
        given, accepted = ours(builder, common([tokens] * 2))
        assert accepted.tolist() == [tokens] * 2
        assert given.query_start_loc.tolist() == [0, tokens, 2 * tokens]
    with pytest.raises(AssertionError):
        stock(builder, common([1, 1]))
    with pytest.raises(AssertionError, match="decode-only"):
        ours(builder, common([2 + DRAFTED] * 2))


def test_before_0_32_requests_without_drafts_begin_with_their_accepted_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = list[Any]()

    def stock(*given: Any) -> None:
        told.append(given[4] if given[4] is None else given[4].tolist())

    patch = recurrent.begin_with_accepted_state
    assert patch.replacement(stock) is stock
    monkeypatch.setattr(recurrent.compat, "version", lambda _: "0.31.0")
    build = patch.replacement(stock)
    builder = SimpleNamespace(num_spec=DRAFTED)
    drafted = torch.tensor([-1, 0, 2, -1, -1, -1])
    tokens = [1, 1, 3, 1, 9, 0]
    decodes = [False, False, False, True, True, False]
    build(builder, 0, common(tokens, decodes), None, drafted)
    build(builder, 0, common(tokens), None, drafted)
    build(builder, 0, common(tokens, decodes), None, None)
    assert told == [[1, 1, 2, -1, -1, -1], [1, 1, 2, 1, -1, -1], None]
    assert drafted.tolist() == [-1, 0, 2, -1, -1, -1]
