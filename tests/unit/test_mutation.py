"""The list of changes that tests have to notice fits the package and the tests
(benchmarks/mutants.toml).
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mutation
import pytest
from mutation import AREAS, BAR, Outcome, read_mutants, rows_of, summed_up

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "das_adapter"
MUTANTS = read_mutants()


def functions(file: Path) -> set[str]:
    """Return the names of a file's functions."""
    nodes = ast.walk(ast.parse(file.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in nodes if isinstance(node, kinds)}


def test_each_change_is_of_a_text_that_stands_once_in_its_file() -> None:
    for mutant in MUTANTS:
        text = (PACKAGE / mutant.file).read_text()
        changed = mutant.changed(text)
        assert changed != text, mutant.name
        ast.parse(changed)


def test_the_tests_of_each_change_are_there() -> None:
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), mutant.name
            assert not name or name in functions(ROOT / file), mutant.name


def test_no_two_changes_have_one_name() -> None:
    names = Counter(mutant.name for mutant in MUTANTS)
    assert [name for name, count in names.items() if count > 1] == []


def test_the_list_covers_every_area() -> None:
    areas = Counter(mutant.area for mutant in MUTANTS)
    assert set(areas) == {*AREAS, "others"}
    assert len(MUTANTS) >= 120 and min(areas.values()) >= 10


@pytest.mark.parametrize(
    ("old", "found"), [("no such text", "0 times"), ("self", "times")]
)
def test_an_entry_that_no_longer_fits_is_named(old: str, found: str) -> None:
    mutant = replace(MUTANTS[0], old=old)
    with pytest.raises(ValueError) as caught:
        mutant.changed((PACKAGE / mutant.file).read_text())
    assert mutant.name in str(caught.value) and found in str(caught.value)


def test_a_change_counts_as_noticed_where_tests_fail_or_hang() -> None:
    results = ("failed", "timed out", "passed", "failed")
    tried = MUTANTS[: len(results)]
    summary = summed_up(rows_of(tried, [Outcome(result) for result in results]))
    assert summary["score"] == 0.75 < BAR == summary["bar"]
    assert summary["survivors"] == [tried[2].name]
    [area] = summary["areas"].values()
    assert area == {"mutants": 4, "noticed": 3, "score": 0.75}


def test_a_hanging_test_ends_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is a small one of this test's own: a package of two files."""
    root = tmp_path / "repository"
    (root / "das_adapter").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (root / "das_adapter" / "__init__.py").write_text("WAIT_S = 0.0\nONE = 1\n")
    (root / "tests" / "test_it.py").write_text(
        "import time\nimport das_adapter\n\n\n"
        "def test_it():\n    time.sleep(das_adapter.WAIT_S)\n"
        "    assert das_adapter.ONE == 1\n"
    )
    monkeypatch.setattr(mutation, "ROOT", root)
    monkeypatch.setattr(mutation, "FOLDERS", ("das_adapter", "tests"))

    def changed(old: str, new: str) -> mutation.Mutant:
        tests = ("tests/test_it.py",)
        return mutation.Mutant("__init__.py", old, new, f"{new} is there", tests)

    # a busy machine takes long to begin with the tests
    tried = [
        changed("ONE = 1", "ONE = 2"),
        changed("ONE = 1", "ONE = 1.0"),
        changed("ONE = 1", "ONE ="),
    ]
    outcomes = mutation.try_all(tried, jobs=1, limit_s=300.0)
    assert [outcome.result for outcome in outcomes] == ["failed", "passed", "failed"]
    assert outcomes[0].by == "tests/test_it.py::test_it"
    hanging = changed("WAIT_S = 0.0", "WAIT_S = 1000.0")
    [outcome] = mutation.try_all([hanging], jobs=1, limit_s=2.0)
    assert outcome.result == "timed out"
    kept = (root / "das_adapter" / "__init__.py").read_text()
    assert kept == "WAIT_S = 0.0\nONE = 1\n"
