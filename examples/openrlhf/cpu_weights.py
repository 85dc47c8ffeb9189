"""OpenRLHF's weight update without a GPU: its worker extension, which reads files where
it would wait for NCCL.
"""

from __future__ import annotations

import os
from typing import Any

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap
from safetensors import safe_open

FILE = "OPENRLHF_WEIGHTS"
"""Environment variable: the safetensors file that trainer and engines see."""


class FilesWorkerWrap(WorkerWrap):  # type: ignore[misc]
    """Becomes a base of vLLM's worker, as OpenRLHF's own does."""

    model_runner: Any

    def update_weight(
        self, name: str, dtype: Any, shape: Any, empty_cache: bool = False
    ) -> None:
        """Load one parameter, as OpenRLHF's trainer sends them."""
        with safe_open(os.environ[FILE], "pt") as file:
            self.model_runner.model.load_weights(
                weights=[(name, file.get_tensor(name).to(dtype))]
            )
