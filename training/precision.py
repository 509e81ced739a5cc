"""In which number format to compute: plain float32, or autocast to bfloat16 or float16.

Weights, gradients and optimizer state are float32 always; autocast runs the matrix products in the
narrow format. float16 has 5 exponent bits, so small gradients vanish: the loss is multiplied by a
factor before backward and the gradients divided by it afterwards (Micikevicius et al. 2018).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from cli.options import ConfigError

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
