"""Which windows an update used, and their text: `python -m tools.batch RUN --step 120`.

To find what is behind a spike of the loss. Step N is the N-th update, as in metrics.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cli.command import run_command, shown
from cli.options import parse_options

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from training.config import Config

USAGE = "python -m tools.batch RUN --step=N [--chars=N], such as: ... out/small --step=120"


@dataclass(frozen=True)
class BatchOptions:
    """Which update, and how much of each window."""

    step: Annotated[int, "the update, counted from 1"] = 0
    chars: Annotated[int, "characters shown of each window; 0: all"] = 300

    def problems(self) -> list[str]:
        found = []
        if self.step < 1:
            found.append(f"step={self.step}: give an update, --step=N, counted from 1")
        if self.chars < 0:
            found.append(f"chars={self.chars}: must be at least 0")
        return found


def main(argv: list[str]) -> int:
    """Print each window of the step."""
    options, (run,) = parse_options(argv, BatchOptions, usage=USAGE, positionals=["RUN"])
    from training.checkpoint import data_folder, find_checkpoint
    from training.report.history import read_config

    config = read_config(Path(run))
    folder = data_folder(find_checkpoint(Path(run), "latest").about, config)
    for line in logged(Path(run), options.step):
        print(line)
    for place, text in windows_of(config, folder, options.step):
        print(f"--- {place}\n{shown(shortened(text, options.chars), sys.stdout)}")
    return 0


def logged(run: Path, step: int) -> Iterator[str]:
    """Yield what each attempt logged of an update, in words; a later one did it again."""
    from training.folder import read_lines
    from training.report.history import METRICS

    for entry in read_lines(run / METRICS, b'"step": %d,' % step):
        if entry["step"] == step and "loss" in entry:
            loss, norm = (
                "not finite" if value is None else f"{value:.4f}"
                for value in (entry["loss"], entry.get("grad_norm"))
            )
            yield f"step {step}: loss {loss}, gradient norm {norm}"


def windows_of(config: Config, folder: Path, step: int) -> Iterator[tuple[str, str]]:
    """(which window in words, its text) of each window of the update number `step`, from 1."""
    from data.loader import BatchLoader
    from data.shards import IGNORE_INDEX, Windows
    from data.tokenizer import load_tokenizer

    data = config.data
    kind = data.windows, data.document_mask
    windows = Windows(folder, "train", config.model.context_length, *kind)
    tokenizer = load_tokenizer(folder / "tokenizer")
    loader = BatchLoader(
        windows,
        seed=config.run.seed,
        global_batch=data.global_batch,
        micro_batch=data.micro_batch,
    )
    for j in range(loader.micro_batches):
        for row, place in enumerate(loader.locate((step - 1) * loader.micro_batches + j)):
            epoch, window, shift = place
            moved = f", grid moved by {shift}" if shift else ""
            where = f"micro-batch {j}, row {row}: window {window:,} of epoch {epoch}{moved}"
            _, targets, *_ = windows.pair(window, shift)
            learned = int((targets != IGNORE_INDEX).sum())  # the rest pads short documents
            yield where, tokenizer.decode(windows.window(window, shift)[: learned + 1].tolist())


def shortened(text: str, chars: int) -> str:
    """The first `chars` characters and how many follow; all for 0."""
    if chars == 0 or len(text) <= chars:
        return text
    return f"{text[:chars]} ... ({len(text) - chars:,} more)"


if __name__ == "__main__":
    run_command(main)
