"""`python -m das_adapter.nemo_rl examples/run_grpo.py --config ...`: a NeMo-RL entry
script under das-adapter.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from das_adapter.nemo_rl.install import install

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(f"{__doc__}\nThe script's own arguments follow it.")
    install()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
