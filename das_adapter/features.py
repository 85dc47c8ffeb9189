"""What of das-adapter is missing where a host lacks a part: everything else works
without it.

A patch says which feature it is for (`Patch.feature`), and so does a symbol that is
relied on. Of a module that a host may drop as a whole, this table says it.
"""

from __future__ import annotations

ROUTING = "routing"
RUN_AHEAD = "run-ahead"
FIGURES = "figures of the rollouts in the trainer's log"
CHECKPOINTS = "checkpoints of the history"
FULLY_ASYNC = "fully asynchronous training"
V1_TRAINERS = "training with trainer.use_v1=True"
V1_CHECKPOINTS = "checkpoints of the history with trainer.use_v1=True"
V0_CHECKPOINTS = "checkpoints of the history with trainer.use_v1=False"
PPO = "PPO"
DISTILLATION = "distillation"
SINGLE_CONTROLLER = "the single controller"
DATA_PLANE = "validation with a data plane"
V1_RUNNER = "engines on vLLM's V1 model runner"
V1_DRAFTERS = "trained drafters on vLLM's V1 model runner"
DSPARK = "the drafter dspark"
DFLASH = "weight syncs of the drafter dflash"
OWN_WEIGHTS = "drafters with weights of their own"
ENGINE_FIGURES = "figures in vLLM's log"
REHEARSAL = "trying drafts before the first request"
WEIGHT_CALLS = "weight syncs by calls of workers, without a host"
ADAPTERS = "weight syncs of adapters, without a host"

PARTS = {
    "verl.experimental.fully_async_policy": FULLY_ASYNC,
    "verl.trainer.ppo.v1.agent_loop_tq": V1_TRAINERS,
    "verl.trainer.ppo.v1.trainer_base": V1_CHECKPOINTS,
    "verl.trainer.ppo.ray_trainer": V0_CHECKPOINTS,
    "verl.workers.rollout.router": ROUTING,
    "nemo_rl.algorithms.ppo": PPO,
    "nemo_rl.algorithms.distillation": DISTILLATION,
    "nemo_rl.algorithms.single_controller_utils": SINGLE_CONTROLLER,
    "nemo_rl.algorithms.grpo_sync": DATA_PLANE,
    "vllm.v1.worker.gpu_model_runner": V1_RUNNER,
    "vllm.v1.sample": V1_RUNNER,
    "vllm.v1.spec_decode.llm_base_proposer": V1_DRAFTERS,
    "vllm.v1.worker.gpu.spec_decode.dspark": DSPARK,
    "vllm.model_executor.models.qwen3_dflash": DFLASH,
}
"""Packages and modules of hosts that a run may do without, and what is missing then."""


def feature_of(module: str, given: str = "") -> str:
    """Return the feature that a module of a host is for, else the given one; empty:
    every run needs it.
    """
    for part, feature in PARTS.items():
        if module == part or module.startswith(f"{part}."):
            return feature
    return given
