"""veRL's own agent loop workers, client and data loader, around servers whose answers a
test chooses: an idle one writes ahead, with the noise of the requests of the next
steps, and these bring it along.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")
import ray
import transfer_queue as tq
from hydra import compose, initialize_config_dir
from torchdata.stateful_dataloader import StatefulDataLoader
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from das_adapter.protocol.label import Label
from das_adapter.verl.router import balancer
from das_adapter.verl.run_ahead import VerlRunAhead
from das_adapter.verl.settings import of_run

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
BATCH = 2
SAMPLES = 2
DAS = "actor_rollout_ref.rollout.custom.das"
OVERRIDES = [
    *(
        f"+{DAS}.history.run_ahead=auto",
        f"+{DAS}.routing=least_loaded",
        "transfer_queue.enable=true",
    ),
    *(
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.rollout.agent.num_workers=1",
    ),
    *(
        f"data.train_batch_size={BATCH}",
        "data.max_response_length=16",
        "actor_rollout_ref.rollout.max_num_seqs=2",
    ),
]


class Server:
    """The part of a replica that clients call. What it answers follows from the seed
    alone; one server is slow.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.requests: list[tuple[list[int], dict[str, Any]]] = []
        self.ahead: list[tuple[list[int], dict[str, Any], int]] = []
        self.running = 0

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        self.requests.append((prompt_ids, sampling_params["extra_args"]))
        self.running += 1
        await asyncio.sleep(self.seconds)
        self.running -= 1
        return TokenOutput(token_ids=answer(sampling_params), stop_reason="completed")

    async def write_ahead(
        self, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> tuple[list[int], bool]:
        self.ahead.append((prompt_ids, sampling_params["extra_args"], self.running))
        return answer(sampling_params), True

    async def asked(self) -> tuple[Any, Any]:
        return self.requests, self.ahead


def answer(sampling_params: dict[str, Any]) -> list[int]:
    seed = sampling_params["extra_args"]["das_seed"]
    return [30 + seed // 8**i % 8 for i in range(6)]


@dataclass
class Seen:
    steps: list[list[Label]]
    """Labels of the requests up to the end of each step."""
    ahead: list[tuple[list[int], Label, int]]
    """What was asked to be written ahead: prompt, label, and requests that the replica
    had.
    """
    early: int
    """How much of it was asked in the first step."""
    batches: list[list[int]]
    """Indices of the rows that the trainer took."""


class Older:
    """veRL's older trainer, as far as it takes batches and has them written."""

    def __init__(self, config: Any, client: Any, data: Any) -> None:
        self.manager = AgentLoopManager.create(config, client)
        self.trainer = object.__new__(RayPPOTrainer)
        self.trainer.config = config
        self.trainer.total_training_steps = STEPS
        self.trainer.train_dataloader = StatefulDataLoader(
            data, BATCH, collate_fn=collate_fn
        )
        self.batches: Any = None

    def step(self, number: int) -> list[int]:
        """Take a training step up to its last response; return the indices of its
        rows.
        """
        self.batches = self.batches or iter(self.trainer.train_dataloader)
        self.trainer.global_steps, rows = number, next(self.batches)
        batch = self.trainer._get_gen_batch(DataProto.from_single_dict(rows))
        batch.meta_info["global_steps"] = number
        self.manager.generate_sequences(
            batch.repeat(repeat_times=SAMPLES, interleave=True)
        )
        return [int(index) for index in rows["index"]]


class Sync(Older):
    """veRL's synchronous trainer; it leaves responses in the TransferQueue, and does
    not wait for them.
    """

    def __init__(self, config: Any, client: Any, data: Any) -> None:
        tq.init(config.transfer_queue)
        self.manager = AgentLoopManagerTQ.create(config, client)
        self.trainer = object.__new__(PPOTrainerSync)
        self.trainer.config = config
        self.trainer.trainer_mode = "sync"
        self.trainer.total_training_steps = STEPS
        self.trainer.train_dataloader_it = None
        self.trainer.train_dataloader = StatefulDataLoader(
            data, BATCH, collate_fn=collate_fn
        )
        self.trainer.agent_loop_manager = self.manager

    def step(self, number: int) -> list[int]:
        self.trainer.global_steps = number
        batch = self.trainer._next_train_batch()
        self.trainer._submit_batch_to_rollout(batch)
        tags = [{"status": "running"}]
        while any(tag.get("status") in ("pending", "running") for tag in tags):
            time.sleep(0.1)
            tags = [*(tq.kv_list("train") or {}).get("train", {}).values()]
        return [int(index) for index in batch["index"]]


@pytest.fixture(scope="module", params=[Older, Sync])
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    subprocess.run(
        [sys.executable, ROOT / "examples/tiny_math/prepare_data.py"],
        check=True,
        capture_output=True,
    )
    with initialize_config_dir(str(ROOT / "examples/verl"), version_base=None):
        config = compose("grpo_tiny_math_cpu", overrides=OVERRIDES)
    config.actor_rollout_ref.model.path = str(ROOT / "examples/tiny_math/policy")
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    # Ray's workers can't import a test
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    das = of_run(config)
    servers = {
        name: ray.remote(Server).remote(seconds)
        for name, seconds in (("a", 0.05), ("b", 3.0))
    }
    router = ray.remote(balancer(das, config.actor_rollout_ref.rollout)).remote(servers)
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    data = RLHFDataset(
        str(ROOT / "examples/tiny_math/data/train.parquet"), tokenizer, config.data
    )
    run = request.param(config, LLMServerClient(config, router), data)
    VerlRunAhead.start(run.trainer, das)
    steps = []
    batches = []
    early = []
    for number in range(1, STEPS + 1):
        batches.append(run.step(number))
        asked = ray.get(
            [server.asked.remote() for server in servers.values()], timeout=60
        )
        steps.append([Label.of(extra) for real, _ in asked for _, extra in real])
        early.append(sum(len(written) for _, written in asked))
    ahead = [
        (prompt, Label.of(extra), running)
        for _, written in asked
        for prompt, extra, running in written
    ]
    yield Seen(steps, ahead, early[0], batches)
    VerlRunAhead.running = None
    ray.shutdown()


def new(steps: list[list[Label]], step: int) -> list[Label]:
    """Labels of a step; those of the steps before are in front on each server."""
    before = {label.seed for label in steps[step - 1]} if step else set()
    return [label for label in steps[step] if label.seed not in before]


def test_requests_bring_along_what_was_written_ahead_with_their_seeds(
    seen: Seen,
) -> None:
    written = {label.seed: prompt for prompt, label, _ in seen.ahead}
    assert all(label.ahead is None for label in new(seen.steps, 0))
    for step in range(1, STEPS):
        labels = new(seen.steps, step)
        assert len(labels) == BATCH * SAMPLES
        for label in labels:
            assert label.seed in written
            expected = answer({"extra_args": {"das_seed": label.seed}})
            assert label.ahead == np.array(expected, dtype=np.int32).tobytes()
            assert label.problem == label.problem_of(written[label.seed])


def test_only_an_idle_replica_writes_ahead_and_not_for_the_history(seen: Seen) -> None:
    assert len(seen.ahead) == (STEPS - 1) * BATCH * SAMPLES
    assert {running for _, _, running in seen.ahead} == {0}
    assert not any(label.record for _, label, _ in seen.ahead)


def test_what_is_idle_for_long_enough_writes_the_step_after_the_next_one_too(
    seen: Seen,
) -> None:
    assert seen.early > BATCH * SAMPLES
    steps = [{label.seed for label in new(seen.steps, step)} for step in range(STEPS)]
    order = [
        next(step for step in range(STEPS) if label.seed in steps[step])
        for _, label, _ in seen.ahead
    ]
    assert order == sorted(order)


def test_the_trainer_takes_every_batch_in_its_order(seen: Seen) -> None:
    taken = [index for batch in seen.batches for index in batch]
    assert taken == list(range(STEPS * BATCH))
