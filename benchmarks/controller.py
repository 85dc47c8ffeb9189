"""Measure the controller on a real engine: rollout time by budget policy, fixed draft
length and starting batch.

    python benchmarks/controller.py --out FILE.json

The policy is a 0.4 B model (Qwen2-0.5B's shape) in bfloat16 with random weights; its
history is its own text with tokens exchanged at rates of 5 to 40 % (`--rates`), one
rate for each stretch of 16 tokens, and lengths off by a fifth (replayed acceptance).
Lengths are forced, with a long tail.

All arms run in one engine, one after the other, in turns. The engine has been rolling
out before: each arm starts with the step times and the chances learned there, and with
the same history under problem ids of its own. `idle` is the drafter doing nothing, `k3`
three draft tokens for each request. Of `--repeats` the fastest counts. On one core
seconds are those of the processor, for the figures and for the controller: other work
on the machine takes no time.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.bench.engines import TINY, engine, generate, sampling

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
THREADS = int(
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
)
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
MOST = 31
# problem ids of an arm, and weight versions from one to the next: it never sees
# another's
PROBLEMS = 10000
WINDOW = 32
STRETCH = 16  # tokens of a history that agree with what is written at one rate
POLICIES = ("optimal", "das", "uniform", "unlimited")


class Bench:
    """One engine, its requests and their history."""

    def __init__(
        self,
        das: dict[str, Any],
        rates: list[float],
        at_once: int = 64,
        group: int = 4,
        seed: int = 0,
    ):
        from das_adapter.core.index.store import HistoryStore

        self.rates = rates
        self.seed = seed
        self.turn = 0
        self.at_once = at_once
        self.group = group
        directory = Path(f"/tmp/das-random-{os.getpid()}")
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(SHAPE))
        self.store = HistoryStore(directory / "history")
        settings: dict[str, Any] = {
            "max_model_len": 1024,
            "max_num_seqs": at_once,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "kv_cache_memory_bytes": 2**31,
        }
        self.llm = engine(TINY, das, policy=str(directory), **settings)
        core: Any = self.llm.llm_engine.engine_core
        self.runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self.drafter = getattr(self.runner, "drafter", None)

    def requests(self, count: int, longest: int) -> list[dict[str, Any]]:
        """Groups of samples of a problem with lengths of a log-normal tail, and a
        history each.
        """
        rng = np.random.default_rng(self.seed)
        scale = np.repeat(
            rng.lognormal(np.log(longest / 6), 0.7, -(-count // self.group)), self.group
        )[:count]
        lengths = np.clip(scale * rng.lognormal(0, 0.25, count), 8, longest).astype(int)
        lengths[int(np.argmax(lengths))] = longest
        prompts = [rng.integers(1, 32000, 32).tolist() for _ in range(count)]
        return [
            {"prompt": prompt, "problem": i, "seed": 1000 + i, "most": int(length)}
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]

    def run(self, requests: list[dict[str, Any]]) -> tuple[float, list[list[int]]]:
        """Return the seconds of a rollout and its tokens."""
        problems = (r["problem"] + self.turn * PROBLEMS for r in requests)
        params = sampling(
            (r["most"] for r in requests), problems, (r["seed"] for r in requests)
        )
        return generate(
            self.llm, [{"prompt_token_ids": r["prompt"]} for r in requests], params
        )

    def history(
        self, requests: list[dict[str, Any]], texts: list[list[int]]
    ) -> list[tuple[int, bytes, int]]:
        """What the run is taken to have written at weight versions 0 and 1."""
        rng = np.random.default_rng(self.seed + 1)
        found = []
        for version in (0, 1):
            for r, text in zip(requests, texts, strict=True):
                ids = np.asarray(text, dtype=np.int32)
                other = rng.integers(1, 32000, len(ids), dtype=np.int32)
                rate = np.repeat(
                    rng.choice(self.rates, len(ids) // STRETCH + 1), STRETCH
                )[: len(ids)]
                ids = np.where(rng.random(len(ids)) < rate, other, ids)
                length = max(4, int(len(ids) * rng.lognormal(0, 0.2)))
                tail = rng.integers(1, 32000, max(0, length - len(ids)), dtype=np.int32)
                ids = np.concatenate([ids, tail])[:length]
                found.append((r["problem"], ids.astype(np.int32).tobytes(), version))
        return found

    def remember(self, written: list[Any]) -> None:
        """Make trajectories history: (problem, int32 tokens, weight version)."""
        from das_adapter.config import HistoryConfig
        from das_adapter.core.history import HistoryRules

        HistoryRules(HistoryConfig()).add_and_seal(self.store, written)

    def practise(
        self, index: Any, remember: Callable[[Any], Any], count: int = 300
    ) -> None:
        """Draft for `count` other problems of the same kind without the engine: what a
        run has learned before. `remember`: makes trajectories the history that the
        index maps.
        """
        rng = np.random.default_rng(self.seed + 2)
        texts = [rng.integers(1, 32000, 200, dtype=np.int32) for _ in range(count)]
        problems = [{"problem": i} for i in range(count)]  # those of turn 0
        remember(self.history(problems, [text.tolist() for text in texts]))
        for r, text in zip(problems, texts, strict=True):
            handle = index.open(r["problem"], text[:1])
            at = 1
            while at < len(text):
                (flat,), _ = index.draft([handle], [min(MOST, len(text) - at)], 0.01)
                kept = int(
                    np.argmin(np.append(flat == text[at : at + len(flat)], False))
                )
                index.extend(handle, text[at : at + kept + 1])
                at += kept + 1
            index.close(handle, keep=False)

    def prepare(
        self, arm: str, trajectories: list[tuple[int, bytes, int]], times: Any = None
    ) -> None:
        """A controller for an arm, with the step times seen so far, and the history
        under new problem ids.
        """
        from das_adapter.config import DasConfig
        from das_adapter.core.policy import DraftPolicy
        from das_adapter.engine.timing import StepTimer
        from das_adapter.protocol.messages import (
            Published,
            Refresh,
            Trajectory,
            responses,
        )

        policy = arm if arm in POLICIES else "unlimited"
        max_draft_tokens = MOST
        if arm not in POLICIES and arm[0] == "k":
            max_draft_tokens = int(arm[1:])
        speculate = "auto" if arm == "optimal" else "always"
        drafter = self.drafter
        das = DasConfig(
            budget=policy, max_draft_tokens=max_draft_tokens, speculate=speculate
        )
        drafts = DraftPolicy(das, self.runner.max_model_len)
        if times is not None:
            drafts.latency = copy.deepcopy(times)
        drafter.emit_drafts()
        drafter.catch_up()  # what was put off is about the policy before
        drafter.engine.close(list(drafter.engine.live))
        drafter.engine.policy = drafts
        drafter.timer = StepTimer()
        drafter.engine.counters.read_and_reset()
        self.turn += 1
        shift = self.turn * PROBLEMS
        version = self.turn * WINDOW
        kept = [
            Trajectory(problem + shift, text, version + age - 2)
            for problem, text, age in trajectories
        ]
        self.remember(kept)
        history = Published(str(self.store.directory), self.store.generation)
        drafter.refresh(Refresh(version, history, responses(kept).tobytes()))
        if arm == "idle":
            drafts.stop("idle")

    def arm(
        self, name: str, requests: Any, trajectories: Any, times: Any
    ) -> dict[str, Any]:
        """Run one arm's rollout."""
        self.prepare(name, trajectories, times)
        seconds, texts = self.run(requests)
        counters = vars(self.drafter.engine.counters)
        if self.drafter.engine.counters.error:
            sys.exit(f"{name}: {self.drafter.engine.counters.error}")
        return {
            "seconds": seconds,
            "steps": counters["steps"],
            "draft_tokens": counters["draft_tokens"],
            "accepted_tokens": counters["accepted_tokens"],
            "propose_ms_p50": float(np.median(counters["propose_seconds"]) * 1e3),
            "time_saved_s": self.drafter.stats()["time_saved_s"],
            "hash": digest(texts),
        }


def digest(texts: list[list[int]]) -> str:
    """Return a hash of all tokens, in order."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the repetition that took least time; other processes on the machine only
    add to it.
    """
    return {
        **min(rows, key=lambda r: float(r["seconds"])),
        "all_seconds": [round(r["seconds"], 3) for r in rows],
    }


def compare(
    bench: Bench, arms: list[str], count: int, longest: int, repeats: int, times: Any
) -> dict[str, Any]:
    """Roll out the same requests with every arm, in turns."""
    requests = bench.requests(count, longest)
    bench.prepare("idle", [])
    _, texts = bench.run(requests)
    trajectories = bench.history(requests, texts)
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for turn in range(repeats):
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            rows[arm].append(bench.arm(arm, requests, trajectories, times))
    found = {arm: best(r) for arm, r in rows.items()}
    return {
        "requests": count,
        "longest": max(map(len, texts)),
        "tokens": sum(map(len, texts)),
        "identical_tokens": (
            len({r["hash"] for rs in rows.values() for r in rs} | {digest(texts)}) == 1
        ),
        "arms": found,
    }


def warm(bench: Bench) -> Any:
    """Step times of an engine that has been rolling out for a while."""
    requests = bench.requests(48, 96)
    bench.prepare("optimal", [])
    index = bench.drafter.engine.history.index
    bench.practise(index, lambda written: (bench.remember(written), index.refresh()))
    _, texts = bench.run(requests)
    trajectories = bench.history(requests, texts)
    for arm in ("optimal", "k3", "k15", "optimal", "optimal"):
        bench.prepare(arm, trajectories, bench.drafter.engine.policy.latency)
        bench.run(requests if arm == "optimal" else requests[:16])
    times = bench.drafter.engine.policy.latency
    times.fit()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 8, 32, 64],
        help="requests of a rollout",
    )
    parser.add_argument(
        "--longest", type=int, default=160, help="tokens of the longest response"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--group", type=int, default=4, help="samples of a problem")
    parser.add_argument(
        "--at-once", type=int, default=64, help="requests that the engine runs at once"
    )
    parser.add_argument(
        "--arms", nargs="+", default=["idle", *POLICIES, "k1", "k3", "k7"]
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from provenance import provenance, save

    if THREADS == 1:
        time.perf_counter = time.process_time
    block = {
        "budget": "optimal",
        "max_draft_tokens": MOST,
        "verify": {"noise": "keyed"},
    }
    bench = Bench(block, args.rates, args.at_once, args.group)
    times = warm(bench)
    arguments = {name: value for name, value in vars(args).items() if name != "out"} | {
        "threads": THREADS
    }
    result: dict[str, Any] = {
        "provenance": provenance(),
        "arguments": arguments,
        "latency_model": asdict(times.model),
        "rollouts": {},
    }
    for count in args.batches:
        row = compare(bench, args.arms, count, args.longest, args.repeats, times)
        result["rollouts"][str(count)] = row
        save(args.out, result)
        base = row["arms"][args.arms[0]]["seconds"]
        print(
            f"{count} requests, {row['tokens']} tokens, identical tokens:"
            f" {row['identical_tokens']}"
        )
        for arm, figures in row["arms"].items():
            print(
                f"  {arm:10} {figures['seconds'] / base:5.2f} "
                f" {figures['all_seconds']}",
                flush=True,
            )
    os._exit(0)  # vLLM's own teardown adds nothing


if __name__ == "__main__":
    main()
