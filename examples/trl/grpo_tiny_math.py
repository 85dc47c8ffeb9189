"""TRL's GRPO on a CPU, in server or colocate mode: speculation off and on, with the
same seeds, and what differs.

    python examples/trl/grpo_tiny_math.py --problems 16 --epochs 3 --out runs/trl
    python examples/trl/grpo_tiny_math.py --mode colocate

TRL's trainer, its client, `trl vllm-serve`, vLLM and the weight updates are the real
ones; only NCCL, which the server mode needs and which needs a GPU, is replaced by files
(`cpu_weights.py`). All that turns das-adapter on is `DAS_CONFIG` in the environment of
the server, or of the trainer that has the engine in its process. The two runs take
turns, step by step, so that noise of the machine falls on both. `summary.json` has the
rollout times by epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path += [str(EXAMPLES / "vllm"), str(EXAMPLES / "tiny_math")]
import task  # noqa: E402
from serving import (  # noqa: E402
    ARMS,
    POLICY,
    Server,
    compare,
    free_port,
    served,
    settings,
)

SERVER = (
    "--dtype float32 --enforce_eager true --max_model_len 512 --max-num-seqs 32"
    " --kv-cache-memory-bytes 268435456 --worker-extension-cls cpu_weights.Extension"
).split()
COLOCATED = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "TORCHDYNAMO_DISABLE": "1",  # TRL cannot tell its engine to leave out compiling
    "TORCH_COMPILE_DISABLE": "1",
}
DECISIONS = "decisions"
"""Folder of an arm's decision log, in that of the arm."""
BATCH = 4
"""Problems of a step."""
GROUP = 8
"""Samples of a problem."""


def run(arm: str, args: argparse.Namespace, turn: Connection) -> None:
    """Train one arm in a process of its own, waiting for its turn before each rollout;
    send what `train` returns, and keep the server until all arms have ended: stopping
    it takes processor time.
    """
    out = (args.out / arm).absolute()
    out.mkdir(parents=True, exist_ok=True)
    block = ARMS[arm] | {"log_dir": str(out / DECISIONS)}
    with engine(block, args, out) as server:
        turn.send(train(server, out, args, turn))
        turn.poll(None)


@contextlib.contextmanager
def engine(
    block: dict[str, Any], args: argparse.Namespace, out: Path
) -> Iterator[Server]:
    """Serve the policy under a `das:` block; in colocate mode prepare this process, in
    which TRL makes the engine.
    """
    if args.mode == "server":
        arguments = [
            "--model",
            str(args.policy),
            *SERVER,
            "--weight-transfer-config",
            '{"backend": "files"}',
        ]
        with served(
            "trl.scripts.vllm_serve", arguments, block, out / "server.log"
        ) as server:
            yield server
    else:
        # the arms start at once, and TRL would give both the same one
        port = {"MASTER_PORT": str(free_port())}
        os.environ.update(settings(block) | COLOCATED | port)
        yield Server("", psutil.Process())


def train(
    server: Server, out: Path, args: argparse.Namespace, turn: Connection
) -> dict[str, Any]:
    """Train for some steps; return the tokens and seconds of each rollout, what TRL has
    logged, and the engine's figures.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.trainer import grpo_trainer

    rollouts: list[dict[str, Any]] = []

    class Generation(VLLMGeneration):
        """TRL's generation, which waits for its turn, and remembers what it
        returned.
        """

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            turn.send(None)
            turn.recv()
            begin = time.perf_counter()
            processor_s = server.processor_s()
            answer = super().generate(*args, **kwargs)
            rollouts.append(
                {
                    "seconds": time.perf_counter() - begin,
                    "processor_s": server.processor_s() - processor_s,
                    "tokens": answer[1],
                    "logprobs": answer[2],
                }
            )
            return answer

    grpo_trainer.VLLMGeneration = Generation
    if args.mode == "server":
        send_files(out / "weights.safetensors")
        mode = {"vllm_server_base_url": server.address, "vllm_server_timeout": 600.0}
    else:
        mode = {"vllm_max_model_length": 512}

    def reward(
        completions: Any, problem: list[str], answer: list[str], **_: Any
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            task.compute_score("", text, right, {"problem": p})["score"]
            for text, p, right in zip(texts, problem, answer, strict=True)
        ]

    rng = random.Random(0)
    problems = [
        task.make_problem(rng, (5, 7, 9, 12)[i % 4]) for i in range(args.problems)
    ]
    rows = [
        {
            "prompt": [{"role": "user", "content": p}],
            "problem": p,
            "answer": task.answer(p),
        }
        for p in problems
    ]
    config = GRPOConfig(
        output_dir=str(out / "trainer"),
        use_cpu=True,
        bf16=False,
        max_steps=steps(args),
        seed=0,
        learning_rate=1e-4,
        per_device_train_batch_size=BATCH * GROUP,
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        max_completion_length=200,
        temperature=1.0,
        use_vllm=True,
        vllm_mode=args.mode,
        **mode,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        policy(args, out),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    logged = [
        {k: entry[k] for k in ("reward", "loss") if k in entry}
        for entry in trainer.state.log_history
    ]
    at = server.address
    found = (
        figures_of_server(at) if at else figures_of_engine(trainer.vllm_generation.llm)
    )
    return {"rollouts": rollouts, "logged": logged, "figures": found}


def send_files(file: Path) -> None:
    """Let TRL's client send weights in a file instead of over NCCL."""
    from safetensors.torch import save_file
    from trl.generation.vllm_client import VLLMClient

    def init_communicator(self: Any, device: Any = 0) -> None:
        self._post(
            f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}}
        )

    def update_named_params(self: Any, metadata: Any, named_params: Any) -> None:
        save_file(
            {
                name: weight.detach().contiguous().clone()
                for name, weight in named_params
            },
            file,
        )
        self._start_weight_update()
        self._post(
            f"{self.base_url}/update_weights", json={"update_info": {"path": str(file)}}
        )
        self._finish_weight_update()

    VLLMClient.init_communicator = init_communicator
    VLLMClient.update_named_params = update_named_params


def policy(args: argparse.Namespace, out: Path) -> str:
    """Return where the policy is; for the colocate mode, whose engine takes the
    precision of the checkpoint, a copy in float32.
    """
    if args.mode == "server":
        return str(args.policy)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    copy = str(out / "policy")
    AutoModelForCausalLM.from_pretrained(args.policy, dtype="float32").save_pretrained(
        copy
    )
    AutoTokenizer.from_pretrained(args.policy).save_pretrained(copy)
    return copy


METRICS = {
    "engine_steps": "iteration_tokens_total_count",
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted_tokens": "spec_decode_num_accepted_tokens_total",
    "history_tokens": "das_history_tokens",
    "history_hits": "das_history_hits",
    "health": "das_health",
}
"""The figures of the summary, and their names among the metrics of a server."""


def figures_of_server(address: str) -> dict[str, float]:
    """Return the figures that a server has counted."""
    import requests

    text = requests.get(f"{address}/metrics", timeout=60).text
    found = dict(re.findall(r"^vllm:(\w+)\{.*\} (\S+)$", text, re.MULTILINE))
    return {name: float(found.get(metric, 0.0)) for name, metric in METRICS.items()}


def figures_of_engine(llm: Any) -> dict[str, float]:
    """Return the figures that the engine of this process has counted."""
    from das_adapter.protocol.metrics import figures

    (counts,) = llm.collective_rpc("das_rpc", args=("stats", {}))
    found = figures([counts])
    return {"engine_steps": counts["steps"]} | {
        name: found.get(f"das/{name}", 0.0) for name in list(METRICS)[1:]
    }


def steps(args: argparse.Namespace) -> int:
    """Return the training steps of an arm."""
    count: int = args.epochs * args.problems // BATCH
    return count


def in_turns(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train all arms, one step of each after the other; return the result of `train` of
    each arm.
    """
    context = multiprocessing.get_context("spawn")
    processes = []
    turns = []
    for arm in ARMS:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=run, args=(arm, args, theirs)))
        processes[-1].start()
        theirs.close()
        turns.append(ours)
    try:
        for turn in turns:  # all have started
            turn.recv()
        for _ in range(steps(args)):
            found = []
            for turn in turns:
                turn.send(None)
                found.append(turn.recv())
        return dict(zip(ARMS, found, strict=True))
    finally:
        for turn in turns:
            turn.close()
        for process in processes:
            process.join()


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one arm, from the result of `train`."""
    return {
        "tokens": sum(len(text) for r in result["rollouts"] for text in r["tokens"]),
        **result["figures"],
        "rollout_s": [r["seconds"] for r in result["rollouts"]],
        "processor_s": [r["processor_s"] for r in result["rollouts"]],
    }


def by_epoch(
    off: dict[str, Any], on: dict[str, Any], length: int
) -> list[dict[str, float]]:
    """Return the times of each epoch with speculation on, as shares of those with it
    off; `length`: of an epoch, in steps.
    """
    epochs = []
    for begin in range(0, len(off["rollout_s"]), length):
        epoch = slice(begin, begin + length)
        shares = {}
        for name in ("rollout_s", "processor_s"):
            shares[name] = sum(on[name][epoch]) / sum(off[name][epoch])
        epochs.append(shares)
    return epochs


def main() -> None:
    """Train both arms, and compare them."""
    from das_adapter.reports import run_logs
    from das_adapter.reports.compare import compare as compare_runs
    from das_adapter.reports.compare import sentences
    from das_adapter.reports.provenance import RUN, provenance, save

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mode",
        choices=("server", "colocate"),
        default="server",
        help="TRL's vllm_mode",
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--problems",
        type=int,
        default=BATCH,
        help=f"of the data set, a multiple of {BATCH}",
    )
    parser.add_argument("--policy", type=Path, default=POLICY)
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    args = parser.parse_args()
    os.environ["MKL_CBWR"] = "AUTO,STRICT"  # equal logits whatever else is in the batch
    arms = in_turns(args)
    for arm, result in arms.items():
        (args.out / arm / "result.json").write_text(json.dumps(result) + "\n")
    off, on = (arm["rollouts"] for arm in arms.values())
    equal = compare(off, on)
    figures = {arm: summarise(result) for arm, result in arms.items()}
    logs = [run_logs.read(args.out / arm / DECISIONS) for arm in arms]
    comparison = compare_runs(*logs)
    summary = {
        "provenance": provenance(RUN),
        "tokens_equal": equal,
        "epochs_of_off": by_epoch(*figures.values(), args.problems // BATCH),
        "arms": figures,
        "claims": comparison["claims"],
    }
    save(args.out / "summary.json", summary)
    for number, epoch in enumerate(summary["epochs_of_off"], start=1):
        print(
            f"epoch {number}: rollout {epoch['rollout_s']:.2f} of off, processor time"
            f" {epoch['processor_s']:.2f} of off"
        )
    print("\n".join(sentences(comparison)))
    sys.exit(not equal)


if __name__ == "__main__":
    main()
