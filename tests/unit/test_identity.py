"""Who asks: the identity that a request carries from any agent loop to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from das_adapter.protocol.engine_args import PROBLEM_ARG, RECORD_ARG, SEED_ARG, START_ARG
from das_adapter.verl import identity

ON = {"actor_rollout_ref": {"rollout": {"custom": {"das": {"drafter": "history"}}}}}
OFF = {"actor_rollout_ref": {"rollout": {"custom": {"das": {"drafter": "none"}}}}}


def requests(
    config: dict, trajectory: dict, prompts: list[list[int]], stops: Sequence[str] = (), **kwargs: Any
) -> list[dict]:
    """The sampling parameters that reach the server when an agent loop asks for one turn per prompt."""
    client, sent = SimpleNamespace(config=config), []

    async def server(request_id: str, *, sampling_params: dict, **_: Any) -> SimpleNamespace:
        sent.append(sampling_params)
        return SimpleNamespace(token_ids=[7, 7], stop_reason=stops[len(sent) - 1] if stops else "completed")

    async def loop(*_: Any, **__: Any) -> None:
        for prompt in prompts:
            call = {"prompt_ids": prompt, "sampling_params": {"temperature": 1.0}}
            await identity.around_generate(server, client, ("id",), call)

    asyncio.run(identity.around_agent_loop(loop)(None, {}, trajectory, **kwargs))
    return sent


TRAJECTORY = {"step": 5, "sample_index": 3, "rollout_n": 0, "validate": False}


def test_samples_of_a_problem_share_it_and_differ_in_seed() -> None:
    a, b = (requests(ON, TRAJECTORY, [[1, 2]], session_id=i)[0]["extra_args"] for i in (0, 1))
    assert a[PROBLEM_ARG] == b[PROBLEM_ARG]
    assert a[SEED_ARG] != b[SEED_ARG]


def test_the_same_sample_has_the_same_seed_in_every_run() -> None:
    assert requests(ON, TRAJECTORY, [[1, 2]], session_id=1) == requests(ON, TRAJECTORY, [[1, 2]], session_id=1)


def test_later_turns_keep_problem_and_seed() -> None:
    first, second = (r["extra_args"] for r in requests(ON, TRAJECTORY, [[1, 2], [1, 2, 7, 7, 4]], session_id=0))
    assert [first.pop(START_ARG), second.pop(START_ARG)] == [2, 4]  # the tool's answer is text that is not known yet
    assert first == second


def test_a_resumed_request_begins_where_it_began() -> None:
    prompts, stops = [[1, 2], [1, 2, 7, 7], [1, 2, 7, 7, 7, 7, 4]], ("aborted", "completed", "completed")
    sent = requests(ON, TRAJECTORY, prompts, stops=stops, session_id=0)
    assert [r["extra_args"][START_ARG] for r in sent] == [2, 2, 6]


def test_steps_rows_and_validation_draw_anew() -> None:
    variants = [
        TRAJECTORY,
        {**TRAJECTORY, "step": 6},
        {**TRAJECTORY, "sample_index": 4},
        {**TRAJECTORY, "validate": True},
    ]
    labels = [requests(ON, t, [[1, 2]], session_id=0)[0]["extra_args"] for t in variants]
    assert len({label[SEED_ARG] for label in labels}) == 4
    assert [label[RECORD_ARG] for label in labels] == [1, 1, 1, 0]


def test_without_an_active_block_requests_are_untouched() -> None:
    assert requests(OFF, TRAJECTORY, [[1, 2]], session_id=0) == [{"temperature": 1.0}]
    assert requests({"actor_rollout_ref": {"rollout": {}}}, TRAJECTORY, [[1, 2]]) == [{"temperature": 1.0}]


def test_a_loop_without_index_or_session_still_works() -> None:
    sent = requests(ON, {"step": -1, "sample_index": None, "rollout_n": 2, "validate": False}, [[1]])
    assert set(sent[0]["extra_args"]) == {PROBLEM_ARG, SEED_ARG, RECORD_ARG, START_ARG}
