"""The commands that make the results anew: `make figures RESULTS="undrafted.json
scale.json"`.
"""

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
_DRAFTERS = f"benchmarks/drafters.py {POLICY} --dtype float32"
_MODELS = f"--draft runs/drafters/draft_model --eagle {POLICY}/eagle3"
_WIDEN = (
    f"examples/tiny_math/widen_policy.py {POLICY} --width 3 --layers 4 --dtype float32"
)
NEEDED = {
    "runs/drafters": "examples/tiny_math/make_drafters.py runs/drafters",
    f"{POLICY}/eagle3": f"{_WIDEN} --drafters runs/drafters",
    POLICY: _WIDEN,
}
"""Commands that make a model that others name, or that lies under what they name, in
this order, where it is not there.
"""
COMMANDS = {
    "ablation.json": (
        "PYTHONPATH=.venv/newest benchmarks/ablation.py --traces TRACES --out OUT"
    ),
    "agreement.json": "benchmarks/agreement.py --out OUT",
    "chaos.json": "benchmarks/soak.py --seed 0 --seed 1 --seed 2 --out OUT",
    "controller.json": "benchmarks/controller.py --out OUT",
    "controller_grid.json": "benchmarks/controller_grid.py --out OUT",
    "controller_overhead.json": "benchmarks/controller_overhead.py --out OUT",
    "demo.json": "examples/verl/demo.py --out FOLDER",
    "demo_not_strict.json": "examples/verl/demo.py --not-strict --out FOLDER",
    "drafters.json": (
        f"{_DRAFTERS} {_MODELS} --prefix-caching --repeats 1 --least 4 --arms off"
        " history self:int4 history+self ngram draft_model eagle3 history+eagle3"
        " --cells 256/1 256/8 256/64 1700/1 1700/8 --out OUT"
    ),
    "epochs.json": (
        "examples/verl/demo.py --problems 100 --batch 4 --epochs 3 --out FOLDER"
    ),
    "gpu_gate_1.5b.json": "-m das_adapter.bench gate --shape 1.5b --out FOLDER",
    "gpu_copy_1.5b.json": "-m das_adapter.bench copy --shape 1.5b --out FOLDER",
    "gpu_lossless_1.5b.json": "-m das_adapter.bench lossless --shape 1.5b --out FOLDER",
    "gpu_kernels_7b.json": "-m das_adapter.bench kernels --shape 7b --out FOLDER",
    "gpu_replay_1.5b.json": (
        "-m das_adapter.bench replay --shape 1.5b --traces"
        " TRACES/rl_reasoning_gym_1280.npz --out FOLDER"
    ),
    "history.json": "benchmarks/history.py --traces TRACES --tokens 120000 --out OUT",
    "index.json": "benchmarks/index.py --traces TRACES --every 16 --out OUT",
    "others.json": "benchmarks/others.py --traces TRACES --out OUT",
    "kernels.json": "benchmarks/kernels.py --out OUT",
    "own_head.json": "benchmarks/own_head.py --out OUT",
    "long_responses.json": (
        f"{_DRAFTERS} --arms off history --cells 256/16 --repeats 1 --forced"
        " --lengths 6.6 1.32 --tokens 8192 --out OUT"
    ),
    "mutants.json": "benchmarks/mutation.py --out OUT",
    "nemo_rl.json": (
        "examples/nemo_rl/arms.py --problems 16 --steps 24 --epoch 4 --out FOLDER"
        f" policy.model_name={POLICY}"
    ),
    "noise_acceptance.json": (
        "benchmarks/noise_acceptance.py --drafters runs/drafters --out OUT"
    ),
    "pipelines.json": "benchmarks/pipelines.py --out OUT",
    "published.json": "benchmarks/published.py --out OUT",
    "run_ahead.json": (
        "benchmarks/run_ahead.py --steps 60 --visits 2 --batch 4 --arm history --arm"
        f" ahead --out OUT actor_rollout_ref.model.path={POLICY}"
        " actor_rollout_ref.actor.optim.lr=2.0e-5"
    ),
    "scale.json": "benchmarks/scale.py --syncs 8 --known 100000 --out OUT",
    "scale_nodes.json": "benchmarks/scale_nodes.py --out OUT",
    "simulator.json": "benchmarks/simulator.py recorded --out OUT",
    "simulator_ahead.json": "benchmarks/simulator.py ahead --traces TRACES --out OUT",
    "simulator_routing.json": (
        "benchmarks/simulator.py routing --traces TRACES --out OUT"
    ),
    "simulator_varied.json": "benchmarks/simulator.py varied --out OUT",
    "training.json": "benchmarks/training.py --out OUT",
    "trl.json": (
        "PYTHONPATH=.venv/hosts examples/trl/grpo_tiny_math.py --problems 16 --epochs 6"
        f" --policy {POLICY} --out FOLDER"
    ),
    "undrafted.json": (
        f"{_DRAFTERS} --arms stock stock:again stock:uncompiled off history:idle"
        " history:looks --cells 256/1 256/8 --epochs 1 --repeats 3 --forced --tokens"
        " 160 --out OUT"
    ),
    "v2_acceptance.json": "benchmarks/v2_acceptance.py --newest .venv/newest --out OUT",
    "v2_confidence.json": (
        "benchmarks/v2_confidence.py --drafters runs/drafters --out OUT"
    ),
    "v2_drafts.json": (
        "benchmarks/v2_drafts.py --traces TRACES --groups 32 --longest 1536 --out OUT"
    ),
    "v2_graphs.json": "PYTHONPATH=.venv/newest benchmarks/graphs.py --out OUT",
    "v2_lengths.json": "PYTHONPATH=.venv/newest benchmarks/v2_lengths.py --out OUT",
}
"""Commands by result, from the root of the repository; there is no other result. OUT:
where it is written; FOLDER: a directory, in which it is written under its name or as
`summary.json`. TRACES, a directory of recorded rollouts, is an environment variable.
NeMo-RL's needs NeMo-RL in PYTHONPATH, a GPU's a GPU.
"""
COMMANDS |= {
    f"{name}_intel.json": COMMANDS[f"{name}.json"]
    for name in ("demo", "epochs", "nemo_rl")
}
"""Three trainings were measured on machines of two kinds."""


def words(name: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a result's command sets, and what Python is given."""
    split = shlex.split(COMMANDS[name])
    variables = {
        word.partition("=")[0]: word.partition("=")[2]
        for word in split[:1]
        if "=" in word
    }
    return variables, split[len(variables) :]


def make(name: str) -> bool:
    """Make a result anew, with the page beside it if there is one; return whether its
    command succeeded, and leave the old one where it did not.
    """
    variables, given = words(name)
    for model, needed in NEEDED.items():
        if not (ROOT / model).exists() and any(model in word for word in given):
            subprocess.run([sys.executable, *needed.split()], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / name
        places = {"OUT": str(out), "FOLDER": folder}
        places["TRACES"] = os.environ.get("TRACES", "TRACES")
        command = [sys.executable, *(places.get(word, word) for word in given)]
        code = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **variables}, check=False
        ).returncode
        made = next(
            (path for path in (out, Path(folder) / "summary.json") if path.exists()),
            None,
        )
        if code or made is None:
            return False
        shutil.copy(made, RESULTS / name)
        if (page := out.with_suffix(".md")).exists():
            shutil.copy(page, RESULTS)
        return True
