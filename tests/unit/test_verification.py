"""Verification without an engine: on the V1 runner its chunks, what is asked of a host,
and with which probabilities drafts were drawn; on V2 steps whose drafts are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from vllm import SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.v1.sample.logits_processor import (  # noqa: E402
    BatchUpdate,
    LogitsProcessors,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402

from das_adapter.engine.front_end import (  # noqa: E402
    SHARDED,
    VERIFIES,
    judge_row_processors,
)
from das_adapter.engine.v1 import verification  # noqa: E402
from das_adapter.engine.v1.keyed_sample import Keys  # noqa: E402
from das_adapter.engine.v1.model_source import (  # noqa: E402
    ModelSource,
    of_draft_tokens,
    stretches,
)
from das_adapter.engine.v1.verification import (  # noqa: E402
    KeyedRejectionSampler,
    KeyedSampler,
    draw,
    of_rows,
)
from das_adapter.engine.v2.verification import (  # noqa: E402
    drop_drafts_beside_chosen_tokens,
)

SAMPLES = 2000
VOCABULARY = 50
DRAFTED = [3, 0, 7, 2, 1, 5]
ROWS = sum(DRAFTED) + len(DRAFTED)


def metadata(device: str, **changed: Any) -> SamplingMetadata:
    """Return vLLM's description of how the requests are sampled."""
    ones = torch.ones(len(DRAFTED), device=device)
    none = torch.zeros(0, device=device)
    usual = {
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
    }
    return SamplingMetadata(**{**usual, **changed})


def verified(device: str, **changed: Any) -> Any:
    """Verify drafts of zeros; return vLLM's output."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCABULARY, generator=generator).to(device)
    drafts = SpecDecodeMetadata.make_dummy(
        [[0] * count for count in DRAFTED], torch.device(device)
    )
    sampler = KeyedSampler()
    sampler.keys = Keys(torch.arange(ROWS).to(device), torch.arange(ROWS).to(device))
    return KeyedRejectionSampler(sampler, None, torch.device(device))(
        drafts, None, logits, metadata(device, **changed)
    )


def test_no_more_logits_are_processed_at_once_than_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.parametrize("rows", [ROWS, 5])
def test_min_tokens_hold_of_the_request_that_asked_in_each_chunk(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request joins beside drafts, and all tokens but one would end it."""
    joins = DRAFTED.index(0)
    free = verified("cpu").sampled_token_ids[:, 0].tolist()
    only = next(token for token in range(VOCABULARY) if token not in free)
    asked = SamplingParams(
        min_tokens=1,
        stop_token_ids=[token for token in range(VOCABULARY) if token != only],
    )
    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    processor.update_state(
        BatchUpdate(len(DRAFTED), removed=[], added=[(joins, asked, [1], [])], moved=[])
    )
    monkeypatch.setattr(verification, "_CHUNK_BYTES", 4 * VOCABULARY * rows)
    for _ in range(2):  # vLLM's processor is as it was
        output = verified("cpu", logitsprocs=LogitsProcessors([processor]))
        assert output.sampled_token_ids[:, 0].tolist() == [
            *free[:joins],
            only,
            *free[joins + 1 :],
        ]


@pytest.mark.parametrize("drafts", [[[], []], [[4, 4], [4]]])
def test_a_thinking_budget_ends_the_thoughts_of_its_own_request(
    drafts: list[list[int]],
) -> None:
    """The second request has used its budget up, in an engine that speculates; all
    would write 4.
    """
    state = pytest.importorskip("vllm.v1.sample.thinking_budget_state")
    begin = 17
    end = 18
    texts = [[5, 5], [17, 4, 4]]
    reasoning = SimpleNamespace(
        reasoning_start_token_ids=[begin], reasoning_end_token_ids=[end]
    )
    holder = state.maybe_create_thinking_budget_state_holder(
        reasoning, 2, 16, torch.device("cpu"), False
    )
    asked = SamplingParams(thinking_token_budget=2)
    holder.sync_batch(
        BatchUpdate(2, removed=[], added=[(1, asked, [1], texts[1])], moved=[])
    )
    rows = len(drafts) + sum(map(len, drafts))
    logits = torch.zeros(rows, VOCABULARY)
    sampler = KeyedSampler()
    logits[:, 4] = 30.0
    sampler.keys = Keys(torch.arange(rows), torch.arange(rows))
    told = {
        "output_token_ids": texts,
        "spec_token_ids": drafts,
        "thinking_budget_state_holder": holder,
    }
    sampling = metadata("cpu", temperature=torch.ones(2), **told)
    if any(drafts):
        given = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
        output = KeyedRejectionSampler(sampler, None, torch.device("cpu"))(
            given, None, logits, sampling
        )
    else:
        output = sampler(logits, sampling)
    assert output.sampled_token_ids[:, 0].tolist() == [4, end]


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without content: whoever wanted to read them would fail."""

    def drawn(logits: Any, _: Any) -> Any:
        return torch.empty(len(logits), dtype=torch.int64, device="meta")

    monkeypatch.setattr(verification, "keyed_sample", drawn)
    output = verified("meta")
    assert output.sampled_token_ids.shape == (len(DRAFTED), max(DRAFTED) + 1)
    with pytest.raises(NotImplementedError):
        output.sampled_token_ids.cpu()


@dataclass
class Batch:
    """What is read of vLLM's `InputBatch`."""

    cu_num_logits: Any
    cu_num_logits_np: Any
    logits_indices: Any
    expanded_idx_mapping: Any
    expanded_local_pos: Any
    num_reqs: int = len(DRAFTED)
    num_draft_tokens: int = sum(DRAFTED)
    idx_mapping: Any = "slots"
    idx_mapping_np: Any = "slots on the host"


@pytest.mark.parametrize("chosen", [0, 3])
def test_a_step_with_chosen_tokens_on_v2_is_drawn_as_one_without_drafts(
    chosen: int,
) -> None:
    ends = np.cumsum([0, *(count + 1 for count in DRAFTED)])
    given = (
        torch.from_numpy(ends).int(),
        ends,
        10 + torch.arange(ROWS),
        torch.arange(ROWS),
        torch.arange(ROWS),
    )
    logits = torch.randn(ROWS, VOCABULARY)
    drawn = []

    def sample(rows: Any, batch: Batch) -> Any:
        drawn.append((rows, batch))
        return SimpleNamespace(
            num_rejected=torch.tensor([0] * len(rows), dtype=torch.int32)
        )

    sample.logprob_token_ids_state = SimpleNamespace(
        max_num_token_ids=lambda slots: chosen
    )  # type: ignore[attr-defined]
    call = drop_drafts_beside_chosen_tokens.replacement(lambda *_: "verified")
    output = call(SimpleNamespace(sampler=sample), logits, Batch(*given), None)
    assert (output == "verified") == (chosen == 0)
    for rows, batch in drawn:
        assert torch.equal(rows, logits[ends[:-1]])
        assert batch.logits_indices.tolist() == [10 + end for end in ends[:-1].tolist()]
        assert (
            batch.cu_num_logits.tolist()
            == batch.cu_num_logits_np.tolist()
            == list(range(len(DRAFTED) + 1))
        )
        assert (batch.expanded_idx_mapping, batch.expanded_local_pos.tolist()) == (
            "slots",
            [0] * len(DRAFTED),
        )
        assert output.num_rejected.tolist() == DRAFTED


def test_chosen_tokens_are_refused_where_ranks_draw_for_parts_of_the_batch() -> None:
    validate = judge_row_processors.replacement(lambda *_: None)
    sharded, whole = (
        SimpleNamespace(**{VERIFIES: 2, SHARDED: value}) for value in (True, False)
    )
    asked, plain = (
        SimpleNamespace(min_tokens=0, logprob_token_ids=ids) for ids in ([3], None)
    )
    with pytest.raises(
        VLLMValidationError,
        match="das: found logprob_token_ids, allowed beside drafts without",
    ):
        validate(asked, sharded)
    for params, engine in ((asked, whole), (plain, sharded), (asked, None)):
        validate(params, engine)


@pytest.mark.parametrize(
    ("runner", "min_tokens", "refused"),
    [(1, 0, False), (1, 1, False), (1, 2, True), (1, 5, True), (2, 2, False)],
)
def test_the_first_token_is_never_drafted_so_that_v1_refuses_min_tokens_from_two_on(
    runner: int, min_tokens: int, refused: bool
) -> None:
    validate = judge_row_processors.replacement(lambda *_: None)
    asked = SimpleNamespace(min_tokens=min_tokens, logprob_token_ids=None)
    engine = SimpleNamespace(**{VERIFIES: runner})
    if not refused:
        validate(asked, engine)
        return
    with pytest.raises(
        VLLMValidationError, match=f"das: found min_tokens={min_tokens}"
    ):
        validate(asked, engine)


def test_a_model_draws_with_the_temperature_and_the_limits_of_the_request() -> None:
    """And says with which probabilities; two requests draw here, of a batch of
    three.
    """
    torch.manual_seed(0)
    logits = torch.randn(2, 5)
    rows = torch.tensor([2, 0])
    temperature = torch.tensor([2.0, 1.0, 0.5])
    top_k = torch.tensor([5, 5, 2], dtype=torch.int32)
    sampling = of_rows(metadata("cpu", temperature=temperature, top_k=top_k), rows)
    first = torch.where(
        logits[0] >= logits[0].topk(2).values[-1], logits[0] / 0.5, -torch.inf
    )
    law = torch.stack([first, logits[1] / 2.0]).softmax(dim=-1)
    counts = torch.zeros(2, 5)
    for _ in range(SAMPLES):
        tokens, probabilities = draw(logits, None, sampling)
        torch.testing.assert_close(probabilities, law)
        counts[[0, 1], tokens] += 1
    assert (
        (counts - SAMPLES * law).abs() <= 4 * (SAMPLES * law * (1 - law)).sqrt()
    ).all()
    greedy = of_rows(
        metadata("cpu", all_random=False, temperature=torch.tensor([2.0, 1.0, 0.0])),
        rows,
    )
    assert all(
        draw(logits, None, greedy)[0][0] == logits[0].argmax() for _ in range(20)
    )
    keys = Keys(torch.arange(2), torch.arange(2))
    assert draw(logits, keys, sampling)[1] is None
    assert draw(logits, None, metadata("cpu", all_greedy=True))[1] is None


def test_what_nobody_drew_is_certain_beside_what_a_model_drew() -> None:
    """A draft of the history, of a model, one that the scheduler has shortened and one
    that it has filled up with nothing, and one whose probabilities are no numbers.
    """
    drafts = [[4, 1], [2, 3], [0], [], [3, -1], [1]]
    metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    some = torch.rand(3, VOCABULARY).softmax(dim=-1)
    drawn_with = {
        "model": some[:2],
        "shortened": some,
        "filled": some[:2],
        "broken": some[:1] * torch.nan,
    }
    req_ids = ["history", "model", "shortened", "none", "filled", "broken"]
    found = of_draft_tokens(drawn_with | {"gone": some}, req_ids, metadata)
    certain = torch.eye(VOCABULARY)[[4, 1]]
    none = torch.zeros(1, VOCABULARY)
    expected = torch.cat([certain, some[:2], some[:1], some[:1], none, none])
    assert torch.equal(found, expected)
    assert found.dtype == torch.float32 and found.is_contiguous()


def test_probabilities_are_told_for_one_step() -> None:
    drafter = SimpleNamespace(
        runner=SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b"]))
    )
    source = ModelSource(drafter, None)  # type: ignore[arg-type]
    given = (
        SpecDecodeMetadata.make_dummy([[4], [2]], torch.device("cpu")),
        None,
        "logits",
        "sampling",
    )
    assert source.tell_probabilities(None, given) is None
    source.drawn_with = {"b": torch.full((1, VOCABULARY), 1 / VOCABULARY)}
    told = source.tell_probabilities(None, given)
    assert told is not None and (told[0], *told[2:]) == (given[0], *given[2:])
    assert told[1].amax(dim=1).tolist() == pytest.approx([1.0, 1 / VOCABULARY])
    assert source.tell_probabilities(None, given) is None


def test_a_model_reads_the_positions_of_each_request_in_turn() -> None:
    found = stretches(np.array([5, 2, 9]), np.array([2, 3, 1]))
    assert found.tolist() == [5, 6, 2, 3, 4, 9]
