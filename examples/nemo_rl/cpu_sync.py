"""Synchronous GRPO through NeMo-RL on CPU, without and with speculation: the same tokens, in less time.

PYTHONPATH=/path/to/NeMo-RL python examples/nemo_rl/cpu_sync.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arms import ARMS, ROOT, run, show

from das_adapter.tools.provenance import RUN, provenance, save


def main() -> None:
    """Run both arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "nemo_rl_sync")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--epoch", type=int, default=2, help="training steps of a row of the comparison")
    args, overrides = parser.parse_known_args()
    common = ["--problems", str(args.problems), f"grpo.max_num_steps={args.steps}", *overrides]
    for name, arm in ARMS.items():
        run(name, [*arm, *common], args.out)
    made = provenance([*RUN, "das_adapter/nemo_rl"])
    save(args.out / "summary.json", {"provenance": made, "comparison": show(args.out, args.epoch)})


if __name__ == "__main__":
    main()
