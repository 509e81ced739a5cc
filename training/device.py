"""The device a run computes on: peak speed and MFU, number formats, memory settings."""

from __future__ import annotations

import ctypes
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from cli.options import ConfigError

# Peak speed, and the fraction of it that training reaches (model FLOPs utilization, MFU)

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
    """Name the hardware; another kind rounds differently, so its bits differ."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def known_peak(gpu_name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a GPU by torch's name for it; None if it is not in the table.

    Whole words are compared ("A10" is not in "A100") and the longest match wins ("H100 PCIe" before
    "H100"). Part of a GPU (MIG) and laptop models have other peaks than their names say.
    """
    words = gpu_name.replace("-", " ").split()
    matches = [name for name in PEAKS if set(name.split()) <= set(words)]
    if not matches or "MIG" in words or "Laptop" in words:
        return None
    half, single = PEAKS[max(matches, key=len)]
    return single if dtype == torch.float32 else half


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of one device: from the table for a known GPU, else measured.

    None for devices that are neither in the table nor worth measuring (Apple GPUs).
    """
    if device.type == "cuda":
        known = known_peak(torch.cuda.get_device_name(device), dtype)
        return known or measured_peak(device, dtype, size=8192)
    if device.type == "cpu":
        return measured_peak(device, dtype, size=768)
    return None


def measured_peak(device: torch.device, dtype: torch.dtype, size: int, tries: int = 8) -> float:
    """Return the best FLOP/s of several square matrix products (2 size^3 operations each).

    They are short, so that some run without interruption even on a busy machine. Their numbers are
    random: multiplying ones takes a GPU less power, and so runs faster than training ever does.
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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, peak: float | None, world: int
) -> float | None:
    """Return the model's own FLOP/s as a fraction of the hardware's peak (PaLM, appendix B).

    tokens_per_second: of all ranks. peak: of one device; None gives None. The result is at most 1,
    since a measured peak may be too low.
    """
    if not peak:
        return None
    return min(1.0, tokens_per_second * flops_per_token / (peak * world))


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next step; False if it has no such setting.

    glibc returns large blocks to the system at once, and a training step frees all its activations:
    every step would fault its memory in again, page by page (5 to 15% of a step on a CPU). The
    largest blocks, logits, are still returned: kept ones would be split up and could not be reused
    for logits, which would raise the peak.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, mmap_threshold = -1, -3  # <malloc.h>
    return bool(mallopt(mmap_threshold, 2**26) and mallopt(trim_threshold, 2**31 - 1))


# Number formats: plain float32, or autocast to bfloat16 or float16
#
# Weights, gradients and optimizer state are always float32; autocast runs matrix products in the
# narrow format. float16 has 5 exponent bits, so small gradients would become 0: the loss is
# multiplied by a factor before backward and the gradients are divided by it afterwards
# (Micikevicius et al. 2018). bfloat16 has float32's 8 exponent bits and needs no factor.

# Relative speed of a training step in bfloat16, float32 = 1: 0.7 to 0.9 at width 128 and 1.9 at
# width 384 with AMX; 1.0, 1.4 and 1.6 at widths 128, 256 and 384 with AVX-512 BF16.
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
        """Return a scaler that is active for float16 only and otherwise passes everything on."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype == torch.float16)


def pick_dtype(asked: str, device: torch.device, width: int) -> tuple[str, str]:
    """Choose the dtype and say why: ("bfloat16", "native on this GPU").

    width: d_model. Casting is a pass over the data, which only wide products repay on a CPU.

    Raises ConfigError for float16 on anything but CUDA: it is slower there, and less exact.
    """
    if asked == "float16" and device.type != "cuda":
        raise ConfigError(
            f"run.dtype=float16 on {device.type}: only CUDA GPUs gain from it; "
            "use --dtype=float32 or bfloat16"
        )
    if asked != "auto":
        return asked, "as set"
    if device.type == "cuda":
        if gpu_has_bfloat16_units(device):
            return "bfloat16", "native on this GPU"
        return "float16", "no bfloat16 on this GPU"
    if device.type == "cpu" and cpu_has_bfloat16_units():
        if width < NARROW:
            return "float32", "model too narrow for bfloat16"
        return "bfloat16", "native on this CPU"
    return "float32", "nothing faster on this hardware"


Attention = Literal["reference", "tiled", "sdpa"]


def pick_attention(asked: Attention | Literal["auto"], device: torch.device) -> Attention:
    """Choose the attention backend.

    On Apple GPUs the fused kernel has been silently wrong (non-contiguous and half-precision
    inputs), so auto means the reference there.
    """
    if asked != "auto":
        return asked
    return "reference" if device.type == "mps" else "sdpa"


def gpu_has_bfloat16_units(device: torch.device) -> bool:
    """Return whether bfloat16 is native; torch also "supports" older GPUs, by slow emulation."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def cpu_has_bfloat16_units() -> bool:
    """Return whether the CPU has AMX or AVX-512 BF16.

    Without them bfloat16 products run at half of float32's speed, with AVX-512 BF16 at 2.2 times.
    """
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)
