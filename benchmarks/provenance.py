"""The provenance of every result in results/: command, versions, hardware, revision."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from das_adapter.tools.machine import hardware


def provenance() -> dict[str, Any]:
    """Of the process that calls it."""
    return {
        "command": " ".join(["python", *_arguments()]),
        "versions": {name: _version(name) for name in ("das-adapter", "vllm", "torch", "numpy", "arctic-inference")},
        "revision": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        ).stdout.strip(),
        "hardware": hardware(),
    }


def _arguments() -> list[str]:
    """The command line, less where the result was written to and this machine's directories."""
    at = sys.argv.index("--out") if "--out" in sys.argv else len(sys.argv)
    words = [*sys.argv[:at], *sys.argv[at + 2 :]]
    return [Path(word).name if Path(word).is_absolute() else word for word in words]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
