"""Devices and the links between them: data sheets' figures, and the share of them that decode steps reach."""

from __future__ import annotations

from dataclasses import dataclass

from das_adapter.core.latency import HARDWARE, Hardware
from das_adapter.errors import DasError


@dataclass(frozen=True)
class Device:
    """A GPU as an engine sees it."""

    name: str
    speed: Hardware
    """Memory and 16-bit compute that decode steps reach."""
    memory: float
    """Bytes."""
    link: float
    """Bytes per second to the other devices of its NVLink domain, one direction."""
    domain: int
    """Devices in that domain."""
    fp8: float
    """FP8 operations per second over those in 16 bits."""
    source: str


NETWORK = 50e9
"""Bytes per second of a device between NVLink domains: 400 Gb/s, NVIDIA's reference design for HGX systems."""
HOP_S = 8e-6
"""Seconds before the first byte of an all-reduce inside a domain arrives (NCCL's tree over NVLink, small messages)."""
HOP_NETWORK_S = 25e-6
"""The same between domains."""


def _device(name: str, memory: float, link: float, domain: int, fp8: float, source: str) -> Device:
    return Device(name, HARDWARE[name], memory * 1e9, link * 1e9, domain, fp8, source)


DEVICES = {
    d.name: d
    for d in (
        _device("a100", 80, 300, 8, 1.0, "NVIDIA A100 SXM data sheet (2021): 2039 GB/s, 312 TFLOPS, NVLink 600 GB/s"),
        _device("h100", 80, 450, 8, 2.0, "NVIDIA H100 SXM data sheet (2023): 3.35 TB/s, 989 TFLOPS, NVLink 900 GB/s"),
        _device("h200", 141, 450, 8, 2.0, "NVIDIA H200 SXM data sheet (2024): 4.8 TB/s, 989 TFLOPS, NVLink 900 GB/s"),
        _device("h20", 96, 450, 8, 2.0, "NVIDIA H20 (2023): 4.0 TB/s, 148 TFLOPS, NVLink 900 GB/s"),
        _device("b200", 180, 900, 8, 2.0, "NVIDIA DGX B200 data sheet (2024): 8 TB/s, 2.25 PFLOPS, NVLink 1.8 TB/s"),
        _device("gb200", 186, 900, 72, 2.0, "NVIDIA GB200 NVL72 (2024): 8 TB/s, 2.5 PFLOPS, NVLink 1.8 TB/s"),
        _device("l40s", 48, 32, 1, 2.0, "NVIDIA L40S data sheet (2023): 864 GB/s, 362 TFLOPS, PCIe 4.0 x16"),
    )
}  # fmt: skip
"""Dense rates; the shares that decode steps reach are `core.latency`'s, those of EfficientRollout's fits on an A100."""


def device(name: str) -> Device:
    """Return a device by its name, in any case.

    Raises:
        DasError: the table lacks it.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        raise DasError(f"hardware.gpu: found {name!r}, allowed: {', '.join(DEVICES)}")
    return found


def all_reduce_seconds(device: Device, devices: int, size: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes over so many devices: a ring's traffic, and one wait."""
    if devices < 2:
        return 0.0
    rate, wait = _link(device, devices)
    return wait + 2.0 * (devices - 1) / devices * size / rate


def all_to_all_seconds(device: Device, devices: int, size: float) -> float:
    """Return the seconds of an exchange in which each of so many devices sends `size` bytes, evenly to all."""
    if devices < 2:
        return 0.0
    rate, wait = _link(device, devices)
    return wait + (devices - 1) / devices * size / rate


def _link(device: Device, devices: int) -> tuple[float, float]:
    """Bytes per second of a device, and the wait for the first byte."""
    if devices <= device.domain:
        return device.link, HOP_S
    return min(device.link, NETWORK), HOP_NETWORK_S
