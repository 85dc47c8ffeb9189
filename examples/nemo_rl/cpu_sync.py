"""Synchronous GRPO through NeMo-RL on CPU, without and with speculation: the same tokens, in less time.

PYTHONPATH=/path/to/NeMo-RL python examples/nemo_rl/cpu_sync.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from arms import ARMS, ROOT, run, show


def main() -> None:
    """Run both arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "nemo_rl_sync")
    parser.add_argument("--steps", type=int, default=8)
    args, overrides = parser.parse_known_args()
    common = [f"grpo.max_num_steps={args.steps}", *overrides]
    arms = {name: run(name, [*arm, *common], args.out) for name, arm in ARMS.items()}
    (args.out / "summary.json").write_text(json.dumps(arms, indent=1) + "\n")
    show(args.out, epoch=2)


if __name__ == "__main__":
    main()
