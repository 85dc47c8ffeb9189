"""Counting decode steps, adding replicas up, and the run's ledger."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from das_adapter.core.length import RESPONSE, ExpectedLengths
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import to_plain_payload
from das_adapter.protocol.metrics import (
    Counters,
    RolloutClock,
    faults,
    figures,
    response_hash,
)
from das_adapter.service.ledger import Ledger


def counted(*steps: tuple[list[int], list[int]]) -> dict:
    counters = Counters()
    for got, drafts in steps:
        counters.count_step(got, drafts)
    return counters.read_and_reset()


def test_figures_of_a_hand_counted_step() -> None:
    # One request still reads its prompt, one decodes plainly, one drafted 4 and kept 2,
    # one drafted 3 and kept none.
    found = figures([counted(([0, 1, 3, 1], [0, 0, 4, 3]))])
    assert found["das/tokens_per_forward"] == pytest.approx(5 / 3)
    assert found["das/draft_coverage"] == pytest.approx(2 / 3)
    assert found["das/acceptance_length"] == pytest.approx(1 + 2 / 2)
    assert found["das/accepted_tokens"] / found["das/draft_tokens"] == pytest.approx(
        2 / 7
    )
    assert found["das/health"] == 1.0


def test_a_token_behind_the_draft_is_not_an_accepted_one() -> None:
    # A draft of 2 was filled up to 4 for vLLM, and one of the fillers happened to be
    # right.
    assert counted(([4], [2]))["accepted_tokens"] == 2


def test_replicas_add_up() -> None:
    a = counted(([2], [1]))
    b = counted(([1], [0]), ([1], [0]))
    assert figures([a, b])["das/tokens_per_forward"] == pytest.approx(4 / 3)


def test_taking_starts_again_but_remembers_a_failure() -> None:
    counters = Counters(error="boom")
    counters.count_step([1], [0])
    assert counters.read_and_reset()["tokens"] == 1
    assert counters.read_and_reset() == {**Counters().read_and_reset(), "error": "boom"}


def test_what_nobody_asks_for_does_not_grow_for_ever() -> None:
    counters = Counters()
    clock = RolloutClock()
    for number in range(2**17 + 5):
        counters.propose_seconds.append(float(number))
        clock.count_response(Label(1, number), 0.0, float(number), b"")
    taken = {**counters.read_and_reset(), **clock.read_and_reset()}
    assert [len(taken[name]) for name in ("propose_seconds", "ends", "draws")] == [
        2**17
    ] * 3
    assert taken["propose_seconds"][-1] == taken["ends"][-1] == 2**17 + 4


def test_health_falls_with_a_failed_drafter_and_with_collapsed_acceptance() -> None:
    assert (
        figures([{**Counters().read_and_reset(), "error": "boom"}])["das/health"] == 0.0
    )
    assert (
        figures(
            [
                {
                    **Counters().read_and_reset(),
                    "drafted_forwards": 5000,
                    "accepted_tokens": 5,
                }
            ]
        )["das/health"]
        == 0.0
    )
    assert (
        figures(
            [
                {
                    **Counters().read_and_reset(),
                    "drafted_forwards": 5000,
                    "accepted_tokens": 2500,
                }
            ]
        )["das/health"]
        == 1.0
    )


def test_health_falls_with_a_drafter_whose_weights_did_not_come_until_they_do() -> None:
    counters = Counters(alarm="this weight sync brought no weight of the drafter")
    assert (
        figures([counters.read_and_reset(), Counters().read_and_reset()])["das/health"]
        == 0.0
    )
    assert (
        figures([counters.read_and_reset()])["das/health"] == 0.0
    )  # still, in the next step
    counters.alarm = None
    assert figures([counters.read_and_reset()])["das/health"] == 1.0


def test_requests_that_find_history_are_counted_over_replicas() -> None:
    parts = [
        {**Counters().read_and_reset(), "history_requests": n, "history_hits": hits}
        for n, hits in ((6, 6), (2, 0))
    ]
    assert figures(parts)["das/history_hits"] == 6 / 8
    assert figures(parts)["das/health"] == 1.0
    # nobody has a history
    assert "das/history_hits" not in figures([Counters().read_and_reset()])


def test_the_log_says_once_why_health_is_0(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    sound = report(0.0, [1.0])
    for step in range(3):
        for replica in (sound, {**sound, "alarm": "no weights came"}):
            ledger.report(step, replica)
        assert ledger.metrics(step)["das/health"] == 0.0
    ledger.report(4, {**sound, "error": "KeyError(1)", "alarm": "none came again"})
    assert ledger.metrics(4)["das/health"] == 0.0
    ledger.report(5, sound)
    assert ledger.metrics(5)["das/health"] == 1.0
    assert caplog.messages == [
        "das: das/health is 0: no weights came",
        "das: das/health is 0: a drafter failed: KeyError(1)",
    ]


def test_drafting_that_does_not_pay_is_a_figure_and_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = Ledger()
    for reason in ("speculation cost 9 s", None, "it cost 8 s"):
        ledger.report(1, {**report(0.0, [1.0]), "reason": reason})
    found = ledger.metrics(1)
    assert (found["das/health"], found["das/engines_resting"]) == (1.0, 2.0)
    assert not caplog.messages


def test_engines_that_a_weight_sync_left_behind_are_counted() -> None:
    parts = [{**Counters().read_and_reset(), "engines_behind": n} for n in (0, 1, 2)]
    assert figures(parts)["das/engines_behind"] == 3
    # no history is shared
    assert "das/engines_behind" not in figures([Counters().read_and_reset()])


def test_an_engine_that_reports_several_times_to_a_step_is_counted_once() -> None:
    """As to veRL's older trainer, which sends weights again when a reward model has had
    the GPU.
    """
    rests = {"engine": "a", "reason": "drafting rests", "engines_behind": 1}
    parts = [
        rests,
        {**rests, "reason": None},
        {**rests, "engine": "b", "engines_behind": 0},
        rests,
    ]
    found = figures([{**Counters().read_and_reset(), **part} for part in parts])
    assert (found["das/engines_resting"], found["das/engines_behind"]) == (2.0, 1.0)


def test_every_fault_has_a_reason() -> None:
    half = {
        **Counters().read_and_reset(),
        "drafted_forwards": 200,
        "accepted_tokens": 1,
    }
    assert faults([half]) == {}
    assert faults([half] * 2) == {
        "alarm": "acceptance collapsed: 2 accepted tokens of 400 drafts"
    }
    assert faults([{"error": "no"}, {"error": None}]) == {
        "error": "a drafter failed: no"
    }


def test_the_copys_figures_are_the_slowest_replicas() -> None:
    parts = [
        {
            **Counters().read_and_reset(),
            "requantise_s": s,
            "drafter_bytes": 10,
            "self_acceptance": 0.9,
        }
        for s in (0.1, 0.3)
    ]
    assert figures(parts)["das/requantise_s"] == pytest.approx(0.3)
    assert "das/requantise_s" not in figures([Counters().read_and_reset()])


def test_the_token_hash_depends_on_tokens_and_seeds_but_not_on_order() -> None:
    def hashed(*responses: tuple[int, list[int]]) -> int:
        clock = RolloutClock()
        for seed, tokens in responses:
            clock.count_response(
                Label(1, seed), 0.0, 1.0, np.asarray(tokens, dtype=np.int32).tobytes()
            )
        return clock.read_and_reset()["token_hash"]

    assert hashed((1, [5, 6]), (2, [7])) == hashed((2, [7]), (1, [5, 6]))
    assert hashed((1, [5, 6]), (2, [7])) != hashed((1, [5, 6]), (2, [8]))
    assert hashed((1, [5]), (2, [7])) != hashed((2, [5]), (1, [7]))


def decided(saved: float, error: float | None, stopped: str | None = None) -> dict:
    return {
        **Counters(
            request_forwards=10, draft_tokens=6, accepted_tokens=2, drafted_forwards=3
        ).read_and_reset(),
        "time_saved_s": saved,
        "latency_model_error": error,
        "reason": stopped,
    }


def test_decisions_of_the_replicas_come_together() -> None:
    # the last one had no steps
    found = figures([decided(1.5, 0.1), decided(-0.5, 0.2), decided(0.0, None)])
    assert found["das/time_saved_s"] == pytest.approx(1.0)
    assert found["das/latency_model_error"] == pytest.approx(0.15)
    assert found["das/verify_waste"] == pytest.approx(12 / 48)
    assert found["das/health"] == 1.0
    assert (
        figures([decided(0.0, 0.0, "speculation cost 2 s")])["das/engines_resting"]
        == 1.0
    )


def rows(*responses: tuple[int, int, int]) -> np.ndarray:
    return np.array(list(responses), RESPONSE)


def test_predictions_follow_the_lengths() -> None:
    ledger = Ledger()
    assert ExpectedLengths(ledger.predictions())[1] == ExpectedLengths().mean
    ledger.add(
        rows(*[(p, 50, 0) for p in (1, 2, 3) for _ in range(4)], *[(9, 2000, 0)] * 4)
    )
    lengths = ExpectedLengths(ledger.predictions())
    assert lengths[9] > lengths.mean > lengths[1]
    for version in (70, 80, 90, 100):
        ledger.add(rows(*[(1, 2000, version)] * 4))
    again = ExpectedLengths(ledger.predictions())
    assert again[1] > lengths[9]  # what it wrote at version 0 has left the window
    assert again[2] > 0.9 * lengths[2]  # and problem 2 has not been visited since


def report(begin: float, ends: list[float], tokens: int = 10) -> dict:
    engine = {
        **Counters(tokens=tokens, request_forwards=5).read_and_reset(),
        "history_tokens": 3,
        "history_bytes": 40,
    }
    return {**engine, "begin": begin, "ends": ends, "token_hash": 7}


def test_a_step_lasts_from_the_first_request_to_the_last_response_of_all_replicas() -> (
    None
):
    ledger = Ledger()
    ledger.report(3, report(10.0, [11.0, 12.0, 13.0, 14.0]))
    ledger.report(3, report(10.5, [11.5, 12.5, 13.5, 20.0, 12.0, 12.0]))
    found = ledger.metrics(3)
    assert found["das/rollout_s"] == pytest.approx(10.0)
    # eight of ten were done at 13.5
    assert found["das/tail_s"] == pytest.approx(20.0 - 13.5)
    assert found["das/tokens_per_forward"] == pytest.approx(2.0)
    assert found["das/token_hash"] == 14
    assert ledger.metrics(4) == {}


def test_a_clock_that_is_set_back_costs_a_figure_and_nothing_else() -> None:
    ledger = Ledger()
    ledger.report(3, report(1e9, [1e9 + 1, 5.0, 4.0]))  # set back during the step
    ledger.report(4, report(1e9, [5.0, 6.0]))
    for step in (3, 4):
        assert all(
            np.isfinite(value) and value >= 0 for value in ledger.metrics(step).values()
        )


def test_lengths_are_delivered_once_in_order_and_so_many_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ledger, "KEPT", 3)
    ledger = Ledger()
    ledger.add(rows((1, 10, 0), (2, 20, 0)))
    assert ledger.since(0).tolist() == [(1, 10, 0), (2, 20, 0)]
    ledger.add(rows((1, 30, 1)))
    assert ledger.since(2).tolist() == [(1, 30, 1)]
    ledger.add(rows((1, 40, 3)))
    assert (
        ledger.since(0).tolist()
        == ledger.since(1).tolist()
        == [(2, 20, 0), (1, 30, 1), (1, 40, 3)]
    )
    assert ledger.since(3).tolist() == [(1, 40, 3)]
    assert ledger.since(0, until=3).tolist() == [(2, 20, 0), (1, 30, 1)]
    assert not len(ledger.since(4))
    # a cursor of a ledger that was lost
    assert ledger.since(10**6).tolist() == ledger.since(0).tolist()


def test_numbers_of_numpy_cross_as_pythons() -> None:
    answer = {
        "of_stock": np.float64(0.5),
        "steps": np.int64(3),
        "counts": [(np.arange(2), None)],
        "error": "no",
    }
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain_payload(answer)))
    assert crossed == {
        "of_stock": 0.5,
        "steps": 3,
        "counts": [[[0, 1], None]],
        "error": "no",
    }


def test_a_rollout_begins_with_the_request_that_began_first() -> None:
    clock = RolloutClock()
    for begin in (7.0, 5.0, 6.0):
        clock.count_response(Label(1, 1, True), begin, 9.0, b"")
    assert clock.read_and_reset()["begin"] == 5.0


def rollout_of(
    ends: list[float],
    saved_s: float,
    of_stock: float | None,
    engine: str = "a",
    begin: float = 100.0,
) -> dict[str, Any]:
    """The report of an engine whose responses ended so many seconds after the begin."""
    return {
        **Counters().read_and_reset(),
        **RolloutClock().read_and_reset(),
        "begin": begin,
        "ends": [begin + end for end in ends],
        "time_saved_s": saved_s,
        "of_stock": of_stock,
        "engine": engine,
    }


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        # 10 s, of which 2 s read prompts: 8 s of decode steps in the place of 16 s
        ([rollout_of([4, 10], 8.0, 0.5)], 10 / 18),
        # a validation saved as much again
        ([rollout_of([4, 10], 16.0, 0.5)], 0.5),
        # the engine that ended first would have ended last
        ([rollout_of([6], 6.0, 0.4), rollout_of([8], 1.0, 0.8, "b")], 8 / 12),
        # two reports of an engine to one step
        ([rollout_of([5], 5.0, 0.4), rollout_of([10], 5.0, 0.4)], 0.5),
        # drafts that cost time
        ([rollout_of([10], -1.0, 1.2)], 10 / 9),
        ([rollout_of([10], -4.0, 1.25)], 1.25),
    ],
)
def test_a_rollout_is_compared_with_stocks_prompts_included(
    reports: list[dict[str, Any]], expected: float
) -> None:
    assert figures(reports)["das/of_stock"] == pytest.approx(expected)


def test_a_rollout_of_which_an_engine_knows_too_little_is_not_compared() -> None:
    reports = [rollout_of([6], 6.0, 0.4), rollout_of([8], 0.0, None, "b")]
    assert "das/of_stock" not in figures(reports)


def test_seeds_of_64_bits_have_hashes_of_their_own() -> None:
    hashes = [response_hash(b"1234", seed) for seed in (5, 5 + 2**32, 5 + 2**63)]
    assert len(set(hashes)) == 3
    assert response_hash(b"1234", -1) == response_hash(b"1234", 2**64 - 1)


def test_of_a_validation_the_noise_alone_counts() -> None:
    clock = RolloutClock()
    clock.count_response(Label(1, seed=5, record=False), 1.0, 2.0, b"1234")
    report = clock.read_and_reset()
    assert (report["begin"], report["ends"]) == (float("inf"), [])
    assert report["token_hash"] == 0 and len(report["draws"]) == 1
