"""Let torchvision be imported whose kernels do not load, a CUDA build's beside torch's
CPU build, in every process of a test: vLLM's Qwen3.5 imports it, and calls none of
them.

Python imports it at its start where this directory is on PYTHONPATH.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import wrapt

LIBRARIES: list[Any] = []
"""Operators are there as long as their library is."""


@wrapt.when_imported("torch")
def define_operators(torch: Any) -> None:
    package = importlib.metadata.distribution("torchvision")
    build = Path(str(package.locate_file("torchvision/version.py"))).read_text()
    if torch.version.cuda or "+cu" not in build:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(
            f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    LIBRARIES.append(library)
