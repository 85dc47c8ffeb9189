"""The commands that make the results anew: `make figures RESULTS="undrafted.json scale.json"`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
POLICY = "runs/tiny_math_31m"
_MODELS = "--draft runs/drafters/draft_model --eagle runs/tiny_math_31m/eagle3"
_DRAFTERS = f"benchmarks/drafters.py {POLICY} --dtype float32"
_ONCE = f"{_DRAFTERS} {_MODELS} --repeats 1"
_LONG = f"{_ONCE} --prefix-caching --contexts 1700"
_WIDEN = f"examples/tiny_math/widen_policy.py {POLICY} --width 3 --layers 4 --dtype float32"
NEEDED = {
    "runs/drafters/draft_model": "examples/tiny_math/make_drafters.py runs/drafters",
    "runs/tiny_math_31m/eagle3": f"{_WIDEN} --drafters runs/drafters",
    POLICY: _WIDEN,
}
"""What makes a model that commands name, in this order, where it is not there."""
_CONTROLLER = "benchmarks/controller.py"
_BOTH = "--json OUT --md OUT.md"
COMMANDS = {
    "chaos.json": "benchmarks/soak.py --seed 0 --seed 1 --seed 2 --out OUT",
    "controller_batches.json": f"{_CONTROLLER} batches --longest 160 --arms idle optimal k1 k3 k7 k15 --out OUT",
    "controller_off.json": f"{_CONTROLLER} off --longest 160 --batches 1 8 64 256 --out OUT",
    "controller_overhead.json": "benchmarks/controller_overhead.py --steps 6000 --out OUT",
    "controller_rollout.json": f"{_CONTROLLER} rollout --longest 300 --out OUT",
    "controller_tiny.json": f"{_CONTROLLER} rollout --model tiny --repeats 6 --out OUT",
    "drafters_1200.json": f"{_ONCE} --arms off history history+self eagle3 --contexts 1200 --batches 8 --out OUT",
    "drafters_1700.json": f"{_LONG} --arms off history self:int4 eagle3 history+eagle3 --batches 8 1 --out OUT",
    "drafters_1700_32.json": f"{_LONG} --arms off history history+self eagle3 ngram --batches 32 --out OUT",
    "drafters_1700_model.json": f"{_LONG} --arms off history+self draft_model history+draft_model self:int8"
    " --batches 8 1 --out OUT",
    "drafters_256.json": f"{_ONCE} --arms off history self:int4 history+self ngram draft_model eagle3"
    " history+draft_model history+eagle3 --batches 32 8 1 --out OUT",
    "drafters_256_neural.json": f"{_ONCE} --arms off eagle3 history+eagle3 history+draft_model --batches 32 8 1"
    " --out OUT",
    "drafters_256_visits.json": f"{_ONCE} --arms off history eagle3 history+eagle3 ngram --batches 32 8 --epochs 3"
    " --out OUT",
    "drafters_64.json": f"{_ONCE} --arms off history self:int4 history+self eagle3 history+draft_model --batches 64"
    " --out OUT",
    "history.json": "benchmarks/history.py --traces TRACES --tokens 120000 --json OUT",
    "index.json": "benchmarks/index.py --traces TRACES --against arctic --against plain --against ceiling --every 16"
    " --json OUT",
    "long_responses.json": f"{_DRAFTERS} --arms off history --batches 16 --repeats 1 --forced"
    " --lengths 6.6 1.32 --tokens 8192 --out OUT",
    "pipelines.json": "benchmarks/pipelines.py --out OUT",
    "quantised_kernels.json": "benchmarks/quantised_kernels.py --repeats 4 --out OUT",
    "scale.json": f"benchmarks/scale.py --syncs 8 --known 100000 {_BOTH}",
    "scale_nodes.json": f"benchmarks/scale_nodes.py {_BOTH}",
    "simulator.json": "benchmarks/simulator.py recorded --out OUT",
    "simulator_engine.json": "benchmarks/simulator.py engine --batches 1 8 64 --out OUT",
    "simulator_routing.json": "benchmarks/simulator.py routing --traces TRACES --out OUT",
    "simulator_varied.json": "benchmarks/simulator.py varied --traces TRACES --out OUT",
    "undrafted.json": f"{_DRAFTERS} --arms stock stock:again stock:uncompiled off history:idle history:looks"
    " --batches 1 8 --epochs 1 --repeats 3 --forced --tokens 160 --out OUT",
    "v2_acceptance.json": "benchmarks/v2_acceptance.py --newest .venv/newest --out OUT",
    "v2_drafts.json": "benchmarks/v2_drafts.py --traces TRACES --groups 32 --longest 1536 --out OUT",
}
"""By result, from the repository's root. OUT: where the result is written; TRACES: a directory of recorded rollouts, of
the environment variable. Results of the demo, TRL, `das-adapter` and a GPU are made by commands of their own, and some
have none any more: `README.md`."""


def make(name: str) -> bool:
    """Make a result anew, with the table beside it if there is one; return whether its command succeeded, and leave
    the old one where it did not."""
    words = shlex.split(COMMANDS[name])
    for model, needed in NEEDED.items():
        if model in words and not (ROOT / model).exists():
            subprocess.run([sys.executable, *needed.split()], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / name
        table = out.with_suffix(".md")
        places = {"OUT": str(out), "OUT.md": str(table), "TRACES": os.environ.get("TRACES", "TRACES")}
        command = [sys.executable, *(places.get(word, word) for word in words)]
        done = subprocess.run(command, cwd=ROOT, check=False).returncode == 0 and out.exists()
        for made in (out, table) if done else ():
            if made.exists() and (RESULTS / made.name).exists():
                shutil.copy(made, RESULTS)
        return done
