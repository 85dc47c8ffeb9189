"""TRL's GRPO with `trl vllm-serve`, on a CPU: speculation off and on, with the same seeds, and what differs.

    python examples/trl/grpo_tiny_math.py --steps 6 --out runs/trl

TRL's trainer, its client, `trl vllm-serve`, vLLM and the weight-update calls are the real ones; only NCCL, which needs
a GPU, is replaced by files (`cpu_weights.py`). All that turns das-adapter on is `DAS_CONFIG` in the environment of the
server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
POLICY = HERE.parent / "tiny_math" / "policy"
ARMS = {"off": {"drafter": "none", "verify": {"noise": "keyed"}}, "history": {"drafter": "history"}}
"""The first one has speculation off, with the noise of the other."""
SERVER = ("--dtype float32 --enforce_eager true --max_model_len 512 --max-num-seqs 32 --kv-cache-memory-bytes 67108864 "
          "--worker-extension-cls cpu_weights.Extension")  # fmt: skip
PROBLEMS, GROUP = 4, 8


@contextlib.contextmanager
def served(block: dict[str, Any], log: Path) -> Iterator[str]:
    """Run `trl vllm-serve` under a `das:` block; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "DAS_CONFIG": json.dumps(block),
        "DAS_CPU_WEIGHT_SYNC": "1",  # on a CPU: weights may be written into the live model
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", str(POLICY), "--port", str(port)]
    backend = ["--weight-transfer-config", '{"backend": "files"}']
    with log.open("w") as file:
        server = subprocess.Popen([*command, *SERVER.split(), *backend], env=environment, stdout=file, stderr=file)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def train(address: str, out: Path, steps: int) -> dict[str, Any]:
    """Train for some steps; return the tokens and seconds of each rollout, and what TRL has logged."""
    sys.path.append(str(HERE.parent / "tiny_math"))
    import requests
    import task
    from datasets import Dataset
    from safetensors.torch import save_file
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient

    rollouts: list[dict[str, Any]] = []

    class Client(VLLMClient):
        """TRL's client with files instead of NCCL; it remembers what it was sent."""

        def init_communicator(self, device: Any = 0) -> None:
            self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

        def update_named_params(self, metadata: Any, named_params: Any) -> None:
            file = out / "weights.safetensors"
            save_file({name: weight.detach().contiguous().clone() for name, weight in named_params}, file)
            self._start_weight_update()
            self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": str(file)}})
            self._finish_weight_update()

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            answer = super().generate(*args, **kwargs)
            seconds = time.perf_counter() - begin
            rollouts.append({"seconds": seconds, "tokens": answer["completion_ids"], "logprobs": answer["logprobs"]})
            return answer

    vllm_generation.VLLMClient = Client
    rng = random.Random(0)
    problems = [task.make_problem(rng, n) for n in (5, 7, 9, 12)][:PROBLEMS]
    rows = [{"prompt": [{"role": "user", "content": p}], "problem": p, "answer": task.answer(p)} for p in problems]

    def reward(completions: Any, problem: list[str], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            task.compute_score("", text, right, {"problem": p})["score"]
            for text, p, right in zip(texts, problem, answer, strict=True)
        ]

    config = GRPOConfig(
        output_dir=str(out / "trainer"), use_cpu=True, bf16=False, max_steps=steps, seed=0, learning_rate=1e-4,
        per_device_train_batch_size=PROBLEMS * GROUP, gradient_accumulation_steps=1, num_generations=GROUP,
        max_completion_length=200, temperature=1.0, use_vllm=True, vllm_mode="server", vllm_server_base_url=address,
        vllm_server_timeout=600.0, save_strategy="no", logging_steps=1, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(str(POLICY), reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    logged = [{k: entry[k] for k in ("reward", "loss") if k in entry} for entry in trainer.state.log_history]
    metrics = requests.get(f"{address}/metrics", timeout=60).text
    return {"rollouts": rollouts, "logged": logged, "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    parser.add_argument("--arm", choices=ARMS, help="Run this one alone.")
    args = parser.parse_args()
    os.environ["MKL_CBWR"] = "AUTO,STRICT"  # equal logits whatever else is in the batch
    if args.arm:
        out = (args.out / args.arm).absolute()
        out.mkdir(parents=True, exist_ok=True)
        with served(ARMS[args.arm], out / "server.log") as address:
            result = train(address, out, args.steps)
        (out / "result.json").write_text(json.dumps(result) + "\n")
        return
    found = {}
    for arm in ARMS:  # a process of its own each: the trainer starts from the same state
        command = [sys.executable, __file__, "--arm", arm, "--steps", str(args.steps), "--out", str(args.out)]
        subprocess.run(command, check=True)
        found[arm] = json.loads((args.out / arm / "result.json").read_text())
    off, on = (found[arm]["rollouts"] for arm in ARMS)
    for step, (a, b) in enumerate(zip(off, on, strict=True)):
        same = "equal" if a["tokens"] == b["tokens"] else "DIFFERENT"
        slow, fast = a["seconds"], b["seconds"]
        print(f"step {step + 1}: off {slow:.2f} s, history {fast:.2f} s ({fast / slow:.2f}), tokens {same}")
    sys.exit(any(a["tokens"] != b["tokens"] for a, b in zip(off, on, strict=True)))


if __name__ == "__main__":
    main()
