"""Asynchronous GRPO through NeMo-RL on CPU, with in-flight weight updates, without and with speculation.

Which weights write which token depends on timing in this pipeline, so no two runs agree token by token, with or without
speculation. The data set repeats its problems, because this trainer goes through its data only once.

PYTHONPATH=/path/to/NeMo-RL python examples/nemo_rl/cpu_async.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from arms import ARMS, ROOT, run, show

ASYNC = [
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "loss_fn.use_importance_sampling_correction=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "cluster.gpus_per_node=2",
]


def main() -> None:
    """Run both arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "nemo_rl_async")
    parser.add_argument("--steps", type=int, default=8)
    args, overrides = parser.parse_known_args()
    common = [*ASYNC, f"grpo.max_num_steps={args.steps}", *overrides]
    arms = {name: run(name, [*arm, *common], args.out) for name, arm in ARMS.items()}
    (args.out / "summary.json").write_text(json.dumps(arms, indent=1) + "\n")
    show(args.out, epoch=2)


if __name__ == "__main__":
    main()
