"""Draft from the history in `LLM(...)`, after the weights have been updated in place;
on a CPU, in a minute.

    DAS_CONFIG='{"drafter": "history"}' python examples/vllm/in_place_update.py

Nothing here knows of das-adapter: the engine reads `DAS_CONFIG`, and notices that its
weights change.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PREFIX = "vllm:das_"
sys.path.append(str(HERE))
paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # the worker's extension
# on a CPU: weights may be written into the live model
os.environ.setdefault("DAS_CPU_WEIGHT_SYNC", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> None:
    """Roll out three times, with other weights each time."""
    from stub_trainer import POLICY, problems, train
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(POLICY),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_memory_bytes=2**26,
        disable_log_stats=False,
        worker_extension_cls="weights_from_disk.WeightsFromDisk",
    )
    prompts = [{"prompt_token_ids": ids} for ids in problems(4)]
    for step in range(3):
        begin = time.perf_counter()
        written = llm.generate(
            prompts,
            SamplingParams(n=8, max_tokens=200, temperature=1.0),
            use_tqdm=False,
        )
        seconds = time.perf_counter() - begin
        tokens = sum(
            len(sample.token_ids) for request in written for sample in request.outputs
        )
        gauges = [
            metric for metric in llm.get_metrics() if metric.name.startswith(PREFIX)
        ]
        das = {gauge.name.removeprefix(PREFIX): gauge.value for gauge in gauges}
        print(
            f"step {step + 1}: {tokens} tokens in {seconds:.1f} s, "
            f"{das.get('tokens_per_forward', 1.0):.2f} tokens per forward, "
            f"drafted from a history of {das.get('history_tokens', 0.0):.0f} tokens",
            flush=True,
        )
        with tempfile.TemporaryDirectory() as directory:
            llm.collective_rpc(
                "update_weights_from_path",
                args=(str(train(Path(directory), step + 1)),),
            )


if __name__ == "__main__":
    main()
