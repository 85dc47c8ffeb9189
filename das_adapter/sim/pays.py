"""Say whether drafts would pay: a user's own recorded rollouts on given hardware,
without drafts and with those of das-adapter.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from das_adapter.core.policy_sizes import policy_sizes
from das_adapter.sim.config import parse
from das_adapter.sim.fleet import BLOCK
from das_adapter.sim.models import sizes
from das_adapter.sim.pipeline import Run
from das_adapter.sim.rollouts import RecordedResponse
from das_adapter.sim.simulate import Progress, Simulation, summary

MIN_SAVED_SHARE = 0.03
"""Share of the rollout's time that must be saved before drafts are recommended."""

FEW_RESPONSES = 300
"""Responses under which a dump says little about a run."""
LOOP_SHARE = 0.1
"""Share of its bytes to which zlib compresses the token ids of a response that says the
same over and over; of other text it is a third to a half.
"""
LOOP_TOKENS = 100
"""Tokens from which on a response can be such a loop."""
MANY_LOOPS = 0.05
"""Share of the responses from which on loops are told."""


class Contents(NamedTuple):
    """How much a dump holds."""

    rollouts: int
    problems: int
    steps: int
    tokens: int


def contents(responses: Sequence[RecordedResponse]) -> Contents:
    """Count what a dump holds."""
    return Contents(
        len(responses),
        len({response.problem for response in responses}),
        len({response.step for response in responses}),
        sum(len(response.tokens) for response in responses),
    )


def doubts(responses: Sequence[RecordedResponse]) -> list[str]:
    """Say what of a dump makes its answer doubtful."""
    found = []
    if len(responses) < FEW_RESPONSES:
        found.append(
            f"{len(responses)} responses are few: dump some steps of a run, at least"
            f" {FEW_RESPONSES} responses"
        )
    loops = sum(map(_loops, responses))
    if loops > MANY_LOOPS * len(responses):
        found.append(
            f"{loops} of {len(responses)} responses repeat themselves over and over:"
            " drafts cover such text, which a trained policy does not write for long"
        )
    of_tools = [r.tool_characters for r in responses if r.tool_characters]
    if of_tools:
        found.append(
            f"{sum(of_tools)} characters of tools (<tool_response>) in {len(of_tools)}"
            " responses are left out, since no engine writes them; the time until a"
            " tool answers is no part of the figures"
        )
    return found


def _loops(response: RecordedResponse) -> bool:
    """Return whether a response says the same over and over."""
    if len(response.tokens) < LOOP_TOKENS:
        return False
    content = response.tokens.tobytes()
    return len(zlib.compress(content, 1)) < LOOP_SHARE * len(content)


def would_it_pay(
    responses: Sequence[RecordedResponse],
    settings: Mapping[str, Any],
    agreement: float | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Simulate a dump on given hardware: several steps, with every problem that the run
    visits.

    Args:
        responses: the dump.
        settings: keys of a `SimConfig` that say what the dump runs on: `model`,
            `hardware`, `pipeline`, ...
        agreement: as in `AcceptanceBlock`; None: nothing is simulated with run-ahead.

    Returns:
        `arms` (see `summary`; `off`, `history` and `ahead`), `epochs` (the same of the
        steps whose problems had been visited equally often before, by epoch), `das`
        (the block, or `drafter: none` where drafts save too little), `idle` (as in
        `StepResult`, without drafts), `engines` and the `kv_tokens` of each, as plain
        containers. Beside a policy with recurrent state also `short`, whose drafts have
        one token, and `state_mib`: MiB of each arm's request on a device.

    Raises:
        DasError: a value that does not fit, with its key.
    """
    blocks: dict[str, dict[str, Any]] = {
        "off": {"drafter": "none"},
        "history": {"drafter": "history"},
    }
    if agreement is not None:
        blocks["ahead"] = {
            "drafter": "history",
            "history": {"run_ahead": "auto"},
        }
    policy = policy_sizes(sizes(parse(settings, "estimate").model))
    if policy.state is not None:
        blocks["short"] = {"drafter": "history", "max_draft_tokens": 1}
    longest = max(len(response.tokens) for response in responses)
    content = {
        **settings,
        "rollout": {"cap": max(2, longest)},
        "acceptance": {"history": "index", "agreement": agreement or 0.0},
        "arms": {name: {"das": block} for name, block in blocks.items()},
    }
    config = parse(content, "estimate")
    simulation = Simulation(config, responses)
    runs = simulation.run_all(progress)
    arms = summary(runs)
    recommended = _recommended(arms)
    found = {
        "arms": arms,
        "epochs": _by_epoch(runs),
        "das": blocks[recommended],
        "idle": _idle_share(runs["off"]),
        "engines": simulation.engines,
        "kv_tokens": simulation.kv_blocks * BLOCK,
    }
    if simulation.state_bytes:
        state_mib = simulation.state_bytes / 2**20
        found["state_mib"] = {
            name: state_mib * simulation.num_states(name) for name in blocks
        }
    return found


def _idle_share(run: Run) -> float:
    """Return the share of all rollouts for which an engine was idle."""
    idle = [step.idle for step in run.steps]
    rollout_s = [step.rollout_s for step in run.steps]
    share = np.average(idle, weights=rollout_s)
    return float(share)


def _recommended(arms: Mapping[str, Any]) -> str:
    """Return the arm that takes least time; the first, unless a later one saves
    enough.
    """
    best = "off"
    for name, arm in arms.items():
        best_share = arms[best]["rollout_of_first"]
        needed = best_share - MIN_SAVED_SHARE
        if arm["rollout_of_first"] <= needed:
            best = name
    return best


def _by_epoch(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Return a `summary` of the steps of each epoch, by its number."""
    visits = {round(step.visit) for step in runs["off"].steps}
    found = {}
    for visit in sorted(visits):
        of_epoch = {}
        for name, run in runs.items():
            steps = [step for step in run.steps if round(step.visit) == visit]
            of_epoch[name] = replace(run, steps=steps)
        epoch = str(visit + 1)
        found[epoch] = summary(of_epoch)
    return found
