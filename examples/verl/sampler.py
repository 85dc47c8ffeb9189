"""Replay-buffer samplers for measurements: they poll fast, and one orders a batch by
content instead of by arrival.

veRL polls for finished rollouts every 2 seconds, so `timing_s/gen` is a multiple of
that, and trains on a batch in the order of arrival, so that a faster rollout changes
the float sums of the update. Not needed for training; choose it by
`trainer.v1.sampler.custom_sampler: {path: examples/verl/sampler.py, name:
OrderedSampler}`.
"""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_S = 0.05


class OrderedSampler(ReplayBuffer):
    """For `trainer_mode: sync`. `sampler_kwargs.poll_interval`: seconds, default
    0.05.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **_polling(kwargs))

    def _materialize_batch(self, partition_id: str, *args: Any, **kwargs: Any) -> Any:
        batch = super()._materialize_batch(partition_id, *args, **kwargs)
        rows = tq.kv_batch_get(
            keys=batch.keys, partition_id=partition_id, select_fields=["index"]
        )["index"]
        order = sorted(
            range(len(batch.keys)),
            key=lambda i: (int(_plain(rows[i])), *_session(batch.keys[i])),
        )
        batch.keys, batch.tags = (
            [batch.keys[i] for i in order],
            [batch.tags[i] for i in order],
        )
        return batch


class FastSampler(ReplayBufferAsync):
    """For the asynchronous trainer modes. `sampler_kwargs.poll_interval`: seconds,
    default 0.05.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **_polling(kwargs))


def _polling(kwargs: dict[str, Any]) -> dict[str, Any]:
    interval = (kwargs.get("sampler_kwargs") or {}).get("poll_interval", POLL_S)
    return {**kwargs, "poll_interval": float(interval)}


def _session(key: str) -> tuple[int, int]:
    _, session, turn = key.rsplit("_", 2)
    return int(session), int(turn)


def _plain(value: Any) -> Any:
    return getattr(value, "data", value) if not hasattr(value, "item") else value.item()
