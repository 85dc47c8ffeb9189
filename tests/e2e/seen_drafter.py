"""The CPU worker of NeMo-RL's engines, which writes down the drafter's weights after
each refit.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from safetensors.torch import save_file

from das_adapter.cpu.nemo_rl_worker import CpuWorker, vllm_backend

SEEN = "DAS_TEST_SEEN_DRAFTER"
"""Environment variable: the directory for a file per refit."""


class SeenDrafter(CpuWorker, vllm_backend.VllmInternalWorkerExtension):  # type: ignore[misc]
    """vLLM looks for NeMo-RL's extension among a worker's own bases."""

    _refits = itertools.count()

    def update_weights_via_ipc_zmq(self) -> bool:
        done = super().update_weights_via_ipc_zmq()
        weights = {
            name: weight.clone()
            for name, weight in self.model_runner.drafter.model.state_dict().items()
        }
        save_file(weights, Path(os.environ[SEEN]) / f"{next(self._refits)}.safetensors")
        return bool(done)
