"""Loss on the validation set: always over the same windows, whatever the batch and the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.loader import Batch, stack
from data.shards import Windows
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from training.config import Config
from training.device import Precision
from training.distributed import Ranks

CPU_TOKENS = 4096  # per forward; from here on the overhead of small operations no longer shows


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per target, over `tokens` targets that stand for `bytes` bytes of text."""

    loss: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """exp(loss): the number of equally likely tokens that would leave the model as unsure."""
        return math.exp(self.loss) if self.loss < 700 else math.inf  # exp(710) overflows

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text: unlike the loss per token, comparable between tokenizers. None if
        the tokens stand for no text."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None


def choose_windows(n_windows: int, wanted: int) -> list[int]:
    """Return `wanted` window indices spread evenly over n_windows, or all of them for 0."""
    if wanted == 0 or wanted >= n_windows:
        return list(range(n_windows))
    return [i * n_windows // wanted for i in range(wanted)]


def windows_at_once(config: Config) -> int:
    """Number of windows per forward: the micro-batch, which fits; on a CPU at least CPU_TOKENS."""
    trained = config.data.micro_batch_size
    if config.run.device != "cpu":
        return trained
    return max(trained, CPU_TOKENS // config.model.context_length)


@torch.no_grad()
def evaluate(
    model: GPT,
    windows: Windows,
    chosen: Sequence[int],
    *,
    batch: int,
    byte_lengths: np.ndarray,
    ranks: Ranks,
    precision: Precision,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Score the windows of `chosen`, `batch` at a time; return None if a rank was asked to stop.

    byte_lengths (V,): bytes of text that each id stands for.

    Blocks of `batch` windows are dealt to the ranks in turn. The loss of each window is a float64
    sum, and these are added in the order of the windows, so any number of ranks gives the same
    bits. The model's mode is restored; no random number is drawn.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(len(chosen), 3, dtype=torch.float64)  # loss, targets, bytes of each window
    try:
        for first in range(0, len(chosen), batch * ranks.world):
            (stops,) = ranks.sum_ints([int(stop())], "evaluation")
            if stops:
                return None
            mine = slice(first + ranks.rank * batch, first + (ranks.rank + 1) * batch)
            if chosen[mine]:
                rows = stack([windows.pair(i) for i in chosen[mine]])
                sums[mine] = _score(model, rows, byte_lengths, ranks.device, precision)
    finally:
        model.train(training)
    ranks.apart = True  # rank 0 alone may have had a block in the last round
    if ranks.world > 1:  # every row is filled by one rank and 0 on the others: the sum is exact
        sums = sum(ranks.gather(sums, "evaluation"), torch.zeros_like(sums))
    loss, tokens, n_bytes = (math.fsum(column) for column in sums.T.tolist())
    return Evaluation(loss / max(1.0, tokens), int(tokens), int(n_bytes))


def _score(
    model: GPT, rows: Batch, byte_lengths: np.ndarray, device: torch.device, precision: Precision
) -> Tensor:
    """B rows of windows -> (B, 3) float64: summed loss, targets, bytes of each window."""
    with precision.autocast():
        # Not model(...): a compiled model would be compiled again for this shape.
        losses = model.forward(*(part.to(device) for part in rows), reduction="none")  # (B, T)
    targets = rows[1]
    counted = targets != IGNORE_INDEX
    lengths = torch.as_tensor(byte_lengths)[targets.clamp(min=0)] * counted
    # To the CPU first: Apple GPUs have no float64.
    columns = [losses.cpu().double().sum(1), counted.sum(1).double(), lengths.sum(1).double()]
    return torch.stack(columns, dim=1)
