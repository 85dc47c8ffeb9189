"""TRL's GRPO with `trl vllm-serve`, on a CPU: speculation off and on, with the same seeds, and what differs.

    python examples/trl/grpo_tiny_math.py --problems 16 --epochs 3 --out runs/trl

TRL's trainer, its client, `trl vllm-serve`, vLLM and the weight-update calls are the real ones; only NCCL, which needs
a GPU, is replaced by files (`cpu_weights.py`). All that turns das-adapter on is `DAS_CONFIG` in the environment of the
server. The two runs take turns, step by step, so that noise of the machine falls on both. `summary.json` has the
rollout times by epoch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path += [str(EXAMPLES / "vllm"), str(EXAMPLES / "tiny_math")]
import task  # noqa: E402
from serving import ARMS, POLICY, Server, compare, served  # noqa: E402

SERVER = (
    "--dtype float32 --enforce_eager true --max_model_len 512 --max-num-seqs 32 --kv-cache-memory-bytes 67108864 "
    "--worker-extension-cls cpu_weights.Extension"
).split()
BATCH, GROUP = 4, 8
"""Problems of a step, and samples of each."""


def run(arm: str, args: argparse.Namespace, turn: Connection) -> None:
    """Train one arm in a process of its own, waiting for its turn before each rollout; send what `train` returns, and
    keep the server until all arms have ended: stopping it takes processor time."""
    out = (args.out / arm).absolute()
    out.mkdir(parents=True, exist_ok=True)
    arguments = ["--model", str(args.policy), *SERVER, "--weight-transfer-config", '{"backend": "files"}']
    with served("trl.scripts.vllm_serve", arguments, ARMS[arm], out / "server.log") as server:
        turn.send(train(server, out, args, turn))
        turn.poll(None)


def train(server: Server, out: Path, args: argparse.Namespace, turn: Connection) -> dict[str, Any]:
    """Train for some steps; return the tokens and seconds of each rollout, what TRL has logged, and the server's
    metrics."""
    import requests
    from datasets import Dataset
    from safetensors.torch import save_file
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient

    rollouts: list[dict[str, Any]] = []

    class Client(VLLMClient):
        """TRL's client with files instead of NCCL; it waits for its turn, and remembers what it was sent."""

        def init_communicator(self, device: Any = 0) -> None:
            self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

        def update_named_params(self, metadata: Any, named_params: Any) -> None:
            file = out / "weights.safetensors"
            save_file({name: weight.detach().contiguous().clone() for name, weight in named_params}, file)
            self._start_weight_update()
            self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": str(file)}})
            self._finish_weight_update()

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            turn.send(None)
            turn.recv()
            begin, processor_s = time.perf_counter(), server.processor_s()
            answer = super().generate(*args, **kwargs)
            rollouts.append(
                {
                    "seconds": time.perf_counter() - begin,
                    "processor_s": server.processor_s() - processor_s,
                    "tokens": answer["completion_ids"],
                    "logprobs": answer["logprobs"],
                }
            )
            return answer

    vllm_generation.VLLMClient = Client

    def reward(completions: Any, problem: list[str], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            task.compute_score("", text, right, {"problem": p})["score"]
            for text, p, right in zip(texts, problem, answer, strict=True)
        ]

    rng = random.Random(0)
    problems = [task.make_problem(rng, (5, 7, 9, 12)[i % 4]) for i in range(args.problems)]
    rows = [{"prompt": [{"role": "user", "content": p}], "problem": p, "answer": task.answer(p)} for p in problems]
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
        vllm_mode="server",
        vllm_server_timeout=600.0,
        vllm_server_base_url=server.address,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(str(args.policy), reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    logged = [{k: entry[k] for k in ("reward", "loss") if k in entry} for entry in trainer.state.log_history]
    metrics = requests.get(f"{server.address}/metrics", timeout=60).text
    return {"rollouts": rollouts, "logged": logged, "metrics": metrics}


def steps(args: argparse.Namespace) -> int:
    """Training steps of an arm."""
    count: int = args.epochs * args.problems // BATCH
    return count


def in_turns(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train all arms, one step of each after the other; return what `train` returns, by arm."""
    context = multiprocessing.get_context("spawn")
    processes, turns = [], []
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


FIGURES = {
    "engine_steps": "iteration_tokens_total_count",
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted_tokens": "spec_decode_num_accepted_tokens_total",
    "history_tokens": "das_history_tokens",
    "health": "das_health",
}
"""What the summary takes from the metrics of a server."""


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Return what one arm took, from what `train` returned."""
    found: dict[str, Any] = {"tokens": sum(len(text) for r in result["rollouts"] for text in r["tokens"])}
    for name, metric in FIGURES.items():
        value = re.search(rf"^vllm:{metric}\{{.*\}} (\S+)$", result["metrics"], re.MULTILINE)
        found[name] = float(value[1]) if value else 0.0
    return found | {
        "rollout_s": [r["seconds"] for r in result["rollouts"]],
        "processor_s": [r["processor_s"] for r in result["rollouts"]],
    }


def by_epoch(off: dict[str, Any], on: dict[str, Any], length: int) -> list[dict[str, float]]:
    """Return, for each epoch of so many steps, what rollouts with speculation on took of those with it off."""
    return [
        {
            name: sum(on[name][begin : begin + length]) / sum(off[name][begin : begin + length])
            for name in ("rollout_s", "processor_s")
        }
        for begin in range(0, len(off["rollout_s"]), length)
    ]


def main() -> None:
    from das_adapter.tools.provenance import RUN, provenance, save

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--problems", type=int, default=BATCH, help=f"of the data set, a multiple of {BATCH}")
    parser.add_argument("--policy", type=Path, default=POLICY)
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    args = parser.parse_args()
    os.environ["MKL_CBWR"] = "AUTO,STRICT"  # equal logits whatever else is in the batch
    arms = in_turns(args)
    for arm, result in arms.items():
        (args.out / arm / "result.json").write_text(json.dumps(result) + "\n")
    off, on = (arm["rollouts"] for arm in arms.values())
    equal = compare(off, on)
    took = {arm: figures(result) for arm, result in arms.items()}
    summary = {
        "provenance": provenance(RUN),
        "tokens_equal": equal,
        "epochs_of_off": by_epoch(*took.values(), args.problems // BATCH),
        "arms": took,
    }
    save(args.out / "summary.json", summary)
    for number, epoch in enumerate(summary["epochs_of_off"], start=1):
        print(
            f"epoch {number}: rollout {epoch['rollout_s']:.2f} of off, processor time {epoch['processor_s']:.2f} of off"
        )
    sys.exit(not equal)


if __name__ == "__main__":
    main()
