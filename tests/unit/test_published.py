"""Published figures and their simulation: every input is marked, and a grade can be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published
import pytest
import yaml

FILES = sorted((Path(published.__file__).parent / "published").glob("*.yaml"))
LINE: dict[str, Any] = {"base": 0.01, "token": 1e-5}


def figure(
    tmp_path: Path,
    mark: str = "given",
    revised: str = "",
    best_of: str = "",
    least: float = 2.0,
    rest: float | None = None,
    **case: Any,
) -> dict[str, Any]:
    """Check a figure whose drafts of three tokens bring 2.5 tokens a step."""
    inputs = {
        "steps.kind": "line",
        "steps.line": LINE,
        "hardware.gpus": 1,
        "rollout.problems": 1,
        "rollout.samples": 1,
        "rollout.cap": 4000,
        "rollout.lengths.mean": 3900,
        "rollout.lengths.sigma": 0.01,
        "acceptance.length": 2.5,
    }
    rows: list[dict[str, Any]] = [{"key": k, "value": v, "mark": "given", "source": "test"} for k, v in inputs.items()]
    rows[-1] |= {"mark": mark, "band": [least, 3.0]} if mark == "assumed" else {"mark": mark}
    if rest is not None:
        rows.append({"key": "other_of_base", "value": rest, "mark": "assumed", "source": "test", "band": [0.0]})
    drafts = {"das": {"drafter": "ngram", "budget": "unlimited", "max_draft_tokens": 3, "speculate": "always"}}
    cases = [{"name": "one", "arm": "drafts", "published": 2.5, **case}]
    path = tmp_path / "figure.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "title": "t",
                "source": "s",
                "decides": "d",
                "inputs": rows,
                "cases": cases,
                "revised": revised,
                "best_of": best_of,
                "arms": {"base": {"das": {"drafter": "none"}}, "drafts": drafts},
            }
        )
    )
    found = published.Figure(path, None)
    return found.graded(found.check())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_input_is_marked_and_every_case_has_its_arms(path: Path) -> None:
    found = published.Figure(path, None)
    fitted = [one for one in found.inputs.values() if one["mark"] == "fitted"]
    assert len(fitted) <= 1 and all("figure" in one or "case" in one["find"] for one in fitted)
    assert {one["mark"] for one in found.inputs.values() if "seconds" in one.get("find", {})} <= {"derived"}
    assert {one["figure"] for one in fitted if "figure" in one} <= {path.stem for path in FILES}
    for case in found.content["cases"]:
        assert case["arm"] in found.content["arms"] and case.get("base", "base") in found.content["arms"]


def test_a_figure_is_reproduced_only_within_its_tolerance(tmp_path: Path) -> None:
    for published_value, grade in ((2.5, "reproduced"), (3.2, "not")):
        (case,) = figure(tmp_path, published=published_value)["cases"]
        assert case["grade"] == grade and case["simulated"] == pytest.approx(2.5, rel=0.03)
    (case,) = figure(tmp_path, published=-0.6, quantity="change")["cases"]
    assert case["grade"] == "reproduced" and case["simulated"] == pytest.approx(-0.6, abs=0.02)
    (case,) = figure(tmp_path, published=0.01, quantity="change")["cases"]
    assert case["grade"] == "not"


def test_the_rest_of_a_step_dilutes_and_a_fitted_input_lowers_the_grade(tmp_path: Path) -> None:
    (case,) = figure(tmp_path, published=1.43, other_of_base=1.0)["cases"]
    assert case["simulated"] == pytest.approx(2 / (1 + 1 / 2.5), rel=0.03)
    assert figure(tmp_path, mark="fitted")["cases"][0]["grade"] == "consistent"
    (case,) = figure(tmp_path, rest=1.0, published=1.43, other_of_base=True)["cases"]
    assert case["simulated"] == pytest.approx(2 / (1 + 1 / 2.5), rel=0.03)
    assert case["band"] == pytest.approx([case["simulated"], 2.5], rel=0.03)


def test_what_was_changed_after_a_comparison_is_graded_so(tmp_path: Path) -> None:
    found = figure(tmp_path, revised="the tail was")
    assert found["cases"][0]["grade"] == "revised" and "Revised: the tail was." in published.markdown(
        {"figures": {"x": found}}
    )
    assert figure(tmp_path, revised="the tail was", published=3.2)["cases"][0]["grade"] == "not"


def test_only_the_best_of_several_is_held_against_their_one_value(tmp_path: Path) -> None:
    one, best = (
        figure(tmp_path, best_of="them", quantity="change", published=-0.6, arm=arm) for arm in ("base", "drafts")
    )
    figures = {"one": one, "best": best}
    published.keep_the_best(figures)
    assert [f["cases"][0]["grade"] for f in figures.values()] == ["no value", "reproduced"]
    assert one["cases"][0]["published"] is None and best["cases"][0]["error"] is not None


def test_the_time_in_which_training_waits_is_a_share_of_the_base_s(tmp_path: Path) -> None:
    (case,) = figure(tmp_path, quantity="exposed", published=0.4)["cases"]
    assert case["simulated"] == pytest.approx(1 / 2.5, rel=0.03) and case["grade"] == "reproduced"  # nothing is hidden
    assert figure(tmp_path, quantity="exposed", published=0.2)["cases"][0]["grade"] == "not"


def test_the_band_is_that_of_the_assumed_inputs(tmp_path: Path) -> None:
    (case,) = figure(tmp_path, mark="assumed")["cases"]
    assert case["band"] == pytest.approx([2.0, 3.0], rel=0.05) and not case["sign_open"]
    assert figure(tmp_path, mark="assumed", least=1.0)["cases"][0]["sign_open"]
    page = published.markdown({"figures": {"x": figure(tmp_path)}})
    assert "| one | 2.5 |" in page and "*reproduced*" in page


def test_a_figure_says_which_inputs_were_changed_since_it_was_simulated(tmp_path: Path) -> None:
    found = figure(tmp_path)
    assert "Simulated before" not in published.markdown({"figures": {"x": found}})
    one = published.Figure(tmp_path / "figure.yaml", None)
    one.inputs["acceptance.length"]["value"] = 2.6
    assert "Simulated before `acceptance.length` was" in published.markdown({"figures": {"x": one.graded(found)}})
