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
"""What the figures of an engine depend on."""
RUN = (*ENGINE, "das_adapter/service", "das_adapter/protocol")
"""What those of a training run depend on, beside its host's hooks."""
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
    inner = "\n" + " " * (indent + 1)
    parts = (
        list(value.values())
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else []
    )
    nested = (dict, list) if isinstance(value, list) or len(plain) > 1000 else dict
    if len(plain) + indent <= 120 or not any(
        isinstance(part, nested) for part in parts
    ):
        return plain
    texts = [written(part, indent + 1) for part in parts]
    if isinstance(value, list):
        return "[" + inner + ("," + inner).join(texts) + inner[:-1] + "]"
    rows = [
        f"{json.dumps(str(name))}: {text}"
        for name, text in zip(value, texts, strict=True)
    ]
    return "{" + inner + ("," + inner).join(rows) + inner[:-1] + "}"


def provenance(measures: Sequence[str] = ENGINE) -> dict[str, Any]:
    """Return what made the result: this process; `measures`: paths of the code that it
    depends on. Its revision is the last commit that changed them.
    """
    return {
        "command": " ".join(["python", *_arguments()]),
        "versions": {
            d.name: d.version
            for d in reversed([*distributions()])
            if d.name in PACKAGES
        },  # the first counts
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
    """The command line, less where the result was written to and this machine's
    directories.
    """
    at = sys.argv.index("--out") if "--out" in sys.argv else len(sys.argv)
    words = (
        word
        for word in [*sys.argv[:at], *sys.argv[at + 2 :]]
        if not word.startswith("--out=")
    )
    return [Path(word).name if Path(word).is_absolute() else word for word in words]


def _hardware() -> dict[str, Any]:
    """Return processor, cores, GPU (None: torch sees none) and system."""
    import torch

    name = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = name[1] if name else platform.processor()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": gpu,
        "system": platform.platform(),
    }
