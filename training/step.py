"""One optimizer step: M micro-batches, one gradient, clip, and step or refuse."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT, IGNORE_INDEX
from training.distributed import Ranks
from training.optimizer import Optimizers
from training.precision import Precision
from training.reduction import TreeSum, sum_over_ranks

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
    skipped: bool
    stop: bool  # some rank was asked to stop


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

    @property
    def local_micro(self) -> range:
        """The micro-batches of a step that are this rank's: a contiguous block."""
        share = self.n_micro // self.ranks.world
        return range(self.ranks.rank * share, (self.ranks.rank + 1) * share)


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """What the generator is set to before a micro-batch: a hash, so no state is ever saved."""
    key = struct.pack("<QQQ", seed, step, micro_batch)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def train_step(
    setup: Setup, batches: Sequence[tuple[Tensor, Tensor]], step: int, stop: bool = False
) -> StepMetrics:
    """Update number `step` + 1 from this rank's (tokens, targets), each (B, T), in order.

    The loss of a step is the sum over all valid targets of the whole global batch divided by their
    number, however they are spread over micro-batches and ranks.

    Raises NonFinite, on all ranks alike and before any weight has moved, unless float16's scaler
    can still lower its factor; then the step is skipped.
    """
    count = sum(int((targets != IGNORE_INDEX).sum()) for _, targets in batches)
    what = f"step {step + 1}"
    (count,) = setup.ranks.sum_ints([count], f"{what}, counting targets")
    reduce = _exact_gradient if setup.reduction == "exact" else _fast_gradient
    loss_sum, stops = reduce(setup, batches, step, max(1, count), stop)
    setup.scaler.unscale_(setup.optimizers)
    gradients = [p.grad for p in setup.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if setup.grad_clip > 0:
        torch.nn.utils.clip_grads_with_norm_(setup.model.parameters(), setup.grad_clip, norm)
    loss, grad_norm = loss_sum / max(1, count), float(norm)
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if not finite and not (setup.scaler.is_enabled() and setup.scaler.get_scale() > SMALLEST_SCALE):
        setup.optimizers.zero_grad()
        raise NonFinite(f"{what}: loss {loss}, gradient norm {grad_norm}; no weight was moved")
    setup.scaler.step(setup.optimizers)  # float16: skipped if a gradient is not finite
    setup.scaler.update()
    setup.optimizers.zero_grad()
    return StepMetrics(loss, grad_norm, count, not finite, stops > 0)


def _backward(
    setup: Setup, batch: tuple[Tensor, Tensor], step: int, micro: int, divisor: float
) -> Tensor:
    """Forward and backward of one micro-batch; returns its summed loss, ()."""
    tokens, targets = batch
    torch.manual_seed(dropout_seed(setup.seed, step, micro))
    forward = setup.ddp or setup.model
    with setup.precision.autocast():
        loss = forward(tokens, targets, reduction="sum")
    setup.scaler.scale(loss / divisor).backward()
    return loss.detach()


def _exact_gradient(
    setup: Setup, batches: Sequence[tuple[Tensor, Tensor]], step: int, count: int, stop: bool
) -> tuple[float, float]:
    """Summed in a tree that depends on M alone. The loss and the stop flag ride along."""
    parameters = list(setup.model.parameters())
    tree = TreeSum(len(batches))
    for micro, batch in zip(setup.local_micro, batches, strict=True):
        loss = _backward(setup, batch, step, micro, count)
        flag = torch.full_like(loss, float(stop))
        tree.add([p.grad for p in parameters] + [loss, flag])
        setup.optimizers.zero_grad()
    what = f"step {step + 1}, gradients"
    *gradients, loss_sum, stops = sum_over_ranks(tree.result(), setup.ranks, what)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    return float(loss_sum), float(stops)


def _fast_gradient(
    setup: Setup, batches: Sequence[tuple[Tensor, Tensor]], step: int, count: int, stop: bool
) -> tuple[float, float]:
    """Accumulated in place, one bucketed all_reduce by DDP in the last backward."""
    world = setup.ranks.world
    loss_sum = torch.zeros((), device=setup.ranks.device)
    last = setup.local_micro[-1]
    for micro, batch in zip(setup.local_micro, batches, strict=True):
        wait = setup.ddp.no_sync() if setup.ddp is not None and micro != last else nullcontext()
        with wait, setup.ranks.waiting(f"step {step + 1}, gradients"):
            # DDP averages over ranks; times their number makes it the sum.
            loss_sum += _backward(setup, batch, step, micro, count / world)
    flags = torch.stack([loss_sum, torch.full_like(loss_sum, float(stop))])
    total = sum(setup.ranks.gather(flags, f"step {step + 1}, loss"))
    return float(total[0]), float(total[1])
