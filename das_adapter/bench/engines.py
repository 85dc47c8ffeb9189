"""Engines with random weights in the shape of real policies, and what measures them."""

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

from das_adapter.core import tuning
from das_adapter.core.policy_sizes import policy_sizes, recurrent_state

_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
_QWEN3_NEXT: dict[str, Any] = _QWEN2 | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    # experts in the last layer: vLLM takes no policy without
    "mlp_only_layers": list(range(11)),
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_TIED = {"tie_word_embeddings": True}
_FLOAT32 = {"torch_dtype": "float32"}


def _sizes(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
) -> dict[str, int]:
    """Return the sizes of a model under the names of a Hugging Face config."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "7b": _QWEN2 | _sizes(28, 3584, 18944, 28, 4, 152064),
    "1.5b": _QWEN2 | _TIED | _sizes(28, 1536, 8960, 12, 2, 151936),
    "hybrid": _QWEN3_NEXT | _sizes(12, 2048, 5120, 16, 2, 151936),
    "tiny": _QWEN2 | _TIED | _FLOAT32 | _sizes(2, 128, 128, 2, 1, 997),
}
"""Configs of Qwen2.5's sizes, and of Qwen3-Next's layers, by shape; `tiny` only tests
this program.
"""
HISTORY: dict[str, Any] = {"drafter": "history"}
KEYED: dict[str, Any] = {"drafter": "none", "verify": {"noise": "keyed"}}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
"""Environment of engines whose logits do not depend on the batch."""
FOLDER = "DAS_BENCH_FOLDER"
"""Environment variable of a process of `apart`: the directory for its files, which are
removed when it ends.
"""
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment of engines whose worker is in the process that calls them."""


Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Extent of the measurements."""

    shape: str
    """Key of `SHAPES`."""
    batches: Sizes = (1, 8, 64, 256)
    """Requests that decode at once."""
    contexts: Sizes = (2048, 8192)
    """Tokens of context of each request."""
    rows: Sizes = (1, 8, 64, 256, 2048, 8704)
    """Rows of logits that are sampled at once."""
    steps: int = 64
    """Decode steps that one figure is measured in."""
    replayed: int = 128
    """Requests of the replayed batch."""
    longest: int = 2560
    """Tokens of the longest response of the replayed batch."""
    until: float = math.inf
    """When the part is ended, by `time.monotonic`."""
    tiny_math: Path | None = None
    """Directory `examples/tiny_math` of the repository; None: it is not there."""

    @property
    def tiny(self) -> bool:
        return self.shape == "tiny"

    @property
    def vocabulary(self) -> int:
        return int(SHAPES[self.shape]["vocab_size"])


Found = dict[str, Any]
"""Figures of a part."""


class Bar(NamedTuple):
    """A limit that a figure of a part must keep."""

    says: str
    """Name of the figure, with its unit."""
    at_most: float
    value: Callable[[Found], float | None]
    """Function of a part's figures that returns this one. It raises LookupError,
    ValueError or TypeError, or returns None, where its figures were not measured.
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
        elif content["state"] == "done":
            verdict = "kept"
        else:
            verdict = "cut short"
        return {
            "bar": self.says,
            "found": found,
            "at_most": self.at_most,
            "verdict": verdict,
        }


STARTED: list[Any] = []
"""Engines of this process."""
END_S = 10.0
"""Seconds that engines have to end."""
_RUNNING: set[int] = set()
"""Leaders of the process groups that `process` has started."""
FREE = 0.05
"""Share of the device's memory that must be free where the KV cache's size is known."""
TINY = Plan(
    shape="tiny",
    batches=(1, 4),
    contexts=(16, 48),
    rows=(1, 5, 24),
    steps=8,
    replayed=8,
    longest=120,
)
"""Plan that only tests this program, on a CPU."""


def is_recurrent(shape: dict[str, Any]) -> bool:
    """Return whether a policy of this shape has recurrent layers."""
    return recurrent_state(shape) is not None


def cache_bytes(shape: dict[str, Any]) -> int:
    """Return the bytes of a token in a KV cache in bfloat16."""
    sizes = policy_sizes(shape)
    # keys and values, two bytes each
    return 4 * sizes.attention_layers * sizes.kv_heads * sizes.head_width


def state_bytes(shape: dict[str, Any], requests: int) -> int:
    """Return the bytes of the recurrent states of so many requests, with the longest
    drafts; 0: there are none.
    """
    state = recurrent_state(shape)
    if state is None:
        return 0
    num_states = 1 + tuning.RECURRENT_DRAFT_MOST
    # vLLM pads a state to whole blocks of the KV cache
    return 2 * requests * num_states * state.num_bytes


def engine(
    plan: Plan,
    das: dict[str, Any] | None,
    cache: int | None = None,
    policy: str | None = None,
    **settings: Any,
) -> Any:
    """Start `vllm.LLM`; with das-adapter, on the model runner that it needs, where
    there is a block.

    Args:
        plan: its shape is the policy's.
        das: the block; None: stock vLLM.
        cache: tokens of its KV cache; None: as many as memory is left for. Engines
            whose cache is known may start at the same time, since vLLM then measures no
            memory.
        policy: directory of a checkpoint; None: vLLM's random weights.
        settings: further engine arguments.
    """
    from vllm import LLM

    from das_adapter.config import parse
    from das_adapter.protocol.engine_args import engine_args

    shape = SHAPES[plan.shape]
    if not policy:
        policy = tempfile.mkdtemp(dir=os.environ.get(FOLDER))
        config = Path(policy) / "config.json"
        config.write_text(json.dumps(shape))
        settings["load_format"] = "dummy"
    args: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "enable_prefix_caching": False,
        "seed": 0,
        "dtype": shape["torch_dtype"],
        "max_num_seqs": max(*plan.batches, plan.replayed),
    }
    if cache:
        states = state_bytes(shape, args["max_num_seqs"])
        args["kv_cache_memory_bytes"] = cache * cache_bytes(shape) + states
        args["gpu_memory_utilization"] = FREE
    if is_recurrent(shape):
        # as verified steps have it between their tokens
        args["mamba_ssm_cache_dtype"] = "float32"
    if plan.tiny:
        args["kv_cache_memory_bytes"] = 2**26
        args["enforce_eager"] = True
    args |= engine_args(parse(das))
    args |= settings
    llm = LLM(policy, **args)
    STARTED.append(llm)
    return llm


@contextlib.contextmanager
def process(
    plan: Plan,
    env: dict[str, str] | None = None,
) -> Iterator[Callable[..., Any]]:
    """Start a process with these environment variables, and end it with its engines.
    Yield a function that runs `work(*args)` in it and returns what that returns.

    Raises:
        RuntimeError: the work failed; with its traceback.
        TimeoutError: the plan's time is over.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="das-bench-") as folder:
        environment = {FOLDER: folder, **(env or {})}
        with ProcessPoolExecutor(1, spawn, _begin, (environment,)) as pool:
            started = pool.submit(os.getpid).result()
            _RUNNING.add(started)

            def run(work: Callable[..., Any], *args: Any) -> Any:
                left_s = plan.until - time.monotonic()
                wait_s = min(3600.0, max(0.0, left_s))
                result = pool.submit(_run, work, args)
                try:
                    return result.result(wait_s)
                except TimeoutError:
                    _kill(started)
                    raise TimeoutError("no time is left") from None

            try:
                yield run
            except (KeyboardInterrupt, SystemExit):
                _kill(started)  # at once, since it is at work
                raise
            finally:
                # else its engines would keep the GPU's memory for a while
                with contextlib.suppress(Exception):
                    ended = pool.submit(_end)
                    ended.result(END_S)
                _kill(started)


def _kill(started: int) -> None:
    _RUNNING.discard(started)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started, signal.SIGKILL)


@contextlib.contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of so many threads; where this one is interrupted, end the processes
    that they have started.
    """
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except (KeyboardInterrupt, SystemExit):
            pool.shutdown(wait=False, cancel_futures=True)
            while any(thread.is_alive() for thread in pool._threads):
                for started in list(_RUNNING):
                    _kill(started)
                time.sleep(0.05)  # one may just have been started
            raise


def at_once(*works: Callable[[], Any]) -> None:
    """Call these functions at the same time.

    Raises:
        Exception: what the first of those that failed has raised, when all are done.
    """
    with threads(len(works)) as pool:
        results = [pool.submit(work) for work in works]
        for result in results:
            result.result()


def on_v1() -> bool:
    """Say whether engines without a drafter run vLLM's V1 runner here, whose own noise
    is not keyed.
    """
    from vllm.triton_utils import HAS_TRITON

    from das_adapter.config import DasConfig
    from das_adapter.protocol.engine_args import needs_v1

    reason = needs_v1(DasConfig())
    return reason is not None or not HAS_TRITON


def apart(
    plan: Plan,
    work: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
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


def stats_of(llm: Any) -> Found:
    """Return the counters of an engine's first worker, and set them back to 0."""
    found: list[Found] = llm.collective_rpc("das_rpc", args=("stats", {}))
    return found[0]


def prompts(count: int, tokens: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """Make prompts that have nothing in common."""
    num_ids = vocabulary - 2
    found = []
    for i in range(count):
        first = i * 7919
        step = 31 + i
        ids = [1 + (first + step * place) % num_ids for place in range(tokens)]
        found.append({"prompt_token_ids": ids})
    return found


def sampling(
    lengths: Iterable[int],
    problems: Iterable[int],
    seeds: Iterable[int],
    **stock: Any,
) -> list[Any]:
    """Return the sampling parameters of requests that write so many tokens each.

    Args:
        stock: further parameters of vLLM's, a value for each request.
    """
    from vllm import SamplingParams

    found = list[SamplingParams]()
    requests = zip(lengths, problems, seeds, strict=False)
    for i, (length, problem, seed) in enumerate(requests):
        further = {name: values[i] for name, values in stock.items()}
        params = SamplingParams(
            temperature=1.0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            extra_args={"das_problem": problem, "das_seed": seed},
            **further,
        )
        found.append(params)
    return found


def generate(
    llm: Any,
    asked: Sequence[Any],
    params: Sequence[Any],
) -> tuple[float, list[list[int]]]:
    """Write a response to each prompt; return the seconds, and the responses."""
    begin = time.perf_counter()
    outputs = llm.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    texts = []
    for output in outputs:
        response = output.outputs[0]
        texts.append(list(response.token_ids))
    return seconds, texts


SEEDS = itertools.count()
"""Seeds of requests that write at random: none comes twice, so that no rollout writes
the text of another.
"""
MEDIAN_ERROR = 1.2533
"""Standard error of a median, of that of the mean: the square root of half of pi."""


class Measured(NamedTuple):
    """A figure and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, samples: list[float]) -> Measured:
        """Return the median of some samples, which an interruption does not change,
        with its error.
        """
        count = len(samples)
        spread = float("inf")
        if count > 1:
            spread = statistics.stdev(samples)
        mean_error = spread / count**0.5
        median = statistics.median(samples)
        return cls(median, MEDIAN_ERROR * mean_error)


_IDS = itertools.count()
FULL = 4
"""Tokens that all requests have before steps are measured: none reads its prompt any
more.
"""
BLOCK = 16
"""Tokens of a block of the KV cache."""


INTERRUPTION = 3.0
"""A step counts as at most so many of the median: what is longer interrupts the
machine.
"""


def step_times(
    llm: Any,
    batch: int,
    context: int,
    steps: int,
    vocabulary: int,
    **stock: Any,
) -> list[float]:
    """Decode while all requests are writing, `steps` tokens from `FULL` on; return when
    the engine has brought tokens, on a clock of seconds.

    Args:
        stock: as for `sampling`.
    """
    vllm = llm.llm_engine
    last = FULL + steps
    num_written = dict[str, int]()
    lengths = [last] * batch
    params = sampling(lengths, range(batch), SEEDS, **stock)
    asked = prompts(batch, context, vocabulary)
    for prompt, param in zip(asked, params, strict=True):
        number = next(_IDS)
        name = f"step-{number}"
        num_written[name] = 0
        vllm.add_request(name, prompt, param)
    times = []
    most = 0
    while vllm.has_unfinished_requests():
        outputs = vllm.step()
        for output in outputs:
            tokens = output.outputs[0].token_ids
            num_written[output.request_id] = len(tokens)
        fewest = min(num_written.values())
        if outputs and fewest >= FULL and most < last:
            most = max(num_written.values())
            times.append(time.perf_counter())
    return times


def step_seconds(times: Sequence[float]) -> float:
    """Return the mean seconds of steps that bring each request one token, of which an
    interruption counts as `INTERRUPTION` steps at most; `times`: of `step_times`.
    """
    intervals = [end - begin for begin, end in itertools.pairwise(times)]
    if not intervals:
        return float("nan")
    most_s = INTERRUPTION * statistics.median(intervals)
    counted = [min(seconds, most_s) for seconds in intervals]
    return statistics.mean(counted)
