"""What is done to an engine between its rounds: weights that change, sleep, texts that
are handed over.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jobs import Round
from safetensors.torch import load_file

from das_adapter.config import HistoryConfig
from das_adapter.core.history import HistoryRules
from das_adapter.core.index.store import HistoryStore
from das_adapter.protocol.messages import Trajectory, responses


def perturb(worker: Any, size: float) -> None:
    """Send the policy's checkpoint to a worker as a host does, every matrix changed by
    `size` of its standard deviation.
    """
    generator = torch.Generator().manual_seed(0)
    policy = Path(worker.model_runner.vllm_config.model_config.model)
    weights = load_file(policy / "model.safetensors")

    def changed(weight: Any) -> Any:
        noise = (
            torch.randn(weight.shape, generator=generator) if weight.ndim == 2 else 0
        )
        return weight.float() + size * weight.float().std() * noise

    worker.model_runner.model.load_weights(
        [(name, changed(weight)) for name, weight in weights.items()]
    )


def lose(runner: Any) -> None:
    """Overwrite the drafter's own weights with noise, as when their memory was given
    away.
    """
    torch.manual_seed(0)
    shared = {p.data_ptr() for p in runner.model.parameters()}
    drafter = getattr(runner, "speculator", None) or runner.drafter
    for parameter in drafter.model.parameters():
        if parameter.is_floating_point() and parameter.data_ptr() not in shared:
            parameter.data.normal_(std=0.5)


def drafter_without_weights() -> None:
    """Let neural drafters start with noise for weights."""
    from das_adapter.engine.draft_weights import DraftWeights

    stock = DraftWeights.follow_drafter

    def follow_drafter(self: Any) -> None:
        stock(self)
        lose(self._runner)

    DraftWeights.follow_drafter = follow_drafter


def send_drafter(runner: Any, file: str, host: str | None) -> None:
    """Send a file as the drafter's weights, as the host does."""
    weights = [(name, weight.float()) for name, weight in load_file(file).items()]
    if runner.speculative_config.method == "mtp":  # hosts send it the policy's
        send(runner, weights, host)
        if host is None:
            runner.drafter.model.load_weights(weights)
    else:
        send(runner, [(f"draft.{name}", weight) for name, weight in weights], host)


def send(runner: Any, weights: list[Any], host: str | None) -> None:
    """Load weights from a trainer's stream, by the code of the host."""
    if host is None:
        runner.model.load_weights(weights)
    elif host == "verl":
        send_by_verl(runner, weights)
    else:
        from nemo_rl.models.generation.vllm.vllm_backend import (
            VllmInternalWorkerExtension,
        )

        worker = VllmInternalWorkerExtension()
        worker.model_runner = runner
        worker._load_weights(weights)


def send_by_verl(runner: Any, weights: list[Any]) -> None:
    """Send weights as veRL's trainer does, in buckets of 2 MiB through shared memory,
    to its own receiver.
    """
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
        BucketedWeightSender,
    )
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    os.environ["VERL_RAY_JOB_ID"] = f"das-{os.getpid()}"  # a part of the socket's name
    worker = vLLMColocateWorkerExtension()
    worker.model_runner = runner
    worker.local_rank = 0
    worker.device = torch.device("cpu")
    sender = BucketedWeightSender(
        worker._get_zmq_handle(), bucket_size_mb=2, use_shm=True
    )
    sending = threading.Thread(
        target=asyncio.run, args=(sender.async_send_weights(weights),)
    )
    sending.start()
    worker.update_weights_from_ipc(use_shm=True)
    sending.join()


def sleep(llm: Any, level: int) -> None:
    """Sleep and wake up as hosts do, which send the weights in between; see
    `memory_pools.py`.
    """
    llm.sleep(level)
    llm.wake_up(tags=["weights"])
    if level == 2:
        llm.collective_rpc(perturb, args=(0.0,))
    llm.wake_up(tags=["kv_cache"])


def copy_is_fresh(runner: Any) -> bool:
    """Return whether the policy copy equals one made from the policy's present weights,
    bit for bit.
    """
    from das_adapter.engine.policy_copy import PolicyCopy

    there = (
        runner.speculator.copy
        if hasattr(runner, "speculator")
        else runner.drafter.model_source.copy
    )
    fresh = PolicyCopy(runner.model, there.weights)
    return all(
        torch.equal(a, b)
        for (_, x), (_, y) in zip(there.layers, fresh.layers, strict=True)
        for a, b in zip(x.kept, y.kept, strict=True)
    )


def handed_over(
    part: Round,
    texts: list[tuple[int, list[int]]],
    config: HistoryConfig | None,
    directory: str,
) -> dict[str, Any]:
    """Return what the engine is told at the weight sync behind a round that has written
    texts of problems; `config`: of the history, None: there is none; `directory`: where
    it lies.
    """
    if part.foreign_token is not None:
        # more than the problem's own texts, so that it is drafted
        texts = texts + [(0, [part.foreign_token])] * 8
    trajectories = [
        Trajectory(p, np.asarray(t, dtype=np.int32).tobytes(), part.refresh - 1)
        for p, t in texts
    ]
    told: dict[str, Any] = {
        "version": part.refresh,
        "lengths": responses(trajectories).tobytes(),
    }
    return (
        told
        if config is None
        else told | {"history": publish(directory, config, trajectories, part.lose)}
    )


def publish(
    directory: str,
    config: HistoryConfig,
    trajectories: list[Trajectory],
    lose: str | None,
) -> tuple[str, int]:
    """Publish trajectories as a node's history does; return what the engine is told."""
    policy = HistoryRules(config)
    with policy.store(Path(directory)) as store:
        policy.add_and_seal(store, trajectories)
        while policy.shrink_slice(store):
            pass
        generation = store.generation
        for _ in range(4 if lose == "generation" else 0):
            store.seal()
    if lose == "directory":
        shutil.rmtree(directory)
    return directory, generation


def give(file: str, texts: list[tuple[int, list[int]]]) -> None:
    """Write texts of problems as the node does on which they are at home."""
    with HistoryStore(f"{file}-store") as store:
        for problem, text in texts:
            store.add(problem, np.asarray(text, dtype=np.int32), 0)
        store.seal()
        store.give(file, sorted({problem for problem, _ in texts}))
