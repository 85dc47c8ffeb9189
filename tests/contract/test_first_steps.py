"""What an engine knows of its step times before the first step: sizes of CUDA graphs,
and the roofline of its GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.config import CUDAGraphMode

from das_adapter.config import DasConfig
from das_adapter.core.hardware import DEVICES
from das_adapter.core.roofline import Roofline
from das_adapter.engine import timing
from das_adapter.engine.controller import EngineController
from das_adapter.sim.models import MODELS

SHAPE = {"model_type": "qwen2", **MODELS["Qwen/Qwen2.5-7B"]}


def engine(
    mode: Any = CUDAGraphMode.FULL_AND_PIECEWISE,
    quantization: str | None = None,
    **shape: Any,
) -> Any:
    config = SimpleNamespace(to_dict=lambda: SHAPE | shape)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode, cudagraph_capture_sizes=[8, 1, 2, 4]
        ),
        model_config=SimpleNamespace(
            enforce_eager=False,
            quantization=quantization,
            hf_text_config=config,
            max_model_len=4096,
            get_vocab_size=lambda: 100,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )


def test_sizes_are_those_that_the_engine_captures() -> None:
    assert timing.captured_tokens(engine()) == (1, 2, 4, 8)
    assert timing.captured_tokens(engine(CUDAGraphMode.NONE)) == ()


def test_an_engine_on_a_known_gpu_begins_with_its_roofline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert timing.before_the_first_step(DasConfig(), engine()) is None  # this is a CPU
    gpu = SimpleNamespace(
        is_cuda_alike=lambda: True, get_device_name=lambda: "NVIDIA H100 80GB HBM3"
    )
    monkeypatch.setattr(timing, "current_platform", gpu)
    for quantization, bytes_per_weight in ((None, 2.0), ("fp8", 1.0)):
        found = timing.before_the_first_step(
            DasConfig(), engine(quantization=quantization)
        )
        assert (
            found.steps
            == Roofline.from_config(
                SHAPE, DEVICES["h100"], 2, bytes_per_weight
            ).step_model()
        )
        assert found.passes is None
    copied = timing.before_the_first_step(DasConfig(drafter="self"), engine())
    # int4: 0.357 in the paper
    assert 0.3 < copied.passes.step(1, 1, False) / copied.steps.step(1, 1, False) < 0.4
    assert timing.before_the_first_step(DasConfig(), engine(quantization="awq")) is None
    assert (
        timing.before_the_first_step(DasConfig(), engine(model_type="deepseek_v3"))
        is None
    )
    assert timing.before_the_first_step(DasConfig(speculate=32), engine()) is None


@pytest.mark.parametrize(("on_gpu", "free"), [(False, False), (True, True)])
def test_where_no_roofline_is_known_draft_tokens_cost_nothing_up_to_a_gpus_knee(
    on_gpu: bool, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SimpleNamespace(
        is_cuda_alike=lambda: on_gpu, get_device_name=lambda: "NVIDIA GeForce GTX 1080"
    )
    monkeypatch.setattr(timing, "current_platform", other)
    times = EngineController(DasConfig(), engine()).policy.latency
    assert not times.known
    for _ in range(8):
        times.add(8, 8, False, 0.010)
        times.add(12, 8, True, 0.010)
        times.keep_fitted()
    assert (times.model.step(96, 8, True) == pytest.approx(0.010, rel=0.01)) == free
    # what larger steps take is found out by steps of twice the size
    assert times.max_tokens(8) == 2 * 12
