"""Write result files: one row a line, with command, versions, hardware and revision."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ENGINE = ("das_adapter/core", "das_adapter/engine", "csrc")
"""Code that the figures of an engine depend on."""
RUN = (*ENGINE, "das_adapter/service", "das_adapter/protocol")
"""Code that the figures of a training run depend on, beside its host's hooks."""
LINE = 120
"""Columns of a line that is not split into rows."""
LONG = 1000
"""Columns of a value whose lists are split into rows too."""
PACKAGES = (
    "das-adapter",
    "vllm",
    "verl",
    "trl",
    "torch",
    "transformers",
    "ray",
    "numpy",
    "arctic-inference",
)


def save(path: Path, content: Any) -> None:
    """Write a result file."""
    path.write_text(written(content) + "\n")


def written(value: Any, indent: int = 0) -> str:
    """Return a value as JSON, one row a line: what fits into a line, or holds nothing
    but plain values and lists.
    """
    plain = json.dumps(value)
    if len(plain) + indent <= LINE or not _has_rows(value, len(plain)):
        return plain
    if isinstance(value, dict):
        parts = value.values()
    else:
        parts = value
    rows = [written(part, indent + 1) for part in parts]
    begin, end = "[]"
    if isinstance(value, dict):
        begin, end = "{}"
        names = [json.dumps(str(name)) for name in value]
        rows = [f"{name}: {row}" for name, row in zip(names, rows, strict=True)]
    line_break = "\n" + " " * indent
    inside = f",{line_break} ".join(rows)
    return f"{begin}{line_break} {inside}{line_break}{end}"


def _has_rows(value: Any, length: int) -> bool:
    """Say whether a value has parts that are written in rows of their own.

    Args:
        length: of the value as one line.
    """
    if isinstance(value, list):
        return any(isinstance(part, dict | list) for part in value)
    if not isinstance(value, dict):
        return False
    rows: Any = dict
    if length > LONG:
        rows = (dict, list)
    return any(isinstance(part, rows) for part in value.values())


def provenance(measures: Sequence[str] = ENGINE) -> dict[str, Any]:
    """Return what made the result: this process; `measures`: paths of the code that it
    depends on. Its revision is the last commit that changed them.
    """
    versions: dict[str, str] = {}
    for package in reversed([*distributions()]):
        if package.name in PACKAGES:
            # the first of several replaces those after it
            versions[package.name] = package.version
    return {
        "command": " ".join(["python", *_arguments()]),
        "versions": versions,
        "revision": _revision(measures),
        "measures": [*measures],
        "hardware": _hardware(),
    }


def _revision(measures: Sequence[str]) -> str:
    """Return the last commit that changed some paths; empty: this is no checkout, or
    there is no git.
    """
    command = ["git", "log", "-1", "--format=%h", "--", *measures]
    with contextlib.suppress(FileNotFoundError):
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        return run.stdout.strip()
    return ""


def _arguments() -> list[str]:
    """Return the command line without the place of the result and this machine's
    directories.
    """
    words = list[str]()
    after_out = False
    for word in sys.argv:
        if not after_out and word != "--out" and not word.startswith("--out="):
            path = Path(word)
            words.append(path.name if path.is_absolute() else word)
        after_out = word == "--out"
    return words


def _hardware() -> dict[str, Any]:
    """Return processor, cores, GPU (None: torch sees none) and system."""
    import torch

    cpu_info = Path("/proc/cpuinfo").read_text()
    name = re.search("model name\\s*: (.*)", cpu_info)
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    return {
        "cpu": name[1] if name else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "system": platform.platform(),
    }
