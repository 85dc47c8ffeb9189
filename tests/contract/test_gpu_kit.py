"""The GPU kit's parts work, on a CPU with a tiny shape: what they measure there means nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import v2_cpu
from jobs import ON_CPU

from das_adapter.protocol.engine_args import RUNNER_VARIABLE

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "run.py"
EXACT = {
    "kernel": ["draws that differ from the definition, near-ties apart"],
    "index": ["requests whose drafts differ from the reference's", "bytes per sealed token"],
    "replay": ["forced tokens that were not written"],
    "lossless": [
        "responses that differ with batch-invariant kernels",
        "tokens drawn with the key of another position",
        "keys with which not exactly one token was written",
        "whether there is a drafter of which no token was accepted",
    ],
    "copy": ["errors of the policy copy after sleep"],
    "robust": ["errors of the crowded engine"],
}
"""Bars that hold on any device."""


def traces(directory: Path) -> Path:
    """Write rollouts of three problems at two steps, as recorded ones are written."""
    rng = np.random.default_rng(0)
    poems = rng.integers(0, 5000, (3, 60))  # of a larger vocabulary than the shape's
    problem, step = (x.ravel() for x in np.meshgrid(np.repeat(np.arange(3), 3), [0, 4], indexing="ij"))
    texts = [
        np.where(rng.random(60) < 0.1, rng.integers(0, 5000, 60), poems[p])[: 40 + i] for i, p in enumerate(problem)
    ]
    offsets = np.cumsum([0, *map(len, texts)])
    np.savez(directory / "traces.npz", ids=np.concatenate(texts), offsets=offsets, problem=problem, step=step)
    return directory / "traces.npz"


def kit(out: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[dict[str, Any], str]:
    """Run parts; return what each has written, and what was said."""
    command = [sys.executable, str(RUN), *arguments, "--shape", "tiny", "--out", str(out)]
    run = subprocess.run(
        command, env={**os.environ, **ON_CPU, **(env or {})}, capture_output=True, text=True, check=False
    )
    written = {p.name.split("_")[1]: json.loads(p.read_text()) for p in out.glob("gpu_*_tiny.json")}
    return written, run.stdout + run.stderr


WITH_ENGINES = ("gate", "replay", "trace", "lossless", "copy", "robust", "ranks", "sweep")


def check(part: str, content: dict[str, Any], said: str) -> None:
    """See that a part has run, has written and said its verdicts, and keeps the bars that hold on any device."""
    assert content["provenance"]["hardware"]["cpu"]
    verdicts = {v["bar"]: v for v in content["bars"]}
    assert verdicts
    assert content["state"] == "done", content
    assert all(verdicts[bar]["verdict"] == "kept" for bar in EXACT.get(part, ())), verdicts
    assert all(f"{part}: {bar}" in said for bar in verdicts)
    for bar in (
        "tests of the distribution: exit code",
        "host synchronisations of a step beyond stock's",
        "graphs that stock replays and ours does not",
        "contract tests: exit code",
        "tests of two ranks: exit code",
    ):
        assert bar not in verdicts or verdicts[bar]["verdict"] == "not run"  # not taken for good on a CPU


@pytest.mark.engine
def test_every_part_with_engines_runs_and_writes_its_figures_and_verdicts(tmp_path: Path) -> None:
    """With as few engines as show that: two of `gate` and `lossless`, no pytest; the others are below."""
    pytest.importorskip("vllm")
    written, said = kit(tmp_path, *WITH_ENGINES, "--few", "--traces", str(traces(tmp_path)))
    assert set(written) == set(WITH_ENGINES), said
    for part, content in written.items():
        check(part, content, said)
    assert set(written["gate"]["step_ms"]) == {"stock", "history"}
    arms = written["replay"]["arms"]
    assert set(arms) == {"stock", "earlier", "corrupted 0.0", "corrupted 1.0"}
    assert arms["corrupted 0.0"]["tokens_per_forward"] > 1.1  # recorded text is drafted and accepted
    assert arms["corrupted 1.0"]["accepted_tokens"] < 0.1 * arms["corrupted 0.0"]["accepted_tokens"]


@pytest.mark.long
@pytest.mark.engine
def test_every_part_runs_with_all_of_its_engines(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    written, said = kit(tmp_path, "--traces", str(traces(tmp_path)))
    assert set(written) == {"kernel", "index", "propose", *WITH_ENGINES}, said
    for part, content in written.items():
        check(part, content, said)
    assert set(written["gate"]["step_ms"]) == {"stock", "none, keyed", "history", "stock, synchronous"}
    assert "gate: stock's step without asynchronous scheduling" in said
    whole = written["propose"]["rows"]["4"]
    assert whole["every draft"]["draft_tokens"] > 2 and whole["every draft"]["tokens_per_forward"] > 1.5
    assert whole["default"]["propose_ms"] > 0
    listed = written["robust"]["contract"], written["ranks"], written["lossless"]["distribution"]
    assert all(re.fullmatch(r"\d+/\d+ tests collected .*", found["last_line"]) for found in listed), listed
    drafters = written["lossless"]["modes"]["batch-invariant"]
    assert {name: arm["asynchronous"] for name, arm in drafters.items()} == {"history": False, "draft_model": True}
    assert {"misleading", "after misleading"} < set(written["replay"]["arms"])


@pytest.mark.long
@pytest.mark.engine
def test_the_engines_parts_run_on_the_v2_runner(tmp_path: Path, newest_env: dict[str, str]) -> None:
    env = {**newest_env, **{name: value for name, value in v2_cpu.ENV.items() if name != RUNNER_VARIABLE}}
    written, said = kit(tmp_path, "gate", "replay", "trace", env=env)
    assert set(written) == {"gate", "replay", "trace"}, said
    assert written["gate"]["runner"] == written["trace"]["runner"] == "V2"
    assert set(written["gate"]["step_ms"]) == {"stock", "none, keyed", "history"}
    arms = written["replay"]["arms"]
    assert not any(arm.get("unforced") or arm.get("error") for arm in arms.values())
    assert arms["corrupted 0.0"]["tokens_per_forward"] > 1.05


BARE = """
import importlib.metadata, sys
IMAGE = {"torch", "triton", "numpy", "functorch", "torchgen", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
         "filelock", "fsspec", "typing_extensions", "setuptools", "packaging", "das_adapter"}
LACKED = set(importlib.metadata.packages_distributions()) - IMAGE
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in LACKED and path is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
"""
"""Hides what an image of PyTorch and Triton lacks, from every process."""


def test_the_kernels_need_no_vllm_and_next_to_no_package(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    written, said = kit(tmp_path, "kernel", "index", "gate", env={"PYTHONPATH": path})
    for part in ("kernel", "index"):
        check(part, written[part], said)
    assert written["gate"]["why"] == "vLLM is not installed"
    assert {v["verdict"] for v in written["gate"]["bars"]} == {"not run"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module."""
    monkeypatch.setattr(sys, "path", [str(RUN.parent), *sys.path])
    spec = importlib.util.spec_from_file_location("gpu_run", RUN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_verdict_is_good_without_all_of_its_figures(run: Any) -> None:
    bar = run.Bar("seconds", 2.0, lambda found: max(found["seconds"]))
    done = {"state": "done"}
    for found, verdict in (
        ({**done, "seconds": [1.0]}, "kept"),
        ({**done, "seconds": [3.0]}, "MISSED"),
        ({**done, "seconds": [1.0], "left_out": ["the second"]}, "cut short"),
        ({**done, "seconds": [3.0], "left_out": ["the second"]}, "MISSED"),
        ({"state": "failed", "seconds": [1.0]}, "cut short"),
        ({**done, "seconds": []}, "not run"),
        ({**done, "seconds": [float("nan")]}, "not run"),
        ({**done, "why": "fewer than two GPUs"}, "not run"),
        ({"state": "failed"}, "not run"),
    ):
        assert bar.verdict(found)["verdict"] == verdict, found


def test_every_bar_of_every_part_is_not_run_where_nothing_was_measured(run: Any) -> None:
    for part in run.PARTS:
        assert run.bars(part)
        assert {bar.verdict({"state": "done"})["verdict"] for bar in run.bars(part)} == {"not run"}


def test_a_part_that_fails_or_takes_too_long_loses_nothing(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = importlib.import_module("steps")

    def half_a_gate(plan: Any) -> Any:
        found = {"runner": "V1", "step_ms": {"stock": {"1 x 16": 2.0}, "history": {"1 x 16": 2.0}}}
        yield found
        raise RuntimeError("the engine is gone")

    monkeypatch.setattr(steps, "gate", half_a_gate)
    monkeypatch.setattr(run, "has_vllm", lambda: True)
    plan = replace(run.TINY, shape="1.5b")
    run.measure("gate", plan, None, tmp_path)
    assert run.judge("gate", plan, tmp_path) == ["cut short", "not run", "failed"]
    assert "the engine is gone" in capsys.readouterr().out
    arguments = SimpleNamespace(out=tmp_path, traces=None, shape="tiny")
    run.run_apart("propose", run.TINY, arguments, 0.2)  # not even imported by then
    assert run.judge("propose", run.TINY, tmp_path) == ["not run", "not run", "failed"]
    assert "not done after 0 s" in capsys.readouterr().out


def test_stock_is_measured_with_asynchronous_scheduling_and_on_the_v1_runner_without(run: Any) -> None:
    steps = importlib.import_module("steps")
    arms = steps.gate_arms(replace(run.TINY, runner="V1"))
    assert arms["stock"] == (None, {}, {})
    assert arms["stock, synchronous"] == (None, steps.V1, {"async_scheduling": False})
    assert set(steps.gate_arms(replace(run.TINY, runner="V2"))) == {"stock", "history", "none, keyed"}
    assert steps.gate_points(run.Plan("7b")) == [(1, 2048), (8, 2048), (64, 2048), (256, 1024), (8, 8192)]


def test_all_parts_are_estimated_to_end_in_time(run: Any) -> None:
    """Alike in the program's help and in the benchmarks' README."""
    helped = dict(re.findall(r"^    (\w+) +([\d.]+)  ", run.__doc__, re.M))
    table = (RUN.parents[1] / "README.md").read_text()
    assert list(helped) == list(run.PARTS)
    assert helped == dict(re.findall(r"^\| `python benchmarks/gpu/run.py (\w+)` \|[^|]+\| ([\d.]+) \|", table, re.M))
    minutes = list(map(float, helped.values()))
    assert sum(minutes) < 24 < run.ALL_S / 60
    assert f"{sum(minutes):g} minutes by the estimates" in table
    assert max(minutes) < run.PART_S / 60


def test_what_there_is_no_time_for_is_named(run: Any) -> None:
    found: dict[str, Any] = {}
    assert list(run.in_time(replace(run.TINY, until=0.0), [3, 5, 7], found)) == [3]
    assert found["left_out"] == ["5", "7"]


def test_traces_are_read_with_what_earlier_steps_wrote(run: Any, tmp_path: Path) -> None:
    replay, path = importlib.import_module("replay"), traces(tmp_path)
    plan = replace(run.TINY, replayed=5, longest=50)
    with np.load(path) as file:
        texts = [t % 997 for t in np.split(file["ids"], file["offsets"][1:-1])]
        of, step = file["problem"], file["step"]
        np.savez(tmp_path / "one.npz", **{name: file[name] for name in ("ids", "offsets", "problem")})
    for name, late in (("traces", step == 4), ("one", np.tile([False] * 3 + [True] * 3, 3))):
        batch, earlier = replay.recorded(tmp_path / f"{name}.npz", plan)
        expected = [(of[i], texts[i][:50].tolist()) for i in np.flatnonzero(late)][:5]
        assert [(problem, t.tolist()) for problem, t in batch] == expected
        met = np.flatnonzero(~late & (of < 2))
        assert [(problem, t.tolist()) for problem, t in earlier] == [(of[i], texts[i].tolist()) for i in met]


def test_contract_tests_run_on_the_runner_that_they_break(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would take V2 from 0.31 on, whose parts are others."""
    checks, called = importlib.import_module("checks"), []

    def noted(command: list[str], env: dict[str, str], **_: Any) -> Any:
        called.append((command, env))
        return SimpleNamespace(stdout="", returncode=0)

    plan = replace(run.TINY, shape="1.5b", runner="V2")
    monkeypatch.setattr(checks.subprocess, "run", noted)
    monkeypatch.setattr(checks, "apart", lambda *_, **__: {})
    monkeypatch.setenv(RUNNER_VARIABLE, "1")
    for capability, copy in ((9.0, "default"), (8.0, "default and two_ranks and not self")):
        monkeypatch.setattr(checks, "gpus", lambda found=capability: [found] * 2)
        for part in (checks.lossless, checks.robust, checks.ranks):
            list(part(plan))
        files = [[word for word in command if word.endswith(".py")] for command, _ in called]
        assert files == [["test_distribution.py", "test_neural.py"], ["test_losslessness.py"], ["test_ranks.py"]]
        assert {env[RUNNER_VARIABLE] for _, env in called} == {"0"}
        assert {env["DAS_TEST_DTYPE"] for _, env in called} == {"bfloat16"}
        assert [env.get("VLLM_BATCH_INVARIANT") for _, env in called] == [None, "1", "1"]
        assert called[-1][1]["DAS_TEST_COPY"] == "fp8"
        assert copy in called[-1][0]
        called.clear()
