"""Quantised linear layers: the codes are those of the definition, and every form of the
kernel uses them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from das_adapter import _native  # noqa: E402
from das_adapter.engine.quantised import GROUP, ROWS, quantised  # noqa: E402
from das_adapter.errors import ConfigError  # noqa: E402

SHAPES = [(16, 128), (40, 256), (7, 100), (33, 131), (64, 1)]
BITS = {"int8": 8, "int4": 4}


def reference(weight: np.ndarray, bits: int) -> np.ndarray:
    """float64 [rows, inputs]: the weight after quantising, by the definition."""
    out = np.zeros(weight.shape)
    for g in range(0, weight.shape[1], GROUP):
        w = weight[:, g : g + GROUP].astype(np.float32)
        low = np.minimum(w.min(1), 0)
        high = np.maximum(w.max(1), 0)
        scale = np.where(high > low, (high - low) / np.float32(2**bits - 1), 1).astype(
            np.float32
        )[:, None]
        zero = np.round(-low[:, None] / scale)
        out[:, g : g + GROUP] = scale * (
            np.clip(np.round(w / scale) + zero, 0, 2**bits - 1) - zero
        )
    return out


def rounded_inputs(x: np.ndarray) -> np.ndarray:
    """float64: the inputs after quantising to 8 bits per token and group."""
    out = np.zeros(x.shape)
    for g in range(0, x.shape[1], GROUP):
        part = x[:, g : g + GROUP].astype(np.float32)
        top = np.abs(part).max(1, keepdims=True)
        inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
        out[:, g : g + GROUP] = np.round(part * inverse) * (top / 127)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_multiplies_by_the_rounded_weight(
    shape: tuple[int, int], weights: str, dtype: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    copy = quantised(weight, weights)
    for tokens in (1, 2, 3, 8, 15):
        x = torch.randn(tokens, shape[1], generator=generator).to(dtype)
        expected = (
            rounded_inputs(x.float().numpy())
            @ reference(weight.float().numpy(), BITS[weights]).T
        )
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        np.testing.assert_allclose(
            copy.linear(x).float().numpy(), expected, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("weights", BITS)
def test_the_portable_kernel_gives_the_same_bits(weights: str) -> None:
    weight = torch.randn(48, 300, generator=torch.Generator().manual_seed(1))
    x = torch.randn(11, 300, generator=torch.Generator().manual_seed(2))
    copy = quantised(weight, weights)
    out = torch.empty(11, 48)
    addresses = [t.data_ptr() for t in copy.kept]
    _native.quantised_linear(
        x.data_ptr(),
        False,
        11,
        48,
        300,
        BITS[weights],
        *addresses,
        out.data_ptr(),
        1,
        True,
    )
    assert torch.equal(out, copy.linear(x))


def test_rows_do_not_depend_on_what_else_is_in_the_batch() -> None:
    copy = quantised(
        torch.randn(64, 384, generator=torch.Generator().manual_seed(3)), "int4"
    )
    x = torch.randn(13, 384, generator=torch.Generator().manual_seed(4))
    together = copy.linear(x)
    assert all(
        torch.equal(copy.linear(x[i : i + 1])[0], together[i]) for i in range(13)
    )


def test_quantising_anew_equals_a_fresh_copy_and_moves_nothing() -> None:
    old, new = torch.randn(2, 32, 256, generator=torch.Generator().manual_seed(5))
    copy = quantised(old, "int4")
    places = [t.data_ptr() for t in copy.kept]
    copy.quantise(new)
    assert [t.data_ptr() for t in copy.kept] == places
    for kept, fresh in zip(copy.kept, quantised(new, "int4").kept, strict=True):
        assert torch.equal(kept, fresh)


def test_constant_and_zero_weights_are_exact() -> None:
    copy = quantised(
        torch.cat([torch.zeros(ROWS, GROUP), torch.full((ROWS, GROUP), 0.5)]), "int4"
    )
    y = copy.linear(torch.ones(1, GROUP))
    assert torch.equal(y[0, :ROWS], torch.zeros(ROWS))
    torch.testing.assert_close(y[0, ROWS:], torch.full((ROWS,), 64.0))


def test_memory_is_what_the_bits_say() -> None:
    weight = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    shares = {
        w: sum(t.nbytes for t in quantised(weight, w).kept) / weight.nbytes
        for w in BITS
    }
    assert shares["int8"] < 0.53
    assert shares["int4"] < 0.28


def test_what_a_cpu_lacks_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError,
        match=r"das\.self\.weights: found 'fp8', allowed on cpu: 'int8', 'int4'",
    ):
        quantised(torch.zeros(16, 128), "fp8")
    with pytest.raises(
        ConfigError,
        match=r"torch\.float16, allowed on a CPU: torch\.float32, torch\.bfloat16",
    ):
        quantised(torch.zeros(16, 128, dtype=torch.float16), "int8")


def test_packing_on_the_device_is_vllms() -> None:
    """On any device; vLLM's own functions do it on the host."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        marlin_zero_points,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack

    from das_adapter.engine.quantised_gpu import pack, pack_zeros

    codes = torch.randint(0, 16, (256, 128), generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack(codes.float()), awq_pack(codes, 4, 256, 128))
    assert torch.equal(
        pack_zeros(codes[:4].float()), marlin_zero_points(codes[:4], 4, 128, 4)
    )


def test_experts_are_left_as_they_are() -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    from das_adapter.engine.policy_copy import PolicyCopy

    class Linear(LinearBase):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.quant_method = UnquantizedLinearMethod()
            self.weight = torch.nn.Parameter(torch.randn(32, 128), requires_grad=False)

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w13_weight = torch.nn.Parameter(
                torch.randn(4, 64, 128), requires_grad=False
            )

    policy = torch.nn.Module()
    policy.gate = Linear()
    policy.experts = Experts()
    policy.conv = torch.nn.Conv1d(8, 8, 4)
    copy = PolicyCopy(policy, "int8")
    assert copy.model.experts is policy.experts
    assert [layer for layer, _ in copy.layers] == [policy.gate]


def test_eight_bits_on_a_gpu_multiply_by_the_policys_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what vLLM's kernels promise in their place: a scale per row, and a second
    matrix that lies by columns.
    """
    pytest.importorskip("vllm")
    from das_adapter.engine import quantised_gpu

    def quant(x: Any, use_per_token_if_dynamic: bool) -> Any:
        assert use_per_token_if_dynamic and x.is_contiguous()
        scales = x.float().abs().amax(1, keepdim=True) / 448
        return (x.float() / scales).to(torch.float8_e4m3fn), scales

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any) -> Any:
        assert a.is_contiguous() and b.stride(0) == 1
        assert (scale_a.shape, scale_b.shape) == ((len(a), 1), (1, b.shape[1]))
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(quantised_gpu.ops, "scaled_fp8_quant", quant)
    monkeypatch.setattr(quantised_gpu.ops, "cutlass_scaled_mm", product)
    old, new = torch.randn(
        2, 48, 128, generator=torch.Generator().manual_seed(8)
    ).bfloat16()
    copy = quantised_gpu.Fp8(old)
    copy.quantise(old)
    places = [t.data_ptr() for t in copy.kept]
    copy.quantise(new)
    assert [t.data_ptr() for t in copy.kept] == places
    x = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(9)).bfloat16()
    expected = x.float() @ new.float().T
    error = (copy.linear(x).float() - expected).norm() / expected.norm()
    assert copy.linear(x).shape == expected.shape and 0.0 < error < 0.06


def test_a_gpus_four_bits_are_the_definitions_and_do_not_depend_on_the_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for Marlin's own order of the codes, which only its kernel on a GPU makes."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack

    from das_adapter.engine import quantised_gpu

    workspace = torch.ones(4)
    monkeypatch.setattr(
        quantised_gpu, "marlin_make_workspace_new", lambda device: workspace
    )
    monkeypatch.setattr(
        quantised_gpu.ops, "awq_marlin_repack", lambda packed, *_: packed, raising=False
    )
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(6))
    weight[7] = 0.0
    weight[9] = 0.5
    codes, scales, zeros = quantised_gpu.rounded(weight)
    value = (codes.view(256, 3, 128) - zeros[..., None]) * scales[..., None]
    np.testing.assert_allclose(
        value.view(256, 384), reference(weight.numpy(), 4), atol=1e-6
    )
    whole = quantised_gpu.Int4(weight)
    whole.quantise(weight)
    assert torch.equal(whole.kept[0], awq_pack(codes.t().int(), 4, 384, 256))
    monkeypatch.setattr(quantised_gpu, "_WEIGHTS_AT_ONCE", 64 * 384)
    parts = quantised_gpu.Int4(weight)
    parts.quantise(weight)
    assert all(map(torch.equal, parts.kept, whole.kept))
    assert not workspace.any()
