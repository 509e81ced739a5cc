"""What the model writes and predicts at an evaluation, for the report. No random number of training
is drawn."""

from __future__ import annotations

from typing import Any

import torch

from data.chat import chat_prompt
from data.shards import Windows
from data.tokenizer import Tokenizer
from model.config import SamplingConfig
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from training.device import Precision
from training.inference import continuations

PASSAGE_TOKENS = 160
LIKELIEST = 5


def sample_text(model: GPT, tokenizer: Tokenizer, prompt: str, *, seed: int, tokens: int) -> str:
    """Continue the prompt by `tokens` tokens at temperature 0.8 and top-k 50."""
    is_question = tokenizer.chat_template and prompt
    start = chat_prompt(tokenizer, prompt) if is_question else prompt
    settings = SamplingConfig(temperature=0.8, top_k=50, max_new_tokens=tokens)
    new = continuations(model, tokenizer, start, settings, seed=seed)
    return prompt + "".join(text for _, text in new)


@torch.no_grad()
def scored_passage(
    model: GPT, tokenizer: Tokenizer, windows: Windows, precision: Precision
) -> list[list[Any]]:
    """Score the first PASSAGE_TOKENS targets of the first window, up to the end of its document.

    Returns [text, loss in nats, [[text, probability], ...]] for each, with the LIKELIEST tokens,
    most likely first.
    """
    device = next(model.parameters()).device
    row = [torch.from_numpy(part)[:PASSAGE_TOKENS] for part in windows.pair(0)]
    tokens, targets, *documents = (part[None].to(device) for part in row)
    training = model.training
    model.eval()
    try:
        with precision.autocast():
            # Not model(...): a compiled model would be compiled again for this length.
            logits = model.forward(tokens, None, *documents)  # (1, T, V)
    finally:
        model.train(training)
    log_probs = logits[0].float().log_softmax(-1).cpu()  # (T, V)
    V = log_probs.shape[1]
    unused = tokenizer.unused_ids(V)  # ids without a text, such as padding of the vocabulary
    log_probs[:, unused] = -torch.inf
    best = log_probs.topk(min(LIKELIEST, V - len(unused)))
    found = []
    for t, target in enumerate(targets[0].tolist()):
        if target == IGNORE_INDEX:
            continue  # padding, or what another says in a conversation
        pairs = zip(best.indices[t].tolist(), best.values[t].exp().tolist(), strict=True)
        likeliest = [[token_text(tokenizer, token), round(p, 4)] for token, p in pairs]
        loss = round(-log_probs[t, target].item(), 3)
        found.append([token_text(tokenizer, target), loss, likeliest])
    return found


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a single token: its name if it is special, <hex> for each byte if it is only part
    of a character."""
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
