"""GPUs: data sheets' figures, and the share of them that decode steps reach."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Speed of a device with real kernels."""

    bandwidth: float
    """Bytes per second from device memory."""
    flops: float
    """16-bit floating-point operations per second."""


READ, COMPUTE = 0.79, 0.75
"""Share of the data sheet's peaks that decode steps reach: EfficientRollout's fits on an A100, over its peaks."""


@dataclass(frozen=True)
class Device:
    """A GPU as an engine sees it."""

    name: str
    speed: Hardware
    """Memory and 16-bit compute that decode steps reach."""
    memory: float
    """Bytes."""
    link: float
    """Bytes per second to the other devices of its domain (NVLink, Infinity Fabric), one direction."""
    domain: int
    """Devices in that domain."""
    fp8: float
    """FP8 operations per second over those in 16 bits."""
    source: str


def _device(
    name: str, tb: float, tf: float, memory: float, link: float, domain: int, fp8: float, source: str
) -> Device:
    return Device(name, Hardware(READ * tb * 1e12, COMPUTE * tf * 1e12), memory * 1e9, link * 1e9, domain, fp8, source)


DEVICES = {
    d.name: d
    for d in (
        _device(
            "a100",
            2.039,
            312.0,
            80,
            300,
            8,
            1.0,
            "NVIDIA A100 SXM data sheet (2021): 2039 GB/s, 312 TFLOPS, NVLink 600 GB/s",
        ),
        _device(
            "h100",
            3.35,
            989.0,
            80,
            450,
            8,
            2.0,
            "NVIDIA H100 SXM data sheet (2023): 3.35 TB/s, 989 TFLOPS, NVLink 900 GB/s",
        ),
        _device(
            "h200",
            4.8,
            989.0,
            141,
            450,
            8,
            2.0,
            "NVIDIA H200 SXM data sheet (2024): 4.8 TB/s, 989 TFLOPS, NVLink 900 GB/s",
        ),
        _device("h20", 4.0, 148.0, 96, 450, 8, 2.0, "NVIDIA H20 (2023): 4.0 TB/s, 148 TFLOPS, NVLink 900 GB/s"),
        _device(
            "b200",
            8.0,
            2250.0,
            180,
            900,
            8,
            2.0,
            "NVIDIA DGX B200 data sheet (2024): 8 TB/s, 2.25 PFLOPS, NVLink 1.8 TB/s",
        ),
        _device(
            "gb200", 8.0, 2500.0, 186, 900, 72, 2.0, "NVIDIA GB200 NVL72 (2024): 8 TB/s, 2.5 PFLOPS, NVLink 1.8 TB/s"
        ),
        _device(
            "l40s", 0.864, 362.0, 48, 32, 1, 2.0, "NVIDIA L40S data sheet (2023): 864 GB/s, 362 TFLOPS, PCIe 4.0 x16"
        ),
        _device(
            "mi300x",
            5.3,
            1307.4,
            192,
            448,
            8,
            2.0,
            "AMD Instinct MI300X data sheet (2023): 5.3 TB/s, 1307.4 TFLOPS, 7 links of 128 GB/s",
        ),
    )
}
"""Dense rates in 16 bits, at the shares above."""


def recognise(name: str) -> Device | None:
    """Return the device that a driver calls so ("NVIDIA H100 80GB HBM3"), None if the table lacks it."""
    words = re.findall(r"[a-z]+\d+[a-z]*", name.lower())
    return next((DEVICES[word] for word in words if word in DEVICES), None)
