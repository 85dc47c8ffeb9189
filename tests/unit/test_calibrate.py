"""Fitting and judging a calibration; the sweep itself runs in the contract tests."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.core.latency import StepModel, read_calibration
from das_adapter.errors import DasError
from das_adapter.tools.calibrate import Measured, Sample, analyse, write


def sweep(seconds: object, passes: object = None) -> Measured:
    grid = product((1, 4, 16, 64), (128, 1024), (0, 1, 3, 7, 15))
    samples = [Sample(b, s, d, seconds(b, s, d), 8, i % 3 == 2) for i, (b, s, d) in enumerate(grid)]  # type: ignore[operator]
    plain = product((1, 2, 4, 16, 64), (128, 1024)) if passes else ()
    return Measured(samples, [Sample(b, s, 0, passes(b, s), 8, i % 3 == 2) for i, (b, s) in enumerate(plain)])  # type: ignore[operator]


def test_contexts_and_captured_sizes_are_predicted_by_the_line() -> None:
    truth = StepModel(0.02, 0.0002, draft=0.003, context=3e-7, attention=2e-9, sizes=(1, 2, 4, 8, 16, 32, 64, 128))
    result = analyse(sweep(lambda b, s, d: truth.step(b * (1 + d), b, d > 0, b * s))._replace(sizes=truth.sizes))
    assert result["validation"]["line"]["mape"] < 0.01
    assert result["validation"]["line"]["held_out"] == 13
    assert result["line"]["context"] == pytest.approx(3e-7, rel=0.05)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(DasError, match="needed: 6 and 1"):
        analyse(Measured([Sample(1, 128, 0, 0.01, 8)] * 5, []))


def test_what_is_written_is_read_back_and_says_where_it_comes_from(tmp_path: Path) -> None:
    passes = StepModel(base=0.004, token=0.0001, context=1e-7)
    measured = sweep(lambda b, s, d: 0.02 + 0.0004 * b * (1 + d), lambda b, s: passes.step(b, b, False, b * s))
    result = analyse(measured)
    write(tmp_path / "c.json", "a-model", measured, result, "das-adapter calibrate a-model")
    found = read_calibration(str(tmp_path / "c.json"))
    assert found.steps == StepModel.of(result["line"])
    assert found.passes is not None
    assert found.passes.step(8, 8, False, 8 * 512) == pytest.approx(passes.step(8, 8, False, 8 * 512), rel=1e-3)
    assert result["validation"]["passes"]["mape"] < 0.01
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["provenance"]["command"] == "das-adapter calibrate a-model"
    assert len(content["samples"]) == 40
    with pytest.raises(DasError, match=r"das\.calibration"):
        read_calibration(str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--engine", "{dtype}"], ["--engine", "'{dtype}'", "expected JSON"]),
        (["x", "--drafter", "self"], ["--drafter", "'self'", "expected JSON"]),
        (["x", "--batches", "1,two"], ["--batches", "'1,two'", "whole numbers"]),
    ],
)
def test_bad_input_is_named(arguments: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(main, ["calibrate", *arguments])
    assert result.exit_code == 2
    for word in words:
        assert word in " ".join(result.output.replace("│", " ").split())
