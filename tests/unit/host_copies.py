"""Copies of the installed hosts' sources, in which a test may change or remove
something.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

NEWEST = Path(os.environ.get("DAS_TEST_NEWEST", Path(sys.prefix) / "newest"))
"""Where the newest vLLM build is, if it is."""


def copy_of(package: str, to: Path, build: str = "installed") -> Path:
    """Make a copy of a package's Python files, of the installed build or of the newest
    one.
    """
    if build == "newest":
        source = NEWEST / package
    else:
        spec = importlib.util.find_spec(package)
        source = (
            Path(spec.submodule_search_locations[0])
            if spec and spec.submodule_search_locations
            else NEWEST / "-"
        )
    if not source.is_dir():
        pytest.skip(f"there is no {build} build of {package}")
    only_python = shutil.ignore_patterns("*.so", "__pycache__")
    return Path(
        shutil.copytree(
            source, to / package, copy_function=os.symlink, ignore=only_python
        )
    )


def change(package: Path, file: str, old: str, new: str) -> None:
    """Change a file of a copy at the first place that `old`, a regular expression,
    matches.
    """
    path = package / file
    text, count = re.subn(old, new, path.read_text(), count=1)
    assert count, f"{file} has no {old}"
    path.unlink()
    path.write_text(text)


def remove(package: Path, module: str) -> None:
    """Take a module or a package of a copy away."""
    path = package.joinpath(*module.split(".")[1:])
    shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
