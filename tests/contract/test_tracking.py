"""The rollouts' figures in veRL's own logger, whichever pipeline logs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

verl = pytest.importorskip("verl")
import ray  # noqa: E402
from verl.utils.tracking import Tracking  # noqa: E402

from das_adapter.protocol.metrics import Counters  # noqa: E402
from das_adapter.reports import run_logs  # noqa: E402
from das_adapter.service.ledger import ledger  # noqa: E402
from das_adapter.verl import training  # noqa: E402

V1 = {
    "actor/pg_loss": 0.1,
    "critic/score/mean": 0.5,
    "training/global_step": 3,
    "timing_s/gen": 2.0,
}
ONE_STEP_OFF = {"actor/pg_loss": 0.1, "critic/score/mean": 0.5, "timing_s/step": 2.0}
FULLY_ASYNC = {
    "actor/pg_loss": 0.1,
    "fully_async/count/current_param_version": 3,
    "timing_s/update_actor": 2.0,
}
VALIDATION = {"val-core/tiny_math/reward/mean@1": 0.5, "timing_s/testing": 1.0}
WEIGHT_SYNC = {"fully_async/rollouter/active_time": 3.0, "timing_s/param_sync": 1.0}


def test_the_figures_join_every_pipelines_log_of_training_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        rollout = {"begin": 1.0, "ends": [2.0], "token_hash": 1}
        ray.get(
            ledger().report.remote(
                3,
                {
                    **Counters(tokens=30, request_forwards=10).read_and_reset(),
                    **rollout,
                },
            )
        )
        monkeypatch.setattr(training, "trainer", SimpleNamespace(global_steps=3))
        logger = Tracking("project", "experiment", ["file"], {})
        for data in (V1, ONE_STEP_OFF, FULLY_ASYNC, VALIDATION, WEIGHT_SYNC):
            logger.log(data=data, step=3)
    finally:
        ray.shutdown()
    logged = [
        json.loads(line)["data"]
        for line in (tmp_path / "log.jsonl").read_text().splitlines()
    ]
    assert [row.get("das/tokens_per_forward") for row in logged] == [
        3.0,
        3.0,
        3.0,
        None,
        None,
    ]
    assert logged[3] == VALIDATION
    read = run_logs.read(tmp_path / "log.jsonl")
    assert (
        read.exact
        and read.steps[3]["das/token_hash"] == 1.0
        and read.steps[3]["critic/score/mean"] == 0.5
    )


@pytest.mark.parametrize(
    "trainer",
    [
        "trainer/ppo/ray_trainer.py",
        "trainer/ppo/v1/trainer_base.py",
        "experimental/one_step_off_policy/ray_trainer.py",
        "experimental/fully_async_policy/fully_async_trainer.py",
    ],
)
def test_every_trainer_times_its_wait_under_that_name(trainer: str) -> None:
    path = Path(verl.__file__).parent / trainer
    if not path.exists():
        pytest.skip(f"this veRL has no {trainer}")
    assert 'marked_timer("gen", ' in path.read_text()
