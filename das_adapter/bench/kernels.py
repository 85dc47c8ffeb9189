"""`kernels`: the time of our kernels: of the sampler on vLLM's V1 runner, beside
stock's, and of a proposal of the history on V2. Needs no vLLM.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.benchmark import Timer

from das_adapter.bench.engines import Bar, Found, Plan, apart

if TYPE_CHECKING:
    from das_adapter.core.index import SuffixIndex

GROUP = 16
"""Requests that write to one problem."""
STEPS = 32
"""Maximum number of draft tokens of a proposal."""
MISTAKES = 0.1
"""Share of a text's tokens that differ from those of its problem."""
PROMPT = 8
"""Tokens before each response."""


class World:
    """A batch in groups that write the same with mistakes, on a device; its problems
    have sealed text.
    """

    def __init__(
        self,
        plan: Plan,
        batch: int,
        length: int,
        asked: int,
        device: str,
    ) -> None:
        """Make a batch of texts of at least 7 / 8 of this length.

        Args:
            asked: number of requests of the batch that a proposal drafts for.
        """
        from das_adapter.engine.v2.device_index import DeviceIndex

        rng = np.random.default_rng(batch)
        vocabulary = plan.vocabulary
        num_problems = -(-batch // GROUP)
        originals = _Originals(rng, vocabulary, num_problems, length)
        sealed = _sealed(originals, num_problems)
        self.tokens = num_problems * GROUP * length
        texts = torch.zeros(batch, PROMPT + length, dtype=torch.int32)
        opened = []
        for slot in range(batch):
            problem = slot // GROUP
            text = originals.variation(problem)
            texts[slot, PROMPT:] = torch.from_numpy(text)
            opened.append((slot, problem, PROMPT))
        shortest = length - length // 8
        written = rng.integers(shortest, length, batch)
        totals = torch.from_numpy(written.astype(np.int32))
        self.total = totals.to(device)
        words = 3 * self.tokens + 2**16
        longest_draft = min(STEPS, length // 4)
        self.index = DeviceIndex(
            texts.to(device),
            longest_draft,
            words,
            0.0,
            vocabulary,
        )
        self.index.open(opened)
        arena = self.index.arena
        while arena.unsealed:  # a piece in each step
            arena.copy_sealed(sealed)
        self.slots = torch.arange(asked, device=device)
        self.sampled = torch.ones(asked, dtype=torch.int32, device=device)

    def draft(self) -> torch.Tensor:
        """Draft for the requests that ask."""
        return self.index.draft(self.slots, self.sampled, self.total)


class _Originals:
    """A text of each problem, and variations of it. Tokens are as frequent as words are
    in natural text: the r-th most frequent has a weight of 1 / (r + 2.7) (Zipf and
    Mandelbrot).
    """

    def __init__(
        self,
        rng: np.random.Generator,
        vocabulary: int,
        num_problems: int,
        length: int,
    ) -> None:
        self._rng = rng
        self._length = length
        ranks = np.arange(1, vocabulary + 1)
        weights = 1 / (ranks + 2.7)
        # of each token and all that are more frequent
        self._weight_up_to = weights.cumsum()
        self._texts = self._natural(num_problems, length)

    def _natural(self, *shape: int) -> np.ndarray:
        total_weight = self._weight_up_to[-1]
        drawn = total_weight * self._rng.random(shape)
        ids = np.searchsorted(self._weight_up_to, drawn)
        return ids.astype(np.int32)

    def variation(self, problem: int) -> np.ndarray:
        """Return the text of a problem with mistakes, int32 [length]."""
        luck = self._rng.random(self._length)
        wrong = luck < MISTAKES
        other = self._natural(self._length)
        return np.where(wrong, other, self._texts[problem])


def _sealed(originals: _Originals, num_problems: int) -> SuffixIndex:
    """Return the sealed text of a group of variations of each problem."""
    from das_adapter.core.index import SuffixIndex
    from das_adapter.core.index.store import HistoryStore

    with tempfile.TemporaryDirectory() as directory, HistoryStore(directory) as store:
        for problem in range(num_problems):
            for _ in range(GROUP):
                text = originals.variation(problem)
                store.add(problem, text, 0)
        store.seal()
        return SuffixIndex.attach(directory)


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Run the part; where there is no GPU, the history's kernels in Triton's
    interpreter.
    """
    found = {"draws": apart(plan, draws, plan)}
    yield found
    environment = {}
    if plan.tiny:
        environment["TRITON_INTERPRET"] = "1"
    found["proposals"] = apart(plan, proposals, plan, env=environment)
    yield found


def draws(plan: Plan) -> Found:
    """Time both samplers' draws, by number of rows."""
    from das_adapter.engine.v1.keyed_sample import Keys, keyed_sample

    device = _device()
    rows: Found = {}
    for count in plan.rows:
        seeds = torch.arange(count, device=device)
        logits = torch.randn(count, plan.vocabulary, device=device)
        keys = Keys(seeds * 2**33, seeds)
        keyed = functools.partial(keyed_sample, logits, keys)
        figures = {"keyed_us": microseconds(keyed)}
        rows[str(count)] = figures
        # without vLLM there is nothing to compare with
        with contextlib.suppress(ImportError):
            from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

            sampler = TopKTopPSampler()
            stock = functools.partial(sampler, logits, {}, None, None)
            figures["stock_us"] = microseconds(stock)
            del stock
        del logits, keyed
    return rows


def proposals(plan: Plan) -> Found:
    """Time proposals, by batch and length of the texts."""
    device = _device()
    rows: Found = {}
    for batch, length, asked in _worlds(plan):
        world = World(plan, batch, length, asked, device)
        index = world.index
        if device == "cuda":
            index.capture([asked])
        world.draft()
        drafted = index.real[:asked].float()
        mean_drafted = drafted.mean()
        sealed_bytes = 4 * index.arena.used
        rows[f"{asked} x {length}"] = {
            "drafted": float(mean_drafted),
            "bytes_per_token": sealed_bytes / world.tokens,
            "proposal_us": microseconds(world.draft),
        }
    return rows


def _worlds(plan: Plan) -> list[tuple[int, int, int]]:
    """Return batches, lengths of their texts and how many requests ask."""
    batches = sorted(plan.batches, reverse=True)
    lengths = [2 * context for context in plan.contexts]
    shortest = lengths[0]
    if plan.tiny:
        largest = batches[0]
        return [(largest, shortest, largest)]
    worlds = [(batch, shortest, batch) for batch in batches]
    second = batches[1]
    for length in lengths[1:]:
        worlds.append((second, length, second))
    most = 2 * batches[0]
    worlds.append((most, 4 * shortest, most))
    alone = (GROUP, 8 * shortest, 1)
    worlds.append(alone)
    return worlds


def _device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def _slowest_draw(found: Found) -> float:
    """Return the time of keyed sampling, of stock's draw, at worst."""
    ratios = []
    for row in found["draws"].values():
        ratio = row["keyed_us"] / row["stock_us"]
        ratios.append(ratio)
    return float(max(ratios))


def _most_bytes(found: Found) -> float:
    """Return the bytes per sealed token, at worst."""
    rows = found["proposals"].values()
    sizes = [row["bytes_per_token"] for row in rows]
    return float(max(sizes))


def _proposal_us(world: str) -> Callable[[Found], float]:
    """Return the figure of a proposal's time in a world."""

    def value(found: Found) -> float:
        row = found["proposals"][world]
        return float(row["proposal_us"])

    return value


BARS = (
    Bar(
        "keyed sampling, of the time of stock vLLM's draw",
        1.0,
        _slowest_draw,
    ),
    Bar(
        "microseconds of a proposal for 256 requests of 4096 tokens",
        150,
        _proposal_us("256 x 4096"),
    ),
    Bar(
        "microseconds of a proposal for a request with 16 texts of 32768 tokens",
        120,
        _proposal_us("1 x 32768"),
    ),
    Bar(
        "microseconds of a proposal for 512 requests of 16384 tokens",
        500,
        _proposal_us("512 x 16384"),
    ),
    Bar(
        "bytes per sealed token",
        8.5,
        _most_bytes,
    ),
)


def microseconds(call: Any) -> float:
    """Return the time of a call among many in a row: the host is ahead of the device,
    as it is in an engine.
    """
    timer = Timer("call()", globals={"call": call})
    measurement = timer.blocked_autorange()
    seconds = float(measurement.median)
    return 1e6 * seconds
