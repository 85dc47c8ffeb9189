"""The rollouts' figures in veRL's own logger."""

from __future__ import annotations

import threading
from typing import Any

_followed = threading.Event()
"""Set where this process trains a run with an active block."""
logged: dict[str, float] = {}
"""The figures of the rollouts that were logged last."""


def follow() -> None:
    """Log the run's figures from now on."""
    _followed.set()


def around_log(stock: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrap `Tracking.log(data, step, backend)` to add the step's figures to the trainer's."""
    if not _followed.is_set():
        return stock(*args, **kwargs)
    from das_adapter.service import ledger

    given = {**dict(zip(("data", "step", "backend"), args, strict=False)), **kwargs}
    data, step = given["data"], given["step"]
    if any(key.startswith(("actor/", "critic/")) for key in data):  # of training, not of a validation or a sync
        logged.clear()
        logged.update(ledger.metrics(step))
        given["data"] = {**data, **exposed_generation(data), **logged}
    return stock(**given)


_WAITS = ("timing_s/gen", "timing_s/switch_wait")
"""What veRL's trainers call the time in which they wait for rollouts: all of it where rollout and training alternate,
what training does not hide where they overlap; the second only where engines are lent to the rollout."""


def exposed_generation(data: dict[str, Any]) -> dict[str, float]:
    """Return how long training waited for rollouts in this step (NeMo-RL's paper, section 3.3), where veRL says."""
    waits = [float(data[name]) for name in _WAITS if name in data]
    return {"das/exposed_generation_s": sum(waits)} if waits else {}
