"""The run that this process trains, and its step for weight syncs that come without
one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

from das_adapter.patching import patch
from das_adapter.verl import settings

logger = logging.getLogger("das_adapter")

trainer: Any = None
"""The trainer of the run with an active block that this process trains; its logger gets
the rollouts' figures. None: this process trains no such run, or its trainer loads
checkpoints without veRL's code.
"""


def current_step() -> int | None:
    """Return the step of the run that this process trains; None: it trains none."""
    return None if trainer is None else step_of(trainer)


def step_of(trainer: Any) -> int:
    """Return a trainer's step as checkpoints count it; the fully asynchronous one
    counts weight versions.
    """
    return int(getattr(trainer, "current_param_version", trainer.global_steps))


@patch(
    "verl.checkpoint_engine.base:CheckpointEngineManager.update_weights",
    since="0.9.1",
    needs="global_steps",
)
def number_weights(stock: Any) -> Any:
    """Without it engines do not hear of weights that come without a step, as those of
    verl-recipe's DAPO trainer and of validations with a reward model on the rollout's
    GPUs do: nothing is published, and figures go to the first step. Remove this patch
    when veRL tells its servers of every weight sync.
    """
    # it looks at the caller, as in `identity.name_awaited_batches`
    from verl.utils.ray_utils import auto_await

    undecorated = getattr(stock, "__wrapped__", stock)

    @functools.wraps(undecorated)
    def update_weights(self: Any, global_steps: int | None = None) -> Any:
        if _has_block(self.replicas):
            if global_steps is None:
                global_steps = current_step()
            if global_steps is None:
                global_steps = _next_counted_step(self)
            self._das_step = global_steps
        return undecorated(self, global_steps)

    return auto_await(update_weights)


def _next_counted_step(manager: Any) -> int:
    """Return the number of a weight sync of a trainer that says no step: they are
    counted from 0.
    """
    last: int | None = getattr(manager, "_das_step", None)
    if last is not None:
        return last + 1
    logger.warning(
        "das: an unknown trainer calls update_weights() without a step:"
        " weight syncs are counted, and figures are of no step; call"
        " update_weights(global_steps)"
    )
    return 0


def _has_block(replicas: Iterable[Any]) -> bool:
    """Return whether any of veRL's replicas has an active `das:` block."""
    for replica in replicas:
        if settings.of_rollout(replica.config) is not None:
            return True
    return False
