"""What veRL's workers write ahead is what the requests of the next steps will write,
and travels with these.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_seeds import ON, PROMPT, Run, proto, sampled, tensors

from das_adapter.config import parse
from das_adapter.core.index import SuffixIndex
from das_adapter.engine.settings import prepare_standalone
from das_adapter.errors import ConfigError
from das_adapter.protocol.label import BadLabel, Label
from das_adapter.protocol.metrics import RolloutClock, figures
from das_adapter.service import run_ahead
from das_adapter.service.run_ahead import AheadRequests
from das_adapter.verl import identity
from das_adapter.verl import run_ahead as verl_run_ahead

ROWS = [("gsm8k", 3), ("gsm8k", 4), ("aime", 3), ("aime", 3)]
TRAJECTORY = {"step": 2, "sample_index": 3, "rollout_n": 0, "validate": False}


class Server:
    """A replica that writes a few tokens of a response at a time."""

    def __init__(self, *answers: tuple[list[int], bool]) -> None:
        self.answers = list(answers)
        self.asked = list[tuple[list[int], dict[str, Any]]]()

    @property
    def write_ahead(self) -> Any:
        return SimpleNamespace(remote=self.answer)

    async def answer(
        self, prompt: list[int], params: dict[str, Any]
    ) -> tuple[list[int], bool]:
        self.asked.append((prompt, params))
        return self.answers.pop(0) if self.answers else ([9], True)


class Balancer:
    """It lends a replica as often as it is asked."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.lent = 0

    @property
    def lend(self) -> Any:
        return SimpleNamespace(remote=self._lend)

    @property
    def give_back(self) -> Any:
        return SimpleNamespace(remote=self._give_back)

    async def _lend(self, most: int) -> list[tuple[str, Server]]:
        self.lent += min(most, 2)
        return [("a", self.server)] * min(most, 2)

    def _give_back(self, name: str) -> None:
        self.lent -= 1


async def _server(*_: Any, **__: Any) -> None:
    raise AssertionError("what is written ahead goes to a replica that was lent")


class Worker:
    """The part of veRL's agent loop worker that is used; its agent loop asks once, and
    again for a next turn.
    """

    def __init__(self, server: Server | None = None, images: Any = None) -> None:
        self.rollout_config = SimpleNamespace(
            temperature=0.7,
            top_p=0.9,
            top_k=-1,
            n=2,
            agent=SimpleNamespace(default_agent_loop="single"),
        )
        self.balancer = Balancer(server or Server())
        self.llm_client = SimpleNamespace(config=ON, _load_balancer=self.balancer)
        self.images = images
        self.silent = False
        self.turns: list[int] = []

    async def ask_twice(
        self, params: Any, trajectory: Any, *, agent_name: str, trace: bool, **_: Any
    ) -> None:
        if self.silent:
            return await self._agent_loop_postprocess()
        for _ in range(2):
            self.turns.append(1)
            call = {
                "prompt_ids": PROMPT,
                "sampling_params": dict(params),
                "image_data": self.images,
            }
            try:
                await identity.label_requests.replacement(_server)(
                    self.llm_client, "id", **call
                )
            except Exception:  # an agent loop may catch whatever tools raise
                raise AssertionError from None

    async def _agent_loop_postprocess(self, *_: Any) -> None:
        raise AssertionError("it would be trained on")

    _run_agent_loop = identity.follow_samples.replacement(ask_twice)
    das_write_ahead = verl_run_ahead.write_ahead.replacement(None)


@pytest.fixture(autouse=True)
def nothing_written(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run_ahead.texts.clear()
    monkeypatch.setattr(run_ahead.tuning, "RUN_AHEAD_POLL_S", 0.0)
    yield
    verl_run_ahead.VerlRunAhead.running = None


async def write(worker: Worker, batch: Any) -> None:
    await worker.das_write_ahead(batch)
    await worker.das_writing.task


@pytest.mark.parametrize("make", [tensors, proto])
def test_the_noise_is_that_of_the_requests_to_come(make: Any) -> None:
    pytest.importorskip("verl")
    run = Run()
    server = Server()
    batch = make(ROWS, 2, False)
    run.generate_sequences(make(ROWS, 1, False))
    earlier = len(run.seeds)
    run.generate_sequences(make(ROWS, 2, False))
    identity.name_rows(batch)
    for part in batch.chunk(2):
        asyncio.run(write(Worker(server), part))
    labels = [Label.of(params["extra_args"]) for _, params in server.asked]
    assert sorted(label.seed or 0 for label in labels) == sorted(run.seeds[earlier:])
    assert {label.problem for label in labels} == run.problems
    assert not any(label.record for label in labels)
    assert all(
        params["temperature"] == 0.7 and params["top_p"] == 0.9
        for _, params in server.asked
    )


def test_the_first_samples_of_all_rows_come_first() -> None:
    pytest.importorskip("verl")
    for make in (tensors, proto):
        batch = make(ROWS, 2, False)
        identity.name_rows(batch)
        jobs, step = asyncio.run(verl_run_ahead.make_jobs(Worker(), batch))
        assert step == 2
        numbers = [
            job.fields.get("session_id", job.trajectory["rollout_n"]) for job in jobs
        ]
        assert len(jobs) == 8
        assert numbers == sorted(numbers)


def test_an_interrupted_response_is_gone_on_with_and_the_agent_loop_asks_once() -> None:
    pytest.importorskip("verl")
    server = Server(([1, 2], False), ([], False), ([3], True))
    worker = Worker(server)
    batch = proto([("gsm8k", 3)], 2, False)[:1]
    identity.name_rows(batch)
    asyncio.run(write(worker, batch))
    assert [prompt for prompt, _ in server.asked] == [
        PROMPT,
        [*PROMPT, 1, 2],
        [*PROMPT, 1, 2],
    ]
    assert len(worker.turns) == 3
    assert worker.balancer.lent == 0
    label = asyncio.run(sampled(TRAJECTORY, das_row="2/gsm8k/3/0"))
    assert label.ahead == np.array([1, 2, 3], dtype=np.int32).tobytes()
    again = asyncio.run(sampled(TRAJECTORY, das_row="2/gsm8k/3/0"))
    assert again.ahead is None  # it was taken
    assert again.seed == label.seed


def test_an_agent_loop_that_asks_in_tasks_of_its_own_is_ended_too() -> None:
    pytest.importorskip("verl")
    worker = Worker()
    one = Worker.ask_twice

    async def in_tasks(*given: Any, **fields: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one(worker, *given, **fields))

    worker._run_agent_loop = partial(
        identity.follow_samples.replacement(lambda _, *a, **k: in_tasks(*a, **k)),
        worker,
    )
    batch = proto([("gsm8k", 3)], 2, False)[:1]
    identity.name_rows(batch)
    asyncio.run(write(worker, batch))
    assert len(worker.balancer.server.asked) == 1
    assert worker.balancer.lent == 0


def test_a_prompt_with_images_is_left_alone() -> None:
    pytest.importorskip("verl")
    worker = Worker(images=[object()])
    batch = proto([("gsm8k", 3)], 2, False)
    identity.name_rows(batch)
    asyncio.run(write(worker, batch))
    assert worker.balancer.server.asked == []


def test_an_agent_loop_that_asks_for_nothing_leaves_nothing() -> None:
    pytest.importorskip("verl")
    worker = Worker()
    worker.silent = True
    batch = proto([("gsm8k", 3)], 2, False)
    identity.name_rows(batch)
    asyncio.run(write(worker, batch))
    assert worker.balancer.server.asked == []
    assert worker.balancer.lent == 0


async def add(worker: Worker, *steps: int) -> None:
    for step in steps:
        batch = proto([("gsm8k", step)], step, False)
        identity.name_rows(batch)
        await worker.das_write_ahead(batch)


@pytest.mark.parametrize("shown", [(2, 3), (3, 2)])
def test_a_later_step_is_written_when_the_one_before_it_is(
    shown: tuple[int, ...],
) -> None:
    pytest.importorskip("verl")
    server = Server(
        ([1], False), ([2], True), ([3], True), ([4], True), ([], False), ([5], True)
    )
    worker = Worker(server)

    async def check() -> None:
        await add(worker, *shown)
        await worker.das_writing.task

    asyncio.run(check())
    seeds = [Label.of(params["extra_args"]).seed for _, params in server.asked]
    assert len(set(seeds)) == 4
    assert seeds[2] == seeds[0]  # what was interrupted goes on before the next step
    assert seeds.count(seeds[0]) == seeds.count(seeds[4]) == 2
    texts = [[list(text) for text in written.values()] for written in run_ahead.texts]
    assert dict(zip(shown, texts, strict=True)) == {2: [[1, 3], [2]], 3: [[4], [5]]}


def test_no_more_is_written_at_once_than_a_step_has_samples() -> None:
    pytest.importorskip("verl")
    server = Server()
    go_on = asyncio.Event()
    worker = Worker(server)
    answer = server.answer

    async def slow(*request: Any) -> tuple[list[int], bool]:
        await go_on.wait()
        return await answer(*request)

    async def check() -> None:
        server.answer = slow  # type: ignore[method-assign]
        await add(worker, 2, 3)
        for _ in range(50):
            await asyncio.sleep(0)
        assert worker.balancer.lent == 2
        go_on.set()
        await worker.das_writing.task

    asyncio.run(check())
    assert len(server.asked) == 4


def test_the_step_that_begins_ends_the_writing_for_it_and_no_other() -> None:
    pytest.importorskip("verl")
    worker = Worker()

    async def check() -> None:
        await add(worker, 2, 3, 4)
        worker.das_writing.stop(3)
        await worker.das_writing.task
        assert [len(written) for written in run_ahead.texts] == [0, 0, 2]
        await add(worker, 5)
        await worker.das_writing.task

    asyncio.run(check())
    assert [len(written) for written in run_ahead.texts] == [0, 0, 2, 2]


def test_texts_of_earlier_steps_are_forgotten() -> None:
    for step in range(run_ahead.tuning.RUN_AHEAD_STEPS + 3):
        run_ahead.texts.append({10 + step: array("i", [step])})
    assert [run_ahead.pop_text(10 + step) is not None for step in range(3)] == [
        False,
        False,
        True,
    ]
    assert run_ahead.pop_text(12) is None  # it was taken


def test_a_label_carries_what_was_written_ahead() -> None:
    label = Label(1, 2, ahead=np.array([5, 6], dtype=np.int32).tobytes())
    assert Label.of(label.extra_args()) == label
    with pytest.raises(BadLabel, match=r"das_ahead: found \[5, 6\], allowed: bytes"):
        Label.of({"das_ahead": [5, 6]})


def test_a_request_drafts_its_own_text_until_it_writes_something_else() -> None:
    index = SuffixIndex()
    written = list(range(100, 160))
    others = [index.open(1, [], prefix=[100, 7, 7, 7, 7]) for _ in range(4)]
    handle = index.open(1, [3, 4], prefix=[100], ahead=written)
    assert index.draft([handle], [32])[0][0].tolist() == written[1:33]
    index.extend(handle, written[1:40])
    assert index.draft([handle], [32], 0.0)[0][0].tolist() == written[40:]
    index.extend(handle, [9, 8, 100])
    # as most texts have it
    assert index.draft([handle], [1], 0.0)[0][0].tolist() == [7]
    index.extend(handle, written[10:20])  # it votes like a finished sibling's text
    assert index.draft([handle], [8], 0.0)[0][0].tolist() == written[20:28]
    index.extend(others[0], written[10:20])
    assert index.draft([others[0]], [8], 0.0)[0][0].tolist() == written[20:28]
    for one in (handle, *others):
        index.close(one)
    index.clear_live()
    assert index.live_bytes == 0


def test_the_chance_of_what_was_written_ahead_is_learned() -> None:
    index = SuffixIndex()
    chances = []
    for _ in range(40):
        handle = index.open(1, [], prefix=[1], ahead=[1, 2, 3])
        chances.append(float(index.draft([handle], [1], 0.0)[1][0][0]))
        index.extend(handle, [9])
    assert chances[0] == pytest.approx(0.95)
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < 0.5


def test_figures_say_how_much_was_repeated() -> None:
    clocks = [RolloutClock() for _ in range(3)]
    texts = {
        name: np.array(ids, dtype=np.int32).tobytes()
        for name, ids in {"a": [1, 2, 3, 4], "b": [1, 2, 9]}.items()
    }
    for clock, text in zip(clocks, ("a", "b"), strict=False):
        clock.count_response(Label(1, 2, ahead=texts["a"]), 0.0, 1.0, texts[text])
    found = figures(
        [
            {k: v for k, v in clock.read_and_reset().items() if k == "ahead"}
            for clock in clocks
        ]
    )
    assert (found["das/run_ahead_requests"], found["das/run_ahead_tokens"]) == (2, 8)
    assert found["das/run_ahead_repeated"] == 6 / 8
    assert "das/run_ahead_tokens" not in figures([clocks[0].read_and_reset()])


def trainer(**config: Any) -> Any:
    settings = {"train_batch_size": 4, "gen_batch_size": None, **config}
    data = SimpleNamespace(**settings, get=settings.get)
    algorithm = {"adv_estimator": "grpo", **config}
    loader = SimpleNamespace(sampler=object(), dataset=config.get("dataset", object()))
    return SimpleNamespace(
        **({"trainer_mode": mode} if (mode := config.get("mode", "sync")) else {}),
        train_dataloader=loader,
        config=SimpleNamespace(
            data=data, algorithm=SimpleNamespace(**algorithm, get=algorithm.get)
        ),
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, None),
        ({"mode": "colocate_async"}, "take turns"),
        ({"mode": None}, "types.SimpleNamespace may choose its batches otherwise"),
        ({"filter_groups": {"enable": True}}, "depends on the rollouts"),
        ({"gen_batch_size": 1}, "depends on the rollouts"),
        ({"dataset": SimpleNamespace(on_batch_end=None)}, "changes after each step"),
        ({"adv_estimator": "remax"}, "greedy samples"),
    ],
)
def test_where_the_next_batch_is_not_known_it_says_so(
    config: dict[str, Any], why: str | None
) -> None:
    said = verl_run_ahead.run_ahead_obstacle(trainer(**config))
    assert said is None if why is None else why in (said or "")


def test_it_rests_where_nothing_is_repeated() -> None:
    batches = run_ahead.LookAhead([])
    batches.peek = lambda count: [None] * count  # type: ignore[method-assign]
    coming = run_ahead.UpcomingBatches(batches)
    shown = list[bool]()
    for step in range(40):
        # steps after the one that begins were shown, too
        written = any(shown[-1 - run_ahead.tuning.RUN_AHEAD_STEPS : -1])
        coming.repeated = 0.01 if written else None
        shown.append(bool([*coming.show(step, 100)]))
    assert [step for step in range(40) if shown[step]] == [0, 1, 10, 11, 28, 29]


def test_a_batch_is_dispatched_before_the_next_ones_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("verl")
    order = list[str]()
    batch = proto(ROWS, 1, False)

    async def stock(manager: Any, prompts: Any) -> Any:
        order.append("dispatched")
        await asyncio.sleep(0.01)
        order.append("written")
        return prompts

    monkeypatch.setattr(
        verl_run_ahead.VerlRunAhead,
        "running",
        SimpleNamespace(show_next_batches=lambda *_: order.append("shown")),
    )
    assert (
        identity.name_awaited_batches.replacement(stock)(
            SimpleNamespace(config=ON), batch
        )
        is batch
    )
    assert order == ["dispatched", "shown", "written"]


def test_an_engine_without_a_host_refuses_it() -> None:
    config = parse({"history": {"run_ahead": "auto"}})
    with pytest.raises(
        ConfigError,
        match=r"das\.history\.run_ahead: found 'auto', allowed: 'off'.* no host",
    ):
        prepare_standalone(
            SimpleNamespace(additional_config={}, speculative_config=None), config
        )


def test_an_engine_writes_ahead_while_a_rollout_goes_on_that_leaves_it_idle() -> None:
    sent = []

    async def abort(ids: list[str]) -> None:
        raise AssertionError("nothing is written that has to end")

    async def send() -> tuple[list[int], bool]:
        sent.append(1)
        return [7], True

    async def written() -> list[bool]:
        aside = AheadRequests(abort)
        before = await aside.write(send)
        with aside.request():
            beside = await aside.write(send)
        idle = await aside.write(send)
        await aside.end()
        after = await aside.write(send)
        return [bool(tokens) for tokens, _ in (before, beside, idle, after)]

    assert asyncio.run(written()) == [False, False, True, False]
    assert len(sent) == 1
