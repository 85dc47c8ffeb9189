"""Habits that no linter knows: files and functions stay short, result files hold one
row a line, tests keep out of private state, nobody waits for Ray for ever.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from provenance import written

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
INSIDE = {
    "cpu_platform.py",
    "device_reference.py",
    "engine.py",
    "reference_index.py",
    "interpreted_kernels.py",
    "memory_pools.py",
    "sabotage.py",
    "v2_cpu.py",
    "v2_sabotage.py",
    "v2_stand_ins.py",
}
"""What stands in for vLLM, for a kernel or for a broken part is put where that is."""
HOSTS = {
    *("_create_engine", "_engine_owner_loop", "_get_gen_batch", "_get_zmq_handle"),
    *("_load_weights", "_next_train_batch"),
    *("_request_max_new_tokens", "_run_agent_loop", "_submit_batch_to_rollout"),
}
"""Private names of the hosts' own, which hooks depend on."""


@pytest.mark.parametrize("file", RESULTS, ids=lambda path: path.name)
def test_a_result_file_holds_one_row_a_line(file: Path) -> None:
    assert file.read_text() == written(json.loads(file.read_text())) + "\n", (
        "write it with provenance.save"
    )


def private(tree: ast.AST) -> Iterator[str]:
    """Return what a test uses of private names of das_adapter's: imported, or as
    attributes of other objects.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "das_adapter."
        ):
            yield from (name.name for name in node.names if name.name.startswith("_"))
        elif (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and node.attr not in ("_replace", *HOSTS):
                yield ast.unparse(node)


def test_tests_keep_out_of_private_state() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in INSIDE]
    found = {
        path.name: sorted(set(private(ast.parse(path.read_text())))) for path in files
    }
    assert {name: uses for name, uses in found.items() if uses} == {}


def endless(tree: ast.AST) -> Iterator[str]:
    """Return the calls that wait for what Ray brings, for as long as that takes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "ray.get",
            "ray.wait",
        ):
            limits = [
                keyword.value for keyword in node.keywords if keyword.arg == "timeout"
            ]
            if not limits or ast.unparse(limits[0]) == "None":
                yield ast.unparse(node)


def test_nobody_waits_for_ray_without_a_limit() -> None:
    assert list(endless(ast.parse("ray.get(call)"))) == ["ray.get(call)"]
    paths = (ROOT / "das_adapter").rglob("*.py")
    assert {
        path.name: found
        for path in paths
        if (found := [*endless(ast.parse(path.read_text()))])
    } == {}
