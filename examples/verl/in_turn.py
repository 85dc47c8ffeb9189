"""The two gates at which a training run of `demo.py` waits: before a rollout, and
between the rollout and the update.

With them arms that share a machine roll out one at a time. A run that waits has made
the pipe `DEMO_GATE`; it goes on when that pipe has been opened and closed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_extern_object

OrderedSampler = load_extern_object(
    str(Path(__file__).with_name("sampler.py")), "OrderedSampler"
)


def wait() -> None:
    """Return when the demo has opened the gate."""
    gate = Path(os.environ["DEMO_GATE"])
    os.mkfifo(gate)
    gate.read_bytes()


class Problems(RLHFDataset):
    """veRL's data set, for data in order. It waits before it hands out the first
    problem of a batch.
    """

    def __getitem__(self, item: int) -> dict[str, Any]:
        if item % self.config.train_batch_size == 0:
            wait()
        return super().__getitem__(item)


class Sampler(OrderedSampler):
    """The ordered sampler. It waits when a batch of rollouts is complete."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().sample(*args, **kwargs)
        wait()
        return batch
