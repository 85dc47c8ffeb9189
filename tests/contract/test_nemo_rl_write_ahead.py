"""NeMo-RL's own generation and data loader, around workers whose answers a test
chooses: an idle one writes ahead, with the noise of the requests of the next steps, and
these bring it along. And the hooks of a worker's engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip(
    "nemo_rl",
    reason="NeMo-RL is not importable: put a checkout of NVIDIA-NeMo/RL on PYTHONPATH",
)
pytest.importorskip("vllm")
# prepares this process, so it comes before NeMo-RL
pytest.importorskip("das_adapter.cpu.nemo_rl_worker")
import ray
import torch
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rollouts import async_generate_response_for_sample_turn
from nemo_rl.models.generation.vllm import vllm_generation
from torchdata.stateful_dataloader import StatefulDataLoader
from vllm import CompletionOutput, RequestOutput, SamplingParams

from das_adapter.nemo_rl import settings
from das_adapter.nemo_rl.checkpoint import begin
from das_adapter.nemo_rl.engine_hooks import AsyncEngineHooks, labels
from das_adapter.nemo_rl.generation import DasVllmGeneration
from das_adapter.nemo_rl.install import look_ahead
from das_adapter.protocol.label import Label
from das_adapter.service import run_ahead

STEPS = 4
BATCH = 2
SAMPLES = 2
LENGTH = 6


def answer(label: Label) -> list[int]:
    """The response to a request: it follows from its seed alone."""
    return [30 + (label.seed or 0) // 8**i % 8 for i in range(LENGTH)]


@dataclass
class Asked:
    """What a worker was asked."""

    worker: int
    prompt: list[int]
    label: Label
    running: int
    """Requests that the worker had."""


class Workers:
    """The part of NeMo-RL's worker group that its generation calls. The first worker
    answers at once, the second when a test lets it.
    """

    dp_size = 2

    def __init__(self) -> None:
        self.wanted = 0
        """What has to be asked to be written ahead before the second worker answers."""
        self.requests: list[Asked] = []
        self.ahead: list[Asked] = []
        self.running = [0, 0]

    def get_dp_leader_worker_idx(self, shard: int) -> int:
        return shard

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, **given: Any
    ) -> Any:
        return getattr(self, method_name)(worker_idx, **given)

    def run_all_workers_single_data(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def shutdown(self, **_: Any) -> bool:
        return True

    async def generate_async(
        self, worker: int, data: Any, greedy: bool
    ) -> AsyncIterator[Any]:
        label = self.note(self.requests, worker, data)
        self.running[worker] += 1
        while worker and len(self.ahead) < self.wanted:
            await asyncio.sleep(0.01)
        self.running[worker] -= 1

        async def arrives() -> tuple[int, Any]:
            whole = data["input_ids"][0]
            text = torch.tensor(answer(label))
            lengths = {
                "generation_lengths": len(text),
                "unpadded_sequence_lengths": len(whole) + len(text),
            }
            return 0, BatchedDataDict(
                {
                    "output_ids": torch.cat([whole, text])[None],
                    "logprobs": torch.zeros(1, len(whole) + len(text)),
                }
                | {name: torch.tensor([length]) for name, length in lengths.items()}
            )

        yield arrives()

    async def das_write_ahead(self, worker: int, data: Any) -> tuple[list[int], bool]:
        label = self.note(self.ahead, worker, data)
        begun = data["input_ids"].shape[1] - (label.start or 0)
        return answer(label)[begun : begun + 4], begun > 0  # in two pieces

    def note(self, asked: list[Asked], worker: int, data: Any) -> Label:
        [label] = data[settings.LABELS]
        asked.append(
            Asked(worker, data["input_ids"][0].tolist(), label, self.running[worker])
        )
        return label


@pytest.fixture(scope="module")
def ray_here(ray_address: str) -> Iterator[None]:
    """A job, with a ledger."""
    ray.init(ray_address, log_to_driver=False)
    yield
    ray.shutdown()


def config(**grpo: Any) -> Any:
    generation = {
        "backend": "vllm",
        "das": {
            "history": {"run_ahead": "auto", "load": False},
            "routing": "least_loaded",
        },
        "vllm_cfg": {"async_engine": True},
        "vllm_kwargs": {"max_num_seqs": 2},
    }
    limits = {
        "num_generations_per_prompt": SAMPLES,
        "max_num_steps": STEPS,
        "use_dynamic_sampling": False,
    }
    return SimpleNamespace(
        grpo=SimpleNamespace(
            **{**limits, "async_grpo": SimpleNamespace(enabled=False), **grpo}
        ),
        policy={"generation": generation},
        data_plane=None,
        env={},
        data={},
        checkpointing={
            **{
                "checkpoint_dir": "/nowhere",
                "metric_name": None,
                "higher_is_better": True,
            },
            **{"keep_top_k": 1, "save_period": 1, "save_optimizer": False},
        },
    )


def made(workers: Workers, run: Any) -> DasVllmGeneration:
    def init(self: Any, cluster: Any, config: Any) -> None:
        self.cfg = config
        self.worker_group = workers
        self.dp_size = workers.dp_size
        self.fleet_selector = self.fleet_monitor = self.weight_synchronizer = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation.VllmGeneration, "__init__", init)
        return DasVllmGeneration(None, run.policy["generation"])


def loader(rows: int = STEPS * BATCH) -> StatefulDataLoader:
    def row(number: int) -> dict[str, Any]:
        # a prompt has two rows in a batch, and comes again in the fourth step
        prompt = [
            7,
            100 + number // 2 % 3,
        ]
        log = [{"role": "user", "content": "", "token_ids": torch.tensor(prompt)}]
        return {
            "message_log": log,
            "length": 2,
            "extra_env_info": {},
            "loss_multiplier": 1.0,
            "idx": number,
        }

    return StatefulDataLoader(
        [row(n) for n in range(rows)], BATCH, collate_fn=rl_collate_fn, drop_last=True
    )


class Tokenizer:
    pad_token_id = 0

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        return [""] * len(ids)


async def rollout(generation: Any, batch: Any) -> None:
    """Write a batch as NeMo-RL's asynchronous rollout does."""
    rows = batch.repeat_interleave(SAMPLES)
    given = [
        (generation, log, stop, Tokenizer(), 64)
        for log, stop in zip(rows["message_log"], rows["stop_strings"], strict=True)
    ]
    await asyncio.gather(
        *(async_generate_response_for_sample_turn(*arguments) for arguments in given)
    )


async def until(said: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not said():
            await asyncio.sleep(0.001)


def train(
    policy_generation: Any,
    wrapped_dataloader: Any,
    grpo_save_state: Any,
    master_config: Any,
    look: Callable[[], None],
) -> list[Any]:
    """Take batches as `grpo_train` does; return the states that checkpoints would
    save.
    """
    states = []
    for _, batch in zip(
        range(master_config.grpo.max_num_steps), wrapped_dataloader, strict=False
    ):
        asyncio.run(rollout(policy_generation, batch))
        states.append(str(wrapped_dataloader.state_dict()))
        look()
    return states


train.__module__ = "nemo_rl.algorithms.grpo"


@pytest.fixture(scope="module")
def seen(ray_here: None) -> SimpleNamespace:
    """A run of four steps; each lasts until all of the next one is written ahead, in
    two pieces each.
    """
    workers = Workers()
    run = config()
    generation = made(workers, run)

    def go_on() -> None:
        while (
            workers.wanted
            and len(workers.requests) < STEPS * BATCH * SAMPLES
            and not written()
        ):
            time.sleep(0.001)  # what was asked for last arrives
        workers.wanted = min(
            workers.wanted + 2 * BATCH * SAMPLES, 2 * (STEPS - 1) * BATCH * SAMPLES
        )

    def written() -> bool:
        whole = [
            text
            for of_step in run_ahead.texts
            for text in of_step.values()
            if len(text) == LENGTH
        ]
        return len(whole) >= BATCH * SAMPLES

    run_ahead.texts.clear()
    go_on()
    states = look_ahead.replacement(train)(
        generation, loader(), SimpleNamespace(total_steps=0), run, go_on
    )
    return SimpleNamespace(workers=workers, states=states, generation=generation)


def test_requests_bring_along_what_was_written_ahead_with_their_seeds(
    seen: Any,
) -> None:
    requests = seen.workers.requests
    ahead = seen.workers.ahead
    per_step = BATCH * SAMPLES
    first = requests[:per_step]
    later = requests[per_step:]
    assert len(later) == (STEPS - 1) * per_step
    assert all(request.label.ahead is None for request in first)
    prompts = {asked.label.seed: asked.prompt[: asked.label.start] for asked in ahead}
    for request in later:
        assert (
            request.label.ahead
            == np.array(answer(request.label), dtype=np.int32).tobytes()
        )
        assert prompts[request.label.seed] == request.prompt
        assert request.label.problem == request.label.problem_of(request.prompt)
    assert len({request.label.seed for request in requests}) == len(requests)
    # nothing twice, and nothing beyond the last step
    assert len(ahead) == 2 * (STEPS - 1) * per_step


def test_only_an_idle_worker_writes_ahead_and_not_for_the_history(seen: Any) -> None:
    assert {(asked.worker, asked.running) for asked in seen.workers.ahead} == {(0, 0)}
    assert not any(asked.label.record for asked in seen.workers.ahead)


def test_a_validation_has_the_workers_to_itself(ray_here: None) -> None:
    async def check() -> None:
        going_on = asyncio.create_task(rollout(generation, next(iter(loader()))))
        # the first worker has nothing left
        await until(lambda: generation.lend(1) == [0])
        generation.set_validating(True)
        assert generation.lend(1) == []
        generation.set_validating(False)
        assert generation.lend(1) == [0]
        workers.wanted = 0
        await going_on
        assert generation.lend(1) == []

    workers = Workers()
    workers.wanted = 1
    generation = made(workers, config())
    asyncio.run(check())


def test_the_states_that_are_saved_are_those_of_a_run_without(seen: Any) -> None:
    batches = loader()
    states = []
    for _ in batches:
        states.append(str(batches.state_dict()))
    assert seen.states == states
    assert seen.generation.run_ahead is None  # with the run, it is over


def test_a_resumed_run_counts_on_from_its_step(ray_here: None) -> None:
    workers = Workers()
    run = config()
    workers.wanted = 2 * BATCH * SAMPLES
    generation = made(workers, run)
    state = SimpleNamespace(total_steps=STEPS - 2)
    look_ahead.replacement(train)(generation, loader(), state, run, lambda: None)
    # of the one step that is left
    assert {asked.prompt[1] for asked in workers.ahead} == {101}


def test_what_is_in_the_way_is_in_the_log(
    ray_here: None, caplog: pytest.LogCaptureFixture
) -> None:
    reason = (
        "das: history.run_ahead='auto' has no effect: the next batch depends on the"
        " rollouts of this one"
    )
    for changed, expected in (({"use_dynamic_sampling": True}, [reason]), ({}, [])):
        caplog.clear()
        begin(config(**changed), SimpleNamespace(), "nemo_rl.algorithms.grpo")
        assert [
            record.message for record in caplog.records if "run_ahead" in record.message
        ] == expected


class Engine:
    """Stands where NeMo-RL's asynchronous engine stands: a request goes on until it is
    told to end, or is aborted.
    """

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Event] = {}
        self.aborted: set[str] = set()
        self.params: list[SamplingParams] = []

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, priority: int = 0
    ) -> Any:
        self.params.append(params)
        self.running[request_id] = asyncio.Event()
        for text, ended in (([7], False), ([7, 8], True)):
            reason = (
                None if not ended else "abort" if request_id in self.aborted else "stop"
            )
            sample = CompletionOutput(0, "", text, None, None, finish_reason=reason)
            yield RequestOutput(
                request_id,
                None,
                prompt["prompt_token_ids"],
                None,
                [sample],
                finished=ended,
            )
            if not ended:
                await self.running[request_id].wait()
        del self.running[request_id]

    async def abort(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self.aborted.add(name)
            self.running[name].set()

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        return [{"tokens": 0, "history_tokens": 0}]


class Worker:
    """What a generation worker does with its engine."""

    def __init__(self) -> None:
        self.engine = Engine()
        das = settings.of_generation(config().policy["generation"])
        self.hooks = AsyncEngineHooks(self.engine, das, source="1")

    async def ask(self, name: str, label: Label) -> Any:
        async for output in self.send(name, label):
            last = output
        return last

    async def send(
        self, name: str, label: Label, room: bool = True
    ) -> AsyncIterator[Any]:
        labels.set([label])
        await asyncio.sleep(0)
        if room:
            prompt = {"prompt_token_ids": [1]}
            async for output in self.engine.generate(
                prompt, SamplingParams(), request_id=name
            ):
                yield output

    def ahead(
        self, name: str, room: bool = True
    ) -> asyncio.Task[tuple[list[int], bool]]:
        label = Label(1, 3, record=False)
        return asyncio.create_task(
            self.hooks.write_ahead(lambda: self.send(name, label, room))
        )


async def served(worker: Worker, name: str) -> None:
    """Have a request answered."""
    real = asyncio.create_task(worker.ask(name, Label(1, 2)))
    await until(lambda: name in worker.engine.running)
    worker.engine.running[name].set()
    await real


def test_what_is_written_ahead_ends_when_a_request_comes_and_when_the_rollout_ends(
    ray_here: None,
) -> None:
    async def check() -> None:
        worker = Worker()
        running = worker.engine.running
        await worker.hooks.start()
        assert await worker.ahead("before") == ([], False)  # no rollout goes on
        await served(worker, "r1")
        whole = worker.ahead("a1")
        await until(lambda: "a1" in running)
        running["a1"].set()
        assert await whole == ([7, 8], True)
        assert await worker.ahead("a2", room=False) == ([], True)
        begun = worker.ahead("a3")
        await until(lambda: "a3" in running)
        # it has not reached the engine when the request comes
        on_the_way = worker.ahead("a4")
        label = Label(1, 2, ahead=np.array([7], dtype=np.int32).tobytes())
        real = asyncio.create_task(worker.ask("r2", label))
        assert await begun == await on_the_way == ([7, 8], False)
        assert await worker.ahead("a5") == ([], False)  # a request goes on
        running["r2"].set()
        await real
        # it drafts what it brings along
        assert worker.engine.params[-1].extra_args == label.extra_args()
        last = worker.ahead("a6")
        late = worker.ahead("a7")
        await until(lambda: "a6" in running)
        await worker.hooks.end_ahead()
        assert not running
        assert await last == await late == ([7, 8], False)
        assert await worker.ahead("a8") == ([], False)
        assert worker.engine.aborted == {"a3", "a4", "a6", "a7"}
        [report] = await asyncio.to_thread(worker.hooks.report)
        assert len(report["ends"]) == 2

    asyncio.run(check())
