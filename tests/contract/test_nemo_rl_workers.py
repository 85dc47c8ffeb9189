"""What das-adapter relies on in NeMo-RL, which is in no package registry: put a
checkout on PYTHONPATH to run these.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip(
    "nemo_rl",
    reason="NeMo-RL is not importable: put a checkout of NVIDIA-NeMo/RL on PYTHONPATH",
)
pytest.importorskip("vllm")
# prepares this process, so it comes before NeMo-RL
pytest.importorskip("das_adapter.cpu.nemo_rl_worker")
import nemo_rl
import ray
import torch
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.data.multimodal_utils import PackedTensor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.vllm import vllm_generation
from nemo_rl.models.generation.vllm.config import VllmConfig
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf
from vllm import CompletionOutput, RequestOutput, SamplingParams

from das_adapter import compat
from das_adapter.core import tuning
from das_adapter.core.identity import prompt_identity
from das_adapter.core.index import SuffixIndex
from das_adapter.core.length import ExpectedLengths
from das_adapter.core.routing import Replicas, distribute_batch
from das_adapter.errors import UnsupportedHost
from das_adapter.nemo_rl import install, settings
from das_adapter.nemo_rl.engine_hooks import REFITS, AsyncEngineHooks, SyncEngineHooks
from das_adapter.protocol.label import Label, Labeller
from das_adapter.protocol.messages import Refresh
from das_adapter.reports import run_logs

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = Path(nemo_rl.__file__).parents[1]
RECIPES = sorted((ROOT / "configs/nemo_rl/recipes").glob("*.yaml"))


def composed(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NEMO_RL_DIR", str(CHECKOUT))
    register_omegaconf_resolvers()
    return MasterConfig(**OmegaConf.to_container(load_config(path), resolve=True))


def generation(**das: Any) -> dict[str, Any]:
    return {
        "backend": "vllm",
        "das": {"drafter": "history", **das},
        "vllm_cfg": {},
        "vllm_kwargs": {},
    }


def test_every_symbol_we_stand_on_is_there() -> None:
    assert compat.missing("nemo_rl") == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipes_parse_and_are_named_after_their_content(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed(path, monkeypatch)
    das = settings.check(config.policy["generation"])
    assert das is not None and das.drafter == "history"
    assert (
        config.logger["wandb"]["name"]
        == path.stem
        == Path(config.checkpointing["checkpoint_dir"]).name
    )
    assert (
        f"-{config.cluster['num_nodes']}n{config.cluster['gpus_per_node']}g-"
        in path.stem
    )
    assert config.grpo.async_grpo.enabled == ("async" in path.stem)
    batch = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    assert config.policy["train_global_batch_size"] == batch


def test_installing_twice_changes_nothing_more() -> None:
    install.install()
    grpo = sys.modules["nemo_rl.algorithms.grpo"]
    once = (
        vllm_generation.resolve_generation_worker_cls,
        grpo.VllmGeneration,
        grpo.validate,
    )
    install.install()
    assert once == (
        vllm_generation.resolve_generation_worker_cls,
        grpo.VllmGeneration,
        grpo.validate,
    )
    assert grpo.VllmGeneration.__name__ == "DasVllmGeneration"


def test_without_an_active_block_the_workers_are_stock() -> None:
    install.install()
    for stock, ours in install.WORKERS.items():
        assert (
            vllm_generation.resolve_generation_worker_cls(stock, generation()) == ours
        )
        assert (
            vllm_generation.resolve_generation_worker_cls(
                stock, generation(drafter="none")
            )
            == stock
        )
        assert (
            vllm_generation.resolve_generation_worker_cls(stock, {"vllm_kwargs": {}})
            == stock
        )


def test_ray_can_ship_our_workers() -> None:
    from das_adapter.nemo_rl.workers import (
        DasAsyncGenerationWorker,
        DasGenerationWorker,
    )

    for worker in (DasGenerationWorker, DasAsyncGenerationWorker):
        assert ray.cloudpickle.dumps(worker.__ray_metadata__.modified_class)


def test_our_workers_run_in_the_environment_of_the_stock_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where NeMo-RL has built it, and whatever directory the driver and Ray's
    nodes were started in.
    """
    from nemo_rl.distributed import ray_actor_environment_registry as environments
    from nemo_rl.utils import venvs

    monkeypatch.setattr(venvs, "DEFAULT_VENV_DIR", str(tmp_path / "checkout/venvs"))
    monkeypatch.delenv("NEMO_RL_VENV_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    for stock, ours in install.WORKERS.items():
        monkeypatch.delitem(
            environments.ACTOR_ENVIRONMENT_REGISTRY, ours, raising=False
        )
        install.install()
        assert environments.get_actor_python_env(
            ours
        ) == environments.get_actor_python_env(stock)
        monkeypatch.setitem(
            environments.ACTOR_ENVIRONMENT_REGISTRY, stock, "uv run --locked"
        )
        for folder, variable in (("checkout/venvs", None), ("mine", "mine")):
            python = tmp_path / folder / stock / "bin/python"
            python.parent.mkdir(parents=True)
            python.touch()
            if variable:
                monkeypatch.setenv("NEMO_RL_VENV_DIR", variable)
            install.install()
            assert environments.get_actor_python_env(ours) == str(python)
        monkeypatch.setitem(
            environments.ACTOR_ENVIRONMENT_REGISTRY, stock, sys.executable
        )
        install.install()  # as under NEMO_RL_PY_EXECUTABLES_SYSTEM
        assert environments.get_actor_python_env(ours) == sys.executable
        monkeypatch.delenv("NEMO_RL_VENV_DIR")


def test_every_refit_of_the_host_is_known() -> None:
    """Weights reach an engine through `collective_rpc` alone; a method that NeMo-RL
    adds must be listed.
    """
    sources = (CHECKOUT / "nemo_rl/models/generation/vllm").rglob("*.py")
    pattern = r'"((?:update_weights|nccl_reshard_refit|finish_sparse)\w*)"'
    called = {
        name for path in sources for name in re.findall(pattern, path.read_text())
    }
    # a part of a refit, finished by finish_sparse...
    called.remove("update_weights_from_decoded_sparse_payload")
    engine_side = {name for name in called if not name.endswith("_async")}
    assert engine_side == REFITS


class Engine:
    """Stands where a synchronous or asynchronous engine stands, whose requests finish
    at once.
    """

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.params: list[SamplingParams] = []
        self.llm_engine = SimpleNamespace(step=lambda: None)

    def _answer(self, prompt: Any, params: SamplingParams) -> RequestOutput:
        self.params.append(params)
        sample = CompletionOutput(0, "", [7, 8, 9], None, None, finish_reason="stop")
        return RequestOutput(
            "id", None, prompt["prompt_token_ids"], None, [sample], finished=True
        )

    def generate(
        self, prompts: list[Any], params: list[SamplingParams], **_: Any
    ) -> list[RequestOutput]:
        return [
            self._answer(prompt, p) for prompt, p in zip(prompts, params, strict=True)
        ]

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        self.calls.append((method, *args))
        return [{"tokens": 0, "history_tokens": 0}]


class AsyncEngine(Engine):
    def __init__(self) -> None:
        super().__init__()
        self.priorities: list[int] = []

    async def generate(  # type: ignore[override]
        self, prompt: Any, params: SamplingParams, request_id: str, priority: int = 0
    ) -> Any:
        self.priorities.append(priority)
        yield self._answer(prompt, params)

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = ()
    ) -> list[Any]:  # type: ignore[override]
        return super().collective_rpc(method, args=args)


def refreshed(engine: Engine) -> list[Refresh]:
    return [
        Refresh(**call[2])
        for call in engine.calls
        if call[:2] == ("das_rpc", "refresh")
    ]


def written(history: tuple[str, int]) -> int:
    """Tokens of a published history."""
    index = SuffixIndex.attach(history[0])
    index.refresh(history[1])
    return index.tokens


def block() -> Any:
    return settings.of_generation(generation())


@pytest.fixture
def ray_here(ray_address: str) -> Iterator[None]:
    """A job of its own, with a ledger and histories of its own."""
    ray.init(ray_address, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_refit_brings_the_engine_what_was_written_and_other_calls_do_not(
    ray_here: None,
) -> None:
    engine = Engine()
    front = SyncEngineHooks(engine, block(), source="1")
    front.start()
    engine.generate([{"prompt_token_ids": [1, 2]}] * 2, SamplingParams())
    front.validating = True
    engine.generate([{"prompt_token_ids": [1, 2]}], SamplingParams())
    for method in (
        "prepare_refit_info",
        "update_weights_via_ipc_zmq",
        "finish_sparse_delta_refit",
    ):
        engine.collective_rpc(method)
    first, second = refreshed(engine)
    assert (first.version, second.version) == (1, 2)
    assert first.responses.tolist() == [(prompt_identity([1, 2]), 3, 0)] * 2
    assert not second.lengths
    assert written(first.history) == 6
    sent = [Label.of(params.extra_args) for params in engine.params]
    assert len({label.seed for label in sent}) == 3
    assert [label.record for label in sent] == [True, True, False]
    assert [report["weight_version"] for report in front.report()] == [2]


def test_requests_that_come_past_the_driver_are_harvested_too(ray_here: None) -> None:
    """NeMo-Gym's requests reach the engine over HTTP, without labels, and some ask for
    several samples.
    """

    async def serve() -> Refresh:
        front = AsyncEngineHooks(engine, block(), source="3")
        await front.start()
        for params in (SamplingParams(), SamplingParams(n=2, seed=5)):
            async for _ in engine.generate({"prompt_token_ids": [1, 2]}, params, "id"):
                pass
        await engine.collective_rpc("update_weights_from_collective")
        return refreshed(engine)[0]

    engine = AsyncEngine()
    message = asyncio.run(serve())
    assert message.responses.tolist() == [(prompt_identity([1, 2]), 3, 0)] * 2
    assert written(message.history) == 6
    one, several = engine.params
    assert Label.of(one.extra_args).seed is not None
    assert Label.of(several.extra_args).seed is None and several.seed == 5


def test_a_rollout_actors_validation_is_one_whatever_its_labels_say(
    ray_here: None,
) -> None:
    """NeMo-RL's `validate_sync` has an actor generate, with a copy of the driver's
    generation.
    """

    def told(on: bool, **alone: bool) -> None:
        Worker.das_validation(SimpleNamespace(hooks=front), on, **alone)

    def validate(**_: Any) -> None:
        asyncio.run(ask())

    async def ask() -> None:
        engine_hooks.labels.set([Label(7, 5)])
        async for _ in engine.generate(
            {"prompt_token_ids": [1, 2]}, SamplingParams(), "id"
        ):
            pass

    from das_adapter.nemo_rl import engine_hooks, generation
    from das_adapter.nemo_rl.workers import DasAsyncGenerationWorker

    Worker = DasAsyncGenerationWorker.__ray_metadata__.modified_class
    engine = AsyncEngine()
    front = AsyncEngineHooks(engine, block(), source="5")
    asyncio.run(front.start())
    live = SimpleNamespace(set_validating=told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "generations", [live])
        for arguments in ({"rollout_actor": "of grpo_sync"}, {}):
            install.mark_validation.replacement(validate)(**arguments)
            validate()
    labels = [Label.of(params.extra_args) for params in engine.params]
    assert [label.record for label in labels] == [False, True, True, True]
    assert {label.seed for label in labels} == {5}


def test_an_engine_with_a_loop_of_its_own_is_called_on_it(
    ray_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo-RL 0.8's `vllm_cfg.engine_owner_loop`: the engine is made and called on a
    loop that is not the actor's.
    """
    own = asyncio.new_event_loop()
    threading.Thread(target=own.run_forever, daemon=True).start()

    class OwnedEngine(AsyncEngine):
        async def collective_rpc(
            self, method: str, args: tuple[Any, ...] = ()
        ) -> list[Any]:  # type: ignore[override]
            assert asyncio.get_running_loop() is own
            return await super().collective_rpc(method, args=args)

    def create_engine(worker: Any, llm_kwargs: dict[str, Any]) -> None:
        worker.llm = engine
        worker._engine_owner_loop = SimpleNamespace(loop=own)

    async def on_the_actors_loop() -> None:
        await worker.hooks.start()
        # NeMo-RL calls it there, too
        refit = engine.collective_rpc("update_weights_from_collective")
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(refit, own))
        assert [report["weight_version"] for report in await worker.das_report()] == [1]

    from nemo_rl.models.generation.vllm.vllm_worker_async import (
        VllmAsyncGenerationWorkerImpl,
    )

    from das_adapter.nemo_rl.workers import DasAsyncGenerationWorker

    Worker = DasAsyncGenerationWorker.__ray_metadata__.modified_class
    monkeypatch.setattr(VllmAsyncGenerationWorkerImpl, "_create_engine", create_engine)
    engine = OwnedEngine()
    worker = Worker.__new__(Worker)
    worker.cfg = generation()
    worker._create_engine({})
    asyncio.run(on_the_actors_loop())
    own.call_soon_threadsafe(own.stop)
    assert [call[1] for call in engine.calls if call[0] == "das_rpc"] == [
        "hello",
        "refresh",
        "stats",
    ]


def test_what_nemo_rls_tensorboard_logger_writes_can_be_compared(
    tmp_path: Path,
) -> None:
    from nemo_rl.utils.logger import TensorboardLogger

    logger = TensorboardLogger({}, log_dir=str(tmp_path))
    logger.log_hyperparams({"grpo": {"max_num_steps": 2}})
    logger.log_metrics(
        {"das/token_hash": 7.0, "reward": 0.5, "histogram/lengths": [1, 2]},
        1,
        prefix="train",
    )
    logger.log_metrics(
        {"generation": 2.5}, 1, prefix="timing/train", step_finished=True
    )
    logger.writer.close()
    read = run_logs.read(tmp_path)
    assert (
        read.steps
        == {1: {"das/token_hash": 7.0, "reward": 0.5, "timing/train/generation": 2.5}}
        and not read.exact
    )


def test_every_trainer_of_nemo_rl_times_its_wait_under_those_names() -> None:
    for module in ("grpo", "grpo_sync", "ppo", "distillation", "single_controller"):
        source = (CHECKOUT / f"nemo_rl/algorithms/{module}.py").read_text()
        assert re.search(r'timer\.time\("(exposed_)?generation"\)', source), module
        assert re.search(r'prefix="timing/train"', source), module


def test_of_which_trainers_no_figures_are_logged() -> None:
    def config(asynchronous: bool) -> Any:
        return SimpleNamespace(
            ppo=SimpleNamespace(async_ppo=SimpleNamespace(enabled=asynchronous))
        )

    for module, trainer, setup in (
        ("grpo", "grpo_train", "grpo"),
        ("grpo", "async_grpo_train", "grpo"),
        ("grpo_sync", "grpo_train_sync", "grpo"),
        ("ppo", "ppo_train", "ppo"),
        ("ppo", "async_ppo_train", "ppo"),
        ("distillation", "distillation_train", "distillation"),
        ("single_controller", "", "single_controller_utils.setup"),
    ):
        source = (CHECKOUT / f"nemo_rl/algorithms/{module}.py").read_text()
        text = (
            source.partition(f"\ndef {trainer}(")[2].partition("\ndef ")[0]
            if trainer
            else source
        )
        asks = settings.logs_figures(
            f"nemo_rl.algorithms.{setup}", config(trainer == "async_ppo_train")
        )
        assert text and asks == (".get_step_metrics()" in text), trainer


def test_a_host_without_our_plug_in_is_told_so(ray_here: None) -> None:
    engine = Engine()
    engine.collective_rpc = lambda *_, **__: [][0]  # type: ignore[method-assign]
    with pytest.raises(UnsupportedHost, match="entry point"):
        SyncEngineHooks(engine, block(), source="1").start()


def test_one_sample_of_a_group_leads_and_older_requests_go_first(
    ray_here: None,
) -> None:
    async def serve() -> list[int]:
        front = AsyncEngineHooks(engine, block(), source="4")
        await front.start()

        async def write(prompt: int, samples: int) -> None:
            for _ in range(samples):
                async for _ in engine.generate(
                    {"prompt_token_ids": [prompt]}, SamplingParams(), "id"
                ):
                    pass

        await write(1, 4)  # a group's size is seen
        await write(2, 4)
        await engine.collective_rpc("update_weights_from_collective")
        await write(3, 1)
        return engine.priorities[4:]

    engine = AsyncEngine()
    leader, *followers, later = asyncio.run(serve())
    assert leader < min(followers) == max(followers) < later


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_a_planned_batch_comes_back_in_its_own_order(workers: int) -> None:
    from das_adapter.nemo_rl.generation import PlannedBatch

    problems = [1, 1, 2, 2, 3, 3, 4]
    data = BatchedDataDict(
        {"input_ids": torch.arange(7)[:, None], "names": [str(i) for i in range(7)]}
    )
    data["pixel_values"] = PackedTensor(
        [torch.full((2, 3), i) for i in range(7)], dim_to_pack=0
    )
    shares = distribute_batch(problems, ExpectedLengths({3: 50.0, 2: 5.0}), workers)
    shards = PlannedBatch(data, shares).shard_by_batch_size(
        workers, allow_uneven_shards=True
    )
    assert [shard.get("names", []) for shard in shards] == [
        [str(row) for row in rows] for rows in shares
    ]
    # NeMo-RL's worker answers an empty share with empty tensors of no width
    empty: dict[str, Any] = {
        "input_ids": torch.zeros((0, 0), dtype=torch.long),
        "names": [],
    }
    combined = BatchedDataDict.from_batches(
        [s if len(s["input_ids"]) else empty for s in shards]
    )
    back = combined.select_indices(
        torch.argsort(torch.tensor([row for rows in shares for row in rows]))
    )
    assert back["input_ids"].flatten().tolist() == list(range(7))
    assert back["names"] == data["names"]
    assert back["pixel_values"].as_tensor()[::2, 0].tolist() == list(range(7))


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a generation that returns the last token of the rows that 16 workers get,
    by default the problem, of which there are 8 with 8 rows each. Responses are what
    follows the prompts in `input_ids`.
    """
    from das_adapter.nemo_rl import generation as ours

    def generated(method: str, data: list[Any], **_: Any) -> list[Any]:
        shared.append([shard["input_ids"][:, -1].tolist() for shard in data])
        names = ("output_ids", "generation_lengths", "logprobs")
        lengths = [
            torch.tensor([len(row) for row in shard["input_ids"]], dtype=torch.long)
            for shard in data
        ]
        return [
            BatchedDataDict(
                {name: shard["input_ids"] for name in names}
                | {"unpadded_sequence_lengths": texts}
            )
            for shard, texts in zip(data, lengths, strict=True)
        ]

    def dispatch(experts: int = 1) -> Any:
        config = composed(
            next(path for path in RECIPES if "async" not in path.stem), monkeypatch
        ).policy["generation"]
        config["vllm_cfg"] |= {
            "tensor_parallel_size": 1,
            "expert_parallel_size": experts,
        }
        config |= {"model_name": "", "_pad_token_id": 0}
        made = ours.DasVllmGeneration(cluster, config)

        def shares(**columns: Any) -> list[list[int]]:
            prompts = torch.tensor(
                [[1, prompt] for prompt in range(8)]
            ).repeat_interleave(8, dim=0)
            batch = BatchedDataDict(
                {"input_ids": prompts, "input_lengths": torch.full((64,), 2), **columns}
            )
            assert torch.equal(made.generate(batch)["output_ids"], batch["input_ids"])
            return shared.pop()

        return shares

    shared: list[list[list[int]]] = []
    lengths = ExpectedLengths(
        {prompt_identity([1, prompt]): 10.0**prompt for prompt in range(8)}
    )
    workers = SimpleNamespace(
        dp_size=16,
        run_all_workers_single_data=lambda *_, **__: [],
        run_all_workers_sharded_data=generated,
        get_all_worker_results=list,
        shutdown=lambda **_: True,
    )
    monkeypatch.setattr(vllm_generation, "RayWorkerGroup", lambda *_, **__: workers)
    monkeypatch.setattr(vllm_generation.ray, "get", list)
    monkeypatch.setattr(ours.ledger, "ledger", lambda: None)
    monkeypatch.setattr(ours.ledger, "expected_lengths", lambda timeout_s: lengths)
    cluster = SimpleNamespace(
        world_size=lambda: 16,
        num_gpus_per_node=8,
        _init_placement_groups=lambda **_: None,
    )
    return dispatch


STOCK = [[prompt] * 4 for prompt in range(8) for _ in range(2)]


@pytest.mark.parametrize("experts", [1, 4])
def test_ranks_that_share_experts_have_rows_each(
    experts: int, dispatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """NeMo-RL's worker answers an empty share without a step of its engine, and vLLM's
    data-parallel ranks step together: those with rows would wait for ever.
    """
    shares = dispatch(experts)
    for _ in range(2):
        assert ([] in shares()) == (experts == 1)
    assert caplog.text.count(
        "workers share experts and step together: NeMo-RL divides"
    ) == (experts > 1)


@pytest.mark.parametrize(
    ("some", "others"),
    [(None, ["</code>"]), (["a", "b"], ["b"]), (["a", "b"], ["b", "a"]), (None, [])],
)
def test_what_a_row_stops_at_does_not_depend_on_the_plan(
    some: Any, others: Any, dispatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """NeMo-RL's synchronous worker ends its responses at the stop strings of all its
    rows.
    """
    shares = dispatch()
    differ = set(some or ()) != set(others or ())
    for _ in range(2):
        assert (shares(stop_strings=[some] * 8 + [others] * 56) == STOCK) == differ
    assert caplog.text.count("differ in their stop strings") == differ


def test_the_turns_of_a_trajectory_are_on_one_worker_each_step(dispatch: Any) -> None:
    """Its prefix is cached there. NeMo-RL asks for each turn of all trajectories that
    go on, in one batch.
    """
    shares = dispatch()

    def step(*goes_on: float) -> list[dict[int, int]]:
        """Return the worker of each row, in turns that so large a part of the rows
        has.
        """
        workers = []
        for turn, part in enumerate(goes_on):
            rows = [row for row in range(64) if row % 10 < 10 * part]
            ids = torch.tensor(
                [[1, row // 8, *[100 + row] * (turn + 1)] for row in rows]
            )
            found = shares(
                input_ids=ids, input_lengths=torch.full((len(rows),), 2 + turn)
            )
            workers.append(
                {row - 100: worker for worker, rows in enumerate(found) for row in rows}
            )
        return workers

    for first, *later in step(1, 0.9, 0.5, 0.1), step(1, 0.2), step(1):
        # also groups that are divided
        assert len(first) == 64 and len(set(first.values())) > 8
        for turn in later:
            assert turn and turn.items() <= first.items()


def workerless(labeller: Labeller, replicas: Replicas) -> Any:
    """A generation that has no workers."""
    from das_adapter.nemo_rl.generation import DasVllmGeneration

    class Generation(DasVllmGeneration):
        def __init__(self) -> None:
            self.das = block()
            self._labeller = labeller
            self._validating = False
            self._longest_first = True
            self._expected_until = math.inf
            self._replicas = replicas
            self.fleet_selector = None
            self.worker_group = SimpleNamespace(dp_size=4)

        def __del__(self) -> None:
            """It has no workers."""

    return Generation()


def test_batches_that_are_generated_in_threads_at_once_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As NeMo-RL's trajectory collector does: one thread for each training step to
    come.
    """

    async def stock(
        self: Any, data: Any, greedy: bool = False
    ) -> AsyncIterator[tuple[int, Any]]:
        await asyncio.sleep(0)
        yield 0, data

    async def write(first: int) -> list[Label]:
        async def one(prompt: int) -> Label:
            row = BatchedDataDict(
                {
                    "input_ids": torch.tensor([[prompt, prompt]]),
                    "input_lengths": torch.tensor([2]),
                }
            )
            async for _, result in made.generate_async(row):
                found = result[settings.LABELS][0]
            return found

        return await asyncio.gather(
            *(one(first + number // 2) for number in range(800))
        )

    monkeypatch.setattr(vllm_generation.VllmGeneration, "generate_async", stock)
    replicas = Replicas(range(4))
    made = workerless(Labeller(0), replicas)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            batches = list(
                threads.map(lambda first: asyncio.run(write(first)), (0, 200, 400, 600))
            )
    finally:
        sys.setswitchinterval(before)
    assert len({label.seed for batch in batches for label in batch}) == 4 * 800
    assert all(replicas.load(worker) == (0, 0) for worker in range(4))


def test_where_fleet_health_chooses_the_workers_routing_says_so_and_counts_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def stock(
        self: Any, data: Any, greedy: bool = False
    ) -> AsyncIterator[tuple[int, Any]]:
        yield self._next_dp_shard_idx(), [replicas.load(worker) for worker in range(4)]

    async def asked() -> list[tuple[int, Any]]:
        row = BatchedDataDict(
            {"input_ids": torch.tensor([[1, 2]]), "input_lengths": torch.tensor([2])}
        )
        return [answer for _ in range(3) async for answer in made.generate_async(row)]

    monkeypatch.setattr(vllm_generation.VllmGeneration, "generate_async", stock)
    replicas = Replicas(range(4))
    made = workerless(Labeller(0), replicas)
    idle = [(0.0, 0.0)] * 4
    made.attach_fleet_health(
        SimpleNamespace(shard_count=4), SimpleNamespace(next_shard=lambda: 3)
    )
    assert asyncio.run(asked()) == [(3, idle)] * 3
    assert caplog.text.count("async_rl.generation_fleet_health") == 1


def test_a_worker_whose_trajectories_wait_for_a_tool_is_not_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "REPLICA_QUIET_S", 1e9)
    labeller = Labeller(0)
    replicas = Replicas(range(2))
    problems = [
        labeller.label([prompt], validate=False).problem or 0 for prompt in (1, 2)
    ]
    assert [replicas.pick(problem) for problem in problems] == [0, 1]
    replicas.remove_request(0, problems[0])
    made = workerless(labeller, replicas)
    assert made.lend(1) == [0]
    labeller.label([1, 3], validate=False)
    assert made.lend(1) == []


def test_speculation_ends_a_response_where_a_plain_run_does() -> None:
    """NeMo-RL's clamp sees the drafter in `vllm_kwargs.speculative_config` only; ours
    is in the block.
    """
    from nemo_rl.models.generation.vllm.vllm_worker import (
        BaseVllmGenerationWorker as Worker,
    )

    limits = {
        "configured_max_new_tokens": 640,
        "input_length": 40,
        "max_model_len": 640,
        "cap_to_context": True,
    }
    assert Worker._request_max_new_tokens(**limits, spec_lookahead=0) == 600
    # what it would cost
    assert Worker._request_max_new_tokens(**limits, spec_lookahead=16) == 583
    config = load_config(ROOT / "configs/nemo_rl/das.yaml").policy.generation
    assert "speculative_config" not in config.vllm_kwargs
    assert config.vllm_cfg.cap_max_tokens_to_context is True


def test_the_patch_for_the_worker_key_applies_or_is_no_longer_needed(
    tmp_path: Path,
) -> None:
    patch = ROOT / "patches/nemo_rl/0001-worker-extension-cls-fqn.patch"
    needed = "worker_extension_cls_fqn" not in VllmConfig.__annotations__
    files = re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((CHECKOUT / name).read_bytes())
    apply = subprocess.run(
        ["git", "apply", str(patch)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert needed, (
        f"NeMo-RL has the key: remove {patch.name} and its row in"
        " patches/nemo_rl/README.md"
    )
    assert apply.returncode == 0, apply.stderr
    assert (
        "worker_extension_cls_fqn"
        in (tmp_path / "nemo_rl/models/generation/vllm/config.py").read_text()
    )


UPSTREAM = """fleet_health generation_router vllm_backend vllm_chat_template_wiring vllm_checkpoint_engine
    vllm_collective_rpc vllm_fp8_hf_overrides vllm_logprobs_mode vllm_message_queue_port vllm_nixl_worker
    vllm_refit_layout vllm_refit_loader vllm_shard_selection vllm_sparse_delta vllm_sparse_refit
    vllm_spec_decode_clamp vllm_tcpstore_port vllm_utils vllm_worker_helpers""".split()
"""NeMo-RL's unit tests of vLLM generation that need no GPU, no model and none of its
fixtures.
"""

DOWNLOADS_A_MODEL = (
    "test_vllm_logprobs_mode.py::test_processed_logprobs_matches_manual_computation"
)


def test_nemo_rls_own_tests_pass_with_the_adapter_installed() -> None:
    tests = CHECKOUT / "tests/unit/models/generation"
    if not tests.is_dir():
        pytest.skip(f"{CHECKOUT} is not a whole checkout: it has no tests")
    here = Path(__file__).parent
    paths = [str(here), str(CHECKOUT), str(CHECKOUT / "tests"), str(tests)]
    options = (
        "-p nemo_rl_installed -p no:cacheprovider --noconftest --asyncio-mode=auto"
        " --deselect".split()
    )
    files = [f"test_{name}.py" for name in UPSTREAM]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            "--rootdir",
            tests,
            *options,
            DOWNLOADS_A_MODEL,
            *files,
        ],
        cwd=tests,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) > 200, run.stdout[-2000:]
