"""The identity of a sample, carried from the agent loop through the client into
`extra_args`.

It works with any agent loop: the identity is in a context variable of the sample's
asyncio task, so neither the loop nor its tools need to know of it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.core.identity import media_hash, prompt_identity, request_seed
from das_adapter.patching import patch
from das_adapter.protocol.label import Label
from das_adapter.service.run_ahead import AheadWriter, pop_text
from das_adapter.verl import ahead, settings, training

MEDIA = ("image_data", "video_data", "audio_data")
"""Arguments of veRL's `generate` that belong to a problem and leave only place holders
in its prompt.
"""
ROW = "das_row"
"""Column of a batch for veRL's agent loops: the name of each row."""
ABORTED = ("aborted", "abort")
"""Stop reasons of a request that was interrupted by a weight sync; the client resumes
it.
"""


@dataclass
class Sample:
    """A trajectory that is being written."""

    row: str
    """Name of the batch's row, which no other row of the step has."""
    index: str | None
    """Data set of the prompt, and its index there, as the data set has it; None: it has
    none.
    """
    step: int
    sample: int
    validate: bool
    problem: int | None = None
    """Identity of the problem: the first turn's prompt. Later turns and resumed
    fragments keep it.
    """
    prompt: Sequence[int] = ()
    """The first turn's prompt, with which those of its later turns begin."""
    running: int = 0
    """Requests that are being answered, or were interrupted and will be resumed."""
    drawn: int = 0
    """Tokens of the conversation that were answered, its longest answer included: the
    next turn begins behind them, whatever else is asked in between.
    """
    again: int = 0
    """How many requests were not the next turn: another answer, or another
    conversation.
    """
    given_up: bool = False
    """Whether the last request was cancelled: a server goes on answering it, so that
    the next one is no turn.
    """
    job: tuple[ahead.VerlJob, Any] | None = None
    """Where its first response is only written ahead: for whom, and the replica that
    does it.
    """
    first: asyncio.Future[None] | None = None
    """The first request, while it is written ahead."""


_current: ContextVar[Sample | None] = ContextVar("das_sample", default=None)
_interrupted: ContextVar[tuple[list[int], Label] | None] = ContextVar(
    "das_interrupted", default=None
)
"""What this task's request is resumed with, and its label."""


@patch(
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences",
    "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncAgentLoopManager.generate_sequences_single",
    since="0.9.1",
    needs="prompts",
)
def name_batches(stock: Any) -> Any:
    """Without it rows of a step that have one prompt, and no index or equal ones, draw
    the same samples. Remove this patch when veRL gives each row of a step a name that
    is the same in every run.
    """
    return _naming(stock)


@patch(
    "verl.experimental.agent_loop.agent_loop:AgentLoopManager.generate_sequences",
    since="0.9.1",
    needs="prompts",
)
def name_awaited_batches(stock: Any) -> Any:
    """As `name_batches`, where veRL looks at its caller: it returns what can be awaited
    to one that awaits, and the batch to another. Remove this patch when `name_batches`
    is removed.
    """
    from verl.utils.ray_utils import auto_await

    return auto_await(_naming(getattr(stock, "__wrapped__", stock)))


def _naming(stock: Any) -> Any:
    """Return what names the rows of a batch and hands it on to `stock`."""

    @functools.wraps(stock)
    def dispatch(self: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if settings.of_run(self.config) is None:
            return stock(self, prompts, *args, **kwargs)
        self._das_named = name_rows(prompts, getattr(self, "_das_named", None))
        about = getattr(prompts, "meta_info", prompts)
        run = (
            None
            if "validate" in about.keys() and about["validate"]
            else ahead.Ahead.running
        )
        result = stock(self, prompts, *args, **kwargs)
        # it dispatches the batch when it is awaited
        if run and inspect.iscoroutine(result):
            return _showing(result, functools.partial(run.show, self, name_rows))
        if run:
            run.show(self, name_rows)
        return result

    return dispatch


async def _showing(written: Coroutine[Any, Any, Any], show: Callable[[], None]) -> Any:
    """Show the next batches once a batch is dispatched; return it when it is
    written.
    """
    task = asyncio.ensure_future(written)
    await asyncio.sleep(0)
    show()
    return await task


def name_rows(
    prompts: Any, last: Mapping[Any, Counter[str]] | None = None
) -> dict[Any, Counter[str]]:
    """Add the column `ROW` to a batch, veRL's `DataProto` or a `TensorDict`, before
    workers share it out: no two rows of a step have the same name, and a row has the
    same name in every run. An index alone is not enough: data sets without one, with
    equal indices, and validations that repeat a prompt have rows that differ in nothing
    else.

    A batch that names no step is of the trainer's. The fully asynchronous pipeline
    counts no steps where it generates; its `uid` names epoch and sample, and serves in
    their place. `last`: how often each name was given by step, as it was returned for
    the batch before: of that step, and of batches of no step at all (-1), which are all
    of one.
    """
    tensors = not hasattr(prompts, "non_tensor_batch")
    columns, about = (
        (prompts, prompts) if tensors else (prompts.non_tensor_batch, prompts.meta_info)
    )
    step = about["global_steps"] if "global_steps" in about.keys() else training.step()
    if step is None:
        step = columns["uid"][0] if "uid" in columns.keys() else -1
    known = [
        columns[name] for name in ("data_source", "index") if name in columns.keys()
    ]
    counted = {key: counts for key, counts in (last or {}).items() if key in (step, -1)}
    names = []
    named = counted.setdefault(step, Counter[str]())
    for row in range(len(prompts)):
        name = "/".join(map(str, (step, *(column[row] for column in known))))
        names.append(f"{name}/{named[name]}")
        named[name] += 1
    columns[ROW] = names if tensors else np.array(names, dtype=object)
    return counted


@patch(
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
    since="0.9.1",
    needs="sampling_params, trajectory",
)
def follow_samples(stock: Any) -> Any:
    """Without it requests have no identity. Every agent loop, also the user's own, runs
    under that of its sample. Remove this patch when veRL passes a sample's identity
    with its requests.
    """

    async def run(
        self: Any, sampling_params: Any, trajectory: dict[str, Any], **kwargs: Any
    ) -> Any:
        sample = Sample(
            row=kwargs.pop(ROW, str(trajectory.get("sample_index"))),
            index=_index(kwargs),
            step=_integer(trajectory.get("step")),
            sample=_integer(kwargs.get("session_id", trajectory.get("rollout_n"))),
            validate=bool(trajectory.get("validate")),
            job=kwargs.pop("das_job", None),
        )
        writing: AheadWriter | None = getattr(self, "das_writing", None)
        if writing and not (sample.validate or sample.job):
            writing.stop(sample.step)
        for teacher in (getattr(self, "teacher_client", None) or {}).values():
            teacher._das = (
                None  # it reads what was written, and its engine may refuse a label
            )
        token = _current.set(sample)
        try:
            return await stock(self, sampling_params, trajectory, **kwargs)
        except* ahead.Written:  # alone, or among the tasks of an agent loop
            pass
        finally:
            _current.reset(token)

    return run


@patch(
    "verl.workers.rollout.llm_server:LLMServerClient.generate",
    since="0.9.1",
    needs="request_id, prompt_ids, sampling_params",
)
def label_requests(stock: Any) -> Any:
    """Without it the identity of a sample does not reach the engine. Remove this patch
    when veRL passes a sample's identity with its requests.
    """

    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_das"):
            self._das = settings.of_run(self.config)
        sample = _current.get()
        if self._das is None or sample is None:
            return await stock(self, *args, **kwargs)
        from verl.utils.tokenizer import normalize_token_ids

        # as veRL's server does
        prompt = kwargs["prompt_ids"] = normalize_token_ids(kwargs["prompt_ids"])
        media = [item for name in MEDIA for item in kwargs.get(name) or ()]
        resumed, own = _interrupted.get() or ([], None)
        goes_on = own is not None and resumed == prompt
        if own is None or not goes_on:
            own = label(self._das, sample, prompt, media)
        if sample.job is not None:
            # requests that begin beside it have other noise when they come
            if sample.first is None:
                job, server = sample.job
                written = (
                    asyncio.sleep(0)
                    if media
                    else job.write(server, own, prompt, kwargs["sampling_params"])
                )
                sample.first = asyncio.ensure_future(written)
            await sample.first
            raise ahead.Written
        begins = own.start == len(prompt)
        params = replace(own, ahead=pop_text(own.seed) if begins else None).put_into(
            kwargs["sampling_params"]
        )
        sample.running += not goes_on
        aborted = False
        try:
            output = await stock(self, *args, **{**kwargs, "sampling_params": params})
            aborted = output.stop_reason in ABORTED
        except asyncio.CancelledError:
            sample.given_up = True
            raise
        finally:
            sample.running -= not aborted
        text = [*prompt, *output.token_ids]
        _interrupted.set((text, own) if aborted else None)
        if not aborted and _is_of_conversation(prompt, sample):
            # whichever of several ended last
            sample.drawn = max(sample.drawn, len(text))
        return output

    return generate


def label(
    das: DasConfig, sample: Sample, prompt_ids: Sequence[int], media: Sequence[Any] = ()
) -> Label:
    """Label a request of a sample that begins; `media`: images, sound and video of the
    prompt. Turns have one seed, and draw behind each other; each request that is no
    turn has a seed of its own.
    """
    if sample.problem is None:
        seen = (
            map(media_hash, media)
            if sample.index is None
            else [sample.index] * bool(media)
        )
        sample.problem = prompt_identity(prompt_ids, *seen)
        sample.prompt = prompt_ids
    again = sample.given_up or sample.running > 0 or len(prompt_ids) < sample.drawn
    again |= not _is_of_conversation(prompt_ids, sample)
    sample.again = sample.again + again
    sample.given_up = False
    start = len(prompt_ids) if again else sample.drawn or len(prompt_ids)
    number = -1 - sample.sample if sample.validate else sample.sample
    row = f"{sample.row}/again {sample.again}" if again else sample.row
    seed = request_seed(das.verify.seed, sample.problem, sample.step, number, row)
    return Label(sample.problem, seed, not sample.validate, start)


def _index(row: Mapping[str, Any]) -> str | None:
    """Return the index that the data set has for a row, behind its name: rows may be of
    several. None: it has none, where veRL takes 0.
    """
    index = row.get("index")
    return (
        f"{row.get('data_source', '')}/{index}"
        if index or "index" in (row.get("extra_info") or {})
        else None
    )


def _is_of_conversation(prompt_ids: Sequence[int], sample: Sample) -> bool:
    return prompt_ids[: len(sample.prompt)] == sample.prompt


def _integer(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):  # not a number, or missing
        return 0
