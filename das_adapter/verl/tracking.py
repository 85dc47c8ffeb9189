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
        given["data"] = {**data, **logged}
    return stock(**given)
