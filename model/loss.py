"""Cross entropy of what the head makes of the residual stream, with or without all logits at once.

N tokens, B T of them   C width   V vocabulary
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from model.cpu import CrossEntropyFunction, once_differentiable, trains_on_cpu

IGNORE_INDEX = -100  # a target that does not count, torch's own default
LARGE_VOCAB = 16_384  # from here on the loss is computed chunk by chunk
CHUNK_TOKENS = 1_024  # tokens whose logits exist at one time

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(x: Tensor, head: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    """-log softmax(head x)[target] in nats, over the targets that are not IGNORE_INDEX.

    x (B, T, C), head (V, C), targets (B, T). For a large vocabulary the logits (B, T, V) would
    dwarf the rest of the model, so they are made for CHUNK_TOKENS tokens at a time.
    """
    flat_x, flat_targets = x.flatten(0, 1), targets.flatten()
    if head.shape[0] < LARGE_VOCAB or flat_targets.numel() <= CHUNK_TOKENS:
        losses = _losses(flat_x, head, flat_targets)
    elif x.requires_grad and reduction != "none" and product_dtype(x) != torch.float16:
        losses = ChunkedLossFunction.apply(flat_x, head, flat_targets, product_dtype(x))
    else:  # float16's products must see the factor by which GradScaler keeps them in its range
        losses = _losses_in_chunks(flat_x, head, flat_targets)
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (flat_targets != IGNORE_INDEX).sum().clamp(min=1)


def product_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product of x is done in: x's own format, or autocast's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _losses(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """x (N, C), head (V, C), targets (N,) -> (N,), 0 where ignored."""
    logits = F.linear(x, head)  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # from float16, bfloat16
    if trains_on_cpu(logits):
        return CrossEntropyFunction.apply(logits, targets, IGNORE_INDEX)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")


def _losses_in_chunks(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The same, each chunk's logits made again in backward."""
    pieces = zip(x.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(_losses, a, head, t, **options) for a, t in pieces])


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
        for start in range(0, len(x), CHUNK_TOKENS):
            n = slice(start, start + CHUNK_TOKENS)
            rows, index = x[n].to(dtype), targets[n][:, None]  # (n, C), (n, 1)
            counts = index != IGNORE_INDEX
            loss, dlogits = _losses_and_gradients(rows, weight, index.where(counts, 0))
            losses.append(loss.where(counts, 0).sum())
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
