"""One form for what is changed in other packages: applied once, refused twice, and no
trouble where it does not fit.
"""

from __future__ import annotations

import ast
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from das_adapter import compat, patching
from das_adapter.errors import DasError, UnsupportedHost
from das_adapter.patching import Patch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "patched_host.py").write_text(
        "class Thing:\n    def size(self):\n        return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("patched_host", None)
    return "patched_host"


def make(target: str, name: str = "enlarge", adds: bool = False) -> Patch:
    def replacement(stock: Any, by: int = 1) -> Any:
        return lambda self: (stock(self) if stock else 0) + by

    replacement.__name__ = name
    return Patch((target,), replacement, adds)


def test_a_patch_is_applied_once(host: str) -> None:
    patch = make(f"{host}:Thing.size")
    patch.apply()
    patch.apply()
    assert importlib.import_module(host).Thing().size() == 2
    assert importlib.import_module(host).Thing.size.__name__ == "size"


def test_another_patch_of_the_same_target_is_refused_with_the_first_ones_name(
    host: str,
) -> None:
    make(f"{host}:Thing.size").apply()
    with pytest.raises(
        DasError,
        match=r"patch shrink: patched_host:Thing\.size is patched already, by enlarge",
    ):
        make(f"{host}:Thing.size", "shrink").apply()


def test_one_instance_can_be_patched(host: str) -> None:
    module = importlib.import_module(host)
    one = SimpleNamespace(size=lambda self: 5)
    make(f"{host}:Thing.size").apply(10, owner=one)
    assert one.size(one) == 15
    assert module.Thing().size() == 1


def test_of_a_ray_actor_the_class_is_patched_of_which_it_was_made(host: str) -> None:
    module: Any = importlib.import_module(host)
    module.Actor = SimpleNamespace(
        __ray_metadata__=SimpleNamespace(modified_class=module.Thing)
    )
    make(f"{host}:Actor.size").apply()
    assert module.Thing().size() == 2


def test_a_patch_may_have_several_targets(host: str) -> None:
    Patch(
        (f"{host}:Thing.size", f"{host}:Thing.weight"), make("").replacement, adds=True
    ).when_imported()
    thing = importlib.import_module(host).Thing()
    assert (thing.size(), thing.weight()) == (2, 1)


def test_an_attribute_can_be_added(host: str) -> None:
    make(f"{host}:Thing.weight", adds=True).apply()
    assert importlib.import_module(host).Thing().weight() == 1


@pytest.mark.parametrize(
    "target",
    ["patched_host:Thing.colour", "patched_host:Other.size", "patched_host:Other.x.y"],
)
def test_a_target_that_is_gone_is_named_or_left_alone(host: str, target: str) -> None:
    with pytest.raises(UnsupportedHost, match=f"patch enlarge: found no {target}"):
        make(target).apply()
    make(target).try_apply()


def test_a_changed_host_does_not_fail_its_own_import(host: str) -> None:
    make(f"{host}:Thing.colour").when_imported()
    make(f"{host}:Thing.size").when_imported()
    patching.when_imported(host, lambda module: module.Registry.register("x"))
    assert importlib.import_module(host).Thing().size() == 2


def test_every_patch_says_what_fails_without_it_since_when_and_until_when() -> None:
    patches = patching.patches()
    assert sum(len(patch.targets) for patch in patches) > 60
    for patch in patches:
        assert (
            patch.reasons["why"].startswith(("Without it", "As `"))
            and patch.reasons["until"]
            and patch.since
        ), patch


def test_the_list_of_changes_is_that_of_the_patches_that_are_applied() -> None:
    from das_adapter.engine import plugin
    from das_adapter.nemo_rl import install
    from das_adapter.verl import hooks

    def about(patch: Patch) -> tuple[Any, ...]:
        return (
            patch.replacement.__module__,
            patch.replacement.__name__,
            replace(patch, replacement=about),
        )

    applied = (*plugin.AT_START, *hooks.HOOKS, *install.HOOKS)
    assert set(map(about, applied)) <= set(map(about, patching.patches()))


def test_every_patch_that_is_listed_is_used() -> None:
    """Where it is defined or where it is imported, by its name: the import alone is no
    use.
    """
    used = set[tuple[str, str]]().union(
        *map(names_in, (ROOT / "das_adapter").rglob("*.py"))
    )
    listed = {
        (patch.replacement.__module__, patch.replacement.__name__)
        for patch in patching.patches()
    }
    assert sorted(listed - used) == []


def names_in(file: Path) -> set[tuple[str, str]]:
    """Return what a file uses of das-adapter's modules, by module and name."""
    here = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    home = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in imports
        for alias in node.names
    }
    used = {
        home.get(node.id, (here, node.id))
        for node in nodes
        if isinstance(node, ast.Name)
    }
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in home
        ):
            used.add((".".join(home[node.value.id]), node.attr))
    return used


@pytest.mark.parametrize(
    ("host", "symbol"),
    [
        (
            "vllm",
            (
                "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample(logits,"
                " spec_decode_metadata)"
            ),
        ),
        ("vllm", "vllm.v1.worker.worker_base.WorkerBase"),  # to which a method is added
        ("verl", "verl.utils.tracking.Tracking.log(data, step, backend)"),
        (
            "verl",
            "verl.experimental.fully_async_policy.fully_async_trainer.FullyAsyncTrainer.load_checkpoint",
        ),
        ("nemo_rl", "nemo_rl.algorithms.ppo.setup(master_config, tokenizer)"),
    ],
)
def test_what_is_patched_is_checked_at_start(host: str, symbol: str) -> None:
    assert symbol in map(str, compat.HOSTS[host].symbols)


def test_what_only_a_cpu_or_a_newer_model_runner_needs_is_not_asked_of_every_vllm() -> (
    None
):
    asked = {change.split("(")[0] for change in map(str, compat.HOSTS["vllm"].symbols)}
    assert not any(".worker.gpu." in name or "dispatch_cpu" in name for name in asked)
