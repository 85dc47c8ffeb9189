"""A long run on two nodes of a Ray cluster, with a fault every so many steps: are its tokens the undisturbed run's?

    python benchmarks/soak.py --steps 300 --out FILE.json

Each node (a raylet of its own; both on this machine) has a real vLLM engine with the tiny policy of `examples/`. A step
is a rollout, and a weight sync that changes the policy's weights a little. The undisturbed run goes beside it: an
engine that drafts nothing and knows no history writes the same responses. In every `--every`-th step, in the middle of
the rollout, a fault is injected: see `FAULTS`. The result is written after each of these steps.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import ray
from provenance import provenance, save
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ROOT = Path(__file__).resolve().parents[1]
POLICY = ROOT / "examples" / "tiny_math" / "policy"
PROBLEMS, GROUPS, SAMPLES, LENGTH = 24, 4, 2, 32
"""Prompts of an epoch; of a step and engine, samples of each; most tokens of a response."""
OFF = {"drafter": "none", "verify": {"noise": "keyed"}}
DAS = {
    "drafter": "history",
    "history": {"max_bytes": "64MiB"},
    "speculate": "always",
    "budget": "unlimited",
}


class Replica:
    """An engine and its session, as a host holds them."""

    def __init__(self, block: dict[str, Any]):
        from das_adapter.config import parse
        from das_adapter.cpu.environment import cpu_env
        from das_adapter.protocol.engine_args import engine_args, engine_env
        from das_adapter.service.session import Session

        das = parse(block)
        assert das is not None
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        os.environ.update(cpu_env() | quiet | engine_env(das), VLLM_ENABLE_V1_MULTIPROCESSING="0")
        from safetensors.torch import load_file
        from vllm import LLM

        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "seed": 0,
            "kv_cache_memory_bytes": 2**25,
        }
        self._llm = LLM(str(POLICY), **settings, **engine_args(das))
        self._weights = load_file(POLICY / "model.safetensors")
        self._session, engine = Session(das, self._rpc, any_time=False), self._llm.llm_engine
        step = engine.step
        engine.step = lambda: (self._session.visit(), step())[1]
        self._session.start()
        self._drafted = self._accepted = 0

    def _rpc(self, command: str, payload: dict[str, Any], timeout: float) -> list[list[Any]]:
        answers: list[Any] = self._llm.collective_rpc("das_rpc", timeout=timeout, args=(command, payload))
        if command == "stats":
            self._drafted, self._accepted = answers[0]["draft_tokens"], answers[0]["accepted_tokens"]
        return [answers]

    def rollout(self, step: int, problems: list[int]) -> list[list[int]]:
        """Write one step's responses; return their tokens."""
        from vllm import SamplingParams

        from das_adapter.core.identity import prompt_identity, request_seed
        from das_adapter.protocol.label import Label

        asked = [(prompt(p), sample) for p in problems for sample in range(SAMPLES)]
        labels = [Label(prompt_identity(ids), request_seed(0, prompt_identity(ids), step, i)) for ids, i in asked]
        self._session.begun(label.problem for label in labels if label.problem is not None)
        begin = time.time()
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in asked],
            [SamplingParams(temperature=1.0, max_tokens=LENGTH, extra_args=label.extra_args()) for label in labels],
            use_tqdm=False,
        )
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        for label, text in zip(labels, texts, strict=True):
            self._session.finished(label, text, begin, time.time(), step)
        return texts

    def sync(self, version: int) -> dict[str, Any]:
        """Write new weights into the engine, and tell the session; return figures of the step that ends."""
        import torch

        generator = torch.Generator().manual_seed(version)

        def changed(w: Any) -> Any:
            noise = 0.01 * w.float().std() * torch.randn(w.shape, generator=generator) if w.ndim == 2 else 0
            return w.float() + noise

        core = self._llm.llm_engine.engine_core.engine_core
        policy = core.model_executor.driver_worker.worker.model_runner.model
        policy.load_weights([(name, changed(w)) for name, w in self._weights.items()])
        self._llm.reset_prefix_cache()
        begin = time.monotonic()
        self._session.sync(version, report=True)
        seconds = time.monotonic() - begin
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        memory = psutil.Process().memory_info().rss
        return {"drafted": self._drafted, "accepted": self._accepted, "seconds": seconds, "memory": memory}


def prompt(problem: int) -> list[int]:
    """A prompt of the tiny policy's task."""
    rng = random.Random(problem)
    digits, labels = range(25, 35), range(44, 96)
    steps = [[42, labels[i], rng.choice([35, 36, 37]), rng.choice(digits)] for i in range(1, rng.randrange(3, 9))]
    return [2, rng.choice(digits), rng.choice(digits), *itertools.chain(*steps), 3]


class Run:
    """Two nodes, an engine on each, and what can happen to them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000},
        )
        ray.init(self.cluster.address, log_to_driver=False)
        ray.cloudpickle.register_pickle_by_value(sys.modules[Replica.__module__])
        self.nodes = [self.cluster.head_node, self.cluster.add_node(num_cpus=1, object_store_memory=80_000_000)]
        from das_adapter.service.ledger import ledger

        ledger()

    def replica(self, of: int, block: dict[str, Any]) -> Any:
        """Start an engine on a node."""
        pinned = NodeAffinitySchedulingStrategy(self.nodes[of].node_id, soft=False)
        return ray.remote(Replica).options(num_cpus=0, scheduling_strategy=pinned).remote(block)

    def history(self, of: int) -> Any:
        """The history of a node."""
        from das_adapter.service.ledger import actor, history_of

        return actor(history_of(self.nodes[of].node_id))

    def figures(self, of: int) -> dict[str, Any]:
        """What a node's history says of itself."""
        return ray.get(self.history(of).figures.remote(), timeout=60)

    def save(self, name: str) -> str:
        """Save a checkpoint; return what is wrong with it, empty: nothing."""
        from das_adapter.errors import DasError
        from das_adapter.service import checkpoint

        facts = checkpoint.Facts("problem", 96, "tiny")
        shutil.rmtree(self.folder / name, ignore_errors=True)
        checkpoint.save(self.folder / name, facts)
        try:
            checkpoint.check(self.folder / name / checkpoint.NAME, facts, "soak")
        except DasError as error:
            return str(error)
        return ""

    def history_killed(self) -> None:
        os.kill(self.figures(1)["pid"], signal.SIGKILL)

    def history_ended(self) -> None:
        ray.kill(self.history(0), no_restart=True)

    def ledger_killed(self) -> None:
        from das_adapter.service.ledger import running

        ray.kill(running(), no_restart=False)

    def files_removed(self) -> None:
        shutil.rmtree(self.figures(1)["directory"])

    def memory_full(self) -> None:
        resource.prlimit(self.figures(0)["pid"], resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))

    def memory_free(self) -> None:
        resource.prlimit(self.figures(0)["pid"], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    def disk_full(self) -> None:
        pid = self.figures(0)["pid"]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
        assert self.save("full"), "the checkpoint was to fail"
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert not self.save("after"), "the next checkpoint was to succeed"

    def node_joins(self) -> None:
        """A third node comes, starts a history, and goes before the next weight sync."""
        from das_adapter.config import HistoryConfig
        from das_adapter.service import node

        third = self.cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
        pinned = NodeAffinitySchedulingStrategy(third.node_id, soft=False)

        def join() -> None:
            ray.get(node.here(HistoryConfig(max_bytes=2**26)).figures.remote())

        ray.get(ray.remote(join).options(num_cpus=0, scheduling_strategy=pinned).remote())
        self.cluster.remove_node(third, allow_graceful=False)


FAULTS: list[Callable[[Run], None]] = [
    Run.history_killed,
    Run.ledger_killed,
    Run.memory_full,
    Run.memory_free,
    Run.history_ended,
    Run.files_removed,
    Run.disk_full,
    Run.node_joins,
]


def memory() -> dict[str, int]:
    """Resident bytes of Ray's actors but for the engines, by class; where one has several processes, of the largest."""
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            name = process.cmdline()[0]
            if name.startswith("ray::") and not name.startswith(("ray::IDLE", "ray::Replica")):
                kind = name.removeprefix("ray::").partition(".")[0]
                found[kind] = max(found.get(kind, 0), process.memory_info().rss)
        except (psutil.Error, IndexError):
            continue
    return found


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The result so far: memory and acceptance of the second quarter of the steps compared with the last quarter."""
    quarter = len(steps) // 4
    parts = {"second_quarter": steps[quarter : 2 * quarter], "last_quarter": steps[-quarter:]}
    peak = {
        when: {kind: max(s["memory"].get(kind, 0) for s in part) / 2**20 for kind in part[-1]["memory"]}
        for when, part in parts.items()
    }
    before, after = peak.values()
    syncs = [s["sync_seconds"] for s in steps]
    return {
        "provenance": provenance(),
        "steps": len(steps),
        "responses": len(steps) * 2 * GROUPS * SAMPLES,
        "faults": [s["fault"] for s in steps if s["fault"]],
        "steps_whose_tokens_differ": [i for i, s in enumerate(steps) if not s["same"]],
        "acceptance": {
            when: sum(s["accepted"] for s in part) / max(1, sum(s["drafted"] for s in part))
            for when, part in parts.items()
        },
        "accepted_in_steps_after_a_fault": [b["accepted"] for a, b in itertools.pairwise(steps) if a["fault"]],
        "accepted_in_a_step_p50": float(np.median([s["accepted"] for s in steps])),
        "sync_seconds_p50": float(np.median(syncs)),
        "sync_seconds_most": max(syncs),
        "memory_mib": peak,
        "largest_growth_mib": max(after[kind] - before[kind] for kind in after if kind in before),
    }


@click.command()
@click.option("--steps", default=300, show_default=True)
@click.option("--every", default=20, show_default=True, help="Steps from one fault to the next.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(steps: int, every: int, out: Path) -> None:
    """See the head of the file."""
    faults, done = itertools.cycle(FAULTS), []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        *replicas, undisturbed = run.replica(0, DAS), run.replica(1, DAS), run.replica(0, OFF)
        ray.get([replica.sync.remote(0) for replica in (*replicas, undisturbed)])
        for step in range(steps):
            asked = [[(step * 2 * GROUPS + engine * GROUPS + i) % PROBLEMS for i in range(GROUPS)] for engine in (0, 1)]
            writing = [
                replica.rollout.remote(step, problems) for replica, problems in zip(replicas, asked, strict=True)
            ]
            reference = [undisturbed.rollout.remote(step, problems) for problems in asked]
            fault = next(faults) if step % every == every - 1 else None
            if fault:
                fault(run)
            same = ray.get(writing) == ray.get(reference)
            *synced, plain = ray.get([replica.sync.remote(step + 1) for replica in (*replicas, undisturbed)])
            done.append(
                {
                    "fault": fault.__name__ if fault else None,
                    "same": same,
                    "drafted": sum(s["drafted"] for s in synced),
                    "accepted": sum(s["accepted"] for s in synced),
                    "sync_seconds": max(s["seconds"] for s in synced),
                    "memory": {
                        **memory(),
                        "drafting engine": max(s["memory"] for s in synced),
                        "undisturbed engine": plain["memory"],
                    },
                }
            )
            if fault and len(done) >= 4:
                result = summary(done)
                save(out, result)
                click.echo(
                    {name: result[name] for name in ("steps", "steps_whose_tokens_differ", "largest_growth_mib")}
                )
        ray.shutdown()
        run.cluster.shutdown()


if __name__ == "__main__":
    main()
