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
"""How often veRL looks for finished rollouts, where the config does not say."""


class OrderedSampler(ReplayBuffer):
    """The sampler for `trainer_mode: sync`: it polls fast, and orders a batch by its
    content. `sampler_kwargs.poll_interval`: seconds, default 0.05.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **_polling(kwargs))

    def _materialize_batch(self, partition_id: str, *args: Any, **kwargs: Any) -> Any:
        batch = super()._materialize_batch(partition_id, *args, **kwargs)
        columns = tq.kv_batch_get(
            keys=batch.keys, partition_id=partition_id, select_fields=["index"]
        )
        indices = columns["index"]

        def sort_key(row: int) -> tuple[int, int, int]:
            """Return a row's problem, session and turn."""
            problem = int(_plain(indices[row]))
            session, turn = _session_and_turn(batch.keys[row])
            return problem, session, turn

        order = sorted(range(len(batch.keys)), key=sort_key)
        batch.keys = [batch.keys[row] for row in order]
        batch.tags = [batch.tags[row] for row in order]
        return batch


class FastSampler(ReplayBufferAsync):
    """The sampler for the asynchronous trainer modes: it polls fast.
    `sampler_kwargs.poll_interval`: seconds, default 0.05.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **_polling(kwargs))


def _polling(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a replay buffer with the interval of its polls."""
    sampler_kwargs = kwargs.get("sampler_kwargs") or {}
    interval_s = sampler_kwargs.get("poll_interval", POLL_S)
    return {**kwargs, "poll_interval": float(interval_s)}


def _session_and_turn(key: str) -> tuple[int, int]:
    """Return the session and the turn that a row's key ends with."""
    _, session, turn = key.rsplit("_", 2)
    return int(session), int(turn)


def _plain(value: Any) -> Any:
    """Return the plain value of a tensor, an array's element, or tensordict's
    wrapper.
    """
    if hasattr(value, "item"):
        return value.item()
    return getattr(value, "data", value)
