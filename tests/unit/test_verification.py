"""Verification on the V1 runner, without an engine: its chunks, and what is asked of a host."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from vllm.v1.sample.logits_processor import LogitsProcessors  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402

from das_adapter.engine.v1 import verification  # noqa: E402
from das_adapter.engine.v1.keyed_sample import Keys  # noqa: E402
from das_adapter.engine.v1.verification import KeyedRejectionSampler, KeyedSampler  # noqa: E402

VOCABULARY, DRAFTED = 50, [3, 0, 7, 2, 1, 5]
ROWS = sum(DRAFTED) + len(DRAFTED)


def verified(device: str, **changed: Any) -> Any:
    """Verify drafts of zeros; return vLLM's output."""
    ones, none = torch.ones(len(DRAFTED), device=device), torch.zeros(0, device=device)
    sampling = SamplingMetadata(
        **{
            "temperature": ones,
            "all_greedy": False,
            "all_random": True,
            "top_p": None,
            "top_k": None,
            "generators": {},
            "max_num_logprobs": None,
            "no_penalties": True,
            "prompt_token_ids": None,
            "frequency_penalties": none,
            "presence_penalties": none,
            "repetition_penalties": none,
            "output_token_ids": [],
            "allowed_token_ids_mask": None,
            "bad_words_token_ids": {},
            "logitsprocs": LogitsProcessors(),
            **changed,
        }
    )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCABULARY, generator=generator).to(device)
    drafts = SpecDecodeMetadata.make_dummy([[0] * count for count in DRAFTED], torch.device(device))
    sampler = KeyedSampler()
    sampler.keys = Keys(torch.arange(ROWS).to(device), torch.arange(ROWS).to(device))
    return KeyedRejectionSampler(sampler, None, torch.device(device))(drafts, None, logits, sampling)


def test_no_more_logits_are_processed_at_once_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    stock = KeyedSampler.sample

    def sample(self: Any, logits: Any, *args: Any) -> Any:
        rows.append(len(logits))
        return stock(self, logits, *args)

    monkeypatch.setattr(KeyedSampler, "sample", sample)
    asked = {
        "top_k": torch.full((len(DRAFTED),), 20, dtype=torch.int32),
        "bad_words_token_ids": {2: [[0, 4], [0, 0, 9]]},
        "output_token_ids": [[0]] * len(DRAFTED),
    }
    whole = verified("cpu", **asked)
    assert rows == [ROWS]
    monkeypatch.setattr(verification, "_CHUNK_BYTES", 4 * VOCABULARY * 9)
    parts = verified("cpu", **asked)
    assert rows[1:] == [9, 9, 6]
    assert torch.equal(parts.sampled_token_ids, whole.sampled_token_ids)


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without content: whoever wanted to read them would fail."""

    def drawn(logits: Any, _: Any) -> Any:
        return torch.empty(len(logits), dtype=torch.int64, device="meta")

    monkeypatch.setattr(verification, "keyed_sample", drawn)
    output = verified("meta")
    assert output.sampled_token_ids.shape == (len(DRAFTED), max(DRAFTED) + 1)
    with pytest.raises(NotImplementedError):
        output.sampled_token_ids.cpu()
