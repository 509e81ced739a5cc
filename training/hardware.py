"""What the hardware could do, and the share of it that training uses (MFU)."""

from __future__ import annotations

import ctypes
import platform
import time

import torch

# Dense bfloat16/float16 and float32 (TF32 off) peaks in FLOP/s, from the vendors' datasheets.
PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250e12, 75e12),
    "H200 NVL": (835e12, 60e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090 Ti": (80e12, 40e12),
    "RTX 3090": (71e12, 35.6e12),
}


def hardware_name(device: torch.device) -> str:
    """What computes: another kind rounds in other places, so the bits are its own."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def known_peak(gpu_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU by the name that torch gives it; None if it is not in the table.

    Whole words count: "A10" is not in "A100". The longest name that is in it wins: "H100 PCIe"
    before "H100". A part of a GPU (MIG) or its laptop form has another peak than its name says.
    """
    words = gpu_name.replace("-", " ").split()
    matches = [name for name in PEAKS if set(name.split()) <= set(words)]
    if not matches or "MIG" in words or "Laptop" in words:
        return None
    half, single = PEAKS[max(matches, key=len)]
    return single if dtype == torch.float32 else half


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of one device, from the table for a known GPU, else measured by a matrix product.

    None on a device that is neither known nor worth measuring.
    """
    if device.type == "cuda":
        known = known_peak(torch.cuda.get_device_name(device), dtype)
        return known or measured_peak(device, dtype, size=8192)
    if device.type == "cpu":
        return measured_peak(device, dtype, size=768)
    return None


def measured_peak(device: torch.device, dtype: torch.dtype, size: int, tries: int = 8) -> float:
    """The best of some square matrix products, in FLOP/s (2 size^3 operations each).

    Short ones, so that on a busy machine one of them is not interrupted. Of numbers at random: a
    GPU that multiplies ones draws less power, and is faster than it ever is in training.
    """
    rng = torch.Generator(device).manual_seed(0)
    a = torch.empty(size, size, dtype=dtype, device=device).normal_(generator=rng)
    best = float("inf")
    for _ in range(tries):
        _synchronize(device)
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def model_flops_utilisation(
    tokens_per_second: float, flops_per_token: float, peak: float | None, world: int
) -> float | None:
    """The share of the hardware's peak that the model's own arithmetic reaches (PaLM, appendix B).

    tokens_per_second counts all ranks, peak is one device's. None without a peak. At most 1: a
    measured peak can be short of the truth, a share cannot be above it.
    """
    if not peak:
        return None
    return min(1.0, tokens_per_second * flops_per_token / (peak * world))


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed for the next step; False where it has no such setting.

    glibc gives large blocks back at once, and a training step frees all its activations: each step
    would fault its memory in again, page by page (5 to 15% of a step on a CPU). The largest blocks,
    logits, still go back: what is kept could not be joined for them, and the peak would be higher.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, mmap_threshold = -1, -3  # <malloc.h>
    return bool(mallopt(mmap_threshold, 2**26) and mallopt(trim_threshold, 2**31 - 1))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
