"""`train`: GRPO through TRL, with vLLM in the trainer's process: rollout and step times
with the history, beside stock vLLM's.

It trains the policy of `examples/tiny_math`, widened to the size of the shape with the
same function, so that its rollouts are real text and its rewards rise.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

from das_adapter.bench.engines import (
    BLOCK,
    FOLDER,
    FREE,
    HISTORY,
    IN_PROCESS,
    INVARIANT,
    KEYED,
    STARTED,
    Bar,
    Found,
    Plan,
    apart,
    at_once,
    cache_bytes,
    process,
    stats_of,
)
from das_adapter.protocol.metrics import figures, response_hash
from das_adapter.reports.compare import claims

Block = dict[str, Any] | None
ARMS: dict[str, Block] = {"stock": None, "none, keyed": KEYED, "history": HISTORY}
"""Stock vLLM, whose noise is its own; keyed noise without a drafter; and with one."""
STEP = ("rollout_s", "step_s", "reward", "tokens", "longest", "tokens_per_forward")
"""Figures of each step."""


class Extent(NamedTuple):
    """How much is trained."""

    problems: int
    """Problems in the data; all come back in each epoch."""
    batch: int
    """Problems of a step."""
    group: int
    """Samples of a problem."""
    micro: int
    """Samples of a forward and backward pass of the trainer."""
    epochs: int
    longest: int
    """Tokens of a response, at most."""
    equal_steps: int
    """Steps of the part with batch-invariant kernels."""
    widen: tuple[str, ...]
    """Arguments of widen_policy.py."""

    @property
    def steps(self) -> int:
        return self.epochs * self.problems // self.batch


_WIDE = ("--width", "8", "--layers", "28", "--dtype", "bfloat16")
_NARROW = ("--width", "1", "--layers", "4", "--dtype", "float32")
EXTENTS = {
    "1.5b": Extent(32, 8, 8, 8, 3, 768, 4, _WIDE),
    "tiny": Extent(4, 2, 4, 8, 2, 96, 2, _NARROW),
}
"""By shape. The wide policy has 1.35 billion parameters: 28 layers, 2048 wide."""
PROMPT = 256
"""Tokens of a prompt, at most."""
LEARNING_RATE = 2e-5
DAS_CONFIG = "DAS_CONFIG"
"""Environment variable of the block of an engine without a host."""


def measure(plan: Plan, *_: Any) -> Iterator[Found]:
    """Train all arms, which take turns step by step, and yield the figures behind each
    step; then train some steps with batch-invariant kernels and a deterministic
    trainer, where the tokens of both arms with keyed noise must be equal.
    """
    missing = [name for name in ("trl", "vllm") if not importlib.util.find_spec(name)]
    if missing:
        raise ModuleNotFoundError(f"found no package {missing[0]}: pip install trl")
    if plan.tiny_math is None or plan.shape not in EXTENTS:
        raise ValueError(
            "train needs --shape 1.5b, and in --tiny-math the folder"
            " examples/tiny_math of das-adapter's repository"
        )
    extent = EXTENTS[plan.shape]
    found: Found = {"trl": apart(plan, _version_of_trl), "extent": extent._asdict()}
    with tempfile.TemporaryDirectory(prefix="das-bench-") as folder:
        policy = Path(folder) / "policy"
        apart(plan, _make_policy, plan, policy)
        for arms in train(plan, ARMS, policy, extent.steps, {}):
            found["arms"] = arms
            found["of_stock"] = by_epoch(arms, extent)
            found["claims"] = _claims_of(arms)
            yield found
        keyed = {name: das for name, das in ARMS.items() if name != "stock"}
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if not plan.tiny:
            environment |= INVARIANT
        for arms in train(plan, keyed, policy, extent.equal_steps, environment):
            found["equal"] = {
                "steps": len(arms["history"]["token_hash"]),
                "differ": _num_differ(arms),
                "arms": arms,
            }
            yield found


def train(
    plan: Plan,
    blocks: dict[str, Block],
    policy: Path,
    steps: int,
    environment: dict[str, str],
) -> Iterator[dict[str, Found]]:
    """Train arms that take turns: yield their figures behind each step, by arm: what
    `_start` returns, and a list of each of `STEP`, of `token_hash`, and of `of_stock`.
    """
    run: dict[str, Callable[..., Any]] = {}
    with contextlib.ExitStack() as processes:
        for name, das in blocks.items():
            arm = process(plan, _environment(plan, das) | environment)
            run[name] = processes.enter_context(arm)
        is_exact = bool(environment)
        arms: dict[str, Found] = {name: {} for name in blocks}

        def start(name: str) -> None:
            arms[name] |= run[name](_start, plan, policy, steps, is_exact)

        at_once(*(functools.partial(start, name) for name in blocks))
        names = list(blocks)
        for _ in range(steps):
            for name in names:
                for figure, value in run[name](_step).items():
                    arms[name].setdefault(figure, []).append(value)
            names.reverse()
            yield arms


def by_epoch(arms: dict[str, Found], extent: Extent) -> dict[str, Found]:
    """Return the rollout and step times of each arm, by epoch, relative to stock's, and
    relative to keyed noise without drafts, which writes the same tokens while the
    policies are the same; and each epoch's mean reward.
    """
    epoch = extent.problems // extent.batch
    found: dict[str, Found] = {}
    for name, arm in arms.items():
        found[name] = {"reward": _each(arm["reward"], epoch, statistics.mean)}
        for figure in ("rollout_s", "step_s"):
            sums = _each(arm[figure], epoch, sum)
            for other in ("stock", "none, keyed"):
                others = _each(arms[other][figure], epoch, sum)
                ratios = [own / of for own, of in zip(sums, others, strict=True)]
                found[name][f"{figure} of {other}"] = ratios
    return found


def _each(
    values: Sequence[float], epoch: int, combine: Callable[[Sequence[float]], float]
) -> list[float]:
    """Combine the values of each epoch of so many steps; the last may be short."""
    begins = range(0, len(values), epoch)
    return [combine(values[begin : begin + epoch]) for begin in begins]


def _claims_of(arms: dict[str, Found]) -> list[float | None]:
    """Return what `history` said of its rollout times relative to stock's, as a share
    of what was measured beside keyed noise without drafts.
    """
    ours = arms["history"]
    off = arms["none, keyed"]
    return claims(ours["of_stock"], ours["rollout_s"], off["rollout_s"])


def _num_differ(arms: dict[str, Found]) -> int:
    """Return in how many steps the arms' tokens differ."""
    hashes = [arm["token_hash"] for arm in arms.values()]
    return len(hashes[0]) - sum(map(eq, *hashes))


def _worst_later(found: Found) -> float:
    """Return the rollout time of `history` in the worst of the later epochs."""
    _, *later = found["of_stock"]["history"]["rollout_s of stock"]
    return float(max(later))


def _farthest_claim(found: Found) -> float:
    """Return how far the claims of all steps together are from what was measured.

    Raises:
        ValueError: no step had one.
    """
    known = [share for share in found["claims"] if share is not None]
    return abs(statistics.mean(known) - 1.0)


def _reward_apart(found: Found) -> float:
    """Return by how much the rewards of `history` and stock differ, over all steps."""
    arms = found["arms"]
    ours = statistics.mean(arms["history"]["reward"])
    return abs(ours - statistics.mean(arms["stock"]["reward"]))


BARS = (
    Bar(
        "rollout time of `history` in the first epoch, of stock's",
        1.02,
        lambda found: found["of_stock"]["history"]["rollout_s of stock"][0],
    ),
    Bar(
        "rollout time of `history` in a later epoch, of stock's, at worst",
        0.8,
        _worst_later,
    ),
    Bar(
        "steps whose tokens differ with batch-invariant kernels",
        0,
        lambda found: found["equal"]["differ"],
    ),
    Bar("difference of mean rewards, `history` and stock", 0.05, _reward_apart),
    Bar(
        "das/of_stock, relative to the measured ratio, mean of steps, less 1",
        0.1,
        _farthest_claim,
    ),
)


def _environment(plan: Plan, das: Block) -> dict[str, str]:
    """Return the environment variables of an arm's process."""
    environment = IN_PROCESS | {"TQDM_DISABLE": "1"}
    if das is not None:
        environment[DAS_CONFIG] = json.dumps(das)
    if plan.tiny:
        environment["DAS_CPU_WEIGHT_SYNC"] = "1"
    return environment


def _version_of_trl() -> str:
    import trl

    return str(trl.__version__)


def _make_policy(plan: Plan, out: Path) -> None:
    """Write the policy of the shape's size."""
    script = _tiny_math(plan) / "widen_policy.py"
    widen = EXTENTS[plan.shape].widen
    subprocess.run([sys.executable, str(script), str(out), *widen], check=True)


def _tiny_math(plan: Plan) -> Path:
    folder = plan.tiny_math
    assert folder is not None
    return folder.resolve()


_ARM: list[_Arm] = []
"""The training of this process."""


def _start(plan: Plan, policy: Path, steps: int, is_exact: bool) -> Found:
    """Start this process's training, and wait until it is about to roll out."""
    begin = time.perf_counter()
    arm = _Arm(plan, policy, steps, is_exact)
    _ARM.append(arm)
    arm.wait()
    return {"start_s": time.perf_counter() - begin}


def _step() -> Found:
    """Do one training step, and return its figures."""
    (arm,) = _ARM
    return arm.step()


class _Arm:
    """A training in a thread of this process, which rolls out when it is asked to."""

    def __init__(self, plan: Plan, policy: Path, steps: int, is_exact: bool) -> None:
        self._plan = plan
        self._policy = policy
        self._steps = steps
        self._is_exact = is_exact
        self._asked = queue.SimpleQueue[None]()
        self._ended = queue.SimpleQueue[str]()
        self._rollout: Found = {}
        self._trainer: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when a step has ended, and the trainer is about to roll out.

        Raises:
            RuntimeError: it failed; with its traceback.
        """
        error = self._ended.get()
        if error:
            raise RuntimeError(error)

    def step(self) -> Found:
        """Do one step; return its figures."""
        begin = time.perf_counter()
        self._asked.put(None)
        self.wait()
        found = self._rollout
        found["step_s"] = time.perf_counter() - begin
        rewards = [row for row in self._trainer.state.log_history if "reward" in row]
        found["reward"] = rewards[-1]["reward"]
        found["memory"] = _memory()
        return found

    def _run(self) -> None:
        try:
            self._trainer = self._make_trainer()
            self._trainer.train()
        except BaseException:
            self._ended.put(traceback.format_exc())
        else:
            self._ended.put("")

    def generate(self, generation: Any, stock: Callable[[], Any]) -> Any:
        """Roll out when it is asked for; return what `stock` returns."""
        if not STARTED:
            STARTED.append(generation.llm)
        self._ended.put("")
        self._asked.get()
        begin = time.perf_counter()
        answer = stock()
        self._rollout = _of_rollout(answer[1], generation.llm)
        self._rollout["rollout_s"] = time.perf_counter() - begin
        return answer

    def _make_trainer(self) -> Any:
        import torch
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
        from trl.generation import vllm_generation
        from trl.trainer import grpo_trainer

        extent = EXTENTS[self._plan.shape]
        arm = self
        has_gpu = torch.cuda.is_available()

        class Generation(vllm_generation.VLLMGeneration):
            """TRL's generation, which rolls out when it is this arm's turn."""

            def generate(self, *args: Any, **kwargs: Any) -> Any:
                stock = functools.partial(super().generate, *args, **kwargs)
                return arm.generate(self, stock)

        # several engines start at once, so none may measure what is free
        tokens = extent.batch * extent.group * (PROMPT + extent.longest + BLOCK)
        policy = json.loads((self._policy / "config.json").read_text())
        num_bytes = tokens * cache_bytes(policy)
        if self._plan.tiny:
            num_bytes *= 2  # it is in float32
        stock = vllm_generation.LLM

        def engine(**settings: Any) -> Any:
            # any port that is free: TRL would give all arms the same one
            os.environ["MASTER_PORT"] = "0"
            settings["kv_cache_memory_bytes"] = num_bytes
            settings["enforce_eager"] = self._plan.tiny
            return stock(**settings)

        vllm_generation.LLM = engine
        grpo_trainer.VLLMGeneration = Generation
        rows, reward = _task(_tiny_math(self._plan), extent)
        config = GRPOConfig(
            output_dir=os.environ[FOLDER],
            use_cpu=not has_gpu,
            bf16=has_gpu,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=has_gpu,
            max_steps=self._steps,
            seed=0,
            full_determinism=self._is_exact and has_gpu,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            per_device_train_batch_size=extent.micro,
            gradient_accumulation_steps=extent.batch * extent.group // extent.micro,
            num_generations=extent.group,
            max_completion_length=extent.longest,
            temperature=1.0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=FREE,
            vllm_max_model_length=PROMPT + extent.longest,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        return GRPOTrainer(
            str(self._policy),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
        )


def _task(folder: Path, extent: Extent) -> tuple[list[Found], Callable[..., Any]]:
    """Return the rows of the data, and the reward of completions."""
    sys.path.append(str(folder))
    task = importlib.import_module("task")
    data = importlib.import_module("prepare_data")
    rows = []
    for made in data.make_rows("train", extent.problems, 0):
        (turn,) = made["prompt"]
        answer = made["reward_model"]["ground_truth"]
        rows.append({"prompt": [turn], "problem": turn["content"], "answer": answer})

    def reward(
        completions: Any, problem: list[str], answer: list[str], **_: Any
    ) -> list[float]:
        scores = []
        for completion, text, right in zip(completions, problem, answer, strict=True):
            said = completion[0]["content"]
            scored = task.compute_score("", said, right, {"problem": text})
            scores.append(float(scored["score"]))
        return scores

    return rows, reward


def _of_rollout(texts: list[list[int]], llm: Any) -> Found:
    """Return the figures of a rollout but for its time.

    Args:
        texts: token ids of the responses.
        llm: its engine.
    """
    import numpy as np

    lengths = [len(text) for text in texts]
    hashes = 0
    for number, text in enumerate(texts):
        tokens = np.array(text, dtype=np.int32).tobytes()
        hashes += response_hash(tokens, number)
    found: Found = {
        "tokens": sum(lengths),
        "longest": max(lengths),
        "token_hash": hashes % 2**48,
        "tokens_per_forward": 1.0,
        "of_stock": None,
    }
    if DAS_CONFIG in os.environ:
        stats = stats_of(llm)
        counted = figures([stats])
        found["tokens_per_forward"] = counted["das/tokens_per_forward"]
        found["of_stock"] = counted.get("das/of_stock")
    return found


def _memory() -> int | None:
    """Return the bytes that are taken of the device; None: there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
