"""AdamW, or Muon for the hidden matrices and AdamW for the rest, behind one facade.

Both are plain classes, not torch.optim.Optimizer: to build one of those imports the compiler, which
takes as long as importing torch. The arithmetic of AdamW is torch's own function all the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from cli.options import ConfigError
from model.gpt import GPT
from training.config import OptimConfig, ScheduleConfig
from training.device import gpu_has_bfloat16_units

# The learning rate as a pure function of progress, so that nothing about it has to be saved.


def lr_factor(step: int, max_steps: int, config: ScheduleConfig) -> float:
    """What every learning rate is multiplied by in the update number `step` + 1, in (0, 1].

    step counts from 0 to max_steps - 1. Warm-up rises linearly over warmup_steps and is above 0 at
    once. The rest of the run
      constant  stays at 1;
      cosine    falls to min_lr_ratio along half a cosine (Loshchilov & Hutter 2016);
      wsd       stays at 1 and falls linearly over the last decay_fraction of the run
                (Zhai et al. 2022; Hu et al. 2024, "MiniCPM").
    The falling part ends one step after the last: the last update still moves a little. Where
    warm-up reaches into it, the lower of the two holds.
    """
    warmup = min(config.warmup_steps, max_steps)
    rising = min(1.0, (step + 1) / (warmup + 1))
    left = max_steps - step
    if config.schedule == "constant":
        return rising
    if config.schedule == "cosine":
        fallen = 1 - min(1.0, left / max(1, max_steps - warmup))
        shape = 0.5 * (1 + math.cos(math.pi * fallen))
    else:
        shape = min(1.0, left / max(1.0, config.decay_fraction * max_steps))
    return min(rising, config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


Group = dict[str, Any]  # "params": list[Tensor], "lr", and the optimizer's own options


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2017), bit for bit torch.optim's.

    fused: one kernel over all tensors of a group, instead of some for each.
    """

    def __init__(self, groups: list[Group], *, fused: bool) -> None:
        self.param_groups, self.fused = groups, fused
        self.state = {
            p: {
                "step": torch.zeros((), device=p.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(p, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
            }
            for group in groups
            for p in group["params"]
        }

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            adamw(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=self.fused,
                amsgrad=False,
                maximize=False,
                lr=group["lr"],
                beta1=group["beta1"],
                beta2=group["beta2"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )


class Muon:
    """Momentum, orthogonalised (Jordan et al. 2024): every direction of a matrix moves alike.

    The update is the nearest orthogonal matrix to Nesterov momentum, found by five Newton-Schulz
    iterations, times lr sqrt(max(1, rows / columns)). Matrices of one shape are done in one batch.

    dtype: what the iterations compute in; they tolerate bfloat16.
    """

    def __init__(self, groups: list[Group], dtype: torch.dtype = torch.float32) -> None:
        self.param_groups, self.dtype = groups, dtype
        self.state = {
            p: {"momentum": torch.zeros_like(p, requires_grad=False)}
            for group in groups
            for p in group["params"]
        }

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for matrices in by_shape.values():
                self._step_alike(matrices, group)

    def _step_alike(self, params: list[Tensor], group: Group) -> None:
        grads = [p.grad for p in params]
        averages = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, averages, group["momentum"])  # Nesterov
        updates = orthogonalise(torch.stack(ahead).to(self.dtype)).to(params[0].dtype)
        rows, columns = params[0].shape
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        torch._foreach_add_(params, list(updates.unbind()), alpha=-scale)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values of each matrix near 1: (N, rows, columns), same shape out.

    Newton-Schulz iteration with the quintic of Jordan et al. 2024, whose slope at 0 is steep:
    singular values end between about 0.7 and 1.2.
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    small, large = x.shape[1:]
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if 2 * small <= large and x.dtype == torch.float32:
        x = _newton_schulz_by_gram(x, steps)
    else:
        for _ in range(steps):
            x = _quintic(x @ x.mT) @ x
    return x if wide else x.mT


def _quintic(gram: Tensor) -> Tensor:
    """P = a I + b G + c G^2 of G = X X^T; P X is one iteration. (N, small, small)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    p.diagonal(dim1=1, dim2=2).add_(a)
    return p


def _newton_schulz_by_gram(x: Tensor, steps: int) -> Tensor:
    """The same iterations of a wide X, (N, small, large), at 0.6 of the time.

    What multiplies X can be found from G alone: after one iteration it is P G P. X itself comes in
    once at the end. (G holds the squares of singular values: in bfloat16 the small ones were lost.)
    """
    gram = x @ x.mT
    p = product = _quintic(gram)
    for _ in range(steps - 1):
        gram = p @ gram @ p
        p = _quintic(gram)
        product = p @ product
    return product @ x


class Optimizers:
    """One optimizer to GradScaler and the loop: joined groups, one step, tensors by name.

    One facade matters with float16: given two optimizers, GradScaler would step one while it skips
    the other's non-finite gradients.

    dtype: the run's. Muon's products are in bfloat16 where the run's are, and on GPUs that have
    units for it.
    """

    def __init__(
        self,
        model: GPT,
        config: OptimConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._named = dict(model.named_parameters())  # a tied weight appears once
        self.names = group_names(self._named, config.optimizer == "muon")
        options = {"lr": config.lr, "beta1": config.beta1, "beta2": config.beta2, "eps": config.eps}
        decays = {"decay": config.weight_decay, "no_decay": 0.0}
        groups = [
            {"params": self._of(name), "weight_decay": decay, **options}
            for name, decay in decays.items()
        ]
        fused = device.type in ("cpu", "cuda")
        self.parts: list[AdamW | Muon] = [AdamW(groups, fused=fused)]
        if self.names["muon"]:
            options = {"lr": config.muon_lr, "momentum": config.momentum}
            options["weight_decay"] = config.weight_decay
            gpu = device.type == "cuda" and gpu_has_bfloat16_units(device)
            products = torch.bfloat16 if gpu or dtype == torch.bfloat16 else torch.float32
            self.parts.append(Muon([{"params": self._of("muon"), **options}], products))
        for group in self.param_groups:
            group["peak_lr"] = group["lr"]

    def _of(self, group: str) -> list[Tensor]:
        return [self._named[name] for name in self.names[group]]

    @property
    def param_groups(self) -> list[Group]:
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
        """Every tensor of state, named `parameter::slot`. The state itself, no copies."""
        of_parameter = {p: slots for part in self.parts for p, slots in part.state.items()}
        return {
            f"{name}::{slot}": value
            for name, p in self._named.items()
            for slot, value in of_parameter[p].items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state_tensors` gave. Raises ConfigError naming all that does not fit."""
        own = self.state_tensors()
        problems = [f"optimizer state {name} is missing" for name in own.keys() - tensors.keys()]
        problems += [f"optimizer state {name} is extra" for name in tensors.keys() - own.keys()]
        for name in own.keys() & tensors.keys():
            if own[name].shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)}, expected {tuple(own[name].shape)}"
                problems.append(f"optimizer state {name}: shape {shapes}")
        if problems:
            raise ConfigError(sorted(problems))
        for name, value in own.items():
            value.copy_(tensors[name])


def group_names(parameters: dict[str, Tensor], muon: bool) -> dict[str, list[str]]:
    """Which parameters are whose: {"muon": ..., "decay": ..., "no_decay": ...}, each name once.

    Muon has the matrices inside the blocks, where "every direction alike" makes sense: rows of an
    embedding are looked up one by one. Norms and biases are not decayed.
    """
    groups: dict[str, list[str]] = {"muon": [], "decay": [], "no_decay": []}
    for name, p in parameters.items():
        if p.dim() < 2:
            groups["no_decay"].append(name)
        elif muon and name.startswith("layers."):
            groups["muon"].append(name)
        else:
            groups["decay"].append(name)
    return groups
