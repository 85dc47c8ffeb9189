"""Engines with random weights in the shape of real policies, and what one measures on
them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
_SIZES = (
    "num_hidden_layers hidden_size intermediate_size num_attention_heads"
    " num_key_value_heads vocab_size".split()
)
_TIED = {"tie_word_embeddings": True}
SHAPES = {
    "7b": _QWEN2 | dict(zip(_SIZES, (28, 3584, 18944, 28, 4, 152064), strict=True)),
    "1.5b": (
        _QWEN2 | _TIED | dict(zip(_SIZES, (28, 1536, 8960, 12, 2, 151936), strict=True))
    ),
    "tiny": (
        _QWEN2
        | _TIED
        | dict(zip(_SIZES, (2, 128, 128, 2, 1, 997), strict=True))
        | {"torch_dtype": "float32"}
    ),
}
"""Qwen2.5's; `tiny` only tests this program."""
HISTORY: dict[str, Any] = {"drafter": "history"}
KEYED: dict[str, Any] = {"drafter": "none", "verify": {"noise": "keyed"}}
FOLDER = "DAS_BENCH_FOLDER"
"""Environment variable of a process of `apart`: where it may leave files, which go when
it ends.
"""
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment of engines whose worker is in the process that asks them."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    shape: str
    batches: tuple[int, ...] = (1, 8, 64, 256)
    contexts: tuple[int, ...] = (2048, 8192)
    rows: tuple[int, ...] = (1, 8, 64, 256, 2048, 8704)
    """Of logits."""
    steps: int = 64
    """Decode steps of one figure."""
    replayed: int = 128
    """Requests of the replayed batch."""
    longest: int = 2560
    """Longest of them, tokens."""
    until: float = math.inf
    """When the part is ended, by `time.monotonic`."""

    @property
    def tiny(self) -> bool:
        return self.shape == "tiny"

    @property
    def vocabulary(self) -> int:
        return int(SHAPES[self.shape]["vocab_size"])


Found = dict[str, Any]
"""Figures of a part."""


class Bar(NamedTuple):
    """What a part's figures must show."""

    says: str
    at_most: float
    value: Callable[[Found], float | None]
    """Raises LookupError, ValueError or TypeError, or returns None, where its figures
    were not measured.
    """

    def verdict(self, content: Found) -> Found:
        """Judge what a part has written: `kept` needs all of its figures, `MISSED` only
        one that is too high.
        """
        try:
            found = self.value(content)
        except (LookupError, ValueError, TypeError):
            found = None
        if found is None or found != found:
            verdict = "not run"
        elif found > self.at_most:
            verdict = "MISSED"
        else:
            verdict = "kept" if content["state"] == "done" else "cut short"
        return {
            "bar": self.says,
            "found": found,
            "at_most": self.at_most,
            "verdict": verdict,
        }


STARTED: list[Any] = []
"""Engines of this process."""
END_S = 10.0
"""Seconds that they have to end."""
_RUNNING: set[int] = set()
"""Leaders of the process groups that `process` has started."""
_FREE = 0.05
"""Share of the device's memory that must be free where the KV cache's size is known."""
TINY = Plan("tiny", (1, 4), (16, 48), (1, 5, 24), steps=8, replayed=8, longest=120)


def cache_bytes(shape: dict[str, Any]) -> int:
    """Return the bytes of a token in a KV cache in bfloat16."""
    width = shape["hidden_size"] // shape["num_attention_heads"]
    return int(4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * width)


def engine(
    plan: Plan,
    das: dict[str, Any] | None,
    cache: int | None = None,
    policy: str | None = None,
    **settings: Any,
) -> Any:
    """Start `vllm.LLM`, and with das-adapter, on the model runner that it takes, where
    there is a block.

    Args:
        plan: Its shape is the policy's.
        das: The block.
        cache: Tokens of its KV cache; None: as many as memory is left for. Engines
            whose cache is known may start at the same time, since vLLM then measures no
            memory.
        policy: Directory of a checkpoint; None: vLLM's random weights.
        settings: Further engine arguments.
    """
    from vllm import LLM

    from das_adapter.config import parse
    from das_adapter.protocol.engine_args import engine_args

    shape = SHAPES[plan.shape]
    if not policy:
        policy = tempfile.mkdtemp(dir=os.environ.get(FOLDER))
        (Path(policy) / "config.json").write_text(json.dumps(shape))
        settings |= {"load_format": "dummy"}
    args = {
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "enable_prefix_caching": False,
        "seed": 0,
        "dtype": shape["torch_dtype"],
        "max_num_seqs": max((*plan.batches, plan.replayed)),
    }
    if cache:
        args |= {
            "kv_cache_memory_bytes": cache * cache_bytes(shape),
            "gpu_memory_utilization": _FREE,
        }
    if plan.tiny:
        args |= {"kv_cache_memory_bytes": 2**26, "enforce_eager": True}
    STARTED.append(LLM(policy, **{**args, **engine_args(parse(das)), **settings}))
    return STARTED[-1]


@contextlib.contextmanager
def process(
    plan: Plan, env: dict[str, str] | None = None
) -> Iterator[Callable[..., Any]]:
    """Start a process with these environment variables, and end it with its engines.
    Yields what runs `work(*args)` in it and returns what that returns.

    Raises:
        RuntimeError: the work failed; with its traceback.
        TimeoutError: the plan's time is over.
    """
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="das-bench-") as folder,
        ProcessPoolExecutor(
            1, spawn, _begin, ({FOLDER: folder, **(env or {})},)
        ) as pool,
    ):
        started = pool.submit(os.getpid).result()
        _RUNNING.add(started)

        def run(work: Callable[..., Any], *args: Any) -> Any:
            try:
                return pool.submit(_run, work, args).result(
                    min(3600.0, max(0.0, plan.until - time.monotonic()))
                )
            except TimeoutError:
                _kill(started)
                raise TimeoutError("no time is left") from None

        try:
            yield run
        except (KeyboardInterrupt, SystemExit):
            _kill(started)  # without a word: it is at work
            raise
        finally:
            # else its engines would keep the GPU's memory for a while
            with contextlib.suppress(Exception):
                pool.submit(_end).result(END_S)
            _kill(started)


def _kill(started: int) -> None:
    _RUNNING.discard(started)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started, signal.SIGKILL)


@contextlib.contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Do things in so many threads; where this one is interrupted, end the processes
    that they have started.
    """
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except (KeyboardInterrupt, SystemExit):
            pool.shutdown(wait=False, cancel_futures=True)
            while pool._threads and any(thread.is_alive() for thread in pool._threads):
                for started in list(_RUNNING):
                    _kill(started)
                time.sleep(0.05)  # one may just have been started
            raise


def at_once(*works: Callable[[], Any]) -> None:
    """Do these at the same time.

    Raises:
        Exception: what the first of those that failed has raised, when all are done.
    """
    with threads(len(works)) as pool:
        for each in [pool.submit(work) for work in works]:
            each.result()


def on_v1() -> bool:
    """Say whether engines without a drafter run vLLM's V1 runner here, whose own noise
    is not keyed.
    """
    from vllm.triton_utils import HAS_TRITON

    from das_adapter.config import DasConfig
    from das_adapter.protocol.engine_args import needs_v1

    return needs_v1(DasConfig()) is not None or not HAS_TRITON


def apart(
    plan: Plan, work: Callable[..., Any], *args: Any, env: dict[str, str] | None = None
) -> Any:
    """Run `work(*args)` in a `process` of its own, and return what it returns."""
    with process(plan, env) as run:
        return run(work, *args)


def _begin(env: dict[str, str]) -> None:
    os.setsid()
    os.environ.update(env)


def _run(work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return work(*args)
    except BaseException:
        raise RuntimeError(traceback.format_exc()) from None


def _end() -> None:
    for llm in STARTED:
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()


def prompts(count: int, tokens: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """Make prompts that have nothing in common."""
    return [
        {
            "prompt_token_ids": [
                (i * 7919 + j * (31 + i)) % (vocabulary - 2) + 1 for j in range(tokens)
            ]
        }
        for i in range(count)
    ]


def sampling(
    lengths: Iterable[int], problems: Iterable[int], seeds: Iterable[int], **stock: Any
) -> list[Any]:
    """Return the sampling parameters of requests that write so many tokens each.
    `stock`: further ones, a value for each request.
    """
    from vllm import SamplingParams

    return [
        SamplingParams(
            temperature=1.0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            extra_args={"das_problem": problem, "das_seed": seed},
            **{name: values[i] for name, values in stock.items()},
        )
        for i, (length, problem, seed) in enumerate(
            zip(lengths, problems, seeds, strict=False)
        )
    ]


def generate(
    llm: Any, asked: Sequence[Any], params: Sequence[Any]
) -> tuple[float, list[list[int]]]:
    """Write a response to each prompt; return the seconds, and the responses."""
    begin = time.perf_counter()
    outputs = llm.generate(asked, params, use_tqdm=False)
    return time.perf_counter() - begin, [list(o.outputs[0].token_ids) for o in outputs]


SEEDS = itertools.count()
"""Of requests that write at random: none has one twice, so that no rollout writes the
text of another.
"""


class Measured(NamedTuple):
    """A figure and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, samples: list[float]) -> Measured:
        """Return the median of some samples, which an interruption does not change,
        with its error.
        """
        spread = statistics.stdev(samples) if len(samples) > 1 else float("inf")
        return cls(statistics.median(samples), 1.2533 * spread / len(samples) ** 0.5)


_IDS = itertools.count()
FULL, BLOCK = 4, 16
"""Tokens that all requests have before steps are measured: none reads its prompt any
more. Tokens of a block of the KV cache.
"""


def step_seconds(
    llm: Any, batch: int, context: int, steps: int, vocabulary: int, **stock: Any
) -> float:
    """Return the seconds that one token of each request takes, while all are writing:
    `steps` tokens, less those by which the first is ahead of the last. Whatever the
    engine's processes and runner are, this is what a rollout waits for. `stock`: as for
    `sampling`.
    """
    vllm = llm.llm_engine
    written = dict[str, int]()
    params = sampling([FULL + steps] * batch, range(batch), SEEDS, **stock)
    for prompt, param in zip(prompts(batch, context, vocabulary), params, strict=True):
        written[name := f"step-{next(_IDS)}"] = 0
        vllm.add_request(name, prompt, param)
    begin = end = first = 0.0
    while vllm.has_unfinished_requests():
        for output in vllm.step():
            written[output.request_id] = len(output.outputs[0].token_ids)
        if not begin and min(written.values()) >= FULL:
            begin = time.perf_counter()
            first = max(written.values())
        if not end and max(written.values()) == FULL + steps:
            end = time.perf_counter()
    return (end - begin) / (FULL + steps - first) if 0.0 < begin < end else float("nan")
