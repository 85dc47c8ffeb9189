"""The labels of a NeMo-RL generation batch. NeMo-RL gives its generation only the prompts, so the first turn's is a
problem's identity (`protocol.label.Labeller`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from das_adapter.core.identity import media_hash

LABELS = "das_labels"
"""Key of a NeMo-RL generation batch: the `Label` of each row."""
MEDIA = ("vllm_images", "vllm_audios", "vllm_videos")
"""Keys of a NeMo-RL generation batch whose rows belong to a problem and leave only place holders in its prompt."""


def media_of(data: Mapping[str, Any], rows: int) -> list[list[str]]:
    """Return the hashes of the images, sound and video of each row of a generation batch."""
    known: dict[int, str] = {}  # the samples of a problem share them

    def found(item: Any) -> str:
        if id(item) not in known:
            known[id(item)] = media_hash(item)
        return known[id(item)]

    return [[found(item) for name in MEDIA if name in data for item in data[name][row] or ()] for row in range(rows)]
