"""The decision log, and what is written by `das-adapter report`."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.config import DasConfig
from das_adapter.core.policy import DraftPolicy
from das_adapter.core.steps import TimedStep
from das_adapter.engine.controller import EngineController
from das_adapter.engine.settings import settings
from das_adapter.errors import DasError
from das_adapter.protocol import decision_log
from das_adapter.protocol.decision_log import (
    DecisionLog,
    RequestRecord,
    StepRecord,
    WeightSyncRecord,
    read,
)


def logged(directory: Path, steps: int = 300) -> DecisionLog:
    """Two rollouts; of the second only the beginning."""
    log = DecisionLog(str(directory))
    for version in (1, 2):
        for i in range(steps):
            log.add(
                StepRecord(100.0 + i, 4, 10, 6, 3, 0.5, 0.4 if version == 2 else None)
            )
        log.add(
            RequestRecord(
                2**63,
                length_class=2,
                begin=100.0,
                end=250.0,
                tokens=700,
                drafted=900,
                accepted=450,
            )
        )
        if version == 1:
            log.add(WeightSyncRecord(version, {"base": 0.1}, saved=12.5, stopped=None))
    log.flush()
    return log


def test_what_was_logged_is_read_back(tmp_path: Path) -> None:
    logged(tmp_path)
    first, second = read(tmp_path)
    assert (first.version, second.version) == (1, -1)
    assert len(first.steps) == len(second.steps) == 300
    assert first.steps[0] == StepRecord(100.0, 4, 10, 6, 3, 0.5, None)
    assert first.requests[0].problem == 2**63


def test_a_full_disk_ends_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        log = logged(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.path.stat().st_size <= 64
    assert caplog.text.count("the decision log") == 1


def test_logs_of_hosts_that_share_a_directory_are_two(tmp_path: Path) -> None:
    logged(tmp_path, steps=3)
    logged(tmp_path, steps=3)  # in the same second and process
    assert len({rollout.source for rollout in read(tmp_path)}) == 2


def test_a_long_log_has_a_bound_and_keeps_what_came_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "MAX_FILE_BYTES", 20_000)
    log = DecisionLog(str(tmp_path))
    for version in range(200):
        for i in range(10):
            log.add(StepRecord(100.0 * version + i, 4, 10, 6, 3, 0.5, None))
        log.add(WeightSyncRecord(version, None, 0.0, None))
    assert (
        20_000
        <= sum(path.stat().st_size for path in tmp_path.iterdir())
        < 2 * 20_000 + 1_000
    )
    rollouts = read(tmp_path)
    assert [r.version for r in rollouts] == list(range(rollouts[0].version, 200))
    assert {len(r.steps) for r in rollouts} == {10}
    assert len({rollout.source for rollout in rollouts}) == 1


def test_the_command_writes_the_page_or_prints_the_figures(tmp_path: Path) -> None:
    log = logged(tmp_path / "run")
    result = CliRunner().invoke(
        main, ["report", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    assert "Saved: about 12.5 s of 312.5 s of decoding (4%)" in result.output
    assert "Rollouts: 2;" in (tmp_path / "out" / "report.html").read_text()
    log.add(WeightSyncRecord(2, None, 1.0, None))  # the run goes on
    log.add(StepRecord(200.0, 4, 10, 6, 3, 0.5, None))
    log.flush()
    rows = json.loads(
        CliRunner().invoke(main, ["report", str(tmp_path / "run"), "--json"]).stdout
    )
    assert [
        (row["version"], row["requests"], row["saved_seconds"]) for row in rows
    ] == [
        (-1, 0, 0),
        (1, 1, 12.5),
        (2, 1, 1),
    ]
    assert not (tmp_path / "run" / "report").exists()


def test_a_directory_without_logs_is_named(tmp_path: Path) -> None:
    with pytest.raises(DasError, match=r"no decisions-\*.jsonl"):
        read(tmp_path)


ODD_LINES = (
    '["z", 1]',
    "[]",
    "7",
    "{}",
    "[" * 100_000,
    '["s", "soon", 4, 10, 6, 3, 0.5, null]',
    '["s", NaN, 4, 10, 6, 3, 0.5, null]',
    '["s", 1e999, 4, 10, 6, 3, 0.5, null]',
    '["s", 1.0, 4]',
    '["v", 3, [1], 0.0, null]',
    '["c", 3]',
    "\x00\x00",
)


def test_lines_that_are_no_records_are_left_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = logged(tmp_path, steps=3).path
    before = read(tmp_path)
    lines = path.read_text().splitlines()
    for at, odd in enumerate(ODD_LINES):
        lines.insert(2 * at, odd)
    path.write_text("\n".join(lines) + "\n")
    assert read(tmp_path) == before
    assert len(caplog.records) == 1
    assert f"{path}: left out {len(ODD_LINES)} lines" in caplog.text


@pytest.mark.parametrize("odd", ["a pipe", "a directory", "bytes"])
def test_one_odd_file_among_the_logs_is_left_out(tmp_path: Path, odd: str) -> None:
    logged(tmp_path, steps=3)
    before = read(tmp_path)
    path = tmp_path / "decisions-20260101T000000-odd.jsonl"
    if odd == "a pipe":
        os.mkfifo(path)
    elif odd == "a directory":
        path.mkdir()
    else:
        path.write_bytes(bytes(range(256)) * 8)
    assert read(tmp_path) == before


@pytest.mark.parametrize("path", ["/proc/none/logs", "/dev/null/logs", "a\0b"])
def test_an_engine_starts_without_a_log_that_can_not_be_made(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = DecisionLog(path)
    log.add(StepRecord(100.0, 4, 10, 6, 3, 0.5, None))
    log.flush()
    assert len(caplog.records) == 1
    assert "das.log_dir" in caplog.text and "ends here" in caplog.text


def test_an_engine_waits_once_for_a_file_system_that_does_not_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads what is written into the pipe."""
    monkeypatch.setattr(decision_log, "WRITE_S", 0.2)
    log = DecisionLog(str(tmp_path))
    os.mkfifo(log.path)
    step = StepRecord(100.0, 4, 10, 6, 3, 0.5, None)
    log.add(step)
    log.flush()
    assert "ends here: TimeoutError: no answer within 0.2 s" in caplog.text
    log.add(step)
    log.flush()  # waits no more
    assert len(caplog.records) == 1
    with log.path.open() as pipe:  # the write ends
        assert pipe.readline()


def test_a_log_that_is_no_text_and_a_page_that_cannot_be_written_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = logged(tmp_path, steps=3).path
    there = tmp_path / "there"
    there.touch()
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--out", str(there)])
    assert result.exit_code == 1 and f"File exists: '{there}'" in result.output
    log.write_bytes(b"\xff\xfe\n")
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 1 and "found no decode step" in result.output
    assert log.name in caplog.text and "line 1" in caplog.text


def test_a_line_that_is_still_being_written_is_left_out_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = logged(tmp_path, steps=3).path
    path.write_text(path.read_text() + '["s", 103.0, 4')
    assert sum(len(rollout.steps) for rollout in read(tmp_path)) == 6
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("validating", "is_validation"), [(0, False), (1, False), (3, False), (4, True)]
)
def test_a_step_with_a_training_request_is_one_of_training(
    validating: int, is_validation: bool
) -> None:
    step = StepRecord(100.0, 4, 10, 6, 3, 0.5, None, validating=validating)
    assert step.is_validation == is_validation


def test_logs_of_several_runs_are_not_mixed(tmp_path: Path) -> None:
    for run in ("a", "b"):
        logged(tmp_path / run, steps=3)
    with pytest.raises(DasError, match=r"logs of 2 runs.*/a, .*/b"):
        read(tmp_path)
    assert len(read(tmp_path / "a")) == 2


def test_engines_without_a_host_have_logs_of_their_own_or_of_the_run_that_they_name(
    tmp_path: Path,
) -> None:
    def engine(instance: str, **named: str) -> str:
        block = {"drafter": "history", "log_dir": str(tmp_path)}
        das = settings(
            SimpleNamespace(
                additional_config={"das": block, **named}, instance_id=instance
            )
        )
        return str(logged(Path(das.log_dir), steps=3).path.parent)

    one = engine("1")
    other = engine("2")
    assert len(read(Path(one))) == len(read(Path(other))) == 2
    with pytest.raises(DasError, match="logs of 2 runs"):
        read(tmp_path)
    assert engine("3", das_run="../a run") == engine("4", das_run="../a run")
    # as vLLM calls data-parallel siblings under Ray
    assert engine("6_dp0") == engine("6_dp1")
    hosted = engine("5", das_refresher="host")  # a host gives each run its directory
    assert Path(hosted) == tmp_path


def test_steps_and_requests_of_a_validation_are_marked(tmp_path: Path) -> None:
    policy = DraftPolicy(DasConfig(), longest_response=100)
    slots = [policy.begin(7, 0, 100, record) for record in (True, False, False)]
    assert policy.num_validating(np.array(slots[:1])) == 0
    assert policy.num_validating(np.array(slots)) == 2
    log = DecisionLog(str(tmp_path))
    engine: Any = SimpleNamespace(
        policy=policy, log=log, rehearsing=False, history=None, _tell=lambda: None
    )
    engine.live = {"a": SimpleNamespace(slot=slots[1], problem=7, began=1.0)}
    engine.live["a"].record = False
    of_validation = np.array(slots[1:])
    step = TimedStep(of_validation, np.ones(2, dtype=np.int64), 2, 0.5)
    EngineController.timed(engine, step, 10.0)
    EngineController.close(engine, ["a"])
    log.flush()
    (rollout,) = read(tmp_path)
    assert rollout.steps[0].validating == 2 and rollout.steps[0].is_validation
    assert not rollout.requests[0].record
