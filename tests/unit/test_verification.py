"""Verification on the V1 runner, without an engine: its chunks, what is asked of a host, and `min_tokens`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors  # noqa: E402
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402

from das_adapter.engine.v1 import verification  # noqa: E402
from das_adapter.engine.v1.keyed_sample import Drawn, Keys  # noqa: E402
from das_adapter.engine.v1.processors import MinTokens  # noqa: E402
from das_adapter.engine.v1.verification import KeyedRejectionSampler, KeyedSampler  # noqa: E402

VOCABULARY, PROMPT, DRAFTED = 50, 4, [3, 0, 7, 2, 1, 5]
ROWS = sum(DRAFTED) + len(DRAFTED)
CONFIG = SimpleNamespace(
    speculative_config=SimpleNamespace(num_speculative_tokens=7), scheduler_config=SimpleNamespace(max_num_seqs=8)
)


def processors(device: str, params: SamplingParams, output: list[int]) -> LogitsProcessors:
    """vLLM's, and ours, with the same request in every place of the batch."""
    made = [
        kind(CONFIG, torch.device(device), False) for kind in (MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokens)
    ]
    added = [(row, params, [1] * PROMPT, output) for row in range(len(DRAFTED))]
    for processor in made:
        processor.update_state(BatchUpdate(batch_size=len(DRAFTED), removed=[], added=added, moved=[]))
    return LogitsProcessors(made)


def verified(device: str, asked: LogitsProcessors, **changed: Any) -> Any:
    """Verify drafts of zeros, for requests that have written eleven tokens; return vLLM's output."""
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
            "logitsprocs": asked,
            **changed,
        }
    )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCABULARY, generator=generator).to(device)
    drafts = SpecDecodeMetadata.make_dummy([[0] * count for count in DRAFTED], torch.device(device))
    positions = np.concatenate([PROMPT + 10 + np.arange(count + 1) for count in DRAFTED])
    sampler = KeyedSampler()
    sampler.keys = Keys(torch.arange(ROWS).to(device), torch.from_numpy(positions).to(device))
    return KeyedRejectionSampler(sampler, None, torch.device(device))(drafts, None, logits, sampling)


def test_no_more_logits_are_processed_at_once_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    stock = KeyedSampler.forward

    def forward(self: Any, logits: Any, *args: Any) -> Any:
        rows.append(len(logits))
        return stock(self, logits, *args)

    monkeypatch.setattr(KeyedSampler, "forward", forward)
    asked = processors("cpu", SamplingParams(), [])
    truncated = {"top_k": torch.full((len(DRAFTED),), 20, dtype=torch.int32)}
    whole = verified("cpu", asked, **truncated)
    assert rows == [ROWS]
    monkeypatch.setattr(verification, "_CHUNK_BYTES", 4 * VOCABULARY * 9)
    parts = verified("cpu", asked, **truncated)
    assert rows[1:] == [5, 8, 5, 6]  # whole requests, as many as nine rows hold
    assert torch.equal(parts.sampled_token_ids, whole.sampled_token_ids)
    verified("cpu", asked)
    assert rows[-1] == ROWS  # nothing is copied where the draw is fused


@pytest.mark.parametrize(
    "params", [{}, {"min_p": 0.1, "logit_bias": {3: 1.0}, "min_tokens": 14, "stop_token_ids": [5]}]
)
def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]) -> None:
    """Tensors without content: whoever wanted to read them would fail."""

    def drawn(logits: Any, *_: Any) -> Drawn:
        return Drawn(torch.empty(len(logits), dtype=torch.int64, device="meta"))

    monkeypatch.setattr(verification, "keyed_sample", drawn)
    monkeypatch.setattr(verification, "divide", lambda logits, _: logits)
    output = verified("meta", processors("meta", SamplingParams(**params), [0] * 11))
    assert output.sampled_token_ids.shape == (len(DRAFTED), max(DRAFTED) + 1)
    with pytest.raises(NotImplementedError):
        output.sampled_token_ids.cpu()


def test_min_tokens_goes_by_positions_where_vllm_counts_drafts_as_written() -> None:
    """Eleven tokens are written; vLLM's list holds those seven too that were drafted after them."""
    params = SamplingParams(min_tokens=14, stop_token_ids=[5, 6])
    made = next(p for p in processors("cpu", params, [0] * 11 + [-1] * 7).all if isinstance(p, MinTokens))
    assert len(made.min_toks) == len(DRAFTED)  # none is taken to be over
    logits, positions = torch.zeros(8, VOCABULARY), PROMPT + 10 + torch.arange(8)
    made.ban(logits, positions, lambda request: slice(0, 8) if request == 2 else None)
    assert logits[:, 5:7].isneginf().all(dim=1).tolist() == [True] * 3 + [False] * 5  # the 12th to the 14th token
    assert logits[:, :5].eq(0).all() and logits[:, 7:].eq(0).all()
    made.positions = positions[: len(DRAFTED)]
    assert made.apply(torch.zeros(len(DRAFTED), VOCABULARY))[:, 5].isneginf().tolist() == [True] * 3 + [False] * 3
    stop_only = torch.full((8, VOCABULARY), -torch.inf)
    stop_only[:, 5] = 1.0
    made.ban(stop_only, positions, lambda request: slice(0, 8) if request == 2 else None)
    assert stop_only[:, 5].eq(1.0).all()  # as a grammar may have it
