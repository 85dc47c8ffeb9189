"""The run that this process trains, and its step, where a trainer derived from veRL's
says none.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from das_adapter.patching import patch
from das_adapter.verl import settings

logger = logging.getLogger("das_adapter")

trainer: Any = None
"""Of the run with an active block that this process trains, whose logger gets the
rollouts' figures; None: it trains none, or by a trainer that loads its checkpoints
without veRL's code.
"""


def step() -> int | None:
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
    from verl.utils.ray_utils import (
        auto_await,
    )

    stock = getattr(stock, "__wrapped__", stock)

    @functools.wraps(stock)
    def update_weights(self: Any, global_steps: int | None = None) -> Any:
        if any(
            settings.of_rollout(replica.config) is not None for replica in self.replicas
        ):
            last = getattr(self, "_das_step", None)
            if global_steps is None and (global_steps := step()) is None:
                global_steps = 0 if last is None else last + 1
                if last is None:
                    logger.warning(
                        "das: an unknown trainer calls update_weights() without a step:"
                        " weight syncs are counted, and figures are of no step; call"
                        " update_weights(global_steps)"
                    )
            self._das_step = global_steps
        return stock(self, global_steps)

    return auto_await(update_weights)
