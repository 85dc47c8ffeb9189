"""OpenRLHF's rollouts on a CPU: speculation off and on, with the same seeds, and what
differs.

    python examples/openrlhf/rollouts.py --steps 3 --out runs/openrlhf

OpenRLHF's vLLM actors under Ray, its sample generator, its reward function and its
weight-update calls are the real ones. Its trainer needs flash-attn, which needs a GPU:
a policy-gradient step in plain PyTorch stands for it, and files for NCCL
(`cpu_weights.py`). All that turns das-adapter on is `DAS_CONFIG` in the environment of
Ray's workers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE), str(HERE.parent / "vllm"), str(HERE.parent / "tiny_math")]
sys.path += PATHS
import task  # noqa: E402
from cpu_weights import FILE  # noqa: E402
from serving import ARMS, POLICY, settings  # noqa: E402

PROBLEMS = 4
"""Problems of a step."""
SAMPLES = 8
"""Samples of a problem."""
MAX_LEN = 256
"""Longest text, prompt and response, in tokens."""


@contextmanager
def engines(block: dict[str, Any], weights: Path) -> Iterator[list[Any]]:
    """Run one of OpenRLHF's vLLM actors under a `das:` block; yield a list of it, as
    OpenRLHF's classes take it.
    """
    import ray
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    class Rollouts(RolloutRayActor.__ray_metadata__.modified_class):  # type: ignore[misc, name-defined]
        """OpenRLHF's actor, which can be asked for das-adapter's figures."""

        async def figures(self) -> dict[str, Any]:
            found: list[dict[str, Any]] = await self.llm.collective_rpc(
                "das_rpc", args=("stats", {})
            )
            return found[0]

    paths = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = settings(block) | {"PYTHONPATH": paths, FILE: str(weights)}
    ray.init(
        "local",
        num_cpus=4,
        num_gpus=1,
        include_dashboard=False,
        runtime_env={"env_vars": environment},
    )
    # the arguments of OpenRLHF's create_vllm_engines, but for dtype, cache, length and
    # the worker extension
    try:
        actor = (
            ray.remote(Rollouts)
            .options(num_cpus=1, num_gpus=1)
            .remote(
                model=str(POLICY),
                enforce_eager=True,
                worker_extension_cls="cpu_weights.FilesWorkerWrap",
                tensor_parallel_size=1,
                seed=42,
                distributed_executor_backend="uni",
                max_model_len=MAX_LEN,
                enable_prefix_caching=False,
                dtype="float32",
                trust_remote_code=True,
                full_determinism=False,
                bundle_indices=None,
                num_gpus=1,
                enable_sleep_mode=False,
                agent_func_path=None,
                remote_rm_url=str(HERE / "reward.py"),
                kv_cache_memory_bytes=2**26,
            )
        )
        ray.get(actor.get_num_unfinished_requests.remote())
        yield [actor]
    finally:
        ray.shutdown()


def run(block: dict[str, Any], steps: int, out: Path) -> list[dict[str, Any]]:
    """Roll out and train some steps; return each step's tokens, rewards, seconds and
    das-adapter's figures.
    """
    import ray
    import torch
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # the engine has the other cores
    out.mkdir(parents=True, exist_ok=True)
    weights = (out / "weights.safetensors").absolute()
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rng = random.Random(0)
    problems = [task.make_problem(rng, (5, 7, 9, 12)[i % 4]) for i in range(PROBLEMS)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False
        )
        for p in problems
    ]
    args = SimpleNamespace(
        vllm=SimpleNamespace(enable_sleep=False),
        rollout=SimpleNamespace(batch_size=PROBLEMS, n_samples_per_prompt=SAMPLES),
        algo=SimpleNamespace(
            dynamic_filtering_enable=False,
            advantage=SimpleNamespace(is_correction_level="off"),
        ),
    )
    loader = [(None, prompts, problems, [None] * PROBLEMS)] * steps
    found = []
    with engines(block, weights) as actors:
        generator = SamplesGenerator(
            SimpleNamespace(args=args), loader, None, tokenizer, actors
        )
        for _ in range(steps):
            begin = time.perf_counter()
            samples, *_ = generator.generate_samples(temperature=1.0, max_len=MAX_LEN)
            seconds = time.perf_counter() - begin
            # they came as they ended
            samples.sort(key=lambda sample: (sample.labels, sample.sequences.tolist()))
            (figures,) = ray.get([actor.figures.remote() for actor in actors])
            found.append(
                {
                    "tokens": [sample.sequences[0].tolist() for sample in samples],
                    "rewards": [sample.rewards.item() for sample in samples],
                    "seconds": seconds,
                    "figures": {
                        k: v for k, v in figures.items() if isinstance(v, int | float)
                    },
                }
            )
            train(model, optimizer, samples)
            save_file(
                {
                    name: weight.detach().clone()
                    for name, weight in model.named_parameters()
                },
                weights,
            )
            for name, weight in model.named_parameters():
                ray.get(
                    [
                        a.update_weight.remote(
                            name, dtype=weight.dtype, shape=weight.shape
                        )
                        for a in actors
                    ]
                )
    return found


def train(model: Any, optimizer: Any, samples: list[Any]) -> None:
    """Take a policy-gradient step; the mean reward of a prompt's samples is its
    baseline.
    """
    import torch

    for _, group in itertools.groupby(samples, key=lambda sample: sample.labels):
        group = list(group)
        baseline = sum(sample.rewards.item() for sample in group) / len(group)
        for sample in group:
            logits = model(sample.sequences).logits[:, :-1]
            logprobs = torch.log_softmax(logits, -1)
            next_tokens = sample.sequences[:, 1:, None]
            chosen = logprobs.gather(-1, next_tokens)[..., 0]
            advantage = sample.rewards.item() - baseline
            logprob = (chosen * sample.action_mask).sum()
            loss = -advantage * logprob / len(samples)
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Run both arms, and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/openrlhf"))
    args = parser.parse_args()
    os.environ["MKL_CBWR"] = "AUTO,STRICT"
    spawn = multiprocessing.get_context("spawn")
    arms = {}
    # each arm has a process and a Ray cluster of its own
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as processes:
        for name, block in ARMS.items():
            training = processes.submit(run, block, args.steps, args.out / name)
            arms[name] = training.result()
    (args.out / "result.json").write_text(json.dumps(arms) + "\n")
    equal = True
    for step, (off, on) in enumerate(zip(*arms.values(), strict=True), start=1):
        same = off["tokens"] == on["tokens"] and off["rewards"] == on["rewards"]
        equal &= same
        figures = on["figures"]
        print(
            f"step {step}: reward {sum(on['rewards']) / len(on['rewards']):.2f},"
            f" {figures['tokens'] / max(1, figures['request_forwards']):.2f} tokens per"
            f" forward, drafted from a history of {figures['history_tokens']} tokens,"
            f" tokens {'equal' if same else 'DIFFERENT'}"
        )
    sys.exit(not equal)


if __name__ == "__main__":
    main()
