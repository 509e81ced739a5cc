"""LoRA: thin matrices trained beside frozen ones (Hu et al. 2021, arxiv.org/abs/2106.09685).

What fine-tuning adds to a matrix is nearly of low rank. So W (out, in) stays as it is, and
A (r, in) and B (out, r) are trained:

    y = W x + (alpha / r) B A x

Gradients and the optimizer's state, three times as large as the weights with AdamW, exist for A and
B alone. W + (alpha / r) B A computes the same afterwards, without the two products (`merged`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cli.options import ConfigError
from model.gpt import GPT

ADAPTERS = ("lora_a", "lora_b")


class LoraLinear(nn.Linear):
    """y = W x + scale B A x, and the bias if there is one: (..., in) -> (..., out)."""

    lora_a: nn.Parameter  # (r, in)
    lora_b: nn.Parameter  # (out, r)
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.lora_a) * self.scale  # (..., r)
        return super().forward(x) + F.linear(low, self.lora_b)


def add_lora(model: GPT, rank: int, alpha: float, seed: int | None) -> None:
    """Freeze the model and give every linear layer of its blocks an adapter.

    seed: of A, see GPT.initial_weight; None leaves the adapters undefined. B starts at zero: the
    model computes what it did, and A must not be zero too, or neither would have a gradient.
    """
    model.requires_grad_(False)
    for path, module in model.layers.named_modules(prefix="layers"):
        if not isinstance(module, nn.Linear):
            continue
        module.__class__ = LoraLinear  # the same object: names and weights stay
        assert isinstance(module, LoraLinear)
        module.scale = alpha / rank
        module.lora_a = nn.Parameter(module.weight.new_empty(rank, module.in_features))
        module.lora_b = nn.Parameter(module.weight.new_empty(module.out_features, rank))
        if seed is not None and not module.weight.is_meta:
            for name in ADAPTERS:
                value = model.initial_weight(f"{path}.{name}", seed)
                module.get_parameter(name).data.copy_(value)


def merged(
    tensors: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Return the weights with the adapters added in; scale: alpha / rank.

    Raises ConfigError for adapters that do not fit the weights.
    """
    result, problems = dict(tensors), []
    for path in sorted({name.rpartition(".")[0] for name in adapters}):
        names = (f"{path}.weight", *(f"{path}.{name}" for name in ADAPTERS))
        try:
            weight, a, b = result[names[0]], adapters[names[1]], adapters[names[2]]
            result[names[0]] = torch.addmm(weight, b, a, alpha=scale)
        except (KeyError, RuntimeError) as error:  # one is missing; shapes
            problems.append(f"{path}: the adapter does not fit the weight: {error}")
    if problems:
        raise ConfigError(problems)
    return result
