"""One optimizer step: M micro-batches, one gradient, clip, and step or refuse."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cli.options import ConfigError
from data.loader import Batch
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from training.device import Precision
from training.distributed import Ranks
from training.optimizer import Optimizers

# One gradient out of the M micro-batches of a step, the same bits on any number of ranks.
#
# Floating-point addition is not associative, so the order decides the bits. Here it is a tree that
# depends on M alone: with M = 2^k r, r odd, each run of r neighbours is summed from left to right,
# and the 2^k sums are joined in pairs. W ranks, a power of two that divides 2^k, each hold one
# subtree; the top of the tree is recursive doubling between them (Thakur et al. 2005).
#
#     M = 8:  ((0+1)+(2+3)) + ((4+5)+(6+7))        two ranks: rank 0 the left half, rank 1 the right


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


SMALLEST_SCALE = 1.0  # below it, float16's gradients overflow for another reason than their scale


class NonFinite(RuntimeError):
    """A loss or gradient became inf or nan. No weight has been moved."""

    exit_code = 4


@dataclass(frozen=True)
class StepMetrics:
    """What one step tells: nats per target, norm before clipping, targets that counted."""

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool  # float16: the gradient had overflowed, no weight was moved


@dataclass
class Setup:
    """What every step of a run shares."""

    model: GPT
    optimizers: Optimizers
    scaler: torch.amp.GradScaler
    precision: Precision
    ranks: Ranks
    reduction: str  # exact or fast
    n_micro: int  # M, micro-batches of a step over all ranks
    seed: int
    grad_clip: float
    ddp: DistributedDataParallel | None = None  # for reduction=fast on several ranks
    compiled: bool = False  # torch.compile was asked for and works on all ranks
    updating: bool = False  # weights are being changed: between two states, neither to be saved

    @property
    def local_micro(self) -> range:
        """The micro-batches of a step that are this rank's: a contiguous block."""
        share = self.n_micro // self.ranks.world
        return range(self.ranks.rank * share, (self.ranks.rank + 1) * share)


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """What the generator is set to before a micro-batch: a hash, so no state is ever saved."""
    key = struct.pack("<QQQ", seed, step, micro_batch)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def seed_dropout(device: torch.device, seed: int) -> None:
    """Set the generator that dropout draws from on this device.

    Not torch.manual_seed: where there is no GPU it notes the seed, with a traceback, for each kind
    of GPU that might come up later, and never forgets one.
    """
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def count_targets(batches: Sequence[Batch]) -> int:
    """Count the targets of these batches that are not ignored."""
    return int(sum((batch[1] != IGNORE_INDEX).sum() for batch in batches))  # a GPU waits once


def train_step(
    setup: Setup,
    batches: Sequence[Batch],
    step: int,
    n_targets: int | None = None,
) -> StepMetrics:
    """Update number `step` + 1 from this rank's micro-batches, as the loader gives them, in order.

    The loss of a step is the sum over all valid targets of the whole global batch divided by their
    number, however they are spread over micro-batches and ranks.
    n_targets: that number, if it is known already.

    Raises NonFinite, on all ranks alike and before any weight has moved, unless float16's scaler
    can still lower its factor; then the step is skipped.
    """
    if n_targets is None:
        what = f"step {step + 1}, counting targets"
        (n_targets,) = setup.ranks.sum_ints([count_targets(batches)], what)
    divisor = max(1, n_targets)
    reduce = _exact_gradient if setup.reduction == "exact" else _fast_gradient
    loss = reduce(setup, batches, step, divisor) / divisor
    setup.scaler.unscale_(setup.optimizers)
    parameters = [p for p in setup.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    grad_norm = float(norm)
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if not finite and not _can_skip(setup, parameters):
        setup.optimizers.zero_grad()
        raise NonFinite(
            f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; no weight was moved"
        )
    if setup.grad_clip > 0 and finite:
        torch.nn.utils.clip_grads_with_norm_(parameters, setup.grad_clip, norm)
    setup.updating = True
    setup.scaler.step(setup.optimizers)  # float16: not if a gradient has overflowed
    setup.scaler.update()
    setup.updating = False
    setup.optimizers.zero_grad()
    return StepMetrics(loss, grad_norm, n_targets, not finite)


def _can_skip(setup: Setup, parameters: list[Tensor]) -> bool:
    """Whether GradScaler will skip this step by itself, and a smaller factor may still help."""
    if not setup.scaler.is_enabled() or setup.scaler.get_scale() <= SMALLEST_SCALE:
        return False
    return not all(bool(torch.isfinite(p.grad).all()) for p in parameters)


def _backward(setup: Setup, batch: Batch, step: int, micro: int, divisor: float) -> Tensor:
    """Forward and backward of one micro-batch; returns its summed loss, ()."""
    seed_dropout(setup.ranks.device, dropout_seed(setup.seed, step, micro))
    forward = setup.ddp or setup.model
    with setup.precision.autocast():
        loss = forward(*batch, reduction="sum")  # tokens, targets, perhaps documents
    setup.scaler.scale(loss / divisor).backward()
    return loss.detach()


def _exact_gradient(setup: Setup, batches: Sequence[Batch], step: int, divisor: int) -> float:
    """Leave the gradient in p.grad, summed in a tree that depends on M alone; returns the loss sum,
    which rides along."""
    parameters = [p for p in setup.model.parameters() if p.requires_grad]  # others are frozen
    tree = TreeSum(len(batches))
    for micro, batch in zip(setup.local_micro, batches, strict=True):
        loss = _backward(setup, batch, step, micro, divisor)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        tree.add([*gradients, loss])
        setup.optimizers.zero_grad()
    what = f"step {step + 1}, gradients"
    *gradients, loss_sum = sum_over_ranks(tree.result(), setup.ranks, what)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    return float(loss_sum)


def _fast_gradient(setup: Setup, batches: Sequence[Batch], step: int, divisor: int) -> float:
    """Accumulated in place, one bucketed all_reduce by DDP in the last backward."""
    ranks, last = setup.ranks, setup.local_micro[-1]
    loss_sum = torch.zeros((), device=ranks.device)
    for micro, batch in zip(setup.local_micro, batches, strict=True):
        wait = setup.ddp.no_sync() if setup.ddp is not None and micro != last else nullcontext()
        with wait, ranks.waiting(f"step {step + 1}, gradients"):
            # DDP averages over ranks; times their number makes it the sum.
            loss_sum += _backward(setup, batch, step, micro, divisor / ranks.world)
    return float(sum(ranks.gather(loss_sum, f"step {step + 1}, loss")))
