"""SkyRL's rollouts on a CPU: speculation off and on, with the same seeds, and what
differs.

    python examples/skyrl/rollouts.py --steps 3 --out runs/skyrl

SkyRL's inference server, its client, its cache salts and its weight-sync client are the
real ones. Its trainer needs flash-attn, which needs a GPU: a stub stands for it, whose
weights are the policy's with a little noise, and files for NCCL (`cpu_server.py`). All
that turns das-adapter on is `DAS_CONFIG` in the environment of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "vllm")]
import cpu_server  # noqa: E402, F401  before SkyRL is imported
from serving import ARMS, POLICY, compare, served  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.backends.skyrl_train.weight_sync.control_plane import (  # noqa: E402
    SkyrlWeightSyncClient,
)
from skyrl.train.generators.utils import build_vllm_cache_salt  # noqa: E402
from stub_trainer import metrics, problems, train  # noqa: E402

SERVER = (
    "--host 127.0.0.1 --dtype float32 --enforce-eager --max-model-len 512"
    " --max-num-seqs 32 --kv-cache-memory-bytes 67108864 --worker-extension-cls"
    " cpu_server.Extension"
).split()
SAMPLES = 8
"""Samples of a problem."""
SAMPLING = {"temperature": 1.0, "max_tokens": 200, "logprobs": 0}


async def roll_out(
    client: RemoteInferenceClient, prompts: list[list[int]]
) -> list[list[list[int]]]:
    """Return the samples of each prompt, sorted: requests of a prompt are alike."""
    salt = build_vllm_cache_salt(client.weight_version)
    each = [prompt for prompt in prompts for _ in range(SAMPLES)]
    answer = await client.generate(
        {"prompt_token_ids": each, "sampling_params": SAMPLING, "cache_salt": salt}
    )
    texts = answer["response_ids"]
    return [
        sorted(texts[begin : begin + SAMPLES])
        for begin in range(0, len(texts), SAMPLES)
    ]


async def run(block: dict[str, Any], steps: int, out: Path) -> list[dict[str, Any]]:
    """Roll out and update the weights some times; return each step's tokens, seconds
    and das-adapter's figures.
    """
    from transformers import AutoTokenizer

    out.mkdir(parents=True, exist_ok=True)
    found = []
    arguments = [
        "--model",
        str(POLICY),
        *SERVER,
        "--weight-transfer-config",
        '{"backend": "files"}',
    ]
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with served(
        "cpu_server",
        arguments,
        block,
        out / "server.log",
        PYTHONPATH=paths,
        VLLM_LOG_STATS_INTERVAL="1",
    ) as at:
        tokenizer = AutoTokenizer.from_pretrained(POLICY)
        address = [at.address]
        client = RemoteInferenceClient(
            at.address, address, 1, model_name=str(POLICY), tokenizer=tokenizer
        )
        weights = SkyrlWeightSyncClient(address)
        weights.init_weight_transfer_engine({})
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            processor_s = at.processor_s()
            texts = await roll_out(client, problems(4))
            seconds = time.perf_counter() - begin
            processor_s = at.processor_s() - processor_s
            figures = metrics(at.address)
            found.append(
                {
                    "tokens": texts,
                    "seconds": seconds,
                    "processor_s": processor_s,
                    "figures": figures,
                }
            )
            weights.start_weight_update()
            weights.update_weights(
                {"path": str((train(out, step) / "model.safetensors").absolute())}
            )
            weights.finish_weight_update()
            client.increment_weight_version()
        weights.close()
        await client.aclose()
    return found


def main() -> None:
    """Run both arms, and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/skyrl"))
    args = parser.parse_args()
    arms = {}
    for name, block in ARMS.items():
        # SkyRL's cache salt names the weight version; other scopes would obey it
        block = {**block, "history": {"scope": "trusted"}}
        arms[name] = asyncio.run(run(block, args.steps, args.out / name))
    (args.out / "result.json").write_text(json.dumps(arms) + "\n")
    off, on = arms.values()
    notes = [
        f"{step['figures'].get('das_tokens_per_forward', 0.0):.2f} tokens per forward"
        for step in on
    ]
    sys.exit(not compare(off, on, notes))


if __name__ == "__main__":
    main()
