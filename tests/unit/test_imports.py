"""Imports point down (the contracts are in pyproject.toml), and the lower rooms need
little.
"""

from __future__ import annotations

import sys

import grimp
import pytest


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "das_adapter", include_external_packages=True, cache_dir=None
    )


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("errors", set()),
        ("config", {"pydantic", "yaml"}),
        ("config_errors", {"pydantic", "pydantic_core"}),
        ("compat", set()),
        ("patching", {"wrapt"}),
        ("core", {"numpy"}),
        ("protocol", {"numpy", "pydantic", "pydantic_core"}),
        ("service", {"numpy", "ray"}),
    ],
)
def test_a_lower_room_needs_no_more_packages_than_it_may(
    graph: grimp.ImportGraph, room: str, allowed: set[str]
) -> None:
    inside = {f"das_adapter.{room}", *graph.find_descendants(f"das_adapter.{room}")}
    imported = {
        target
        for module in inside
        for target in graph.find_modules_directly_imported_by(module)
    }
    outside = {name for name in imported if name.partition(".")[0] != "das_adapter"}
    assert outside - sys.stdlib_module_names <= allowed
