"""One gradient out of the M micro-batches of a step, the same bits on any number of ranks.

Floating-point addition is not associative, so the order decides the bits. Here it is a tree that
depends on M alone: with M = 2^k r, r odd, each run of r neighbours is summed from left to right,
and the 2^k sums are joined in pairs. W ranks, a power of two that divides 2^k, each hold one
subtree; the top of the tree is recursive doubling between them (Thakur et al. 2005).

    M = 8:  ((0+1)+(2+3)) + ((4+5)+(6+7))        two ranks: rank 0 the left half, rank 1 the right
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cli.options import ConfigError
from training.distributed import Ranks


def odd_part(M: int) -> int:
    """r of M = 2^k r."""
    return M // (M & -M)


class TreeSum:
    """Sums lists of tensors, handed over one by one, along the tree; log2(M) + 1 live at a time."""

    def __init__(self, M: int) -> None:
        self.run = odd_part(M)
        self.count = 0
        self.stack: list[tuple[int, list[Tensor]]] = []  # (height, partial sum)

    def add(self, leaf: list[Tensor]) -> None:
        """Takes `leaf` over: its tensors are added into, or become, a partial sum."""
        if self.count % self.run == 0:
            self.stack.append((0, leaf))
        else:
            torch._foreach_add_(self.stack[-1][1], leaf)
        self.count += 1
        if self.count % self.run == 0:
            self._join()

    def _join(self) -> None:
        while len(self.stack) > 1 and self.stack[-1][0] == self.stack[-2][0]:
            height, right = self.stack.pop()
            _, left = self.stack.pop()
            torch._foreach_add_(left, right)
            self.stack.append((height + 1, left))

    def result(self) -> list[Tensor]:
        """The sum of all leaves. An invariant: as many were added as make one tree."""
        assert len(self.stack) == 1, f"{self.count} leaves do not make one tree"
        return self.stack.pop()[1]


def sum_over_ranks(tensors: list[Tensor], ranks: Ranks, what: str) -> list[Tensor]:
    """Element-wise sum over ranks by recursive doubling; same bits on every rank."""
    if ranks.world == 1:
        return tensors
    flat = torch.cat([t.reshape(-1) for t in tensors])
    received = torch.empty_like(flat)
    distance = 1
    while distance < ranks.world:
        partner = ranks.rank ^ distance
        exchange = [
            dist.P2POp(dist.isend, flat, partner),
            dist.P2POp(dist.irecv, received, partner),
        ]
        with ranks.waiting(what):
            for request in dist.batch_isend_irecv(exchange):
                request.wait()
        flat += received  # a + b = b + a to the bit, so both partners hold the same sum
        distance *= 2
    pieces = flat.split([t.numel() for t in tensors])
    return [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)]


def pick_reduction(asked: str, M: int, ranks: Ranks) -> str:
    """exact or fast. auto: exact on the CPU when the ranks fit the tree, else fast.

    M: micro-batches of a step. Raises ConfigError when the ranks cannot share M micro-batches
    evenly, or exact is asked for and impossible.
    """
    W = ranks.world
    if M % W:
        raise ConfigError(
            f"data.global_batch / data.micro_batch = {M} micro-batches a step do not spread evenly "
            f"over {W} ranks: choose micro_batch so that their number is a multiple of {W}"
        )
    fits = W & (W - 1) == 0 and (M // odd_part(M)) % W == 0
    if asked == "exact" and not fits:
        raise ConfigError(
            f"parallel.reduction=exact: {W} ranks must be a power of two that divides the "
            f"{M} micro-batches of a step; use --reduction=fast or another micro_batch"
        )
    if asked != "auto":
        return asked
    return "exact" if fits and ranks.device.type == "cpu" else "fast"
