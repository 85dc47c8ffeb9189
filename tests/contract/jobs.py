"""Jobs for engines of the contract tests: dataclasses, the blocks and requests that
most of them have, and the process that runs them (`engine.py`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

POLICY = Path(__file__).resolve().parents[2] / "examples" / "tiny_math" / "policy"
IMAGE_TOKENS = {"image": 96, "video": 97, "vision_start": 98, "vision_end": 99}
"""Tokens of the tiny Qwen3.5 that stand for an image or video, and around it."""
ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_CBWR": "AUTO,STRICT",
    "TORCHDYNAMO_DISABLE": "1",  # compiling vLLM's helpers takes longer than a test
}
"""Environment of engines on a CPU that others use, too: one thread, whose sums do not
depend on the batch.
"""
GRACE_S = 3.0
"""How long the history of an engine without a host outlives it: not as long as where
engines are started again.
"""


@dataclass(frozen=True)
class Request:
    """One request of a round."""

    prompt: list[int]
    params: dict[str, Any]
    """vLLM's sampling parameters, but for `extra_args`."""
    label: dict[str, Any] = field(default_factory=dict)
    """`extra_args`: what a host says of the request."""
    image: int | None = None
    """Seed of an image that belongs to the prompt."""
    salt: str | None = None
    """The prompt's `cache_salt`."""
    priority: int = 0
    """Requests with a lower one come first, where vLLM schedules by priority."""

    def having(self, **params: Any) -> Request:
        """Return the same request with other sampling parameters."""
        return replace(self, params={**self.params, **params})

    def labelled(self, **label: Any) -> Request:
        """Return the same request with another label."""
        return replace(self, label={**self.label, **label})

    @property
    def seed(self) -> int | None:
        """The seed of its noise, if it is known before the engine draws."""
        return self.label.get("das_seed", self.params.get("seed"))


@dataclass(frozen=True)
class Round:
    """Requests that are answered together, and what is done after them, in the order of
    the fields.
    """

    requests: list[Request]
    copies: int = 1
    """How often each request is sent."""
    aborted: int = 0
    """So many more requests without an end, which are aborted."""
    brief: bool = False
    """Return no log-probabilities."""
    adapter: str | None = None
    """Directory of the LoRA adapter that writes the texts."""
    refused: list[dict[str, Any]] = field(default_factory=list)
    """Labels of further requests, each as a stranger may write it."""
    refit: float | None = None
    """Change the policy's weights by so much, as NeMo-RL does."""
    perturb: float | None = None
    """Change the policy's weights by so much, without a host."""
    send_adapter: str | None = None
    """Load the LoRA adapter of this directory, as a trainer that sends it anew does."""
    draft_weights: str | None = None
    """Send this file as the drafter's weights."""
    host: str | None = None
    """Whose code loads them."""
    draft_files: str | None = None
    """Put the files of this directory into that of the drafter, in the place of its
    own.
    """
    sleep: int | None = None
    """Sleep at this level and wake up."""
    unrecorded: bool = False
    """Hand over none of the texts."""
    visit: str | None = None
    """Hand over the texts in a file of this name, as those of problems that are at home
    on another node.
    """
    refresh: int | None = None
    """Sync to this weight version, and hand over the texts."""
    foreign_token: int | None = None
    """Hand over texts with this token, too."""
    shared: str | None = None
    """Publish the texts in this directory; None: in one of the engine's own."""
    lose: str | None = None
    """Remove its `generation`, or the `directory`, before the engine reads it."""
    graphs: int | None = None
    """Return which CUDA graphs up to so many requests would replay."""
    fresh_copy: bool = False
    """Compare the policy copy with a fresh one."""


@dataclass(frozen=True)
class Job:
    """An engine, and the rounds that it runs."""

    das: dict[str, Any] | None = None
    """The block; None: stock vLLM."""
    rounds: list[Round] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's."""
    env: dict[str, str | None] = field(default_factory=dict)
    """Environment variables; None: without this one."""
    sabotage: str | None = None
    """What is broken or slowed down before the engine starts: a key of `SABOTAGE`."""
    standalone: bool = False
    """The block comes from the environment, and no host looks after the engine."""
    nemo_rl: bool = False
    """NeMo-RL's hooks look after the engine."""
    asynchronous: bool = False
    """vLLM schedules the next step before it knows this one's tokens, as on a GPU."""
    interpreted: bool = False
    """V2: run the kernels that NumPy stands in for, and compare."""
    log: str = os.devnull
    """File for the engine's messages."""


class Engine(Protocol):
    """What the fixtures `engine` and `v2_engine` are: runs a job, and returns a
    dictionary for each round.
    """

    def __call__(self, **job: Any) -> list[dict[str, Any]]: ...


@contextlib.contextmanager
def engines(env: dict[str, str], logs: Path) -> Iterator[Engine]:
    """Start the process that runs jobs; equal jobs run once."""
    done: dict[str, list[dict[str, Any]]] = {}
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "engine.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **env},
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(**fields: Any) -> list[dict[str, Any]]:
            job = Job(**fields)
            log = logs / f"{len(done)}.log"
            # what a GPU's kernels compute in
            if dtype := os.environ.get("DAS_TEST_DTYPE"):
                job = replace(job, engine={"dtype": dtype, **job.engine})
            if (key := repr(job)) not in done:
                print(
                    written(replace(job, log=str(log))), file=process.stdin, flush=True
                )
                line = next(
                    (x for x in process.stdout if x.startswith(("RESULT ", "FAILED "))),
                    "FAILED to start",
                )
                if line.startswith("FAILED"):
                    raise RuntimeError(
                        "engine"
                        f" {line}:\n{log.read_text()[-30000:] if log.exists() else ''}"
                    )
                done[key] = json.loads(line.removeprefix("RESULT "))
                done[key][0]["log"] = log.read_text()
            return done[key]

        yield run
        process.stdin.close()


def written(job: Job) -> str:
    """Return the line that tells a job to `engine.py`."""
    return base64.b64encode(pickle.dumps(job)).decode()


def read(line: str) -> Job:
    """Return the job of a line."""
    return pickle.loads(base64.b64decode(line))  # type: ignore[no-any-return]
