"""Generation: choosing the next token, and the loop around it. Ids only, no text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from model.attention import KVCache
from model.config import SamplingConfig
from model.gpt import GPT, inference


def next_distribution(logits: Tensor, settings: SamplingConfig, seen: Tensor | None) -> Tensor:
    """Return the probabilities of the next id, (B, V) float32, for a temperature above 0.

    logits (B, V); seen (B, V) bool, the ids in the text so far, for the repetition penalty. Applied
    in this order: repetition penalty (Keskar et al. 2019), temperature, top-k, top-p (Holtzman et
    al. 2020), min-p (Nguyen et al. 2024).
    """
    logits = _penalized(logits.float(), settings, seen) / settings.temperature
    if 0 < settings.top_k < logits.shape[-1]:
        kept = logits.topk(settings.top_k).indices  # exactly k, also if some are equally likely
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    if settings.top_p < 1.0:
        ranked, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        # An id stays if the likelier ones do not reach top_p by themselves, so at least one stays.
        drop = ranked.cumsum(-1) - ranked >= settings.top_p
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    probabilities = logits.softmax(-1)
    if settings.min_p > 0.0:
        floor = settings.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def sample_next(
    logits: Tensor, settings: SamplingConfig, rng: torch.Generator, seen: Tensor | None = None
) -> Tensor:
    """Draw one id per row, (B,), from logits (B, V); the most likely one at temperature 0."""
    if settings.temperature == 0.0:
        return _penalized(logits.float(), settings, seen).argmax(-1)
    probabilities = next_distribution(logits, settings, seen).to(rng.device)
    return torch.multinomial(probabilities, 1, generator=rng)[:, 0].to(logits.device)


def _penalized(logits: Tensor, settings: SamplingConfig, seen: Tensor | None) -> Tensor:
    # A positive logit is divided, a negative one multiplied: both become less likely.
    if settings.repetition_penalty == 1.0 or seen is None:
        return logits
    penalty = settings.repetition_penalty
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def generate(
    model: GPT, prompt: Tensor, settings: SamplingConfig, rng: torch.Generator, **options: Any
) -> Iterator[Tensor]:
    """Yield the next ids, (B,) int64 at a time. Same arguments as `generate_with_logits`."""
    for ids, _ in generate_with_logits(model, prompt, settings, rng, **options):
        yield ids


def generate_with_logits(
    model: GPT,
    prompt: Tensor,
    settings: SamplingConfig,
    rng: torch.Generator,
    *,
    stop_ids: Sequence[int] = (),
    never: Sequence[int] = (),
    first_ids: Sequence[int] = (),
    use_cache: bool = True,
    cache: KVCache | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the next ids (B,) and their logits (B, V), until max_new_tokens or all rows stopped.

    prompt: (B, P) ids, P >= 1, all rows of one length. If P is more than the context, the last
        context_length ids are used.
    stop_ids: ids that end a text. A row that has drawn one is finished and keeps yielding it.
    never: ids that are never drawn, such as those that belong to no token.
    first_ids: if given, the first id is one of these.
    cache: one that holds some first ids of the prompt, and has room for all; default: a new one.
    use_cache: False computes every step from scratch: the same ids, slower; for tests.

    When the window would exceed the context, the last half of the context is kept and encoded again
    from position 0. (Dropping the oldest keys from a full cache would not equal a fresh forward of
    the rest, because the keys that stay have attended to those that were dropped.)

    Dropout is off while an id is computed; the model's mode is restored before each yield.
    Raises ValueError for settings with problems, and for a prompt that is empty or not (B, P).
    """
    _check(prompt, settings)
    context = model.config.context_length
    window = prompt[:, -context:]
    seen = _seen(prompt, model.config.vocab_size) if settings.repetition_penalty != 1.0 else None
    stopped = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    stops = torch.tensor(list(stop_ids), dtype=torch.int64, device=prompt.device)
    # No more than is needed: a pretrained model's whole context may take tens of GB.
    capacity = min(context, window.shape[1] + settings.max_new_tokens)
    if cache is None and use_cache:
        cache = KVCache(model.config.n_layers, capacity)
    for step in range(settings.max_new_tokens):
        # Faster than no_grad: operations skip all of autograd's bookkeeping.
        with torch.inference_mode(), inference(model):
            if window.shape[1] > context:
                window = window[:, -max(1, context // 2) :]
                if cache is not None:
                    cache.clear()
            new = window if cache is None else window[:, cache.length :]
            # Not model(...): a compiled model would be compiled again for every length.
            logits = model.forward(new, cache=cache, last_only=True)[:, -1]  # (B, V)
            logits = _allowed(logits, never, first_ids if step == 0 else ())
            ids = sample_next(logits, settings, rng, seen)
            if len(stops):
                ids = torch.where(stopped, window[:, -1], ids)
                stopped |= torch.isin(ids, stops)
            if seen is not None:
                seen.scatter_(1, ids[:, None], True)
            window = torch.cat((window, ids[:, None]), dim=1)
        yield ids.clone(), logits.clone()  # ordinary tensors again, which may be modified
        if len(stops) and bool(stopped.all()):
            return


def _check(prompt: Tensor, settings: SamplingConfig) -> None:
    if problems := settings.problems():
        raise ValueError("\n".join(problems))
    if prompt.dim() != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt: shape {tuple(prompt.shape)}; expected (B, P) with P >= 1")


def _allowed(logits: Tensor, never: Sequence[int], ids: Sequence[int]) -> Tensor:
    """Set logits (B, V) to -inf for the ids of `never`, and for all but `ids` if there are any."""
    logits[:, list(never)] = -torch.inf
    if not ids:
        return logits
    kept = torch.full_like(logits, -torch.inf)
    kept[:, list(ids)] = logits[:, list(ids)]
    return kept


def _seen(prompt: Tensor, vocab_size: int) -> Tensor:
    """Return (B, V) bool: the ids that each row of the prompt has."""
    seen = torch.zeros(prompt.shape[0], vocab_size, dtype=torch.bool, device=prompt.device)
    return seen.scatter_(1, prompt, True)
