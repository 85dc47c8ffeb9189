"""The decision log, and what `das-adapter report` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.errors import DasError
from das_adapter.protocol.decision_log import DecisionLog
from das_adapter.tools import report


def logged(directory: Path, steps: int = 300) -> DecisionLog:
    """Two rollouts; of the second only the beginning."""
    log = DecisionLog(str(directory))
    for version in (1, 2):
        for i in range(steps):
            log.step(100.0 + i, 4, 10, 6, 3, 0.5, 0.4 if version == 2 else 0.0)
            log.verified(np.array([5, 40]), np.array([4, 2]), np.array([3, 0]))
        log.request(problem=2**63, kind=2, tokens=700, drafted=900, accepted=450, begin=100.0)
        if version == 1:
            log.sync(version, {"base": 0.1}, saved=12.5, stopped=None)
    log.flush()
    return log


def test_what_was_logged_is_read_back(tmp_path: Path) -> None:
    logged(tmp_path)
    first, second = report.read(tmp_path)
    assert (first.version, second.version) == (1, -1)
    assert len(first.steps) == len(second.steps) == 300
    assert first.requests[0][0] == 2**63
    assert first.tried[2] == 300 * 4
    assert first.kept[2] == 300 * 3
    assert first.tried[5] == 300 * 2


def test_the_summary_counts(tmp_path: Path) -> None:
    logged(tmp_path)
    figures = report.summary(report.read(tmp_path))
    assert figures["decode_steps"] == 600
    assert figures["draft_tokens"] == 3600
    assert figures["accepted_tokens"] == 1800
    assert figures["verify_waste"] == pytest.approx(1800 / 6000)
    assert figures["time_saved_s"] == 12.5
    assert figures["latency_model_error"] == pytest.approx(0.2)


def test_the_command_writes_plots_and_prints_the_figures(tmp_path: Path) -> None:
    logged(tmp_path / "run")
    result = CliRunner().invoke(main, ["report", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "decode_steps" in result.output
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"summary.json", "timeline.png", "steps.png", "acceptance.png", "latency.png"}
    assert json.loads((tmp_path / "out/summary.json").read_text())["rollouts"] == 2


def test_a_directory_without_logs_and_a_foreign_line_are_named(tmp_path: Path) -> None:
    with pytest.raises(DasError, match=r"no decisions-\*.jsonl"):
        report.read(tmp_path)
    (tmp_path / "decisions-x.jsonl").write_text('["run", "0", 1]\n["z", 1]\n')
    with pytest.raises(DasError, match="line 2: unknown kind 'z'"):
        report.read(tmp_path)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "unknown kind" in result.output
