"""Norms and MLPs.

To add one: write the class, put it into the dict at the end of this file, and add its name to the
choices in ModelConfig. An MLP is (B, T, C) -> (B, T, C); its last projection is `down_proj`, which
starts at 0, and `gated` says whether two projections are multiplied, see ModelConfig.resolved.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


# While training on a CPU, model/fast.py may replace the forward and backward pass of this class.
class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

    LayerNorm without the mean and the bias: cheaper, and as good in practice.
    """

    def __init__(self, width: int, eps: float, bias: bool = False) -> None:
        super().__init__()  # RMSNorm has no bias; the argument keeps one signature for all norms
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        # PyTorch takes the mean of the squares in float32 whatever x is: in bfloat16, with its 8
        # bits, a sum of hundreds of squares would stop growing. The result has x's dtype: autocast
        # on GPUs would return float32, and leave queries and keys in it.
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps).type_as(x)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias per position (Ba et al. 2016)."""

    def __init__(self, width: int, eps: float, bias: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU variants improve Transformer").

    The gate decides, unit by unit and token by token, how much of `up` passes.
    """

    gated = True

    def __init__(self, d_model: int, d_mlp: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_mlp, bias=bias)
        self.up_proj = nn.Linear(d_model, d_mlp, bias=bias)
        self.down_proj = nn.Linear(d_mlp, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)  # (B, T, C) -> (B, T, M)
        out: Tensor = self.down_proj(hidden)  # (B, T, C)
        return out


class GELU(nn.Module):
    """down(gelu(up(x))), with GPT-2's tanh approximation of GELU (Hendrycks & Gimpel 2016)."""

    gated = False
    approximate = "tanh"

    def __init__(self, d_model: int, d_mlp: int, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = nn.Linear(d_model, d_mlp, bias=bias)
        self.down_proj = nn.Linear(d_mlp, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up_proj(x), approximate=self.approximate)  # (B, T, M)
        out: Tensor = self.down_proj(hidden)  # (B, T, C)
        return out


class GELUErf(GELU):
    """GELU as it is defined, x Phi(x), as in nanoGPT; three times as fast on CPUs."""

    approximate = "none"


class ReLU2(nn.Module):
    """down(relu(up(x))^2) (So et al. 2021, "Primer")."""

    gated = False

    def __init__(self, d_model: int, d_mlp: int, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = nn.Linear(d_model, d_mlp, bias=bias)
        self.down_proj = nn.Linear(d_mlp, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up_proj(x))  # (B, T, M)
        # A product: pow is slower, forward and backward.
        out: Tensor = self.down_proj(hidden * hidden)  # (B, T, C)
        return out


NORMS = {"rms": RMSNorm, "layer": LayerNorm}


class MLP(Protocol):
    """A class of MLPs, (B, T, C) -> (B, T, C)."""

    gated: bool  # has a second projection, which multiplies the first

    def __call__(self, d_model: int, d_mlp: int, bias: bool) -> nn.Module: ...


MLPS: dict[str, MLP] = {
    "swiglu": SwiGLU,
    "gelu": GELU,
    "gelu_erf": GELUErf,
    "relu2": ReLU2,
}
