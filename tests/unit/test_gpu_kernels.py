"""What only shows where kernels are compiled: none is compiled anew in the middle of a rollout."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from das_adapter.core.index import SuffixIndex  # noqa: E402
from das_adapter.engine.v1 import keyed_sample  # noqa: E402
from das_adapter.engine.v1.keyed_sample import Keys  # noqa: E402
from das_adapter.engine.v2 import search, votes  # noqa: E402
from das_adapter.engine.v2.device_index import DeviceIndex  # noqa: E402


class Launches:
    """Stands in the place of a kernel, and notes for what kinds of arguments Triton would compile it."""

    def __init__(self, kernel: Any, forms: set[Any]) -> None:
        self._kernel, self._forms = kernel, forms

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
            self._forms.add(tuple(self._form(p, given[p.name]) for p in self._kernel.params))

        return launch

    def _form(self, parameter: Any, value: Any) -> Any:
        if parameter.is_constexpr:
            return value
        if isinstance(value, torch.Tensor):
            return value.dtype, parameter.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0
        return type(value), parameter.do_not_specialize or (value == 1, isinstance(value, int) and value % 16 == 0)


def forms(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> dict[str, set[Any]]:
    """Have the kernels of some modules noted instead of launched; return what is noted, by name."""
    noted: dict[str, set[Any]] = defaultdict(set)
    for module in modules:
        for name, kernel in vars(module).copy().items():
            if isinstance(kernel, triton.runtime.JITFunction):
                monkeypatch.setattr(module, name, Launches(kernel, noted[name]))
    return noted


def test_sampling_is_compiled_once_whatever_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, vocabulary = forms(monkeypatch, keyed_sample), 152_064
    many = Keys(torch.arange(40), torch.arange(40))
    for count in range(1, 40):
        keys, temperature = many.at(slice(40 - count, 40)), torch.ones(40)[40 - count :]
        logits = torch.as_strided(torch.empty(vocabulary, dtype=torch.bfloat16), (count, vocabulary), (0, 1))
        keyed_sample.triton_sample(logits, temperature, keys, "raw")
        keyed_sample.triton_divide(logits, temperature)
    assert {name: len(noted[name]) for name in ("_draw_blocks", "_best_of_blocks", "_count_likelier", "_divide")} == {
        "_draw_blocks": 1,
        "_best_of_blocks": 1,
        "_count_likelier": 1,
        "_divide": 1,
    }


def test_drafting_on_the_device_compiles_nothing_after_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, slots = forms(monkeypatch, search, votes), 24
    index = DeviceIndex(torch.zeros(slots, 64, dtype=torch.int32), 4, 2**12, 0.02, 100)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda _: pytest.MonkeyPatch.context())
    index.capture([8])
    index._graphs.clear()  # as for a batch above the largest graph
    captured = {name: set(kinds) for name, kinds in noted.items()}
    total = torch.full((slots,), 20, dtype=torch.int32)
    for count in range(1, slots):
        index.open([(slot, 1, 5) for slot in range(count)])
        index.draft(torch.arange(count), torch.ones(count, dtype=torch.int32), total)
        index.close([(slot, 30) for slot in range(count)], total)
    assert set(noted) >= {"learn", "estimate", "search_sealed", "scan_live", "merge_live", "vote", "keep_texts"}
    assert {name: kinds - captured[name] for name, kinds in noted.items() if kinds - captured[name]} == {}


def test_nothing_on_v2_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the device `meta` have no contents: whoever reads one on the host raises."""
    pytest.importorskip("vllm")
    from vllm.v1.worker.gpu.sample import gumbel

    from das_adapter.engine.v2.verification import accept_drawn

    meta = torch.device("meta")
    noted, slots = forms(monkeypatch, search, votes), 4
    history = SuffixIndex()
    history.add(1, np.arange(30, dtype=np.int32), 0)
    history.seal()
    index = DeviceIndex(torch.zeros(slots, 64, dtype=torch.int32, device=meta), 4, 2**12, 0.02, 100)
    total = torch.zeros(slots, dtype=torch.int32, device=meta)
    index.weigh(history.fading)
    for _ in range(2):
        index.open([(slot, 1, 5) for slot in range(slots)])
        assert index.bring(history)
        slots_of_batch = torch.arange(slots, device=meta)
        assert index.draft(slots_of_batch, torch.ones(slots, dtype=torch.int32, device=meta), total).shape == (slots, 4)
        index.close([(slot, 30) for slot in range(slots)], total)
    assert sum(map(bool, noted.values())) == 7
    with pytest.raises(RuntimeError):
        total.tolist()

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    monkeypatch.setattr(gumbel, "gumbel_sample", lambda logits, *_, **__: empty(torch.int64, len(logits)))
    long, short = torch.int64, torch.int32
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


def test_a_dummy_run_compiles_what_rollouts_draw_with(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    from das_adapter.engine.v1 import verification

    drawn, stock = set(), verification.keyed_sample

    def noting(logits: Any, temperature: Any, keys: Any, scores: Any = None) -> Any:
        drawn.add((logits.dtype, scores))
        return stock(logits, temperature, keys, scores)

    monkeypatch.setattr(verification, "keyed_sample", noting)
    none, ones = torch.zeros(2), torch.ones(2)
    dummy = SamplingMetadata(
        temperature=ones,
        all_greedy=False,
        all_random=False,
        top_p=ones * 0.9,
        top_k=torch.tensor([5, 5]),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[], []],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    verification.KeyedSampler()(torch.from_numpy(np.eye(2, 9, dtype=np.float32)).bfloat16(), dummy)
    assert drawn >= set(product((torch.bfloat16, torch.float32), (None, "raw", "processed")))


TYPES = {
    **dict.fromkeys(("temperatures", "found", "logprobs", "chosen"), "*fp32"),
    **dict.fromkeys(("seeds", "positions", "tokens", "ranks"), "*i64"),
    **dict.fromkeys(("stride", "vocab", "blocks"), "i32"),
}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_sampling_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int) -> None:
    """Without one: Triton brings its own assembler. All forms for one kind of GPU, one for the others."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    drawn = [("*bf16", 0), ("*bf16", 1), ("*bf16", 2), ("*fp32", 0)] if capability == 90 else [("*bf16", 1)]
    forms = [(keyed_sample._divide, "*fp32", 0), (keyed_sample._count_likelier, "*bf16", 0)]
    forms += [(kernel, *form) for kernel in (keyed_sample._draw_blocks, keyed_sample._best_of_blocks) for form in drawn]
    for kernel, kind, score in forms:
        given = {"SCORES": score, "BLOCK": keyed_sample._BLOCK, "BLOCKS": 64}
        constants = {(i,): given[name] for i, name in enumerate(kernel.arg_names) if name.isupper()}
        signature = {
            name: "constexpr" if name.isupper() else (TYPES | {"logits": kind})[name] for name in kernel.arg_names
        }
        compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]
        assert ".f64" not in compiled.asm["ptx"]  # twenty and more times slower on many GPUs
        assert compiled.metadata.shared < 48 * 1024
