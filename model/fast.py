"""Hand-written forward and backward passes: modules of layers.py and loss.py, but faster.

Nothing here is needed to understand the model: each class computes what its parent computes, which
tests verify. `speed_up(model)` installs them, once, at the start of training. Each saves more than
5% of the time of a training step somewhere, or of its activations (docs/speed.md), or it goes.

On a CPU, a norm or a loss is bound by memory: run one operation at a time, each reads and writes
everything again. Written by hand, forward and backward need fewer passes. (On GPUs PyTorch has
fused kernels for most of it, and a compiler fuses by itself.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from model import loss
from model.layers import RMSNorm


def speed_up(model: nn.Module) -> None:
    """Replace the class of every module that has a faster one here.

    The modules stay the same objects, with the same parameters and names. Your own classes are left
    alone, subclasses included.
    """
    for module in model.modules():
        module.__class__ = FASTER.get(type(module), type(module))


class FastRMSNorm(RMSNorm):
    """RMSNorm with its backward pass in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        if trains_on_cpu(x) and x.dtype == self.weight.dtype:
            y: Tensor = RMSNormFunction.apply(  # type: ignore[no-untyped-call]  # PyTorch's has no types
                x, self.weight, self.eps
            )
            return y
        return super().forward(x)


class FastCrossEntropy(loss.CrossEntropy):
    """Cross entropy whose gradient is computed along with the logits, or written over them."""

    def forward(
        self, x: Tensor, head: Tensor, targets: Tensor, reduction: loss.Reduction
    ) -> Tensor:
        flat_targets, dtype = targets.flatten(), product_dtype(x)
        # float16's products need GradScaler's factor, which arrives only in the backward pass.
        by_hand = x.requires_grad and reduction != "none" and dtype != torch.float16
        if not (by_hand and loss.in_chunks(head, flat_targets)):
            return super().forward(x, head, targets, reduction)
        total: Tensor = ChunkedLossFunction.apply(  # type: ignore[no-untyped-call]  # PyTorch's has no types
            x.flatten(0, 1), head, flat_targets, dtype
        )
        if reduction == "sum":
            return total
        return total / (flat_targets != loss.IGNORE_INDEX).sum().clamp(min=1)

    def losses(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(x, head)  # (N, V)
        if not trains_on_cpu(logits):
            return super().losses(x, head, targets)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses: Tensor = CrossEntropyFunction.apply(  # type: ignore[no-untyped-call]  # PyTorch's has no types
            logits, targets, loss.IGNORE_INDEX
        )
        return losses


FASTER: dict[type, type] = {RMSNorm: FastRMSNorm, loss.CrossEntropy: FastCrossEntropy}


def trains_on_cpu(x: Tensor) -> bool:
    """Return whether x needs a gradient and is computed eagerly on a CPU.

    Compilers, exporters and tracers see the plain formulas.
    """
    if not (x.requires_grad and x.is_cpu):
        return False
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # has no types
    return not (torch.compiler.is_compiling() or tracing)


Gradients = tuple[Tensor | None, ...]
Backward = Callable[[BackwardCFunction, Tensor], Gradients]


def once_differentiable(backward: Backward) -> Backward:
    """Refuse create_graph=True for a backward pass that has no derivative of its own.

    PyTorch's decorator of this name cuts the graph here. Then `backward()` raises, but
    `torch.autograd.grad` may find a way around the cut and be silently wrong.
    """

    @functools.wraps(backward)
    def checked(ctx: BackwardCFunction, grad: Tensor) -> Gradients:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{type(ctx).__name__} has no second derivative (create_graph=True): its backward "
                "is written by hand. A model without model.fast.speed_up has one"
            )
        return backward(ctx, grad)

    return checked


class RMSNormFunction(Function):
    """y = x s w with s = 1 / sqrt(mean(x^2) + eps), over the last dimension: x (..., C), w (C,)."""

    @staticmethod
    def forward(ctx: BackwardCFunction, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., 1), in one pass
        scale = torch.rsqrt(norm * norm / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """dx = s (g w - x s mean(g w x s)) and dw = sum(g x s), g being the gradient of y.

        LayerNorm's backward, which PyTorch has as one kernel, is the same with x - mean in place of
        x, and subtracts s mean(g w) from dx. So call it with a mean of 0, and add that term back.
        """
        x, weight, scale = ctx.saved_tensors  # type: ignore[misc]  # typed as one tensor
        trains = ctx.needs_input_grad[1]  # type: ignore[misc]  # typed as one bool
        wanted = [True, trains, False]  # no gradient of a frozen weight
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(scale), scale, weight, None, wanted
        )
        mean = (grad @ weight).unsqueeze(-1) / x.shape[-1]  # (..., 1)
        return dx.add_(scale * mean), dweight, None


class CrossEntropyFunction(Function):
    """-log softmax(logits)[target], 0 where the target is `ignored`: (N, V), (N,) -> (N,)."""

    @staticmethod
    def forward(ctx: BackwardCFunction, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        counts = targets != ignored
        index = targets.where(counts, 0)[:, None]  # (N, 1)
        log_p = torch.log_softmax(logits, dim=-1)  # (N, V)
        ctx.save_for_backward(log_p, index, counts)
        return (-log_p.gather(1, index)[:, 0]).where(counts, 0)  # times 0, inf would become nan

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor, None, None]:
        """(softmax - one-hot) times the gradient, written over log_p, which is used up."""
        log_p, index, counts = ctx.saved_tensors  # type: ignore[misc]  # typed as one tensor
        grad = (grad * counts)[:, None]  # (N, 1)
        dlogits = log_p.exp_().mul_(grad)
        return dlogits.scatter_add_(1, index, -grad), None, None


class ChunkedLossFunction(Function):
    """The sum of the losses: x (N, C), head (V, C), targets (N,) -> ().

    d loss / d logits = softmax - one-hot needs nothing from the backward pass but a factor. So the
    gradients are computed while a chunk's logits exist: three matrix products, not the four of
    making the logits again (Hsu et al. 2024, "Liger Kernel").
    """

    @staticmethod
    def forward(
        ctx: BackwardCFunction, x: Tensor, head: Tensor, targets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """dtype: of the products. The gradient of head is summed in head's own dtype."""
        trains = ctx.needs_input_grad[1]  # type: ignore[misc]  # typed as one bool
        weight, dhead = head.to(dtype), torch.zeros_like(head) if trains else None
        dx, losses = torch.empty_like(x), []
        for start in range(0, len(x), loss.CHUNK_TOKENS):
            n = slice(start, start + loss.CHUNK_TOKENS)
            rows, index = x[n].to(dtype), targets[n][:, None]  # (n, C), (n, 1)
            counts = index != loss.IGNORE_INDEX
            some, dlogits = _losses_and_gradients(rows, weight, index.where(counts, 0))
            losses.append(some.where(counts, 0).sum())
            dlogits = dlogits.to(dtype)
            dx[n] = (dlogits @ weight) * counts
            rows = rows * counts  # (n, C): a smaller product than that of (n, V)
            if dhead is not None and dtype == head.dtype:
                dhead.addmm_(dlogits.t(), rows)
            elif dhead is not None:
                dhead += dlogits.t() @ rows
            del dlogits  # before the next chunk's logits are made
        ctx.save_for_backward(dx, dhead)  # type: ignore[arg-type]  # None is saved, too
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        dx, dhead = ctx.saved_tensors  # type: ignore[misc]  # typed as one tensor
        return dx * grad, dhead if dhead is None else dhead * grad, None, None


def _losses_and_gradients(x: Tensor, head: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """x (N, C), head (V, C), index (N, 1), the targets -> losses (N, 1), and the gradient of their
    sum with respect to the logits (N, V)."""
    logits = F.linear(x, head)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    losses = -log_p.gather(1, index)
    return losses, log_p.exp_().scatter_add_(1, index, -torch.ones_like(losses))


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of x: its own, or autocast's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
