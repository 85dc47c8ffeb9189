"""The docs say what is: the site builds without a warning, commands are tested, blocks parse, metrics and alarms are
those of the source."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from das_adapter.cli import main
from das_adapter.config import parse
from das_adapter.core.staleness import AGES
from das_adapter.protocol.metrics import Counters, RolloutClock, figures

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
GPU_ONLY = "<!-- GPU only -->"

# What a command looks like, and the tests that run it; das-adapter's options are checked as well.
COMMANDS = {
    r"pip install das-adapter": "tests/wheel/test_wheel.py::test_it_drafts_where_there_is_no_compiler",
    r"das-adapter doctor( --json)?": "tests/contract/test_commands.py::test_doctor_finds_nothing_broken",
    r"das-adapter replay .*--hardware .*": (
        "tests/unit/test_pays.py::test_the_command_answers_in_seconds_and_with_a_block"
    ),
    r"das-adapter replay .*": "tests/unit/test_replay.py::test_the_command_prints_and_writes",
    r"das-adapter simulate .*": "tests/unit/test_sim_files.py::test_the_command_simulates_and_varies",
    r"das-adapter calibrate .*": "tests/contract/test_decisions.py::test_calibrate_measures_this_machine",
    r"das-adapter report .*": "tests/unit/test_report.py::test_the_command_writes_the_page_and_prints_the_figures",
    r"bash examples/verl/run_tiny_math_cpu.sh .*": "tests/contract/test_commands.py::test_the_script_starts_verl",
    r".*python -m pytest (\S+)": "",
    r"PYTHONPATH=\S+ python examples/nemo_rl/cpu_sync.py": (
        "tests/e2e/test_nemo_rl_runs.py::test_training_is_the_same_to_the_last_token_and_the_last_gradient"
    ),
    r"DAS_CONFIG=\S+ \S+ python examples/vllm/in_place_update.py": (
        "tests/wheel/test_wheel.py::test_an_engine_drafts_from_its_history_after_its_weights_were_updated_in_place"
    ),
    r"python examples/vllm/stub_trainer.py .*": (
        "tests/e2e/test_vllm_serve.py::test_a_trainer_gets_the_same_tokens_and_the_history_follows_its_updates"
    ),
    r"pip install trl|python examples/trl/grpo_tiny_math.py .*": (
        "tests/e2e/test_trl.py::test_training_steps_have_the_same_tokens_and_the_history_follows_the_weights"
    ),
    r"pip install --no-deps openrlhf|python examples/openrlhf/rollouts.py .*": (
        "tests/e2e/test_openrlhf.py::test_rollouts_have_the_same_tokens_and_the_history_follows_the_weights"
    ),
    r"make demo": "tests/e2e/test_verl.py::test_the_demo_compares_its_arms",
    r"make docs": "tests/unit/test_docs.py::test_the_site_builds_without_a_warning_or_a_broken_link",
    r"make (env|test|check|wheel)": "tests/unit/test_docs.py::test_make_runs_files_that_exist",
    r"\.venv/bin/pip install pre-commit && \.venv/bin/pre-commit install": "",
}


def blocks(path: Path, *languages: str) -> Iterator[str]:
    """The fenced blocks of a page in these languages, but for those that need a GPU."""
    found = re.findall(r"(<!-- GPU only -->\n)?^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    yield from (text for gpu, language, text in found if language in languages and not gpu)


def commands() -> list[tuple[str, str]]:
    found = []
    for path in PAGES:
        typed = ["\n".join(re.findall(r"^\$ (.*)$", block, re.MULTILINE)) for block in blocks(path, "", "console")]
        for block in [*blocks(path, "bash", "sh"), *typed]:
            for line in block.replace("\\\n", " ").splitlines():
                command = " ".join(re.sub(r"(^|\s{2,})#.*", "", line).split())
                if command:
                    found.append((path.name, command))
    return found


@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda value: value[:40])
def test_every_command_is_run_by_a_test(page: str, command: str) -> None:
    matching = [test for pattern, test in COMMANDS.items() if re.fullmatch(pattern, command)]
    assert matching, f"{page}: name the test that runs it in COMMANDS, or write {GPU_ONLY} above its block"
    test = matching[0]
    if test:
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        assert f"def {name}(" in source
        assert program(command) in source, f"{file} does not run it"
    if words := re.match(r".*python -m pytest (\S+)", command):
        assert (ROOT / words[1]).exists()
    if command.startswith("das-adapter "):
        _, name, *arguments = shlex.split(command)
        chosen = main.commands[name]
        options = {option for p in chosen.params if isinstance(p, click.Option) for option in p.opts}
        assert {word for word in arguments if word.startswith("-")} <= options


def program(command: str) -> str:
    """What a command runs: a command of das-adapter's, the stem of a file, a package, or a target of make."""
    words = shlex.split(command)
    files = [Path(word).stem for word in words if word.endswith((".py", ".sh"))]
    return files[0] if files else words[1] if words[0] in ("das-adapter", "make") else words[-1]


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("env", "tools/requirements.py"),
        ("demo", "examples/verl/demo.py"),
        ("test", "-m pytest -n 2"),
        ("docs", "mkdocs build"),
        ("check", "-m pytest tests/unit"),
        ("wheel", "-m pytest tests/wheel -m wheel"),
    ],
)
def test_make_runs_files_that_exist(target: str, runs: str) -> None:
    command = ["make", "-n", "-B", target, f"PYTHON={sys.executable}"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert runs in said
    named = set(re.findall(r"(?<![\w/.-])(?:tests|tools|examples|csrc)/[\w./]+", said))
    assert named and all((ROOT / path).exists() for path in named), named


def test_the_site_builds_without_a_warning_or_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("index.html", "SECURITY.html", "pictures/chart_epochs.svg"):
        assert (tmp_path / name).stat().st_size > 1000
    for page in tmp_path.glob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="http[^"]*"', page.read_text()), page.name


def test_every_page_can_be_found() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("*.md")}
    listed = set(re.findall(r"^ +- .*: (\S+\.md)$", config, re.MULTILINE))
    assert pages <= listed, "name it under nav in mkdocs.yml"


def test_links_of_the_readme_lead_somewhere() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "benchmarks/README.md"):
        for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def das_blocks() -> list[tuple[str, Any]]:
    def inside(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for key, part in value.items():
                if key == "das":
                    yield part
                yield from inside(part)

    return [(page.name, das) for page in PAGES for text in blocks(page, "yaml") for das in inside(yaml.safe_load(text))]


@pytest.mark.parametrize(("page", "das"), das_blocks(), ids=str)
def test_every_block_in_the_docs_is_right(page: str, das: Any) -> None:
    parse(das)


def test_every_metric_is_documented_and_no_other() -> None:
    report = {
        **Counters(request_forwards=1, drafted_forwards=1, draft_tokens=1, tokens=2, propose_seconds=[0.1]).take(),
        **RolloutClock().take(),
        "class_steps": [1, 1, 1],
        "class_drafts": [1, 1, 1],
        "time_saved_s": 0.0,
        "latency_model_error": 0.1,
        "history_requests": 1,
        "history_hits": 1,
        "staleness": [[1, 1]] * len(AGES),
        "requantise_s": 0.1,
        "drafter_bytes": 1,
        "drafter_passes": 1,
        "self_acceptance": 0.5,
        "live_bytes": 1,
        "of_stock": 1.0,
        "model_runner": 2,
        "reason": None,
        "engines_behind": 0,
    }
    logged = set(figures([report])) | {"das/weight_version", "das/exposed_generation_s"}
    logged |= {"das/history_nodes", "das/unsent_s", "das/checkpoint_s", "das/checkpoint_bytes"}
    rows = re.findall(r"^\| (`das/.*?) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(das/[\w/]+)`", row)]
    assert sorted(documented) == sorted(logged)


def template(node: ast.AST) -> str | None:
    """A string of the source, with … for what is filled in; None: the node is no string."""
    if isinstance(node, ast.JoinedStr):
        return re.sub("…+", "…", "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d+)?[srdf]", "…", node.value)
    return None


REASONS = ("faults", "collapsed", "lost", "_loss")
"""Functions that return why das/health is 0, or why drafting stopped."""


def alarms(tree: ast.AST) -> Iterator[str]:
    """What a source file has to say about das/health 0: in `faults`, and where it looks for reasons."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in REASONS:
            said = [part for part in ast.walk(node) if isinstance(part, (ast.Assign, ast.Return))]
        elif isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Attribute) and t.attr in ("alarm", "reason", "slow", "_refused") for t in node.targets
        ):
            said = [node]
        else:
            continue
        yield from (text for part in said if part.value and (text := template(part.value)) and " " in text)


def test_every_alarm_is_explained_word_for_word() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    explained = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    trees = [ast.parse(path.read_text()) for path in (ROOT / "das_adapter").rglob("*.py")]
    source = {text for tree in trees for node in ast.walk(tree) if (text := template(node))}
    for line in explained:
        assert any(line in text for text in source), f"no such line in the source: {line}"
    spoken = {alarm for tree in trees for alarm in alarms(tree)}
    assert len(spoken) >= 7
    assert spoken <= set(explained), f"not explained: {spoken - set(explained)}"


def test_the_table_of_what_works_names_tests_that_exist() -> None:
    """A cell says in which file the tests stand, or means one that another cell names."""
    page = (ROOT / "docs/support.md").read_text()
    files = {path.name: path.read_text() for path in (ROOT / "tests").glob("*/test_*.py")}
    defined = {name for text in files.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    rows = [row for row in page.splitlines() if row.startswith("| ")]
    assert len(rows) > 10
    for cell in (cell for row in rows for cell in row.split("|")):
        file = None
        for name in re.findall(r"`(test_[\w.]+)`", cell):
            if name.endswith(".py"):
                file = files[name]
            else:
                assert name in defined, name
                assert file is None or f"def {name}(" in file, (name, cell)
