"""`kernels`: what our kernels take: the sampler's on vLLM's V1 runner, beside stock's,
and a proposal of the history's on V2. Needs no vLLM.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import Timer

from das_adapter.bench.engines import Bar, Found, Plan, apart

GROUP = 16
STEPS = 16


class World:
    """A batch in groups that write the same with mistakes, on a device; its problems
    have sealed text. Tokens are as frequent as words are in natural text: the r-th has
    a weight of 1 / (r + 2.7) (Zipf and Mandelbrot).
    """

    def __init__(
        self, plan: Plan, batch: int, length: int, asked: int, device: str
    ) -> None:
        """`asked`: of so many requests of the batch a proposal drafts."""
        from das_adapter.core.index import SuffixIndex
        from das_adapter.core.index.store import HistoryStore
        from das_adapter.engine.v2.device_index import DeviceIndex

        rng = np.random.default_rng(batch)
        vocabulary = plan.vocabulary
        problems = -(-batch // GROUP)
        below = (1 / (np.arange(1, vocabulary + 1) + 2.7)).cumsum()

        def natural(*shape: int) -> np.ndarray:
            return np.searchsorted(below, below[-1] * rng.random(shape)).astype(
                np.int32
            )

        poems = natural(problems, length)

        def variation(problem: int) -> np.ndarray:
            return np.where(rng.random(length) < 0.1, natural(length), poems[problem])

        with (
            tempfile.TemporaryDirectory() as directory,
            HistoryStore(directory) as store,
        ):
            for problem in range(problems):
                for _ in range(GROUP):
                    store.add(problem, variation(problem), 0)
            store.seal()
            sealed = SuffixIndex.attach(directory)
        self.tokens = problems * GROUP * length
        texts = torch.zeros(batch, length + 8, dtype=torch.int32)
        for slot in range(batch):
            texts[slot, 8:] = torch.from_numpy(variation(slot // GROUP))
        self.total = torch.from_numpy(
            rng.integers(length - length // 8, length, batch).astype(np.int32)
        ).to(device)
        words = 3 * self.tokens + 2**16
        self.index = DeviceIndex(
            texts.to(device), min(STEPS, length // 4), words, 0.0, vocabulary
        )
        self.index.open([(slot, slot // GROUP, 8) for slot in range(batch)])
        while self.index.arena.unsealed:  # a piece in each step
            self.index.arena.bring(sealed)
        self.slots = torch.arange(asked, device=device)
        self.sampled = torch.ones(asked, dtype=torch.int32, device=device)

    def draft(self) -> torch.Tensor:
        """Draft for those who ask."""
        return self.index.draft(self.slots, self.sampled, self.total)


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Run the part; where there is no GPU, the history's kernels in Triton's
    interpreter.
    """
    found = {"draws": apart(plan, draws, plan)}
    yield found
    yield found | {
        "proposals": apart(
            plan, proposals, plan, env={"TRITON_INTERPRET": "1"} if plan.tiny else {}
        )
    }


def draws(plan: Plan) -> Found:
    """Time both samplers' draws, by number of rows."""
    from das_adapter.engine.v1.keyed_sample import Keys, keyed_sample

    vocabulary = plan.vocabulary
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: Found = {}
    for count in plan.rows:
        seeds = torch.arange(count, device=device)
        logits = torch.randn(count, vocabulary, device=device)
        keys = Keys(seeds * 2**33, seeds)
        rows[str(count)] = {
            "keyed_us": microseconds(lambda x=logits, k=keys: keyed_sample(x, k))
        }
        # without vLLM there is nothing to compare with
        with contextlib.suppress(ImportError):
            from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

            stock = TopKTopPSampler()
            rows[str(count)]["stock_us"] = microseconds(
                lambda x=logits, s=stock: s(x, {}, None, None)
            )
        del logits
    return rows


def proposals(plan: Plan) -> Found:
    """Time proposals, by batch and length of the texts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: Found = {}
    batches = sorted(plan.batches, reverse=True)
    lengths = [2 * context for context in plan.contexts]
    worlds = [(batch, lengths[0], batch) for batch in batches]
    worlds += [(batches[1], length, batches[1]) for length in lengths[1:]] + [
        (GROUP, 8 * lengths[0], 1)
    ]
    for world_of in worlds[:1] if plan.tiny else worlds:
        world = World(plan, *world_of, device)
        (_, length, asked) = world_of
        if device == "cuda":
            world.index.capture([asked])
        world.draft()
        rows[f"{asked} x {length}"] = {
            "drafted": float(world.index.real[:asked].float().mean()),
            "bytes_per_token": 4 * world.index.arena.used / world.tokens,
            "proposal_us": microseconds(world.draft),
        }
    return rows


BARS = (
    Bar(
        "keyed sampling, of the time of stock vLLM's draw",
        1.0,
        lambda f: max(r["keyed_us"] / r["stock_us"] for r in f["draws"].values()),
    ),
    Bar(
        "microseconds of a proposal for 256 requests of 4096 tokens",
        150,
        lambda f: f["proposals"]["256 x 4096"]["proposal_us"],
    ),
    Bar(
        "microseconds of a proposal for a request with 16 texts of 32768 tokens",
        120,
        lambda f: f["proposals"]["1 x 32768"]["proposal_us"],
    ),
    Bar(
        "bytes per sealed token",
        8.5,
        lambda f: max(r["bytes_per_token"] for r in f["proposals"].values()),
    ),
)


def microseconds(call: Any) -> float:
    """Return the time of a call among many in a row: the host is ahead of the device,
    as it is in an engine.
    """
    return 1e6 * float(
        Timer("call()", globals={"call": call}).blocked_autorange().median
    )
