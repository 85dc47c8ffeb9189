"""The identity that a request carries from any agent loop to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import PIL.Image
import pytest
import torch
from transformers import BatchEncoding

from das_adapter.config import DasConfig, parse
from das_adapter.core.identity import media_hash, prompt_identity
from das_adapter.engine.requests import LiveRequest, RequestLabels, media
from das_adapter.protocol.label import BadLabel, Label
from das_adapter.verl import identity
from das_adapter.verl.identity import Sample, make_label

ON = {"actor_rollout_ref": {"rollout": {"custom": {"das": {"drafter": "history"}}}}}
OFF = {"actor_rollout_ref": {"rollout": {"custom": {"das": {"drafter": "none"}}}}}


def requests(
    config: dict,
    trajectory: dict,
    prompts: list[Any],
    stops: Sequence[str] = (),
    images: list[Any] | None = None,
    **kwargs: Any,
) -> list[dict]:
    """The sampling parameters that reach the server when an agent loop asks for one
    turn per prompt.
    """
    client = SimpleNamespace(config=config)
    sent = []

    async def server(
        self: Any, request_id: str, *, sampling_params: dict, **_: Any
    ) -> SimpleNamespace:
        sent.append(sampling_params)
        return SimpleNamespace(
            token_ids=[7, 7], stop_reason=stops[len(sent) - 1] if stops else "completed"
        )

    async def loop(*_: Any, **__: Any) -> None:
        for prompt in prompts:
            call = {
                "prompt_ids": prompt,
                "sampling_params": {"temperature": 1.0},
                "image_data": images,
            }
            await identity.label_requests.replacement(server)(client, "id", **call)

    asyncio.run(
        identity.follow_samples.replacement(loop)(None, {}, trajectory, **kwargs)
    )
    return sent


def labels(sent: list[dict]) -> list[Label]:
    return [Label.of(params["extra_args"]) for params in sent]


TRAJECTORY = {"step": 5, "sample_index": 3, "rollout_n": 0, "validate": False}


def test_problems_that_differ_only_in_their_images_are_different_ones() -> None:
    def problem(image: Any, step: int, **columns: Any) -> int:
        trajectory = {
            **TRAJECTORY,
            "sample_index": columns["index"],
            "step": step,
        }
        turns = [[1, 2], [1, 2, 7, 7, 4]]
        first, second = labels(
            requests(ON, trajectory, turns, images=[image], session_id=0, **columns)
        )
        assert first.problem == second.problem is not None
        return first.problem

    rows = [{"index": row, "extra_info": {"index": row}} for row in (0, 1)]
    one, other, next_epoch = (
        problem(object(), step, **row)
        for row, step in ((rows[0], 5), (rows[1], 5), (rows[0], 9))
    )
    assert one == next_epoch != other
    one, other = (
        problem(object(), 5, **rows[0], data_source=source)
        for source in ("clevr", "geoqa")
    )
    assert one != other
    unnumbered = {"index": 0, "extra_info": {}}  # as veRL has rows without an index
    one, other, next_epoch = (
        problem(np.array([v]), step, **unnumbered)
        for v, step in ((1, 5), (2, 5), (1, 9))
    )
    assert one == next_epoch != other
    assert (
        labels(requests(ON, TRAJECTORY, [[1, 2]], session_id=0))[0].problem
        == prompt_identity([1, 2])
        != one
    )


def test_a_prompt_is_labelled_as_the_server_reads_it() -> None:
    """An agent loop may pass what Transformers 5 makes of a chat, or ids in another
    list.
    """
    plain, *others = (
        labels(requests(ON, TRAJECTORY, [prompt], session_id=0))[0]
        for prompt in ([1, 2, 3], BatchEncoding({"input_ids": [1, 2, 3]}), [[1, 2, 3]])
    )
    assert others == [plain, plain]


def test_media_are_told_apart_by_what_they_show() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    same = [pixels, pixels.copy(), PIL.Image.fromarray(pixels)]
    others = [
        pixels + 1,
        pixels.reshape(4, 1, 3),
        pixels.astype(np.int16),
        (pixels, 16000),
        (pixels, 8000),
    ]
    assert len({media_hash(item) for item in same}) == 1
    assert len({media_hash(item) for item in [pixels, *others]}) == 6
    videos = [
        (torch.full((2, 2), value), {"fps": fps, "seen": [0, 1]})
        for value, fps in ((0, 2), (0, 2), (1, 2), (0, 1))
    ]
    # torch pickles equal tensors differently
    one, same_one, *differ = map(media_hash, videos)
    assert one == same_one and len({one, *differ}) == 3
    assert media_hash(torch.zeros(2, dtype=torch.bfloat16))  # which NumPy lacks


def test_a_request_of_vllm_without_a_label_is_about_its_prompt_and_its_images() -> None:
    """The hashes are vLLM's own, which the engine and its front end see alike."""
    inputs = pytest.importorskip("vllm.multimodal.inputs")
    place = inputs.PlaceholderRange(offset=1, length=2)

    def request(*hashes: str) -> SimpleNamespace:
        features = [
            inputs.MultiModalFeatureSpec(None, "image", f"lora:{h}", place, h)
            for h in hashes
        ]
        return SimpleNamespace(
            prompt_token_ids=[1, 8, 8, 3],
            prompt_embeds=None,
            cache_salt=None,
            mm_features=features,
            sampling_params=SimpleNamespace(extra_args=None, seed=None, n=1),
            request_id="",
        )

    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(seed=0),
        parallel_config=SimpleNamespace(data_parallel_rank=0, _api_process_rank=0),
    )
    labels = RequestLabels(DasConfig(), vllm_config, hosted=False)
    asked = [request("a"), request("b"), request("a"), request(), request("a", "b")]
    for one in asked:
        labels.complete(one)
    found = [Label.of(one.sampling_params.extra_args).problem for one in asked]
    assert found == [
        Label().problem_of(one.prompt_token_ids, media(one)) for one in asked
    ]
    assert found[0] == found[2]
    assert len(set(found)) == 4
    assert len({one.sampling_params.seed for one in asked}) == 5


def test_later_turns_keep_problem_and_seed() -> None:
    first, second = labels(
        requests(ON, TRAJECTORY, [[1, 2], [1, 2, 7, 7, 4]], session_id=0)
    )
    # the tool's answer is text that is not known yet
    assert (first.start, second.start) == (
        2,
        4,
    )
    assert replace(first, start=0) == replace(second, start=0)


def test_a_resumed_request_begins_where_it_began() -> None:
    prompts = [[1, 2], [1, 2, 7, 7], [1, 2, 7, 7, 7, 7, 4]]
    stops = (
        "aborted",
        "completed",
        "completed",
    )
    sent = requests(ON, TRAJECTORY, prompts, stops=stops, session_id=0)
    assert [label.start for label in labels(sent)] == [2, 2, 6]


def test_a_longer_request_of_another_conversation_is_not_the_next_turn() -> None:
    """Of a sub-agent with a long prompt of its own, say."""
    turns = labels(
        requests(
            ON, TRAJECTORY, [[1, 2], [9] * 50, [1, 2, 7, 7, 4], [9] * 60], session_id=0
        )
    )
    assert [label.start for label in turns] == [2, 50, 4, 60]
    first, other, second, another = (label.seed for label in turns)
    assert first == second
    assert len({first, other, another}) == 3


def test_what_begins_while_a_request_is_interrupted_has_noise_of_its_own() -> None:
    stops = ["aborted", "completed", "completed", "completed"]
    client = SimpleNamespace(config=ON)
    sent = []
    resume = asyncio.Event()

    async def server(
        self: Any, request_id: str, *, sampling_params: dict, **_: Any
    ) -> SimpleNamespace:
        sent.append(sampling_params)
        return SimpleNamespace(token_ids=[7, 7], stop_reason=stops[len(sent) - 1])

    async def ask(*prompts: list[int]) -> None:
        for prompt in prompts:
            call = {"prompt_ids": prompt, "sampling_params": {}}
            await identity.label_requests.replacement(server)(client, "id", **call)
            if len(sent) == 1:
                await resume.wait()
        resume.set()

    async def loop(*_: Any, **__: Any) -> None:
        await asyncio.gather(ask([1, 2], [1, 2, 7, 7]), ask([1, 2]))
        await ask([1, 2, 7, 7, 7, 7, 4])

    asyncio.run(
        identity.follow_samples.replacement(loop)(None, {}, TRAJECTORY, session_id=0)
    )
    first, other, resumed, second = labels(sent)
    assert first == resumed and (second.seed, second.start) == (first.seed, 6)
    assert other.seed != first.seed


def begun_together(
    one: list[int],
    other: list[int],
    *,
    aborted: bool = False,
    images: list[Any] | None = None,
    **kwargs: Any,
) -> list[Label]:
    """The labels of an agent loop that begins with two requests at once, which may be
    interrupted and resumed; the first may have images.
    """
    client = SimpleNamespace(config=ON)
    sent = []

    async def server(
        self: Any, request_id: str, *, sampling_params: dict, **_: Any
    ) -> SimpleNamespace:
        sent.append(sampling_params)
        number = len(sent)
        # the first is resumed while the second is still answered
        await asyncio.sleep(0.01 * number)
        return SimpleNamespace(
            token_ids=[7, 7],
            stop_reason="aborted" if aborted and number <= 2 else "completed",
        )

    async def ask(prompt: list[int], images: list[Any] | None = None) -> None:
        for resumed in range(1 + aborted):
            call = {
                "prompt_ids": [*prompt, *[7, 7] * resumed],
                "sampling_params": {},
                "image_data": images,
            }
            await identity.label_requests.replacement(server)(client, "id", **call)

    async def loop(*_: Any, **__: Any) -> None:
        await asyncio.gather(ask(one, images), ask(other))

    asyncio.run(
        identity.follow_samples.replacement(loop)(
            None, {}, TRAJECTORY, session_id=0, **kwargs
        )
    )
    return labels(sent)


def test_requests_that_begin_together_begin_each_behind_its_own_prompt() -> None:
    first, second = begun_together([1, 2], [5, 6, 7, 8])
    assert (first.start, second.start) == (2, 4)
    assert first.problem == second.problem and first.seed != second.seed


def test_each_of_several_interrupted_requests_goes_on_as_it_began() -> None:
    first, second, *resumed = begun_together([1, 2], [5, 6, 7, 8], aborted=True)
    assert [first, second] == resumed
    assert (first.start, second.start) == (2, 4)


@pytest.mark.parametrize("images", [None, [object()]])
def test_of_requests_that_begin_together_the_first_alone_is_written_ahead(
    images: list[Any] | None,
) -> None:
    """The others have other noise when they come; the sample's turn ends when the first
    one is written.
    """
    begun = []
    written = []

    async def write(server: str, label: Label, prompt: list[int], params: dict) -> None:
        begun.append((prompt, label.start))
        await asyncio.sleep(0.01)
        written.append(prompt)

    job = SimpleNamespace(write=write)
    assert (
        begun_together([1, 2], [5, 6, 7, 8], images=images, das_job=(job, "server"))
        == []
    )
    assert begun == ([] if images else [([1, 2], 2)])
    assert written == [prompt for prompt, _ in begun]


def test_without_an_active_block_requests_are_untouched() -> None:
    assert requests(OFF, TRAJECTORY, [[1, 2]], session_id=0) == [{"temperature": 1.0}]
    assert requests({"actor_rollout_ref": {"rollout": {}}}, TRAJECTORY, [[1, 2]]) == [
        {"temperature": 1.0}
    ]


def test_a_teachers_requests_are_untouched() -> None:
    """veRL's on-policy distillation asks them of the whole sample, where its agent loop
    has ended.
    """
    sent = []

    async def server(
        self: Any, request_id: str, *, sampling_params: dict, **_: Any
    ) -> SimpleNamespace:
        sent.append(sampling_params)
        return SimpleNamespace(token_ids=[7, 7], stop_reason="completed")

    async def loop(worker: Any, *_: Any, **__: Any) -> None:
        for client in (SimpleNamespace(config=ON), worker.teacher_client["math"]):
            call = {"prompt_ids": [1, 2], "sampling_params": {"prompt_logprobs": 0}}
            await identity.label_requests.replacement(server)(client, "id", **call)

    worker = SimpleNamespace(teacher_client={"math": SimpleNamespace(config=ON)})
    asyncio.run(
        identity.follow_samples.replacement(loop)(worker, {}, TRAJECTORY, session_id=0)
    )
    students, teachers = sent
    assert Label.of(students["extra_args"]).problem == prompt_identity([1, 2])
    assert teachers == {"prompt_logprobs": 0}


def test_a_label_is_read_back_and_has_its_defaults() -> None:
    label = Label(problem=2**64 - 2, seed=7, record=False, start=3)
    assert Label.of({**label.extra_args(), "other": "x"}) == label
    assert Label.of(None) == Label.of({}) == Label()
    assert (
        Label().record,
        Label().start_in(9),
        label.start_in(9),
        label.start_in(2),
    ) == (True, 9, 3, 2)
    assert Label().problem_of([1, 2]) == prompt_identity([1, 2])


@pytest.mark.parametrize(
    "given",
    [
        {"das_problem": -1},
        {"das_problem": 2**64},
        {"das_seed": "x"},
        {"das_seed": 1.5},
        {"das_seed": None},
        {"das_seed": 2**63},
        {"das_record": 2},
        {"das_start": -1},
        {"das_start": [1]},
        {"das_start": 2**31},
    ],
    ids=str,
)
def test_a_label_that_no_host_has_written_is_refused(given: dict) -> None:
    (key,) = given
    with pytest.raises(
        BadLabel, match=rf"{key}: found .*, allowed: an integer from 0 to \d+"
    ):
        Label.of(given)
    assert isinstance(BadLabel(), ValueError)  # which a server answers as a bad request


def test_a_large_integer_may_come_as_text() -> None:
    assert Label.of({"das_problem": str(2**64 - 2), "das_record": False}) == Label(
        2**64 - 2, record=False
    )


MISSING = [None, float("nan"), np.float32("nan"), pd.NA, pd.NaT]


@pytest.mark.parametrize("cell", MISSING, ids=repr)
@pytest.mark.parametrize("of_row", [0, "the cell"])
@pytest.mark.parametrize("extra", ["has it", "lacks it", "is missing"])
def test_an_empty_index_is_none_so_that_the_images_identify_the_problem(
    cell: Any, of_row: Any, extra: str
) -> None:
    extra_info: Any = {"has it": {"index": cell}, "lacks it": {}, "is missing": cell}
    row = {
        "data_source": "geo",
        "index": cell if of_row else 0,
        "extra_info": extra_info[extra],
    }
    problems = set()
    for shade in (0, 255):
        image = PIL.Image.new("RGB", (4, 4), (shade,) * 3)
        (label,) = labels(requests(ON, TRAJECTORY, [[1, 2]], images=[image], **row))
        problems.add(label.problem)
    assert len(problems) == 2


def test_a_request_that_was_interrupted_and_is_not_resumed_is_open_no_more() -> None:
    """The next turn of its conversation goes on with its seed, behind what it has
    written; so does one after a parallel task has asked.
    """
    stops = ["aborted", "completed", "completed"]
    turns = [[1, 2], [1, 2, 7, 7, 4], [1, 2, 7, 7, 4, 7, 7, 5]]
    first, second, third = labels(requests(ON, TRAJECTORY, turns, stops))
    assert first.seed == second.seed == third.seed
    assert [label.start for label in (first, second, third)] == [2, 4, 7]


def test_a_request_that_was_given_up_may_be_resumed_after_all() -> None:
    stops = ["aborted", "completed", "completed", "completed"]
    client = SimpleNamespace(config=ON)
    sent = []

    async def server(
        self: Any, request_id: str, *, sampling_params: dict, **_: Any
    ) -> SimpleNamespace:
        sent.append(sampling_params)
        return SimpleNamespace(token_ids=[7, 7], stop_reason=stops[len(sent) - 1])

    async def ask(prompt: list[int]) -> None:
        call = {"prompt_ids": prompt, "sampling_params": {}}
        await identity.label_requests.replacement(server)(client, "id", **call)

    async def loop(*_: Any, **__: Any) -> None:
        await ask([1, 2])
        # a task that knows of the interrupted request, and asks for something else
        await asyncio.create_task(ask([9] * 20))
        await ask([1, 2, 7, 7])
        await ask([1, 2, 7, 7, 7, 7, 4])

    asyncio.run(
        identity.follow_samples.replacement(loop)(None, {}, TRAJECTORY, session_id=0)
    )
    first, other, resumed, second = labels(sent)
    assert first == resumed and other.seed != first.seed
    assert (second.seed, second.start) == (first.seed, 6)


def test_a_validation_draws_apart_from_training() -> None:
    """Also where it has the same step and the same rows."""
    das = parse({"drafter": "history"})
    assert das is not None
    seeds = set()
    for validate in (False, True):
        for number in range(3):
            sample = Sample("3/gsm8k/0", None, 3, number, validate)
            label = make_label(das, sample, [1, 2], [])
            assert label.record != validate
            seeds.add(label.seed)
    assert len(seeds) == 6


@pytest.mark.parametrize(("max_tokens", "end"), [(10, 13), (47, 50), (100, 50)])
def test_a_request_ends_with_the_longest_text_at_the_latest(
    max_tokens: int, end: int
) -> None:
    params = SimpleNamespace(
        max_tokens=max_tokens,
        extra_args=None,
        ignore_eos=True,
        stop_token_ids=None,
        stop=None,
    )
    request = SimpleNamespace(prompt_token_ids=[1, 2, 3], sampling_params=params)
    assert LiveRequest.of("request", request, longest=50).end == end
