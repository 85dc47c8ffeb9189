"""Measure every drafter on one policy: rollout time relative to off, tokens per forward, memory, refresh, step times.

    python benchmarks/drafters.py modes POLICY [--arms off self:int4 ...] [--batches 1 4] [--draft DIR] [--eagle DIR]
    python benchmarks/drafters.py steps [CONFIG_DIR] [--batches 1 4]

`modes` samples the same problems at temperature 1 with the same seeds in every arm, with a given number of requests in
flight, after a warm-up that fills the history. The arms take turns; of `--repeats` rollouts the fastest counts. For the
policy copy it also drafts a fixed length, and compares the speed-up with the roofline, L / (γ r + v), from the measured
step times and with the batch as it becomes smaller.
`steps` loads random weights into the architecture of CONFIG_DIR (without: Qwen3-0.6B) and times a step of the policy,
of the copy, and of verification. POLICY with real text in 0.3 B parameters: `examples/tiny_math/widen_policy.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
FIXED = 4  # tokens of the fixed-length drafts
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def block(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """The `das:` block of an arm; `self:int4` names the weights too; `eagle3:always`: in every step."""
    drafter, _, variant = arm.partition(":")
    if drafter == "off":
        return {"drafter": "none", "verify": {"noise": "keyed"}}
    das: dict[str, Any] = {"drafter": drafter}
    if variant == "always":
        das |= {"budget": {"policy": "unlimited"}, "toggle": {"mode": "off"}}
    elif variant:
        das["self"] = {"weights": variant}
    if drafter.endswith(("draft_model", "eagle3")):
        das["draft"] = {"model": str(args.draft if drafter.endswith("draft_model") else args.eagle)}
    if drafter == "ngram":
        das["budget"] = {"max_draft_tokens": 4}
    return das


class Child:
    """An engine in a process of its own, which works when asked and else waits."""

    def __init__(self, job: dict[str, Any]):
        self._name, self._log = job["das"], tempfile.TemporaryFile("w+")
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(job["threads"])}
        self._process = subprocess.Popen([sys.executable, __file__, "child"], stdin=subprocess.PIPE, text=True,
                                         stdout=subprocess.PIPE, stderr=self._log, env=environment)  # fmt: skip
        self._tell(json.dumps(job))

    def next(self) -> Any:
        """Its next result."""
        self._tell("next")
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
    """The other end: a job, then a result for each further line."""
    job = json.loads(sys.stdin.readline())
    results = child_modes(job) if job["what"] == "modes" else iter([child_steps(job)])
    while sys.stdin.readline():
        print("RESULT " + json.dumps(next(results)), flush=True)


def engine(job: dict[str, Any], **more: Any) -> Any:
    from vllm import LLM

    from das_adapter.config import parse
    from das_adapter.protocol.engine_args import engine_args, engine_env

    das = parse(job["das"])
    os.environ.update(engine_env(das))
    return LLM(job["policy"], dtype=job["dtype"], enforce_eager=True, max_model_len=1024, max_num_seqs=64, seed=0,
               enable_prefix_caching=False, **engine_args(das), **more)  # fmt: skip


def requests(count: int, samples: int, seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    """The longer problems of the tiny task, `samples` times each."""
    sys.path.insert(0, str(ROOT / "examples/tiny_math"))
    from prepare_data import make_rows
    from train_policy import ASSISTANT, USER
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny_math/policy")
    rows = sorted(make_rows("train", 48, 0), key=lambda row: -row["extra_info"]["difficulty"])[:count]
    return [
        (tokenizer.encode(f"{USER}{row['prompt'][0]['content']}{ASSISTANT}"),
         {"das_problem": i, "das_seed": seed + 1000 * i + sample})
        for i, row in enumerate(rows) for sample in range(samples)
    ]  # fmt: skip


def child_modes(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the drafter takes, then a rollout's figures for each batch and repeat."""
    import numpy as np

    llm = engine(job)
    core = llm.llm_engine.engine_core.engine_core

    def rpc(command: str, **payload: Any) -> Any:
        return llm.collective_rpc("das_rpc", args=(command, payload))[0]

    def rollout(batch: int, work: list[tuple[list[int], dict[str, Any]]]) -> tuple[float, list[list[int]], Any]:
        from vllm import SamplingParams

        core.scheduler.max_num_running_reqs = batch
        rpc("refresh", version=1)  # a weight sync: what the last rollout wrote does not count
        rpc("stats")
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work],
                               [SamplingParams(max_tokens=job["tokens"], extra_args=extra) for _, extra in work],
                               use_tqdm=False)  # fmt: skip
        seconds = time.perf_counter() - begin
        return seconds, [list(o.outputs[0].token_ids) for o in outputs], rpc("stats")

    work = requests(job["problems"], 2, 7)
    _, texts, _ = rollout(32, work)
    keep = [(extra["das_problem"], np.asarray(t, dtype=np.int32).tobytes(), 0)
            for (_, extra), t in zip(work, texts, strict=True)]  # fmt: skip
    rpc("refresh", version=1, trajectories=keep)
    refreshed = min(rpc("refresh", version=1).get("requantise_s", 0.0) for _ in range(4))
    yield {"refresh_s": refreshed, "drafter_bytes": drafter_bytes(job["das"], rpc("stats"))}
    for batch in job["batches"]:
        work = requests(max(job["problems"], batch), 1, 99)
        for repeat in range(job["repeats"]):
            seconds, texts, stats = rollout(batch, work)
            figures = summary(seconds, stats)
            figures["tokens_hash"] = hash(tuple(map(tuple, texts)))  # of whole numbers: the same in every process
            if not repeat and job["das"]["drafter"] == "self" and batch <= 4:
                figures["fixed"] = fixed_length(llm, batch, work, rollout)
            yield figures


def drafter_bytes(das: dict[str, Any], stats: dict[str, Any]) -> int:
    """Memory that drafting takes beside the policy: the copy's or the neural drafter's weights (in 16 bits), and the
    history. Not counted: a neural drafter's own KV cache."""
    from safetensors import safe_open

    weights = 0
    for file in Path(das["draft"]["model"]).glob("*.safetensors") if "draft" in das else ():
        with safe_open(file, "pt") as tensors:
            weights += sum(2 * tensors.get_tensor(name).numel() for name in tensors.keys())
    return int(stats.get("drafter_bytes", 0) + stats.get("history_bytes", 0) + weights)


def summary(seconds: float, stats: dict[str, Any]) -> dict[str, Any]:
    return {
        "rollout_s": seconds,
        "tokens": stats["tokens"],
        "tokens_per_forward": stats["tokens"] / stats["request_forwards"],
        "acceptance_length": 1 + stats["accepted_tokens"] / max(1, stats["drafted_forwards"]),
        "acceptance_rate": stats["accepted_tokens"] / max(1, stats["draft_tokens"]),
        "drafted_forwards": stats["drafted_forwards"] / stats["request_forwards"],
        "error": stats["error"],
    }


def fixed(drafter: Any, length: int) -> Any:
    """A controller under which the copy always drafts so many tokens."""
    from das_adapter.config import BudgetConfig, ToggleConfig
    from das_adapter.core.controller import Controller

    budget, toggle = BudgetConfig(policy="unlimited"), ToggleConfig(mode="off")
    return Controller(budget, toggle, 1024, drafts=drafter.model_source.drafts, most=length)


def record_step_times() -> dict[tuple[int, int], list[float]]:
    """Keep every step time that a model is told from now on, by the model and the tokens of the step."""
    from das_adapter.core.latency import StepTimes

    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    add = StepTimes.add

    def recorded(self: Any, tokens: int, requests: int, drafted: bool, seconds: float) -> None:
        times[(id(self), tokens)].append(seconds)
        add(self, tokens, requests, drafted, seconds)

    StepTimes.add = recorded  # type: ignore[method-assign]
    return times


def fixed_length(llm: Any, batch: int, work: Any, rollout: Any) -> Any:
    """Draft always `FIXED` tokens and never, and set the speed-up beside the roofline's."""
    import numpy as np

    from das_adapter.core.toggle import seconds_of

    drafter = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    usual, times = drafter.controller, record_step_times()
    out: dict[str, Any] = {}
    policies = []
    for length in (0, FIXED):
        drafter.restart(fixed(drafter, length))
        policies.append(id(drafter.controller.times))
        seconds, texts, stats = rollout(batch, work)
        out[str(length)] = summary(seconds, stats)
    drafter.restart(usual)
    policy, copy = (
        {tokens: median(seen) for (model, tokens), seen in times.items() if model in models and len(seen) > 2}
        for models in (policies, [id(drafter.model_source.drafts.passes)])
    )

    def at(curve: dict[int, float], tokens: Any) -> Any:
        return np.interp(tokens, sorted(curve), [curve[n] for n in sorted(curve)])

    lengths = np.array([len(text) for text in texts], dtype=float)
    plain = seconds_of(lengths, batch, lambda b: at(policy, b))
    drafted = seconds_of(lengths / out[str(FIXED)]["tokens_per_forward"], batch,
                         lambda b: FIXED * at(copy, b) + at(policy, (FIXED + 1) * b))  # fmt: skip
    return out | {
        "policy_ms": at(policy, batch) * 1e3, "copy_ms": at(copy, batch) * 1e3,
        "verify_ms": at(policy, batch * (FIXED + 1)) * 1e3, "roofline": plain / drafted,
        "measured": out["0"]["rollout_s"] / out[str(FIXED)]["rollout_s"],
    }  # fmt: skip


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 151645,
}  # fmt: skip
"""The architecture of Qwen3-0.6B."""


def child_steps(job: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    llm = engine(job, load_format="dummy", skip_tokenizer_init=True)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter, times = runner.drafter, record_step_times()
    controllers = {length: fixed(drafter, length) for length in (0, FIXED)}
    policy, verify, copy = (
        id(x) for x in (controllers[0].times, controllers[FIXED].times, drafter.model_source.drafts.passes)
    )
    rows = {}
    for batch in job["batches"]:
        for length in (0, FIXED):
            drafter.restart(controllers[length])
            llm.generate([{"prompt_token_ids": [5 + i] * 64} for i in range(batch)],
                         SamplingParams(max_tokens=20 + 20 * length, ignore_eos=True, detokenize=False, temperature=0),
                         use_tqdm=False)  # fmt: skip
        plain = times[(policy, batch)]
        rows[batch] = {"policy_ms": min(plain) * 1e3, "copy_ms": min(times[(copy, batch)]) * 1e3,
                       "policy_ms_median": median(plain) * 1e3, "copy_ms_median": median(times[(copy, batch)]) * 1e3,
                       "verify_ms": min(times[(verify, batch * (FIXED + 1))]) * 1e3}  # fmt: skip
    refreshed = min(drafter.model_source.refresh(None) for _ in range(3))
    return {"batches": rows, "requantise_s": refreshed, "drafter_bytes": drafter.model_source.copy.nbytes,
            "policy_bytes": sum(p.nbytes for p in runner.model.parameters())}  # fmt: skip


def show_modes(results: dict[str, Any]) -> Table:
    table = Table(title="Rollout, fastest of the repeats")
    for name in (
        "batch",
        "arm",
        "rollout s",
        "of off",
        "acceptance length",
        "tokens/forward",
        "extra MB",
        "refresh s",
        "same tokens",
    ):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for batch in next(iter(results.values()))["batches"]:
        for arm, result in results.items():
            f, off = result["batches"][batch], results.get("off", result)["batches"][batch]
            table.add_row(batch, arm, f"{f['rollout_s']:.2f}", f"{f['rollout_s'] / off['rollout_s']:.2f}",
                          f"{f['acceptance_length']:.2f}", f"{f['tokens_per_forward']:.2f}",
                          f"{result['drafter_bytes'] / 1e6:.0f}", f"{result['refresh_s']:.3f}",
                          "yes" if f["tokens_hash"] == off["tokens_hash"] else "no")  # fmt: skip
    return table


def show_steps(results: dict[str, Any]) -> Table:
    table = Table(title="Decode step, fastest: the policy, the copy, verification of 5 tokens a request")
    for name in ("weights", "batch", "policy ms", "copy ms", "copy/policy", "verify/policy", "requantise s"):
        table.add_column(name, justify="right")
    for weights, result in results.items():
        for batch, f in result["batches"].items():
            table.add_row(weights, batch, f"{f['policy_ms']:.1f}", f"{f['copy_ms']:.1f}",
                          f"{f['copy_ms'] / f['policy_ms']:.2f}", f"{f['verify_ms'] / f['policy_ms']:.2f}",
                          f"{result['requantise_s']:.2f}")  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["modes", "steps", "child"])
    parser.add_argument("policy", type=Path, nargs="?")
    parser.add_argument(
        "--arms", nargs="+", default=["off", "self:int4", "self:int8", "history", "history+self", "ngram"]
    )
    parser.add_argument("--weights", nargs="+", default=["int4", "int8"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of a response")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="more than one needs a machine with nobody else on it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft", type=Path, help="checkpoint of the arm draft_model")
    parser.add_argument("--eagle", type=Path, help="checkpoint of the arm eagle3")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "child":
        child()
        os._exit(0)
    common = {"what": args.what, "policy": str(args.policy), "dtype": args.dtype, "batches": args.batches,
              "problems": args.problems, "tokens": args.tokens, "threads": args.threads,
              "repeats": args.repeats}  # fmt: skip
    if args.what == "modes":
        jobs = {arm: block(arm, args) for arm in args.arms}
    else:
        jobs = {weights: block(f"self:{weights}", args) for weights in args.weights}
    if args.policy is None:
        common["policy"] = tempfile.mkdtemp()
        (Path(common["policy"]) / "config.json").write_text(json.dumps(QWEN3))
    children = {name: Child({**common, "das": das}) for name, das in jobs.items()}
    results = {name: children[name].next() for name in jobs}  # one engine starts after the other
    if args.what == "modes":
        take_turns(children, results, args)
    if args.out:
        content = {"provenance": provenance(), "results": results}
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    Console(width=140).print((show_modes if args.what == "modes" else show_steps)(results))


def take_turns(children: dict[str, Child], results: dict[str, Any], args: argparse.Namespace) -> None:
    """Rollouts of all arms in turns, so that what a machine does meanwhile hits all alike."""
    for arm in results:
        results[arm]["batches"] = {}
    for batch in args.batches:
        rows: dict[str, list[Any]] = {arm: [] for arm in children}
        for repeat in range(args.repeats):
            for arm in list(children)[:: -1 if repeat % 2 else 1]:
                rows[arm].append(children[arm].next())
        for arm, found in rows.items():
            fixed = {"fixed": found[0]["fixed"]} if "fixed" in found[0] else {}
            seconds = {"all_rollout_s": [round(f["rollout_s"], 3) for f in found]}
            fastest = min(found, key=lambda f: float(f["rollout_s"]))
            results[arm]["batches"][str(batch)] = fastest | seconds | fixed


if __name__ == "__main__":
    main()
