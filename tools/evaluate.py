"""How well a model predicts a text: `python -m tools.evaluate out/small --source=TEXT`.

A window of the model's context slides over the text by `--stride` tokens; each token is scored
once, in the first window that holds it, so with at least context - stride tokens before it once the
text is that long. A smaller stride is slower and gives a lower, fairer loss. The very first token
has nothing before it and is not scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from data.command import run_command
from data.options import ConfigError, parse_options

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer
    from model.gpt import GPT
    from training.evaluate import Evaluation

USAGE = "python -m tools.evaluate RUN_OR_FOLDER --source=TEXT [--stride=N]"
BATCH_TOKENS = 4096  # in one forward


@dataclass(frozen=True)
class EvaluateOptions:
    """Which text, read how, and by which checkpoint."""

    source: Annotated[str, "a file, folder or glob, as for training"] = ""
    stride: Annotated[int | None, "tokens between windows; half the context unless given"] = None
    context_length: Annotated[int | None, "of the windows; the model's unless given"] = None
    text_field: Annotated[str, "field that holds the text (.jsonl, .parquet)"] = "text"
    errors: Annotated[Literal["strict", "replace"], "what to do with bytes that are no UTF-8"] = (
        "strict"
    )
    which: Annotated[str, "checkpoint: best, latest or a step; best if there is one"] = ""
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps"] = "auto"
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], "of the matrix products"] = (
        "float32"
    )
    threads: Annotated[int | None, "CPU threads; torch's choice unless given"] = None

    def problems(self) -> list[str]:
        found = [] if self.source else ["source is not given: name a text, such as --source=my.txt"]
        for name in ("stride", "context_length", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name}={value}: must be at least 1")
        return found


def main(argv: list[str]) -> int:
    """Read the text, score it, print the loss and what it was measured with."""
    options, (run,) = parse_options(
        argv, EvaluateOptions, usage=USAGE, positionals=["RUN_OR_FOLDER"]
    )

    import torch

    from training.distributed import pick_device
    from training.precision import Precision
    from training.weights import load_for_sampling

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    model, tokenizer = load_for_sampling(Path(run), options.which, device)
    ids, documents = read_ids(options, tokenizer)
    T, stride = window_sizes(options, model.config.context_length)
    with Precision(getattr(torch, options.dtype), device.type).autocast():
        found = score(model, ids, tokenizer, T, stride)
    said = f"{options.source}: {documents} document{'s' * (documents != 1)}, {len(ids):,} tokens"
    print(f"{said}, of which {found.tokens:,} scored ({found.bytes:,} bytes)")
    print(f"sliding window: context {T}, stride {stride}")
    print(
        f"loss {found.loss:.6f} nats a token, perplexity {found.perplexity:.4f}, "
        f"{found.bits_per_byte:.6f} bits per byte"
    )
    return 0


def window_sizes(options: EvaluateOptions, longest: int) -> tuple[int, int]:
    """Context and stride. Raises ConfigError for a context that the model does not have."""
    T = options.context_length or longest
    if longest < T:
        raise ConfigError(f"context_length={T}: the model's context is {longest}")
    stride = options.stride or max(1, T // 2)
    if stride > T:
        raise ConfigError(f"stride={stride}: over the context of {T}, it would skip tokens")
    return T, stride


def read_ids(options: EvaluateOptions, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """(ids of all documents, each from its start, an end-of-text between two; how many documents).

    Raises ConfigError if there are fewer than two tokens.
    """
    from data.readers import How
    from data.sources import open_source

    ids, documents = [], 0
    for piece in open_source(options.source).pieces(How(options.text_field, options.errors)):
        if piece.first:
            if documents and tokenizer.eot is not None:
                ids.append(tokenizer.eot)
            ids += tokenizer.between if documents else tokenizer.bos
            documents += 1
        ids += tokenizer.encode(piece.text)
    if len(ids) < 2:
        raise ConfigError(f"source={options.source}: {len(ids)} tokens; two are needed for a loss")
    return ids, documents


def windows(n: int, T: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, first) of each window over n tokens: the model reads the tokens from start on,
    the targets first ... end - 1 are scored. Every target from 1 on is scored once; all windows but
    the only one of a short text have T inputs.
    """
    scored, end = 1, min(n, T + 1)
    while scored < n:
        yield max(0, end - T - 1), end, scored
        scored, end = end, min(n, end + stride)


def score(model: GPT, ids: list[int], tokenizer: Tokenizer, T: int, stride: int) -> Evaluation:
    """Loss over all ids but the first and the starts of documents, which are given, not predicted.
    Sums are float64, in the order of the text.

    Raises ConfigError if the model has no row for an id.
    """
    import torch

    from model.loss import IGNORE_INDEX
    from training.evaluate import Evaluation

    if max(ids) >= model.config.vocab_size:
        known = f"the model knows {model.config.vocab_size} ids"
        raise ConfigError(f"the text has id {max(ids)}, {known}: the tokenizer is another model's")
    text, device = torch.tensor(ids), next(model.parameters()).device
    targets_of = text.masked_fill(torch.isin(text, torch.tensor(tokenizer.between)), IGNORE_INDEX)
    all_windows = list(windows(len(ids), T, stride))
    batch, losses = max(1, BATCH_TOKENS // T), []
    for i in range(0, len(all_windows), batch):
        tokens, targets = [], []
        for start, end, first in all_windows[i : i + batch]:
            tokens.append(text[start : end - 1])
            wanted = targets_of[start + 1 : end].clone()
            wanted[: first - start - 1] = IGNORE_INDEX
            targets.append(wanted)
        with torch.no_grad():
            found = model(
                torch.stack(tokens).to(device), torch.stack(targets).to(device), reduction="none"
            )
        losses.append(float(found.cpu().double().sum()))
    counted = int((targets_of[1:] != IGNORE_INDEX).sum())
    n_bytes = int(tokenizer.byte_lengths()[ids[1:]].sum())
    return Evaluation(math.fsum(losses) / counted, counted, n_bytes)


if __name__ == "__main__":
    run_command(main)
