"""The kernels of the V2 runner's drafter in Triton's interpreter, and what needs a vLLM
that has this runner; `test_v2_kernels.py` runs it in a process of its own.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import device_reference
import numpy as np
import pytest
import torch
import v2_cpu  # noqa: F401  # before vLLM: it has Triton take the CPU for a device
import v2_stand_ins
import vllm.v1.worker.cpu.model_runner  # noqa: F401  # it replaces parts of torch
from own_history import OwnHistory
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
    _assign_draft_token_budget,
)
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from das_adapter.config import DasConfig
from das_adapter.core.confidence import EVEN, KINDS
from das_adapter.engine.plan import DraftPlan, PlanInForce
from das_adapter.engine.v2 import device_index, ranking, search
from das_adapter.engine.v2.admission import (
    Admission,
    capture_plain_steps,
    idle_with_one_token,
    obstacle,
)
from das_adapter.engine.v2.confidence import DraftConfidence
from das_adapter.engine.v2.device_index import DeviceIndex
from das_adapter.engine.v2.neural import Speculation
from das_adapter.engine.v2.sampling_limits import SamplingLimits
from das_adapter.engine.v2.speculator import HistorySpeculator
from das_adapter.engine.v2.verification import accept_drawn
from das_adapter.engine.v2.worker import DeviceWorkerState

SLOTS = 4
LENGTH = 240
STEPS = 5


class Held(NamedTuple):
    """Stands for vLLM's `UvaBackedTensor`."""

    gpu: torch.Tensor


class World:
    """Two problems with sealed text, and requests that write, end and begin."""

    def __init__(
        self, seed: int, vocabulary: int, periodic: bool, written: int = 0
    ) -> None:
        """
        Args:
            seed: of all that is random.
            vocabulary: tokens of it.
            periodic: whether the first problem's text repeats itself.
            written: tokens that each request has written when it begins; 0: short
                texts, with more mistakes.
        """
        self.rng = np.random.default_rng(seed)
        self.vocabulary = vocabulary
        self._begin = written
        self._mistakes = 0.01 if written else 0.15
        self._poems = [self.rng.integers(0, vocabulary, 60 + written) for _ in range(2)]
        if periodic:
            self._poems[0] = np.resize(self._poems[0][:5], 60 + written)
        self.sealed = OwnHistory(others_tokens=4096)
        for version in range(2):
            for problem in range(2):
                for _ in range(2):
                    self.sealed.add(problem, self._variation(problem), version)
            self.sealed.seal()
        longest = 40 if written else 12
        self.prompts = [
            self.rng.integers(0, vocabulary, self.rng.integers(1, longest)).astype(
                np.int32
            )
            for _ in range(SLOTS)
        ]
        self.full = [self._variation(slot % 2) for slot in range(SLOTS)]
        self.written = [0] * SLOTS
        self.total = torch.tensor([len(p) for p in self.prompts], dtype=torch.int32)

    def index(self) -> DeviceIndex:
        """A device index that knows the requests."""
        texts = torch.zeros(SLOTS, LENGTH, dtype=torch.int32)
        index = DeviceIndex(texts, STEPS, 2**14, 0.02, self.vocabulary)
        index.open([(slot, slot % 2, len(p)) for slot, p in enumerate(self.prompts)])
        for slot, prompt in enumerate(self.prompts):
            texts[slot, : len(prompt)] = torch.from_numpy(prompt)
        index.arena.copy_sealed(self.sealed)
        return index

    def write(self, indices: list[DeviceIndex]) -> list[int]:
        """Let every request write some tokens; return how many."""
        counts = self.rng.integers(0, 4, SLOTS).tolist()
        if not any(self.written):
            counts = [count + self._begin for count in counts]
            counts[0] = 0  # its prompt is still being read
        for slot, count in enumerate(counts):
            begin = len(self.prompts[slot]) + self.written[slot]
            new = torch.from_numpy(self.full[slot][self.written[slot] :][:count])
            for index in indices:
                index.texts[slot, begin : begin + len(new)] = new
            self.written[slot] += len(new)
            self.total[slot] += len(new)
        return counts

    def _variation(self, problem: int) -> np.ndarray:
        text = self._poems[problem].copy()
        other = self.rng.random(len(text)) < self._mistakes
        text[other] = self.rng.integers(0, self.vocabulary, other.sum())
        return text.astype(np.int32)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("seed", "vocabulary", "periodic", "written", "gpu"),
    [
        (0, 8, False, 0, False),
        (2, 5, True, 90, True),
        pytest.param(1, 6, True, 0, False, marks=LONG),
        pytest.param(4, 6, True, 0, True, marks=LONG),
        pytest.param(3, 6, False, 140, True, marks=LONG),
    ],
)
def test_kernels_draft_count_and_learn_as_the_reference_does(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    vocabulary: int,
    periodic: bool,
    written: int,
    gpu: bool,
) -> None:
    """Of longer texts a program scans several tiles, and more than DEPTH tokens are
    equal. `gpu`: several programs scan live text, as on a GPU, in tiles so small that a
    text has several.
    """
    if gpu:
        monkeypatch.setitem(
            device_index.SCAN, "cpu", (3 * SLOTS, int(search.PLACES.value))
        )
    world = World(seed, vocabulary, periodic, written)
    ends = int(written > 0)
    kernels, plain = indices = [world.index(), world.index()]
    plain._launch = functools.partial(device_reference.launch, plain)  # type: ignore[method-assign]
    for step in range(4):
        counts = world.write(indices)
        if step == 2:  # a request ends, its text stays, and another takes its slot
            for index in indices:
                index.close([(ends, world.written[ends] + 2)], world.total)
                index.open([(ends, 1, len(world.prompts[ends]))])
        order = torch.from_numpy(world.rng.permutation(SLOTS))
        sampled = torch.tensor(counts, dtype=torch.int32)[order]
        drafted = kernels.draft(order, sampled, world.total)
        assert torch.equal(drafted, plain.draft(order, sampled, world.total))
        for name in ("real", "confidence", "cells", "sources", "chance"):
            assert torch.equal(getattr(kernels, name), getattr(plain, name)), name
        assert torch.equal(kernels.offers[:, :2], plain.offers[:, :2])
    assert int(kernels.cells[:, 0].sum()) > 5
    if written:
        strongest = int((kernels.found[:, 1] & 0xFF).max())
        assert strongest == 2 * int(search.DEPTH.value)


def test_a_long_match_leads_where_more_places_than_count_match_less_and_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(device_index.SCAN, "cpu", (1, int(search.PLACES.value)))
    phrase = list(range(30))
    repeats = int(search.PLACES.value) + 4
    sibling = [
        *phrase,
        100,
        *itertools.chain.from_iterable(
            [200 + i, *phrase[-6:], 101] for i in range(repeats)
        ),
    ]
    texts = torch.zeros(2, LENGTH, dtype=torch.int32)
    for slot, text in enumerate((phrase, sibling)):
        texts[slot, 1 : 1 + len(text)] = torch.tensor(text)
    index = DeviceIndex(texts, STEPS, 2**12, 0.0, 300)
    index.open([(0, 7, 1), (1, 7, 1)])
    total = torch.tensor([1 + len(phrase), 1 + len(sibling)], dtype=torch.int32)
    assert (
        index.draft(
            torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32), total
        )[0, 0]
        == 100
    )


def test_drafts_are_accepted_up_to_the_first_token_that_was_not_drawn() -> None:
    rng = np.random.default_rng(0)
    begin = np.cumsum([0, *rng.integers(1, STEPS + 2, 40)])
    drawn = torch.from_numpy(rng.integers(0, 2, begin[-1]))
    fed = torch.from_numpy(rng.integers(-1, 2, begin[-1]))
    none = torch.zeros(0)
    with mock.patch.object(gumbel, "gumbel_sample", lambda *_, **__: drawn):
        rows = torch.from_numpy(begin.astype(np.int32))
        sampled, counts = accept_drawn(
            none, None, fed.int(), rows, *[none] * 6, num_speculative_steps=STEPS
        )
    for request, (first, end) in enumerate(itertools.pairwise(begin.tolist())):
        count = 1
        while first + count < end and drawn[first + count - 1] == fed[first + count]:
            count += 1
        assert int(counts[request]) == count
        assert torch.equal(sampled[request, :count], drawn[first : first + count])


def test_a_model_drafts_within_a_requests_min_p_top_k_and_top_p_alone() -> None:
    vocabulary = 1000
    never = -torch.inf
    runner: Any = SimpleNamespace(
        max_num_reqs=8, vocab_size=vocabulary, device=torch.device("cpu")
    )
    limits = SamplingLimits(runner)
    temperature = torch.tensor([1.0, 0.7, 1.3, 2.0, 0.0, 1.0, 0.8, 1.5])
    k = torch.tensor(
        [vocabulary, 20, vocabulary, 50, 5, 1, vocabulary, 50], dtype=torch.int32
    )
    p = torch.tensor([1.0, 1.0, 0.9, 0.8, 0.5, 1.0, 1.0, 0.8])
    least = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.01, 0.05])
    held = {"top_k": Held(k), "top_p": Held(p), "min_p": Held(least)}
    runner.sampler = SimpleNamespace(sampling_states=SimpleNamespace(**held))
    limits.copy_from_sampler()
    drafted = (
        torch.randn(10, vocabulary, generator=torch.Generator().manual_seed(0)) * 4
    )
    drafted[:, 500:600] = never
    slots = torch.tensor([3, 2, 1, 0, -1, 4, 5, 3, 6, 7])
    stock = drafted.clone()
    limits.apply(drafted, slots, temperature)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0 or slot == 4:  # of no request, or greedy
            expected = stock[row]
        else:
            heated = stock[row : row + 1] / temperature[slot]
            heated = heated.masked_fill(
                heated < heated.max() + least[slot].log(), never
            )
            within = apply_top_k_top_p_pytorch(heated, k[[slot]], p[[slot]])[0]
            expected = stock[row].masked_fill(within == never, never)
        assert torch.equal(drafted[row], expected), slot


@pytest.mark.parametrize(
    "each", [1, STEPS], ids=["a token of each draft", "whole drafts"]
)
def test_a_drafted_token_is_of_a_kind_by_its_odds(each: int) -> None:
    vocabulary = 9000
    rows = 3 * each
    sure = DraftConfidence(torch.zeros(SLOTS, STEPS))
    temperature = torch.tensor([1.0, 0.7, 0.0, 2.0])
    sure.kinds.fill_(99)
    logits = (
        torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 6
    )
    logits[:, 7000:] = -torch.inf
    drawn = logits.topk(3).indices[torch.arange(rows), torch.arange(rows) % 3]
    slots = torch.tensor([3, -1, 2]).repeat_interleave(each)
    step = torch.tensor(2)
    places = torch.arange(STEPS).repeat(3) if each > 1 else step.expand(3)
    sure.learn(np.arange(KINDS, dtype=np.float32) / KINDS)
    sure.judge(logits, drawn, slots, temperature, places if each > 1 else step)
    untouched = torch.ones_like(sure.kinds, dtype=torch.bool)
    for row, (slot, place) in enumerate(
        zip(slots.tolist(), places.tolist(), strict=True)
    ):
        if slot < 0:
            continue
        q = (logits[row].double() / (temperature[slot] or 1.0)).softmax(0)[drawn[row]]
        kind = min(KINDS - 1, max(0, int(torch.floor(torch.log2(q / (1 - q)))) + EVEN))
        assert sure.kinds[row // each, place] == kind, row
        assert sure.chances[row // each, place] == kind / KINDS
        untouched[row // each, place] = False
    assert (sure.kinds[untouched] == 99).all()


TOLD = "num_speculative_tokens" in inspect.signature(EagleSpeculator.propose).parameters
"""Whether EAGLE is asked for some number of tokens: from vLLM 0.32 on."""


def raised(error: Exception) -> None:
    """Raise what an engine would go on without drafts for."""
    raise error


def eagle(confidence: DraftConfidence | None) -> Any:
    """Return an EAGLE speculator that drafts as the policy does."""
    speculator: Any = object.__new__(EagleSpeculator)
    speculator.num_speculative_steps = STEPS
    speculator.draft_logits = None
    speculator.draft_watermarker = None
    speculator.temperature = torch.ones(SLOTS)
    speculator.seeds = torch.zeros(SLOTS, dtype=torch.int64)
    speculator.use_fp64_gumbel = False
    speculator.supports_mm_inputs = False
    speculator.max_num_tokens = 64
    if not TOLD:
        speculator.use_fused_multi_step_decode = (
            False  # as vLLM has it before its attention is known
        )
    limits: Any = SimpleNamespace(apply=lambda *_: None)
    texts = torch.zeros(SLOTS, LENGTH, dtype=torch.int32)
    Speculation(
        speculator,
        DasConfig(drafter="eagle3"),
        texts,
        None,
        None,
        limits,
        confidence,
        PlanInForce(),
        raised,
    )
    return speculator


@pytest.mark.parametrize("own", [False, True])
def test_vllms_own_estimate_of_acceptance_is_made_where_the_controller_makes_none(
    own: bool,
) -> None:
    """With `draft.options: {enable_adaptive_verification: true}`, which is for drafts
    in every step.
    """
    confidence = DraftConfidence(torch.full((SLOTS, STEPS), -1.0)) if own else None
    speculator = eagle(confidence)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    estimated = []
    speculator.model = SimpleNamespace(compute_logits=lambda _: logits.clone())
    speculator._maybe_predict_acceptance = lambda *args: estimated.append(args)
    slots = torch.arange(3)
    places = torch.zeros(3, dtype=torch.int64)
    inputs = (
        None,
        places,
        slots,
        speculator.temperature,
        speculator.seeds,
        torch.tensor(1),
        None,
    )
    # by Triton's interpreter, for the noise of vLLM 0.29 and 0.30
    lacked = SimpleNamespace(log1p=v2_stand_ins.log1p)
    with mock.patch.object(gumbel, "tldevice", lacked, create=True):
        assert speculator.sample_draft(*inputs).shape == (3,)
    assert len(estimated) == (not own)
    if confidence is not None:
        assert (confidence.chances[:3, 1] >= 0).all()
    else:
        assert torch.equal(estimated[0][0], logits)


def test_no_cuda_graph_holds_more_passes_than_are_wanted() -> None:
    """From vLLM 0.32 on there is a graph for each number of them."""
    speculator = eagle(None)
    if not TOLD:
        speculator.attn_groups = [
            [SimpleNamespace(supports_draft_decode_metadata_update=True)]
        ]
        speculator._configure_fused_multi_step_decode()
    assert TOLD or not speculator.use_fused_multi_step_decode


@pytest.mark.parametrize(("longest", "found"), [(1, {1}), (3, {3}), (4, {1, 2, 3, 4})])
def test_a_drafters_graphs_are_of_its_own_passes(longest: int, found: set[int]) -> None:
    """EAGLE's are of one token a request, DSpark's of as many as its drafts have, the
    policy's of each length.
    """
    capture_plain_steps.apply()
    manager: Any = object.__new__(CudaGraphManager)
    chosen = [(1, 1, 3), (2, 2, 2), (3, 3, 1), (4, 4, 0)]
    speculative = SimpleNamespace(num_speculative_tokens_per_batch_size=chosen)
    speculative.uses_dynamic_speculative_decoding = lambda: bool(
        speculative.num_speculative_tokens_per_batch_size
    )
    manager.vllm_config = SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=3,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=[1, 2, 4, 8, 16], max_cudagraph_capture_size=16
    )
    manager.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    manager.max_num_reqs = 4
    manager.decode_query_len = longest
    manager.varlen_decode = False
    manager.ubatch_runner = None
    manager.lora_capture_cases = [0]
    manager._capture_descs = {}
    manager._candidates = {}
    manager._init_candidates()
    assert {
        desc.uniform_token_count for desc in manager._capture_descs[CUDAGraphMode.FULL]
    } == found
    assert speculative.num_speculative_tokens_per_batch_size is chosen


def test_where_no_model_drafts_nothing_is_kept_of_limits() -> None:
    model = SimpleNamespace(max_model_len=8, is_hybrid=False, is_attention_free=False)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))
    # it asks for no vocabulary
    assert DeviceWorkerState(runner, DasConfig(drafter="none")).speculation is None


def admitted(
    total: int,
    shares: dict[str, tuple[int, float]],
    drops: bool = False,
    largest: int = 0,
) -> list[int]:
    """Return how many draft tokens of a likely and an unlikely draft of three are
    verified, in a step with three other tokens; `drops`: whether the step verifies
    none; `largest`: tokens that a graph holds.
    """
    states = SimpleNamespace(
        max_num_reqs=4, num_speculative_steps=3, device=torch.device("cpu")
    )
    plan = DraftPlan(
        3,
        budget=total,
        req_ids=list(shares),
        limits=np.array([most for most, _ in shares.values()], dtype=np.int64),
        worth=np.array([worth for _, worth in shares.values()]),
    )
    in_force = PlanInForce(plan)
    of: Any = {
        "req_states": states,
        "query_start_loc": torch.full((5,), -9, dtype=torch.int32),
    }
    with mock.patch.multiple(torch.cuda, Stream=mock.Mock(), Event=mock.Mock()):
        ranks = ranking.Ranking(4, 3, states.device)
        ours = (lambda _: drops), in_force, ranks, raised, largest
        manager = Admission(*ours, **of, num_bonus_tokens=1, max_total_logits=100)
    batch = SimpleNamespace(
        num_reqs=2, req_ids=["unlikely", "likely"], idx_mapping=torch.tensor([2, 0])
    )
    manager.record_confidences(torch.tensor([[0.5, 0.5, 0.5], [0.8, 0.8, 0.8]]), batch)
    tokens = manager.get_num_tokens(
        {"likely": 4, "unlikely": 5}, {"unlikely": [-1] * 3, "likely": [-1] * 3}
    )
    rows, begins, budget, *_ = manager.reallocate_drafts(
        batch.req_ids, batch.idx_mapping
    )
    assert manager.admitted is not None
    unlikely, likely = found = manager.admitted.tolist()
    assert tokens == 3 + budget == 3 + sum(found)
    assert rows.tolist() == [0, 1 + unlikely, 2 + unlikely + likely]
    assert begins.tolist() == [0, 2 + unlikely, tokens, tokens, tokens]
    return found


def test_drafts_are_verified_where_they_are_worth_most_and_no_longer_than_a_request_may() -> (
    None
):
    assert admitted(3, {}) == [0, 3]
    assert admitted(3, {}, drops=True) == [0, 0]
    assert admitted(3, {"unlikely": (3, 1.0), "likely": (3, 0.25)}) == [2, 1]
    assert admitted(3, {"unlikely": (3, 1.0), "likely": (1, 1.0)}) == [2, 1]
    assert admitted(9, {"unlikely": (2, 1.0), "likely": (0, 1.0)}) == [2, 0]
    assert admitted(0, {}) == [0, 0]


def test_a_step_that_was_to_fit_into_a_graph_fits_into_it_whoever_joins() -> None:
    both = {"unlikely": (3, 1.0), "likely": (3, 1.0)}
    assert admitted(3, both, largest=6) == [0, 3]
    assert admitted(3, both, largest=5) == [0, 2]  # five tokens were planned
    assert admitted(3, both, largest=4) == [0, 3]  # it was worth the launches
    # one has joined, and has as much
    assert admitted(2, {"likely": (3, 1.0)}, largest=7) == [
        1,
        3,
    ]
    assert admitted(2, {"likely": (3, 1.0)}, largest=6) == [0, 3]
    assert admitted(2, {"likely": (3, 1.0)}, largest=3) == [0, 0]


class Admitted:
    """A ranking of requests in so many slots, and one by what stands in for its
    kernel.
    """

    def __init__(self, chances: torch.Tensor) -> None:
        self.chances = chances
        slots = len(chances)
        written = [
            [torch.full((slots + i,), -9, dtype=torch.int32) for i in (0, 1, 1)]
            for _ in range(2)
        ]
        self._mine, self._plain = rankings = [
            ranking.Ranking(*chances.shape, chances.device) for _ in written
        ]
        for of, tensors in zip(rankings, written, strict=True):
            of.bind(chances, *tensors, bonus=1)
        self._written = written

    def check(self) -> None:
        """As `Ranking.check`."""
        self._mine.check()
        assert not self.chances.any()

    def __call__(
        self, shares: np.ndarray, slots: torch.Tensor, budget: int
    ) -> np.ndarray:
        """Admit both ways and compare; return how many draft tokens of each request are
        admitted.
        """
        requests = len(slots)
        self._mine.admit(shares, slots, budget)
        with mock.patch.object(
            ranking, "admit", v2_stand_ins.Launch(v2_stand_ins.admit, None)
        ):
            self._plain.admit(shares, slots, budget)
        for mine, plain in zip(*self._written, strict=True):
            assert torch.equal(mine, plain)
        admitted, rows, begins = (tensor.numpy() for tensor in self._written[0])
        number = admitted[:requests].copy()
        assert number.sum() == (shares[0].sum() if budget < 0 else budget)
        assert ((number >= 0) & (number <= shares[0])).all()
        assert rows[: requests + 1].tolist() == [0, *np.cumsum(number + 1)]
        tokens = np.cumsum(number + shares[1])
        assert begins.tolist() == [
            0,
            *tokens,
            *np.repeat(tokens[-1:], len(begins) - requests - 1),
        ]
        return number


@pytest.mark.parametrize(
    ("requests", "steps", "tile"),
    [(1, 1, 4096), (9, 5, 32), (40, 16, 64), (300, 16, 4096)],
)
def test_the_draft_tokens_of_the_highest_survival_are_admitted(
    monkeypatch: pytest.MonkeyPatch, requests: int, steps: int, tile: int
) -> None:
    """As vLLM admits them, and of tokens that survive equally as many; `tile`: draft
    tokens that are looked at at once.
    """
    monkeypatch.setattr(ranking, "_TILE", tile)
    rng = np.random.default_rng(requests)
    slots = torch.from_numpy(rng.permutation(requests + 3)[:requests])
    shares = np.zeros((3, requests), dtype=np.int32)
    for alike in (False, True):
        drawn = (
            rng.choice([0.5, 1.0], (requests + 3, steps))
            if alike
            else rng.random((requests + 3, steps)) ** 0.3
        )
        worth = np.ones(requests) if alike else rng.uniform(0.2, 1, requests)
        admitted = Admitted(torch.from_numpy(drawn).float())
        shares[2] = worth.astype(np.float32).view(np.int32)
        shares[:2] = rng.integers(0, steps + 1, requests), rng.integers(1, 9, requests)
        possible = int(shares[0].sum())
        assert (admitted(shares, slots, -1) == shares[0]).all()
        for budget in (0, possible // 3, possible // 2, possible - 1):
            number = admitted(shares, slots, budget)
            if budget > 0:
                weighted = admitted.chances.clone()
                stock = torch.from_numpy(shares[0].copy())
                weighted[slots, 0] *= torch.from_numpy(worth).float()
                _assign_draft_token_budget(weighted, slots, stock, budget, steps)
                survival = weighted[slots].cumprod(1).numpy()
                place = np.arange(steps)
                mine, theirs = (
                    np.sort(survival[place < of[:, None]])
                    for of in (number, stock.numpy())
                )
                np.testing.assert_allclose(mine, theirs, rtol=2**-8)


def test_a_kernel_that_admits_other_draft_tokens_than_its_definition_is_found_at_the_start() -> (
    None
):
    def wrong(admitted: torch.Tensor, **named: Any) -> None:
        v2_stand_ins.admit(admitted=admitted, **named)
        admitted[0] += 1

    for slots, steps in ((1, 1), (5, 3), (256, 16)):
        admitted = Admitted(torch.zeros(slots, steps))
        admitted.check()
        with (
            mock.patch.object(ranking, "admit", v2_stand_ins.Launch(wrong, None)),
            pytest.raises(RuntimeError),
        ):
            admitted.check()


ALWAYS = AttentionCGSupport.ALWAYS
UNIFORM = AttentionCGSupport.UNIFORM_BATCH


def attention(
    name: str,
    graphs: AttentionCGSupport,
    plans: bool = False,
    head: int = 128,
    replayed: int | None = None,
) -> Any:
    """An `AttentionGroup` of a backend that allows these full CUDA graphs; `plans`: by
    lengths that the host knows; `replayed`: most tokens of a request whose number may
    differ in a graph all the same.
    """
    backend = type(
        name,
        (),
        {"supports_device_cpu_query_lens_mismatch": staticmethod(lambda: not plans)},
    )
    builder = SimpleNamespace(
        get_cudagraph_support=lambda *_: graphs,
        get_varlen_cudagraph_max_query_len=lambda *_: replayed,
    )
    return SimpleNamespace(
        backend=backend,
        kv_cache_spec=SimpleNamespace(head_size=head),
        get_metadata_builder=lambda _: builder,
    )


FREE = attention("Free", ALWAYS)
SMALL = attention("Small", ALWAYS, head=64)
RANKS = {"parallel_config.data_parallel_size": 2}


@pytest.mark.parametrize(
    ("engine", "groups", "other", "why"),
    [
        ({}, [FREE], None, None),
        ({"lora_config": object()}, [FREE], None, "LoRA adapters"),
        (
            {"model_config.enable_return_routed_experts": True},
            [FREE],
            None,
            "experts' routing is returned",
        ),
        (
            {"aux_output_config.enable_return_routed_experts": True},
            [FREE],
            None,
            "experts' routing is returned",
        ),
        (
            {"model_config.return_sampling_mask": True},
            [FREE],
            None,
            "sampling masks are returned",
        ),
        (
            {"parallel_config.enable_batch_sharded_sampling": True},
            [FREE],
            None,
            "batch-sharded sampling",
        ),
        (
            {"parallel_config.decode_context_parallel_size": 2},
            [FREE],
            None,
            "context parallelism",
        ),
        (
            {"parallel_config.prefill_context_parallel_size": 2},
            [FREE],
            None,
            "context parallelism",
        ),
        (
            {},
            [FREE, attention("Planner", ALWAYS, plans=True)],
            None,
            "Planner plans by lengths that the host knows",
        ),
        (
            {},
            [FREE, attention("Even", UNIFORM)],
            None,
            "Even has no full CUDA graphs for unequal lengths",
        ),
        (
            {},
            [FREE],
            (UNIFORM, "Other"),
            "Other has no full CUDA graphs for unequal lengths",
        ),
        ({}, [FREE], (ALWAYS, "Other"), None),
        ({}, [FREE, attention("Mamba2", UNIFORM, replayed=4)], None, None),
        (
            {},
            [FREE, attention("Mamba2", UNIFORM, replayed=3)],
            None,
            "Mamba2 has no full CUDA graphs for unequal lengths",
        ),
        (
            {"compilation_config.cudagraph_mode": CUDAGraphMode.PIECEWISE},
            [attention("Even", UNIFORM)],
            None,
            None,
        ),
        (RANKS, [FREE], None, None),
        ({}, [SMALL], None, None),
        (
            RANKS,
            [FREE, SMALL],
            None,
            "Small has heads of 64 or less, with experts over data-parallel ranks",
        ),
    ],
)
def test_requests_have_own_draft_lengths_unless_something_is_in_the_way(
    engine: dict[str, Any], groups: list[Any], other: Any, why: str | None
) -> None:
    config = SimpleNamespace(
        lora_config=None,
        num_speculative_tokens=3,
        aux_output_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_size=1,
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
        ),
    )
    for name, value in engine.items():
        *parents, last = name.split(".")
        setattr(functools.reduce(getattr, parents, config), last, value)
    assert obstacle(config, [[group] for group in groups], other) == why


def test_a_rank_without_requests_steps_with_one_token() -> None:
    runner = SimpleNamespace(decode_query_len=17)
    seen = list[int]()
    idle_with_one_token.replacement(
        lambda: seen.append(runner.decode_query_len), runner
    )()
    assert (seen, runner.decode_query_len) == ([1], 17)


def test_as_many_draft_tokens_as_the_step_has_are_admitted_whatever_their_chances() -> (
    None
):
    odd = (
        torch.tensor([torch.nan, torch.inf, -1.0, 7.0, 1e30, -torch.inf, -0.0, 1e-40])
        .repeat(3)
        .view(6, 4)
    )
    admitted = Admitted(odd)
    worth = np.ones(6, dtype=np.float32).view(np.int32)
    shares = np.array([[4, 3, 4, 0, 2, 4], [1] * 6, worth], dtype=np.int32)
    for budget in range(17):
        admitted(shares, torch.arange(6), budget)


def test_a_models_draft_that_is_better_than_the_historys_brings_its_own_chances() -> (
    None
):
    source: Any = object.__new__(HistorySpeculator)
    source._in_force = PlanInForce(DraftPlan(3))
    source.offer = SimpleNamespace()
    source._drafts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    source.draft_token_confidence_probs = chances = torch.tensor(
        [[0.75, 0.5, 0.5], [0.25, 0.25, 0.25]]
    )
    source.put_better_drafts(
        torch.tensor([[7, 8, -1], [7, 8, -1]]),
        2,
        torch.tensor([[0.9, 0.1, 0.9], [0.3, 0.9, 0.9]]),
    )
    assert source._drafts.tolist() == [[1, 2, 3], [7, 8, 6]]
    assert chances.tolist() == [[0.75, 0.5, 0.5], pytest.approx([0.3, 0.9, 0.0])]
    assert source.offer.by_model.tolist() == [0, 2]
