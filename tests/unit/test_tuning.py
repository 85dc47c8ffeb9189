"""The table of the numbers that decide policy, and that neither Python nor C++ has
others.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numbers_page
import numpy as np
import pytest

from das_adapter.core import tuning
from das_adapter.core.native import native

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "das_adapter" / "core" / "tuning.py"
SOURCES = [*(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc").glob("*.hpp")]

NO_POLICY = {
    "controller.cpp": {
        "3": "element of StepModel's costs",
        "4": "element of the costs; counts of the acceptance curve",
        "5": "element of the costs",
        "11": "bits of a digit that values are sorted by",
        "32": "bits of a float",
        "256": "values from which on sorting by digits is faster",
    },
    "keyed_noise.cpp": {"": "the noise itself: other numbers would be other tokens"},
    "live_texts.cpp": {
        "3": "numbers of `Persistence`",
        "7": "rows of `OutputRows`",
    },
    "parallel.hpp": {"8": "chunks of a thread"},
    "quantised_linear.cpp": {"": "the format of quantised weights, and of floats"},
    "suffix_build.hpp": {"8": "bytes of a word", "32": "bits of a rank"},
    "suffix_draft.hpp": {"256": "ages that a device's places hold"},
    "suffix_file.hpp": {
        "0600": "permissions",
        "0666": "permissions",
        "0x3247455358534144": "magic number",
        "0x334c4c4158534144": "magic number",
        "0x334e414d58534144": "magic number",
        "0x9fb21c651e98df25": "checksum",
        "0xcbf29ce484222325": "checksum",
        "3": "version of the format",
        "8": "words of a checksum",
        "32": "bits of a checksum",
    },
    "suffix_index.cpp": {
        "3": "kStart, the text's end and kStart again around a text",
        "4": "quarters",
        "24": "bits of a position",
        "100": "percent",
    },
    "suffix_live.hpp": {
        "0x9e3779b97f4a7c15": "hash",
        "0xd6e8feb86659fd93": "hash",
        "32": "bits of a hash",
        "64": "slots of the smallest hash table",
    },
    "suffix_segment.hpp": {
        "4": "bytes of a place",
        "7": "rounding up to words",
        "8": "bytes of a word; bits of a count",
        "24": "bits of a position",
        "32": "places of a sample; bits of a rank",
        "255": "largest count of 8 bits",
    },
    "suffix_store.hpp": {
        "3": "words of a line",
        "8": "attempts to read while another generation is published",
        "40": "bytes of a file's name",
    },
    "suffix_text.hpp": {
        "3": "bytes of a token",
        "16": "bits of a token's low part",
        "23": "bits of a token",
        "65536": "a token's high part",
    },
    "suffix_thin.hpp": {
        "4": "quarters",
        "64": "parts of a rollout that worth is rounded to",
        "128": "largest power of two of 8 bits",
    },
}
"""Numbers in C++ that decide no policy, by file, each with what it is; "" stands for all
numbers of a file. 0, 1 and 2 are not listed.
"""


def entries() -> dict[str, ast.Call]:
    """Return the calls of `number` in the table by the names of their results."""
    found = dict[str, ast.Call]()
    for statement in ast.parse(TABLE.read_text()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            (target,) = statement.targets
            assert isinstance(target, ast.Name)
            if ast.unparse(statement.value.func) == "number":
                assert target.id not in found, f"{target.id} is there twice"
                found[target.id] = statement.value
    return found


def literals(path: Path) -> set[str]:
    """Return the numbers in a C++ file without their suffixes."""
    text = re.sub(
        r"""//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\])'|^\#.*$""",
        "",
        path.read_text(),
        flags=re.MULTILINE,
    )
    number = r"(?:0x[\da-fA-F.]+(?:p[+-]?\d+)?|\d+\.?\d*(?:[eE][+-]?\d+)?)[fuUlL]*"
    found = re.findall(rf"(?<![\w.]){number}", text)
    return {literal.rstrip("uUlL") for literal in found}


def decides(literal: str) -> bool:
    """Return whether a number is not one of 0, 1 and 2."""
    return literal.rstrip("f") not in {"0", "0.0", "1", "1.0", "2"}


@pytest.mark.parametrize("name", entries())
def test_every_number_has_a_unit_and_a_reason(name: str) -> None:
    call = entries()[name]
    assert name.isupper() and not call.keywords and len(call.args) == 3
    unit, reason = (ast.literal_eval(text) for text in call.args[1:])
    assert isinstance(unit, str) and isinstance(reason, str)
    assert unit.strip() and reason.strip()
    for result in re.findall(r"benchmarks/results/[\w.]+\w", reason):
        assert (ROOT / result).exists(), f"{result} is not there"


def test_every_number_is_read() -> None:
    python = "".join(
        path.read_text()
        for path in (ROOT / "das_adapter").rglob("*.py")
        if path != TABLE
    )
    cpp = "".join(path.read_text() for path in SOURCES)
    unread = {
        name
        for name in entries()
        if not re.search(rf"\btuning\.{name}\b", python)
        and not re.search(rf"\btuning::{name.removeprefix('CPP_')}\b", cpp)
    }
    assert not unread


@pytest.mark.parametrize("path", sorted(SOURCES), ids=lambda path: path.name)
def test_a_cpp_file_has_no_other_numbers_that_decide(path: Path) -> None:
    known = NO_POLICY.get(path.name, {})
    found = {literal for literal in literals(path) if decides(literal)}
    if "" in known:
        assert found
        return
    assert found - known.keys() == set(), "add it to the table, or say what it is"
    assert known.keys() - found == set(), "it is not there any more"


def test_the_header_has_the_numbers_of_the_table_and_is_written_once(
    tmp_path: Path,
) -> None:
    header = tmp_path / "new" / "tuning.hpp"
    command = [sys.executable, "-P", ROOT / "csrc" / "tuning_header.py", TABLE, header]
    subprocess.run(command, check=True)
    text = header.read_text()
    written = header.stat().st_mtime_ns
    subprocess.run(command, check=True)
    assert header.stat().st_mtime_ns == written
    cpp = {name for name in entries() if name.startswith("CPP_")}
    assert len(re.findall(r"constexpr", text)) == len(cpp)
    for name in cpp:
        value = getattr(tuning, name)
        values = value if isinstance(value, tuple) else (value,)
        kind = "double" if isinstance(values[0], float) else "uint32_t"
        (line,) = re.findall(
            rf".*\b{kind}\b.* {name.removeprefix('CPP_')}\b(.*);", text
        )
        assert line.strip(" ={}") == ", ".join(map(repr, values))


def test_the_native_core_was_built_with_the_numbers_of_the_table() -> None:
    """Where this fails in a checkout, the core is to be built again."""
    rules = native().drafting_rules()
    assert rules["PLACES"] == tuning.CPP_PLACES_PER_SEARCH
    assert rules["DEPTH"] == tuning.CPP_DEPTH_TOKENS
    assert rules["BEYOND"] == tuning.CPP_BEYOND_TOKENS
    assert rules["SURE"] == tuning.CPP_SURE_STRENGTH
    assert rules["STRONGEST"] == tuning.CPP_MOST_STRENGTH
    assert rules["OWN"] == tuning.CPP_OWN_WEIGHT
    assert rules["SIBLING"] == tuning.CPP_SIBLING_WEIGHT
    assert rules["PROMPT"] == tuning.CPP_PROMPT_WEIGHT
    assert rules["PRIOR"] == tuning.CPP_PRIOR_TOKENS
    assert rules["DOUBT"] == tuning.CPP_SOURCE_PRIOR_TOKENS
    assert rules["MEMORY"] == tuning.CPP_MEMORY_TOKENS
    assert tuple(rules["SHARES"]) == tuning.CPP_SHARE_STEPS
    assert tuple(rules["STRENGTHS"]) == tuning.CPP_STRENGTH_STEPS
    assert rules["COUNTS"] == len(tuning.CPP_COUNT_STEPS) + 1
    ages = np.arange(256)
    weights = tuning.CPP_SIBLING_WEIGHT * 0.5 ** (ages / tuning.CPP_HALF_LIFE_VISITS)
    np.testing.assert_allclose(rules["FADING"], np.maximum(weights, 1), atol=0.5)


def test_the_page_has_the_table() -> None:
    assert numbers_page.PAGE.read_text() == numbers_page.page(), (
        "run python scripts/reference.py"
    )
