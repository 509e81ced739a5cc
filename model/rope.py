"""Rotary position embedding (Su et al. 2021, "RoFormer"), in the half-split layout.

A head of width D is D/2 planes; plane i joins coordinate i with coordinate i + D/2. Position p
rotates plane i of queries and keys by the angle p / theta^(2i/D). The score of a query and a key
then depends on the distance of their positions alone, because rotating both by the same angle does
not change a dot product.

The planes turn at different speeds, like the hands of a clock: the first by one radian per
position, the last almost theta times slower. Fast planes tell neighbors apart, slow ones tell near
from far. theta = 10000 comes from the paper; long contexts use more, so that the slowest plane does
not come round (Llama 3: 500000).

The paper pairs neighbors (2i, 2i+1); Hugging Face pairs halves. The two differ by a permutation of
the projections' rows. With halves, checkpoints can be exchanged with Hugging Face as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.config import ResolvedConfig


def rope_frequencies(config: ResolvedConfig) -> Tensor:
    """Return the angle per position of each plane, (D/2,), float64.

    Plain: theta^(-2i/D). With `rope_scaling=llama3`, as in Llama 3.1: wavelengths longer than the
    original context are stretched by `rope_factor`, those below a quarter of it are kept, and the
    frequencies in between are interpolated.
    """
    D = config.d_head
    frequencies = config.rope_theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    if config.rope_scaling == "none":
        return frequencies
    low, high = 1.0, 4.0  # Llama 3's own constants: rotations within the original context
    turns = config.rope_original_context * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: high frequency, unchanged
    return keep * frequencies + (1 - keep) * frequencies / config.rope_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each plane of x (B, H, T, D) by its position's angle; the result has x's dtype.

    cos, sin: (T, D/2), float32, from `Rope`.
    """
    x1, x2 = x.chunk(2, dim=-1)  # (B, H, T, D/2) each
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


class Rope(nn.Module):
    """Tables of cos and sin for every position of the context, (context_length, D/2).

    They stay float32 when the model is cast: bfloat16 has 8 bits of precision, so from position 256
    on neighbors would share an angle.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__()
        self.config = config
        self._build(torch.empty(0).device)

    def _build(self, device: torch.device) -> None:
        positions = torch.arange(self.config.context_length, dtype=torch.float64)
        angles = positions[:, None] * rope_frequencies(self.config)  # (context, D/2)
        # Not persistent: the tables follow from the config, so checkpoints do not hold them.
        self.register_buffer("cos", angles.cos().float().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().float().to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        """Follow .to(), .cuda() and .bfloat16() to the device, but not to the dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # PyTorch's has no types
        self._build(self.cos.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin for positions (T,), (T, D/2) each."""
        return self.cos[positions], self.sin[positions]
