"""What only shows where kernels are compiled: they can be, and none is in the middle of
a rollout.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from compiled_kernels import compiled, forms  # noqa: E402
from own_history import OwnHistory  # noqa: E402

from das_adapter.engine.v1 import keyed_sample  # noqa: E402
from das_adapter.engine.v1.keyed_sample import Keys  # noqa: E402
from das_adapter.engine.v2 import (  # noqa: E402
    ranking,
    sampling_limits,
    search,
    votes,
)
from das_adapter.engine.v2.device_index import SCAN, DeviceIndex  # noqa: E402


def test_sampling_is_compiled_once_whatever_the_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = forms(monkeypatch, keyed_sample)
    vocabulary = 152_064
    many = Keys(torch.arange(40), torch.arange(40))
    for count in range(1, 40):
        logits = torch.as_strided(torch.zeros(vocabulary), (count, vocabulary), (0, 1))
        keyed_sample.triton_sample(logits, many.at(slice(40 - count, 40)))
    assert [len(kinds) for kinds in noted.values() if kinds] == [1]


def check_compiled(noted: Any, capability: int, module: Any) -> None:
    (kernel,) = compiled(noted, capability, module)
    assert kernel.asm["cubin"]
    assert ".f64" not in kernel.asm["ptx"]  # twenty and more times slower on many GPUs
    assert kernel.metadata.shared < 48 * 1024


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_sampling_compiles_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        noted = forms(patch, keyed_sample)
        keys = Keys(torch.arange(2), torch.arange(2))
        keyed_sample.triton_sample(torch.zeros(2, 152_064), keys)
    check_compiled(noted, capability, keyed_sample)


def captured(monkeypatch: pytest.MonkeyPatch, slots: int, steps: int) -> DeviceIndex:
    """An index whose kernels are noted, and which has captured a graph that does
    nothing.
    """
    index = DeviceIndex(
        torch.zeros(slots, 64, dtype=torch.int32), steps, 2**12, 0.02, 100
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None)
    )
    monkeypatch.setattr(torch.cuda, "graph", lambda _: pytest.MonkeyPatch.context())
    index.capture([2])
    return index


def test_drafting_on_the_device_compiles_nothing_after_the_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = forms(monkeypatch, search, votes)
    slots = 24
    index = captured(monkeypatch, slots, 4)
    first = {name: set(kinds) for name, kinds in noted.items()}
    total = torch.full((slots,), 20, dtype=torch.int32)
    for count in range(1, slots):  # most are above the largest graph
        index.open([(slot, 1, 5) for slot in range(count)])
        index.draft(torch.arange(count), torch.ones(count, dtype=torch.int32), total)
        index.close([(slot, 30) for slot in range(count)], total)
    assert sum(map(bool, first.values())) == 6
    assert noted == first


def test_drafting_compiles_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(SCAN, "cpu", SCAN["cuda"])
    with pytest.MonkeyPatch.context() as patch:
        noted = forms(patch, search, votes)
        captured(patch, 24, 16)
    found = list(compiled(noted, 90, search, votes))
    assert len(found) == 6
    assert all(
        kernel.asm["cubin"] and kernel.metadata.shared < 48 * 1024 for kernel in found
    )
    assert not any("acq_rel" in kernel.asm["ptx"] for kernel in found)
    (learn,) = (
        kernel.asm["ptx"] for kernel in found if kernel.metadata.name == "learn"
    )
    assert "bar.sync" in learn  # between reading the offers and clearing them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_leaving_out_what_is_beyond_top_k_and_top_p_compiles_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    runner = SimpleNamespace(
        max_num_reqs=4, vocab_size=152_064, device=torch.device("meta")
    )
    of = sampling_limits.SamplingLimits(runner)
    with pytest.MonkeyPatch.context() as patch:
        noted = forms(patch, sampling_limits)
        of.apply(torch.zeros(2, 152_064, dtype=dtype), torch.arange(2), torch.ones(4))
    check_compiled(noted, 90, sampling_limits)


@pytest.mark.parametrize("steps", [1, 7, 128])
def test_admitting_drafts_compiles_for_a_gpu_before_the_first_request_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    admitted, *begins = (
        torch.zeros(length, dtype=torch.int32) for length in (1024, 1025, 1025)
    )
    with pytest.MonkeyPatch.context() as patch:
        noted = forms(patch, ranking)
        of = ranking.Ranking(1024, steps, torch.device("cpu"))
        of.bind(torch.zeros(1024, steps), admitted, *begins, bonus=1)
        with pytest.raises(RuntimeError, match="does not keep to its definition"):
            of.check()  # it computes nothing here
        first = set(noted["admit"])
        for requests in (1, 2, 3, 16, 17, 1024):
            of.admit(
                np.zeros((3, requests), dtype=np.int32),
                torch.arange(1025)[-requests:],
                requests - 1,
            )
    assert noted["admit"] == first
    check_compiled(noted, 90, ranking)


def test_nothing_on_v2_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the device `meta` have no contents: whoever reads one on the host
    raises.
    """
    pytest.importorskip("vllm")
    from vllm.v1.worker.gpu.sample import gumbel

    from das_adapter.engine.v2.verification import accept_drawn

    meta = torch.device("meta")
    noted = forms(monkeypatch, search, votes)
    slots = 4
    history = OwnHistory()
    history.add(1, np.arange(30, dtype=np.int32), 0)
    history.seal()
    index = DeviceIndex(
        torch.zeros(slots, 64, dtype=torch.int32, device=meta), 4, 2**12, 0.02, 100
    )
    total = torch.zeros(slots, dtype=torch.int32, device=meta)
    for _ in range(2):
        index.open([(slot, 1, 5) for slot in range(slots)])
        index.arena.copy_sealed(history)
        slots_of_batch = torch.arange(slots, device=meta)
        assert index.draft(
            slots_of_batch, torch.ones(slots, dtype=torch.int32, device=meta), total
        ).shape == (slots, 4)
        index.close([(slot, 30) for slot in range(slots)], total)
    assert sum(map(bool, noted.values())) == 6
    with pytest.raises(RuntimeError):
        total.tolist()

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    monkeypatch.setattr(
        gumbel,
        "gumbel_sample",
        lambda logits, *_, **__: empty(torch.int64, len(logits)),
    )
    long = torch.int64
    short = torch.int32
    sampled, counts = accept_drawn(
        empty(torch.float32, 10, 100),
        None,
        empty(long, 10),
        empty(short, 5),
        empty(long, 10),
        empty(long, 4),
        empty(long, 10),
        empty(short, 10),
        empty(torch.float32, slots),
        empty(long, slots),
        4,
    )
    assert (tuple(sampled.shape), tuple(counts.shape)) == ((4, 5), (4,))
    monkeypatch.undo()
    (kernel,) = compiled({"accept": noted["accept"]}, 90, votes)
    assert kernel.asm["cubin"]
