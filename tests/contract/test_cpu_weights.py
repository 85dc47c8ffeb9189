"""Weights on their way from a trainer to engines on a machine without a GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("verl")
from das_adapter.cpu.verl_weights import FileCheckpointEngine


def test_what_a_killed_trainer_left_goes_with_the_next_weight_sync() -> None:
    if not (pid := os.fork()):
        FileCheckpointEngine(0, is_master=True).prepare()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = Path("/dev/shm").glob(f"das_weights_{pid}_*")
    trainers = [FileCheckpointEngine(0, is_master=True) for _ in range(2)]
    here = [Path(trainer.prepare()["path"]) for trainer in trainers]
    # a run beside this one keeps its own
    assert not left.exists() and all(path.exists() for path in here)
    for trainer, path in zip(trainers, here, strict=True):
        trainer.init_process_group(str(path))
        trainer.finalize()
    assert not any(path.exists() for path in here)
