"""List devices with their datasheet rates, and detect those of this machine. Pure: uses the driver, not torch.

Peaks are dense, with float32 accumulation; `peak_flop_s` (bf16) is the denominator of MFU. Rates of a CPU are computed
from its cores, clock and vector width: an upper bound, good enough to rank settings, not to predict speeds.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import difflib
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from optrush.errors import ConfigError

GIB = 2**30
CONTEXT_BYTES = 800 << 20  # per CUDA process, in addition to torch's allocations
TILE = 64  # multiple of rows and columns that fills matmul tiles; otherwise a compiler pads and copies


def tiles(many: int) -> int:
    """Round up to whole tiles."""
    return many + -many % TILE


@dataclass(frozen=True)
class Network:
    """The network between hosts: bytes per second into each host, and seconds per step over it."""

    name: str
    bytes_s: float
    step_s: float


@dataclass(frozen=True)
class Device:
    """One accelerator by the driver's name, or the CPU. None: unknown."""

    kind: str  # "cuda" or "cpu"
    name: str
    capability: tuple[int, int]  # (0, 0) on CPU
    peak_flop_s: float | None  # dense bf16; None: unknown or not supported, and MFU is null
    half_flop_s: float | None = None  # the faster of dense bf16 and fp16
    float32_flop_s: float | None = None  # without tensor cores, as torch multiplies float32 by default
    bandwidth_bytes_s: float | None = None  # device memory
    link_bytes_s: float | None = None  # to another device of the same host, one direction
    memory_bytes: int | None = None  # all of it, as the driver reports
    host_memory_bytes: int | None = None  # of a GPU's host
    hosts: int = 1  # hosts with equal devices, connected by `network`; only for plans
    network: Network | None = None
    linked: str = ""  # the host's device link, of `SLOWER`, instead of the product's own


def _gpu(
    name: str, capability: tuple[int, int], half: float, float32: float, bandwidth: float, link: float, gib: float
) -> Device:
    peak = half if capability >= (8, 0) else None
    return Device("cuda", name, capability, peak, half, float32, bandwidth, link, int(gib * GIB))


# Names for `--hardware`. Rates from each product's datasheet (SXM if there are two forms); link: NVLink if the product
# has it, else PCI Express x16; memory as drivers report it, less than the nominal size; GeForce rates with float32
# accumulation. For products other than NVIDIA's only memory is planned.
NAMED: dict[str, Device] = {
    "t4": _gpu("Tesla T4", (7, 5), 6.5e13, 8.1e12, 3.2e11, 1.6e10, 14.6),
    "v100": _gpu("Tesla V100-SXM2-16GB", (7, 0), 1.25e14, 1.57e13, 9.0e11, 1.5e11, 15.8),
    "2080ti": _gpu("NVIDIA GeForce RTX 2080 Ti", (7, 5), 5.38e13, 1.34e13, 6.16e11, 1.6e10, 10.7),
    "v100-32": _gpu("Tesla V100-SXM2-32GB", (7, 0), 1.25e14, 1.57e13, 9.0e11, 1.5e11, 31.7),
    "a10": _gpu("NVIDIA A10", (8, 6), 1.25e14, 3.12e13, 6.0e11, 3.2e10, 22.1),
    "a10g": _gpu("NVIDIA A10G", (8, 6), 7.0e13, 3.5e13, 6.0e11, 3.2e10, 22.1),
    "a30": _gpu("NVIDIA A30", (8, 0), 1.65e14, 1.03e13, 9.33e11, 3.2e10, 23.6),
    "l4": _gpu("NVIDIA L4", (8, 9), 1.21e14, 3.03e13, 3.0e11, 3.2e10, 22.0),
    "l40": _gpu("NVIDIA L40", (8, 9), 1.81e14, 9.05e13, 8.64e11, 3.2e10, 44.4),
    "l40s": _gpu("NVIDIA L40S", (8, 9), 3.62e14, 9.16e13, 8.64e11, 3.2e10, 44.4),
    "a40": _gpu("NVIDIA A40", (8, 6), 1.497e14, 3.74e13, 6.96e11, 3.2e10, 44.4),
    "3060": _gpu("NVIDIA GeForce RTX 3060", (8, 6), 2.55e13, 1.27e13, 3.6e11, 3.2e10, 11.6),
    "3060ti": _gpu("NVIDIA GeForce RTX 3060 Ti", (8, 6), 3.24e13, 1.62e13, 4.48e11, 3.2e10, 7.7),
    "3070": _gpu("NVIDIA GeForce RTX 3070", (8, 6), 4.06e13, 2.03e13, 4.48e11, 3.2e10, 7.7),
    "3070ti": _gpu("NVIDIA GeForce RTX 3070 Ti", (8, 6), 4.35e13, 2.17e13, 6.08e11, 3.2e10, 7.7),
    "3080": _gpu("NVIDIA GeForce RTX 3080", (8, 6), 5.95e13, 2.98e13, 7.6e11, 3.2e10, 9.6),
    "3080ti": _gpu("NVIDIA GeForce RTX 3080 Ti", (8, 6), 6.82e13, 3.41e13, 9.12e11, 3.2e10, 11.7),
    "3090": _gpu("NVIDIA GeForce RTX 3090", (8, 6), 7.1e13, 3.56e13, 9.36e11, 3.2e10, 23.7),
    "3090ti": _gpu("NVIDIA GeForce RTX 3090 Ti", (8, 6), 8.0e13, 4.0e13, 1.008e12, 3.2e10, 23.7),
    "4060": _gpu("NVIDIA GeForce RTX 4060", (8, 9), 3.02e13, 1.51e13, 2.72e11, 1.6e10, 7.6),
    "4060ti-8": _gpu("NVIDIA GeForce RTX 4060 Ti 8GB", (8, 9), 4.41e13, 2.21e13, 2.88e11, 1.6e10, 7.6),
    "4060ti-16": _gpu("NVIDIA GeForce RTX 4060 Ti", (8, 9), 4.41e13, 2.21e13, 2.88e11, 1.6e10, 15.6),
    "4070": _gpu("NVIDIA GeForce RTX 4070", (8, 9), 5.83e13, 2.91e13, 5.04e11, 3.2e10, 11.6),
    "4070super": _gpu("NVIDIA GeForce RTX 4070 SUPER", (8, 9), 7.1e13, 3.55e13, 5.04e11, 3.2e10, 11.6),
    "4070ti": _gpu("NVIDIA GeForce RTX 4070 Ti", (8, 9), 8.02e13, 4.01e13, 5.04e11, 3.2e10, 11.6),
    "4070tisuper": _gpu("NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9), 8.82e13, 4.41e13, 6.72e11, 3.2e10, 15.6),
    "4080": _gpu("NVIDIA GeForce RTX 4080", (8, 9), 9.75e13, 4.87e13, 7.168e11, 3.2e10, 15.6),
    "4080super": _gpu("NVIDIA GeForce RTX 4080 SUPER", (8, 9), 1.044e14, 5.22e13, 7.36e11, 3.2e10, 15.6),
    "4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 1.652e14, 8.26e13, 1.008e12, 3.2e10, 23.6),
    "5060": _gpu("NVIDIA GeForce RTX 5060", (12, 0), 3.84e13, 1.92e13, 4.48e11, 3.2e10, 7.5),
    "5060ti-16": _gpu("NVIDIA GeForce RTX 5060 Ti", (12, 0), 4.74e13, 2.37e13, 4.48e11, 3.2e10, 15.5),
    "5070": _gpu("NVIDIA GeForce RTX 5070", (12, 0), 6.17e13, 3.09e13, 6.72e11, 6.4e10, 11.5),
    "5070ti": _gpu("NVIDIA GeForce RTX 5070 Ti", (12, 0), 8.79e13, 4.39e13, 8.96e11, 6.4e10, 15.5),
    "5080": _gpu("NVIDIA GeForce RTX 5080", (12, 0), 1.126e14, 5.63e13, 9.6e11, 6.4e10, 15.5),
    "5090": _gpu("NVIDIA GeForce RTX 5090", (12, 0), 2.095e14, 1.048e14, 1.792e12, 6.4e10, 31.4),
    "a4000": _gpu("NVIDIA RTX A4000", (8, 6), 7.67e13, 1.92e13, 4.48e11, 3.2e10, 15.7),
    "a5000": _gpu("NVIDIA RTX A5000", (8, 6), 1.111e14, 2.78e13, 7.68e11, 3.2e10, 23.7),
    "a6000": _gpu("NVIDIA RTX A6000", (8, 6), 1.548e14, 3.87e13, 7.68e11, 3.2e10, 47.5),
    "4000ada": _gpu("NVIDIA RTX 4000 Ada Generation", (8, 9), 1.069e14, 2.67e13, 3.6e11, 3.2e10, 19.5),
    "5000ada": _gpu("NVIDIA RTX 5000 Ada Generation", (8, 9), 2.612e14, 6.53e13, 5.76e11, 3.2e10, 31.4),
    "6000ada": _gpu("NVIDIA RTX 6000 Ada Generation", (8, 9), 3.642e14, 9.11e13, 9.6e11, 3.2e10, 47.4),
    "rtxpro6000": _gpu(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 5.03e14, 1.25e14, 1.792e12, 6.4e10, 95.0
    ),
    "a100-40": _gpu("NVIDIA A100-SXM4-40GB", (8, 0), 3.12e14, 1.95e13, 1.555e12, 3.0e11, 39.4),
    "a100-80": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 3.12e14, 1.95e13, 2.039e12, 3.0e11, 79.1),
    "h100": _gpu("NVIDIA H100 80GB HBM3", (9, 0), 9.895e14, 6.7e13, 3.35e12, 4.5e11, 79.1),
    "h100-pcie": _gpu("NVIDIA H100 PCIe", (9, 0), 7.56e14, 5.1e13, 2.0e12, 6.4e10, 79.1),
    "h100-nvl": _gpu("NVIDIA H100 NVL", (9, 0), 8.35e14, 6.0e13, 3.9e12, 3.0e11, 93.1),
    "h20": _gpu("NVIDIA H20", (9, 0), 1.48e14, 4.4e13, 4.0e12, 4.5e11, 95.0),
    "gh200": _gpu("NVIDIA GH200 480GB", (9, 0), 9.895e14, 6.7e13, 4.0e12, 4.5e11, 94.5),
    "h200": _gpu("NVIDIA H200", (9, 0), 9.895e14, 6.7e13, 4.8e12, 4.5e11, 139.8),
    "b200": _gpu("NVIDIA B200", (10, 0), 2.25e15, 7.5e13, 8.0e12, 9.0e11, 178.3),
    "mi300x": Device("cuda", "AMD Instinct MI300X", (8, 0), None, bandwidth_bytes_s=5.3e12, memory_bytes=191 * GIB),
}
# Sustained share of the datasheet's 16-bit matmul rate if a small power limit lowers the clock: on a T4 at 70 W cuBLAS
# sustained 24 of 65 TFLOP/s (forums.developer.nvidia.com/t/about-gpu-peak-performance/264462).
SUSTAINED = {"Tesla T4": 24 / 65}
# Ambiguous names, and the names of their products.
AMBIGUOUS = {
    "a100": ("a100-40", "a100-80"), "4060ti": ("4060ti-8", "4060ti-16"), "rtx4000": ("a4000", "4000ada"),
    "rtx5000": ("a5000", "5000ada"), "rtx6000": ("a6000", "6000ada", "rtxpro6000"),
}  # fmt: skip
# Rent in US dollars per hour and card: list prices, September to October 2026 (akash.network/pricing/gpus,
# openrelay.inc/pricing, verda.com/pricing). Prices change: they rank cards, and `--price` sets your own.
PRICES_USD_H = {
    "3090": 0.18, "4090": 0.29, "a100-40": 0.80, "a6000": 0.82, "rtxpro6000": 1.45, "a100-80": 1.71, "h100": 2.71,
    "h200": 4.45, "b200": 5.00,
}  # fmt: skip
# Other products of the same chip with different datasheets.
_VARIANTS = {
    "NVIDIA A100 80GB PCIe": dataclasses.replace(NAMED["a100-80"], bandwidth_bytes_s=1.935e12, link_bytes_s=3.2e10),
    "NVIDIA A100-PCIE-40GB": dataclasses.replace(NAMED["a100-40"], link_bytes_s=3.2e10),
}
_BY_NAME = {d.name: d for d in NAMED.values()} | _VARIANTS

CPU = Device("cpu", "cpu", (0, 0), None)

# Seconds per step of a ring over any network: NCCL's own cost model (hwLatencies in src/graph/tuning.cc: ring, protocol
# Simple). infiniband: one 400 Gb/s adapter per GPU, as in a DGX H100 (NVIDIA ConnectX-7, NDR). ethernet: one 100 Gb/s
# port per host (IEEE 802.3, 100GBASE).
STEP_S = 1.4e-5
PER_GPU, PER_HOST = {"infiniband": 5.0e10}, {"ethernet": 1.25e10}
NETWORKS = (*PER_GPU, *PER_HOST)

# Bytes/s to and from the host by major capability: PCI Express x16 in that generation's datasheets, one direction.
PCIE, PCIE_LATER = {7: 1.6e10, 8: 3.2e10}, 6.4e10
# Links of a host's devices without NVLink and peer access, and the variables that make NCCL use them. pcie: through
# host memory over PCI Express; socket: through a TCP socket of the host. The plan uses 0.70 of an assumed rate: NCCL's
# all-reduce ran at 28 and 4.4 GB/s between two H200s (docs/log/open.md), a step's communication at 0.8 of that (fitted
# to benchmarks/results/2xh200-gpus.jsonl; then 5 to 16 % too fast for 2xh200-gpus-large.jsonl).
SLOWER = {"pcie": "NCCL_P2P_DISABLE", "socket": "NCCL_SHM_DISABLE"}
PCIE_SHARE, SOCKET_S = 0.62 * 0.8, 6.3e9 * 0.8

# Share of a host's memory for activations and states; the rest is for the processes themselves. Unknown hosts are
# assumed to have HOST_A_CARD times a card's memory.
HOST_SHARE, HOST_A_CARD = 0.9, 2

_FREE = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)\s*gi?b")  # 24gib: a GPU with this memory and unknown rates
_WITH_HOST = re.compile(r"(.+)@([0-9]{1,7}(?:\.[0-9]{1,3})?)\s*gi?b")  # 4090@64gib: in a host with this memory
_LINKED = re.compile(rf"([^:]+):({'|'.join(SLOWER)})")  # 4xh200:pcie
_HOSTS = re.compile(r"([0-9]{1,5})x([0-9]{1,5}x[^:]+):(.+)")  # 2x8xh100:infiniband


def _unnamed(gib: float) -> Device:
    """Return a GPU with only its memory known, and Ampere kernels."""
    return Device("cuda", f"a GPU of {gib:g} GiB", (8, 0), None, memory_bytes=int(gib * GIB))


def parse_hardware(text: str) -> tuple[Device, int]:
    """Return the device of a `--hardware` name, and their number: "h200", "2xh200", "2x8xh200:infiniband", "auto".

    Devices of one host may have a slower link than the product: "4xh200:pcie", "4xh200:socket". "4090@64GiB" is in a
    host with this memory. `auto` has the link that NCCL's environment variables select.

    Raises:
        ConfigError: an unknown name; `auto` on a machine with different devices.
    """
    plain = re.sub(r"\s*([x*:])\s*", r"\1", text.lower().strip())
    plain = re.sub(r"(?<=[0-9])\*(?=\S)", "x", plain)  # 8*h100
    if hosted := _WITH_HOST.fullmatch(plain):
        if "@" in hosted[1]:
            raise ConfigError(f"the hardware {text}", "the host memory appears twice", "write it once")
        device, count = parse_hardware(hosted[1])
        if device.kind != "cuda" or not float(hosted[2]):
            raise ConfigError(f"the hardware {text}", "`@` without GPU or memory", "write for example 4090@64GiB")
        return dataclasses.replace(device, host_memory_bytes=int(float(hosted[2]) * GIB)), count
    behind = re.fullmatch(r"([a-z0-9][a-z0-9-]*[a-z0-9])[x*]([0-9]{1,5})", plain)
    if behind and behind[1] in {*NAMED, *AMBIGUOUS}:
        plain = f"{behind[2]}x{behind[1]}"  # h100x8
    if (linked := _LINKED.fullmatch(plain)) and not re.fullmatch(r"[0-9]+x[0-9]+x.+", linked[1]):
        device, count = parse_hardware(linked[1])
        if count < 2 or device.kind != "cuda":
            raise ConfigError(f"the hardware {text}", "a link for one device", f"write for example 2xh200:{linked[2]}")
        return over(device, linked[2]), count
    if "x" in plain and (":" in plain or re.fullmatch(r"[0-9]+x[0-9]+x.+", plain)):
        return _of_hosts(plain)
    several = re.fullmatch(r"([0-9]{1,5})x(.+)", plain)
    count, name = (int(several[1]), several[2]) if several else (1, plain)
    if count < 1:
        raise ConfigError(f"the hardware {text}", f"{count} devices", f"take {name}, or 2x{name}")
    if name == "auto" and not several:
        device = first_device()
        return over(device, turned_to()) if device.kind == "cuda" else device, 1
    if size := _FREE.fullmatch(name):
        if not float(size[1]):
            raise ConfigError(f"the hardware {text}", "a GPU without memory", "write for example 24GiB")
        return _unnamed(float(size[1])), count
    name = _card(name)
    if name in AMBIGUOUS:
        raise ConfigError(
            f"the hardware {text}", "several cards have this name", f"write {' or '.join(AMBIGUOUS[name])}"
        )
    if name == "cpu":
        return share_of_cpu(count), count
    if name not in NAMED:
        known = ", ".join(["auto", "cpu", *NAMED])
        close = difflib.get_close_matches(name, NAMED, 1) or _as_large(name)
        nearest = f"did you mean {' or '.join(f'`{n}`' for n in close)}? " if close else ""
        nearest = f"for a memory size write {name}GiB; " if re.fullmatch(r"[0-9]{1,3}", name) else nearest
        do = f"{nearest}for an unlisted card write its memory: 24GiB; for several: 2xh200; known: {known}"
        raise ConfigError(f"the hardware {text}", "no such name", do)
    return NAMED[name], count


def _as_large(name: str) -> list[str]:
    """Return the cards with the memory in a card's name ("5090d 24gb"), at most three."""
    sized = re.search(r"([0-9]{1,3})\s*gi?b", name)
    near = (n for n, d in NAMED.items() if sized and d.memory_bytes and 0.9 < d.memory_bytes / GIB / int(sized[1]) <= 1)
    return list(near)[-3:]


def _card(text: str) -> str:
    """Return the name of a card from another spelling: "rtx 4090", "A100 80GB", "NVIDIA H100-SXM5 80GB"."""

    def letters(name: str) -> str:
        plain = re.sub(r"(?<=[a-z0-9])[\s_-]+(?=[a-z0-9])", "", name)
        return re.sub(r"^rtx|(?<=[0-9])gi?b$|sxm[0-9]?", "", re.sub(r"^(nvidia|geforce|tesla)+", "", plain))

    names = {letters(device.name.lower()): name for name, device in NAMED.items()}  # the driver's names
    names |= {letters(name): name for name in (*NAMED, *AMBIGUOUS)}
    if (name := names.get(letters(text))) is not None:
        return name
    sized = re.fullmatch(r"(.+?)[\s-]+([0-9]{1,4})\s*gi?b", text)  # with the card's memory
    name = names.get(letters(sized[1])) if sized else None
    memory = NAMED[name].memory_bytes if name in NAMED else None
    if sized and name and memory and int(sized[2]) and abs(memory / GIB / int(sized[2]) - 1) < 0.1:
        return name
    return text


def _of_hosts(text: str) -> tuple[Device, int]:
    """Return a device of several hosts, and the number of devices in all of them."""
    parts = _HOSTS.fullmatch(text)
    if parts is None or parts[3] not in NETWORKS or int(parts[1]) < 2:
        single = ", ".join(f"2xh100:{link}" for link in SLOWER)
        example = f"write 2x8xh100:{NETWORKS[0]} (two hosts of 8); or {', '.join(NETWORKS[1:])}; within a host {single}"
        raise ConfigError(f"the hardware {text}", "hosts need their devices and the link between them", example)
    device, each = parse_hardware(parts[2])
    link = parts[3]
    network = Network(link, each * PER_GPU[link] if link in PER_GPU else PER_HOST[link], STEP_S)
    return dataclasses.replace(device, hosts=int(parts[1]), network=network), int(parts[1]) * each


def over(device: Device, link: str) -> Device:
    """Return GPUs of one host with a link of `SLOWER`; "": their own."""
    if not link:
        return device
    pcie = PCIE.get(device.capability[0], PCIE_LATER) * PCIE_SHARE
    rate = SOCKET_S if link == "socket" else pcie
    known = device.link_bytes_s is not None
    slower = min(rate, device.link_bytes_s or rate)
    return dataclasses.replace(device, link_bytes_s=slower if known else None, linked=link)


def turned_to(environment: Mapping[str, str] = os.environ) -> str:
    """Return the link of `SLOWER` selected by NCCL's environment variables; "": none."""
    off = [environment.get(name, "") == "1" for name in SLOWER.values()]
    return "" if not off[0] else "socket" if off[1] else "pcie"


def price_usd_h(device: Device) -> float | None:
    """Return the list price per hour of one card; None: unknown."""
    return next((usd for name, usd in PRICES_USD_H.items() if NAMED[name].name == device.name), None)


def first_priced() -> str:
    """Return the name of a card with a list price, the size of run used for comparisons."""
    return next(iter(PRICES_USD_H))


def counted(device: Device, count: int) -> str:
    """Format several devices, such as `2 x 8 x NVIDIA H200 (infiniband)` or `4 x NVIDIA H200 (pcie)`."""
    if device.network is None:
        return device.name if count == 1 else f"{count} x {device.name}{f' ({device.linked})' * bool(device.linked)}"
    return f"{device.hosts} x {count // device.hosts} x {device.name} ({device.network.name})"


@cache
def cpu() -> Device:
    """Return this machine's processor and memory, if known."""
    float32, half = _cpu_rates()
    return dataclasses.replace(
        CPU, half_flop_s=half, float32_flop_s=float32, bandwidth_bytes_s=2e10, link_bytes_s=5e9, memory_bytes=_memory()
    )


def share_of_cpu(ranks: int) -> Device:
    """Return each rank's share of this machine's memory, cores and bandwidth."""
    here = cpu()

    def share(total: float | None) -> float | None:
        return None if total is None else total / ranks

    return dataclasses.replace(
        here, half_flop_s=share(here.half_flop_s), float32_flop_s=share(here.float32_flop_s),
        bandwidth_bytes_s=share(here.bandwidth_bytes_s),
        memory_bytes=None if here.memory_bytes is None else here.memory_bytes // ranks,
    )  # fmt: skip


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


@dataclass
class HostMemory:
    """The limit and the use of host memory for this process' GPU data."""

    most_bytes: int | None  # None: unknown
    taken_bytes: int = 0

    @classmethod
    def of(cls, ranks: int) -> HostMemory:
        """Return the share of one of a host's `ranks` processes."""
        total = cpu().memory_bytes
        return cls(None if total is None else int(HOST_SHARE * total / ranks))

    @property
    def left_bytes(self) -> int | None:
        return None if self.most_bytes is None else max(0, self.most_bytes - self.taken_bytes)

    def take(self, size: int) -> None:
        """Count bytes before their allocation; raise MemoryError if they exceed the rest."""
        if self.most_bytes is not None and self.taken_bytes + size > self.most_bytes:
            taken, most = self.taken_bytes / GIB, self.most_bytes / GIB
            raise MemoryError(f"{taken:.1f} GiB of host memory in use, the limit of this process is {most:.1f}")
        self.taken_bytes += size


def room_on_host(device: Device, ranks: int) -> int | None:
    """Return the bytes of host memory that each of a host's `ranks` processes may use for its GPU's data.

    If the host is unknown, twice the GPU's memory, as NVIDIA recommends for training servers
    (https://docs.nvidia.com/certification-programs/nvidia-certified-configuration-guide). None: both are unknown, or
    the device is the host.
    """
    if device.kind == "cpu" or device.memory_bytes is None:
        return None
    known = device.host_memory_bytes
    return int(HOST_SHARE * (HOST_A_CARD * device.memory_bytes if known is None else known / ranks))


def _memory(root: str = "/") -> int | None:
    """Return this machine's memory, or the smallest limit of this process' containers."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    return min([total, *_limits(Path(root))])


def _limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of this process' control groups.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max), .../cgroup-v1/memory.html
    """
    try:
        groups = (root / "proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return
    for _, kinds, path in (line.split(":", 2) for line in groups if line.count(":") >= 2):
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):  # a container sees its own group at the top
            with suppress(OSError, ValueError):
                limit = int((top / group / ("memory.limit_in_bytes" if kinds else "memory.max")).read_text())
                if limit > 0:
                    yield limit


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
        devices.append(
            dataclasses.replace(
                facts, name=text, capability=capability, memory_bytes=memory, host_memory_bytes=cpu().memory_bytes
            )
        )
    return devices
