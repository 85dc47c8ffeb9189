"""How long an exchange over the links between devices takes."""

from __future__ import annotations

from das_adapter.core.hardware import Device

NETWORK = 50e9
"""Bytes per second of a device between NVLink domains: 400 Gb/s, NVIDIA's reference design for HGX systems."""
HOP_S = 8e-6
"""Seconds before the first byte of an all-reduce inside a domain arrives (NCCL's tree over NVLink, small messages)."""
HOP_NETWORK_S = 25e-6
"""The same between domains."""


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
