"""Every command of the docs is run: by a test at every push, or at night where the page
says so, or it needs a GPU.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from documented import NIGHTLY, PAGES, ROOT, commands, marks, nightly

from das_adapter.cli import main
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.length import RESPONSE
from das_adapter.protocol import spool
from das_adapter.protocol.decision_log import (
    DecisionLog,
    RequestRecord,
    StepRecord,
    WeightSyncRecord,
)
from das_adapter.service import checkpoint
from das_adapter.service.prompts import Prompts

HERE = "tests/unit/test_docs_commands.py::test_what_is_typed_into_das_adapter_runs"
# What a command looks like, and the test that runs it.
COMMANDS = {
    r"das-adapter (estimate|simulate|report|compare|config|history)( .*)?": HERE,
    r"das-adapter install nemo-rl .*": (
        "tests/unit/test_nemo_rl_environments.py::test_every_environment_that_needs_it_gets_it"
    ),
    r"das-adapter doctor( --json)?": (
        "tests/contract/test_commands.py::test_doctor_finds_nothing_broken"
    ),
    r"pip install dist/das_adapter-\*\.whl": (
        "tests/wheel/test_wheel.py::test_it_drafts_where_there_is_no_compiler"
    ),
    r"(uv )?pip install \.|pip uninstall das-adapter": (
        "tests/wheel/test_wheel.py::test_a_checkout_is_installed_and_nothing_stays_when_it_is_uninstalled"
    ),
    r"VERL_FILE_LOGGER_PATH=\S+ bash examples/verl/run_tiny_math_cpu.sh .*": (
        "tests/e2e/test_verl.py::test_the_script_trains_and_leaves_a_log"
    ),
    r"\.venv/bin/python -m pytest tests/contract/test_losslessness.py": "make test",
    r"PYTHONPATH=\S+ python examples/nemo_rl/arms.py": (
        "tests/e2e/test_nemo_rl_runs.py::test_training_is_the_same_to_the_last_token_and_the_last_gradient"
    ),
    r"DAS_CONFIG=\S+ \S+ python examples/vllm/in_place_update.py": (
        "tests/wheel/test_wheel.py::test_an_engine_drafts_from_its_history_after_its_weights_were_updated_in_place"
    ),
    r"python examples/vllm/stub_trainer.py .*": (
        "tests/e2e/test_vllm_serve.py::test_a_trainer_gets_the_same_tokens_and_the_history_follows_its_updates"
    ),
    r"python examples/trl/grpo_tiny_math.py .*": (
        "tests/e2e/test_trl.py::test_training_steps_have_the_same_tokens_and_the_history_follows_the_weights"
    ),
    r"python examples/openrlhf/rollouts.py .*": (
        "tests/e2e/test_openrlhf.py::test_rollouts_have_the_same_tokens_and_the_history_follows_the_weights"
    ),
    r"PYTHONPATH=\S+ python examples/skyrl/rollouts.py .*": (
        "tests/e2e/test_skyrl.py::test_rollouts_have_the_same_tokens_and_the_history_follows_the_weights"
    ),
    r"pip install (trl|--no-deps openrlhf|--no-deps --ignore-requires-python skyrl .*)": (
        "make hosts"
    ),
    r"make demo": "tests/e2e/test_verl.py::test_the_demo_compares_its_arms",
    r"make env|pip install -c constraints/cpu\.txt -e \S+|das-adapter cpu-setup": (
        "make test"
    ),
    r"make (test|check|wheel|docs)": "itself",
}
SIMULATION: dict[str, Any] = {
    "steps": {"kind": "line", "line": {"base": 0.01, "token": 1e-4, "draft": 0.0}},
    "rollout": {
        "problems": 8,
        "samples": 2,
        "dataset": 16,
        "cap": 300,
        "prompt": 20,
        "lengths": {"mean": 80},
    },
    "arms": {"off": {"das": {"drafter": "none"}}, "history": {}},
}


def targets(workflow: str) -> set[str]:
    """Return what a workflow makes."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text())[
        "jobs"
    ].values()
    run = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    found = set(re.findall(r"\bmake (\w+)", run))
    if "make ${{ matrix.make }}" in run:
        found.update(name for job in jobs for name in job["strategy"]["matrix"]["make"])
    return found


def at_night(command: str) -> bool:
    """Return whether only a nightly run types a command.

    Raises:
        AssertionError: no run types it.
    """
    matching = [
        test for pattern, test in COMMANDS.items() if re.fullmatch(pattern, command)
    ]
    assert matching, (
        "name in COMMANDS what runs it, or write <!-- GPU only --> above its block"
    )
    test = command if matching[0] == "itself" else matching[0]
    if test.startswith("make "):
        assert test[5:] in targets("ci.yml") | targets("nightly.yml")
        return test[5:] not in targets("ci.yml")
    file, _, name = test.partition("::")
    assert name in marks(ROOT / file), f"no such test: {test}"
    if test != HERE:
        assert program(command) in (ROOT / file).read_text(), f"{file} does not run it"
    return nightly(ROOT / file, name)


def program(command: str) -> str:
    """Return what a command runs: a command of das-adapter's, the stem of a file, a
    package, or a target of make.
    """
    words = shlex.split(command)
    files = [Path(word).stem for word in words if word.endswith((".py", ".sh"))]
    if words[:1] + words[-1:] in (["pip", "."], ["uv", "."]):
        return f'"{words[0]}"'
    return (
        files[0]
        if files
        else (
            words[1]
            if words[0] in ("das-adapter", "make")
            else words[-1].rpartition("/")[2]
        )
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_run_by_a_test_and_the_page_says_which_only_at_night(
    page: Path,
) -> None:
    for mark, block in commands(page):
        assert (mark == NIGHTLY) == any([at_night(command) for command in block]), block


@pytest.mark.parametrize(
    "command",
    sorted({c for page in PAGES for _, block in commands(page) for c in block}),
)
def test_options_are_those_of_the_program(command: str) -> None:
    words = shlex.split(command)
    options = {word for word in words if word.startswith("--")} - {"--no-deps"}
    if words[0] == "das-adapter":
        command_of: click.Command = main
        for word in words[1:]:
            command_of = (
                command_of.commands[word]
                if isinstance(command_of, click.Group)
                else command_of
            )
        assert options <= {
            o for p in command_of.params if isinstance(p, click.Option) for o in p.opts
        }
    for file in (ROOT / word for word in words if word.startswith("examples/")):
        assert all(f'"{option}"' in file.read_text() for option in options)


def test_nightly_runs_make_what_no_push_does() -> None:
    assert {"long", "hosts", "matrix", "mutants"} <= targets("nightly.yml")
    assert not {"long", "hosts", "mutants"} & targets("ci.yml")


def save(step: Path) -> None:
    """Save a history of one prompt in a checkpoint."""

    def save_parts(index: Path) -> int:
        with HistoryStore("store") as store:
            store.add(7, [1, 2, 3], 1)
            store.save(index / "0")
        prompts = Prompts(Path("prompts"), 1000)
        prompts.add([(7, bytes(4))])
        prompts.save(checkpoint.prompts_file(index / "0"))
        return 1

    step.mkdir(parents=True)
    facts = {"scope": "problem", "tokenizer": "0123456789abcdef"}
    lengths = np.array([(7, 3, 1)], RESPONSE)
    checkpoint.write(step / checkpoint.NAME, facts, lengths, save_parts)


def here(command: str) -> bool:
    """Return whether it is run below."""
    return (
        next(
            (
                test
                for pattern, test in COMMANDS.items()
                if re.fullmatch(pattern, command)
            ),
            "",
        )
        == HERE
    )


TYPED = sorted(
    {c for page in PAGES for _, block in commands(page) for c in block if here(c)}
)


@pytest.mark.parametrize("command", TYPED)
def test_what_is_typed_into_das_adapter_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a dump, a simulation, logs, configs and a checkpoint under the names of the
    docs, and the tiny policy's tokenizer.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spool, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("rollouts", "DUMP"):
        Path(name).mkdir()
    steps = range(1, 4)
    text = [
        {"input": "1+2=", "output": "1+2=3, so 1+2=3", "step": step} for step in steps
    ]
    Path("rollouts/1.jsonl").write_text("\n".join(map(json.dumps, text)))
    tokens = [
        {"problem": 0, "prompt": [1], "response": list(range(60)), "step": step}
        for step in steps
    ]
    Path("DUMP/1.jsonl").write_text("\n".join(map(json.dumps, tokens)))
    Path("simulation.yaml").write_text(json.dumps(SIMULATION))
    log = DecisionLog("runs/das")
    for version in (11, 12):
        log.add(StepRecord(100.0, 4, 10, 6, 3, 0.5, None))
        log.add(
            RequestRecord(0, 0, tokens=9, drafted=6, accepted=3, begin=100.0, end=101.0)
        )
        log.add(WeightSyncRecord(version, None, 0.0, None))
    log.flush()
    for run in ("off", "das"):
        logged = {"das/token_hash": 7.0, "critic/score/mean": 0.5, "das/rollout_s": 1.0}
        Path(f"runs/{run}.jsonl").write_text(
            json.dumps({"step": 1, "data": logged}) + "\n"
        )
    save(Path("checkpoints/global_step_100"))
    Path("das.yaml").write_text("drafter: history\n")
    rollout = {
        "name": "vllm",
        "custom": {"das": {"drafter": "history", "max_draft_tokens": 16}},
    }
    Path("grpo.yaml").write_text(
        json.dumps({"actor_rollout_ref": {"rollout": rollout}})
    )
    words = shlex.split(command)[1:]
    if "--tokenizer" in words:
        words[words.index("--tokenizer") + 1] = str(ROOT / "examples/tiny_math/policy")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("env", "scripts/requirements.py"),
        ("demo", "examples/verl/demo.py"),
        ("test", "-m pytest -n 2"),
        ("docs", "mkdocs build"),
        ("check", "-m pytest tests/unit"),
        ("wheel", "-m pytest tests/wheel -m wheel"),
        ("long", "-m long"),
        ("hosts", "-m hosts"),
        ("matrix", "scripts/matrix.py --run"),
        ("mutants", "benchmarks/mutation.py --out"),
    ],
)
def test_make_runs_files_that_exist(target: str, runs: str) -> None:
    command = ["make", "-n", "-B", target, f"PYTHON={sys.executable}"]
    said = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert runs in said
    named = set(
        re.findall(r"(?<![\w/.-])(?:tests|scripts|examples|csrc)/[\w./]+", said)
    )
    assert named and all((ROOT / path).exists() for path in named), named
