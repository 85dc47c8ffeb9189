"""Measure how long decode steps take, from the begin of each to the begin of the
next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from das_adapter.config import DasConfig
from das_adapter.core.hardware import recognise
from das_adapter.core.latency import ASSUMED, ASSUMED_ON_GPU, StepModel
from das_adapter.core.policy_sizes import FAMILIES
from das_adapter.core.requests import EMPTY_INTS
from das_adapter.core.roofline import COPY_SHARE, Prior, Roofline
from das_adapter.core.steps import TimedStep

logger = logging.getLogger("vllm.das_adapter")

_WEIGHT_BYTES = {None: 2.0, "fp8": 1.0}
"""Bytes of a weight, by vLLM's name of the quantisation."""


class StepTimer:
    """Times the steps that only decode; steps that also read prompts, and pauses, are
    left out.
    """

    def __init__(self) -> None:
        self._step: TimedStep | None = None
        """The present step; it has no slots until it was sampled. None: it is not
        timed.
        """
        self._begin = 0.0
        """When the present step began, seconds."""
        self._req_ids: list[str] = []
        """Requests of the present step."""

    def begin_step(self, scheduled: Any, now: float) -> TimedStep | None:
        """Begin a step (vLLM's `SchedulerOutput`, seconds), and return the previous
        one, if it was timed.
        """
        step = self._step
        step_s = now - self._begin
        req_ids = self._req_ids
        counts = scheduled.num_scheduled_tokens
        num_tokens = scheduled.total_num_scheduled_tokens
        self._begin = now
        self._req_ids = list(counts)
        self._step = None
        has_new = bool(scheduled.scheduled_new_reqs)
        if counts and not has_new:
            drafts = scheduled.scheduled_spec_decode_tokens
            num_drafted = sum(map(len, drafts.values()))
            if num_tokens == len(counts) + num_drafted:
                self._step = TimedStep(
                    slots=EMPTY_INTS,
                    got=EMPTY_INTS,
                    tokens=num_tokens,
                    seconds=0.0,
                )
        if step is None or not len(step.slots):
            return None  # it was not sampled
        if has_new and counts.keys().isdisjoint(req_ids):
            return None  # a pause without requests lies between them
        policy_s = step_s - step.drafting_seconds
        return step._replace(seconds=policy_s)

    def record_sampled(
        self,
        slots: np.ndarray,
        got: np.ndarray,
        context: int = 0,
        asked: bool = True,
    ) -> None:
        """Record what the step sampled: slots of its requests and the tokens that each
        got, int64 [b], the tokens of context that they have together, and whether a
        drafter is asked; where none is, slots do not matter.
        """
        step = self._step
        if step is not None and (asked or step.tokens == len(slots)):
            self._step = step._replace(
                slots=slots,
                got=got,
                context=context,
                asked=asked,
            )

    def record_drafting(self, seconds: float, passes: int) -> bool:
        """Record the seconds and the forward passes of a model that drafted at the end
        of the step; return whether the step is timed.
        """
        step = self._step
        if step is None:
            return False
        self._step = step._replace(drafting_seconds=seconds, passes=passes)
        return True


def captured_tokens(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return the tokens for which the engine captures CUDA graphs, rising; none where
    it runs without.
    """
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    is_eager = vllm_config.model_config.enforce_eager
    if is_eager or mode is None or mode is CUDAGraphMode.NONE:
        return ()
    sizes = compilation.cudagraph_capture_sizes or ()
    return tuple(sorted(sizes))


def an_eighth_apart(sizes: Iterable[int]) -> list[int]:
    """Return the largest of some sizes, and of the smaller ones each that is an eighth
    away from the last, falling.
    """
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or 9 * size <= 8 * kept[-1]:
            kept.append(size)
    return kept


def before_the_first_step(config: DasConfig, vllm_config: VllmConfig) -> Prior | None:
    """Return what steps take before any was timed, by the roofline of model and GPU;
    None where there is none, as where the table of devices lacks the GPU or
    `Roofline.from_config` does not know the model's family.
    """
    model = vllm_config.model_config
    if config.speculate != "auto" or model.quantization not in _WEIGHT_BYTES:
        return None
    if not current_platform.is_cuda_alike():
        return None
    sizes = model.hf_text_config.to_dict()
    device = recognise(current_platform.get_device_name())
    if device is None or sizes.get("model_type") not in FAMILIES:
        return None
    ranks = vllm_config.parallel_config.tensor_parallel_size
    try:
        roof = Roofline.from_config(
            sizes,
            device,
            ranks,
            _WEIGHT_BYTES[model.quantization],
        )
    except KeyError as error:
        logger.info("das: no roofline: the policy's config lacks %s", error)
        return None
    passes = None
    if config.copies_policy:
        share = COPY_SHARE[config.self.weights]
        passes = roof.step_model(share=share)
    return Prior(roof.step_model(), passes)


def assumed() -> StepModel:
    """Return how the times of steps relate where no roofline tells."""
    if current_platform.is_cuda_alike():
        return ASSUMED_ON_GPU
    return ASSUMED
