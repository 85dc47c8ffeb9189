"""Two different requests of a run never draw the same noise, by whichever way they come
in.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from das_adapter.config import DasConfig
from das_adapter.engine import front_end as vllm_front_end
from das_adapter.engine.requests import RequestLabels
from das_adapter.protocol.label import Label, Labeller
from das_adapter.protocol.metrics import RolloutClock, faults
from das_adapter.verl import identity, training

ON = {"actor_rollout_ref": {"rollout": {"custom": {"das": {"drafter": "history"}}}}}
PROMPT = [5, 6, 7]

ROWS = st.lists(
    st.tuples(
        st.sampled_from(["gsm8k", "aime"]),
        st.sampled_from(
            [
                0,
                1,
                None,
                "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079",
                "11111111-2222-3333-4444-555555555555",
            ]
        ),
    ),
    min_size=1,
    max_size=12,
)
"""Data source and index of each row of a batch, all of which have one prompt."""


@pytest.fixture(autouse=True, scope="module")
def no_training() -> Iterator[None]:
    """Whatever run another test has begun in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "trainer", None)
        yield


async def sampled(trajectory: dict[str, Any], **kwargs: Any) -> Label:
    """The label that reaches the server when veRL's worker runs an agent loop."""
    client = SimpleNamespace(config=ON)
    sent = []

    async def server(
        self: Any, request_id: str, *, sampling_params: dict[str, Any], **_: Any
    ) -> SimpleNamespace:
        sent.append(sampling_params)
        return SimpleNamespace(token_ids=[1], stop_reason="completed")

    async def loop(self: Any, params: Any, trajectory: Any, **passed: Any) -> None:
        assert identity.ROW not in passed, (
            "an agent loop may take no arguments that it does not know"
        )
        call = {"prompt_ids": PROMPT, "sampling_params": {}}
        await identity.label_requests.replacement(server)(client, "id", **call)

    await identity.follow_samples.replacement(loop)(None, {}, trajectory, **kwargs)
    return Label.of(sent[0]["extra_args"])


class Run:
    """veRL's manager of agent loops, and two workers that share its batches out."""

    config = ON

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.problems: set[int] = set()

    @identity.name_batches.replacement
    def generate_sequences(self, prompts: Any) -> None:
        for chunk in prompts.chunk(2 if len(prompts) > 1 else 1):
            asyncio.run(self._work(chunk))

    async def _work(self, chunk: Any) -> None:
        """Sample as veRL's workers do: those of a `TensorDict` repeat a row, a
        `DataProto` comes with rows repeated.
        """
        tensors = not hasattr(chunk, "non_tensor_batch")
        columns, about = (
            (chunk, chunk) if tensors else (chunk.non_tensor_batch, chunk.meta_info)
        )
        indices = list(columns["index"])
        step = about["global_steps"] if "global_steps" in about.keys() else -1
        validate = about["validate"] if "validate" in about.keys() else False
        for row, index in enumerate(indices):
            kwargs = {identity.ROW: columns[identity.ROW][row]}
            number = row - indices.index(index)  # within the worker's part of the batch
            trajectory = {
                "step": step,
                "sample_index": index,
                "rollout_n": number,
                "validate": validate,
            }
            for session in range(2 if tensors else 1):
                label = await sampled(
                    trajectory, **kwargs, **({"session_id": session} if tensors else {})
                )
                assert label.seed is not None and label.problem is not None
                self.seeds.append(label.seed)
                self.problems.add(label.problem)


def tensors(rows: Sequence[tuple[str, Any]], step: int, validate: bool) -> Any:
    """A batch as veRL's trainers make it."""
    tu = pytest.importorskip("verl.utils.tensordict_utils")
    columns = {
        "data_source": [source for source, _ in rows],
        "index": [index for _, index in rows],
    }
    batch = tu.get_tensordict({"dummy_tensor": torch.zeros(len(rows), 1), **columns})
    tu.assign_non_tensor_data(batch, "global_steps", step)
    if validate:
        tu.assign_non_tensor_data(batch, "validate", True)
    return batch


def proto(
    rows: Sequence[tuple[str, Any]], step: int | None, validate: bool, uid: str = ""
) -> Any:
    """A batch as its older and its asynchronous trainers make it, each row twice in a
    row.
    """
    protocol = pytest.importorskip("verl.protocol")
    columns = {
        "data_source": np.array([source for source, _ in rows], dtype=object),
        "index": np.array([index for _, index in rows], dtype=object),
    }
    if uid:
        columns["uid"] = np.array([uid] * len(rows), dtype=object)
    about = {"validate": validate, **({} if step is None else {"global_steps": step})}
    batch = protocol.DataProto.from_dict(
        {"dummy": torch.zeros(len(rows), 1)}, columns, about
    )
    return batch.repeat(repeat_times=2, interleave=True)


def runs_of_verl(rows: Sequence[tuple[str, Any]]) -> Iterator[Run]:
    """A run of each of veRL's pipelines: training and validation in batches of two
    steps, two batches a step.
    """
    for make in (tensors, proto):
        run = Run()
        for step in (1, 2):
            for validate in (False, False, True, True):
                run.generate_sequences(make(rows, step, validate))
        yield run
    run = Run()
    for step, validate in (
        (None, False),
        (1, True),
        (None, False),
        (2, True),
        (None, False),
    ):
        run.generate_sequences(proto(rows, step, validate))
    yield run
    run = Run()
    for epoch in (0, 1):
        for number, row in enumerate(rows):
            run.generate_sequences(
                proto(
                    [row],
                    None,
                    False,
                    uid=f"uid_sample_{epoch}_{epoch * len(rows) + number}",
                )
            )
    yield run


@settings(max_examples=10, deadline=None)
@given(rows=ROWS)
def test_rows_of_verl_draw_apart_whatever_their_index(
    rows: list[tuple[str, Any]],
) -> None:
    seeds: list[int] = []
    for run, again in zip(runs_of_verl(rows), runs_of_verl(rows), strict=True):
        assert run.seeds == again.seeds
        assert len(run.problems) == 1, "rows with one prompt draft from each other"
        assert len(set(run.seeds)) == len(run.seeds)
        seeds += run.seeds
    assert seeds


def test_batches_that_name_no_step_are_of_the_trainers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As DAPO's: a run that resumes goes on with other noise than it began with."""
    monkeypatch.setattr(training, "trainer", trainer := SimpleNamespace())
    seeds = list[int]()
    for steps in ((1, 1, 2), (3, 4)):
        run = Run()
        for trainer.global_steps in steps:
            run.generate_sequences(proto([("gsm8k", 0)], None, False))
        seeds += run.seeds
    assert len(set(seeds)) == len(seeds) == 5 * 2


def test_an_agent_loop_that_asks_again_draws_anew_and_what_goes_on_keeps_its_seed() -> (
    None
):
    said = [1] * 5

    async def loop(ask: Any) -> None:
        await ask(PROMPT)
        await ask([*PROMPT, *said, 9], "aborted")  # the next turn
        await ask([*PROMPT, *said, 9, *said])  # the same, resumed
        await ask(PROMPT)
        await ask([*PROMPT, 1])  # from the middle of an answer
        await asyncio.gather(*(ask([*PROMPT, *said, *said]) for _ in range(2)))

    seeds = [label.seed for label, _ in asked_by(loop, said)]
    assert [seeds.index(seed) for seed in seeds] == [0, 0, 0, 3, 4, 5, 6]


def test_what_is_asked_again_after_it_was_given_up_draws_anew() -> None:
    said = [1] * 5
    tool = [2] * 4

    async def loop(ask: Any) -> None:
        for turn in (PROMPT, [*PROMPT, *said, *tool]):
            given_up = asyncio.create_task(ask(turn))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.wait([given_up])
            await ask(turn)
        await ask([*turn, *said])

    asked = asked_by(loop, said)
    seeds = [label.seed for label, _ in asked]
    assert [seeds.index(seed) for seed in seeds] == [0, 1, 0, 3, 0]
    draws = [(label.seed, label.start_in(len(prompt))) for label, prompt in asked]
    assert len({*draws}) == len(draws)


def test_a_conversation_is_recorded_once_although_something_shorter_is_asked_in_between() -> (
    None
):
    """By a sub-agent, or of a judge."""
    said = [1] * 5
    tool = [2] * 4

    async def loop(ask: Any) -> None:
        await ask(PROMPT)
        await ask([9])
        await ask([*PROMPT, *said, *tool], "aborted")  # the next turn
        await ask([*PROMPT, *said, *tool, *said])  # the same, resumed

    asked = asked_by(loop, said)
    assert [prompt[label.start_in(len(prompt)) :] for label, prompt in asked] == [
        [],
        [],
        tool,
        tool + said,
    ]
    drawn = [(label.seed, label.start) for label, _ in asked]
    assert len({*drawn}) == 3 and drawn[2] == drawn[3]


def test_what_else_is_asked_twice_is_not_recorded() -> None:
    async def loop(ask: Any) -> None:
        for prompt in (PROMPT, [9], [8] * 7):
            await ask(prompt)

    assert all(label.start == len(prompt) for label, prompt in asked_by(loop, [1] * 5))


def asked_by(loop: Any, said: list[int]) -> list[tuple[Label, list[int]]]:
    """The labels and prompts that reach the server when veRL's worker runs an agent
    loop, which is given what it asks with; all answers are equal.
    """
    client = SimpleNamespace(config=ON)
    asked = list[tuple[Label, list[int]]]()

    async def server(
        self: Any, reason: str, *, prompt_ids: Any, sampling_params: Any, **_: Any
    ) -> SimpleNamespace:
        asked.append((Label.of(sampling_params["extra_args"]), prompt_ids))
        await asyncio.sleep(0)
        return SimpleNamespace(token_ids=said, stop_reason=reason)

    async def ask(prompt: list[int], reason: str = "completed") -> None:
        call = {"prompt_ids": prompt, "sampling_params": {}}
        await identity.label_requests.replacement(server)(client, reason, **call)

    async def run(self: Any, params: Any, trajectory: Any) -> None:
        await loop(ask)

    asyncio.run(
        identity.follow_samples.replacement(run)(
            None, {}, {"step": 1, "sample_index": 0}
        )
    )
    return asked


def front_end(seed: int = 0, rank: int = 0, process: int = 0) -> RequestLabels:
    return RequestLabels(DasConfig(), engine_config(seed, rank, process), hosted=False)


def engine_config(seed: int = 0, rank: int = 0, process: int = 0) -> Any:
    """What is read of vLLM's config of an engine without a host."""
    parallel = SimpleNamespace(data_parallel_rank=rank, _api_process_rank=process)
    return SimpleNamespace(
        model_config=SimpleNamespace(seed=seed),
        parallel_config=parallel,
        additional_config={},
    )


def drawn(labels: RequestLabels, times: int, samples: int = 1) -> list[int]:
    """The seeds of the samples of requests with one prompt."""
    seeds = []
    for number in range(times):
        params = SimpleNamespace(extra_args=None, seed=None, n=samples)
        prompt = dict(prompt_token_ids=PROMPT, prompt_embeds=None, cache_salt=None)
        labels.complete(
            SimpleNamespace(sampling_params=params, request_id=f"{number}", **prompt)
        )
        seeds += [params.seed + i for i in range(samples)]
    return seeds


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (-2, [-4, -3]),
        (-1, [-3, -2]),
        (2**64 - 1, [-3, -2]),
        (-3, [-3, -2]),
        (0, [0, 1]),
        (7, [7, 8]),
        (2**63 - 1, [2**63 - 2, 2**63 - 1]),
        (2**63, [-(2**63), 1 - 2**63]),
    ],
)
def test_no_sample_has_the_seed_that_vllm_takes_for_none(
    seed: int, expected: list[int]
) -> None:
    params = SimpleNamespace(extra_args={"das_record": 0}, seed=seed, n=2)
    request = SimpleNamespace(
        sampling_params=params,
        request_id="0",
        prompt_token_ids=PROMPT,
        prompt_embeds=None,
    )
    request.cache_salt = None
    front_end().complete(request)
    assert [params.seed, params.seed + 1] == expected


def test_servers_and_ranks_that_count_the_same_prompt_draw_apart() -> None:
    servers = [front_end(), front_end(process=1), front_end(rank=1), front_end(seed=1)]
    seeds = [seed for server in servers for seed in drawn(server, 20, samples=3)]
    assert len(set(seeds)) == len(seeds) == 4 * 20 * 3
    assert drawn(front_end(), 5) == drawn(front_end(), 5)


def test_servers_that_see_the_same_devices_draw_apart_where_ray_gives_them_bundles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = []
    for bundles in ("0,1", "2,3"):
        monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", bundles)
        servers.append(front_end())
    first, second = (drawn(server, 20) for server in servers)
    assert not {*first} & {*second}


def test_threads_of_a_front_end_that_begin_together_draw_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them finds that nobody counts, as with vLLM's `renderer_num_workers`;
    then they go on one by one.
    """
    together = threading.Barrier(3)
    turn = threading.Lock()

    def in_turn(_: Any) -> DasConfig:
        together.wait()
        turn.acquire()
        return DasConfig()

    def process_inputs(_: Any, request_id: str, prompt: list[int], params: Any) -> Any:
        about = dict(prompt_token_ids=prompt, prompt_embeds=None, cache_salt=None)
        return SimpleNamespace(sampling_params=params, request_id=request_id, **about)

    def seed(number: int) -> int:
        params = SimpleNamespace(extra_args=None, seed=None, n=1)
        process(processor, f"{number}", PROMPT, params)
        turn.release()
        return int(params.seed)

    monkeypatch.setattr(vllm_front_end, "settings", in_turn)
    processor = SimpleNamespace(vllm_config=engine_config())
    process = vllm_front_end.label_requests.replacement(process_inputs)
    with ThreadPoolExecutor(3) as threads:
        assert len(set(threads.map(seed, range(3)))) == 3


def test_threads_of_a_front_end_are_labelled_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(2)
    stock = Labeller.label

    def label(self: Labeller, *args: Any, **kwargs: Any) -> Label:
        with pytest.raises(threading.BrokenBarrierError):
            together.wait(0.05)  # nobody else comes
        together.reset()
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(Labeller, "label", label)
    labels = front_end()
    with ThreadPoolExecutor(3) as threads:
        seeds = list(threads.map(lambda _: drawn(labels, 1)[0], range(3)))
    assert len(set(seeds)) == 3


def test_labellers_of_nemo_rl_and_of_strangers_draw_apart() -> None:
    labellers = [
        Labeller(0),
        Labeller(0, "worker 0"),
        Labeller(0, "worker 1"),
        Labeller(0, resumed=3),
    ]
    labellers += [
        Labeller(0, f"replica {replica}, node {node}")
        for replica in (0, 1)
        for node in (0, 1)
    ]
    made = [
        one.label(PROMPT, validate).seed
        for one in labellers
        for validate in (False, True)
        for _ in range(9)
    ]
    assert len(set(made)) == len(made)
    assert not set(made) & set(next(runs_of_verl([("gsm8k", 0)])).seeds)


def test_equal_noise_on_any_replica_is_a_fault() -> None:
    """Also a validation's, which no history takes: a mean over 32 samples would be one
    sample 32 times.
    """

    def draw(clock: RolloutClock, seed: int, problem: int, start: int) -> None:
        clock.count_response(
            Label(problem, seed, start=start, record=clock is first), 0.0, 1.0, b""
        )

    first = RolloutClock()
    second = RolloutClock()
    draw(first, seed=7, problem=1, start=3)
    draw(first, seed=7, problem=1, start=9)  # a later turn
    draw(first, seed=8, problem=1, start=3)
    draw(second, seed=7, problem=2, start=3)
    assert "draws" not in faults([first.read_and_reset(), second.read_and_reset()])
    draw(first, seed=7, problem=1, start=3)
    draw(second, seed=7, problem=1, start=3)
    found = faults([first.read_and_reset(), second.read_and_reset()])
    assert "1 of 2 responses drew the noise of another request" in found["draws"]


def test_counts_that_were_dropped_are_not_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Labeller, "COUNTED", 4)
    labeller = Labeller(0)
    seeds = [
        labeller.label([prompt], validate=False).seed
        for _ in range(3)
        for prompt in range(10)
    ]
    assert len(set(seeds)) == len(seeds)
