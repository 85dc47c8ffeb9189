"""A vLLM worker that keeps its own history, for NeMo-RL runs that are started with the overlay alone.

Without das-adapter in the driver no host harvests trajectories and refreshes drafters, so each engine does both itself.
Each has a history of its own, which contains validation rollouts too: the engine can't tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from vllm.v1.worker.gpu_worker import Worker

from das_adapter.config import parse
from das_adapter.engine.patches import STATE
from das_adapter.errors import ConfigError
from das_adapter.nemo_rl.settings import BLOCK, REFRESHER
from das_adapter.protocol.engine_args import SETTINGS_KEY
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import Refresh, Trajectory


class OwnHistory:
    """Harvests trajectories and refreshes the drafter at the end of every weight sync (refit), unless the host does."""

    model_runner: Any
    vllm_config: Any
    _das_version = 0
    _das_finished: list[Trajectory] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        additional = self.vllm_config.additional_config
        das = parse(additional.get(SETTINGS_KEY))
        if das is not None and das.uses_history and das.history.persist and additional.get(REFRESHER) != "host":
            raise ConfigError(
                f"{BLOCK}.history.persist: found {das.history.persist!r}, allowed with the overlay alone: null; start "
                "the run with `python -m das_adapter.nemo_rl`"
            )

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step; first take the requests that, as the scheduler says, have finished since the last one."""
        if self._das_finished is not None:
            for req_id in scheduler_output.finished_req_ids:
                if request := self.model_runner.requests.get(req_id):
                    self._das_finished.append(self._trajectory(request))
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    @contextmanager
    def _weight_update_lifecycle(self, transport: Any) -> Iterator[Any]:
        with super()._weight_update_lifecycle(transport) as finalize:  # type: ignore[misc]
            yield finalize
        state = getattr(self, STATE, None)
        if state is None or self.vllm_config.additional_config.get(REFRESHER) == "host":
            return
        self._das_version += 1
        trajectories, self._das_finished = self._das_finished or [], []
        state.call("refresh", Refresh(self._das_version, trajectories=trajectories).payload())

    def _trajectory(self, request: Any) -> Trajectory:
        problem = Label.of(request.sampling_params.extra_args).problem_of(request.prompt_token_ids)
        return Trajectory(problem, np.asarray(request.output_token_ids, dtype=np.int32).tobytes(), self._das_version)


class DasWorker(OwnHistory, VllmInternalWorkerExtension, Worker):
    """`vllm_kwargs.worker_cls` of the overlay. NeMo-RL's extension is among its bases, so vLLM does not add it."""
