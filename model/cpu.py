"""Written by hand for training on a CPU: backward passes, and dropout's draws. The formulas are in
layers.py, rope.py and gpt.py; tests hold these to autograd. Nothing here is needed to understand
the model.

Run one operation at a time, a norm, a rotation or a loss is bound by memory: each operation reads
and writes everything again. Written by hand, forward and backward need fewer passes. (On GPUs
PyTorch has fused kernels for most of it, and a compiler fuses by itself.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function


def trains_on_cpu(x: Tensor) -> bool:
    """Whether x is on the way to a gradient, computed an operation at a time on a CPU.

    Compilers, exporters and tracers are given the plain formulas.
    """
    if not (x.requires_grad and x.is_cpu):
        return False
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing())


def once_differentiable(backward: Callable) -> Callable:
    """A backward pass that is refused with create_graph=True, for it has no derivative itself.

    torch's decorator of this name cuts the graph at this place. `backward()` then raises, but
    `torch.autograd.grad` may go round the cut and be silently wrong.
    """

    @functools.wraps(backward)
    def checked(ctx, *grads: Tensor) -> tuple:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{type(ctx).__name__} has no second derivative (create_graph=True): its backward "
                "is written by hand. With model.cpu.trains_on_cpu returning False, the plain "
                "formulas are used, which have one"
            )
        return backward(ctx, *grads)

    return checked


class RMSNormFunction(Function):
    """y = x s w with s = 1 / sqrt(mean(x^2) + eps), over the last dimension: x (..., C), w (C,)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., 1), in one pass
        scale = torch.rsqrt(norm * norm / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """dx = s (g w - x s mean(g w x s)) and dw = sum(g x s), g being the gradient of y.

        LayerNorm's backward, which PyTorch has fused, is the same with x - mean for x, and takes
        s mean(g w) off dx. So it is called with a mean of 0, and that term is put back.
        """
        x, weight, scale = ctx.saved_tensors
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(scale), scale, weight, None, [True, True, False]
        )
        mean = (grad @ weight).unsqueeze(-1) / x.shape[-1]  # (..., 1)
        return dx.add_(scale * mean), dweight, None


class RotationFunction(Function):
    """`apply_rope` without its temporaries. A rotation's gradient is rotated back by the angle."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """x (B, H, T, D) turned by sign times the angle whose cos and sin, (T, D/2), are given."""
    out = torch.empty_like(x)
    (x1, x2), (out1, out2) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=sign)
    return out


class CrossEntropyFunction(Function):
    """-log softmax(logits)[target], 0 where the target is `ignored`: (N, V), (N,) -> (N,)."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        counts = targets != ignored
        index = targets.where(counts, 0)[:, None]  # (N, 1)
        log_p = torch.log_softmax(logits, dim=-1)  # (N, V)
        ctx.save_for_backward(log_p, index, counts)
        return (-log_p.gather(1, index)[:, 0]).where(counts, 0)  # times 0, inf would become nan

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        """(softmax - one-hot) times the gradient, written over log_p, which has done its work."""
        log_p, index, counts = ctx.saved_tensors
        grad = (grad * counts)[:, None]  # (N, 1)
        dlogits = log_p.exp_().mul_(grad)
        return dlogits.scatter_add_(1, index, -grad), None, None


class DropoutFunction(Function):
    """x with each element 0 with probability p, rounded to 1/65536, the others divided by 1 - p.

    PyTorch draws 53 random bits for each element, one after the other. Here a draw of 64 decides
    on four elements.
    """

    @staticmethod
    def forward(ctx, x: Tensor, p: float) -> Tensor:
        dropped = min(round(p * 2**16), 2**16 - 1)
        draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        draws = draws.view(torch.int16)[: x.numel()].view(x.shape)  # -32768 ... 32767
        mask = (draws >= dropped - 2**15).to(x.dtype).mul_(2**16 / (2**16 - dropped))
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask, None
