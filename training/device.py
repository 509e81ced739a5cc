"""What the hardware could do, and the share of it that training uses (MFU)."""

from __future__ import annotations

import ctypes
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from cli.options import ConfigError

# What the hardware could do, and the share of it that training uses (MFU).

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


# In which number format to compute: plain float32, or autocast to bfloat16 or float16.
#
# Weights, gradients and optimizer state are float32 always; autocast runs the matrix products in
# the narrow format. float16 has 5 exponent bits, so small gradients vanish: the loss is multiplied
# by a factor before backward and the gradients divided by it afterwards (Micikevicius et al. 2018).

# A training step in bfloat16 ran at 0.7 to 0.9 of float32's speed at width 128 and at 1.9 of it at
# width 384 with AMX; with AVX-512 BF16 at 1.0, 1.4 and 1.6 of it at widths 128, 256 and 384.
NARROW = 256


@dataclass(frozen=True)
class Precision:
    """A resolved dtype on a kind of device."""

    dtype: torch.dtype
    device_type: str

    def autocast(self) -> AbstractContextManager:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Active for float16 alone; otherwise it passes everything through."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype == torch.float16)


def pick_dtype(asked: str, device: torch.device, width: int) -> tuple[str, str]:
    """The dtype to use and why, ("bfloat16", "this GPU computes it natively").

    width: d_model. Converting costs a pass over the data, which only wide products repay on a CPU.

    Raises ConfigError for float16 on a CPU or an Apple GPU: slower there, and less exact.
    """
    if asked == "float16" and device.type != "cuda":
        raise ConfigError(
            f"run.dtype=float16 on {device.type}: it is made for CUDA GPUs; "
            "use --dtype=float32, or bfloat16"
        )
    if asked != "auto":
        return asked, "as set"
    if device.type == "cuda":
        if gpu_has_bfloat16_units(device):
            return "bfloat16", "this GPU computes it natively"
        return "float16", "this GPU has no bfloat16 units"
    if device.type == "cpu" and cpu_has_bfloat16_units():
        if width < NARROW:
            return "float32", f"the model is too narrow for bfloat16 to pay: {width} < {NARROW}"
        return "bfloat16", "this CPU multiplies it natively (AMX or AVX-512 BF16)"
    return "float32", "no faster format on this hardware"


def pick_attention(asked: str, device: torch.device) -> str:
    """The backend to use. On Apple GPUs the fused kernel has been silently wrong (non-contiguous
    and half-precision inputs), so there auto is the reference."""
    if asked != "auto":
        return asked
    return "reference" if device.type == "mps" else "sdpa"


def gpu_has_bfloat16_units(device: torch.device) -> bool:
    """torch says bfloat16 "works" on older GPUs too, where it is emulated and crawls."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def cpu_has_bfloat16_units() -> bool:
    """AMX or AVX-512 BF16: without, bfloat16 products on a CPU run at about half of float32's speed
    (with AVX-512 BF16 at 2.2 times it)."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)
