"""One optimizer step: accumulate the gradient of M micro-batches, clip it, and step or refuse."""

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
from training.config import Config
from training.device import Precision
from training.distributed import Ranks
from training.optimizer import Optimizers

# float16: at or below this scale, an overflow can no longer be blamed on the scale.
SMALLEST_SCALE = 1.0


class NonFinite(RuntimeError):
    """A loss, a gradient, a weight or a number of the optimizer's state is inf or nan.

    Raised before a bad loss or gradient changes a weight, and before a bad weight or state is
    saved.
    """

    exit_code = 4


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step: loss in nats per target, gradient norm before clipping."""

    loss: float
    grad_norm: float
    tokens: int  # targets that count
    skipped: bool  # float16: the gradient overflowed, so no weight was changed


@dataclass
class Setup:
    """The objects a step works with, built once."""

    config: Config
    model: GPT
    optimizers: Optimizers
    scaler: torch.amp.GradScaler  # disabled unless the precision is float16
    precision: Precision
    ranks: Ranks
    ddp: DistributedDataParallel | None = None  # for reduction=fast on several ranks
    compiled: bool = False  # torch.compile was asked for and works on all ranks
    updating: bool = False  # the weights are half updated: not to be saved

    @property
    def n_micro(self) -> int:
        """M, micro-batches per step over all ranks."""
        return self.config.data.global_batch // self.config.data.micro_batch_size

    @property
    def local_micro(self) -> range:
        """This rank's micro-batches of a step: a contiguous block."""
        share = self.n_micro // self.ranks.world
        return range(self.ranks.rank * share, (self.ranks.rank + 1) * share)


def train_step(
    setup: Setup, batches: Sequence[Batch], step: int, n_targets: int | None = None
) -> StepMetrics:
    """Make update number `step` + 1 from this rank's micro-batches, in the loader's order.

    The loss is the sum over all targets of the global batch divided by their number, however they
    are spread over micro-batches and ranks. n_targets: that number, if it is known already.

    Raises NonFinite, on all ranks alike and before any weight changes. With float16 the step is
    skipped instead as long as a smaller loss scale may help.
    """
    if n_targets is None:
        what = f"step {step + 1}, counting targets"
        (n_targets,) = setup.ranks.sum_ints([count_targets(batches)], what)
    # Averaging the micro-batch means would give more weight to the targets of a padded micro-batch.
    divisor = max(1, n_targets)
    exact = setup.config.parallel.reduction == "exact"
    reduce = _exact_gradient if exact else _fast_gradient
    loss = reduce(setup, batches, step, divisor) / divisor

    # Optimizers has what GradScaler uses of an Optimizer.
    setup.scaler.unscale_(setup.optimizers)  # type: ignore[arg-type]
    parameters = [p for p in setup.model.parameters() if p.grad is not None]
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    grad_norm = float(norm)
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if not finite and not _can_skip(setup, grads):
        setup.optimizers.zero_grad()
        raise NonFinite(
            f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; no weight was changed"
        )
    # A rare steep place of the loss must not throw the weights far away (Pascanu et al. 2013).
    clip = setup.config.optim.grad_clip
    if clip > 0 and finite:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)

    setup.updating = True
    # With float16 this does nothing if a gradient has overflowed.
    setup.scaler.step(setup.optimizers)  # type: ignore[arg-type]
    setup.scaler.update()
    setup.updating = False
    setup.optimizers.zero_grad()
    return StepMetrics(loss, grad_norm, n_targets, not finite)


def count_targets(batches: Sequence[Batch]) -> int:
    """Count the targets that are not ignored."""
    return int(sum((batch[1] != IGNORE_INDEX).sum() for batch in batches))  # a GPU waits once


def _can_skip(setup: Setup, grads: list[Tensor]) -> bool:
    """Whether GradScaler will skip this step by itself, and a smaller scale may still help.

    float16 ends at 65,504. The loss is multiplied by a large factor so that small gradients do not
    round to 0; GradScaler halves it whenever a gradient overflows (Micikevicius et al. 2018).
    """
    if not setup.scaler.is_enabled() or setup.scaler.get_scale() <= SMALLEST_SCALE:
        return False
    return not all(bool(torch.isfinite(grad).all()) for grad in grads)


# Gradient of a step


def _exact_gradient(setup: Setup, batches: Sequence[Batch], step: int, divisor: int) -> float:
    """Leave in p.grad the gradient, summed in a fixed tree; return the sum of the losses, which is
    summed along with it."""
    parameters = [p for p in setup.model.parameters() if p.requires_grad]  # not the frozen ones
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
    """Leave in p.grad the gradient, accumulated in place and reduced by DDP in the last backward;
    return the sum of the losses."""
    ranks, last = setup.ranks, setup.local_micro[-1]
    loss_sum = torch.zeros((), device=ranks.device)
    for micro, batch in zip(setup.local_micro, batches, strict=True):
        wait = setup.ddp.no_sync() if setup.ddp is not None and micro != last else nullcontext()
        with wait, ranks.waiting(f"step {step + 1}, gradients"):
            # DDP averages over ranks; times their number it is the sum.
            loss_sum += _backward(setup, batch, step, micro, divisor / ranks.world)
    return float(sum(ranks.gather(loss_sum, f"step {step + 1}, loss")))


def _backward(setup: Setup, batch: Batch, step: int, micro: int, divisor: float) -> Tensor:
    """Run forward and backward of one micro-batch; return its summed loss, ()."""
    seed_dropout(setup.ranks.device, dropout_seed(setup.config.run.seed, step, micro))
    forward = setup.ddp or setup.model
    with setup.precision.autocast():
        loss = forward(*batch, reduction="sum")  # tokens, targets and, with a mask, documents
    setup.scaler.scale(loss / divisor).backward()
    return loss.detach()


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """Hash of all that a micro-batch's dropout depends on. A resumed run draws the same masks
    although no generator's state is saved."""
    key = struct.pack("<QQQ", seed, step, micro_batch)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the generator that dropout draws from on this device.

    Not torch.manual_seed: without a GPU it stores the seed, with a traceback, for every kind of GPU
    that might be initialized later, and never frees one.
    """
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


# Exact reduction: the same bits on any number of ranks
#
# Floating-point addition is not associative, so the order decides the bits. Here it is a tree that
# depends on M alone: with M = 2^k r, r odd, each run of r neighbors is summed from left to right,
# and the 2^k sums are joined in pairs. W ranks, a power of two that divides 2^k, hold one subtree
# each; the top of the tree is recursive doubling between them (Thakur et al. 2005).
#
#     M = 8:  ((0+1)+(2+3)) + ((4+5)+(6+7))        two ranks: rank 0 the left half, rank 1 the right


def odd_part(M: int) -> int:
    """r of M = 2^k r."""
    return M // (M & -M)


class TreeSum:
    """Sums lists of tensors, added one by one, along the tree; keeps log2(M) + 1 lists at most."""

    def __init__(self, M: int) -> None:
        self.run = odd_part(M)
        self.count = 0
        self.sums: list[list[Tensor]] = []  # subtrees, from the largest to the newest

    def add(self, leaf: list[Tensor]) -> None:
        """Add the next leaf. Its tensors may be overwritten."""
        if self.count % self.run == 0:
            self.sums.append(leaf)
        else:
            torch._foreach_add_(self.sums[-1], leaf)
        self.count += 1
        runs, rest = divmod(self.count, self.run)
        while rest == 0 and runs % 2 == 0:  # as a binary counter carries
            right = self.sums.pop()
            torch._foreach_add_(self.sums[-1], right)
            runs //= 2

    def result(self) -> list[Tensor]:
        """Return the sum of all leaves, which must have been M."""
        assert len(self.sums) == 1, f"{self.count} leaves do not make one tree"
        return self.sums.pop()


def sum_over_ranks(tensors: list[Tensor], ranks: Ranks, what: str) -> list[Tensor]:
    """Sum element-wise over ranks by recursive doubling; the same bits on every rank."""
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
    """Return exact or fast; for auto, exact on CPUs if the ranks fit the tree.

    M: micro-batches per step. Raises ConfigError if the ranks cannot share them evenly, or if exact
    is asked for and impossible.
    """
    W = ranks.world
    if M % W:
        raise ConfigError(
            f"data.global_batch / data.micro_batch = {M} micro-batches per step cannot be shared "
            f"evenly by {W} ranks: choose micro_batch so that their number is a multiple of {W}"
        )
    fits = W & (W - 1) == 0 and (M // odd_part(M)) % W == 0
    if asked == "exact" and not fits:
        raise ConfigError(
            f"parallel.reduction=exact: the number of ranks, {W}, must be a power of two that "
            f"divides the {M} micro-batches per step; use --reduction=fast or another micro_batch"
        )
    if asked != "auto":
        return asked
    return "exact" if fits and ranks.device.type == "cpu" else "fast"
