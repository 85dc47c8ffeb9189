"""Describe the machine on which figures were measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def processor() -> str:
    """Return the processor's name."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor()


def hardware() -> dict[str, Any]:
    """Return processor, cores, GPU (None: torch sees none) and system."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": processor(), "cores": os.cpu_count(), "gpu": gpu, "system": platform.platform()}
