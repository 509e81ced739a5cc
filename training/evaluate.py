"""The loss on validation windows: the same windows each time, whatever the batch and the ranks."""

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

CPU_TOKENS = 4096


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per target, over `tokens` targets that stand for `bytes` bytes of text."""

    loss: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """exp(loss): among how many equally likely tokens the model is as unsure."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits the model needs for a byte of the text; comparable between tokenizers. None where
        the tokens stand for no text."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None


def choose_windows(n_windows: int, wanted: int) -> list[int]:
    """`wanted` window indices spread evenly over n_windows; all of them for 0."""
    if wanted == 0 or wanted >= n_windows:
        return list(range(n_windows))
    return [i * n_windows // wanted for i in range(wanted)]


def windows_at_once(config: Config) -> int:
    """How many windows of a run are scored in one forward: as many as are trained on, for so many
    fit. On a CPU more: at CPU_TOKENS a forward its small operations no longer count.
    """
    trained = config.data.micro_batch
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
    """Score the windows of `chosen`, `batch` at a time; None if asked to stop.

    byte_lengths (V,): bytes of text that each id stands for.

    The loss of each window is a float64 sum, and these are added in the order of the windows;
    blocks of `batch` windows are dealt to the ranks in turn. So any number of ranks gives the same
    bits. The model's mode is restored; no random number is drawn.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(len(chosen), 3, dtype=torch.float64)  # loss, targets, bytes of each window
    try:
        for first in range(0, len(chosen), batch * ranks.world):
            if _any_stop(stop(), ranks):
                return None
            mine = slice(first + ranks.rank * batch, first + (ranks.rank + 1) * batch)
            if chosen[mine]:
                rows = stack([windows.pair(i) for i in chosen[mine]])
                sums[mine] = _score(model, rows, byte_lengths, ranks, precision)
    finally:
        model.train(training)
    ranks.apart = True  # the last block, or the only one, is rank 0's
    if ranks.world > 1:  # every row is filled by one rank and 0 on the others: the sum is exact
        sums = sum(ranks.gather(sums, "evaluation"))
    loss, tokens, n_bytes = (math.fsum(column) for column in sums.T.tolist())
    return Evaluation(loss / max(1.0, tokens), int(tokens), int(n_bytes))


def _any_stop(stop: bool, ranks: Ranks) -> bool:
    return ranks.sum_ints([int(stop)], "evaluation")[0] > 0


def _score(
    model: GPT,
    rows: Batch,
    byte_lengths: np.ndarray,
    ranks: Ranks,
    precision: Precision,
) -> Tensor:
    """B rows of windows -> (B, 3) float64: summed loss, targets, bytes of each window."""
    with precision.autocast():
        # Not model(...): a compiled one would be compiled anew, for this and for the last block.
        losses = model.forward(*(part.to(ranks.device) for part in rows), reduction="none")
    targets = rows[1]
    counted = targets != IGNORE_INDEX
    lengths = torch.as_tensor(byte_lengths)[targets.clamp(min=0)] * counted
    # Moved first: Apple GPUs have no float64.
    columns = [losses.cpu().double().sum(1), counted.sum(1).double(), lengths.sum(1).double()]
    return torch.stack(columns, dim=1)
