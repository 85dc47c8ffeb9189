"""A figure of das-adapter's in NeMo-RL's own logger, which the generation cannot know."""

from __future__ import annotations

import functools
from typing import Any

from das_adapter.patching import patch

_WAITS = ("exposed_generation", "generation")
"""What NeMo-RL's trainers call the time in which they wait for rollouts: what training does not hide where they
overlap, all of it where they alternate."""


@patch("nemo_rl.utils.logger:Logger.log_metrics", since="0.6.0", needs="metrics, step, prefix")
def log_exposed_generation(stock: Any) -> Any:
    """Without it `das/exposed_generation_s` (NeMo-RL's paper, section 3.3) is missing. The step's times are what
    trainers log last: it comes before them. Remove this patch when NeMo-RL logs the exposed generation time itself."""

    @functools.wraps(stock)
    def log_metrics(self: Any, metrics: Any, step: int, prefix: str | None = "", *args: Any, **kwargs: Any) -> None:
        waited = next((metrics[name] for name in _WAITS if name in metrics), None)
        if prefix == "timing/train" and waited is not None:
            self.log_metrics({"das/exposed_generation_s": float(waited)}, step, prefix="train")
        stock(self, metrics, step, prefix, *args, **kwargs)

    return log_metrics
