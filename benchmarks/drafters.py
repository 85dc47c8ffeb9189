"""Measure every drafter on one policy: rollout time relative to off, tokens per forward, memory, refresh.

    python benchmarks/drafters.py POLICY [--arms off self:int4 ...] [--batches 1 4] [--draft DIR] [--eagle DIR]

It samples the same problems at temperature 1 with the same seeds in every arm, with a given number of requests in
flight, after a rollout at that batch which does not count. Each problem is visited in `--epochs` rollouts, the first of
which finds no history. The arms take turns of half a second, within a rollout, so that a machine that becomes slower
does so for all of them; of `--repeats` the fastest counts. With `--prefix-caching` the samples of a problem read its
prompt once; the cache is emptied before each rollout, as at a weight sync. With one thread, seconds are those of the
processor, for the figures and for the controllers: no engine waits for others. Behind a context of more than 256
tokens, or with `--forced`, responses are ended by the client, after a long tail of `--lengths`. What a rollout wrote is
sealed by a store and mapped by the engine, outside its time. `stock` is vLLM without das-adapter, which draws other
tokens, `stock:again` the same in another process; `history:idle` is told to draft what is certain alone, and so drafts
nothing; `history:looks` as well, and looks for drafts in every step.
POLICY with real text in 0.3 B parameters: `examples/tiny_math/widen_policy.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from itertools import count, product
from pathlib import Path
from typing import Any

from provenance import provenance, save

ROOT = Path(__file__).resolve().parents[1]
TURN_S = 0.5
FIRST = 128  # tokens of a response that is ended by the client, in the rollout that does not count
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def block(arm: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """The `das:` block of an arm; `self:int4` names the weights too; `eagle3:always`: in every step. None: stock's, see
    `environment`."""
    drafter, _, variant = arm.partition(":")
    if drafter == "stock":
        return None
    if drafter == "off":
        return {"drafter": "none", "verify": {"noise": "keyed"}}
    das: dict[str, Any] = {"drafter": drafter}
    if variant in ("idle", "looks"):
        return das | {"budget": "uniform", "speculate": "always" if variant == "looks" else "auto"}
    if variant == "always":
        das |= {"budget": "unlimited", "speculate": "always"}
    elif variant:
        das["self"] = {"weights": variant}
    if drafter.endswith(("draft_model", "eagle3")):
        das["draft"] = {"model": str(args.draft if drafter.endswith("draft_model") else args.eagle)}
    if drafter == "ngram":
        das["max_draft_tokens"] = 4
    return das


def environment(arm: str) -> dict[str, str]:
    """Variables of an arm's process alone. `stock:uncompiled`: vLLM's sampler is not compiled, as das-adapter's is not;
    `stock:again`: as `stock`, for what two processes differ by."""
    return {"TORCHDYNAMO_DISABLE": "1"} if arm == "stock:uncompiled" else {}


class Child:
    """An engine in a process of its own, which works when asked and else waits."""

    def __init__(self, job: dict[str, Any]):
        self._name, self._log = job["arm"], tempfile.TemporaryFile("w+")
        variables = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(job["threads"]), **environment(job["arm"])}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "child"],
            stdin=subprocess.PIPE,
            text=True,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=variables,
        )
        self._tell(json.dumps(job))

    def next(self) -> Any:
        """Its next result."""
        while (result := self.turn()) is None:
            pass
        return result

    def turn(self) -> Any:
        """Let it work for a turn; return its result, or None if it is not through."""
        self._tell("go on")
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        self._log.seek(0)
        sys.exit(f"{self._name} failed:\n{self._log.read()[-4000:]}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def child() -> None:
    """The other end: a job, then a turn for each further line, and after it a result, or null."""
    job = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as job["history"]:
        results = work_of(job)
        waited, clock = 0.0, time.process_time if job["threads"] == 1 else time.perf_counter
        time.perf_counter = lambda: clock() - waited  # the turns of others take no time
        while True:
            begin = clock()
            if not sys.stdin.readline():
                return
            waited += clock() - begin
            print("RESULT " + json.dumps(next(results)), flush=True)


def engine(job: dict[str, Any]) -> Any:
    from vllm import LLM

    from das_adapter.config import parse
    from das_adapter.core import controller
    from das_adapter.protocol.engine_args import engine_args, engine_env

    if job.get("never"):
        controller.FIXED_CHANCE = 1.0
    das = parse(job["das"])
    os.environ.update(engine_env(das))
    longest = max(2048, max(job.get("contexts", [0])) + job.get("tokens", 0) + 64)
    return LLM(
        job["policy"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=longest,
        seed=0,
        max_num_seqs=64,
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(4096, longest),
        enable_prefix_caching=bool(job.get("prefix_caching")),
        **engine_args(das),
    )


Work = list[tuple[list[int], dict[str, Any]]]
"""Prompts, and `extra_args` of their sampling parameters."""


def requests(count: int, samples: int, seed: int, context: int = 0, first: int = 0) -> Work:
    """`count` requests for the longest problems of the tiny task, so many samples of each; other problems stand before
    a prompt of less than `context` tokens. `first`: number of the first problem, under which history is kept."""
    sys.path.insert(0, str(ROOT / "examples/tiny_math"))
    from prepare_data import make_rows
    from train_policy import ASSISTANT, USER
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny_math/policy")
    rows = sorted(make_rows("train", 256, 0), key=lambda row: -row["extra_info"]["difficulty"])
    prompts = [tokenizer.encode(f"{USER}{row['prompt'][0]['content']}{ASSISTANT}") for row in rows]
    before = [token for prompt in prompts[::-1] for token in prompt]

    def work(i: int, sample: int) -> tuple[list[int], dict[str, Any]]:
        place, missing = i % len(prompts), max(0, context - len(prompts[i % len(prompts)]))
        extra = {"das_problem": first + i, "das_seed": seed + 1000 * i + sample}
        return before[place : place + missing] + prompts[place], extra

    return [work(n // samples, n % samples) for n in range(count)]


def stops(count: int, context: int, job: dict[str, Any]) -> list[int] | None:
    """Tokens after which the client ends each response, as its length is not to be known before: a long tail. None: it
    ends by itself, which behind a long context it does not."""
    if context <= 256 and not job["forced"]:
        return None
    import numpy as np

    drawn = np.random.default_rng(count).lognormal(*job["lengths"], count)
    return np.clip(drawn, 64, job["tokens"]).astype(int).tolist()


Rollout = tuple[float, list[list[int]], Any]
"""Seconds, texts, and the engine's figures."""


def work_of(job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """What the drafter takes, then for each context and batch the figures of each epoch of each repeat; None where a
    turn ends before."""
    import numpy as np
    from vllm import SamplingParams

    llm = engine(job)
    vllm, core, serial = llm.llm_engine, llm.llm_engine.engine_core.engine_core, count()
    history, sampling = History(job["history"]), SampleTimer(core)

    def rpc(command: str, **payload: Any) -> Any:
        return llm.collective_rpc("das_rpc", args=(command, payload))[0] if job["das"] else {}

    def rollout(batch: int, work: Work, ends: list[int] | None = None) -> Generator[None, None, Rollout]:
        core.scheduler.max_num_running_reqs = batch
        rpc("refresh", version=1)  # a weight sync: what the last rollout wrote does not count
        llm.reset_prefix_cache()
        rpc("stats")
        sampling.take()
        number, texts = next(serial), [list[int]() for _ in work]
        begin = turn = time.perf_counter()
        for i, (prompt, extra) in enumerate(work):
            params = SamplingParams(
                max_tokens=job["tokens"], ignore_eos=ends is not None, detokenize=False, extra_args=extra
            )
            vllm.add_request(f"{number}-{i}", {"prompt_token_ids": prompt}, params)
        while vllm.has_unfinished_requests():
            for output in vllm.step():
                i = int(output.request_id.split("-")[1])
                texts[i] = list(output.outputs[0].token_ids)[: ends[i] if ends else None]
                if ends and len(texts[i]) == ends[i] and not output.finished:
                    vllm.abort_request([output.request_id])
            if time.perf_counter() - turn > TURN_S:
                yield
                turn = time.perf_counter()
        seconds = time.perf_counter() - begin
        return seconds, texts, rpc("stats")

    yield from rollout(8, requests(8, 4, 7, first=10**6))
    refreshed = []
    for _ in range(4):
        rpc("refresh", version=1)
        refreshed.append(rpc("stats").get("requantise_s", 0.0))
    yield {"refresh_s": min(refreshed), "drafter_bytes": drafter_bytes(job["das"] or {}, rpc("stats"))}
    first = 0
    for context, batch in product(job["contexts"], job["batches"]):
        many = max(batch, job["least"])
        ends = stops(many, context, job)
        few = ends and [min(end, FIRST) for end in ends]
        yield from rollout(batch, requests(many, job["samples"], 7, context, 10**6), few)  # the first at this batch
        for _ in range(job["repeats"]):
            first += many
            for epoch in range(job["epochs"]):
                work = requests(many, job["samples"], 99 + 7 * epoch, context, first)
                seconds, texts, stats = yield from rollout(batch, work, ends)
                figures = summary(seconds, stats or undrafted(texts)) | {"sampler_us": sampling.take()}
                figures["tokens_hash"] = hash(tuple(map(tuple, texts)))  # of whole numbers: the same in every process
                figures["response_tokens"] = [int(np.mean([*map(len, texts)])), max(map(len, texts))]
                keep = [
                    (extra["das_problem"], np.asarray(t, dtype=np.int32).tobytes(), 1)
                    for (_, extra), t in zip(work, texts, strict=True)
                ]
                yield figures | history.keep(keep, rpc)


class SampleTimer:
    """The processor time of the sampler of an engine's V1 runner."""

    def __init__(self, core: Any) -> None:
        runner = core.model_executor.driver_worker.worker.model_runner
        self._stock, self._calls, self._seconds = runner._sample, 0, 0.0
        runner._sample = self._sample

    def take(self) -> float:
        """Mean microseconds of a step since the last call."""
        mean = 1e6 * self._seconds / max(1, self._calls)
        self._calls, self._seconds = 0, 0.0
        return mean

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        output = self._stock(*args, **kwargs)
        self._calls, self._seconds = self._calls + 1, self._seconds + time.perf_counter() - begin
        return output


class History:
    """The history of an engine, as a node's writer keeps it: sealed by a store, mapped by the engine."""

    def __init__(self, directory: str) -> None:
        from das_adapter.core.index.store import HistoryStore

        self._directory, self._store = directory, HistoryStore(directory)

    def keep(self, trajectories: list[tuple[int, bytes, int]], rpc: Callable[..., Any]) -> dict[str, float]:
        """Seal what a rollout wrote, and let the engine map it, as at a weight sync; return what that took."""
        import numpy as np

        from das_adapter.protocol.messages import Trajectory, responses

        for problem, tokens, version in trajectories:
            self._store.add(problem, np.frombuffer(tokens, dtype=np.int32), version)
        begin = time.perf_counter()
        generation = self._store.seal()
        sealed = time.perf_counter()
        lengths = responses(Trajectory(*one) for one in trajectories).tobytes()
        rpc("refresh", version=1, history=(self._directory, generation), lengths=lengths)
        mapped = time.perf_counter()
        self._store.settle()  # what follows in the background is another process's
        return {
            "sealed_tokens": self._store.tokens,
            "sealed_bytes": self._store.nbytes,
            "seal_ms": 1000 * (sealed - begin),
            "map_ms": 1000 * (mapped - sealed),
        }


def drafter_bytes(das: dict[str, Any], stats: dict[str, Any]) -> int:
    """Memory that drafting takes beside the policy: the copy's or the neural drafter's weights (in 16 bits), and the
    history. Not counted: a neural drafter's own KV cache."""
    from safetensors import safe_open

    weights = 0
    for file in Path(das["draft"]["model"]).glob("*.safetensors") if "draft" in das else ():
        with safe_open(file, "pt") as tensors:
            weights += sum(2 * tensors.get_tensor(name).numel() for name in tensors.keys())
    return int(stats.get("drafter_bytes", 0) + stats.get("history_bytes", 0) + weights)


def undrafted(texts: list[list[int]]) -> dict[str, Any]:
    """The figures of an engine that drafts nothing."""
    tokens = sum(map(len, texts))
    none = dict.fromkeys(("accepted_tokens", "draft_tokens", "drafted_forwards", "steps"), 0)
    return {"tokens": tokens, "request_forwards": tokens, "error": None, "propose_seconds": [], **none}


def summary(seconds: float, stats: dict[str, Any]) -> dict[str, Any]:
    """The figures of a rollout; `host_us`: of das-adapter's drafter in an engine step."""
    import numpy as np

    host = 1e6 * np.asarray(stats["propose_seconds"] or [0.0])
    return {
        "rollout_s": seconds,
        "tokens": stats["tokens"],
        "tokens_per_forward": stats["tokens"] / stats["request_forwards"],
        "acceptance_length": 1 + stats["accepted_tokens"] / max(1, stats["drafted_forwards"]),
        "acceptance_rate": stats["accepted_tokens"] / max(1, stats["draft_tokens"]),
        "drafted_forwards": stats["drafted_forwards"] / stats["request_forwards"],
        "steps": stats["steps"],
        "host_us": {"mean": float(host.mean()), "p50": float(np.median(host)), "p99": float(np.percentile(host, 99))},
        "live_bytes": stats.get("live_bytes", 0),
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "error": stats["error"],
    }


def base(results: dict[str, Any]) -> str:
    """The arm that the others are compared with."""
    return next((arm for arm in ("stock", "off") if arm in results), next(iter(results)))


def markdown(results: dict[str, Any]) -> str:
    """Rollout time of the base and tokens per forward, a table for each context and epoch."""
    cells = [tuple(cell.split("/")) for cell in next(iter(results.values()))["cells"]]
    lines = []
    for context, epoch in dict.fromkeys((context, epoch) for context, _, epoch in cells):
        batches = [batch for c, batch, e in cells if (c, e) == (context, epoch)]
        lines += [
            f"Context {context}, epoch {epoch}: rollout time of {base(results)}, tokens per forward",
            "",
            "| drafter | " + " | ".join(f"batch {batch}" for batch in batches) + " |",
            "|---" * (len(batches) + 1) + "|",
        ]
        for arm, result in results.items():
            row = []
            for batch in batches:
                f, off = (r["cells"][f"{context}/{batch}/{epoch}"] for r in (result, results[base(results)]))
                share = (
                    f"{f['rollout_s']:.2f} s" if arm == base(results) else f"{f['rollout_s'] / off['rollout_s']:.3f}"
                )
                same = "" if f["tokens_hash"] == off["tokens_hash"] else " (other tokens)"
                row.append(f"{share}, {f['tokens_per_forward']:.2f}{same}")
            lines.append(f"| {arm} | " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path, help="`child`: an engine of the benchmark's")
    parser.add_argument(
        "--arms", nargs="+", default=["off", "self:int4", "self:int8", "history", "history+self", "ngram"]
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=[256], help="tokens of a prompt at least")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--samples", type=int, default=4, help="of each problem")
    parser.add_argument("--least", type=int, default=2, help="requests of a rollout at least")
    parser.add_argument("--tokens", type=int, default=800, help="most tokens of a response")
    parser.add_argument("--epochs", type=int, default=2, help="visits of each problem; the first finds no history")
    parser.add_argument("--repeats", type=int, default=2, help="each with problems of its own")
    parser.add_argument("--prefix-caching", action="store_true", help="samples of a problem read its prompt once")
    parser.add_argument("--forced", action="store_true", help="lengths of responses as behind a long context")
    parser.add_argument(
        "--lengths", nargs=2, type=float, default=[5.7, 0.45], help="mean and deviation of their logarithm"
    )
    parser.add_argument("--threads", type=int, default=1, help="more than one needs a machine with nobody else on it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft", type=Path, help="checkpoint of the arm draft_model")
    parser.add_argument("--eagle", type=Path, help="checkpoint of the arm eagle3")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.policy == Path("child"):
        child()
        os._exit(0)
    common = {name: value for name, value in vars(args).items() if name not in ("arms", "draft", "eagle", "out")}
    jobs = {arm: common | {"policy": str(args.policy), "arm": arm, "das": block(arm, args)} for arm in args.arms}
    for arm, job in jobs.items():
        job["never"] = arm.endswith((":idle", ":looks"))
    children = {arm: Child(job) for arm, job in jobs.items()}
    results = {arm: children[arm].next() for arm in jobs}  # one engine starts after the other
    take_turns(children, results, args)
    print(markdown(results))


def take_turns(children: dict[str, Child], results: dict[str, Any], args: argparse.Namespace) -> None:
    """Rollouts of all arms in turns; what is measured is written after each epoch."""
    for arm in results:
        results[arm]["cells"] = {}
    for context, batch in product(args.contexts, args.batches):
        rows: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for epoch in list(range(args.epochs)) * args.repeats:
            pending = list(children)
            while pending:
                found = {arm: children[arm].turn() for arm in pending}
                pending = [arm for arm in pending if found[arm] is None]
                for arm in found.keys() - pending:
                    rows[arm, epoch].append(found[arm])
            for arm in results:
                found = rows[arm, epoch]
                fastest = min(found, key=lambda f: float(f["rollout_s"]))
                seconds = {"all_rollout_s": [round(f["rollout_s"], 3) for f in found]}
                results[arm]["cells"][f"{context}/{batch}/{epoch + 1}"] = fastest | seconds
            if args.out:
                save(args.out, {"provenance": provenance(), "results": results})
                args.out.with_suffix(".md").write_text(markdown(results))


if __name__ == "__main__":
    main()
