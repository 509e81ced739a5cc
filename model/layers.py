"""Norms and MLPs. To add one: write the module, name it in the dict below and in ModelConfig."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float, bias: bool = False) -> None:
        super().__init__()  # RMSNorm has no bias; the argument keeps one signature for all norms
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        # Autocast on GPUs would widen narrow queries and keys to float32, and leave them so. (The
        # mean of the squares is in float32 all the same.)
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


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
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU variants improve Transformer")."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_mlp, bias=config.bias)
        self.up_proj = nn.Linear(config.d_model, config.d_mlp, bias=config.bias)
        self.down_proj = nn.Linear(config.d_mlp, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # (B, T, M) -> (B, T, C)


class GELU(nn.Module):
    """down(gelu(up(x))), GELU in its tanh form, as GPT-2 has it (Hendrycks & Gimpel 2016)."""

    approximate = "tanh"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.d_model, config.d_mlp, bias=config.bias)
        self.down_proj = nn.Linear(config.d_mlp, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate=self.approximate))


class GELUErf(GELU):
    """The same with GELU as it is defined, x Phi(x): nanoGPT's; on CPUs three times as fast."""

    approximate = "none"


class ReLU2(nn.Module):
    """down(relu(up(x))^2) (So et al. 2021, "Primer")."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.d_model, config.d_mlp, bias=config.bias)
        self.down_proj = nn.Linear(config.d_mlp, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up_proj(x))  # (B, T, M)
        return self.down_proj(hidden * hidden)  # a product: pow is slower, forward and backward


NORMS = {"rms": RMSNorm, "layer": LayerNorm}
MLPS = {"swiglu": SwiGLU, "gelu": GELU, "gelu_erf": GELUErf, "relu2": ReLU2}
