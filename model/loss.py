"""Cross entropy of the head's logits, never holding all of them where the vocabulary is large.

N tokens, B T of them   C width   V vocabulary
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# data/shards.py defines the same number: data and model do not import each other, and a test keeps
# the two equal.
IGNORE_INDEX = -100  # a target that does not count; PyTorch's own default
LARGE_VOCAB = 16_384  # from here on the loss is computed in chunks
CHUNK_TOKENS = 1_024  # tokens whose logits exist at one time

Reduction = Literal["mean", "sum", "none"]


# While training on a CPU, model/fast.py may replace the forward and backward pass of this class.
class CrossEntropy(nn.Module):
    """-log softmax(head x)[target] in nats, over the targets that are not IGNORE_INDEX.

    x (B, T, C), head (V, C), targets (B, T). With 50,000 tokens in the vocabulary the logits
    (B, T, V) take more memory than the rest of the model. So for a large vocabulary they are made
    for CHUNK_TOKENS tokens at a time, and made again for the backward pass.
    """

    def forward(self, x: Tensor, head: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
        flat_x, flat_targets = x.flatten(0, 1), targets.flatten()  # (N, C), (N,)
        if in_chunks(head, flat_targets):
            pieces = zip(flat_x.split(CHUNK_TOKENS), flat_targets.split(CHUNK_TOKENS), strict=True)
            again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            parts = [again(self.losses, a, head, t) for a, t in pieces]
            losses = torch.cat(parts)
        else:
            losses = self.losses(flat_x, head, flat_targets)
        if reduction == "none":
            return losses.view(targets.shape)
        if reduction == "sum":
            return losses.sum()
        return losses.sum() / (flat_targets != IGNORE_INDEX).sum().clamp(min=1)

    def losses(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        """x (N, C), head (V, C), targets (N,) -> (N,), 0 where the target is ignored."""
        logits = F.linear(x, head)  # (N, V)
        # At least float32: the rounding of bfloat16's 8 bits would show in the loss.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")


def in_chunks(head: Tensor, targets: Tensor) -> bool:
    """Return whether head (V, C) and targets (N,) are too many for all logits at once."""
    return head.shape[0] >= LARGE_VOCAB and targets.numel() > CHUNK_TOKENS
