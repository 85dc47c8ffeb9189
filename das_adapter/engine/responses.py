"""The log of an engine without a host by which two runs are compared token for token:
its finished responses, and when its weights changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from das_adapter.engine.requests import label_of
from das_adapter.engine.settings import alone, settings
from das_adapter.protocol.decision_log import (
    DecisionLog,
    ResponseRecord,
    WeightUpdateRecord,
)
from das_adapter.protocol.metrics import response_hash

logger = logging.getLogger("das_adapter")


class ResponseLog:
    """Logs the responses that vLLM's scheduler has finished. There they end where the
    trainer's do, drafted or not, on both model runners; but for stop strings, which the
    front end looks for: requests that have some are left out.
    """

    def __init__(self, log: DecisionLog, engine: str) -> None:
        self._log = log
        self._engine = engine
        self._ended = False
        """Whether vLLM's requests are others than what is read here."""

    def add_finished(self, requests: Iterable[Any], *, idle: bool) -> None:
        """Log those of these requests (vLLM's) that have finished; `idle`: whether no
        other is left.
        """
        if self._ended:
            return
        try:
            for request in requests:
                if request.is_finished():
                    self._add(request)
        except Exception:
            self._ended = True
            logger.exception("das: responses are not logged any more; decoding goes on")
        if idle:
            self._log.flush()

    def _add(self, request: Any) -> None:
        params = request.sampling_params
        if params is None or params.stop or not label_of(request).record:
            return
        tokens = np.array(request.output_token_ids, dtype=np.int32)
        seed = params.seed or 0
        record = ResponseRecord(
            self._engine,
            len(tokens),
            response_hash(tokens.tobytes(), seed),
            request.arrival_time,
            time.time(),
        )
        self._log.add(record)

    def add_weight_update(self) -> None:
        """Log that the weights have changed."""
        self._log.add(WeightUpdateRecord(self._engine, time.time()))


def response_log(vllm_config: Any) -> ResponseLog | None:
    """Return a log of an engine's responses or weight updates; None: the block names no
    directory, or a host logs what its engines write.
    """
    if not alone(vllm_config):
        return None
    config = settings(vllm_config)
    if config is None or config.log_dir is None:
        return None
    # a name that its scheduler and its workers agree on
    rank = vllm_config.parallel_config.data_parallel_rank
    engine = f"{vllm_config.instance_id}/{rank}"
    return ResponseLog(DecisionLog(config.log_dir), engine)
