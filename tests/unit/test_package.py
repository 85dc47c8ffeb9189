"""The package as it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.resources

import das_adapter


def test_the_installed_version_is_the_one_in_the_source() -> None:
    assert importlib.metadata.version("das-adapter") == das_adapter.__version__


def test_type_checkers_may_read_the_annotations() -> None:
    assert (importlib.resources.files("das_adapter") / "py.typed").is_file()
