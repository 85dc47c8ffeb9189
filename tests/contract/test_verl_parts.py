"""Without a part that it may lack the real veRL gets all other hooks, and is refused
only what the part is for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

REPORT = r"""
import importlib, json, os, sys
import ray, tensordict, torch, transformers, vllm  # once, before the forks

MODULES = json.loads(sys.argv[1])

def report(directory):
    sys.path.insert(0, directory)
    import verl
    assert verl.__file__.startswith(directory)
    from das_adapter import compat, patching
    from das_adapter.verl import hooks, settings
    from omegaconf import OmegaConf
    compat.require("verl")
    for module in MODULES:
        try:
            importlib.import_module(module)
        except ImportError:
            pass
    applied = []
    for hook in hooks.HOOKS:
        for target in hook.targets:
            module, _, path = target.partition(":")
            owner = sys.modules.get(module)
            for part in path.split("."):
                owner = getattr(owner, part, None)
                owner = getattr(getattr(owner, "__ray_metadata__", None), "modified_class", owner)
            if getattr(owner, "__das_patch__", None):
                applied.append(target)
    refused = {}
    for name, das, more in (("plain", {}, {}), ("routing", {"routing": "longest_first"}, {}),
                            ("async", {}, {"async_training": {}})):
        block = {"custom": {"das": {"drafter": "history", **das}}}
        config = {"actor_rollout_ref": {"rollout": {"name": "vllm", **block}, "model": {}}, **more}
        try:
            settings.check(OmegaConf.create({**config, "trainer": {"use_v1": True}}))
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    try:
        from das_adapter.verl.router import DasLoadBalancer
        base = DasLoadBalancer.__bases__[0].__module__
    except Exception as error:
        base = type(error).__name__
    return {"applied": applied, "refused": refused, "base": base}

for directory in sys.argv[2:]:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            found = report(directory)
        except BaseException as error:
            found = {"error": repr(error)}
        with open(os.path.join(directory, "report.json"), "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Imports copies of veRL, each in a fork; leaves beside each copy which targets are
patched and what is refused.
"""
ROUTER = "workers/rollout/router"
ASYNC = "verl.experimental.fully_async_policy"


def whole(verl: Path) -> None:
    """Change nothing."""


def without_fully_async(verl: Path) -> None:
    shutil.rmtree(verl / "experimental/fully_async_policy")


def without_one_step_off(verl: Path) -> None:
    shutil.rmtree(verl / "experimental/one_step_off_policy")


def without_router(verl: Path) -> None:
    move_router(verl, "workers/rollout/balancing")


def with_a_package(verl: Path) -> None:
    move_router(verl, f"{ROUTER}/base")
    (verl / ROUTER / "__init__.py").write_text("")


def with_an_exporting_package(verl: Path) -> None:
    with_a_package(verl)
    (verl / ROUTER / "__init__.py").write_text(
        "from verl.workers.rollout.router.base import *  # noqa: F403\n"
    )


def move_router(verl: Path, to: str) -> None:
    """Move veRL's router to another module (verl#6940 makes a package of it); what
    imports it follows.
    """
    stock = (verl / f"{ROUTER}.py").read_text()
    (verl / f"{ROUTER}.py").unlink()
    (verl / to).parent.mkdir(exist_ok=True)
    (verl / f"{to}.py").write_text(stock)
    old, new = (f"from verl.{path.replace('/', '.')} import" for path in (ROUTER, to))
    for path in verl.rglob("*.py"):
        if old in (text := path.read_text()):
            path.unlink()
            path.write_text(text.replace(old, new))


CASES = (
    *(whole, without_fully_async, without_one_step_off),
    *(without_router, with_a_package, with_an_exporting_package),
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is found with each copy of veRL."""
    import verl

    from das_adapter.verl.hooks import HOOKS

    modules = sorted(
        {target.partition(":")[0] for hook in HOOKS for target in hook.targets}
    )
    directories = {
        make.__name__: tmp_path_factory.mktemp(make.__name__) for make in CASES
    }
    for make in CASES:
        source = Path(verl.__file__).parent
        copy = directories[make.__name__] / "verl"
        shutil.copytree(
            source,
            copy,
            copy_function=os.symlink,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        make(copy)
    command = [
        sys.executable,
        "-P",
        "-c",
        REPORT,
        json.dumps(modules),
        *map(str, directories.values()),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        name: json.loads((path / "report.json").read_text())
        for name, path in directories.items()
    }


def test_the_whole_of_verl_has_every_hook(reports: dict[str, Any]) -> None:
    from das_adapter.verl.hooks import HOOKS

    whole = reports["whole"]
    assert whole["refused"] == {}
    assert whole["applied"] == [target for hook in HOOKS for target in hook.targets]
    assert whole["base"] == "verl.workers.rollout.router"


def test_without_the_fully_asynchronous_trainer_only_its_runs_are_refused(
    reports: dict[str, Any],
) -> None:
    found = reports["without_fully_async"]
    assert found["applied"] == [
        target for target in reports["whole"]["applied"] if not target.startswith(ASYNC)
    ]
    assert list(found["refused"]) == ["async"]
    assert "which fully asynchronous training needs" in found["refused"]["async"]


def test_without_a_router_that_is_known_only_routing_is_refused(
    reports: dict[str, Any],
) -> None:
    found = reports["without_router"]
    assert found["applied"] == reports["whole"]["applied"]
    assert list(found["refused"]) == ["routing"]
    assert (
        "GlobalRequestLoadBalancer" in found["refused"]["routing"]
        and found["base"] == "UnsupportedHost"
    )


@pytest.mark.parametrize(
    "case", ["without_one_step_off", "with_an_exporting_package", "with_a_package"]
)
def test_what_moves_or_is_not_hooked_costs_nothing(
    case: str, reports: dict[str, Any]
) -> None:
    found = reports[case]
    assert (found["applied"], found["refused"]) == (reports["whole"]["applied"], {})
    assert found["base"].startswith("verl.workers.rollout.router")
