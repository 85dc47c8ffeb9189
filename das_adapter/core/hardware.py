"""GPUs: data sheets' figures, and the share of them that decode steps reach."""

from __future__ import annotations

import re
from dataclasses import dataclass

from das_adapter.errors import DasError

READ = 0.79
"""Share of the data sheet's bandwidth that decode steps reach: EfficientRollout's fit
on an A100, over its peak.
"""
COMPUTE = 0.75
"""Share of the data sheet's operations that decode steps reach, likewise."""


@dataclass(frozen=True)
class Device:
    """A GPU as an engine sees it."""

    bandwidth: float
    flops: float
    """Bytes per second from device memory, and 16-bit floating-point operations per
    second, that decode steps reach.
    """
    memory: float
    """Bytes."""
    link: float
    """Bytes per second to the other devices of its domain (NVLink, Infinity Fabric),
    one direction.
    """
    domain: int
    """Devices in that domain."""
    fp8: float
    """FP8 operations per second over those in 16 bits."""


# TB/s, dense TFLOPS in 16 bits, GB, GB/s of the link in one direction, devices of a
# domain, FP8 over 16 bits.
_DATA_SHEETS = {
    "a100": (2.039, 312.0, 80, 300, 8, 1.0),  # NVIDIA A100 SXM (2021); NVLink 600 GB/s
    "h100": (3.35, 989.0, 80, 450, 8, 2.0),  # NVIDIA H100 SXM (2023); NVLink 900 GB/s
    "h200": (4.8, 989.0, 141, 450, 8, 2.0),  # NVIDIA H200 SXM (2024); NVLink 900 GB/s
    "h20": (4.0, 148.0, 96, 450, 8, 2.0),  # NVIDIA H20 (2023); NVLink 900 GB/s
    "b200": (8.0, 2250.0, 180, 900, 8, 2.0),  # NVIDIA DGX B200 (2024); NVLink 1.8 TB/s
    # NVIDIA GB200 NVL72 (2024); NVLink 1.8 TB/s
    "gb200": (8.0, 2500.0, 186, 900, 72, 2.0),
    # NVIDIA H800, A800 SXM (2023): as H100 and A100, NVLink 400 GB/s
    "h800": (3.35, 989.0, 80, 200, 8, 2.0),
    "a800": (2.039, 312.0, 80, 200, 8, 1.0),
    "l40s": (0.864, 362.0, 48, 32, 1, 2.0),  # NVIDIA L40S (2023); PCIe 4.0 x16
    "l4": (0.3, 121.0, 24, 32, 1, 2.0),  # NVIDIA L4 (2023); PCIe 4.0 x16
    "a6000": (0.768, 155.0, 48, 32, 1, 1.0),  # NVIDIA RTX A6000 (2020); PCIe 4.0 x16
    # NVIDIA's architecture papers of Ampere GA102, Ada, Blackwell: FP16 with FP32
    # accumulation, dense; PCIe 4.0 x16, the last 5.0
    "rtx3090": (0.936, 71.0, 24, 32, 1, 1.0),
    "rtx4090": (1.008, 165.2, 24, 32, 1, 2.0),
    "rtx5090": (1.792, 209.5, 32, 64, 1, 2.0),
    # AMD Instinct MI300X (2023); 7 links of 128 GB/s
    "mi300x": (5.3, 1307.4, 192, 448, 8, 2.0),
}


def _device(sheet: tuple[float, ...]) -> Device:
    """Return the device of a data sheet's row."""
    read, compute, memory, link, domain, fp8 = sheet
    return Device(
        bandwidth=READ * read * 1e12,
        flops=COMPUTE * compute * 1e12,
        memory=memory * 1e9,
        link=link * 1e9,
        domain=int(domain),
        fp8=fp8,
    )


DEVICES = {name: _device(sheet) for name, sheet in _DATA_SHEETS.items()}


def device(name: str) -> Device:
    """Return a device by its name, in any case, or by what its driver calls it.

    Raises:
        DasError: the table lacks it.
    """
    known = recognise(name)
    if known is None:
        allowed = ", ".join(DEVICES)
        raise DasError(
            f"hardware.gpu: found {name!r}, allowed: {allowed}; or the one of these"
            " whose memory bandwidth is nearest"
        )
    return known


def recognise(name: str) -> Device | None:
    """Return the device that a driver calls so ("NVIDIA H100 80GB HBM3"), None if the
    table lacks it.
    """
    # the name of a GeForce has its number apart
    joined = re.sub(r"rtx[ _-](\d)", r"rtx\1", name.lower())
    words = re.findall(r"[a-z]+\d+[a-z]*", joined)
    for word in words:
        if word in DEVICES:
            return DEVICES[word]
    return None
