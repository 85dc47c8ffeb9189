"""The package as it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import re
import shutil
import subprocess
import sys
from pathlib import Path

import das_adapter

ROOT = Path(__file__).resolve().parents[2]


def test_the_installed_version_is_the_one_in_the_source() -> None:
    assert importlib.metadata.version("das-adapter") == das_adapter.__version__


def test_type_checkers_may_read_the_annotations() -> None:
    assert (importlib.resources.files("das_adapter") / "py.typed").is_file()


def test_it_requires_neither_torch_nor_a_host() -> None:
    needed = {
        re.split(r"\W", line)[0]
        for line in importlib.metadata.requires("das-adapter") or ()
        if "extra ==" not in line
    }
    assert "numpy" in needed and not needed & {
        "torch",
        "vllm",
        "verl",
        "nemo_rl",
        "ray",
        "trl",
        "transformers",
    }


def test_a_checkout_that_is_not_built_says_that_it_hides_the_installed_package(
    tmp_path: Path,
) -> None:
    shutil.copytree(
        ROOT / "das_adapter",
        tmp_path / "das_adapter",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    command = [
        sys.executable,
        "-S",
        "-c",
        "from das_adapter.core.native import native; native()",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert f"imported from {tmp_path}, where it is not built" in done.stderr
