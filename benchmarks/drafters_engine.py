"""An engine of `drafters.py`, in a process of its own: rollouts of the tiny task's
problems, a turn at a time.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TURN_S = 0.5
FIRST = 64
"""Tokens at most of a response in the rollouts that do not count."""


WORK: list[Iterator[dict[str, Any] | None]] = []
"""The work of this process."""


def start(job: dict[str, Any]) -> None:
    """Begin with a job in this process."""
    WORK.append(timed(job))


def turn() -> dict[str, Any] | None:
    """Work on it for a turn; return a result, or None if there is none yet."""
    return next(WORK[0])


def timed(job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """Do what `work_of` does, while the turns of others take no time."""
    waited = 0.0
    clock = time.process_time if job["threads"] == 1 else time.perf_counter
    time.perf_counter = lambda: clock() - waited
    for found in work_of(job):
        begin = clock()
        yield found
        waited += clock() - begin


def engine(job: dict[str, Any]) -> Any:
    from vllm import LLM

    from das_adapter.config import parse
    from das_adapter.core import tuning
    from das_adapter.protocol.engine_args import engine_args

    if job["never"]:
        tuning.FIXED_CHANCE = 1.0
    das = parse(job["das"])
    longest = max(
        2048, max(context for context, _ in job["cells"]) + job["tokens"] + 64
    )
    return LLM(
        job["policy"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=longest,
        seed=0,
        max_num_seqs=64,
        # small: vLLM reads a prompt's last cached block anew for an EAGLE drafter
        block_size=32,
        kv_cache_memory_bytes=640_000_000,
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(4096, longest),
        enable_prefix_caching=job["prefix_caching"],
        **engine_args(das),
    )


Work = list[tuple[list[int], dict[str, Any]]]
"""Prompts, and `extra_args` of their sampling parameters."""


def requests(
    count: int, samples: int, seed: int, context: int = 0, first: int = 0
) -> Work:
    """`count` requests for the longest problems of the tiny task, so many samples of
    each; other problems stand before a prompt of less than `context` tokens. `first`:
    number of the first problem, under which history is kept.
    """
    sys.path.insert(0, str(ROOT / "examples/tiny_math"))
    from prepare_data import make_rows
    from train_policy import ASSISTANT, USER
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny_math/policy")
    rows = sorted(
        make_rows("train", 256, 0), key=lambda row: -row["extra_info"]["difficulty"]
    )
    prompts = [
        tokenizer.encode(f"{USER}{row['prompt'][0]['content']}{ASSISTANT}")
        for row in rows
    ]
    before = [token for prompt in prompts[::-1] for token in prompt]

    def work(i: int, sample: int) -> tuple[list[int], dict[str, Any]]:
        place = i % len(prompts)
        missing = max(0, context - len(prompts[i % len(prompts)]))
        extra = {"das_problem": first + i, "das_seed": seed + 1000 * i + sample}
        return before[place : place + missing] + prompts[place], extra

    return [work(n // samples, n % samples) for n in range(count)]


def stops(count: int, context: int, job: dict[str, Any]) -> list[int] | None:
    """Tokens after which the client ends each response, as its length is not to be
    known before: a long tail. None: it ends by itself, which behind a long context it
    does not.
    """
    if context <= 256 and not job["forced"]:
        return None
    drawn = np.random.default_rng(count).lognormal(*job["lengths"], count)
    return np.clip(drawn, 64, job["tokens"]).astype(int).tolist()


Rollout = tuple[float, list[list[int]], Any]
"""Seconds, texts, and the engine's figures."""


def work_of(job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """What the drafter takes, then for each cell the figures of each epoch of each
    repeat; None where a turn ends before.
    """
    from vllm import SamplingParams

    llm = engine(job)
    vllm = llm.llm_engine
    core = llm.llm_engine.engine_core.engine_core
    serial = count()
    history = History(job["history"])
    sampling = SampleTimer(core)

    def rpc(command: str, **payload: Any) -> Any:
        return (
            llm.collective_rpc("das_rpc", args=(command, payload))[0]
            if job["das"]
            else {}
        )

    def rollout(
        batch: int, work: Work, ends: list[int] | None, most: int
    ) -> Generator[None, None, Rollout]:
        core.scheduler.max_num_active_reqs = batch
        # a weight sync: what the last rollout wrote does not count
        rpc("refresh", version=1)
        llm.reset_prefix_cache()
        rpc("stats")
        sampling.take()
        number = next(serial)
        texts = [list[int]() for _ in work]
        begin = turn = time.perf_counter()
        for i, (prompt, extra) in enumerate(work):
            params = SamplingParams(
                max_tokens=most,
                ignore_eos=ends is not None,
                detokenize=False,
                extra_args=extra,
            )
            vllm.add_request(f"{number}-{i}", {"prompt_token_ids": prompt}, params)
        while vllm.has_unfinished_requests():
            for output in vllm.step():
                i = int(output.request_id.split("-")[1])
                texts[i] = list(output.outputs[0].token_ids)[
                    : ends[i] if ends else None
                ]
                if ends and len(texts[i]) == ends[i] and not output.finished:
                    vllm.abort_request([output.request_id])
            if time.perf_counter() - turn > TURN_S:
                yield
                turn = time.perf_counter()
        seconds = time.perf_counter() - begin
        return seconds, texts, rpc("stats")

    yield from rollout(8, requests(8, 4, 7, first=10**6), None, FIRST)
    refreshed = []
    for _ in range(4):
        rpc("refresh", version=1)
        refreshed.append(rpc("stats").get("requantise_s", 0.0))
    yield {
        "refresh_s": min(refreshed),
        "drafter_bytes": drafter_bytes(job["das"] or {}, rpc("stats")),
    }
    first = 0
    for context, batch in job["cells"]:
        many = max(batch, job["least"])
        ends = stops(many, context, job)
        yield from rollout(
            batch, requests(many, job["samples"], 7, context, 10**6), ends, FIRST
        )
        for _ in range(job["repeats"]):
            first += many
            for epoch in range(job["epochs"]):
                work = requests(many, job["samples"], 99 + 7 * epoch, context, first)
                seconds, texts, stats = yield from rollout(
                    batch, work, ends, job["tokens"]
                )
                figures = summary(seconds, stats or undrafted(texts)) | {
                    "sampler_us": sampling.take()
                }
                # of whole numbers: the same in every process
                figures["tokens_hash"] = hash(tuple(map(tuple, texts)))
                figures["response_tokens"] = [
                    int(np.mean([*map(len, texts)])),
                    max(map(len, texts)),
                ]
                keep = [
                    (extra["das_problem"], np.asarray(t, dtype=np.int32).tobytes(), 1)
                    for (_, extra), t in zip(work, texts, strict=True)
                ]
                yield figures | history.keep(keep, rpc)


class SampleTimer:
    """The processor time of the sampler of an engine's V1 runner."""

    def __init__(self, core: Any) -> None:
        runner = core.model_executor.driver_worker.worker.model_runner
        self._stock = runner._sample
        self._calls = 0
        self._seconds = 0.0
        runner._sample = self._sample

    def take(self) -> float:
        """Mean microseconds of a step since the last call."""
        mean = 1e6 * self._seconds / max(1, self._calls)
        self._calls = 0
        self._seconds = 0.0
        return mean

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        output = self._stock(*args, **kwargs)
        self._calls, self._seconds = (
            self._calls + 1,
            self._seconds + time.perf_counter() - begin,
        )
        return output


class History:
    """The history of an engine, as a node's writer keeps it: sealed by a store, mapped
    by the engine.
    """

    def __init__(self, directory: str) -> None:
        from das_adapter.core.index.store import HistoryStore

        self._directory = directory
        self._store = HistoryStore(directory)

    def keep(
        self, trajectories: list[tuple[int, bytes, int]], rpc: Callable[..., Any]
    ) -> dict[str, float]:
        """Seal what a rollout wrote, and let the engine map it, as at a weight sync;
        return what that took.
        """
        from das_adapter.protocol.messages import Trajectory, responses

        for problem, tokens, version in trajectories:
            self._store.add(problem, np.frombuffer(tokens, dtype=np.int32), version)
        begin = time.perf_counter()
        generation = self._store.seal()
        sealed = time.perf_counter()
        lengths = responses(Trajectory(*one) for one in trajectories).tobytes()
        rpc(
            "refresh", version=1, history=(self._directory, generation), lengths=lengths
        )
        mapped = time.perf_counter()
        while self._store.work():  # which is another process's
            pass
        return {
            "sealed_tokens": self._store.tokens,
            "sealed_bytes": self._store.nbytes,
            "seal_ms": 1000 * (sealed - begin),
            "map_ms": 1000 * (mapped - sealed),
        }


def drafter_bytes(das: dict[str, Any], stats: dict[str, Any]) -> int:
    """Memory that drafting takes beside the policy: the copy's or the neural drafter's
    weights (in 16 bits), and the history. Not counted: a neural drafter's own KV
    cache.
    """
    from safetensors import safe_open

    weights = 0
    for file in (
        Path(das["draft"]["model"]).glob("*.safetensors") if "draft" in das else ()
    ):
        with safe_open(file, "pt") as tensors:
            weights += sum(
                2 * tensors.get_tensor(name).numel() for name in tensors.keys()
            )
    return int(stats.get("drafter_bytes", 0) + stats.get("history_bytes", 0) + weights)


def undrafted(texts: list[list[int]]) -> dict[str, Any]:
    """The figures of an engine that drafts nothing."""
    tokens = sum(map(len, texts))
    none = dict.fromkeys(
        ("accepted_tokens", "draft_tokens", "drafted_forwards", "steps"), 0
    )
    return {
        "tokens": tokens,
        "request_forwards": tokens,
        "error": None,
        "propose_seconds": [],
        **none,
    }


def summary(seconds: float, stats: dict[str, Any]) -> dict[str, Any]:
    """The figures of a rollout; `host_us`: of das-adapter's drafter in an engine
    step.
    """
    host = 1e6 * np.asarray(stats["propose_seconds"] or [0.0])
    return {
        "rollout_s": seconds,
        "tokens": stats["tokens"],
        "tokens_per_forward": stats["tokens"] / stats["request_forwards"],
        "acceptance_length": (
            1 + stats["accepted_tokens"] / max(1, stats["drafted_forwards"])
        ),
        "acceptance_rate": stats["accepted_tokens"] / max(1, stats["draft_tokens"]),
        "drafted_forwards": stats["drafted_forwards"] / stats["request_forwards"],
        "steps": stats["steps"],
        "host_us": {
            "mean": float(host.mean()),
            "p50": float(np.median(host)),
            "p99": float(np.percentile(host, 99)),
        },
        "live_bytes": stats.get("live_bytes", 0),
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "error": stats["error"],
    }
