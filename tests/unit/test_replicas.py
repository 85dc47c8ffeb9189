"""Recorded rollouts are replayed over replicas by the package's own routing."""

from __future__ import annotations

import json
from pathlib import Path

import index_workload as workload
import pytest
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.sim.rollouts import Rollout
from das_adapter.tools.replicas import Figures, Router, replay, report, siblings

ROLLOUTS = workload.synthetic(problems=12, samples=6, mean_tokens=80, seed=3)


def run(
    count: int,
    together: bool = True,
    leaders: bool = False,
    slots: int | None = None,
    shared: bool = False,
    rollouts: list[Rollout] = ROLLOUTS,
) -> Figures:
    return replay(rollouts, count, Router(count, 6, 64, together), leaders, slots, shared=shared)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("slots", [None, 5])
def test_every_response_is_written_to_its_end(count: int, slots: int | None) -> None:
    found = run(count, leaders=True, slots=slots)
    assert found.rounds + found.accepted == sum(len(r.tokens) for r in ROLLOUTS)
    assert found.longest <= found.makespan
    assert found.rounds <= found.longest * count * (slots or len(ROLLOUTS))


def test_groups_that_stay_together_draft_as_with_one_index_for_all() -> None:
    scattered, together, one = run(4, together=False), run(4), run(4, shared=True)
    assert scattered.parts > 2 > together.parts == one.parts == 1
    assert scattered.accepted < together.accepted == one.accepted
    assert run(1).accepted == run(1, together=False).accepted


def test_leaders_help_where_requests_wait_and_change_nothing_in_one_wave() -> None:
    assert run(2, leaders=True, slots=6).accepted > run(2, slots=6).accepted
    assert run(2, leaders=True) == run(2)


def test_earlier_steps_are_drafted_from_on_every_replica() -> None:
    again = [Rollout(r.problem, 1, 0, r.prompt, r.tokens) for r in ROLLOUTS]
    first, both = run(4), run(4, rollouts=[*ROLLOUTS, *again])
    assert both.accepted - first.accepted > 2 * first.accepted


def test_finished_siblings_are_worth_more_than_growing_ones() -> None:
    worth = siblings(ROLLOUTS)
    assert worth["growing 0"] == worth["finished 0"] < worth["growing 3"] < worth["finished 3"]
    assert "growing 7" not in worth  # there are six samples


def test_the_report_names_every_routing() -> None:
    found = report(ROLLOUTS, [1, 2], slots=8, orders=2)["replicas"]
    assert list(found) == ["1", "2"]
    assert list(found["2"]) == ["scattered", "together", "leaders", "one index"]


def test_the_command_replays_over_replicas(tmp_path: Path) -> None:
    dump = tmp_path / "dump.jsonl"
    rows = [
        {
            "token_ids": [1, 2, *r.tokens.tolist()],
            "token_loss_mask": [0, 0] + [1] * len(r.tokens),
            "problem_id": r.problem,
        }
        for r in ROLLOUTS[:18]
    ]
    dump.write_text("\n".join(map(json.dumps, rows)))
    out = CliRunner().invoke(
        main, ["replay", str(dump), "--replicas", "2", "--slots", "4", "--json", str(tmp_path / "f")]
    )
    assert out.exit_code == 0, out.output
    assert "one index" in out.output and "growing 3" in out.output
    assert json.loads((tmp_path / "f").read_text())["routing"]["slots"] == 4
    refused = CliRunner().invoke(main, ["replay", str(dump), "--replicas", "0"])
    assert refused.exit_code == 2 and "found 0, allowed: 1 or more" in refused.output
