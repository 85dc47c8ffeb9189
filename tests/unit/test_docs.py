"""The docs say what is: the site builds without a warning, blocks parse, metrics and
alarms are those of the source, and what works with what has tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import claims_page
import pytest
import yaml
from documented import PAGES, ROOT, blocks, marks

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
    first = (tmp_path / "index.html").read_text()
    assert "Try it on a laptop" in first and 'src="pictures/chart_epochs.svg"' in first
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
    assert "index.md" in listed - pages  # the site's first page is the README
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
    "`history`": ("history on V1", "history on V2"),
    "`self`": ("self on V1", "self on V2"),
    "neural": ("neural on V1", "neural on V2"),
}
"""Columns of support.md, and those of tests/claims.yaml that show what they claim on V1
and on V2.
"""
NOT_TESTED = "\N{EN DASH}"


def marked_features(page: str) -> dict[str, dict[str, str]]:
    """Return the tables with marks of a page: the cells of each row by its name and by
    column, without footnotes.
    """
    found: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in re.sub(r"\[\^\d+\]", "", (ROOT / page).read_text()).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| |"):
            columns = cells[1:]
        elif line.startswith("| ") and columns:
            found[cells[0]] = dict(zip(columns, cells[1:], strict=True))
    return found


def shown(row: dict[str, list[str]], column: str) -> bool:
    """Say whether tests show a feature; a column may point at another one."""
    found = False
    for item in row[column]:
        if item.startswith("as "):
            assert not row[item[3:]][0].startswith("as "), (column, item)
            found |= shown(row, item[3:])
        elif claims_page.is_test(item):
            file, _, name = item.partition("::")
            assert name in marks(ROOT / file), item
            found = True
    return found and "refused" not in row[column]


def refused(row: dict[str, list[str]], column: str) -> bool:
    """Say whether a feature is refused."""
    return any("refused" in item for item in row[column] if "::" not in item)


def test_the_page_of_claims_is_that_of_its_source() -> None:
    assert claims_page.PAGE.read_text() == claims_page.page(), (
        "run python scripts/reference.py"
    )


def test_every_claim_names_what_shows_it() -> None:
    nights = (ROOT / ".github/workflows/nightly.yml").read_text()
    claims = [claim for part in claims_page.read()["claims"].values() for claim in part]
    assert len(claims) > 20
    for claim in claims:
        assert claim["shown by"], claim
        at_night = set()
        for name in claim["shown by"]:
            if claims_page.is_test(name):
                file, _, test = name.partition("::")
                assert not test or test in marks(ROOT / file), name
                at_night.add(claims_page.runs_at_night(name))
            elif name.startswith("make "):
                assert re.search(rf"\b{name[5:]}\b", nights), name
            else:
                assert (ROOT / "benchmarks/results" / name).exists(), name
        assert len(at_night) < 2, f"some run at night only: {claim['claim']}"


def test_tests_that_pages_name_are_there() -> None:
    there = {path.name for path in (ROOT / "tests").glob("*/test_*.py")}
    found = {
        name
        for page in PAGES
        for name in re.findall(r"\btest_\w+\.py\b", page.read_text())
    }
    assert len(found) > 30 and found <= there


def test_every_mark_of_what_works_has_tests() -> None:
    claims = marked_features("docs/support.md")
    tests = claims_page.read()["what works with what"]
    assert list(claims) == list(tests) and len(claims) > 15
    marked = 0
    for name, claim in claims.items():
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
                    assert refused(tests[name], runner), (name, runner)
                else:
                    assert not shown(tests[name], runner), (
                        f"{name}, {column} is {mark}: there is a test on {runner}"
                    )
                    assert mark != NOT_TESTED or any(
                        "not tested" in item for item in tests[name][runner]
                    ), (name, runner)
    assert marked > 50
