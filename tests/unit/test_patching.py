"""One form for what is changed in other packages: applied once, refused twice, and no trouble where it does not fit."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from das_adapter import compat, patching
from das_adapter.errors import DasError, UnsupportedHost
from das_adapter.patching import PATCHES, Patch


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "patched_host.py").write_text("class Thing:\n    def size(self):\n        return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("patched_host", None)
    return "patched_host"


def make(target: str, name: str = "enlarge", adds: bool = False) -> Patch:
    def replacement(stock: Any, by: int = 1) -> Any:
        """Without it things are small."""
        return lambda self: (stock(self) if stock else 0) + by

    replacement.__name__ = name
    return Patch(target, replacement, since="1.0", upstream="", adds=adds)


def test_a_patch_is_applied_once(host: str) -> None:
    patch = make(f"{host}:Thing.size")
    patch.apply()
    patch.apply()
    assert importlib.import_module(host).Thing().size() == 2
    assert patch.why == "Without it things are small."


def test_another_patch_of_the_same_target_is_refused_with_the_first_ones_name(host: str) -> None:
    make(f"{host}:Thing.size").apply()
    with pytest.raises(DasError, match=r"patch shrink: patched_host:Thing\.size is patched already, by enlarge"):
        make(f"{host}:Thing.size", "shrink").apply()


def test_one_instance_can_be_patched(host: str) -> None:
    module = importlib.import_module(host)
    one = SimpleNamespace(size=lambda self: 5)
    make(f"{host}:Thing.size").apply(10, owner=one)
    assert one.size(one) == 15
    assert module.Thing().size() == 1


def test_an_attribute_can_be_added(host: str) -> None:
    make(f"{host}:Thing.weight", adds=True).apply()
    assert importlib.import_module(host).Thing().weight() == 1


@pytest.mark.parametrize("target", ["patched_host:Thing.colour", "patched_host:Other.size", "patched_host:Other.x.y"])
def test_a_target_that_is_gone_is_named_or_left_alone(host: str, target: str) -> None:
    with pytest.raises(UnsupportedHost, match=f"patch enlarge: found no {target}"):
        make(target).apply()
    make(target).try_apply()


def test_a_changed_host_does_not_fail_its_own_import(host: str) -> None:
    make(f"{host}:Thing.colour").when_imported()
    make(f"{host}:Thing.size").when_imported()
    patching.when_imported(host, lambda module: module.Registry.register("x"))
    assert importlib.import_module(host).Thing().size() == 2


def test_every_patched_symbol_is_checked_at_start() -> None:
    """Those of veRL and NeMo-RL, and what is patched in vLLM at its start; the CPU's are checked by their own tests."""
    from das_adapter.engine import patches
    from das_adapter.nemo_rl import install
    from das_adapter.verl import hooks

    checked = {f"{s.module}:{s.name}" for host in compat.HOSTS.values() for s in host.symbols}
    relied = [
        p for p in (*patches.AT_START, *patches.IN_FRONT_ENDS, patches.build_row_processors, *hooks.HOOKS) if not p.adds
    ]
    targets = {p.target.replace(".__ray_metadata__.modified_class", "") for p in relied}
    assert targets <= checked
    assert install.choose_workers.target in checked
    assert len({id(p) for p in PATCHES}) == len(PATCHES)
    assert all(p.why and p.since for p in PATCHES)
