"""What a neural drafter reads, whichever steps it drafts in: every token once, in
order, with its hidden state.

vLLM's runner and its drafter are stood in for by arrays; `test_neural.py` runs the real
ones.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from das_adapter.core.model_drafts import ModelDrafts
from das_adapter.engine.v1 import neural_drafts
from das_adapter.engine.v1.neural_drafts import NeuralSource

MOST = 3
BLOCK = 16
LONGEST = 512


@dataclass
class Sampling:
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None


class EagleProposer(SimpleNamespace):
    """Stands in for vLLM's drafter, which is known by this name, and which drafts its
    most likely tokens.
    """

    def take_last_draft_probs(self) -> None:
        return None


class Engine:
    """A batch whose requests come, write, and go; hidden states say whose they are and
    where they stand.
    """

    def __init__(self, hidden: bool, batched_tokens: int):
        self.rng = np.random.default_rng(0)
        self.texts: dict[str, np.ndarray] = {}
        self.prompts: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.seen: dict[str, list[int]] = {}
        """Of each request, the positions that the drafter has read."""
        self.drafted: dict[str, int] = {}
        self.calls = 0
        batch = SimpleNamespace(block_table=[self])
        drafter = EagleProposer(
            pass_hidden_states_to_model=hidden,
            max_num_tokens=batched_tokens,
            propose=self.propose,
        )
        self.runner: Any = SimpleNamespace(
            input_batch=batch,
            drafter=drafter,
            device=torch.device("cpu"),
            max_model_len=LONGEST,
            num_spec_tokens=MOST,
            effective_drafter_max_model_len=LONGEST,
            query_start_loc=SimpleNamespace(),
            speculative_config=SimpleNamespace(),
            propose_draft_token_ids=print,
            get_model=lambda: None,
        )
        host: Any = SimpleNamespace(runner=self.runner, ranks=1, propose=print)
        self.source = NeuralSource(host, ModelDrafts(MOST, narrows=False))
        self.source.load(torch.nn.Module())

    block_size = BLOCK

    def get_device_tensor(self, requests: int) -> torch.Tensor:
        """Every request has blocks of its own."""
        blocks = LONGEST // BLOCK
        ids = torch.tensor(
            [self.number(req_id) for req_id in self.runner.input_batch.req_ids]
        )
        return (ids[:, None] * blocks + torch.arange(blocks)).int()

    @staticmethod
    def number(req_id: str) -> int:
        return int(req_id.removeprefix("r"))

    def join(self, number: int, cached: int) -> None:
        """Admit a request whose first tokens are in the prefix cache."""
        prompt = int(self.rng.integers(cached + 1, cached + 40))
        self.texts[f"r{number}"] = self.rng.integers(0, 90, prompt)
        self.prompts[f"r{number}"] = prompt
        self.computed[f"r{number}"] = cached
        self.seen[f"r{number}"] = list(range(cached))

    def step(self, counts: dict[str, int], chunk: int = 64) -> None:
        """Run a step of the policy, and let the drafter draft for some requests."""
        ids = list(self.texts)
        begins = np.array([self.computed[i] for i in ids])
        carried = np.array([self.drafted.get(i, 0) for i in ids])
        length = np.array([len(self.texts[i]) for i in ids])
        scheduled = np.minimum(length - begins, chunk) + np.where(
            length - begins == 1, carried, 0
        )
        hidden = []
        for i, begin, n in zip(ids, begins, scheduled, strict=True):
            hidden += [[1000.0 * self.number(i) + p] for p in range(begin, begin + n)]
        for i, begin, n in zip(ids, begins, scheduled, strict=True):
            if begin + n >= len(self.texts[i]):
                accepted = int(self.rng.integers(0, begin + n - len(self.texts[i]) + 1))
                self.texts[i] = np.append(
                    self.texts[i], self.rng.integers(0, 90, accepted + 1)
                )
                self.computed[i] = len(self.texts[i]) - 1
            else:
                self.computed[i] = begin + n
        batch = self.runner.input_batch
        batch.req_ids = ids
        batch.num_computed_tokens_cpu = begins
        batch.num_prompt_tokens = np.array([self.prompts[i] for i in ids])
        self.runner.query_start_loc.np = np.concatenate([[0], np.cumsum(scheduled)])
        tokens = np.zeros((len(ids), LONGEST), dtype=np.int32)
        for row, i in enumerate(ids):
            tokens[row, : len(self.texts[i])] = self.texts[i]
        wanted = np.array(
            [
                counts.get(i, 0) if self.computed[i] == len(self.texts[i]) - 1 else 0
                for i in ids
            ]
        )
        self.source.held = {
            "hidden_states": torch.tensor(hidden),
            "sampling_metadata": Sampling(),
        }
        drafts: list[list[int]] = [[] for _ in ids]
        self.source.draft(
            wanted, np.array([len(self.texts[i]) for i in ids]), tokens, drafts
        )
        self.drafted = {i: len(draft) for i, draft in zip(ids, drafts, strict=True)}
        assert [len(draft) for draft in drafts] == wanted.tolist()

    def propose(self, num_speculative_tokens: int, **given: Any) -> torch.Tensor:
        """Stand in for vLLM's drafter: look at what it is given to read."""
        self.calls += 1
        metadata = given["common_attn_metadata"]
        starts = metadata.query_start_loc.tolist()
        assert (
            len(given["target_token_ids"])
            == starts[-1]
            <= self.runner.drafter.max_num_tokens
        )
        for row, (a, b) in enumerate(itertools.pairwise(starts)):
            i = f"r{int(metadata.block_table_tensor[row, 0]) // (LONGEST // BLOCK)}"
            positions = given["target_positions"][a:b].tolist()
            assert metadata.seq_lens[row] == positions[-1] + 1
            assert (
                given["target_token_ids"][a:b].tolist()
                == self.texts[i][positions].tolist()
            )
            assert given["next_token_ids"][row] == self.texts[i][positions[-1] + 1]
            assert metadata.slot_mapping[a:b].tolist() == [
                self.number(i) * LONGEST + p for p in positions
            ]
            if self.runner.drafter.pass_hidden_states_to_model:
                assert given["target_hidden_states"][a:b, 0].tolist() == [
                    1000.0 * self.number(i) + p for p in positions
                ]
            again = len(self.seen[i]) - positions[0]
            assert 0 <= again <= 1, "a hole, or text that is read twice"
            self.seen[i] += positions[again:]
        return torch.ones(len(starts) - 1, num_speculative_tokens, dtype=torch.int64)


@pytest.mark.parametrize(("hidden", "kept"), [(True, 40), (True, 10**6), (False, 0)])
@pytest.mark.parametrize("batched_tokens", [80, 4096])
def test_it_misses_nothing_whatever_it_drafts(
    monkeypatch: pytest.MonkeyPatch, hidden: bool, kept: int, batched_tokens: int
) -> None:
    monkeypatch.setattr(neural_drafts, "KEPT_BYTES", 4 * kept)
    engine = Engine(hidden, batched_tokens)
    rng = np.random.default_rng(1)
    for number in range(4):
        engine.join(number, 0)
    for step in range(200):
        if step % 40 == 39:
            engine.texts.pop(next(iter(engine.texts)))
            engine.join(10 + step, int(rng.integers(0, 2)) * BLOCK if hidden else 0)
        asleep = step % 20 < 12
        engine.step(
            {} if asleep else {i: int(rng.integers(0, MOST + 1)) for i in engine.texts}
        )
    engine.step(dict.fromkeys(engine.texts, MOST))
    for i, text in engine.texts.items():
        assert engine.seen[i] == list(range(len(text) - 1))


def test_it_does_not_run_in_steps_without_drafts() -> None:
    engine = Engine(True, 4096)
    engine.join(0, 0)
    engine.step({})
    read = engine.calls
    for _ in range(50):
        engine.step({})
    assert engine.calls == read
    engine.step({"r0": MOST})
    assert engine.calls == read + 1


def test_a_step_that_it_did_not_see_costs_its_text_alone() -> None:
    """As when a drafter that had failed is on again."""
    engine = Engine(True, 4096)
    engine.join(0, 0)
    for _ in range(5):
        engine.step({})
    engine.source.forget()
    engine.seen["r0"] = list(range(engine.computed["r0"]))
    engine.step({"r0": 2})
    assert engine.drafted == {"r0": 2}
