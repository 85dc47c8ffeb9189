"""The rollouts' figures in veRL's own logger."""

from __future__ import annotations

import threading
from typing import Any

from das_adapter.patching import patch

_followed = threading.Event()
"""Set where this process trains a run with an active block."""
logged: dict[str, float] = {}
"""The figures of the rollouts that were logged last."""


def follow() -> None:
    """Log the run's figures from now on."""
    _followed.set()


@patch("verl.utils.tracking:Tracking.log", since="0.9.1", needs="data, step, backend")
def log_figures(stock: Any) -> Any:
    """Without it the trainer's logger does not get the rollouts' figures. Remove this patch when veRL lets plug-ins add
    metrics to a step."""

    def log(self: Any, data: dict[str, Any], step: int, backend: Any = None) -> Any:
        of_training = any(key.startswith(("actor/", "critic/")) for key in data)  # not of a validation or a sync
        if _followed.is_set() and of_training:
            from das_adapter.service import ledger

            logged.clear()
            logged.update(ledger.metrics(step))
            data = {**data, **logged}
        return stock(self, data=data, step=step, backend=backend)

    return log
