"""Run GRPO with the tiny policy through NeMo-RL's real `setup()` and trainers on a CPU;
figures go to a JSONL file.

`arms.py` starts it, once per arm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import uuid
from pathlib import Path
from typing import Any

from das_adapter.cpu.nemo_rl_process import REFIT_SOCKETS, prepare

prepare()  # before anything of NeMo-RL is imported
ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "examples/tiny_math"), str(ROOT / "examples/nemo_rl")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*sys.path[-2:], os.environ.get("PYTHONPATH", "")]
)
os.environ.setdefault(REFIT_SOCKETS, f"das-{uuid.uuid4().hex[:12]}")

import random  # noqa: E402

import nemo_rl  # noqa: E402
import ray  # noqa: E402
import task  # noqa: E402
import torch  # noqa: E402
from nemo_rl.algorithms import grpo  # noqa: E402
from nemo_rl.algorithms.utils import get_tokenizer  # noqa: E402
from nemo_rl.environments.interfaces import EnvironmentReturn  # noqa: E402
from nemo_rl.models.generation import configure_generation_config  # noqa: E402
from nemo_rl.utils.config import (  # noqa: E402
    load_config,
    parse_hydra_overrides,
    register_omegaconf_resolvers,
)
from omegaconf import OmegaConf  # noqa: E402
from tiny_policy import TinyPolicy  # noqa: E402

TASK = "tiny_math"


class Problems(torch.utils.data.Dataset):
    """The problems of tiny_math, as NeMo-RL's DatumSpec."""

    def __init__(self, tokenizer: Any, count: int, repeats: int, seed: int):
        rng = random.Random(seed)
        steps = [
            rng.randint(*task.STRATA[i % len(task.STRATA)][:2]) for i in range(count)
        ]
        self.problems = [task.make_problem(rng, min(n, 34)) for n in steps] * repeats
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, i: int) -> dict[str, Any]:
        message = {"role": "user", "content": self.problems[i]}
        ids = self.tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )
        return {
            "message_log": [{**message, "token_ids": torch.tensor(ids)}],
            "length": len(ids),
            "extra_env_info": {"problem": self.problems[i]},
            "loss_multiplier": 1.0,
            "idx": i,
            "task_name": TASK,
        }


@ray.remote(num_cpus=0)
class Checker:
    """NeMo-RL's environment of one turn, which tiny_math's rule scores."""

    def step(self, logs: list[Any], infos: list[Any]) -> Any:
        scores = [
            task.compute_score(
                "", log[-1]["content"], task.answer(info["problem"]), info
            )["score"]
            for log, info in zip(logs, infos, strict=True)
        ]
        done = torch.ones(len(logs))
        nothing = [{"role": "environment", "content": ""} for _ in logs]
        return EnvironmentReturn(
            nothing,
            infos,
            [None] * len(logs),
            torch.tensor(scores),
            done,
            [None] * len(logs),
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}

    def shutdown(self) -> bool:
        return True


def main() -> None:
    """Train with the given overrides, and write a line per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument(
        "--stock-driver",
        action="store_true",
        help="NeMo-RL as it is: speculation by YAML alone",
    )
    args, overrides = parser.parse_known_args()
    if not args.stock_driver:
        from das_adapter.nemo_rl.install import install

        install()
    register_omegaconf_resolvers()
    configs = Path(nemo_rl.__file__).parents[1] / "examples/configs"
    layers = (
        configs / "grpo_math_1B.yaml",
        ROOT / "configs/nemo_rl/das.yaml",
        Path(__file__).parent / "grpo_tiny_math_cpu.yaml",
    )
    config = OmegaConf.merge(*(load_config(str(layer)) for layer in layers))
    config = OmegaConf.to_container(
        parse_hydra_overrides(config, overrides), resolve=True
    )
    config = grpo.MasterConfig(**config)

    os.environ["PYTHONHASHSEED"] = "0"
    ray.init(
        "local",
        num_cpus=8,
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=500_000_000,
        runtime_env={"worker_process_setup_hook": prepare},
    )
    # NeMo-RL looks for it; others may run Ray here
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    config.policy["generation"] = configure_generation_config(
        config.policy["generation"], tokenizer
    )
    asynchronous = config.grpo.async_grpo.enabled
    if asynchronous:
        resources = config.policy["generation"]["colocated"]["resources"]
        replicas = resources["gpus_per_node"]
        # its trainer goes through the data only once
        num_prompts = config.grpo.max_num_steps * config.grpo.num_prompts_per_step
        repeats = num_prompts // args.problems + 2
    else:
        replicas = config.cluster["gpus_per_node"]
        repeats = 1
    train = Problems(tokenizer, args.problems, repeats, seed=1)
    held_out = Problems(tokenizer, 4, 1, seed=2)
    environments = {TASK: Checker.remote()}

    def make_policy(
        config: Any, weights_path: Path | None, optimizer_path: Path | None, **_: Any
    ) -> TinyPolicy:
        return TinyPolicy(config, replicas, weights_path, optimizer_path)

    (
        policy,
        generation,
        _gym,
        _cluster,
        loader,
        val_loader,
        loss_fn,
        logger,
        checkpointer,
        state,
        config,
        *_,
    ) = grpo.setup(config, tokenizer, train, held_out, policy_factory=make_policy)
    record(logger, args.out)
    train_loop = grpo.grpo_train
    extra = {}
    if asynchronous:
        train_loop = grpo.async_grpo_train
        max_age = config.grpo.async_grpo.max_trajectory_age_steps
        extra["max_trajectory_age_steps"] = max_age
    train_loop(
        policy,
        generation,
        loader,
        val_loader,
        tokenizer,
        loss_fn,
        environments,
        environments,
        logger,
        checkpointer,
        state,
        config,
        **extra,
    )


def record(logger: Any, out: Path) -> None:
    """Write the scalars that NeMo-RL logs to a file as well: a line per step and
    prefix.
    """
    stock = logger.log_metrics

    def log_metrics(
        metrics: dict[str, Any], step: int, prefix: str = "", **kwargs: Any
    ) -> None:
        scalars = {}
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                scalars[name] = float(value)
        row = {"step": step, "prefix": prefix, "data": scalars}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        stock(metrics, step, prefix, **kwargs)

    logger.log_metrics = log_metrics


if __name__ == "__main__":
    code = 1
    try:
        main()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        # takes Ray along; NeMo-RL's own teardown may wait for ever for a worker that is
        # gone
        os._exit(code)
