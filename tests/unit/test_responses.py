"""The log of an engine without a host by which runs are compared token for token."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.engine.requests import LABEL
from das_adapter.engine.responses import ResponseLog, response_log
from das_adapter.protocol import metrics
from das_adapter.protocol.decision_log import (
    CountsRecord,
    DecisionLog,
    StepRecord,
    WeightSyncRecord,
    read_responses,
)
from das_adapter.protocol.engine_args import REFRESHER, SETTINGS_KEY
from das_adapter.protocol.label import Label
from das_adapter.reports import run_logs
from das_adapter.reports.compare import compare, sentences


def request(tokens: list[int], seed: int | None = 7, **traits: Any) -> Any:
    """A request of vLLM's."""
    found = SimpleNamespace(
        output_token_ids=tokens,
        arrival_time=time.time(),
        is_finished=lambda: traits.get("finished", True),
        sampling_params=SimpleNamespace(seed=seed, stop=traits.get("stop")),
    )
    setattr(found, LABEL, Label(record=traits.get("record", True)))
    return found


def written(directory: Path, *rollouts: list[Any], engine: str = "a") -> Path:
    """A run whose weights change before each rollout."""
    of_scheduler = ResponseLog(DecisionLog(str(directory)), engine)
    of_worker = ResponseLog(DecisionLog(str(directory)), engine)
    for requests in rollouts:
        of_worker.add_weight_update()
        of_scheduler.add_finished(requests, idle=True)
    return directory


def test_two_runs_are_compared_by_the_responses_of_each_weight_version(
    tmp_path: Path,
) -> None:
    first, second = [request([1, 2]), request([3], seed=-8)], [request([4, 5])]
    a = written(tmp_path / "a", first, second)
    b = written(tmp_path / "b", first[::-1], second)
    done = CliRunner().invoke(main, ["compare", str(a), str(b)])
    assert done.exit_code == 0, done.output
    assert "Tokens: the same in 2 of 2 steps." in done.output
    assert "Rollout time (das/rollout_s)" in done.output
    other = written(tmp_path / "c", first, [request([4, 6])])
    done = CliRunner().invoke(main, ["compare", str(a), str(other)])
    assert done.exit_code == 1 and "the same in 1 of 2 steps" in done.output
    seeded = written(tmp_path / "d", first, [request([4, 5], seed=8)])
    assert CliRunner().invoke(main, ["compare", str(a), str(seeded)]).exit_code == 1


def test_engines_of_one_run_add_up_each_by_its_own_updates(tmp_path: Path) -> None:
    one = written(tmp_path / "one", [request([1]), request([2])], [request([3])])
    for name, rollouts in (("a", [[1], [3]]), ("b", [[2], []])):
        written(
            tmp_path / "two",
            *([request([token]) for token in tokens] for tokens in rollouts),
            engine=name,
        )
    hashes = [
        [step["das/token_hash"] for step in run_logs.read(path).steps.values()]
        for path in (one, tmp_path / "two")
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(("saved_s", "claimed"), [(1e6, 0.5), (0.0, 1.0)])
def test_what_an_engine_claims_is_held_against_the_measured_ratio(
    tmp_path: Path, saved_s: float, claimed: float
) -> None:
    """It counts what drafts saved of the whole rollout, no larger share of it than of
    the decode steps.
    """
    for name in ("off", "drafting"):
        for _ in range(2):
            written(tmp_path / name, [request([1]), request([2])])
    log = DecisionLog(str(tmp_path / "drafting"))
    for version, of_rollout in enumerate(((0.1, 0.5), (0.1, None)), 1):
        log.add(StepRecord(time.time(), 2, 4, 2, 1, 0.5, 0.4))
        for of_stock in of_rollout:
            log.add(CountsRecord({"of_stock": of_stock, "time_saved_s": saved_s / 2}))
        log.add(WeightSyncRecord(version, None, 0.5, None))
    log.flush()
    runs = [run_logs.read(tmp_path / name) for name in ("off", "drafting")]
    steps = runs[1].steps
    assert [step.get("das/of_stock") for step in steps.values()] == [None, claimed]
    found = compare(*runs)
    ratio = steps[2]["das/rollout_s"] / runs[0].steps[2]["das/rollout_s"]
    assert found["claims"] == [None, pytest.approx(claimed / ratio)]
    (said,) = [text for text in sentences(found) if "das/of_stock" in text]
    assert said.endswith("of 1 steps.")
    assert compare(runs[1], runs[1])["claims"] == [], "neither is without drafts"


def test_a_hash_is_that_which_hosts_log(tmp_path: Path) -> None:
    clock = metrics.RolloutClock()
    tokens = np.array([1, 2], dtype=np.int32).tobytes()
    clock.count_response(Label(problem=1, seed=7), 0.0, 1.0, tokens)
    (response,) = read_responses(written(tmp_path, [request([1, 2])]))[0]
    assert response.hash == clock.read_and_reset()["token_hash"]
    assert response.tokens == 2 and response.end >= response.begin


def test_what_the_front_end_ends_validations_and_what_runs_are_left_out(
    tmp_path: Path,
) -> None:
    requests = [
        request([1], stop=["."]),
        request([2], record=False),
        request([3], finished=False),
        request([4]),
    ]
    found, updates = read_responses(written(tmp_path, requests))
    assert [response.tokens for response in found] == [1] and len(updates) == 1


def test_requests_of_another_form_end_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = ResponseLog(DecisionLog(str(tmp_path)), "a")
    for _ in range(2):
        log.add_finished([SimpleNamespace()], idle=False)
    assert caplog.text.count("das: responses are not logged any more") == 1


def test_only_an_engine_without_a_host_that_has_a_directory_logs_responses(
    tmp_path: Path,
) -> None:
    def engine(block: dict[str, Any] | None, **more: Any) -> Any:
        additional = more if block is None else {SETTINGS_KEY: block, **more}
        return SimpleNamespace(
            additional_config=additional,
            instance_id="e",
            parallel_config=SimpleNamespace(data_parallel_rank=0),
        )

    block = {"drafter": "history", "log_dir": str(tmp_path / "logs")}
    assert response_log(engine(None)) is None
    assert response_log(engine({"drafter": "history"})) is None
    assert response_log(engine(block, **{REFRESHER: "host"})) is None
    assert response_log(engine(block)) is not None


def test_decision_logs_of_a_host_hold_no_tokens(tmp_path: Path) -> None:
    log = DecisionLog(str(tmp_path))
    log.add(StepRecord(100.0, 4, 12, 8, 2, 0.5, 0.4))
    log.flush()
    done = CliRunner().invoke(main, ["compare", str(tmp_path), str(tmp_path)])
    said = " ".join(done.output.split())
    assert done.exit_code == 2 and "found decision logs without responses" in said
