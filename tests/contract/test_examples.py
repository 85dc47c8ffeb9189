"""Every shipped veRL config and launch script fits veRL's own config classes, and its
das: block is sound.
"""

from __future__ import annotations

import asyncio
import copy
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

verl = pytest.importorskip("verl")
from hydra import compose, initialize_config_dir  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass, validate_config  # noqa: E402

from das_adapter.config import DasConfig  # noqa: E402
from das_adapter.errors import ConfigError  # noqa: E402
from das_adapter.verl import settings, training  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "verl"


def composed(name: str, overrides: list[str]) -> Any:
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        return compose(name, overrides=overrides)


def checked(config: Any) -> DasConfig | None:
    """What `main_ppo` does with a config before it starts anything; our hook is in
    `validate_config`.
    """
    if "async_training" in config:  # fully_async_main has no such check
        settings.check(config)
    else:
        validate_config(config=config, use_reference_policy=False, use_critic=False)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert settings.of_rollout(rollout) == settings.of_run(config)
    return settings.of_run(config)


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("grpo_*.yaml")), ids=lambda p: p.stem
)
def test_shipped_configs_parse_and_one_line_turns_them_off(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = composed(path.stem, [])
    off = copy.deepcopy(config)
    off.actor_rollout_ref.rollout.custom.das.drafter = "none"
    das = checked(config)
    assert das.drafter == "history"
    assert checked(off) is None


def test_the_launch_script_needs_nothing_but_overrides() -> None:
    text = (EXAMPLES / "run_qwen2_5_7b_gsm8k.sh").read_text()
    overrides = re.findall(r"^  (\S+=\S+) \\$", text, re.MULTILINE)
    assert len(overrides) > 15
    with initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None
    ):
        das = checked(
            compose(
                "ppo_trainer",
                overrides=[
                    o.replace('"', "").replace("$HOME", "/home/x") for o in overrides
                ],
            )
        )
    assert das == DasConfig()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["actor_rollout_ref.rollout.name=sglang"],
            "found actor_rollout_ref.rollout.name='sglang' beside it, allowed: 'vllm'",
        ),
        (
            [
                "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.method=ngram"
            ],
            "both choose a drafter",
        ),
        (
            ["+actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling=true"],
            "async_scheduling=True, which vLLM",
        ),
        (
            [
                "actor_rollout_ref.model.mtp.enable=true",
                "actor_rollout_ref.model.mtp.enable_rollout=true",
            ],
            "both choose",
        ),
    ],
)
def test_contradictions_stop_the_run_at_start(
    overrides: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # V2 schedules asynchronously beside every drafter
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = composed("grpo_tiny_math_cpu", overrides)
    with pytest.raises(ConfigError, match=re.escape(words)):
        checked(config)


def server_class(overrides: list[str], **kind: bool) -> str:
    """Name of the server class that veRL would start for the example's rollout."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    config = omega_conf_to_dataclass(
        composed("grpo_tiny_math_cpu", overrides).actor_rollout_ref.rollout
    )
    replica = RolloutReplicaRegistry.get("vllm")(
        0, config, None, gpus_per_node=1, **kind
    )
    name: str = replica.server_class.__ray_metadata__.class_name
    return name


@pytest.mark.parametrize(
    "override",
    [
        "~actor_rollout_ref.rollout.custom",
        "actor_rollout_ref.rollout.custom.das.drafter=none",
    ],
)
def test_without_an_active_block_verl_gets_its_own_server(override: str) -> None:
    assert server_class([override]) == "vLLMHttpServer"


def test_only_the_policy_gets_our_server() -> None:
    assert server_class([]) == "DasVLLMHttpServer"
    assert server_class([], is_reward_model=True) == "vLLMHttpServer"
    assert server_class([], is_teacher_model=True) == "vLLMHttpServer"


@pytest.mark.parametrize("known", [True, False])
def test_weights_that_come_without_a_step_are_of_the_trainers_or_counted(
    known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with DAPO's trainer, and in a validation after a reward model has had the GPU.
    A rollout's figures are reported when it ends: replicas that are lent hear of no
    weight sync while they sleep.
    """
    trainer = SimpleNamespace()
    monkeypatch.setattr(training, "trainer", trainer if known else None)
    synced, reported = weight_syncs(
        monkeypatch,
        trainer,
        [(4, None), (5, 5), (5, None), (6, None), (7, None)],
        das={},
    )
    assert synced == ([4, 5, 5, 6, 7] if known else [0, 5, 6, 7, 8])
    assert reported == [1, *(version + 1 for version in synced[:-1])]
    said = [
        record
        for record in caplog.records
        if "call update_weights(global_steps)" in record.message
    ]
    assert len(said) == (not known)


def test_weights_of_no_step_stay_so_for_engines_without_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = SimpleNamespace()
    monkeypatch.setattr(training, "trainer", trainer)
    assert weight_syncs(monkeypatch, trainer, [(4, None), (5, 5)]) == ([5], [1, 1])


def weight_syncs(
    monkeypatch: pytest.MonkeyPatch,
    trainer: Any,
    steps: list[tuple[int, int | None]],
    **custom: Any,
) -> tuple[list[int], list[int]]:
    """The weight versions to which a server's session syncs, and the steps to which it
    reports, when veRL's manager sends weights in `steps`: the trainer's, and what it
    says of it.
    """
    from verl.checkpoint_engine import base
    from verl.workers.rollout.replica import RolloutMode

    from das_adapter.service.run_ahead import AheadRequests
    from das_adapter.verl.server import DasVLLMHttpServer

    async def sync(global_steps: int | None) -> None:
        """As veRL's `ActorRolloutRefWorker.update_weights` and
        `ServerAdapter.update_weights`.
        """
        await server.wake_up(["weights"])
        if global_steps is not None:
            await server.set_global_steps(global_steps)
        await server.wake_up(["kv_cache"])

    def update_weights(
        global_steps: int | None, mode: str
    ) -> None:  # in another process
        with ThreadPoolExecutor(1) as threads:
            threads.submit(asyncio.run, sync(global_steps)).result()

    synced = list[int]()
    reported = list[int]()
    session = SimpleNamespace(
        sync=lambda version, report: synced.append(version), report=reported.append
    )
    server = object.__new__(DasVLLMHttpServer)
    vars(server).update(
        node_rank=0,
        rollout_mode=RolloutMode.STANDALONE,
        config=SimpleNamespace(free_cache_engine=True),
    )
    vars(server).update(
        _session=session,
        _start_order=None,
        _aside=AheadRequests(server.abort_request),
        global_steps=None,
    )
    manager = object.__new__(base.CheckpointEngineManager)
    workers = SimpleNamespace(update_weights=update_weights)
    vars(manager).update(
        backend="naive",
        actor_wg=workers,
        replicas=[SimpleNamespace(config={"custom": custom})],
    )
    monkeypatch.setattr(base.ray, "get", lambda done: done)
    for trainer.global_steps, said in steps:
        asyncio.run(server.sleep())
        manager.update_weights(*([] if said is None else [said]))
    return synced, reported


def test_the_end_of_a_rollout_does_not_wait_for_what_is_written_ahead() -> None:
    """Engines of several data-parallel ranks are asked whether they are done before
    they sleep.
    """
    from das_adapter.service.run_ahead import AheadRequests
    from das_adapter.verl.server import DasVLLMHttpServer

    async def check() -> None:
        aborted = asyncio.Event()

        async def abort(_: Any) -> None:
            aborted.set()

        async def endless() -> tuple[list[int], bool]:
            await aborted.wait()
            return [1], False

        aside = AheadRequests(abort)
        server = object.__new__(DasVLLMHttpServer)
        with aside.request():
            pass  # the rollout has begun, and this engine has nothing left
        writing = asyncio.create_task(aside.write(endless))
        await asyncio.sleep(0)
        vars(server).update(
            _aside=aside,
            engine=SimpleNamespace(wait_for_requests_to_drain=lambda: writing),
        )
        await asyncio.wait_for(server.wait_for_requests_to_drain(), 10)
        assert writing.result() == ([1], False)

    asyncio.run(check())
