"""SkyRL's inference server without a GPU: `python -m cpu_server --model … --port …`,
with files where SkyRL has NCCL.

It is also what the engine's worker loads: `--worker-extension-cls
cpu_server.Extension`.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import typing_extensions

# SkyRL wants 3.12; of what runs here, only pydantic's models of its messages need it
if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
sys.path.append(str(Path(__file__).resolve().parents[1] / "trl"))

import cpu_weights  # noqa: F401  registers "files", vLLM's weight transfer by file
from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import (
    NewInferenceWorkerWrap,
)

# vLLM's CPU build looks through all modules for kernels to replace, and stumbles over
# an object of this one.
sys.modules.pop("llvmlite.binding.ffi", None)


class Extension(NewInferenceWorkerWrap):  # type: ignore[misc]
    """Becomes a base of vLLM's worker, as SkyRL's own does."""


if __name__ == "__main__":
    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import main

    main([*sys.argv[1:], "--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"])
