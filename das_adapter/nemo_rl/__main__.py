"""`python -m das_adapter.nemo_rl examples/run_grpo.py --config ...`: a NeMo-RL entry script under das-adapter."""

from __future__ import annotations

import sys

from das_adapter.nemo_rl.install import run

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(f"{__doc__}\nThe script's own arguments follow it.")
    run(sys.argv[1], sys.argv[2:])
