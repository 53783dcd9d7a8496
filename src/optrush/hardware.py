"""List devices with the rates of their datasheets, and detect those of this machine. Pure: uses the driver, not torch.

Peaks are dense, with float32 accumulation; `peak_flop_s` (bf16) is the denominator of MFU. Rates of a CPU are computed
from its cores, clock and vector width: an upper bound, good enough to rank settings, not to predict speeds.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from optrush.errors import ConfigError

GIB = 2**30
CONTEXT_BYTES = 800 << 20  # of a CUDA process on its device, in addition to torch's allocations


@dataclass(frozen=True)
class Device:
    """One accelerator by the driver's name; without one the CPU. None: not known."""

    kind: str  # "cuda" or "cpu"
    name: str
    capability: tuple[int, int]  # (0, 0) on CPU
    peak_flop_s: float | None  # dense bf16; None: not known or not supported, and MFU is null
    half_flop_s: float | None = None  # the faster of dense bf16 and fp16
    float32_flop_s: float | None = None  # without tensor cores, as torch multiplies float32 by default
    bandwidth_bytes_s: float | None = None  # device memory
    link_bytes_s: float | None = None  # to another device of the same host, one direction
    memory_bytes: int | None = None  # all of it, as the driver reports


def _gpu(
    name: str, capability: tuple[int, int], half: float, float32: float, bandwidth: float, link: float, gib: float
) -> Device:
    peak = half if capability >= (8, 0) else None
    return Device("cuda", name, capability, peak, half, float32, bandwidth, link, int(gib * GIB))


# Names that `--hardware` takes. Rates from NVIDIA's datasheet of each product (SXM where both exist); link: NVLink
# where the product has it, else PCI Express x16; memory as drivers report it, less than the nominal size.
NAMED: dict[str, Device] = {
    "t4": _gpu("Tesla T4", (7, 5), 6.5e13, 8.1e12, 3.2e11, 1.6e10, 14.6),
    "v100": _gpu("Tesla V100-SXM2-16GB", (7, 0), 1.25e14, 1.57e13, 9.0e11, 1.5e11, 15.8),
    "a10": _gpu("NVIDIA A10", (8, 6), 1.25e14, 3.12e13, 6.0e11, 3.2e10, 22.1),
    "l4": _gpu("NVIDIA L4", (8, 9), 1.21e14, 3.03e13, 3.0e11, 3.2e10, 22.0),
    "3090": _gpu("NVIDIA GeForce RTX 3090", (8, 6), 7.1e13, 3.56e13, 9.36e11, 3.2e10, 23.7),
    "4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 1.652e14, 8.26e13, 1.008e12, 3.2e10, 23.6),
    "a100-40": _gpu("NVIDIA A100-SXM4-40GB", (8, 0), 3.12e14, 1.95e13, 1.555e12, 3.0e11, 39.4),
    "a100-80": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 3.12e14, 1.95e13, 2.039e12, 3.0e11, 79.1),
    "h100": _gpu("NVIDIA H100 80GB HBM3", (9, 0), 9.895e14, 6.7e13, 3.35e12, 4.5e11, 79.1),
    "h200": _gpu("NVIDIA H200", (9, 0), 9.895e14, 6.7e13, 4.8e12, 4.5e11, 139.8),
    "b200": _gpu("NVIDIA B200", (10, 0), 2.25e15, 7.5e13, 8.0e12, 9.0e11, 178.3),
}
# Other products of the same chip, where their datasheets differ.
_VARIANTS = {
    "NVIDIA A100 80GB PCIe": dataclasses.replace(NAMED["a100-80"], bandwidth_bytes_s=1.935e12, link_bytes_s=3.2e10),
    "NVIDIA A100-PCIE-40GB": dataclasses.replace(NAMED["a100-40"], link_bytes_s=3.2e10),
    "NVIDIA H100 PCIe": _gpu("NVIDIA H100 PCIe", (9, 0), 7.56e14, 5.1e13, 2.0e12, 6.4e10, 79.1),
}
_BY_NAME = {d.name: d for d in NAMED.values()} | _VARIANTS

CPU = Device("cpu", "cpu", (0, 0), None)


def parse_hardware(text: str) -> tuple[Device, int]:
    """Return the device of a `--hardware` name, and their number: "h200", "2xh200", "cpu", "auto".

    Raises:
        ConfigError: an unknown name; `auto` on a machine whose devices differ.
    """
    many, _, name = text.rpartition("x")
    count = 1 if not many else int(many) if many.isascii() and many.isdigit() and len(many) < 6 else 0
    if text == "auto":
        return first_device(), 1
    name = name if many else text
    if count >= 1 and name == "cpu":
        here = cpu()
        share = None if here.memory_bytes is None else here.memory_bytes // count
        return dataclasses.replace(here, memory_bytes=share), count
    if count < 1 or name not in NAMED:
        known = ", ".join(["auto", "cpu", *NAMED])
        raise ConfigError(f"the hardware {text}", "no such name", f"known: {known}; several as 2xh200")
    return NAMED[name], count


@cache
def cpu() -> Device:
    """Return this machine's processor and memory, as far as known."""
    float32, half = _cpu_rates()
    return dataclasses.replace(
        CPU, half_flop_s=half, float32_flop_s=float32, bandwidth_bytes_s=2e10, link_bytes_s=5e9, memory_bytes=_memory()
    )


def _cpu_rates() -> tuple[float, float]:
    """Return (float32, bf16) FLOP/s: cores x clock x lanes x two vector units x multiply and add."""
    text = _cpuinfo()
    flags = set(re.findall(r"\w+", next(iter(re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE)), "")))
    mhz = [float(m) for m in re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", text, re.MULTILINE)]
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    float32 = len(os.sched_getaffinity(0)) * (max(mhz) if mhz else 2500.0) * 1e6 * lanes * 4
    if "amx_bf16" in flags:
        return float32, float32 * 8
    return float32, float32 * (2 if "avx512_bf16" in flags else 0.25)  # without such units bf16 is widened first


def processor() -> tuple[str, int]:
    """Return the model of this machine's processor, and the number of cores that this process may use."""
    name = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return name[1].strip() if name else platform.machine(), len(os.sched_getaffinity(0))


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def first_device() -> Device:
    """Return the first GPU of this machine, else its processor."""
    return next(iter(probe()), None) or cpu()


def probe() -> list[Device]:
    """Return the CUDA devices of this machine, in the driver's order; empty without a driver or a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    devices = []
    for i in range(count.value):
        handle, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        major, minor, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        driver.cuDeviceGet(ctypes.byref(handle), i)
        driver.cuDeviceGetName(name, 128, handle)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, handle)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, handle)  # ..._MINOR
        known = driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle) == 0
        text = name.value.decode()
        facts = _BY_NAME.get(text, Device("cuda", text, (0, 0), None))
        memory, capability = size.value if known else facts.memory_bytes, (major.value, minor.value)
        devices.append(dataclasses.replace(facts, name=text, capability=capability, memory_bytes=memory))
    return devices
