"""Fitting and judging a calibration; the sweep itself runs in the contract tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from das_adapter.bench.calibrate import Sample, analyse, write
from das_adapter.cli import main
from das_adapter.core.latency import StepModel, read_calibration
from das_adapter.errors import DasError

STOCK = [Sample(b, s, 0, 0.01 + 1e-4 * b, 8) for b in (1, 4, 16) for s in (128, 1024)]


def sweep(seconds: Callable[[int, int, int], float]) -> list[Sample]:
    grid = product((1, 4, 16, 64), (128, 1024), (0, 1, 3, 7, 15))
    return [Sample(b, s, d, seconds(b, s, d), 8) for b, s, d in grid]


def test_contexts_and_captured_sizes_are_predicted_by_the_line() -> None:
    truth = StepModel(0.02, 0.0002, draft=0.003, context=3e-7, attention=2e-9, sizes=(1, 2, 4, 8, 16, 32, 64, 128))
    result = analyse(sweep(lambda b, s, d: truth.step(b * (1 + d), b, d > 0, b * s)), truth.sizes, STOCK)
    assert result["validation"]["mape"] < 0.01
    assert result["validation"]["held_out"] == 13
    assert result["line"]["context"] == pytest.approx(3e-7, rel=0.05)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(DasError, match="found 8 kinds of step, needed: 9"):
        analyse([Sample(1, 128, 0, 0.01, 8)] * 8, (), STOCK)


def test_what_is_written_is_read_back_and_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no git
    measured = sweep(lambda b, s, d: 0.02 + 0.0004 * b * (1 + d))
    result = analyse(measured, (), STOCK)
    write(tmp_path / "c.json", "a-model", measured, result, "das-adapter calibrate a-model")
    found = read_calibration(str(tmp_path / "c.json"))
    assert found.steps == StepModel.of(result["line"])
    assert found.passes is None
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["provenance"]["command"] == "das-adapter calibrate a-model"
    assert content["provenance"]["revision"] == ""
    assert len(content["samples"]) == 40
    with pytest.raises(DasError, match=r"das\.calibration"):
        read_calibration(str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--engine", "{dtype}"], ["--engine", "'{dtype}'", "expected JSON"]),
        (["x", "--engine", "[1]"], ["--engine", "'[1]'", "expected JSON"]),
        (["x", "--batches", "1,two"], ["--batches", "'1,two'", "whole numbers"]),
    ],
)
def test_bad_input_is_named(arguments: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(main, ["calibrate", *arguments])
    assert result.exit_code == 2
    for word in words:
        assert word in " ".join(result.output.replace("│", " ").split())
