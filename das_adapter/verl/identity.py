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
from das_adapter.verl import run_ahead, settings, training

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
    """Data set of the prompt, and its index there; None: the data set gives none."""
    step: int
    """Training step."""
    number: int
    """Number of the sample among those of its row, from 0."""
    validate: bool
    """Whether the sample is a validation's."""
    job: tuple[run_ahead.VerlJob, Any] | None = None
    """The job whose first response is only written ahead, and the replica that writes
    it; None: the sample is generated as usual.
    """
    first_request: asyncio.Future[None] | None = None
    """The first request, while it is written ahead."""
    problem: int | None = None
    """Identity of the problem, which is the first turn's prompt. Later turns and
    resumed fragments keep it.
    """
    prompt: Sequence[int] = ()
    """The first turn's prompt, with which those of its later turns begin."""
    answered_tokens: int = 0
    """Length of the conversation with its longest answer. The next turn begins behind
    it, whatever else is asked in between.
    """
    num_open: int = 0
    """Requests that are being answered, or were interrupted and will be resumed."""
    num_side_requests: int = 0
    """Requests that were not the next turn: another answer to the same prompt, or
    another conversation.
    """
    cancelled: bool = False
    """Whether the last request was cancelled. A server goes on answering it, so that
    the next request is no turn.
    """


NameCounts = dict[Any, Counter[str]]
"""How often each name was given to a row, by step."""


Request = Mapping[str, Any]
"""The arguments of veRL's `generate`, by name."""


@dataclass
class Interrupted:
    """A request that a weight sync interrupted, as the client will resume it."""

    text: list[int]
    """Its prompt and what it has written."""
    label: Label
    is_open: bool = True
    """Whether it counts among its sample's open requests: until another request comes
    in its place.
    """


def _give_up(interrupted: Interrupted, sample: Sample) -> None:
    """Count an interrupted request as ended: the client asks for something else. What
    it has written is an answer.
    """
    if not interrupted.is_open:
        return
    interrupted.is_open = False
    sample.num_open -= 1
    text = interrupted.text
    if _is_of_conversation(text, sample):
        sample.answered_tokens = max(sample.answered_tokens, len(text))


_current: ContextVar[Sample | None] = ContextVar("das_sample", default=None)
"""The sample of this task."""
_interrupted: ContextVar[Interrupted | None] = ContextVar(
    "das_interrupted", default=None
)
"""The request of this task that was interrupted and is not resumed yet."""


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
    return _with_named_rows(stock)


@patch(
    "verl.experimental.agent_loop.agent_loop:AgentLoopManager.generate_sequences",
    since="0.9.1",
    needs="prompts",
)
def name_awaited_batches(stock: Any) -> Any:
    """Without it rows draw the same samples, as without `name_batches`, in a manager
    where veRL looks at its caller: it returns an awaitable to a caller that awaits, and
    the batch to another. Remove this patch when `name_batches` is removed.
    """
    from verl.utils.ray_utils import auto_await

    undecorated = getattr(stock, "__wrapped__", stock)
    return auto_await(_with_named_rows(undecorated))


def _with_named_rows(stock: Any) -> Any:
    """Return a function that names the rows of a batch and then calls `stock`."""

    @functools.wraps(stock)
    def dispatch(self: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        if settings.of_run(self.config) is None:
            return stock(self, prompts, *args, **kwargs)
        last = getattr(self, "_das_named", None)
        self._das_named = name_rows(prompts, last)
        is_validation = _is_validation(prompts)
        result = stock(self, prompts, *args, **kwargs)
        run = run_ahead.VerlRunAhead.running
        if run is None or is_validation:
            return result
        # a coroutine dispatches the batch only when it is awaited
        if inspect.iscoroutine(result):
            show = functools.partial(run.show_next_batches, self, name_rows)
            return _show_when_dispatched(result, show)
        run.show_next_batches(self, name_rows)
        return result

    return dispatch


def _is_validation(prompts: Any) -> bool:
    """Return whether a batch is a validation's."""
    facts = getattr(prompts, "meta_info", prompts)
    if "validate" not in facts.keys():
        return False
    return bool(facts["validate"])


async def _show_when_dispatched(
    generation: Coroutine[Any, Any, Any], show: Callable[[], None]
) -> Any:
    """Show the next batches once a batch is dispatched; return it when it is
    written.
    """
    task = asyncio.ensure_future(generation)
    await asyncio.sleep(0)
    show()
    return await task


def name_rows(prompts: Any, last: NameCounts | None = None) -> NameCounts:
    """Add the column `ROW` to a batch before workers share it out. No two rows of a
    step have the same name, and a row has the same name in every run.

    An index alone is not enough: data sets without one, with equal indices, and
    validations that repeat a prompt have rows that differ in nothing else. So a name is
    "step/data source/index/how many rows before this one are called the same".

    A batch that names no step is of the trainer's. The fully asynchronous pipeline
    counts no steps where it generates; its `uid` names epoch and sample, and serves in
    their place. Batches of no step at all (-1) are counted as those of one step.

    Args:
        prompts: veRL's `DataProto` or a `TensorDict`.
        last: what this function returned for the batch before.

    Returns:
        How often each name was given, by step: of this batch's step, and of -1.
    """
    is_tensordict = not hasattr(prompts, "non_tensor_batch")
    if is_tensordict:
        columns = prompts
        facts = prompts
    else:
        columns = prompts.non_tensor_batch
        facts = prompts.meta_info
    step = _step_of_batch(columns, facts)
    counts_by_step: NameCounts = {}
    if last is not None:
        for counted_step, counts in last.items():
            if counted_step in (step, -1):
                counts_by_step[counted_step] = counts
    counts = counts_by_step.setdefault(step, Counter())
    names = []
    for row in range(len(prompts)):
        name = str(step)
        for known_column in ("data_source", "index"):
            if known_column in columns.keys():
                value = columns[known_column][row]
                name = f"{name}/{value}"
        num_before = counts[name]
        counts[name] += 1
        names.append(f"{name}/{num_before}")
    if is_tensordict:
        columns[ROW] = names
    else:
        columns[ROW] = np.array(names, dtype=object)
    return counts_by_step


def _step_of_batch(columns: Any, facts: Any) -> Any:
    """Return the step of a batch, or what serves in its place (see `name_rows`)."""
    if "global_steps" in facts.keys():
        step = facts["global_steps"]
    else:
        step = training.current_step()
    if step is not None:
        return step
    if "uid" in columns.keys():
        return columns["uid"][0]
    return -1


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
        sample_index = trajectory.get("sample_index")
        row_name = kwargs.pop(ROW, str(sample_index))
        number_in_row = trajectory.get("rollout_n")
        sample_number = kwargs.get("session_id", number_in_row)
        sample = Sample(
            row=row_name,
            index=_data_set_index(kwargs),
            step=_integer(trajectory.get("step")),
            number=_integer(sample_number),
            validate=bool(trajectory.get("validate")),
            job=kwargs.pop("das_job", None),
        )
        writing: AheadWriter | None = getattr(self, "das_writing", None)
        is_generated_now = not sample.validate and sample.job is None
        if writing is not None and is_generated_now:
            writing.stop(sample.step)
        teachers = getattr(self, "teacher_client", None) or {}
        for teacher in teachers.values():
            # it reads what was written, and its engine may refuse a label
            teacher._das = None
        token = _current.set(sample)
        try:
            return await stock(self, sampling_params, trajectory, **kwargs)
        except* run_ahead.FirstRequestWritten:
            # raised alone, or among the tasks of an agent loop
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
        prompt = normalize_token_ids(kwargs["prompt_ids"])
        kwargs["prompt_ids"] = prompt
        media = media_of(kwargs)
        interrupted = _interrupted.get()
        is_resumed = interrupted is not None and interrupted.text == prompt
        if interrupted is not None and not is_resumed:
            _give_up(interrupted, sample)
        if interrupted is not None and is_resumed:
            label = interrupted.label
        else:
            label = make_label(self._das, sample, prompt, media)
        if sample.job is not None:
            await _write_first_request(sample, label, kwargs)
            raise run_ahead.FirstRequestWritten
        kwargs["sampling_params"] = _labelled_params(label, kwargs)
        was_open = interrupted is not None and is_resumed and interrupted.is_open
        if not was_open:
            sample.num_open += 1
        if interrupted is not None and is_resumed:
            interrupted.is_open = False
        try:
            output = await stock(self, *args, **kwargs)
        except BaseException as error:
            sample.num_open -= 1
            if isinstance(error, asyncio.CancelledError):
                sample.cancelled = True
            raise
        text = [*prompt, *output.token_ids]
        if output.stop_reason in ABORTED:
            # it stays open until it is resumed
            _interrupted.set(Interrupted(text, label))
            return output
        sample.num_open -= 1
        _interrupted.set(None)
        if _is_of_conversation(prompt, sample):
            # of several answers the longest counts, whichever ended last
            sample.answered_tokens = max(sample.answered_tokens, len(text))
        return output

    return generate


async def _write_first_request(sample: Sample, label: Label, request: Request) -> None:
    """Have a sample's first request written ahead, and wait for it. Requests that begin
    beside it wait too, and are not written: their noise will be another when they come.
    Neither is a request with media.
    """
    assert sample.job is not None
    if sample.first_request is None:
        job, server = sample.job
        prompt = request["prompt_ids"]
        params = request["sampling_params"]
        if media_of(request):
            writing = asyncio.sleep(0)
        else:
            writing = job.write(server, label, prompt, params)
        sample.first_request = asyncio.ensure_future(writing)
    await sample.first_request


def _labelled_params(label: Label, request: Request) -> dict[str, Any]:
    """Return a request's sampling parameters with its label. A response that begins
    gets what was written ahead of it.
    """
    prompt_tokens = len(request["prompt_ids"])
    if label.start == prompt_tokens:
        written_ahead = pop_text(label.seed)
        label = replace(label, ahead=written_ahead)
    else:
        label = replace(label, ahead=None)
    return label.put_into(request["sampling_params"])


def media_of(request: Request) -> list[Any]:
    """Return the images, sound and video of a request's prompt."""
    media: list[Any] = []
    for argument in MEDIA:
        media += request.get(argument) or ()
    return media


def make_label(
    das: DasConfig, sample: Sample, prompt_ids: Sequence[int], media: Sequence[Any]
) -> Label:
    """Label a request of a sample that begins.

    The turns of a conversation have one seed, and each draws behind the one before it.
    Every request that is no turn has a seed of its own. Two requests of one sample:

        request                 prompt             start     row in the seed
        first turn              p                  len(p)    "row"
        second turn             p + answer + tool  behind the answer, "row" again
        a sub-agent's request   q                  len(q)    "row/again 1"

    Args:
        das: the block of the run.
        sample: the sample that asks.
        prompt_ids: token ids of the prompt.
        media: images, sound and video of the prompt.
    """
    if sample.problem is None:
        sample.problem = _identify_problem(sample, prompt_ids, media)
        sample.prompt = prompt_ids
    is_next_turn = (
        not sample.cancelled
        and sample.num_open == 0
        and len(prompt_ids) >= sample.answered_tokens
        and _is_of_conversation(prompt_ids, sample)
    )
    sample.cancelled = False
    row = sample.row
    start = len(prompt_ids)
    if not is_next_turn:
        sample.num_side_requests += 1
        row = f"{row}/again {sample.num_side_requests}"
    elif sample.answered_tokens:
        start = sample.answered_tokens
    number = sample.number
    if sample.validate:
        # its samples have the numbers -1, -2, ...
        number = -1 - number
    seed = request_seed(
        run_seed=das.verify.seed,
        problem=sample.problem,
        step=sample.step,
        sample=number,
        row=row,
    )
    return Label(
        problem=sample.problem,
        seed=seed,
        record=not sample.validate,
        start=start,
    )


def _identify_problem(
    sample: Sample, prompt_ids: Sequence[int], media: Sequence[Any]
) -> int:
    """Return the identity of a problem by its prompt and what belongs to it: the index
    in the data set, which is cheaper to read than media, or the media themselves.
    """
    if not media:
        return prompt_identity(prompt_ids)
    if sample.index is not None:
        return prompt_identity(prompt_ids, sample.index)
    return prompt_identity(prompt_ids, *map(media_hash, media))


def _data_set_index(row: Mapping[str, Any]) -> str | None:
    """Return the index that the data set has for a row, behind the name of the data
    set: rows may be of several. None: the data set has none; veRL takes 0 then.
    """
    index = row.get("index")
    extra_info = row.get("extra_info")
    own = extra_info.get("index") if isinstance(extra_info, Mapping) else None
    if _is_missing(index):
        index = own
    elif not index and _is_missing(own):  # veRL's 0
        return None
    if _is_missing(index):
        return None
    data_source = row.get("data_source", "")
    return f"{data_source}/{index}"


def _is_missing(value: Any) -> bool:
    """Return whether a cell of a data set is empty: null, NaN, NaT or NA. Data sets
    that were joined have every column of each.
    """
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _is_of_conversation(prompt_ids: Sequence[int], sample: Sample) -> bool:
    beginning = prompt_ids[: len(sample.prompt)]
    return beginning == sample.prompt


def _integer(value: Any) -> int:
    """Return a value as an integer; 0 where it is missing or no number."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
