"""Write the files of results/: one row a line, with command, versions, hardware and revision."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from das_adapter.tools.machine import hardware

_ENGINE = ["das_adapter/core", "das_adapter/engine", "csrc"]
_RUN = [*_ENGINE, "das_adapter/service", "das_adapter/protocol"]
MEASURES = {
    "controller_overhead.py": ["das_adapter/core"],
    "history.py": ["das_adapter/core/index", "csrc"],
    "index.py": ["das_adapter/core/index", "csrc"],
    "pipelines.py": [*_RUN, "das_adapter/verl"],
    "published.py": ["das_adapter/core", "das_adapter/sim"],
    "quantised_kernels.py": ["csrc"],
    "run_ahead.py": [*_RUN, "das_adapter/verl"],
    "scale.py": ["das_adapter/core", "das_adapter/service", "csrc"],
    "scale_nodes.py": ["das_adapter/core", "das_adapter/service", "csrc"],
    "simulator.py": ["das_adapter/core", "das_adapter/sim"],
    "soak.py": [*_RUN, "das_adapter/verl"],
    "v2_drafts.py": ["das_adapter/core/index", "das_adapter/engine/v2", "csrc"],
}
"""The code that each script measures; others measure the engine. `stale.py` lists the results of code that has changed
since."""


def save(path: Path, content: Any) -> None:
    """Write a result file."""
    path.write_text(written(content) + "\n")


def written(value: Any, indent: int = 0) -> str:
    """Return a value as JSON, one row a line: what fits into a line, or holds nothing but plain values and lists."""
    plain, inner = json.dumps(value), "\n" + " " * (indent + 1)
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    nested = (dict, list) if isinstance(value, list) or len(plain) > 1000 else dict
    if len(plain) + indent <= 120 or not any(isinstance(part, nested) for part in parts):
        return plain
    texts = [written(part, indent + 1) for part in parts]
    if isinstance(value, list):
        return "[" + inner + ("," + inner).join(texts) + inner[:-1] + "]"
    rows = [f"{json.dumps(str(name))}: {text}" for name, text in zip(value, texts, strict=True)]
    return "{" + inner + ("," + inner).join(rows) + inner[:-1] + "}"


def provenance() -> dict[str, Any]:
    """Return what made the result: this process."""
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
        "measures": MEASURES.get(Path(sys.argv[0]).name, _ENGINE),
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
