"""A part that a host lacks costs what it is for, and nothing else: what asks for it is
refused by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from host_copies import change, copy_of, remove

from das_adapter import compat, features, patching
from das_adapter.config import DasConfig
from das_adapter.engine import runner
from das_adapter.errors import ConfigError
from das_adapter.features import PARTS
from das_adapter.nemo_rl import checkpoint
from das_adapter.verl import hooks, settings

NAMES = {
    value
    for name, value in vars(features).items()
    if name.isupper() and isinstance(value, str)
}
ROUTER = "workers/rollout/router"


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    """A copy of the installed veRL, of which parts can be taken away."""
    return copy_of("verl", tmp_path)


def of(host: str) -> list[Any]:
    """Return the modules that a host may lack, and what is missing then, as cases."""
    return [
        pytest.param(module, PARTS[module], id=module)
        for module in PARTS
        if module.startswith(f"{host}.")
    ]


def test_every_feature_has_one_name() -> None:
    asked = {
        symbol.feature
        for host in (*compat.HOSTS.values(), compat.V2_COPY)
        for symbol in host.symbols
    }
    assert (
        asked - {""}
        == NAMES
        == {*PARTS.values(), *(patch.feature for patch in patching.patches())} - {""}
    )


@pytest.mark.parametrize(("module", "feature"), of("verl"))
def test_without_a_part_verl_has_all_that_every_run_needs(
    module: str, feature: str, verl: Path
) -> None:
    remove(verl, module)
    assert compat.missing("verl", verl) == []
    assert {feature} == set(compat.unavailable("verl", verl))


@pytest.mark.parametrize("build", ["installed", "newest"])
@pytest.mark.parametrize(("module", "feature"), of("vllm"))
def test_without_a_part_vllm_has_all_that_every_engine_needs(
    module: str, feature: str, build: str, tmp_path: Path
) -> None:
    vllm = copy_of("vllm", tmp_path, build)
    part = vllm.joinpath(*module.split(".")[1:])
    if not (part.is_dir() or part.with_suffix(".py").exists()):
        pytest.skip(f"the {build} vLLM has no {module}")
    remove(vllm, module)
    runner = compat.V2_RUNNER if build == "newest" else "vllm"
    assert compat.missing(runner, vllm) == []
    found = {*compat.unavailable("vllm", vllm), *(compat.unavailable(runner, vllm))}
    of_v2 = feature in (features.DFLASH, features.DSPARK)
    assert found == (set() if build == "installed" and of_v2 else {feature})


@pytest.mark.parametrize(("module", "feature"), of("nemo_rl"))
def test_without_a_part_nemo_rl_has_all_that_every_run_needs(
    module: str, feature: str, tmp_path: Path
) -> None:
    nemo_rl = copy_of("nemo_rl", tmp_path)
    remove(nemo_rl, module)
    assert compat.missing("nemo_rl", nemo_rl) == []
    assert {feature} == set(compat.unavailable("nemo_rl", nemo_rl))


@pytest.mark.parametrize("exported", [True, False])
def test_a_router_that_became_a_package_is_found(exported: bool, verl: Path) -> None:
    """As verl#6940 makes it one; with the class in the package itself as well, or in a
    part of it alone.
    """
    text = (verl / f"{ROUTER}.py").read_text()
    remove(verl, "verl.workers.rollout.router")
    (verl / ROUTER).mkdir()
    (verl / ROUTER / "base.py").write_text(text)
    imports = (
        "from verl.workers.rollout.router.base import GlobalRequestLoadBalancer\n"
        if exported
        else ""
    )
    (verl / ROUTER / "__init__.py").write_text(imports)
    assert compat.missing("verl", verl) == [] and compat.unavailable("verl", verl) == {}


def test_a_router_that_asks_for_other_arguments_routes_nothing(verl: Path) -> None:
    change(
        verl,
        f"{ROUTER}.py",
        r"(class GlobalRequest(?:.*\n)+?.*def release_server\(self, )server_id",
        r"\1replica",
    )
    assert compat.missing("verl", verl) == []
    (lacking,) = compat.unavailable("verl", verl)[features.ROUTING]
    assert str(lacking).endswith(
        "GlobalRequestLoadBalancer.release_server(server_id, request_id)"
    )


@pytest.fixture
def lacking(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[dict[str, list[compat.Symbol]]]:
    """What the hosts leave out, to be filled in."""
    found: dict[str, list[compat.Symbol]] = {}
    monkeypatch.setattr(compat, "unavailable", lambda *_: found)
    monkeypatch.setattr(compat, "require", lambda *_: None)
    monkeypatch.setattr(compat, "version", lambda *_: "9.9")
    monkeypatch.setattr(compat, "_warned", set())
    yield found


def leave_out(found: dict[str, list[compat.Symbol]], feature: str) -> None:
    found[feature] = [compat.Symbol("host.part", "Gone")]


def config(das: dict[str, Any], use_v1: bool = True, **more: Any) -> Any:
    """Return a veRL config with a block."""
    omegaconf = pytest.importorskip("omegaconf")
    rollout = {"name": "vllm", "custom": {"das": das}}
    return omegaconf.OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": rollout, "model": {}},
            "trainer": {"use_v1": use_v1},
            **more,
        }
    )


ASKED: dict[str, tuple[str, Any]] = {
    features.FULLY_ASYNC: (
        "async_training",
        config({"drafter": "history"}, async_training={}),
    ),
    features.V1_TRAINERS: ("trainer.use_v1=True", config({"drafter": "history"})),
    features.ROUTING: (
        f"{settings.BLOCK}.routing='least_loaded'",
        config({"routing": "least_loaded"}),
    ),
    features.RUN_AHEAD: (
        f"{settings.BLOCK}.history.run_ahead='auto'",
        config({"history": {"run_ahead": "auto"}}),
    ),
    features.V1_CHECKPOINTS: (
        f"{settings.BLOCK}.history.load=",
        config({"history": {"load": "/"}}),
    ),
    features.V0_CHECKPOINTS: (
        f"{settings.BLOCK}.history.load=",
        config({"history": {"load": "/"}}, use_v1=False),
    ),
}


@pytest.mark.parametrize("feature", ASKED)
def test_verl_is_refused_what_it_asks_for_by_name(
    feature: str, lacking: dict[str, list[compat.Symbol]]
) -> None:
    key, asks = ASKED[feature]
    leave_out(lacking, feature)
    message = re.escape(
        f"found verl 9.9 without host.part.Gone, which {feature} needs; allowed:"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}.*{message}"):
        settings.check(asks)
    others = (other for name, (_, other) in ASKED.items() if name != feature)
    if feature == features.FULLY_ASYNC:
        assert all(settings.check(other) for other in others)


@pytest.mark.parametrize(
    "feature", [features.ROUTING, features.V1_CHECKPOINTS, features.FIGURES]
)
def test_what_verl_has_by_default_it_goes_on_without_and_says_so_once(
    feature: str,
    lacking: dict[str, list[compat.Symbol]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    leave_out(lacking, feature)
    for _ in range(2):
        assert settings.check(config({"drafter": "history"}))
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING
    ]
    needs = (
        f"das: verl 9.9 without host.part.Gone, which {feature} needs: the run goes on"
        " without"
    )
    assert lines == [needs]


def test_a_run_goes_on_with_verls_own_balancer_where_it_is_not_the_known_one(
    lacking: dict[str, list[compat.Symbol]],
) -> None:
    leave_out(lacking, features.ROUTING)
    custom = SimpleNamespace(custom={"das": {"drafter": "history"}})
    manager = SimpleNamespace(rollout_config=custom, _load_balancer_cls=None)
    init = hooks.route_requests.replacement(lambda self: "stock")
    assert init(manager) == "stock"
    assert vars(manager)["_load_balancer_cls"] is None


@pytest.mark.parametrize(
    ("feature", "drafter", "v1"),
    [
        (features.V1_RUNNER, "history", "why"),
        (features.V1_DRAFTERS, "eagle3", "why"),
        (features.OWN_WEIGHTS, "eagle3", None),
        (features.DFLASH, "dflash", None),
        (features.DSPARK, "dspark", None),
    ],
)
def test_an_engine_is_refused_what_it_asks_for_by_name(
    feature: str,
    drafter: str,
    v1: str | None,
    lacking: dict[str, list[compat.Symbol]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(runner, "needs_v1", lambda _: v1)
    monkeypatch.setattr(runner, "hosted", lambda _: False)
    monkeypatch.setattr(compat, "missing", lambda _: [])
    args = SimpleNamespace(
        speculative_config=None, async_scheduling=None, load_format="auto"
    )
    for gone in (features.ENGINE_FIGURES, features.WEIGHT_CALLS, features.ADAPTERS):
        leave_out(lacking, gone)
    block = DasConfig.model_validate(
        {"drafter": drafter, "draft": {"model": "m"}} if drafter != "history" else {}
    )
    assert runner.runner_for(args, block).v1 == v1
    assert (
        len(
            [
                record
                for record in caplog.records
                if "goes on without" in record.getMessage()
            ]
        )
        == 3
    )
    leave_out(lacking, feature)
    with pytest.raises(
        ConfigError,
        match=f"found vllm 9.9 without host.part.Gone, which {feature} needs",
    ):
        runner.runner_for(args, block)


@pytest.mark.parametrize(
    ("feature", "algorithm", "more"),
    [
        (features.PPO, "nemo_rl.algorithms.ppo", {}),
        (features.DISTILLATION, "nemo_rl.algorithms.distillation", {}),
        (
            features.SINGLE_CONTROLLER,
            "nemo_rl.algorithms.single_controller_utils.setup",
            {},
        ),
        (
            features.DATA_PLANE,
            "nemo_rl.algorithms.grpo",
            {"data_plane": {"enabled": True}},
        ),
        (
            features.RUN_AHEAD,
            "nemo_rl.algorithms.grpo",
            {"history": {"run_ahead": "auto"}},
        ),
    ],
)
def test_nemo_rl_is_refused_what_it_asks_for_by_name(
    feature: str,
    algorithm: str,
    more: dict[str, Any],
    lacking: dict[str, list[compat.Symbol]],
) -> None:
    das = {"drafter": "history"} | {
        name: value for name, value in more.items() if name == "history"
    }
    policy = {"generation": {"backend": "vllm", "das": das}}
    leave_out(lacking, feature)
    with pytest.raises(
        ConfigError,
        match=f"found nemo_rl 9.9 without host.part.Gone, which {feature} needs",
    ):
        checkpoint.begin(SimpleNamespace(policy=policy, **more), None, algorithm)
