"""How well a model predicts a text: `python -m tools.evaluate out/small [--source=TEXT]`.

Without a text it is the run's validation split, in the windows that the run evaluates: the last
checkpoint has the last loss of its log. With a text, or with --stride or --context_length, a window
of the model's context slides over the text by `--stride` tokens; each token is scored once, in the
first window that holds it, so with at least context - stride tokens before it once the text is that
long. A smaller stride is slower and gives a lower, fairer loss. The very first token has nothing
before it and is not scored. A model that was trained with --document_mask sees documents one by
one here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cli.command import run_command
from cli.options import ConfigError, parse_options

if TYPE_CHECKING:
    from data.shards import Windows
    from data.tokenizer import Tokenizer
    from model.gpt import GPT
    from training.config import Config
    from training.device import Precision
    from training.evaluate import Evaluation
    from training.weights import Weights

USAGE = "python -m tools.evaluate RUN_OR_FOLDER [--source=TEXT] [--stride=N]"
BATCH_TOKENS = 4096  # in one forward


@dataclass(frozen=True)
class EvaluateOptions:
    """Which text, read how, and by which checkpoint."""

    source: Annotated[
        str, "a file, folder or glob, as for training; the run's validation split unless given"
    ] = ""
    stride: Annotated[int | None, "tokens between windows; half the context unless given"] = None
    context_length: Annotated[int | None, "of the windows; the model's unless given"] = None
    text_field: Annotated[str, "field that holds the text (.jsonl, .parquet)"] = "text"
    errors: Annotated[Literal["strict", "replace"], "what to do with bytes that are no UTF-8"] = (
        "strict"
    )
    ids: Annotated[
        Literal["auto", "u1", "u2", "u4", "u8"], "width of the ids in a .bin file without a header"
    ] = "auto"
    which: Annotated[str, "checkpoint: best, latest or a step; best if there is one"] = ""
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps"] = "auto"
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], "of the matrix products"] = (
        "float32"
    )
    threads: Annotated[int | None, "CPU threads; torch's choice unless given"] = None

    def problems(self) -> list[str]:
        found = []
        for name, default in (("text_field", "text"), ("errors", "strict"), ("ids", "auto")):
            if not self.source and getattr(self, name) != default:
                value = getattr(self, name)
                found.append(f"{name}={value}: says how a text is read; name one with --source")
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

    from training.device import Precision
    from training.distributed import pick_device
    from training.weights import find_weights

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    weights = find_weights(Path(run), options.which)
    config = run_config(weights)
    split = None if options.source else validation_split(weights, config)
    model, tokenizer = weights.load(device)
    precision = Precision(getattr(torch, options.dtype), device.type)
    if split is not None and options.stride is None and options.context_length is None:
        found, said = score_split(split, config, model, tokenizer, precision)
    else:
        ids, starts = read_ids(options, tokenizer) if split is None else read_split(split)
        T, stride = window_sizes(options, model.config.context_length)
        masked = config is not None and config.data.document_mask
        with precision.autocast():
            found = score(model, ids, tokenizer, T, stride, starts if masked else None)
        documents = f"{len(starts):,} document{'s' * (len(starts) != 1)}, {len(ids):,} tokens"
        said = f"{documents}; sliding window: context {T}, stride {stride}"
    if tokenizer.lossy:
        if split is not None:
            scale, lost = split.meta.byte_scale("val"), split.meta.lost_share("val")
        else:
            scale, lost = spelling(options, tokenizer)
        found = replace(found, bytes=round(found.bytes * scale))
        said += f"; the tokenizer does not bring back {lost:.2%} of the text" if lost else ""
    print(f"{options.source or 'validation split'}: {said}")
    print(f"scored: {found.tokens:,} tokens" + f" ({found.bytes:,} bytes)" * bool(found.bytes))
    bits = found.bits_per_byte
    print(
        f"loss {found.loss:.6f} nats per token, perplexity {found.perplexity:.4f}"
        + (f", {bits:.6f} bits per byte" if bits is not None else "")
    )
    return 0


def run_config(weights: Weights) -> Config | None:
    """The config of the run that the weights are of; None for a Hugging Face folder."""
    from training.checkpoint import RUN, read_json
    from training.config import from_json

    return from_json(read_json(weights.path / RUN)) if weights.is_ours else None


def validation_split(weights: Weights, config: Config | None) -> Windows:
    """The windows that the run of these weights evaluates.

    Raises ConfigError if there is no such run, if nothing validates in it, or if its prepared data
    is gone.
    """
    from data.meta import read_meta
    from data.shards import Windows
    from training.checkpoint import MANIFEST, data_folder, read_json

    name_one = "name a text, such as --source=my.txt"
    if config is None:
        raise ConfigError(f"source is not given, and {weights.path} is not a run: {name_one}")
    folder = data_folder(read_json(weights.path / MANIFEST)["about"], config)
    if not read_meta(folder).of("val"):
        raise ConfigError(f"source is not given, and the run has no validation text: {name_one}")
    data, T = config.data, config.model.context_length
    return Windows(folder, "val", T, data.windows, data.document_mask)


def score_split(
    split: Windows, config: Config, model: GPT, tokenizer: Tokenizer, precision: Precision
) -> tuple[Evaluation, str]:
    """The loss as the run measures it, and in which windows."""
    from training.distributed import Ranks
    from training.evaluate import choose_windows, evaluate, windows_at_once

    device = next(model.parameters()).device
    here = replace(config, run=replace(config.run, device=device.type, compile=False))
    chosen = choose_windows(len(split), config.run.eval_windows)
    found = evaluate(
        model,
        split,
        chosen,
        batch=windows_at_once(here),
        byte_lengths=tokenizer.byte_lengths(),
        ranks=Ranks(device=device),
        precision=precision,
    )
    kind = config.data.windows + (", documents masked" if config.data.document_mask else "")
    which = f"{len(chosen):,} of {len(split):,} windows of {split.context_length}"
    return found, f"{which} ({kind}), as the run evaluates"


def read_split(split: Windows) -> tuple[list[int], list[int]]:
    """(ids of all its sources, one after the other; at which of them documents start)."""
    ids: list[int] = []
    starts: list[int] = []
    for part in split.parts:
        starts += (part.stream.document_starts() + len(ids)).tolist()
        ids += part.stream.read(0, part.stream.n_tokens).tolist()
    return ids, starts


def window_sizes(options: EvaluateOptions, longest: int) -> tuple[int, int]:
    """Context and stride. Raises ConfigError for a context that the model does not have."""
    T = options.context_length or longest
    if longest < T:
        raise ConfigError(f"context_length={T}: the model's context is {longest}")
    stride = options.stride or max(1, T // 2)
    if stride > T:
        raise ConfigError(f"stride={stride}: over the context of {T}, it would skip tokens")
    return T, stride


def read_ids(options: EvaluateOptions, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(ids of all documents, an end-of-text between two; at which of them documents start).

    Raises ConfigError if there are fewer than two tokens.
    """
    from data.encode import source_ids
    from data.readers import How
    from data.sources import open_source

    ids: list[int] = []
    starts: list[int] = []
    source = open_source(options.source)
    if source.holds_ids:
        ids, starts = source_ids(source, tokenizer, options.ids)
        return _enough(options, ids), starts
    n_ids = 0 if tokenizer.spells else tokenizer.vocab_size
    for piece in source.pieces(How(options.text_field, options.errors, n_ids=n_ids)):
        if piece.first:
            if starts and tokenizer.eot is not None:
                ids.append(tokenizer.eot)
            opening = tokenizer.between if starts else tokenizer.bos
            starts.append(len(ids) + min(1, len(opening)))  # as prepared data has it
            ids += opening
        ids += tokenizer.encode(piece.text)
    return _enough(options, ids), starts


def _enough(options: EvaluateOptions, ids: list[int]) -> list[int]:
    if len(ids) < 2:
        raise ConfigError(f"source={options.source}: {len(ids)} tokens; two are needed for a loss")
    return ids


def spelling(options: EvaluateOptions, tokenizer: Tokenizer) -> tuple[float, float]:
    """(bytes of the source's text per byte that its ids bring back, share of it that is lost)."""
    from data.readers import How
    from data.sources import open_source
    from data.tokenizer import lost_bytes

    total = lost = spelled = 0
    for piece in open_source(options.source).pieces(How(options.text_field, options.errors)):
        total += len(piece.text.encode("utf-8"))
        raw = tokenizer.decode_bytes(tokenizer.encode(piece.text))
        lost += lost_bytes(piece.text, raw.decode("utf-8", errors="replace"))
        spelled += len(raw)
    return total / max(1, spelled), lost / max(1, total)


def windows(n: int, T: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, first) of each window over n tokens: the model reads the tokens from start on,
    the targets first ... end - 1 are scored. Every target from 1 on is scored once; all windows but
    the only one of a short text have T inputs.
    """
    scored, end = 1, min(n, T + 1)
    while scored < n:
        yield max(0, end - T - 1), end, scored
        scored, end = end, min(n, end + stride)


def score(
    model: GPT,
    ids: list[int],
    tokenizer: Tokenizer,
    T: int,
    stride: int,
    starts: list[int] | None = None,
) -> Evaluation:
    """Loss over all ids but the first and the starts of documents, which are given, not predicted.
    Sums are float64, in the order of the text.

    starts: the tokens at which documents start, for a model that was trained with documents hidden
        from each other.
    Raises ConfigError if the model has no row for an id.
    """
    import numpy as np
    import torch

    from data.shards import documents_of
    from data.tokenizer import check_ids
    from model.loss import IGNORE_INDEX
    from training.evaluate import Evaluation

    check_ids(ids, model.config.vocab_size, tokenizer)
    text, device = torch.tensor(ids), next(model.parameters()).device
    targets_of = text.masked_fill(torch.isin(text, torch.tensor(tokenizer.between)), IGNORE_INDEX)
    # The number of each target's document, which its token is seen with.
    numbers = None
    if starts is not None:
        numbers = torch.from_numpy(documents_of(np.array(starts), len(ids), 0, len(ids)))
    all_windows = list(windows(len(ids), T, stride))
    batch, losses = max(1, BATCH_TOKENS // T), []
    for i in range(0, len(all_windows), batch):
        rows = []
        for start, end, first in all_windows[i : i + batch]:
            targets = targets_of[start + 1 : end].clone()
            targets[: first - start - 1] = IGNORE_INDEX
            rows.append((text[start : end - 1], targets))
            if numbers is not None:
                rows[-1] += (numbers[start + 1 : end],)
        with torch.no_grad():
            parts = (torch.stack(part).to(device) for part in zip(*rows, strict=True))
            found = model(*parts, reduction="none")
        losses.append(float(found.cpu().double().sum()))
    counted = int((targets_of[1:] != IGNORE_INDEX).sum())
    n_bytes = int(tokenizer.byte_lengths()[ids[1:]].sum())
    return Evaluation(math.fsum(losses) / counted, counted, n_bytes)


if __name__ == "__main__":
    run_command(main)
