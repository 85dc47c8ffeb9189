"""The GPU kit's parts work, on a CPU with a tiny shape: what they measure there means
nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from operator import lt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from jobs import ON_CPU
from v2_cpu import everywhere

from das_adapter.bench import copy, engines, gate, replay, train
from das_adapter.bench.engines import TINY
from das_adapter.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXACT = {
    "kernels": ["bytes per sealed token"],
    "gate": ["draft tokens that undrafted steps accepted, of their tokens"],
    "replay": ["forced tokens that were not written", "errors"],
    "lossless": [
        "responses to long prompts that differ with batch-invariant kernels",
        "drafters that failed",
    ],
    "copy": ["formats whose copy failed, or drafted nothing, before or after sleep"],
    "train": ["steps whose tokens differ with batch-invariant kernels"],
}
"""Bars that hold on any device."""


def traces(directory: Path) -> Path:
    """Write rollouts of three problems at two steps, as recorded ones are written."""
    rng = np.random.default_rng(0)
    poems = rng.integers(0, 5000, (3, 60))  # of a larger vocabulary than the shape's
    problem, step = (
        x.ravel()
        for x in np.meshgrid(np.repeat(np.arange(3), 3), [0, 4], indexing="ij")
    )
    texts = [
        np.where(rng.random(60) < 0.1, rng.integers(0, 5000, 60), poems[p])[: 40 + i]
        for i, p in enumerate(problem)
    ]
    offsets = np.cumsum([0, *map(len, texts)])
    np.savez(
        directory / "traces.npz",
        ids=np.concatenate(texts),
        offsets=offsets,
        problem=problem,
        step=step,
    )
    return directory / "traces.npz"


def kit(
    out: Path, *arguments: str, env: dict[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """Run parts; return what each has written, and what was said."""
    command = [
        sys.executable,
        "-m",
        "das_adapter.bench",
        *arguments,
        "--shape",
        "tiny",
        "--out",
        str(out),
    ]
    run = subprocess.run(
        command,
        env={**os.environ, **ON_CPU, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    written = {
        p.name.split("_")[1]: json.loads(p.read_text())
        for p in out.glob("gpu_*_tiny.json")
    }
    return written, run.stdout + run.stderr


WITH_ENGINES = ("gate", "replay", "lossless", "copy")
"""Parts that start engines."""


def check(part: str, content: dict[str, Any], said: str) -> None:
    """See that a part has run, has written and said its verdicts, and keeps the bars
    that hold on any device.
    """
    assert content["provenance"]["hardware"]["cpu"]
    verdicts = {v["bar"]: v for v in content["bars"]}
    assert verdicts
    assert content["state"] == "done", content.get("error", content.get("why"))
    assert all(verdicts[bar]["verdict"] == "kept" for bar in EXACT.get(part, ())), (
        verdicts
    )
    assert all(f"{part}: {bar}" in said for bar in verdicts)


def check_gate(gate: dict[str, Any], arms: set[str]) -> None:
    """See that each figure has an error, and that no text came twice, which would have
    been drafted.
    """
    assert set(gate["arms"]) == arms
    for arm in gate["arms"].values():
        assert arm["start_s"] > 0 and arm["kv_tokens"] > 0
        assert all(
            step > 0 and 0 < error < float("inf")
            for step, error in arm["step_ms"].values()
        )
    for ratios in gate["of_stock"].values():
        assert all(
            ratio > 0 and 0 < error < float("inf") for ratio, error in ratios.values()
        )
    assert gate["arms"]["history"]["tokens"] > 100


@pytest.mark.engine
def test_a_part_with_engines_runs_and_writes_its_figures_and_verdicts(
    tmp_path: Path,
) -> None:
    pytest.importorskip("vllm")
    written, said = kit(tmp_path, "lossless")
    check("lossless", written["lossless"], said)
    assert all(
        arm["accepted_tokens"] > 0 for arm in written["lossless"]["drafters"].values()
    )


@pytest.mark.engine
def test_a_training_is_measured_step_by_step(tmp_path: Path) -> None:
    """Real GRPO through TRL, all arms in turns; the tokens of both that draw keyed
    noise are equal.
    """
    pytest.importorskip("vllm")
    written, said = kit(tmp_path, "train", env=with_trl())
    content = written["train"]
    check("train", content, said)
    extent = train.EXTENTS["tiny"]
    assert set(content["arms"]) == set(train.ARMS)
    for name, arm in content["arms"].items():
        assert all(len(arm[figure]) == extent.steps for figure in train.STEP)
        assert all(map(lt, arm["rollout_s"], arm["step_s"]))
        assert all(0.0 <= reward <= 1.0 for reward in arm["reward"])
        assert name == "history" or set(arm["tokens_per_forward"]) == {1.0}
    off, ours = (content["arms"][name] for name in ("none, keyed", "history"))
    assert off["token_hash"] == ours["token_hash"] and off["reward"] == ours["reward"]
    assert content["arms"]["stock"]["token_hash"] != off["token_hash"]
    epoch = extent.problems // extent.batch
    assert min(ours["tokens_per_forward"][epoch:]) > 1.5, (
        "every problem has come before"
    )
    assert all(
        len(ratios) == extent.epochs
        for arm in content["of_stock"].values()
        for ratios in arm.values()
    )
    assert content["equal"]["steps"] == extent.equal_steps
    assert len(content["claims"]) == extent.steps


def with_trl() -> dict[str, str]:
    """The environment of a process that finds TRL."""
    folder = Path(sys.prefix) / "hosts"
    if not folder.is_dir():
        pytest.skip(f"TRL is not in {folder}: make test puts it there")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "MKL_CBWR": "AUTO,STRICT"}


def test_claims_that_no_step_made_are_not_judged() -> None:
    (bar,) = [bar for bar in train.BARS if "das/of_stock" in bar.says]
    for claims, verdict in (
        ([None, None], "not run"),
        ([None, 1.05], "kept"),
        ([0.8, 0.9], "MISSED"),
    ):
        found = bar.verdict({"state": "done", "claims": claims})
        assert found["verdict"] == verdict, claims


def test_a_training_says_what_it_lacks(run: Any, monkeypatch: Any) -> None:
    for found, said in ((None, "no package trl"), (object(), "--tiny-math")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, found=found: found)
        content = run.measured("train", TINY, None)
        assert content["state"] == "failed" and said in content["why"]


@pytest.mark.long
@pytest.mark.engine
def test_every_part_runs_and_writes_its_figures_and_verdicts(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    written, said = kit(tmp_path, "--traces", str(traces(tmp_path)))
    assert set(written) == {"kernels", *WITH_ENGINES}, said
    assert written["replay"]["drafted_steps"]
    for part, content in written.items():
        check(part, content, said)
    check_gate(written["gate"], {"stock", "none, keyed", "history"})
    arms = written["replay"]["arms"]
    drafted = {
        "first",
        "earlier",
        "exchanged 0%",
        "exchanged 100%",
        "misleading",
        "after misleading",
    }
    assert set(arms) == drafted
    assert all(
        arm["of_stock"][0] > 0 and len(arm["rollouts"]) >= 1 for arm in arms.values()
    )
    turns = [turn for arm in arms.values() for turn in arm["rollouts"]]
    assert all(
        each["steps"] > least and each["most_ms"] > 0
        for turn in turns
        for each, least in ((turn, 1), (turn["stock"], 5))
    )
    assert (
        written["replay"]["groups"] == [2, 3, 3]
        and len(written["replay"]["longest"]) == 5
    )
    # recorded text is drafted and accepted
    assert arms["exchanged 0%"]["tokens_per_forward"] > 1.1
    assert (
        arms["exchanged 100%"]["accepted_tokens"]
        < 0.1 * arms["exchanged 0%"]["accepted_tokens"]
    )


@pytest.mark.long
@pytest.mark.engine
def test_the_engines_parts_run_on_the_v2_runner(
    tmp_path: Path, newest_env: dict[str, str]
) -> None:
    written, said = kit(tmp_path, "gate", "replay", env=everywhere(newest_env))
    assert set(written) == {"gate", "replay"}, said
    assert written["gate"]["arms"]["history"]["model_runner"] == 2
    check_gate(written["gate"], {"stock", "history"})
    arms = written["replay"]["arms"]
    assert not any(arm.get("unforced") or arm.get("error") for arm in arms.values())
    assert arms["exchanged 0%"]["tokens_per_forward"] > 1.05


BARE = """
import importlib.metadata, sys
IMAGE = {"torch", "triton", "numpy", "functorch", "torchgen", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
         "filelock", "fsspec", "typing_extensions", "setuptools", "_distutils_hack", "pkg_resources", "packaging",
         "das_adapter"}
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
    written, said = kit(tmp_path, "kernels", env={"PYTHONPATH": path})
    check("kernels", written["kernels"], said)


@pytest.fixture
def run() -> Any:
    """The program as a module."""
    return importlib.import_module("das_adapter.bench.run")


def test_no_verdict_is_good_without_all_of_its_figures(run: Any) -> None:
    bar = engines.Bar("seconds", 2.0, lambda found: max(found["seconds"]))
    done = {"state": "done"}
    for found, verdict in (
        ({**done, "seconds": [1.0]}, "kept"),
        ({**done, "seconds": [3.0]}, "MISSED"),
        ({"state": "cut short", "seconds": [1.0]}, "cut short"),
        ({"state": "cut short", "seconds": [3.0]}, "MISSED"),
        ({"state": "failed", "seconds": [1.0]}, "cut short"),
        ({**done, "seconds": []}, "not run"),
        ({**done, "seconds": [float("nan")]}, "not run"),
        ({**done, "why": "fewer than two GPUs"}, "not run"),
        ({"state": "failed"}, "not run"),
    ):
        assert bar.verdict(found)["verdict"] == verdict, found


def test_every_bar_of_every_part_is_not_run_where_nothing_was_measured(
    run: Any,
) -> None:
    for part in run.PARTS:
        assert {
            bar.verdict({"state": "done"})["verdict"] for bar in run.module(part).BARS
        } == {"not run"}


def test_a_part_that_fails_or_takes_too_long_loses_nothing(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half_a_gate(plan: Any, *_: Any) -> Any:
        arm = {"step_ms": {"1 x 16": [2.0, 0.001]}, "start_s": 40.0, "kv_share": 0.5}
        arms = {"stock": arm, "history": arm | {"accepted_tokens": 0, "tokens": 500}}
        yield {"arms": arms, "of_stock": {"history": {"1 x 16": [1.0, 0.001]}}}
        engines.apart(plan, *endings[plan.steps])

    monkeypatch.setattr(gate, "measure", half_a_gate)
    endings = [
        (signal.raise_signal, signal.SIGKILL),
        (int, "no number"),
        (time.sleep, 600.0),
    ]
    verdicts = ["cut short", "not run", *["cut short"] * 4]
    for ending, (state, why) in enumerate(
        (
            ("failed", "terminated abruptly"),
            ("failed", "invalid literal"),
            ("cut short", "no time is left"),
        )
    ):
        plan = replace(
            TINY,
            steps=ending,
            until=time.monotonic() + (0.5 if state == "cut short" else 60.0),
        )
        told: list[Any] = []
        content = run.measured("gate", plan, None, told.append)
        assert (
            told == [content | {"state": "cut short", "why": "the program was ended"}]
            or "error" in content
        )
        assert run.judge("gate", content) == [*verdicts, state]
        assert why in capsys.readouterr().out


def test_the_checkpoints_of_a_parts_engines_go_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan = replace(TINY, until=time.monotonic() + 300.0)
    # once the checkpoint is written
    with pytest.raises(RuntimeError, match="found 'none such'"):
        engines.apart(
            plan,
            engines.engine,
            plan,
            {"drafter": "none such"},
            env={"TMPDIR": str(tmp_path)},
        )
    assert not list(tmp_path.rglob("config.json"))


def test_a_recorded_response_ends_where_it_begins_to_repeat_itself() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 5000, 900)
    assert replay.begin_of_loop(text) == 900
    for period, rounds in ((1, 80), (7, 12), (40, 3), (256, 4)):
        loop = np.tile(rng.integers(0, 5000, period), rounds)
        looping = np.concatenate([text, loop, text[:50]])
        assert replay.begin_of_loop(looping) == 900 + period, (period, rounds)
    twice = np.concatenate([text, text[-100:], text[-100:]])
    assert replay.begin_of_loop(twice) == 900
    once = np.concatenate([text, text[-100:]])
    assert replay.begin_of_loop(once) == 1000, "a stretch that is said again is no loop"


def test_an_interruption_counts_as_a_few_steps() -> None:
    times = [0.0, 1.0, 2.0, 32.0, 33.0, 34.0]
    assert engines.step_seconds(times) == pytest.approx((4 * 1.0 + 3.0) / 5)


def test_undrafted_steps_are_few_behind_long_texts() -> None:
    plan = engines.Plan("7b")
    assert gate.gate_points(plan) == [
        (1, 2048),
        (8, 2048),
        (64, 2048),
        (256, 1024),
        (8, 8192),
    ]
    fitting = gate.gate_points(plan, room=40_000)
    assert fitting == [(1, 2048), (8, 2048), (64, 541), (256, 72), (8, 4724)]
    assert all(
        batch * (context + 16 + 4 + plan.steps) <= 40_000 for batch, context in fitting
    )


def test_all_parts_are_estimated_to_end_in_time(run: Any) -> None:
    """Alike in the program's help and in the benchmarks' README."""
    helped = dict(re.findall(r"^    (\w+) +([\d.]+)  ", run.__doc__, re.M))
    table = (ROOT / "benchmarks" / "README.md").read_text()
    assert list(helped) == list(run.PARTS)
    assert helped == dict(
        re.findall(r"^\| `das-adapter bench (\w+)` \|[^|]+\| ([\d.]+) \|", table, re.M)
    )
    minutes = {part: float(each) for part, each in helped.items()}
    assert minutes["gate"] * 60 > 2 * (
        2 * 80 + len(gate.gate_points(engines.Plan("7b"))) * gate.ROUNDS_S
    )
    together = sum(minutes[part] for part in run.ALL)
    assert together <= 24 < run.ALL_S / 60
    assert f"{together:g} minutes by the estimates" in table
    assert all(
        each / (1 + (part == "gate")) <= run.PART_S / 60
        for part, each in minutes.items()
    )


def test_parts_that_a_small_policy_may_not_keep_are_measured_with_both_shapes(
    run: Any,
) -> None:
    small = {"replay", "lossless"}
    assert run.chosen(["train"], None) == [("train", "1.5b")]
    assert run.chosen([], None) == [
        (n, s)
        for n in run.ALL
        for s in ("7b", "1.5b")
        if n == "gate" or (s == "1.5b") == (n in small)
    ]
    assert run.chosen(["gate", "copy"], "1.5b") == [("gate", "1.5b"), ("copy", "1.5b")]


@pytest.mark.parametrize(
    ("after_sleep", "verdict"),
    [({}, "kept"), ({"error": "no kernel"}, "MISSED"), ({"draft_tokens": 0}, "MISSED")],
)
def test_a_copy_that_failed_or_drafted_nothing_misses_its_bar(
    after_sleep: dict[str, Any], verdict: str
) -> None:
    good = {"requantise_s": 0.1, "error": None, "draft_tokens": 7}
    content = {"state": "done", "formats": {"int4": good, "fp8": good | after_sleep}}
    assert copy.BARS[1].verdict(content)["verdict"] == verdict


def test_the_command_runs_the_kit(run: Any, tmp_path: Path) -> None:
    helped = CliRunner().invoke(main, ["bench", "--help"])
    assert helped.exit_code == 0 and all(part in helped.output for part in run.PARTS)
    refused = CliRunner().invoke(main, ["bench", "gates", "--out", str(tmp_path)])
    assert refused.exit_code == 2


def test_without_a_gpu_only_the_tiny_shape_is_measured(
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    monkeypatch.setattr(run, "apart", lambda *_: {"hardware": {"gpu": None}})
    for name in ("measured", "judge"):
        monkeypatch.setattr(run, name, lambda *_: {})
    for shape, said in (
        ([], "found no GPU"),
        (["--shape", "1.5b"], "found no GPU"),
        (["--shape", "tiny"], "0 MISSED"),
    ):
        with pytest.raises(SystemExit):
            run.main(["gate", *shape, "--out", str(tmp_path)])
        assert said in "".join(capsys.readouterr())


ENDED = """
import os, time
from das_adapter.bench import engines, gate, run

def work(plan):
    with engines.process(plan) as asked:
        print(asked(os.getpid), flush=True)
        asked(time.sleep, 600.0)

def measure(plan, _):
    if THREADS:
        with engines.threads(1) as pool:
            for each in [pool.submit(work, plan) for _ in range(3)]:
                each.result()
    else:
        work(plan)
    yield {}

if __name__ == "__main__":
    gate.measure = measure
    run.main(["gate", "--shape", "tiny"])
"""


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_engines_end_with_the_program(
    ending: signal.Signals, threads: bool, tmp_path: Path
) -> None:
    (tmp_path / "ended.py").write_text(f"THREADS = {threads}\n{ENDED}")
    # A shell's background job ignores SIGINT, and so would what it starts.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command: dict[str, Any] = {
        "cwd": tmp_path,
        "stdout": subprocess.PIPE,
        "text": True,
        "preexec_fn": heeds,
    }
    program = subprocess.Popen([sys.executable, "ended.py"], **command)
    engine = int(program.stdout.readline())
    program.send_signal(ending)
    assert program.wait(engines.END_S - 2.0) == (
        128 + ending if ending == signal.SIGTERM else -ending
    )
    assert not Path(f"/proc/{engine}").exists()


def test_a_figure_is_held_against_its_bar_with_its_error() -> None:
    assert engines.Measured.of([1.0, 1.0, 1.2, 1.1, 0.9]) == pytest.approx(
        (1.0, 1.2533 * 0.114 / 5**0.5), rel=0.01
    )
    for ratio, error, verdict in (
        (1.03, 0.001, "MISSED"),
        (1.03, 0.008, "kept"),
        (1.03, 0.02, "not run"),
        (1.2, 0.02, "MISSED"),
    ):
        found = {
            "state": "done",
            "of_stock": {"history": {"1 x 16": [ratio, error], "8 x 16": [1.0, 0.001]}},
        }
        worst, _, sure = gate.BARS[:3]
        assert worst.verdict(found)["verdict"] == verdict
        assert sure.verdict(found)["verdict"] == ("kept" if error < 0.01 else "MISSED")


def test_slow_seconds_of_a_machine_meet_all_arms_and_all_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(gate, "ROUNDS_S", 0.0)

    def arm(name: str, seconds: float) -> Any:
        def run(*_: Any) -> float:
            asked.append(name)
            return seconds * (1.0 + len(asked) // 3)  # ever slower

        return run

    rounds = gate.in_turn(
        {"stock": arm("stock", 1.0), "history": arm("history", 1.0)}, TINY, 1, 16
    )
    assert asked[2:10] == ["stock", "history", "history", "stock"] * 2
    assert len(rounds) == gate.MIN_ROUNDS  # no more where there is no time
    assert not gate.in_turn(
        {"stock": arm("stock", math.nan), "history": arm("history", 1.0)}, TINY, 1, 16
    )


class Writing:
    """An engine that takes a request in each step, and writes a token of each that it
    has.
    """

    def __init__(self) -> None:
        self.llm_engine = self
        self.seeds = list[int]()
        self.waiting: list[tuple[str, int]] = []
        self.texts: dict[str, tuple[int, int]] = {}

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.seeds.append(params.extra_args["das_seed"])
        self.waiting.append((name, params.max_tokens))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.texts)

    def step(self) -> list[Any]:
        if self.waiting:
            name, most = self.waiting.pop(0)
            self.texts[name] = 0, most
        self.texts = {
            name: (n + 1, most) for name, (n, most) in self.texts.items() if n < most
        }
        time.sleep(0.002)
        of = SimpleNamespace
        return [
            of(request_id=name, outputs=[of(token_ids=range(n))])
            for name, (n, _) in self.texts.items()
        ]


def test_a_step_is_timed_while_all_are_writing_and_no_seed_comes_twice() -> None:
    pytest.importorskip("vllm")
    engine = Writing()

    def seconds_of(batch: int) -> float:
        return engines.step_seconds(engines.step_times(engine, batch, 16, 20, 997))

    seconds = [seconds_of(3) for _ in range(2)]
    assert all(0.002 <= each < 0.02 for each in seconds)
    assert len(engine.seeds) == len(set(engine.seeds)) == 3 * 2
    # the first ends before the last begins
    assert math.isnan(seconds_of(30))


def test_what_went_wrong_in_any_rollout_of_an_arm_is_told() -> None:
    alike = {"accepted_tokens": 0, "tokens_per_forward": 1.0, "propose_share": None}
    told = iter(
        [alike | {"seconds": 1.0, "unforced": 2, "error": "boom", "draft_tokens": 7}]
        + [alike | {"seconds": 1.0, "unforced": 0, "error": None, "draft_tokens": 0}]
        * replay.MAX_ROLLOUTS
    )
    arm = replay.in_turn(
        lambda *_: next(told), lambda *_: {"seconds": 2.0}, [], [], once=False
    )
    assert (
        arm["unforced"],
        arm["error"],
        arm["draft_tokens"],
        len(arm["rollouts"]),
    ) == (2, "boom", 7, replay.MIN_ROLLOUTS)
    assert arm["of_stock"] == [0.5, 0.0] and arm["propose_share"] is None


def test_traces_are_read_with_what_earlier_steps_wrote(tmp_path: Path) -> None:
    path = traces(tmp_path)
    plan = replace(TINY, replayed=5, longest=50)
    with np.load(path) as file:
        texts = [t % 997 for t in np.split(file["ids"], file["offsets"][1:-1])]
        of = file["problem"]
        step = file["step"]
        np.savez(
            tmp_path / "one.npz",
            **{name: file[name] for name in ("ids", "offsets", "problem")},
        )
    for name, late in (
        ("traces", step == 4),
        ("one", np.tile([False] * 3 + [True] * 3, 3)),
    ):
        batch, earlier = replay.recorded(tmp_path / f"{name}.npz", plan)
        expected = [(of[i], texts[i][:50].tolist()) for i in np.flatnonzero(late)][:5]
        assert [(problem, t.tolist()) for problem, t in batch] == expected
        met = np.flatnonzero(~late & (of < 2))
        assert [(problem, t.tolist()) for problem, t in earlier] == [
            (of[i], texts[i].tolist()) for i in met
        ]


@pytest.mark.long
def test_the_contract_tests_for_a_gpu_are_there() -> None:
    make = [
        "make",
        "--no-print-directory",
        "-n",
        "gputests",
        f"PYTHON={sys.executable}",
    ]
    commands = subprocess.check_output(make, cwd=ROOT, text=True)
    for command in commands.replace("\\\n", "").splitlines():
        listed = subprocess.run(
            [f"{command} --collect-only -q"],
            cwd=ROOT,
            shell=True,
            capture_output=True,
            text=True,
        )
        assert re.search(r"^(\d+/)?\d+ tests collected", listed.stdout, re.M), (
            command,
            listed.stdout,
        )
