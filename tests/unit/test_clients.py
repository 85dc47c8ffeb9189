"""Clients of a server that do not know each other draft from each other's texts for the
same prompt alone; clients that trust each other, for the same problem.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from das_adapter.config import DasConfig, HistoryConfig
from das_adapter.core.identity import FirstTurns, prompt_identity
from das_adapter.engine import front_end
from das_adapter.engine.requests import RequestLabels
from das_adapter.protocol.label import BadLabel, Label
from das_adapter.protocol.messages import Refresh

TEMPLATE = [1, 2, 3]
"""With what every prompt begins."""


class Server(RequestLabels):
    """A server's front end."""

    def __init__(self, hosted: bool = False, scope: Any = "problem") -> None:
        parallel = SimpleNamespace(data_parallel_rank=0, _api_process_rank=0)
        config = SimpleNamespace(
            model_config=SimpleNamespace(seed=0), parallel_config=parallel
        )
        super().__init__(DasConfig(history=HistoryConfig(scope=scope)), config, hosted)

    def asked(
        self,
        prompt: list[int] | None,
        label: dict[str, Any] | None = None,
        **request: Any,
    ) -> Label:
        """The label with which a client's request reaches the engine."""
        params = SimpleNamespace(extra_args=label, seed=None, n=1)
        about = {"prompt_embeds": None, "cache_salt": None, **request}
        self.complete(
            SimpleNamespace(
                sampling_params=params,
                prompt_token_ids=prompt,
                request_id="same",
                **about,
            )
        )
        return Label.of(params.extra_args)


def test_whoever_sends_the_beginning_of_all_prompts_shares_none_of_them() -> None:
    prompts = [[*TEMPLATE, *range(10 * i, 10 * i + 50)] for i in range(5)]
    strangers = Server()
    friends = Server(scope="trusted")
    for server in (strangers, friends):
        for length in range(1, 4):
            server.asked(TEMPLATE[:length])
    assert [strangers.asked(prompt).problem for prompt in prompts] == list(
        map(prompt_identity, prompts)
    )
    assert {friends.asked(prompt).problem for prompt in prompts} == {
        prompt_identity(TEMPLATE[:1])
    }


@pytest.mark.parametrize(
    "label",
    [{"das_problem": 5}, {"das_problem": "5"}, {"das_start": 0}, {"das_start": 9}],
)
def test_only_trusted_clients_say_what_a_request_is_about(
    label: dict[str, Any],
) -> None:
    (key,) = label
    with pytest.raises(
        BadLabel,
        match=rf"^{key}: found \d, allowed: none, unless .* `history.scope: trusted`$",
    ):
        Server().asked(TEMPLATE, label)
    for server in (Server(scope="trusted"), Server(hosted=True)):
        found = server.asked(TEMPLATE, label)
        assert (found.problem == 5) == (key == "das_problem")
        assert (found.start is not None) == (key == "das_start")


def test_any_client_may_keep_its_text_out_and_choose_its_noise() -> None:
    found = Server().asked(TEMPLATE, {"das_record": 0, "das_seed": 7})
    assert found == Label(prompt_identity(TEMPLATE), 7, record=False)


def test_what_passes_a_host_by_is_no_history_and_no_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Over a server's HTTP address: there may be no weight sync that ends its text."""
    server = Server(hosted=True)
    assert [
        server.asked(TEMPLATE, label).record
        for label in (None, {"das_seed": 7}, {"das_record": 1})
    ] == [False] * 3
    assert (
        caplog.text.count("a request came without identity, not through the host") == 1
    )
    labelled = [
        server.asked(TEMPLATE, label)
        for label in ({"das_problem": 5}, {"das_problem": 5, "das_record": 0})
    ]
    assert labelled == [Label(5), Label(5, record=False)]
    assert caplog.text.count("das:") == 1


def test_a_cache_salt_parts_the_histories_of_clients_that_do_not_trust_each_other() -> (
    None
):
    strangers = Server()
    friends = Server(scope="trusted")
    salts = [None, "", "mine", "mine", "theirs"]
    found = [strangers.asked(TEMPLATE, cache_salt=salt).problem for salt in salts]
    assert found[:2] == [prompt_identity(TEMPLATE)] * 2
    assert found[2] == found[3]
    assert len(set(found)) == 3
    assert {friends.asked(TEMPLATE, cache_salt=salt).problem for salt in salts} == {
        prompt_identity(TEMPLATE)
    }


def test_prompts_that_are_no_tokens_have_nothing_in_common() -> None:
    """vLLM's token ids of embeddings are zeros, or there are none."""
    server = Server()
    asked = [
        server.asked(prompt, prompt_embeds=object())
        for prompt in (None, None, [0, 0], [0, 0])
    ]
    assert len({label.problem for label in asked}) == 4
    assert server.asked(None, {"das_record": 0}).record is False


def test_a_key_that_no_label_has_is_refused_and_shown_in_short() -> None:
    with pytest.raises(
        BadLabel,
        match=(
            "das_recrod: unknown key, allowed: das_problem, das_seed, das_record,"
            " das_start"
        ),
    ):
        Server().asked(TEMPLATE, {"das_recrod": 0, "other": 1})
    for long in (
        {"das_" + 10**6 * "x": 1},
        {"das_seed": 10**6 * "x"},
        {"das_seed": 10**5 * [1]},
    ):
        with pytest.raises(BadLabel) as error:
            Server().asked(TEMPLATE, long)
        assert len(str(error.value)) < 300


def test_streamed_input_is_refused_beside_drafts() -> None:
    exceptions = pytest.importorskip("vllm.exceptions")

    def process(drafts: Any, labels: Any, resumable: bool = True) -> None:
        made = SimpleNamespace(resumable=resumable, sampling_params=None)
        processor = SimpleNamespace(
            vllm_config=SimpleNamespace(speculative_config=drafts)
        )
        setattr(processor, front_end.LABELS, labels)
        assert (
            front_end.label_requests.replacement(lambda *_: made)(
                processor, "id", TEMPLATE, None
            )
            is made
        )

    process(None, Server())
    process(object(), None)
    process(object(), Server(), resumable=False)
    with pytest.raises(
        exceptions.VLLMValidationError,
        match="input is streamed, allowed where nothing drafts",
    ):
        process(object(), Server())


@pytest.mark.parametrize("version", [-(2**31) - 1, 2**31, 2**63])
def test_a_weight_version_that_no_history_can_hold_is_refused(version: int) -> None:
    with pytest.raises(ValidationError, match="version"):
        Refresh(version=version)


def test_an_engine_without_a_host_is_not_told_what_to_map() -> None:
    """By a client of vLLM's /collective_rpc, say, which a server has in its development
    mode.
    """
    pytest.importorskip("vllm")
    from das_adapter.engine.worker import WorkerState

    state = WorkerState(None, DasConfig(), None)
    noted = []
    state.standalone = SimpleNamespace(weights_changed=lambda: noted.append("changed"))  # type: ignore[assignment]
    told = {"version": 2**30, "history": ("/elsewhere", 1)}
    answer = state.call("refresh", told)
    assert answer == {
        "error": "refresh: found version, history, allowed without a host: no arguments"
    }
    assert state.call("refresh", {}) == {}
    assert noted == ["changed"]
    assert state.counters.error is None


def test_a_rank_that_decides_nothing_looks_after_its_part_of_the_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sleep discards it on every rank of an engine without a host, and the first weight
    update brings it back.
    """
    pytest.importorskip("vllm")
    from das_adapter.engine.worker import WorkerState

    second = SimpleNamespace(rank_in_group=1)
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: second)
    state = WorkerState(None, DasConfig(drafter="draft_model"), None)
    checked = list[str]()
    monkeypatch.setattr(
        state.draft_weights, "refresh", lambda: checked.append("its weights")
    )
    step = SimpleNamespace(finished_req_ids=(), total_num_scheduled_tokens=1)
    state.stand_alone(None, "history")
    state.begin_standalone(step)
    assert not checked
    state.load_weights(list, [])
    state.begin_standalone(step)
    assert checked == ["its weights"]


PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
        st.lists(st.sampled_from("ab"), max_size=2),
    )
)


@given(asked=PROMPTS)
def test_a_later_turn_belongs_to_the_shortest_prompt_that_it_begins_with(
    asked: list[tuple[list[int], list[str]]],
) -> None:
    turns = FirstTurns()
    first = dict[tuple[tuple[int, ...], tuple[str, ...]], None]()
    for tokens, images in asked:
        found = turns.problem(np.array(tokens, np.int32), images)
        begun = [
            (known, shown)
            for known, shown in first
            if len(known) < len(tokens)
            and [*known] == tokens[: len(known)]
            and [*shown] == images[: len(shown)]
        ]
        same = (tuple(tokens), tuple(images))
        prompt, shown = (
            same
            if same in first or not begun
            else min(begun, key=lambda one: (len(one[0]), -len(one[1])))
        )
        first[prompt, shown] = None
        assert found == prompt_identity(prompt, *shown)
