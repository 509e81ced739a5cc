"""Learning-rate schedule and optimizers: AdamW, or Muon for hidden matrices and AdamW for the rest.

AdamW and Muon here are plain classes, not torch.optim.Optimizer: constructing one of those imports
the compiler, which takes as long as importing torch. The arithmetic of AdamW is torch's own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from cli.options import ConfigError
from model.gpt import GPT
from model.lora import ADAPTERS
from training.config import OptimConfig, ScheduleConfig
from training.device import gpu_has_bfloat16_units

Group = dict[str, Any]  # "params": list[Tensor], "lr", and the optimizer's own options


def lr_factor(step: int, max_steps: int, config: ScheduleConfig) -> float:
    """Return the factor of every learning rate in update `step` + 1, in (0, 1].

    step: from 0 to max_steps - 1. Warmup rises linearly over warmup_steps, from above 0. After it
      constant  stays at 1;
      cosine    falls to min_lr_ratio along half a cosine (Loshchilov & Hutter 2016);
      wsd       stays at 1 and falls linearly over the last decay_fraction of the run
                (Zhai et al. 2022; Hu et al. 2024, "MiniCPM").
    The decay ends one step after the last, so the last update still moves a little. Where warmup
    and decay overlap, the lower of the two counts. A pure function: nothing has to be saved.
    """
    # Warmup: Adam's averages start at 0, so its first updates are all of full size, whatever their
    # gradients. At the peak rate they could wreck the weights before the averages mean anything.
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


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2017), bit for bit torch.optim's.

    exp_avg is a running mean of the gradient (beta1), exp_avg_sq of its square (beta2). The update
    is exp_avg / (sqrt(exp_avg_sq) + eps): about the same size for every weight, however large its
    gradients are. eps matters only for weights that hardly have any.

    fused: one kernel over all tensors of a group, instead of several per tensor.
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
    """Momentum, orthogonalized (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    The gradient of a matrix has few large singular values and many small ones. Its nearest
    orthogonal matrix has them all at 1, so that rare directions are learned as fast as dominant
    ones. The update is that matrix, of Nesterov momentum, found by Newton-Schulz iteration.

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
            for matrices in by_shape.values():  # one batched product instead of many small ones
                self._step_matrices(matrices, group)

    def _step_matrices(self, params: list[Tensor], group: Group) -> None:
        grads = [p.grad for p in params if p.grad is not None]  # all of them
        averages = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, averages, group["momentum"])  # Nesterov
        updates = orthogonalize(torch.stack(ahead).to(self.dtype)).to(params[0].dtype)
        rows, columns = params[0].shape
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        # An orthogonal matrix with more rows than columns makes its output sqrt(columns / rows) as
        # large per element as its input. The factor undoes that, so one rate suits every shape.
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        torch._foreach_add_(params, list(updates.unbind()), alpha=-scale)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values of each matrix near 1: (N, rows, columns), same shape out.

    Newton-Schulz iteration: an odd polynomial of a matrix keeps its singular vectors and applies
    the polynomial to its singular values. Matrix products are all it needs, which hardware does
    well, unlike an SVD. Five steps raise a small singular value about 3.4^5 = 480 times: all above
    1/600 of the norm end between 0.7 and 1.2. A sixth would help only what is hardly there.
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT  # X X^T is the smaller of the two Gram matrices
    small, large = x.shape[1:]
    # The Frobenius norm is at least the largest singular value; one above 1.2 or so would diverge.
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if 2 * small <= large and x.dtype == torch.float32:
        x = _newton_schulz_by_gram(x, steps)
    else:
        for _ in range(steps):
            x = _quintic(x @ x.mT) @ x
    return x if wide else x.mT


def _quintic(gram: Tensor) -> Tensor:
    """Return P = a I + b G + c G^2 for G = X X^T; P X is one iteration. (N, small, small).

    The coefficients are those of Jordan et al. 2024: the steepest slope at 0 (a), so that small
    singular values grow fast, for which the iteration still stays between 0.7 and 1.2. It does
    not converge to 1 exactly; training does not mind.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    p.diagonal(dim1=1, dim2=2).add_(a)
    return p


def _newton_schulz_by_gram(x: Tensor, steps: int) -> Tensor:
    """Do the same iterations of a wide X, (N, small, large), in 0.6 of the time.

    The factors of X depend on G alone, which is P G P after one iteration, so X itself is
    multiplied once, at the end. Not in bfloat16: G holds the squares of the singular values, and
    the small ones would be lost.
    """
    gram = x @ x.mT
    p = product = _quintic(gram)
    for _ in range(steps - 1):
        gram = p @ gram @ p
        p = _quintic(gram)
        product = p @ product
    return product @ x


class Optimizers:
    """All optimizers of a run behind one interface: joined groups, one step, tensors by name.

    float16 needs it: given two optimizers, GradScaler would step one and skip the other if only the
    other's gradients overflowed.

    dtype: the run's. Muon's products are in bfloat16 if the run's are, and on GPUs with bfloat16
    units.
    """

    def __init__(
        self,
        model: GPT,
        config: OptimConfig,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._named = model.trained_parameters()  # a tied weight appears once
        names = group_names(self._named, config.optimizer == "muon")
        members = {group: [self._named[name] for name in names[group]] for group in names}
        options = {"lr": config.lr, "beta1": config.beta1, "beta2": config.beta2, "eps": config.eps}
        groups = [
            {"params": members["decay"], "weight_decay": config.weight_decay, **options},
            {"params": members["no_decay"], "weight_decay": 0.0, **options},
        ]
        fused = device.type in ("cpu", "cuda")
        self.parts: list[AdamW | Muon] = [AdamW(groups, fused=fused)]
        if members["muon"]:
            options = {"lr": config.muon_lr, "momentum": config.momentum}
            options["weight_decay"] = config.weight_decay
            gpu = device.type == "cuda" and gpu_has_bfloat16_units(device)
            products = torch.bfloat16 if gpu or dtype == torch.bfloat16 else torch.float32
            self.parts.append(Muon([{"params": members["muon"], **options}], products))
        for group in self.param_groups:
            group["peak_lr"] = group["lr"]

    @property
    def param_groups(self) -> list[Group]:
        return [group for part in self.parts for group in part.param_groups]

    def set_lr(self, factor: float) -> None:
        """Set every learning rate to its own peak times `factor`."""
        for group in self.param_groups:
            group["lr"] = group["peak_lr"] * factor

    @property
    def lr(self) -> float:
        """The learning rate of AdamW, which is the one that is logged."""
        return self.param_groups[0]["lr"]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for p in self._named.values():
            p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Return every tensor of state, named `parameter::slot`, without copying."""
        slots = {p: state for part in self.parts for p, state in part.state.items()}
        return {
            f"{name}::{slot}": value
            for name, p in self._named.items()
            for slot, value in slots[p].items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` returned. Raises ConfigError listing every mismatch."""
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


def group_names(parameters: Mapping[str, Tensor], muon: bool) -> dict[str, list[str]]:
    """Sort parameter names into {"muon": ..., "decay": ..., "no_decay": ...}, each name once.

    Weight decay is for matrices: pulled towards 0, a product merely starts small. A norm's scale
    belongs near 1 and a bias has no direction to keep in check, so vectors are left alone. Muon is
    for the matrices inside the blocks. In an embedding each row is looked up by itself, so
    "all directions alike" has no meaning there, and the head is its mirror image. Nor in LoRA's
    adapters: to make A and B orthogonal does not make the update B A so.
    """
    groups: dict[str, list[str]] = {"muon": [], "decay": [], "no_decay": []}
    for name, p in parameters.items():
        if p.dim() < 2:
            groups["no_decay"].append(name)
        elif muon and name.startswith("layers.") and not name.endswith(ADAPTERS):
            groups["muon"].append(name)
        else:
            groups["decay"].append(name)
    return groups
