"""The figures of the pages are those of the result files, which say what code they
measured.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
from pathlib import Path

import commands
import figures
import provenance
import pytest
import stale

from das_adapter.reports.compare import CLAIM_ERROR, num_near

ROOT = Path(__file__).resolve().parents[2]
OURS = ("README", "start", "faq", "figures", "verl", "trl", "routing")
"""Pages with figures of our own alone: they have no ratio that is written by hand."""
PICTURE = ROOT / "docs/pictures/chart_epochs.svg"
SCRIPTS = {
    "das_adapter.cli": "das_adapter/commands/forecasts.py",
    "das_adapter.bench": "das_adapter/bench/run.py",
}
BY_EPOCH = "comparison.history.rollout_ratio_by_epoch"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_result_files(page: Path) -> None:
    text = page.read_text()
    assert figures.update(text) == text, "run python scripts/reference.py"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_processors_are_those_of_the_result_files(page: Path) -> None:
    text = figures.MADE.sub("", figures.TABLE.sub("", page.read_text()))
    assert not re.findall(r"EPYC|Xeon", text), "write <!-- made FILE processor -->"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_no_mark_of_a_figure_begins_a_line(page: Path) -> None:
    """A comment at the beginning of a line ends the paragraph."""
    assert not re.findall(r"^ *<!-- figure .*", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [page for page in figures.PAGES if page.stem in OURS],
    ids=lambda page: page.name,
)
def test_no_ratio_stands_on_a_page_without_its_file(page: Path) -> None:
    text = re.sub(
        r"<!-- (figure|made|table) .*?<!-- end -->",
        "",
        page.read_text(),
        flags=re.DOTALL,
    )
    text = re.sub(
        r"(vLLM|Python|TRL|OpenRLHF) [\d.]+(( (to|or|and)|,) [\d.]+)*", "", text
    )
    assert not re.findall(r"(?<![\d.])\d\.\d\d(?![\d.])", text)


def test_the_readmes_picture_shows_the_result_files() -> None:
    drawn = json.loads(
        re.search(r"<dc:description>(.*?)</dc:description>", PICTURE.read_text())[1]
    )  # type: ignore[index]
    names = ("demo", "demo_intel", "epochs", "epochs_intel")
    contents = [figures.result(f"{name}.json") for name in names]
    ratios = [figures.values(content, BY_EPOCH) for content in contents]
    assert list(drawn.values()) == ratios, "run python scripts/reference.py"
    for label, content in zip(drawn, contents, strict=True):
        assert f"({figures.processor(stale.origin(content))})" in label


@pytest.mark.parametrize("name", figures.TRAININGS)
def test_claims_of_a_training_keep_their_bar(name: str) -> None:
    """In the median `das/of_stock` is within a tenth of the measured ratio, and within
    a fifth in four steps of five: each of these is measured once.
    """
    shares = figures.claims_of(name)
    assert abs(statistics.median(shares) - 1) <= CLAIM_ERROR
    assert num_near(shares, 2 * CLAIM_ERROR) >= 0.8 * len(shares)


def test_a_figure_is_a_value_a_series_a_range_a_quotient_or_a_speed_up() -> None:
    def shown(mark: str) -> str:
        return (
            figures.update(f"<!-- figure {mark} -->old<!-- end -->")
            .split("-->")[1]
            .split("<!--")[0]
        )

    content = figures.result("trl.json")
    steps = [content["arms"][arm]["engine_steps"] for arm in ("history", "off")]
    seconds = figures.values(content, "epochs_of_off.*.rollout_s")
    assert len(seconds) == 6
    assert shown("trl.json arms.history.engine_steps .0f") == f"{steps[0]:.0f}"
    assert (
        shown("trl.json arms.history.engine_steps of arms.off.engine_steps .1%")
        == f"{steps[0] / steps[1]:.1%}"
    )
    assert shown("trl.json epochs_of_off.*.rollout_s .2f") == " / ".join(
        f"{value:.2f}" for value in seconds
    )
    assert (
        shown("trl.json range epochs_of_off.*.rollout_s .2f")
        == f"{min(seconds):.2f} to {max(seconds):.2f}"
    )
    assert shown("trl.json epochs_of_off.0.rollout_s .1fx") == f"{1 / seconds[0]:.1f}x"
    assert (
        shown("trl.json epochs_of_off.0.rollout_s .0%less") == f"{1 - seconds[0]:.0%}"
    )
    assert (
        shown("trl.json range epochs_of_off.*.rollout_s .1fx")
        == f"{1 / max(seconds):.1f}x to {1 / min(seconds):.1f}x"
    )
    with pytest.raises(KeyError):
        shown("trl.json arms.nobody.engine_steps .0f")


def test_every_result_has_one_command_and_a_page_or_the_code_that_rests_on_it() -> None:
    there = {file.name for file in stale.RESULTS.glob("*.json")}
    assert there == set(commands.COMMANDS)
    assert {file.stem for file in stale.RESULTS.iterdir()} == {
        Path(name).stem for name in there
    }
    sources = [*figures.PAGES, *(ROOT / "das_adapter").rglob("*.py")]
    text = "".join(path.read_text() for path in sources)
    cited = re.sub(r"<!-- table .*?<!-- end -->", "", text, flags=re.DOTALL)
    assert [name for name in there if name not in cited] == []


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_a_command_has_options_of_its_script(name: str) -> None:
    _, (script, *given) = commands.words(name)
    if script == "-m":
        script = str(SCRIPTS[given[0]])
    source = (ROOT / script).read_text()
    options = [word for word in given if word.startswith("--")]
    assert [option for option in options if f'"{option}"' not in source] == []
    assert {"OUT", "FOLDER"} & set(given)


def test_a_result_is_made_anew_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "RESULTS", tmp_path)
    script = (
        "import sys; open(sys.argv[1], 'w').write('new'); sys.exit(int(sys.argv[2]))"
    )
    made = {
        f"{code}.json": shlex.join(["-c", script, "OUT", code]) for code in ("0", "1")
    }
    monkeypatch.setattr(commands, "COMMANDS", made)
    for name in made:
        (tmp_path / name).write_text("old")
    summary = (
        "import os, sys; open(sys.argv[1] + '/summary.json',"
        " 'w').write(os.environ['A'])"
    )
    made["2.json"] = "A=b " + shlex.join(["-c", summary, "FOLDER"])
    assert [commands.make(name) for name in made] == [True, False, True]
    assert [(tmp_path / name).read_text() for name in made] == ["new", "old", "b"]


def test_every_result_names_code_that_is_there() -> None:
    for file in stale.RESULTS.glob("*.json"):
        measures = stale.origin(json.loads(file.read_text())).get("measures")
        assert measures, f"{file.name}: put the paths that it measures under measures"
        assert all((ROOT / path).exists() for path in measures), file.name
    assert all(
        (ROOT / "benchmarks" / script).exists() for script in provenance.MEASURES
    )


def test_a_result_is_stale_when_what_it_measures_has_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *who, *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{path.exists()}")
        git("add", name)
        git("commit", "-q", "-m", name)
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    first = commit("core/a.py")
    commit("docs/a.md")
    assert stale.changes(first, ["core"], tmp_path) == 0
    commit("core/b.py")
    assert stale.changes(first, ["core"], tmp_path) == 1
    assert stale.changes("0123abc", ["core"], tmp_path) is None
    assert stale.changes(None, ["core"], tmp_path) is None
