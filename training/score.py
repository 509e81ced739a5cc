"""Loss on a text: a window slides over it, and each token but the first is scored once.

`training/evaluate.py` scores the windows of a validation set instead, as a run does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from cli.options import ConfigError
from data.readers import Piece
from data.shards import documents_of
from data.tokenizer import Tokenizer, check_ids, lost_bytes
from model.gpt import GPT, inference
from model.loss import IGNORE_INDEX
from training.evaluate import Evaluation

BATCH_TOKENS = 4096  # per forward pass


def text_ids(pieces: Iterable[Piece], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of all documents, joined by end-of-text as in prepared data, and the positions
    where they start."""
    ids: list[int] = []
    starts: list[int] = []
    for piece in pieces:
        if piece.first:
            if starts and tokenizer.eot is not None:
                ids.append(tokenizer.eot)
            opening = tokenizer.between if starts else tokenizer.bos
            starts.append(len(ids) + min(1, len(opening)))
            ids += opening
        ids += tokenizer.encode(piece.text)
    return ids, starts


def spelling(pieces: Iterable[Piece], tokenizer: Tokenizer) -> tuple[float, float]:
    """Return (bytes of text per byte that its ids decode to, share of the text that is lost)."""
    total = lost = spelled = 0
    for piece in pieces:
        total += len(piece.text.encode("utf-8"))
        raw = tokenizer.decode_bytes(tokenizer.encode(piece.text))
        lost += lost_bytes(piece.text, raw.decode("utf-8", errors="replace"))
        spelled += len(raw)
    return total / max(1, spelled), lost / max(1, total)


def window_sizes(
    model: GPT, context_length: int | None = None, stride: int | None = None
) -> tuple[int, int]:
    """Return (context, stride). Raises ConfigError if either is out of range."""
    longest = model.config.context_length
    T = longest if context_length is None else context_length
    if not 1 <= T <= longest:
        raise ConfigError(
            f"context_length={T}: must be at least 1 and at most the model's context, {longest}"
        )
    stride = max(1, T // 2) if stride is None else stride
    if not 1 <= stride <= T:
        raise ConfigError(
            f"stride={stride}: must be at least 1 and at most the context, {T}; with a larger one "
            "tokens would be skipped"
        )
    return T, stride


def windows(n: int, T: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, first) for each window over n tokens: the model reads from token `start`
    on, and tokens first ... end - 1 are scored. Each token but the first is scored once. Every
    window has T inputs, unless the text is shorter.
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
    """Return the loss over all ids but the first and the starts of documents, which are given, not
    predicted. Sums are float64, in the order of the text.

    starts: positions where documents start, for a model that was trained on one document at a time.
    Raises ConfigError if an id is outside of the model's vocabulary.
    """
    check_ids(ids, model.config.vocab_size, tokenizer)
    text, device = torch.tensor(ids), next(model.parameters()).device
    targets = text.masked_fill(torch.isin(text, torch.tensor(tokenizer.between)), IGNORE_INDEX)[1:]
    rows = [text[:-1], targets]
    if starts is not None:  # a token is seen with the document of its target
        documents = documents_of(np.array(starts), len(ids), 0, len(ids))
        rows.append(torch.from_numpy(documents)[1:])
    all_windows = list(windows(len(ids), T, stride))
    batch, losses = max(1, BATCH_TOKENS // T), []
    for i in range(0, len(all_windows), batch):
        chosen = all_windows[i : i + batch]
        parts = [torch.stack([row[start : end - 1] for start, end, _ in chosen]) for row in rows]
        for scored, (start, _, first) in zip(parts[1], chosen, strict=True):
            scored[: first - start - 1] = IGNORE_INDEX  # the window before has scored these
        with inference(model):
            found = model(*(part.to(device) for part in parts), reduction="none")
        losses.append(float(found.cpu().double().sum()))
    counted = int((targets != IGNORE_INDEX).sum())
    n_bytes = int(tokenizer.byte_lengths()[ids[1:]].sum())
    return Evaluation(math.fsum(losses) / counted, counted, n_bytes)
