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
STEPS = 16
"""Maximum number of draft tokens of a proposal."""
MISTAKES = 0.1
"""Share of a text's tokens that differ from those of its problem."""
PROMPT = 8
"""Tokens before each response."""


class World:
    """A batch in groups that write the same with mistakes, on a device; its problems
    have sealed text. Tokens are as frequent as words are in natural text: the r-th most
    frequent has a weight of 1 / (r + 2.7) (Zipf and Mandelbrot).
    """

    def __init__(
        self, plan: Plan, batch: int, length: int, asked: int, device: str
    ) -> None:
        """Make a batch of texts of at least 7 / 8 of this length.

        Args:
            asked: number of requests of the batch that a proposal drafts for.
        """
        from das_adapter.engine.v2.device_index import DeviceIndex

        rng = np.random.default_rng(batch)
        vocabulary = plan.vocabulary
        num_problems = -(-batch // GROUP)
        ranks = np.arange(1, vocabulary + 1)
        weight_up_to = (1 / (ranks + 2.7)).cumsum()

        def natural(*shape: int) -> np.ndarray:
            drawn = weight_up_to[-1] * rng.random(shape)
            return np.searchsorted(weight_up_to, drawn).astype(np.int32)

        originals = natural(num_problems, length)

        def variation(problem: int) -> np.ndarray:
            wrong = rng.random(length) < MISTAKES
            return np.where(wrong, natural(length), originals[problem])

        sealed = _sealed(variation, num_problems)
        self.tokens = num_problems * GROUP * length
        texts = torch.zeros(batch, PROMPT + length, dtype=torch.int32)
        for slot in range(batch):
            text = variation(slot // GROUP)
            texts[slot, PROMPT:] = torch.from_numpy(text)
        shortest = length - length // 8
        written = rng.integers(shortest, length, batch).astype(np.int32)
        self.total = torch.from_numpy(written).to(device)
        words = 3 * self.tokens + 2**16
        longest_draft = min(STEPS, length // 4)
        self.index = DeviceIndex(
            texts.to(device), longest_draft, words, 0.0, vocabulary
        )
        opened = [(slot, slot // GROUP, PROMPT) for slot in range(batch)]
        self.index.open(opened)
        while self.index.arena.unsealed:  # a piece in each step
            self.index.arena.copy_sealed(sealed)
        self.slots = torch.arange(asked, device=device)
        self.sampled = torch.ones(asked, dtype=torch.int32, device=device)

    def draft(self) -> torch.Tensor:
        """Draft for the requests that ask."""
        return self.index.draft(self.slots, self.sampled, self.total)


def _sealed(variation: Callable[[int], np.ndarray], num_problems: int) -> SuffixIndex:
    """Return the sealed text of a group of variations of each problem."""
    from das_adapter.core.index import SuffixIndex
    from das_adapter.core.index.store import HistoryStore

    with tempfile.TemporaryDirectory() as directory, HistoryStore(directory) as store:
        for problem in range(num_problems):
            for _ in range(GROUP):
                store.add(problem, variation(problem), 0)
        store.seal()
        return SuffixIndex.attach(directory)


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Run the part; where there is no GPU, the history's kernels in Triton's
    interpreter.
    """
    found = {"draws": apart(plan, draws, plan)}
    yield found
    if plan.tiny:
        environment = {"TRITON_INTERPRET": "1"}
    else:
        environment = {}
    yield found | {"proposals": apart(plan, proposals, plan, env=environment)}


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
        rows[str(count)] = {"keyed_us": microseconds(keyed)}
        # without vLLM there is nothing to compare with
        with contextlib.suppress(ImportError):
            from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

            stock = functools.partial(TopKTopPSampler(), logits, {}, None, None)
            rows[str(count)]["stock_us"] = microseconds(stock)
            del stock
        del logits, keyed
    return rows


def proposals(plan: Plan) -> Found:
    """Time proposals, by batch and length of the texts."""
    device = _device()
    rows: Found = {}
    for batch, length, asked in _worlds(plan):
        world = World(plan, batch, length, asked, device)
        if device == "cuda":
            world.index.capture([asked])
        world.draft()
        drafted = world.index.real[:asked].float()
        sealed_bytes = 4 * world.index.arena.used
        rows[f"{asked} x {length}"] = {
            "drafted": float(drafted.mean()),
            "bytes_per_token": sealed_bytes / world.tokens,
            "proposal_us": microseconds(world.draft),
        }
    return rows


def _worlds(plan: Plan) -> list[tuple[int, int, int]]:
    """Return batches, lengths of their texts and how many requests ask."""
    batches = sorted(plan.batches, reverse=True)
    shortest, *longer = [2 * context for context in plan.contexts]
    worlds = [(batch, shortest, batch) for batch in batches]
    if plan.tiny:
        return worlds[:1]
    second = batches[1]
    worlds += [(second, length, second) for length in longer]
    return [*worlds, (GROUP, 8 * shortest, 1)]


def _device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def _slowest_draw(found: Found) -> float:
    """Return the time of keyed sampling, of stock's draw, at worst."""
    rows = found["draws"].values()
    return float(max(row["keyed_us"] / row["stock_us"] for row in rows))


def _most_bytes(found: Found) -> float:
    """Return the bytes per sealed token, at worst."""
    rows = found["proposals"].values()
    return float(max(row["bytes_per_token"] for row in rows))


BARS = (
    Bar("keyed sampling, of the time of stock vLLM's draw", 1.0, _slowest_draw),
    Bar(
        "microseconds of a proposal for 256 requests of 4096 tokens",
        150,
        lambda found: found["proposals"]["256 x 4096"]["proposal_us"],
    ),
    Bar(
        "microseconds of a proposal for a request with 16 texts of 32768 tokens",
        120,
        lambda found: found["proposals"]["1 x 32768"]["proposal_us"],
    ),
    Bar("bytes per sealed token", 8.5, _most_bytes),
)


def microseconds(call: Any) -> float:
    """Return the time of a call among many in a row: the host is ahead of the device,
    as it is in an engine.
    """
    timer = Timer("call()", globals={"call": call})
    return 1e6 * float(timer.blocked_autorange().median)
