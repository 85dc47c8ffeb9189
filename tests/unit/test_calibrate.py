"""Fitting and judging a calibration; the sweep itself runs in the contract tests."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.core.latency import Hardware, Roofline, StepModel, read_calibration
from das_adapter.errors import DasError
from das_adapter.tools.calibrate import Sample, analyse, write

CONFIG = dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
              intermediate_size=4864, vocab_size=32000)  # fmt: skip


def sweep(seconds: object) -> list[Sample]:
    grid = product((1, 4, 16, 64), (128, 1024), (0, 1, 3, 7, 15))
    return [Sample(b, s, d, seconds(b, s, d), 8, i % 3 == 2) for i, (b, s, d) in enumerate(grid)]  # type: ignore[operator]


def test_a_machine_that_is_a_line_is_predicted_by_the_line() -> None:
    truth = StepModel(base=0.02, token=0.0004, draft=0.003)
    result = analyse(sweep(lambda b, s, d: truth.step(b * (1 + d), b, d > 0)), CONFIG)
    assert result["validation"]["line"]["mape"] < 0.01
    assert result["validation"]["line"]["right_decisions"] == 1.0
    assert result["validation"]["line"]["held_out"] == 13


def test_a_machine_that_is_a_roofline_is_predicted_by_the_roofline() -> None:
    truth = Roofline.of(CONFIG, Hardware(2e10, 1.5e12), plain_us=100.0, verify_us=200.0)
    result = analyse(sweep(truth.verify), CONFIG)
    assert result["validation"]["roofline"]["mape"] < 0.05
    assert result["validation"]["roofline"]["right_decisions"] > 0.9
    assert result["roofline"]["hardware"]["bandwidth"] == pytest.approx(2e10, rel=0.2)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(DasError, match="needed: 6 and 1"):
        analyse([Sample(1, 128, 0, 0.01, 8, False)] * 5, CONFIG)


def test_what_is_written_is_read_back_and_says_where_it_comes_from(tmp_path: Path) -> None:
    samples = sweep(lambda b, s, d: 0.02 + 0.0004 * b * (1 + d))
    result = analyse(samples, CONFIG)
    write(tmp_path / "c.json", "a-model", samples, result, "das-adapter calibrate a-model")
    assert read_calibration(str(tmp_path / "c.json")) == StepModel(**result["line"])
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["provenance"]["command"] == "das-adapter calibrate a-model"
    assert len(content["samples"]) == 40
    assert (tmp_path / "c.png").stat().st_size > 1000
    with pytest.raises(DasError, match=r"das\.toggle\.calibration"):
        read_calibration(str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/model"], ["MODEL", "'/nowhere/model'", "Hugging Face config"]),
        (["x", "--engine", "{dtype}"], ["--engine", "'{dtype}'", "expected JSON"]),
        (["x", "--batches", "1,two"], ["--batches", "'1,two'", "whole numbers"]),
    ],
)
def test_bad_input_is_named(arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(main, ["calibrate", *arguments])
    assert result.exit_code == 2
    for word in words:
        assert word in " ".join(result.output.replace("│", " ").split())
