"""The package as it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import re

import das_adapter


def test_the_installed_version_is_the_one_in_the_source() -> None:
    assert importlib.metadata.version("das-adapter") == das_adapter.__version__


def test_type_checkers_may_read_the_annotations() -> None:
    assert (importlib.resources.files("das_adapter") / "py.typed").is_file()


def test_it_requires_neither_torch_nor_a_host() -> None:
    needed = {
        re.split(r"\W", line)[0] for line in importlib.metadata.requires("das-adapter") or () if "extra ==" not in line
    }
    assert "numpy" in needed and not needed & {"torch", "vllm", "verl", "nemo_rl", "ray", "trl", "transformers"}
