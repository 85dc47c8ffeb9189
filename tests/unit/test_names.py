"""One word has one meaning: a class name is used once, and identifiers keep to the
glossary's words.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "das_adapter").rglob("*.py"))
SOURCES = sorted((ROOT / "csrc").glob("*.?pp"))
INSTEAD = {
    "bring": "copy, map or load",
    "dear": "price, marginal cost",
    "dearest": "greatest worth",
    "enough": "what there has to be: needed, min_",
    "hear": "record",
    "heard": "recorded",
    "lasting": "covariance, correlation",
    "lasts": "covariance, correlation",
    "mine": "whose: of_model, of_history",
    "settle": "count, emit or begin",
    "theirs": "whose: of_model, of_history",
    "usual": "mean_",
}
"""Words that say nothing to a stranger, and what stands in their place."""
VISITS = {"visits", "visit"}
"""A visit is a weight version that wrote a problem: a noun. Nothing visits."""


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield the names that code gives: of classes, functions, parameters, variables and
    attributes.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> set[str]:
    """Return the words of an identifier."""
    return set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))


@pytest.mark.parametrize(
    "path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT / "das_adapter"))
)
def test_names_keep_to_the_glossary(path: Path) -> None:
    found = set(identifiers(ast.parse(path.read_text())))
    wrong = {name: INSTEAD[w] for name in found for w in words(name) & INSTEAD.keys()}
    assert not wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_names_of_the_core_keep_to_the_glossary(path: Path) -> None:
    code = re.sub(r"//.*|\"[^\"\n]*\"", "", path.read_text())
    found = set(re.findall(r"[A-Za-z_]\w*", code))
    wrong = {name: INSTEAD[w] for name in found for w in words(name) & INSTEAD.keys()}
    assert not wrong


def test_a_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_nothing_visits() -> None:
    """Another node's history is mapped."""
    found = {
        f"{path.name}: {node.name}"
        for path in PACKAGE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.split("_")[0] in VISITS
    }
    assert not found


def test_nobody_reaches_through_the_policy() -> None:
    """Its step counter, looks, probes and rests are its own."""
    through = re.compile(r"\bpolicy\.(?:_\w+|account|requests|lengths)\b")
    found = {
        f"{path.name}: {match.group()}"
        for path in PACKAGE
        if path.name != "policy.py"
        for match in through.finditer(path.read_text())
    }
    assert not found
