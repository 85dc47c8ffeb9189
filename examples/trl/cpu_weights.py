"""TRL's weight sync without a GPU: vLLM's own weight-update calls, with files in the
place of NCCL between trainer and server.

`vllm serve --worker-extension-cls cpu_weights.Extension --weight-transfer-config
'{"backend": "files"}'` loads this in the server's workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "files"


@dataclass
class Nothing(WeightTransferInitInfo):
    """Files need no preparation."""


@dataclass
class File(WeightTransferUpdateInfo):
    """A safetensors file that trainer and server see."""

    path: str


class FileWeightTransferEngine(WeightTransferEngine[Nothing, File]):
    """The server's side."""

    init_info_cls = Nothing
    update_info_cls = File

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: File) -> None:
        from safetensors.torch import load_file

        self.model.load_weights(
            (name, weight.float())
            for name, weight in load_file(update_info.path).items()
        )

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[Any], trainer_args: dict[str, Any] | Any
    ) -> None:
        raise NotImplementedError("grpo_tiny_math.py writes the file")


class Extension:
    """Only its module is needed."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
