"""The docs say what is: the site builds without a warning, blocks parse, metrics and
alarms are those of the source, and the table of what works names tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented import PAGES, ROOT, blocks, marks, nightly

from das_adapter.config import parse
from das_adapter.protocol.metrics import Counters, RolloutClock, figures


def test_the_site_builds_without_a_warning_or_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("index.html", "SECURITY.html", "pictures/chart_epochs.svg"):
        assert (tmp_path / name).stat().st_size > 1000
    for page in tmp_path.glob("*.html"):
        assert not re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="http[^"]*"', page.read_text()
        ), page.name


def test_every_page_can_be_found() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    pages = {
        path.relative_to(ROOT / "docs").as_posix()
        for path in (ROOT / "docs").glob("*.md")
    }
    listed = set(re.findall(r"^ +- .*: (\S+\.md)$", config, re.MULTILINE))
    assert pages <= listed, "name it under nav in mkdocs.yml"


def test_links_of_the_readme_lead_somewhere() -> None:
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "benchmarks/README.md",
    ):
        for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def das_blocks() -> list[tuple[str, Any]]:
    def inside(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for key, part in value.items():
                if key == "das":
                    yield part
                yield from inside(part)

    return [
        (page.name, das)
        for page in PAGES
        for _, text in blocks(page, "yaml")
        for das in inside(yaml.safe_load(text))
    ]


@pytest.mark.parametrize(("page", "das"), das_blocks(), ids=str)
def test_every_block_in_the_docs_is_right(page: str, das: Any) -> None:
    parse(das)


def test_every_metric_is_documented_and_no_other() -> None:
    report = {
        **Counters(
            request_forwards=1,
            drafted_forwards=1,
            draft_tokens=1,
            tokens=2,
            propose_seconds=[0.1],
        ).read_and_reset(),
        **RolloutClock().read_and_reset(),
        "time_saved_s": 0.0,
        "latency_model_error": 0.1,
        "history_requests": 1,
        "history_hits": 1,
        "history_tokens": 1,
        "history_bytes": 1,
        "requantise_s": 0.1,
        "drafter_bytes": 1,
        "drafter_passes": 1,
        "self_acceptance": 0.5,
        "live_bytes": 1,
        "of_stock": 1.0,
        "model_runner": 2,
        "reason": None,
        "engines_behind": 0,
        "ahead": [1, 2, 1],
    }
    logged = set(figures([report])) | {"das/weight_version"}
    rows = re.findall(
        r"^\| (`das/.*?) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
    )
    documented = [name for row in rows for name in re.findall(r"`(das/[\w/]+)`", row)]
    assert sorted(documented) == sorted(logged)


def template(node: ast.AST) -> str | None:
    """A string of the source, with … for what is filled in; None: the node is no
    string.
    """
    if isinstance(node, ast.JoinedStr):
        return re.sub(
            "…+",
            "…",
            "".join(
                str(v.value) if isinstance(v, ast.Constant) else "…"
                for v in node.values
            ),
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d+)?[srdf]", "…", node.value)
    return None


REASONS = ("faults", "collapsed", "explain_loss", "_explain_batch_loss")
"""Functions that return why das/health is 0, or why drafting stopped."""


def alarms(tree: ast.AST) -> Iterator[str]:
    """What a source file has to say about das/health 0: in `faults`, and where it looks
    for reasons.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in REASONS:
            said = [
                part
                for part in ast.walk(node)
                if isinstance(part, (ast.Assign, ast.Return))
            ]
        elif isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Attribute) and t.attr in ("alarm", "reason", "_refused")
            for t in node.targets
        ):
            said = [node]
        else:
            continue
        yield from (
            text
            for part in said
            if part.value and (text := template(part.value)) and " " in text
        )


def test_every_alarm_is_explained_word_for_word() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    explained = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    trees = [
        ast.parse(path.read_text()) for path in (ROOT / "das_adapter").rglob("*.py")
    ]
    source = {
        text for tree in trees for node in ast.walk(tree) if (text := template(node))
    }
    for line in explained:
        assert any(line in text for text in source), (
            f"no such line in the source: {line}"
        )
    spoken = {alarm for tree in trees for alarm in alarms(tree)}
    assert len(spoken) >= 6
    assert spoken <= set(explained), f"not explained: {spoken - set(explained)}"


COLUMNS = {
    "`history`": ("`history` on V1", "`history` on V2"),
    "`self`": ("`self`, `history+self` on V1", "`self`, `history+self` on V2"),
    "neural": ("neural on V1", "neural on V2"),
}
"""Columns of the first tables of support.md, and those of its last one that show what
they claim on V1 and on V2.
"""
NOT_TESTED = "\N{EN DASH}"


def tables(page: str) -> list[dict[str, dict[str, str]]]:
    """Return the tables of a page: the cells of each row by its name and by column,
    without footnotes.
    """
    found: list[dict[str, dict[str, str]]] = []
    for line in re.sub(r"\[\^\d+\]", "", (ROOT / page).read_text()).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| |"):
            columns = cells[1:]
            found.append({})
        elif line.startswith("| "):
            found[-1][cells[0]] = dict(zip(columns, cells[1:], strict=True))
    return found


def shown(row: dict[str, str], column: str) -> bool:
    """Say whether a cell names a test that exists and says rightly when it runs; a cell
    may point at another one.
    """
    cell = row[column]
    if same := re.search(r"\bas (`history` on V[12])", cell):
        assert same[1] != column
        return shown(row, same[1])
    if cell.startswith("refused"):
        return False
    file = None
    found = False
    for name, at_night in re.findall(r"`(test_[\w.]+)`( \(nightly\))?", cell):
        if name.endswith(".py"):
            (file,) = (ROOT / "tests").glob(f"*/{name}")
            continue
        assert file and name in marks(file), (name, cell)
        assert bool(at_night) == nightly(file, name), name
        found = True
    return found


def named(cell: str) -> list[str]:
    """Return what a cell of claims.md names: tests, results and targets of make."""
    found = re.findall(r"`([^`]+)`", cell)
    assert ", ".join(f"`{name}`" for name in found) == cell, cell
    return found


def test_every_claim_names_what_shows_it_and_when() -> None:
    rows = re.findall(
        r"^\| (?!claim)(.+) \| (.+) \| (.+) \|$",
        (ROOT / "docs/claims.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) > 20
    nights = (ROOT / ".github/workflows/nightly.yml").read_text()
    for claim, cell, when in rows:
        assert when in ("every push", "nightly", "measured"), (claim, when)
        for name in named(cell):
            file, _, test = name.partition("::")
            if when == "measured":
                assert (ROOT / "benchmarks/results" / name).exists(), name
            elif name.startswith("make "):
                assert when == "nightly" and re.search(rf"\b{name[5:]}\b", nights), name
            else:
                tests = [test] if test else list(marks(ROOT / file))
                assert set(tests) <= set(marks(ROOT / file)), name
                assert {nightly(ROOT / file, one) for one in tests} == {
                    when == "nightly"
                }, name


def test_tests_that_pages_name_are_there() -> None:
    there = {path.name for path in (ROOT / "tests").glob("*/test_*.py")}
    found = {
        name
        for page in PAGES
        for name in re.findall(r"\btest_\w+\.py\b", page.read_text())
    }
    assert len(found) > 30 and found <= there


def test_every_mark_of_what_works_has_tests_and_they_say_which_run_at_night() -> None:
    *claims, tests = tables("docs/support.md")
    names = [name for table in claims for name in table]
    assert names == list(tests) and len(names) > 15
    marked = 0
    for name, claim in (
        (name, claim) for table in claims for name, claim in table.items()
    ):
        for column, mark in claim.items():
            runners = COLUMNS[column]
            assert mark in ("✓", "V1", "V2", "✗", NOT_TESTED), (name, column, mark)
            wanted = {"✓": runners, "V1": runners[:1], "V2": runners[1:]}.get(mark, ())
            for runner in runners:
                if runner in wanted:
                    assert shown(tests[name], runner), (
                        f"{name}, {column} is {mark}: no test in the column {runner}"
                    )
                    marked += 1
                elif mark == "✗":
                    assert re.search("refused|V1 runs", tests[name][runner]), (
                        name,
                        runner,
                    )
                else:
                    assert not shown(tests[name], runner), (
                        f"{name}, {column} is {mark}: there is a test on {runner}"
                    )
                    assert mark != NOT_TESTED or "not tested" in tests[name][runner], (
                        name,
                        runner,
                    )
    assert marked > 50
