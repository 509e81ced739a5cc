"""Show the text that an update was computed from: `python -m tools.batch RUN --step 120`.

Use it to find what is behind a spike in the loss. Step N is the N-th update, as in metrics.jsonl.
Of conversations, what counts for the loss is green on a terminal, elsewhere «in these».
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cli.command import run_command
from cli.options import parse_options
from cli.terminal import shown

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from data.tokenizer import Tokenizer
    from training.config import Config

Span = tuple[str, bool]  # text, and whether it counts for the loss
GREEN, PLAIN = "\033[32m", "\033[0m"
USAGE = "python -m tools.batch RUN --step=N [--chars=N], for example: ... out/small --step=120"


@dataclass(frozen=True)
class BatchOptions:
    """Options of the batch viewer."""

    step: Annotated[int, "the update, counted from 1"] = 0
    chars: Annotated[int, "characters to show of each window; 0: all"] = 300

    def problems(self) -> list[str]:
        found = []
        if self.step < 1:
            found.append(f"step={self.step}: must be at least 1; choose an update with --step=N")
        if self.chars < 0:
            found.append(f"chars={self.chars}: must be at least 0")
        return found


def main(argv: list[str]) -> int:
    """Print what was logged of the step, then each of its windows."""
    options, (run,) = parse_options(argv, BatchOptions, usage=USAGE, positionals=["RUN"])
    from training.checkpoint import find_checkpoint
    from training.report.history import read_config

    checkpoint = find_checkpoint(Path(run), "latest")
    config = read_config(Path(run))
    folder = checkpoint.data_folder(config)
    for line in logged(Path(run), options.step):
        print(line)
    in_color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    begins, ends = (GREEN, PLAIN) if in_color else ("\u00ab", "\u00bb")
    for where, spans in step_windows(config, folder, options.step):
        print(f"--- {where}")
        for text, counts in shortened(spans, options.chars):
            text = shown(text, sys.stdout)
            print(f"{begins}{text}{ends}" if counts else text, end="")
        print()
    return 0


def logged(run: Path, step: int) -> Iterator[str]:
    """Yield the loss that each attempt logged for this step."""
    from training.metrics import read_lines
    from training.report.history import METRICS

    for entry in read_lines(run / METRICS, b'"step": %d,' % step):
        if entry["step"] == step and "loss" in entry:
            values = entry["loss"], entry.get("grad_norm")
            loss, norm = ("not finite" if v is None else f"{v:.4f}" for v in values)
            yield f"step {step}: loss {loss}, gradient norm {norm}"


def step_windows(config: Config, folder: Path, step: int) -> Iterator[tuple[str, list[Span]]]:
    """Yield (place, spans of text) of each window of a step, counted from 1."""
    from data.loader import BatchLoader
    from data.shards import IGNORE_INDEX, Windows
    from data.tokenizer import load_tokenizer

    data, T = config.data, config.model.context_length
    windows = Windows(folder, "train", T, data.windows, data.document_mask)
    tokenizer = load_tokenizer(folder / "tokenizer")
    loader = BatchLoader(
        windows,
        seed=config.run.seed,
        global_batch=data.global_batch,
        micro_batch=data.micro_batch_size,
    )
    for j in range(loader.micro_batches):
        places = loader.locate((step - 1) * loader.micro_batches + j)
        for row, (epoch, window, shift) in enumerate(places):
            shifted = f", shifted by {shift} tokens" if shift else ""
            where = f"micro-batch {j}, row {row}: window {window:,} of epoch {epoch}{shifted}"
            _, targets, *_ = windows.pair(window, shift)
            used = int((targets != IGNORE_INDEX).nonzero()[0].max()) + 1  # the rest is padding
            ids = windows.window(window, shift)[: used + 1].tolist()
            if windows.meta.is_chat:
                counts = [False, *(targets[:used] != IGNORE_INDEX).tolist()]
                yield where, spans_of(ids, counts, tokenizer)
            else:
                yield where, [(tokenizer.decode(ids), False)]


def spans_of(ids: list[int], counts: list[bool], tokenizer: Tokenizer) -> list[Span]:
    """Return the text of ids, special tokens by name, cut where counting begins or ends."""
    names = {token: name.encode() for name, token in tokenizer.special.items()}
    found = []
    for flag, group in groupby(zip(ids, counts, strict=True), key=lambda pair: pair[1]):
        raw = b"".join(names.get(token) or tokenizer.bytes_of(token) for token, _ in group)
        found.append((raw.decode("utf-8", errors="replace"), flag))
    return found


def shortened(spans: list[Span], chars: int) -> list[Span]:
    """Return the first `chars` characters and the number of others; 0: the whole text."""
    total, left, found = sum(len(text) for text, _ in spans), chars, []
    if chars == 0 or total <= chars:
        return spans
    for text, counts in spans:
        found.append((text[:left], counts))
        left -= len(text[:left])
        if left == 0:
            break
    return [*found, (f" ... ({total - chars:,} more)", False)]


if __name__ == "__main__":
    run_command(main)
