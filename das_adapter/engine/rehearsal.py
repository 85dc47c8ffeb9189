"""The rehearsal: an engine takes a few real steps with drafts before its first request,
from vLLM's scheduler to the tokens that come back. Where drafts do not arrive, the
engine goes on as stock, and says what was in the way.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from das_adapter import compat
from das_adapter.config import DasConfig
from das_adapter.engine.failures import place
from das_adapter.engine.plan import DraftPlan
from das_adapter.engine.scheduler import PlanLookup
from das_adapter.engine.settings import runs_v2, settings
from das_adapter.patching import patch
from das_adapter.protocol.label import Label

logger = logging.getLogger("das_adapter")

REQUEST = "das_rehearsal"
TOKEN = 1
"""The only token that this request may write: its text repeats itself, so that the
history has a draft for it. Not 0, with which drafts are filled up.
"""
PROMPT_TOKENS = 4
"""Length of the request's prompt, where the model has room for it."""
STEPS = {1: 3, 2: 6}
"""Steps of the rehearsal by model runner. On V1 the first step drafts and the second
verifies. On V2 a worker's choice comes to the third step, at whose end it drafts; all
data-parallel ranks take the same number.
"""

MOST_TO_CLEAR = 16
"""Steps in which vLLM may tell its workers that the request is over."""


@patch(
    "vllm.v1.engine.core:EngineCore.__init__",
    since="0.24",
    needs="vllm_config",
    feature="trying drafts before the first request",
)
def try_drafts(stock: Any) -> Any:
    """Without it an engine ends at its first draft where its vLLM does not fit
    das-adapter, or never drafts and says nothing (where it runs in the process of its
    front end). Remove this patch when vLLM tells plug-ins that an engine is ready.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        # else it is still to be completed, by a subclass
        if not hasattr(self, "run_busy_loop"):
            rehearse(self)

    return init


@patch(
    "vllm.v1.engine.core:EngineCoreProc.run_busy_loop",
    "vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop",
    since="0.24",
    feature="trying drafts before the first request",
)
def try_drafts_in_process(stock: Any) -> Any:
    """Without it `try_drafts` does not reach an engine in a process of its own, which
    loads plug-ins while it is made. Remove this patch when `try_drafts` is removed.
    """

    def run_busy_loop(self: Any) -> Any:
        rehearse(self)
        return stock(self)

    return run_busy_loop


@dataclass
class RehearsalResult:
    """What a rehearsal has shown in the engine's core."""

    scheduled: int = 0
    """Draft tokens that vLLM's scheduler has made room for."""
    tokens: set[int] = field(default_factory=set)
    """The tokens that the request was given."""
    failure: Exception | None = None
    """What was raised first; None: nothing was."""


def may_rehearse(config: DasConfig, vllm_config: Any) -> bool:
    """Return whether an engine drafts, and its steps concern nobody else."""
    model = vllm_config.model_config
    if config.drafter == "none":
        return False
    if model.runner_type == "pooling" or model.is_encoder_decoder:
        return False
    from vllm import envs

    # the ranks that it joins are decoding
    if getattr(envs, "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", False):
        return False
    # it would hand the request's keys and values on
    if vllm_config.kv_transfer_config is not None:
        logger.info(
            "das: drafts are not tried before the first request: the engine has a KV"
            " connector"
        )
        return False
    return True


def rehearse(core: Any) -> None:
    """Try the drafts of an engine (vLLM's `EngineCore`), if it drafts. Raises
    nothing.
    """
    config = settings(core.vllm_config)
    if config is None or not may_rehearse(config, core.vllm_config):
        return
    began = time.perf_counter()
    try:
        core.collective_rpc("das_rpc", args=("rehearse", {}))
        result = _run(core)
        answers = core.collective_rpc("das_rpc", args=("rehearsed", {}))
        reason = _reason(config, result, answers)
        if reason is None:
            seconds = time.perf_counter() - began
            logging.getLogger("vllm.das_adapter").info(
                "das: drafts arrive: %d tokens verified, %d accepted, in %.2f s before"
                " the first request",
                answers[0]["verified"],
                answers[0]["accepted"],
                seconds,
            )
            return
        _give_up(core, reason)
        if not answers[0]["error"]:  # else the worker has said so, with the place
            logger.error(
                "das: the %s drafter failed; the engine goes on as stock: no draft"
                " arrives on vLLM %s: %s",
                config.drafter,
                compat.version("vllm"),
                reason,
            )
    except Exception as error:
        # a worker does not answer: the engine would fail at its first request, too
        logger.exception(
            "das: the rehearsal of drafts can't be ended on vLLM %s: %r",
            compat.version("vllm"),
            error,
        )


def _run(core: Any) -> RehearsalResult:
    """Run one request for some steps, abort it, and remove all that it has left."""
    result = RehearsalResult()
    runner = 2 if runs_v2(core.vllm_config) else 1
    with _watched(core.scheduler, result):
        try:
            core.add_request(_request(core))
            for _ in range(STEPS[runner]):
                outputs, executed = core.step_fn()
                core.post_step(executed)
                for answer in (outputs or {}).values():
                    for output in answer.outputs:
                        result.tokens.update(output.new_token_ids)
        except Exception as error:
            result.failure = error
        _clear(core, result)
    return result


def _request(core: Any) -> Any:
    """Make the request (vLLM's `Request`), which may write one token alone."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    longest = core.vllm_config.model_config.max_model_len
    prompt = [TOKEN] * min(PROMPT_TOKENS, longest - 1)
    params = SamplingParams(
        temperature=1.0,
        seed=0,
        max_tokens=longest - len(prompt),
        ignore_eos=True,
        allowed_token_ids=[TOKEN],
        extra_args=Label(problem=0, record=False).extra_args(),
    )
    return Request(
        REQUEST, prompt, params, None, block_hasher=core.request_block_hasher
    )


def _clear(core: Any, result: RehearsalResult) -> None:
    """Remove the request from scheduler and workers, with what it has left in the KV
    cache.
    """
    core.abort_requests([REQUEST])
    for _ in range(MOST_TO_CLEAR):
        if not core.batch_queue and not core.scheduler.has_requests():
            break
        try:
            core.step_fn()
        except Exception as error:  # of a step that was under way
            result.failure = result.failure or error
    core.scheduler.reset_prefix_cache()
    lookup = getattr(core.scheduler, "dynamic_sd_lookup", None)
    if isinstance(lookup, PlanLookup):
        lookup.chosen = DraftPlan()


@contextlib.contextmanager
def _watched(scheduler: Any, result: RehearsalResult) -> Iterator[None]:
    """Note how many draft tokens the request is scheduled with."""
    stock = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        result.scheduled += len(output.scheduled_spec_decode_tokens.get(REQUEST, ()))
        return output

    scheduler.schedule = schedule
    try:
        yield
    finally:
        del scheduler.schedule


def _reason(
    config: DasConfig,
    result: RehearsalResult,
    answers: list[dict[str, Any]],
) -> str | None:
    """Say why no draft has arrived; None: drafts have. `answers`: of all ranks, see
    `WorkerState.rehearsed`.
    """
    errors = [answer["error"] for answer in answers if answer.get("error")]
    if errors:
        return str(errors[0])
    if result.failure is not None:
        return f"{result.failure!r}{place(result.failure)}"
    first = answers[0]
    if not first["asked"]:
        if not result.scheduled:
            return (
                "vLLM's scheduler asked for no draft, although the worker had chosen to"
                " draft"
            )
        return (
            "the plan for the drafts was lost between vLLM's scheduler and the worker"
        )
    if not result.scheduled:
        return "vLLM's scheduler gave the drafts no place in a step"
    if not first["verified"]:
        return "no draft token was verified"
    looks_up = config.looked_up is not None and config.keyed
    repeats = looks_up and result.tokens == {TOKEN}
    if repeats and not first["accepted"]:
        return "no draft token was accepted, although the text repeats one token"
    return None


def _give_up(core: Any, reason: str) -> None:
    """Have an engine go on as stock."""
    lookup = getattr(core.scheduler, "dynamic_sd_lookup", None)
    if isinstance(lookup, PlanLookup):
        lookup.gave_up = True
    core.collective_rpc("das_rpc", args=("give_up", {"error": reason}))
