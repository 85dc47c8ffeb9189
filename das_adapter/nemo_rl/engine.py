"""A vLLM worker for NeMo-RL runs that are started with the overlay alone.

Without das-adapter in the driver each engine looks after its own history (`das_adapter.engine.standalone`). This worker
tells it when a refit is over, whatever the transport: some write into weights where the model's loader does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from vllm.v1.worker.gpu_worker import Worker

from das_adapter.engine.binding import STATE


class Refits:
    """Says when a weight sync (refit) ends."""

    @contextmanager
    def _weight_update_lifecycle(self, transport: Any) -> Iterator[Any]:
        with super()._weight_update_lifecycle(transport) as finalize:  # type: ignore[misc]
            yield finalize
        state = getattr(self, STATE, None)
        if state is not None and state.standalone:
            state.standalone.weights_changed()


class DasWorker(Refits, VllmInternalWorkerExtension, Worker):
    """`vllm_kwargs.worker_cls` of the overlay. NeMo-RL's extension is among its bases, so vLLM does not add it."""
