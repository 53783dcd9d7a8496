"""What a device can do by its datasheet, and what this machine has. Pure: asks the driver's own library, never torch.

Peaks are dense bf16 with float32 accumulation, the denominator of MFU.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator as the driver names it; on a machine without one, kind "cpu"."""

    kind: str  # "cuda" or "cpu"
    name: str
    capability: tuple[int, int]  # (0, 0) on CPU
    peak_flop_s: float | None  # dense bf16; None: not known, and then MFU is null


# name as the driver gives it -> dense bf16 FLOP/s, each from NVIDIA's datasheet of that product (SXM where both exist)
PEAK_FLOP_S = {
    "NVIDIA B200": 2.25e15,
    "NVIDIA H200": 9.895e14,
    "NVIDIA H100 80GB HBM3": 9.895e14,
    "NVIDIA H100 PCIe": 7.56e14,
    "NVIDIA A100-SXM4-80GB": 3.12e14,
    "NVIDIA A100-SXM4-40GB": 3.12e14,
    "NVIDIA A100 80GB PCIe": 3.12e14,
    "NVIDIA A100-PCIE-40GB": 3.12e14,
    "NVIDIA L4": 1.21e14,
    "NVIDIA A10": 1.25e14,
    "NVIDIA GeForce RTX 4090": 1.652e14,
    "NVIDIA GeForce RTX 3090": 7.1e13,
}

CPU = Device("cpu", "cpu", (0, 0), None)


def probe() -> list[Device]:
    """The CUDA devices of this machine, in the driver's order; empty without a driver or a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for i in range(count.value):
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(handle), i)
        driver.cuDeviceGetName(name, 128, handle)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, handle)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, handle)  # ..._MINOR
        text = name.value.decode()
        found.append(Device("cuda", text, (major.value, minor.value), PEAK_FLOP_S.get(text)))
    return found
