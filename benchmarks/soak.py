"""A long run on two nodes of a Ray cluster, with random faults: are its tokens the
undisturbed run's?

    python benchmarks/soak.py --steps 300 --every 10 --seed 0 --seed 1 --seed 2 \
        --out FILE.json

Each node (a raylet of its own; both on this machine) has a real vLLM engine with the
tiny policy of `examples/`. A step is a rollout, and a weight sync that changes the
policy's weights a little. What an undisturbed run writes is known before: an engine
that drafts nothing and knows no history writes the same responses. In every
`--every`-th step, in the middle of the rollout, a fault is injected: see `FAULTS`.
Their order, and what they strike, follow from the seed.

The run has shared memory and process ids of its own (Linux namespaces, so it needs root
or `unshare --user`): a full shared memory disturbs nobody else, and whatever is there
after the run was left by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
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
"""Prompts of an epoch; of a step and engine, samples of each; most tokens of a
response.
"""
OFF = {"drafter": "none", "verify": {"noise": "keyed"}}
DAS = {
    "drafter": "history",
    "history": {"max_bytes": "64MiB"},
    "speculate": "always",
    "budget": "unlimited",
}
SHARED = Path("/dev/shm")
SHARED_BYTES = 2**29
OBJECTS = {"object_store_memory": 80_000_000, "plasma_directory": tempfile.gettempdir()}
"""Ray's objects lie elsewhere: a full shared memory would end Ray, with das-adapter or
without.
"""
CLOCK = """
import mmap, os, time
with open(os.environ["SOAK_CLOCK"], "r+b") as file:
    seconds = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + seconds[0]
time.time_ns = lambda: real_ns() + seconds[0] * 10**9
"""
"""Every Python process of the run begins with this, as `sitecustomize`: a file says by
how much its clock is wrong.
"""
ALONE = [
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
    "sh",
    "-c",
]
LEFT_S = 60.0
"""How long after a run its processes and files have to go; a history's directory stays
for 20 seconds.
"""


class Replica:
    """An engine and its session, as a host holds them."""

    def __init__(self, block: dict[str, Any]):
        from das_adapter.config import parse
        from das_adapter.cpu.environment import cpu_env
        from das_adapter.protocol.engine_args import engine_args
        from das_adapter.service.session import Session

        das = parse(block)
        quiet = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        os.environ.update(cpu_env() | quiet, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        from safetensors.torch import load_file
        from vllm import LLM

        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 16,
            "seed": 0,
            "kv_cache_memory_bytes": 2**25,
        }
        self._llm = LLM(str(POLICY), **settings, **engine_args(das))
        self._weights = load_file(POLICY / "model.safetensors")
        self._session, engine = (
            Session(das, self._rpc, any_time=False),
            self._llm.llm_engine,
        )
        step = engine.step
        engine.step = lambda: (self._session.map_guest_history(), step())[1]
        self._session.start()
        self._drafted = self._accepted = 0
        gc.freeze()  # what is here by now is not looked at again

    def _rpc(
        self, command: str, payload: dict[str, Any], timeout: float
    ) -> list[list[Any]]:
        answers: list[Any] = self._llm.collective_rpc(
            "das_rpc", timeout=timeout, args=(command, payload)
        )
        if command == "stats":
            self._drafted = answers[0]["draft_tokens"]
            self._accepted = answers[0]["accepted_tokens"]
        return [answers]

    def rollout(self, step: int, problems: list[int]) -> list[list[int]]:
        """Write one step's responses; return their tokens."""
        from vllm import SamplingParams

        from das_adapter.core.identity import prompt_identity, request_seed
        from das_adapter.protocol.label import Label

        asked = [(prompt(p), sample) for p in problems for sample in range(SAMPLES)]
        labels = [
            Label(prompt_identity(ids), request_seed(0, prompt_identity(ids), step, i))
            for ids, i in asked
        ]
        self._session.fetch_guest_history(
            label.problem for label in labels if label.problem is not None
        )
        begin = time.time()
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in asked],
            [
                SamplingParams(
                    temperature=1.0, max_tokens=LENGTH, extra_args=label.extra_args()
                )
                for label in labels
            ],
            use_tqdm=False,
        )
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        for label, text in zip(labels, texts, strict=True):
            self._session.record_response(label, text, begin, time.time(), step)
        return texts

    def sync(self, version: int) -> dict[str, Any]:
        """Write new weights into the engine, and tell the session; return figures of
        the step that ends.
        """
        import torch

        generator = torch.Generator().manual_seed(version)

        def changed(w: Any) -> Any:
            noise = (
                0.01 * w.float().std() * torch.randn(w.shape, generator=generator)
                if w.ndim == 2
                else 0
            )
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
        return {
            "drafted": self._drafted,
            "accepted": self._accepted,
            "seconds": seconds,
            "memory": memory,
        }


def prompt(problem: int) -> list[int]:
    """A prompt of the tiny policy's task."""
    rng = random.Random(problem)
    digits = range(25, 35)
    labels = range(44, 96)
    steps = [
        [42, labels[i], rng.choice([35, 36, 37]), rng.choice(digits)]
        for i in range(1, rng.randrange(3, 9))
    ]
    return [2, rng.choice(digits), rng.choice(digits), *itertools.chain(*steps), 3]


def about(history: Any) -> dict[str, Any]:
    """Return where a history lies, and its process, in which this runs."""
    return {"directory": str(history.writer.directory), "pid": os.getpid()}


class Run:
    """Two nodes, an engine on each, and what can happen to them. A fault returns what
    ends it, if something must.
    """

    def __init__(self, folder: Path, seed: int):
        self.folder = folder
        self.rng = random.Random(seed)
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, **OBJECTS},
        )
        ray.init(self.cluster.address, log_to_driver=False)
        ray.cloudpickle.register_pickle_by_value(sys.modules[Replica.__module__])
        self.nodes = [
            self.cluster.head_node,
            self.cluster.add_node(num_cpus=1, **OBJECTS),
        ]
        from das_adapter.service.ledger import ledger

        ledger()
        self.replicas: list[Any] = []

    def replica(self, of: int, block: dict[str, Any]) -> Any:
        """Start an engine on a node."""
        pinned = NodeAffinitySchedulingStrategy(self.nodes[of].node_id, soft=False)
        return (
            ray.remote(Replica)
            .options(num_cpus=0, scheduling_strategy=pinned)
            .remote(block)
        )

    def both(
        self,
        step: int,
        method: str,
        *arguments: Any,
        fault: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Call a method of both engines, each with its arguments, while a fault
        happens. An engine that ended is started again, gets the step's weights, and is
        called again.
        """

        def call(of: int) -> Any:
            return getattr(self.replicas[of], method).remote(*arguments[of])

        found = []
        calls = [call(0), call(1)]
        if fault:
            fault()
        for of, answer in enumerate(calls):
            try:
                found.append(ray.get(answer))
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError):
                self.replicas[of] = self.replica(of, DAS)
                ray.get(self.replicas[of].sync.remote(step))
                found.append(ray.get(call(of)))
        return found

    def history(self, of: int) -> Any:
        """The history of a node."""
        from das_adapter.service.ledger import find_actor, history_name

        return find_actor(history_name(self.nodes[of].node_id))

    def figures(self, of: int) -> dict[str, Any]:
        """What a node's history says of itself."""
        found = (
            self.history(of)
            .__ray_call__.options(concurrency_group="peers")
            .remote(about)
        )
        return ray.get(found, timeout=60)

    def save(self, name: str) -> str:
        """Save a checkpoint; return what is wrong with it, empty: nothing."""
        from das_adapter.errors import DasError
        from das_adapter.service import checkpoint

        facts = {"scope": "problem", "tokenizer": "tiny"}
        shutil.rmtree(self.folder / name, ignore_errors=True)
        checkpoint.save(self.folder / name, facts)
        try:
            checkpoint.check(self.folder / name / checkpoint.NAME, facts, "soak")
        except DasError as error:
            return str(error)
        return ""

    def engine_killed(self) -> None:
        ray.kill(self.rng.choice(self.replicas))

    def node_killed(self) -> None:
        self.cluster.remove_node(self.nodes[1], allow_graceful=False)
        self.nodes[1] = self.cluster.add_node(num_cpus=1, **OBJECTS)

    def history_killed(self) -> None:
        os.kill(self.figures(self.rng.randrange(2))["pid"], signal.SIGKILL)

    def history_ended(self) -> None:
        ray.kill(self.history(self.rng.randrange(2)), no_restart=True)

    def history_stopped(self) -> None:
        self._stop_for_a_while(self.figures(self.rng.randrange(2))["pid"])

    def ledger_stopped(self) -> None:
        from das_adapter.service.ledger import running_ledger

        pid = running_ledger().__ray_call__.remote(lambda _: os.getpid())
        self._stop_for_a_while(ray.get(pid, timeout=60))

    def _stop_for_a_while(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(self.rng.uniform(1, 8), os.kill, (pid, signal.SIGCONT)).start()

    def ledger_killed(self) -> None:
        from das_adapter.service.ledger import running_ledger

        ray.kill(running_ledger(), no_restart=False)

    def files_removed(self) -> None:
        shutil.rmtree(self.figures(self.rng.randrange(2))["directory"])

    def directory_read_only(self) -> Callable[[], None]:
        """For all processes of the run, root's too."""
        directory = self.figures(self.rng.randrange(2))["directory"]
        for options in (["--bind", directory], ["-o", "remount,bind,ro"]):
            subprocess.run(["mount", *options, directory], check=True)

        def undo() -> None:
            subprocess.run(["umount", "--lazy", directory], check=True)

        return undo

    def file_torn(self) -> None:
        """A file of a history has only its first half when its writer is killed and
        another takes over.
        """
        found = self.figures(self.rng.randrange(2))
        file = self.rng.choice(sorted(Path(found["directory"]).glob("*-*")))
        half = file.with_suffix(".tmp")
        half.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        half.rename(file)  # engines keep the file that they have mapped
        os.kill(found["pid"], signal.SIGKILL)

    def text_torn(self) -> None:
        from das_adapter.protocol.messages import Trajectory, pack
        from das_adapter.protocol.spool import put_file

        whole = pack([Trajectory(1, bytes(400), 0)])
        put_file(
            self.figures(self.rng.randrange(2))["directory"],
            "batch-torn-0-0",
            whole[: self.rng.randrange(len(whole))],
        )

    def clock_back(self) -> None:
        with open(os.environ["SOAK_CLOCK"], "r+b") as file:
            (before,) = struct.unpack("q", file.read())
            file.seek(0)
            file.write(struct.pack("q", before - 3600))

    def memory_full(self) -> Callable[[], None]:
        filler = SHARED / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:  # others take some meanwhile
                file.write(bytes(2**12))
        return filler.unlink

    def disk_full(self) -> None:
        pid = self.figures(0)["pid"]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
        assert self.save("full"), "the checkpoint was to fail"
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert not self.save("after"), "the next checkpoint was to succeed"

    def node_joins(self) -> None:
        """A third node comes, starts a history, and goes before the next weight
        sync.
        """
        from das_adapter.config import HistoryConfig
        from das_adapter.service import node

        third = self.cluster.add_node(num_cpus=1, **OBJECTS)
        pinned = NodeAffinitySchedulingStrategy(third.node_id, soft=False)

        def join() -> None:
            ray.get(
                node.history_here(HistoryConfig(max_bytes=2**26)).directory.remote()
            )

        ray.get(
            ray.remote(join).options(num_cpus=0, scheduling_strategy=pinned).remote()
        )
        self.cluster.remove_node(third, allow_graceful=False)


FAULTS: list[Callable[[Run], Callable[[], None] | None]] = [
    Run.engine_killed,
    Run.node_killed,
    Run.history_killed,
    Run.history_ended,
    Run.history_stopped,
    Run.ledger_killed,
    Run.ledger_stopped,
    Run.directory_read_only,
    Run.files_removed,
    Run.file_torn,
    Run.text_torn,
    Run.clock_back,
    Run.memory_full,
    Run.disk_full,
    Run.node_joins,
]


def memory() -> dict[str, int]:
    """Resident bytes of Ray's actors but for the engines, by class; where one has
    several processes, of the largest.
    """
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            name = process.cmdline()[0]
            if name.startswith("ray::") and not name.startswith(
                ("ray::IDLE", "ray::Replica")
            ):
                kind = name.removeprefix("ray::").partition(".")[0]
                found[kind] = max(found.get(kind, 0), process.memory_info().rss)
        except (psutil.Error, IndexError):
            continue
    return found


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The result so far: memory and acceptance of the second quarter of the steps
    compared with the last quarter.
    """
    quarter = max(1, len(steps) // 4)
    parts = {
        "second_quarter": steps[quarter : 2 * quarter],
        "last_quarter": steps[-quarter:],
    }
    peak = {
        when: {
            kind: max(s["memory"].get(kind, 0) for s in part) / 2**20
            for kind in part[-1]["memory"]
        }
        for when, part in parts.items()
    }
    before, after = peak.values()
    syncs = [s["sync_seconds"] for s in steps]
    return {
        "steps": len(steps),
        "responses": len(steps) * 2 * GROUPS * SAMPLES,
        "faults": [s["fault"] for s in steps if s["fault"]],
        "steps_whose_tokens_differ": [i for i, s in enumerate(steps) if not s["same"]],
        "acceptance": {
            when: (
                sum(s["accepted"] for s in part)
                / max(1, sum(s["drafted"] for s in part))
            )
            for when, part in parts.items()
        },
        "accepted_in_steps_after_a_fault": [
            b["accepted"] for a, b in itertools.pairwise(steps) if a["fault"]
        ],
        "accepted_in_a_step_p50": float(np.median([s["accepted"] for s in steps])),
        "sync_seconds_p50": float(np.median(syncs)),
        "sync_seconds_most": max(syncs),
        "memory_mib": peak,
        "largest_growth_mib": max(
            after[kind] - before[kind] for kind in after if kind in before
        ),
        "files_in_shared_memory_most": {
            when: max(s["files"] for s in part) for when, part in parts.items()
        },
    }


def asked(step: int) -> list[list[int]]:
    """The problems of each engine in a step."""
    return [
        [(step * 2 * GROUPS + engine * GROUPS + i) % PROBLEMS for i in range(GROUPS)]
        for engine in (0, 1)
    ]


def undisturbed(steps: int) -> list[list[list[list[int]]]]:
    """What each engine writes in each step where nothing drafts, and nothing
    happens.
    """
    replica = ray.remote(Replica).options(num_cpus=0).remote(OFF)
    found = []
    for step in range(steps):
        ray.get(replica.sync.remote(step))
        texts = ray.get(
            replica.rollout.remote(
                step, [problem for part in asked(step) for problem in part]
            )
        )
        found.append([texts[: GROUPS * SAMPLES], texts[GROUPS * SAMPLES :]])
    ray.kill(replica)
    return found


def shuffled(
    rng: random.Random,
) -> Iterator[Callable[[Run], Callable[[], None] | None]]:
    """The faults in random order, and again; each comes before any comes again."""
    while True:
        yield from rng.sample(FAULTS, len(FAULTS))


def disturbed(
    run: Run, steps: int, every: int, expected: list[list[list[list[int]]]]
) -> Iterator[dict[str, Any]]:
    """Run; yield what was seen in each step."""
    faults = shuffled(run.rng)
    undo = None
    until = 0
    run.replicas = [run.replica(of, DAS) for of in range(2)]
    run.both(0, "sync", (0,), (0,))

    def strike(fault: Callable[[Run], Callable[[], None] | None]) -> None:
        nonlocal undo
        undo = fault(run)

    for step in range(steps):
        fault = next(faults) if step % every == every - 1 else None
        first, second = asked(step)
        strikes = functools.partial(strike, fault) if fault else None
        texts = run.both(step, "rollout", (step, first), (step, second), fault=strikes)
        synced = run.both(step, "sync", (step + 1,), (step + 1,))
        if fault:
            until = step + run.rng.randrange(min(4, every))
        if undo and step >= until:
            undo()
            undo = None
        yield {
            "fault": fault.__name__ if fault else None,
            "same": texts == expected[step],
            "drafted": sum(s["drafted"] for s in synced),
            "accepted": sum(s["accepted"] for s in synced),
            "sync_seconds": max(s["seconds"] for s in synced),
            "memory": {**memory(), "drafting engine": max(s["memory"] for s in synced)},
            "files": sum(1 for path in SHARED.rglob("*") if path.is_file()),
        }


def left(folder: Path) -> list[str]:
    """What is left of a run that ended: processes, and files in shared memory and in
    its temporary directory.
    """
    until = time.monotonic() + LEFT_S
    while True:
        found = [str(path) for path in (*SHARED.iterdir(), *folder.glob("das-*"))]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.pid not in (1, os.getpid())
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(" ".join(process.cmdline())[:200])
        if not found or time.monotonic() > until:
            return found
        time.sleep(1)


@click.command()
@click.option("--steps", default=300, show_default=True)
@click.option(
    "--every", default=10, show_default=True, help="Steps from one fault to the next."
)
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    default=[0],
    show_default=True,
    help="Of the faults; one run, and one row of FILE, for each.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(steps: int, every: int, seeds: tuple[int, ...], out: Path) -> None:
    """See the head of the file."""
    if "SOAK_CLOCK" not in os.environ:
        alone()
    folder = Path(tempfile.gettempdir())
    expected = []
    for seed in seeds:
        begin = time.monotonic()
        done = []
        run = Run(folder, seed)
        expected = expected or undisturbed(steps)
        for step in disturbed(run, steps, every, expected):
            done.append(step)
            if step["fault"]:
                took = time.monotonic() - begin
                click.echo(
                    f"{seed} {len(done) - 1} {step['fault']} {step['same']} after"
                    f" {took:.0f} s"
                )
        ray.shutdown()
        run.cluster.shutdown()
        row = {
            **summary(done),
            "left": left(folder),
            "seconds": time.monotonic() - begin,
            "provenance": provenance(),
        }
        others = json.loads(out.read_text()) if out.exists() else {}
        save(out, {**others, f"seed {seed}": row})


def alone() -> None:
    """Begin this command again, with shared memory, process ids, temporary files and a
    clock of its own.
    """
    place = Path(tempfile.mkdtemp(prefix="soak-"))
    (place / "sitecustomize.py").write_text(CLOCK)
    (place / "clock").write_bytes(bytes(8))
    (place / "tmp").mkdir()
    os.environ.update(
        SOAK_CLOCK=f"{place}/clock", TMPDIR=f"{place}/tmp", PYTHONPATH=str(place)
    )
    inside = (
        f'mount -t tmpfs -o size={SHARED_BYTES} tmpfs {SHARED} && "$@"; code=$?; rm -r'
        f" {place}; exit $code"
    )
    os.execvp(ALONE[0], [*ALONE, inside, "sh", sys.executable, *sys.argv])


if __name__ == "__main__":
    main()
