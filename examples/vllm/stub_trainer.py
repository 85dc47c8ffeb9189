"""Drive `vllm serve` over HTTP as an RL trainer does, with speculation off and on, and
compare tokens and times.

    python examples/vllm/stub_trainer.py --steps 4 --out runs/vllm

Each step samples four problems with eight requests each, all at once, and hands the
server a checkpoint with other weights. The trainer is a stub: its weights are the
policy's with a little noise. Server, weights and history are real; all that turns
das-adapter on is `DAS_CONFIG` in the server's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file, save_file
from serving import ARMS, POLICY, Server, compare, served

SERVER = (
    "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 32"
    " --kv-cache-memory-bytes 67108864 --no-enable-prefix-caching"
    " --worker-extension-cls"
)
EXTENSION = "weights_from_disk.WeightsFromDisk"
"""The class of the worker with `update_weights_from_path`; prime-rl has one of its
own.
"""
ACCEPTED = "spec_decode_num_accepted_tokens_total"
"""vLLM's counter of accepted draft tokens."""


def policy_served(
    block: dict[str, Any], log: Path, extension: str = EXTENSION, **env: str
) -> contextlib.AbstractContextManager[Server]:
    """Serve the policy under a `das:` block; yield the server."""
    arguments = ["serve", str(POLICY), *SERVER.split(), extension]
    dev_mode = {"VLLM_SERVER_DEV_MODE": "1"}  # for /collective_rpc
    return served("vllm.entrypoints.cli.main", arguments, block, log, **dev_mode, **env)


def problems(count: int) -> list[list[int]]:
    """Return prompts of the policy's task, as token ids."""
    rng = random.Random(1)
    digits = list(range(25, 35))
    labels = list(range(44, 96))
    found = []
    for _ in range(count):
        text = [2, rng.choice(digits), rng.choice(digits)]
        for i in range(rng.randrange(6, 16)):
            text += [
                42,
                labels[i + 1],
                rng.choice([35, 36, 37]),
                rng.choice(digits[2:]),
            ]
        found.append([*text, 3])
    return found


def sample(address: str, prompt: list[int], **more: Any) -> list[int]:
    """Return the tokens of one response; `more`: further fields of the request."""
    body = {
        "prompt": prompt,
        "max_tokens": 200,
        "temperature": 1.0,
        "return_token_ids": True,
        **more,
    }
    answer = requests.post(f"{address}/v1/completions", json=body, timeout=600)
    answer.raise_for_status()
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def train(directory: Path, step: int) -> Path:
    """Write the checkpoint of a step; return its directory."""
    generator = torch.Generator().manual_seed(step)
    weights = load_file(POLICY / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            spread = weight.float().std().to(weight.dtype)
            weights[name] = weight + 0.005 * spread * noise
    target = directory / f"step_{step}"
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors")
    return target


def run(
    block: dict[str, Any],
    directory: Path,
    steps: int,
    extension: str = EXTENSION,
    samples: int = 8,
) -> dict[str, Any]:
    """Run a few steps; return the rollouts (tokens by problem, sorted: a prompt's
    requests are alike), and the figures of das-adapter that the Prometheus endpoint has
    after each step.
    """
    directory.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"rollouts": [], "metrics": []}
    asked = problems(4)
    with policy_served(
        block, directory / "server.log", extension, VLLM_LOG_STATS_INTERVAL="1"
    ) as server:
        address = server.address
        for step in range(steps):
            begin = time.perf_counter()
            processor_s = server.processor_s()
            with ThreadPoolExecutor(samples * len(asked)) as pool:
                groups = [
                    [pool.submit(sample, address, prompt) for _ in range(samples)]
                    for prompt in asked
                ]
                texts = [sorted(one.result() for one in group) for group in groups]
            result["rollouts"].append(
                {
                    "seconds": time.perf_counter() - begin,
                    "processor_s": server.processor_s() - processor_s,
                    "tokens": texts,
                }
            )
            # a validation: it stays out of the history
            sample(address, asked[0], vllm_xargs={"das_record": 0})
            checkpoint = train(directory, step + 1)
            call = {"method": "update_weights_from_path", "args": [str(checkpoint)]}
            requests.post(
                f"{address}/collective_rpc", json=call, timeout=600
            ).raise_for_status()
            result["metrics"].append(metrics(address))
    return result


def metrics(address: str) -> dict[str, float]:
    """Return das-adapter's figures of a server, and how many draft tokens were accepted
    since its start, by their name on its Prometheus endpoint.
    """
    time.sleep(1.5)  # vLLM logs every second here
    text = requests.get(f"{address}/metrics", timeout=60).text
    wanted = rf"^vllm:(das_\w+|{ACCEPTED})\{{.*\}} (\S+)$"
    return {
        name: float(value) for name, value in re.findall(wanted, text, re.MULTILINE)
    }


def main() -> None:
    """Run both arms, and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/vllm"))
    parser.add_argument(
        "--extension", default=EXTENSION, help="class that vLLM's worker inherits from"
    )
    args = parser.parse_args()
    arms = {
        name: run(block, args.out / name, args.steps, args.extension)
        for name, block in ARMS.items()
    }
    off, on = arms.values()
    notes = [
        f"{figures.get('das_tokens_per_forward', 0.0):.2f} tokens per forward"
        for figures in on["metrics"]
    ]
    equal = compare(off["rollouts"], on["rollouts"], notes)
    (args.out / "result.json").write_text(json.dumps(arms) + "\n")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
