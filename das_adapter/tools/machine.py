"""Describe the machine on which figures were measured."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any


def hardware() -> dict[str, Any]:
    """Return processor, cores, GPU (None: torch sees none) and system."""
    import torch

    name = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = name[1] if name else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu, "system": platform.platform()}
