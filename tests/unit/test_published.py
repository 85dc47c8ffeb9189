"""Published figures and their simulation: every input is marked, and only a prediction
can be right.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import published
import pytest
import yaml

RESULTS = Path(published.__file__).parent / "results"
FILES = sorted((Path(published.__file__).parent / "published").glob("*.yaml"))
FIGURES = [published.Figure(path) for path in FILES]
LINE: dict[str, Any] = {"base": 0.01, "token": 1e-5}


def figure(
    tmp_path: Path,
    *cases: dict[str, Any],
    accepted: dict[str, Any] | None = None,
    **content: Any,
) -> Any:
    """Make a figure whose drafts of three tokens bring 2.5 tokens a step, as an input
    says that is `accepted`, or each case.
    """
    inputs = {
        "steps.kind": "line",
        "steps.line": LINE,
        "hardware.gpus": 1,
        "rollout.problems": 1,
        "rollout.samples": 1,
        "rollout.cap": 4000,
        "rollout.lengths.mean": 3900,
        "rollout.lengths.sigma": 0.01,
    }
    rows: list[dict[str, Any]] = [
        {"key": k, "value": v, "mark": "given", "source": "test"}
        for k, v in inputs.items()
    ]
    rows.append(
        {
            "key": "acceptance.length",
            "value": 2.5,
            "mark": "given",
            "source": "test",
            **(accepted or {}),
        }
    )
    drafts = {
        "das": {
            "drafter": "ngram",
            "budget": "unlimited",
            "max_draft_tokens": 3,
            "speculate": "always",
        }
    }
    about = {"paper": "p", "title": "t", "source": "s", "decides": "d", "inputs": rows}
    common = {
        "arm": "drafts",
        "published": 2.5,
        "set": {"acceptance.length": 2.5} if "key" in (accepted or {}) else {},
    }
    named = [
        {"name": str(number), **common, **case} for number, case in enumerate(cases)
    ]
    path = tmp_path / "figure.yaml"
    arms = {"base": {"das": {"drafter": "none"}}, "drafts": drafts}
    path.write_text(yaml.safe_dump({**about, "cases": named, "arms": arms, **content}))
    return published.Figure(path)


def rows(tmp_path: Path, *cases: dict[str, Any], **others: Any) -> list[dict[str, Any]]:
    """Simulate such a figure and grade it."""
    made = figure(tmp_path, *cases, **others)
    found: list[dict[str, Any]] = made.rows(made.check())
    return found


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_input_is_marked_and_every_case_has_its_arms(
    figure: published.Figure,
) -> None:
    for one in figure.inputs.values():
        assert one["mark"] in published.MARKS and one["source"]
        assert one["mark"] != "assumed" or "band" in one, (
            f"{one['key']} is assumed and has no band"
        )
        assert ("find" in one) == (one["mark"] == "fitted") and ("find" in one) != (
            "value" in one
        )
        assert one.get("find", {}).get("case", next(iter(figure.cases))) in figure.cases
    for case in figure.cases.values():
        assert {case["arm"], case.get("base", "base")} <= set(figure.content["arms"])
        assert not figure.seen(case) or figure.content["revised"]
    assert not {"tolerance", "best_of"} & set(figure.content)


def test_no_constant_of_a_figure_is_its_own_copy_of_another_s() -> None:
    found = {figure.name: figure for figure in FIGURES}
    fitted = Counter(
        (f.paper, key)
        for f in FIGURES
        for key, one in f.inputs.items()
        if "case" in one.get("find", {})
    )
    assert (
        max(
            count
            for (_, key), count in fitted.items()
            if key.startswith(("steps", "acceptance"))
        )
        == 1
    )
    for figure in FIGURES:
        for key, one in figure.inputs.items():
            if "file" in one.get("find", {}):
                assert "case" in found[one["find"]["file"]].inputs[key]["find"]


def test_every_paper_has_one_held_out_prediction_that_nothing_was_chosen_on() -> None:
    results = json.loads((RESULTS / "published.json").read_text())
    there = [figure for figure in FIGURES if figure.name in results]
    held = [
        (f.paper, row["grade"])
        for f in there
        for row in f.rows(results[f.name])
        if "held_out" in row
    ]
    assert sorted(paper for paper, _ in held) == sorted({f.paper for f in FIGURES})
    assert {grade for _, grade in held} <= {"within", "outside"}


def test_the_results_are_those_of_the_files() -> None:
    results = json.loads((RESULTS / "published.json").read_text())
    there = [figure for figure in FIGURES if figure.name in results]
    assert set(results) == {"papers", *(figure.name for figure in there)}
    assert {f.name: results[f.name]["of"] for f in there} == {
        f.name: f.digest() for f in there
    }
    for figure in set(FIGURES) - set(there):  # no prediction is left out
        assert all(
            figure.seen(case) or case["published"] is None
            for case in figure.cases.values()
        ), figure.name
    for figure in there:
        for key, one in figure.inputs.items():
            if "file" in one.get("find", {}):
                assert (
                    results[figure.name]["fitted"][key]
                    == results[one["find"]["file"]]["fitted"][key]
                )
    assert results["papers"] == published.papers(FIGURES, results)
    assert (RESULTS / "published.md").read_text() == published.markdown(
        FIGURES, results
    )


@pytest.mark.parametrize(
    ("case", "right"),
    [
        ({"published": 2.5}, True),
        ({"published": 3.2}, False),
        ({"published": -0.6, "quantity": "change"}, True),
        ({"published": 0.01, "quantity": "change"}, False),
        ({"published": 39.0, "quantity": "seconds", "arm": "base"}, True),
        ({"published": 50.0, "quantity": "seconds", "arm": "base"}, False),
        ({"published": 0.4, "quantity": "exposed"}, True),
        ({"published": 0.2, "quantity": "exposed"}, False),
        (
            {"published": 10.04, "quantity": "ms", "arm": "base", "step": [1, 500, 3]},
            True,
        ),
        (
            {"published": 12.0, "quantity": "ms", "arm": "base", "step": [1, 500, 3]},
            False,
        ),
    ],
)
def test_a_prediction_is_right_only_within_the_tolerance(
    tmp_path: Path, case: dict[str, Any], right: bool
) -> None:
    (row,) = rows(tmp_path, case)
    assert row["grade"] == ("within" if right else "outside")
    assert (abs(row["error"]) < 0.03) == right


def test_no_effect_and_twice_the_effect_are_never_right() -> None:
    for found, right in (
        (-0.08, True),
        (0.0, False),
        (-0.02, False),
        (-0.16, False),
        (0.08, False),
    ):
        off, said = published.error({"published": -0.08, "quantity": "change"}, found)
        assert said == right and abs(off) <= 0.2
    assert published.error({"published": 1.08}, 1.0)[1] is False
    assert published.error({"published": 0.058, "quantity": "exposed"}, 0.0) == (
        -1.0,
        False,
    )


@pytest.mark.parametrize("case", ["0", "1"])
def test_a_constant_is_fitted_to_a_value_that_is_not_graded(
    tmp_path: Path, case: str
) -> None:
    # 39 s and 20.8 beside them
    both = (
        {"published": 59.8, "arm": "base", "quantity": "seconds"},
        {"published": 1.637},
    )
    find = {"case": case, "between": [1.0, 100.0], "halvings": 14}
    constant = {
        "key": "pipeline.train_s",
        "value": None,
        "mark": "fitted",
        "find": find,
    }
    made = figure(tmp_path, *both, accepted=constant, whole=True)
    result = made.check()
    assert result["fitted"]["pipeline.train_s"] == pytest.approx(20.8, rel=0.03)
    grades = [row["grade"] for row in made.rows(result)]
    assert grades[int(case)] == "fitted to" and grades[1 - int(case)] == "within"


def test_a_value_that_changed_the_simulation_is_not_graded(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, {"seen": True}, revised="the tail was")
    assert row["grade"] == "seen" and abs(row["error"]) < 0.03
    made = figure(tmp_path, {"seen": True}, {"held_out": "why"}, revised="the tail was")
    results = {"figure": made.check()}
    assert published.papers([made], results)["p"] | {"held_out": {}} == {
        "predicted": 1,
        "within": 1,
        "fitted_to": 0,
        "seen": 1,
        "held_out": {},
    }
    assert "Seen: the tail was." in published.markdown([made], results)


def test_what_a_step_takes_beside_its_rollout_dilutes(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, {"published": 1.43, "other_of_base": 1.0})
    assert row["simulated"] == pytest.approx(2 / (1 + 1 / 2.5), rel=0.03)


def test_the_band_is_that_of_the_assumed_inputs(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, {}, accepted={"mark": "assumed", "band": [2.0, 3.0]})
    assert row["band"] == pytest.approx([2.0, 3.0], rel=0.05)


def test_a_figure_takes_a_constant_that_another_fits(tmp_path: Path) -> None:
    made = figure(
        tmp_path,
        {"published": 2.0},
        accepted={"mark": "fitted", "find": {"file": "other"}},
    )
    made = published.Figure(
        tmp_path / "figure.yaml", {"other": {"fitted": {"acceptance.length": 2.0}}}
    )
    result = made.check()
    assert result["fitted"] == {"acceptance.length": 2.0}
    assert made.rows(result)[0]["simulated"] == pytest.approx(2.0, rel=0.03)


def test_a_result_of_other_inputs_is_found_out(tmp_path: Path) -> None:
    made = figure(tmp_path, {})
    before = made.digest()
    made.inputs["acceptance.length"]["value"] = 2.6
    assert made.digest() != before
