"""The drafter of an engine on vLLM's V1 runner, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from vllm import SamplingParams  # noqa: E402

from das_adapter.engine.v1.proposer import Proposer  # noqa: E402
from das_adapter.protocol.engine_args import SETTINGS_KEY  # noqa: E402
from das_adapter.protocol.messages import Refresh  # noqa: E402

LOOP = [5, 6, 7]
LONGEST = 400


class Engine:
    """Requests that write a loop, and the drafter that looks for what follows."""

    def __init__(
        self, step_tokens: int = 8192, **prompts: list[int] | torch.Tensor
    ) -> None:
        """`step_tokens`: that a step may have; `prompts`: token ids or embeddings."""
        block = {"drafter": "history", "speculate": "always", "budget": "unlimited"}
        model = SimpleNamespace(
            max_model_len=LONGEST,
            get_vocab_size=lambda: 100,
            enforce_eager=True,
            quantization=None,
        )
        self.drafter = Proposer(
            SimpleNamespace(
                additional_config={SETTINGS_KEY: block},
                parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
                speculative_config=SimpleNamespace(),
                scheduler_config=SimpleNamespace(
                    max_num_scheduled_tokens=None, max_num_batched_tokens=step_tokens
                ),
                model_config=model,
                compilation_config=SimpleNamespace(cudagraph_mode=None),
            )
        )
        self.lengths = np.zeros(len(prompts), np.int64)
        self.tokens = np.zeros((len(prompts), LONGEST), np.int32)
        requests: dict[str, Any] = {}
        for row, (req_id, prompt) in enumerate(prompts.items()):
            ids = prompt if isinstance(prompt, list) else None
            requests[req_id] = SimpleNamespace(
                prompt_token_ids=ids,
                prompt_embeds=None if ids else prompt,
                sampling_params=SamplingParams(
                    max_tokens=20, extra_args={"das_problem": row}
                ),
            )
            # what another request has left there
            self.tokens[row, : len(prompt)] = 99 if ids is None else ids
            self.lengths[row] = len(prompt)
        self.drafter.runner = SimpleNamespace(
            requests=requests, input_batch=SimpleNamespace(req_ids=[*requests])
        )
        self._written = 0

    def end_last(self) -> None:
        """Take away the last request."""
        req_ids = self.drafter.runner.input_batch.req_ids
        del self.drafter.runner.requests[req_ids.pop()]
        self.lengths, self.tokens = self.lengths[:-1], self.tokens[:-1]

    def begin(self, now: float) -> None:
        """Begin a step that only decodes."""
        counts = dict.fromkeys(self.drafter.runner.requests, 1)
        scheduled = SimpleNamespace(
            num_scheduled_tokens=counts,
            scheduled_new_reqs=[],
            scheduled_spec_decode_tokens={},
            total_num_scheduled_tokens=len(counts),
        )
        self.drafter.begin_step(scheduled, now)

    def step(self) -> list[list[int]]:
        """Have each request write a token, and return the drafts."""
        token = LOOP[self._written % len(LOOP)]
        self._written += 1
        for row, length in enumerate(self.lengths):
            self.tokens[row, length] = token
        self.lengths += 1
        drafts = self.drafter.propose(
            [[token]] * len(self.lengths), self.lengths, self.tokens
        )
        self.drafter.emit_drafts()
        return drafts


def test_a_prompt_of_embeddings_is_drafted_for_as_any_other() -> None:
    engine = Engine(embedded=torch.zeros(300, 8), plain=[1, 2, 99, 99])
    drafts = [engine.step() for _ in range(19)]
    assert engine.drafter.stats()["error"] is None
    # as far as the next step may write, which adds a token of its own
    assert drafts[6] == [(LOOP * 5)[1:13]] * 2
    assert drafts[18] == [[], []]


def test_drafts_leave_room_in_a_step_for_all_requests_and_for_prompts() -> None:
    engine = Engine(step_tokens=36, **{str(i): [1, 2, 99, 99] for i in range(4)})
    before = [engine.step() for _ in range(10)]
    engine.end_last()
    after = [engine.step() for _ in range(2)]
    assert engine.drafter.stats()["error"] is None
    # of 16 that there are
    assert [max(map(len, drafts)) for drafts in (before[-1], *after)] == [
        7,
        5,
        7,
    ]


def test_a_weight_sync_is_no_part_of_a_decode_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(first=[1, 2], second=[3])
    seconds = []
    monkeypatch.setattr(
        engine.drafter.engine, "timed", lambda step, _: seconds.append(step.seconds)
    )
    for now in (1.0, 1.5, 2.0, 9.0, 9.25):
        if now == 9.0:  # requests are under way
            engine.drafter.refresh(Refresh(1))
        engine.begin(now)
        engine.step()
    assert seconds == [0.5, 0.5, 0.25]


def test_a_step_that_verifies_no_drafts_is_neither_drafted_for_nor_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(first=[1, 2], second=[3])
    timed = []
    monkeypatch.setattr(
        engine.drafter.engine, "timed", lambda step, _: timed.append(step.seconds)
    )
    drafts = []
    for now in range(12):
        engine.begin(float(now))
        engine.drafter.drops = 3 <= now < 9
        drafts.append(engine.step())
    assert drafts[3:9] == [[[], []]] * 6
    assert drafts[10] == [(LOOP * 5)[2:10]] * 2
    assert len(timed) == 5
