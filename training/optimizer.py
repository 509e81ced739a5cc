"""AdamW, or Muon for the hidden matrices and AdamW for the rest, behind one facade."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from model.gpt import GPT
from training.config import OptimConfig


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024): every direction of a matrix moves alike.

    The update is the nearest orthogonal matrix to Nesterov momentum, found by five Newton-Schulz
    iterations, times lr sqrt(max(1, rows / columns)). Matrices of one shape are done in one batch.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for matrices in by_shape.values():
                self._step_alike(matrices, group)

    def _step_alike(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = [p.grad for p in params]
        buffers = [
            self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
            for p in params
        ]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, buffers, group["momentum"])  # Nesterov
        updates = orthogonalise(torch.stack(ahead)).to(params[0].dtype)
        rows, columns = params[0].shape
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        torch._foreach_add_(params, list(updates.unbind()), alpha=-scale)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values of each matrix near 1: (N, rows, columns), same shape out.

    Newton-Schulz iteration with the quintic of Jordan et al. 2024, whose slope at 0 is steep:
    singular values end between about 0.7 and 1.2. In bfloat16 on GPUs, which it tolerates; in
    float32 on CPUs, so that the bits do not depend on the CPU's units.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    wide = x.shape[1] <= x.shape[2]
    if not wide:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT  # (N, small, small)
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x if wide else x.mT


class Optimizers:
    """One optimizer to GradScaler and the loop: joined groups, one step, tensors by name.

    One facade matters with float16: given two optimizers, GradScaler would step one while it skips
    the other's non-finite gradients.
    """

    def __init__(self, model: GPT, config: OptimConfig, device_type: str) -> None:
        named = dict(model.named_parameters())  # a tied weight appears once
        hidden = [
            n
            for n, p in named.items()
            if config.optimizer == "muon" and p.dim() == 2 and n.startswith("layers.")
        ]
        decayed = [n for n, p in named.items() if p.dim() > 1 and n not in set(hidden)]
        plain = [n for n, p in named.items() if p.dim() == 1]
        self.names = {"muon": hidden, "decay": decayed, "no_decay": plain}
        self._named = named
        groups = [
            {"params": [named[n] for n in decayed], "weight_decay": config.weight_decay},
            {"params": [named[n] for n in plain], "weight_decay": 0.0},
        ]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [g for g in groups if g["params"]],
                lr=config.lr,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                fused=device_type in ("cpu", "cuda"),  # one kernel over all tensors
            )
        ]
        if hidden:
            matrices = [named[n] for n in hidden]
            self.parts.append(Muon(matrices, config.muon_lr, config.momentum, config.weight_decay))
        for group in self.param_groups:
            group["peak_lr"] = group["lr"]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def set_lr(self, factor: float) -> None:
        """Every learning rate becomes its own peak times `factor`."""
        for group in self.param_groups:
            group["lr"] = group["peak_lr"] * factor

    @property
    def lr(self) -> float:
        """The AdamW groups' learning rate, the one that is logged."""
        return self.param_groups[0]["lr"]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for p in self._named.values():
            p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor of state, named `parameter::slot`."""
        found = {}
        for name, p in self._named.items():
            for part in self.parts:
                for slot, value in part.state.get(p, {}).items():
                    found[f"{name}::{slot}"] = value
        return found

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave. Raises ValueError naming what does not fit."""
        of_part = {p: part for part in self.parts for g in part.param_groups for p in g["params"]}
        for full_name, value in tensors.items():
            name, _, slot = full_name.rpartition("::")
            p = self._named.get(name)
            if p is None:
                raise ValueError(f"optimizer state for {name!r}, which the model does not have")
            if value.dim() and value.shape != p.shape:
                shapes = f"{tuple(value.shape)}, expected {tuple(p.shape)}"
                raise ValueError(f"optimizer state {full_name}: shape {shapes}")
            # AdamW's step counter stays a float32 scalar; its device is the parameter's when fused.
            of_part[p].state[p][slot] = value.to(p.device).clone()
