"""What a model says at an evaluation: its prompt continued, and a passage scored token by token.

A line of snapshots.jsonl each time, for the report. No random number of training's is drawn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from data.shards import Windows
from data.tokenizer import Tokenizer, prompt_ids
from model.config import SamplingConfig
from model.generate import generate
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from training.precision import Precision

PASSAGE_TOKENS = 160
LIKELIEST = 5


def sample_text(model: GPT, tokenizer: Tokenizer, prompt: str, *, seed: int, tokens: int) -> str:
    """The prompt continued, by a generator of its own, so that no training draw changes."""
    device = next(model.parameters()).device
    ids, first, skip = prompt_ids(tokenizer, prompt, model.config.vocab_size)
    rng = torch.Generator(device).manual_seed(seed)
    settings = SamplingConfig(temperature=0.8, top_k=50, max_new_tokens=tokens)
    new = generate(
        model,
        torch.tensor([ids], device=device),
        settings,
        rng,
        stop_ids=tokenizer.stop_ids,
        never=tokenizer.unused_ids(model.config.vocab_size),
        first_ids=first,
    )
    return prompt + tokenizer.decode([int(token) for token in new])[skip:]


@torch.no_grad()
def scored_passage(
    model: GPT, tokenizer: Tokenizer, windows: Windows, precision: Precision
) -> list[list[Any]]:
    """The first PASSAGE_TOKENS targets of the first window: [text, loss, [[text, chance], ...]].

    loss in nats, None where the target does not count; the LIKELIEST tokens come the likeliest
    first.
    """
    device = next(model.parameters()).device
    row = [torch.from_numpy(part)[:PASSAGE_TOKENS] for part in windows.pair(0)]
    tokens, targets, *documents = (part[None].to(device) for part in row)
    training = model.training
    model.eval()
    try:
        with precision.autocast():
            logits = model(tokens, None, *documents)  # (1, T, V)
    finally:
        model.train(training)
    log_chances = logits[0].float().log_softmax(-1).cpu()  # (T, V)
    V = log_chances.shape[1]
    unused = tokenizer.unused_ids(V)  # these ids stand for nothing: they are not shown
    log_chances[:, unused] = -torch.inf
    best = log_chances.topk(min(LIKELIEST, V - len(unused)))
    found = []
    for row, target in enumerate(targets[0].tolist()):
        if target == IGNORE_INDEX:
            break  # the document ends here
        loss = -log_chances[row, target].item()
        pairs = zip(best.indices[row].tolist(), best.values[row].exp().tolist(), strict=True)
        likeliest = [[token_text(tokenizer, token), round(p, 4)] for token, p in pairs]
        found.append([token_text(tokenizer, target), round(loss, 3), likeliest])
    return found


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself: its text, its bytes where they are no whole characters, or its name."""
    if token == tokenizer.eot:
        return "<end of text>"
    names = [text for text, special in tokenizer.special.items() if special == token]
    if names:
        return names[0]
    raw = tokenizer.decode_bytes([token])
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<{byte:02x}>" for byte in raw)


def append_snapshot(path: Path, entry: dict[str, Any]) -> None:
    """Add a line. A torn one before it, of a kill, is closed first."""
    with open(path, "ab") as file:
        file.write(b"\n" if file.tell() and not _ends_line(path) else b"")
        file.write(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
