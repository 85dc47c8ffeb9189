"""Figures in veRL's log, and the numbers of weight syncs, without a trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from das_adapter.config import DasConfig
from das_adapter.service import ledger
from das_adapter.verl import hooks, settings, training

FIGURES = {"das/health": 1.0}


@pytest.mark.parametrize(
    ("figure", "is_training"),
    [
        ("actor/pg_loss", True),
        ("critic/score/mean", True),
        ("val-core/reward/mean@1", False),
        ("timing_s/param_sync", False),
    ],
)
def test_figures_of_a_rollout_join_those_of_a_training_step_alone(
    monkeypatch: pytest.MonkeyPatch, figure: str, is_training: bool
) -> None:
    asked = []

    def metrics(step: int) -> dict[str, float]:
        asked.append(step)
        return FIGURES

    monkeypatch.setattr(ledger, "metrics", metrics)
    monkeypatch.setattr(training, "trainer", SimpleNamespace(global_steps=3))
    logged: list[dict[str, float]] = []

    def stock(self: Any, data: dict[str, float], step: int, backend: Any) -> None:
        logged.append(data)

    hooks.log_figures.replacement(stock)(None, {figure: 0.5}, 3)
    assert logged == [{figure: 0.5, **(FIGURES if is_training else {})}]
    assert asked == [3] * is_training


def test_weight_syncs_of_a_trainer_that_says_no_step_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("verl")
    monkeypatch.setattr(training, "trainer", None)
    monkeypatch.setattr(settings, "of_rollout", lambda config: DasConfig())
    manager = SimpleNamespace(replicas=[SimpleNamespace(config=None)])
    told: list[int | None] = []

    def stock(self: Any, global_steps: int | None = None) -> None:
        told.append(global_steps)

    update_weights = training.number_weights.replacement(stock)
    for step in (None, None, 7, None):
        update_weights(manager, step)
    assert told == [0, 1, 7, 8]


def test_a_fully_asynchronous_trainers_step_is_its_weight_version() -> None:
    assert training.step_of(SimpleNamespace(global_steps=40)) == 40
    trainer = SimpleNamespace(global_steps=40, current_param_version=10)
    assert training.step_of(trainer) == 10
