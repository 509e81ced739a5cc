"""Hand-written forward and backward passes: the modules of layers, rope and loss, but faster.

Nothing here is needed to understand the model: every class computes what its parent computes, and
tests hold it to that. `speed_up(model)` puts them in; training does so once, at the start.

On a CPU a norm, a rotation or a loss is bound by memory: run one operation at a time, each reads
and writes everything again. Written by hand, forward and backward need fewer passes. (On GPUs
PyTorch has fused kernels for most of it, and a compiler fuses by itself.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from model import loss
from model.layers import RMSNorm
from model.rope import Rotate


def speed_up(model: nn.Module) -> None:
    """Let every module of a class that has a faster one here compute as that one does.

    The modules stay the same objects, with the same parameters and names; a class of your own is
    left as it is.
    """
    for module in model.modules():
        module.__class__ = FASTER.get(type(module), type(module))


class FastRMSNorm(RMSNorm):
    """RMSNorm with its backward pass in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        if trains_on_cpu(x) and x.dtype == self.weight.dtype:
            return RMSNormFunction.apply(x, self.weight, self.eps)
        return super().forward(x)


class FastRotate(Rotate):
    """RoPE without temporaries."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if trains_on_cpu(x) and x.dtype == cos.dtype:
            return RotationFunction.apply(x, cos, sin)
        return super().forward(x, cos, sin)


class FastDropout(nn.Dropout):
    """Dropout with 16 random bits per element instead of 53."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.p > 0 and trains_on_cpu(x):
            return DropoutFunction.apply(x, self.p)
        return super().forward(x)


class FastCrossEntropy(loss.CrossEntropy):
    """Cross entropy whose gradient is made beside the logits, on any device, or over them."""

    def forward(
        self, x: Tensor, head: Tensor, targets: Tensor, reduction: loss.Reduction
    ) -> Tensor:
        flat_targets, dtype = targets.flatten(), product_dtype(x)
        # float16's products must see the factor by which GradScaler keeps them in its range.
        by_hand = x.requires_grad and reduction != "none" and dtype != torch.float16
        if not (by_hand and loss.in_chunks(head, flat_targets)):
            return super().forward(x, head, targets, reduction)
        total = ChunkedLossFunction.apply(x.flatten(0, 1), head, flat_targets, dtype)
        if reduction == "sum":
            return total
        return total / (flat_targets != loss.IGNORE_INDEX).sum().clamp(min=1)

    def losses(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(x, head)  # (N, V)
        if not trains_on_cpu(logits):
            return super().losses(x, head, targets)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return CrossEntropyFunction.apply(logits, targets, loss.IGNORE_INDEX)


# class -> the class that computes the same faster
FASTER: dict[type, type] = {
    RMSNorm: FastRMSNorm,
    Rotate: FastRotate,
    nn.Dropout: FastDropout,
    loss.CrossEntropy: FastCrossEntropy,
}


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
                "is written by hand. A model without model.fast.speed_up has one"
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


class ChunkedLossFunction(Function):
    """The sum of the losses: x (N, C), head (V, C), targets (N,) -> ().

    d loss / d logits = softmax - one-hot needs nothing of what follows but a factor. So both
    products of backward are done while a chunk's logits are there, three products in place of the
    four that making the logits again would take (Hsu et al. 2024, "Liger Kernel").
    """

    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """dtype: what products are done in. The gradient of head is summed in head's own."""
        weight = head.to(dtype)
        dx, dhead, losses = torch.empty_like(x), torch.zeros_like(head), []
        for start in range(0, len(x), loss.CHUNK_TOKENS):
            n = slice(start, start + loss.CHUNK_TOKENS)
            rows, index = x[n].to(dtype), targets[n][:, None]  # (n, C), (n, 1)
            counts = index != loss.IGNORE_INDEX
            some, dlogits = _losses_and_gradients(rows, weight, index.where(counts, 0))
            losses.append(some.where(counts, 0).sum())
            dlogits = dlogits.to(dtype)
            dx[n] = (dlogits @ weight) * counts
            rows = rows * counts  # (n, C): a smaller product than that of (n, V)
            if dtype == head.dtype:
                dhead.addmm_(dlogits.t(), rows)
            else:
                dhead += dlogits.t() @ rows
            del dlogits  # before the next chunk's logits are made
        ctx.save_for_backward(dx, dhead)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx, dhead = ctx.saved_tensors
        return dx * grad, dhead * grad, None, None


def _losses_and_gradients(x: Tensor, head: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """x (N, C), head (V, C), index (N, 1), the targets -> losses, (N, 1), and the gradient of their
    sum with regard to the logits, (N, V)."""
    logits = F.linear(x, head)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    losses = -log_p.gather(1, index)
    return losses, log_p.exp_().scatter_add_(1, index, -torch.ones_like(losses))


def product_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product of x is done in: x's own format, or autocast's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
