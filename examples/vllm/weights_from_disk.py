"""A worker extension (`vllm serve --worker-extension-cls`) with which a trainer hands
new weights to a running engine, as prime-rl's does: a checkpoint in a directory that
both see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class WeightsFromDisk:
    """Becomes a base of vLLM's worker."""

    model_runner: Any

    def update_weights_from_path(self, directory: str) -> None:
        """Load the safetensors files of a directory into the policy."""
        from safetensors.torch import load_file

        policy = self.model_runner.get_model()
        for file in sorted(Path(directory).glob("*.safetensors")):
            policy.load_weights(
                (name, weight.float()) for name, weight in load_file(file).items()
            )
