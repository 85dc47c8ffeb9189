"""What the pages say: their fenced blocks, the commands in these, and the marks of the
tests that they name.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
GPU_ONLY = "<!-- GPU only -->"
NIGHTLY = "<!-- nightly -->"
FENCED = re.compile(
    rf"(?:({GPU_ONLY}|{NIGHTLY})\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL
)


def blocks(page: Path, *languages: str) -> Iterator[tuple[str, str]]:
    """Yield the mark and the text of each block in these languages, but for those that
    need a GPU.
    """
    for mark, language, text in FENCED.findall(page.read_text()):
        if language in languages and mark != GPU_ONLY:
            yield mark, text


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return the mark of each block with commands, and what a reader types, one command
    an element.
    """
    found = [*blocks(page, "bash", "sh")]
    found += [
        (mark, "\n".join(re.findall(r"^\$ (.*)$", text, re.MULTILINE)))
        for mark, text in blocks(page, "console")
    ]
    lines = [(mark, text.replace("\\\n", " ").splitlines()) for mark, text in found]
    typed = [
        (mark, [" ".join(re.sub(r"(^|\s{2,})#.*", "", line).split()) for line in text])
        for mark, text in lines
    ]
    return [(mark, [command for command in block if command]) for mark, block in typed]


@functools.cache
def marks(file: Path) -> dict[str, set[str]]:
    """Return the names of the marks that a file's tests have in all their cases."""

    def named(node: ast.AST) -> set[str]:
        return set(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node)))

    tree = ast.parse(file.read_text())
    all_of_it = {
        mark
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for mark in named(node.value)
    }
    return {
        node.name: all_of_it.union(
            *(named(d) for d in node.decorator_list if isinstance(d, ast.Attribute))
        )
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def nightly(file: Path, test: str) -> bool:
    """Say whether a test runs at night only."""
    return bool(marks(file)[test] & {"long", "hosts"})
