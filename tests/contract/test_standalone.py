"""An engine that no host looks after, with nothing but `DAS_CONFIG` in its
environment.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from jobs import Request, Round
from requested import HISTORY, HOST, LORA, OFF, lora, prompts

from das_adapter.config import HistoryConfig
from das_adapter.core.identity import prompt_identity
from das_adapter.engine.alone import SharedHistory
from das_adapter.engine.settings import history_name
from das_adapter.protocol.decision_log import read, read_responses
from das_adapter.protocol.engine_args import RUN_KEY
from das_adapter.protocol.messages import Trajectory
from das_adapter.protocol.spool import SHARED_MEMORY
from das_adapter.reports import run_logs
from das_adapter.reports.compare import compare

pytestmark = pytest.mark.one_build


def rounds() -> list[Round]:
    """The same prompts in three rounds, without labels and seeds, with an update of the
    weights after the second.
    """
    asked = [
        Request(prompt, {"max_tokens": 40, "temperature": 1.0, "n": 2})
        for prompt in prompts(4)
    ]
    return [Round(asked), Round(asked, perturb=0.02), Round(asked)]


def written(result: dict[str, Any]) -> list[list[int]]:
    """The tokens of all samples of a round."""
    return [text for samples in result["samples"] for text in samples]


def run_of(vllm_env: dict[str, str], name: str) -> str:
    """Return the name of a run of this process."""
    return f"test {os.getpid()} {vllm_env} {name}"


def history_of(run: str) -> str:
    """Return the name of its history."""
    return history_name(SimpleNamespace(additional_config={RUN_KEY: run}))


def alone(engine: Any, vllm_env: dict[str, str]) -> dict[str, Any]:
    """Return what an engine gives that shares its history with no other."""
    env = {**HOST, "DAS_RUN": run_of(vllm_env, "alone")}
    result: dict[str, Any] = engine(
        das=HISTORY, standalone=True, rounds=rounds()[:1], env=env
    )[0]
    return result


def left(vllm_env: dict[str, str]) -> Path:
    """Where that engine had its history."""
    return SHARED_MEMORY / history_of(run_of(vllm_env, "alone"))


def test_engines_of_one_run_share_a_history(
    engine: Any, vllm_env: dict[str, str]
) -> None:
    """What another engine of the node has written is drafted from in the first step."""
    run = run_of(vllm_env, "shared")
    first = alone(engine, vllm_env)
    assert left(vllm_env).exists()
    other = SharedHistory(history_of(run), HistoryConfig(), grace_s=0.1)
    texts = zip([p for p in prompts(4) for _ in range(2)], written(first), strict=True)
    for prompt, text in texts:
        other.add(
            Trajectory(
                prompt_identity(prompt), np.array(text, dtype=np.int32).tobytes(), 0
            )
        )
    other.sync()
    result = engine(
        das=HISTORY, standalone=True, rounds=rounds()[:1], env={**HOST, "DAS_RUN": run}
    )[0]
    assert written(result) == written(first)
    assert result["stats"]["history_hits"] == 8
    assert result["stats"]["accepted_tokens"] > first["stats"]["accepted_tokens"]


def test_it_drafts_from_its_own_history_after_a_weight_update_and_writes_the_same_tokens(
    engine: Any,
) -> None:
    off, on = (
        engine(das=das, standalone=True, rounds=rounds(), env=HOST)
        for das in (OFF, HISTORY)
    )
    assert list(map(written, on)) == list(map(written, off))
    # the second request of a prompt has another seed
    assert written(on[0]) != written(on[1])
    # as have the samples of one request
    assert len({tuple(text) for text in written(on[0])}) > 4
    before = on[1]["stats"]
    after = on[2]["stats"]
    # the weights are the first ones
    assert (before["history_tokens"], before["history_hits"]) == (
        0,
        0,
    )
    assert after["history_tokens"] >= sum(
        len(text) for r in on[:2] for text in written(r)
    )
    assert after["history_hits"] == after["history_requests"] == 8
    assert after["accepted_tokens"] > before["accepted_tokens"]
    assert not any(r["stats"]["error"] for r in on) and after["alarm"] is None
    assert after["engines_behind"] == 0


def test_it_drafts_from_its_own_history_after_its_adapter_was_sent(
    engine: Any, tmp_path: Path
) -> None:
    first, _, second = rounds()
    parts = [replace(first, send_adapter=lora(tmp_path / "adapter")), second]
    result = engine(das=HISTORY, standalone=True, rounds=parts, env=HOST, engine=LORA)
    assert result[1]["stats"]["history_tokens"] >= sum(map(len, written(result[0])))


def test_one_line_turns_it_off(engine: Any) -> None:
    stock = engine(das=None, rounds=rounds()[:1], env=HOST)
    off = engine(
        das={"drafter": "none"}, standalone=True, rounds=rounds()[:1], env=HOST
    )
    assert list(map(written, off)) == list(map(written, stock))
    assert off[0]["samplers"] == stock[0]["samplers"]


STRANGE = [
    {"das_problem": 5},
    {"das_start": 0},
    {"das_seed": 1e300},
    {"das_record": "no"},
    {"das_recrod": 0},
]


def validated() -> list[Round]:
    """Rounds of which the second has the label `das_record: 0`; with the first come
    labels that no client may write.
    """
    first, second, third = rounds()
    one = replace(first, requests=first.requests[:1], refused=STRANGE)
    validation = replace(
        second, requests=[r.labelled(das_record=0) for r in second.requests]
    )
    return [one, validation, third]


def test_what_a_client_may_not_say_is_a_bad_request(engine: Any) -> None:
    result = engine(das=HISTORY, standalone=True, rounds=validated(), env=HOST)
    assert result[0]["refused"] == [
        "das_problem: found 5",
        "das_start: found 0",
        "das_seed: found 1e+300",
        "das_record: found 'no'",
        "das_recrod: unknown key",
    ]
    assert not any(r["stats"]["error"] for r in result)


def test_trusted_clients_name_problems(engine: Any) -> None:
    """And what they have named is drafted from: other prompts' texts."""
    asked = [
        replace(part, requests=[r.labelled(das_problem=5) for r in part.requests])
        for part in rounds()
    ]
    result = engine(
        das={**HISTORY, "history": {"scope": "trusted"}},
        standalone=True,
        rounds=asked,
        env=HOST,
    )
    apart = engine(das=HISTORY, standalone=True, rounds=rounds(), env=HOST)
    assert list(map(written, result)) == list(map(written, apart))
    assert result[2]["stats"]["draft_tokens"] != apart[2]["stats"]["draft_tokens"]


def test_a_cache_salt_closes_the_history_to_who_does_not_know_it(engine: Any) -> None:
    mine, theirs, again = rounds()
    salted = [
        replace(mine, perturb=0.02),
        replace(theirs, perturb=0.0),
        replace(again, perturb=None),
    ]
    salts = ("mine", "theirs", "mine")
    parts = [
        replace(p, requests=[replace(r, salt=s) for r in p.requests])
        for p, s in zip(salted, salts, strict=True)
    ]
    result = engine(das=HISTORY, standalone=True, rounds=parts, env=HOST)
    assert [r["stats"]["history_hits"] for r in result] == [0, 0, 8]
    assert result[1]["stats"]["history_tokens"] > 0


def test_validation_stays_out(engine: Any) -> None:
    """Requests with the label `das_record: 0`."""
    result = engine(das=HISTORY, standalone=True, rounds=validated(), env=HOST)
    assert 0 < result[2]["stats"]["history_tokens"] <= sum(map(len, written(result[0])))


def test_figures_are_in_vllms_own_metrics_and_decisions_in_a_directory_of_the_engine(
    engine: Any, tmp_path: Path
) -> None:
    log = {"disable_log_stats": False}
    das = {**HISTORY, "log_dir": str(tmp_path)}
    result = engine(das=das, standalone=True, rounds=rounds(), env=HOST, engine=log)
    (run,) = tmp_path.iterdir()
    assert {rollout.version for rollout in read(run)} >= {1}
    assert result[2]["metrics"]["vllm:das_tokens_per_forward"] > 1.0
    assert result[2]["metrics"]["vllm:das_history_tokens"] > 0
    assert result[2]["metrics"]["vllm:das_health"] == 1.0
    assert result[2]["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0


def test_two_runs_are_compared_token_for_token_by_their_decision_logs(
    engine: Any, tmp_path: Path
) -> None:
    """Engines without a host log no figures of a training step."""
    blocks = {
        "off": OFF,
        "history": HISTORY,
        "other": {**HISTORY, "verify": {"seed": 1}},
    }
    logs = {}
    for name, block in blocks.items():
        das = {**block, "log_dir": str(tmp_path / name)}
        engine(das=das, standalone=True, rounds=rounds(), env=HOST)
        logs[name] = run_logs.read(tmp_path / name)
    same = compare(logs["off"], logs["history"])
    assert same["tokens"] == (2, 2), "before the weight update, and after it"
    assert all(seconds > 0 for seconds in same["rollout_s"])
    assert compare(logs["off"], logs["other"])["tokens"] == (0, 2)
    responses, updates = read_responses(tmp_path / "off")
    assert len(responses) == 3 * 4 * 2 and len(updates) == 1


def test_an_engine_that_ended_leaves_nothing_behind(
    engine: Any, vllm_env: dict[str, str]
) -> None:
    """Though vLLM kills all its workers' children. It is the last test here, for the
    engine has ended some time ago.
    """
    alone(engine, vllm_env)
    for _ in range(120):
        if not left(vllm_env).exists():
            return
        time.sleep(0.5)
    raise AssertionError("its history is still there")
