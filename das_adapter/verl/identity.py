"""The identity of a sample, carried from the agent loop through the client into `extra_args`.

It works with any agent loop: the identity is in a context variable of the sample's asyncio task, so neither the
loop nor its tools need to know of it.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from das_adapter.config import DasConfig
from das_adapter.core.identity import prompt_identity, request_seed
from das_adapter.protocol.label import Label
from das_adapter.verl import settings

MEDIA = ("image_data", "video_data", "audio_data")
"""Arguments of veRL's `generate` that belong to a problem and leave only place holders in its prompt."""
ABORTED = ("aborted", "abort")
"""Stop reasons of a request that was interrupted by a weight sync; the client resumes it."""


@dataclass
class Sample:
    """A trajectory that is being written."""

    row: int
    """Index of the prompt in the data set; 0 where it has none."""
    step: int
    sample: int
    validate: bool
    problem: int | None = None
    """Identity of the problem: the first turn's prompt. Later turns and resumed fragments keep it."""
    start: int = 0
    """Tokens of the conversation that are prompt or already in the history: a resumed request keeps it, the next turn
    begins behind this one's answer."""


_current: ContextVar[Sample | None] = ContextVar("das_sample", default=None)


def around_agent_loop(stock: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap `AgentLoopWorker._run_agent_loop(self, sampling_params, trajectory, *, agent_name, ...)`: set the sample."""

    @functools.wraps(stock)
    async def run(self: Any, sampling_params: Any, trajectory: dict[str, Any], **kwargs: Any) -> Any:
        token = _current.set(
            Sample(
                row=_integer(trajectory.get("sample_index")),
                step=_integer(trajectory.get("step")),
                sample=_integer(kwargs.get("session_id", trajectory.get("rollout_n"))),
                validate=bool(trajectory.get("validate")),
            )
        )
        try:
            return await stock(self, sampling_params, trajectory, **kwargs)
        finally:
            _current.reset(token)

    return run


async def around_generate(stock: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrap `LLMServerClient.generate(request_id, *, prompt_ids, sampling_params, ...)`: label the request."""
    if not hasattr(instance, "_das"):
        instance._das = settings.of_run(instance.config)
    sample = _current.get()
    if instance._das is None or sample is None:
        return await stock(*args, **kwargs)
    prompt, media = kwargs["prompt_ids"], any(kwargs.get(name) for name in MEDIA)
    params = label(instance._das, sample, prompt, media).put_into(kwargs["sampling_params"])
    output = await stock(*args, **{**kwargs, "sampling_params": params})
    if output.stop_reason not in ABORTED:
        sample.start = len(prompt) + len(output.token_ids)
    return output


def label(das: DasConfig, sample: Sample, prompt_ids: Any, media: bool = False) -> Label:
    """Label a request of a sample; `media`: whether the prompt has images, sound or video."""
    if sample.problem is None:
        sample.problem, sample.start = prompt_identity(prompt_ids, *[sample.row] * media), len(prompt_ids)
    number = -1 - sample.sample if sample.validate else sample.sample
    seed = request_seed(das.verify.seed, sample.problem, sample.step, number, sample.row)
    return Label(sample.problem, seed, not sample.validate, sample.start)


def _integer(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):  # not a number, or missing
        return 0
