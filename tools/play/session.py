"""One model in the playground: everything the page can ask of it. Ids in, plain numbers out."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import Tokenizer, prompt_ids
from model.config import SamplingConfig
from model.generate import generate_with_logits, next_distribution
from model.gpt import GPT, inference
from model.inspect import attention_maps, logit_lens
from training.snapshot import token_text

LIKELIEST = 10  # alternatives kept for every token
LENS_TOKENS = 2  # shown per layer
SHOWN = 12  # bars of the distribution


class Session:
    """A model with its tokenizer. Not thread-safe: the server runs one call at a time.

    A *token* in an answer is {"id", "text", "p", "top"}: p is the model's own probability of this
    token given all before it (temperature 1, nothing cut off), top the LIKELIEST as [id, text, p].
    The first token has nothing before it: its p is null.
    """

    def __init__(self, name: str, model: GPT, tokenizer: Tokenizer) -> None:
        self.name = name
        self._model, self._tokenizer = model, tokenizer
        self._n_ids = model.config.vocab_size
        self._unused = tokenizer.unused_ids(self._n_ids)
        self._device = next(model.parameters()).device
        self._last: tuple[list[int], Tensor] | None = None  # ids and the logits after them

    def about(self) -> dict[str, Any]:
        """What the page shows above a model."""
        c = self._model.config
        return {
            "name": self.name,
            "parameters": self._model.parameter_count(),
            "layers": c.n_layers,
            "heads": c.n_heads,
            "context": c.context_length,
            "tokenizer": self._tokenizer.name,
            "vocabulary": self._n_ids,
        }

    def ids_of(self, asked: dict[str, Any]) -> tuple[list[int], list[int]]:
        """The ids to continue, and those the next may be chosen from ([]: any).

        asked: {"ids": [...]}, or {"text": ...}. Raises ValueError for ids the model does not know.
        """
        if "ids" not in asked:
            ids, first, _ = prompt_ids(self._tokenizer, str(asked.get("text", "")), self._n_ids)
            return ids, first
        ids = asked["ids"]
        known = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
        if not known or not 0 <= min(ids) <= max(ids) < self._n_ids:
            raise ValueError(f"ids: expected a list of numbers from 0 to {self._n_ids - 1}")
        return ids, []

    def generate(
        self, ids: list[int], first: list[int], settings: SamplingConfig, seed: int
    ) -> Iterator[dict[str, Any]]:
        """Yield {"prompt": tokens}, then one {"token": token} per new token."""
        yield {"prompt": self._scored(ids)}
        steps = generate_with_logits(
            self._model,
            torch.tensor([ids], device=self._device),
            settings,
            torch.Generator(self._device).manual_seed(seed),
            stop_ids=self._tokenizer.stop_ids,
            never=self._unused,
            first_ids=first,
        )
        for new, logits in steps:
            yield {"token": self._token(int(new[0]), logits[0].float().softmax(-1))}

    def _scored(self, ids: list[int]) -> list[dict[str, Any]]:
        """The prompt's tokens. Of a prompt longer than the context only the end is scored."""
        window = ids[-self._model.config.context_length :]
        with torch.no_grad(), inference(self._model):
            logits = self._model.forward(torch.tensor([window], device=self._device))[0]  # (T, V)
        before: list[Tensor | None] = [None] * (len(ids) - len(window) + 1)
        before += list(self._known(logits).float().softmax(-1)[:-1])
        return [self._token(*pair) for pair in zip(ids, before, strict=True)]

    def _known(self, logits: Tensor) -> Tensor:
        """Logits without the ids that stand for no token: these are never drawn nor shown."""
        logits[..., self._unused] = -torch.inf
        return logits

    def _token(self, token: int, p: Tensor | None) -> dict[str, Any]:
        found = {"id": token, "text": self._text(token)}
        if p is None:
            return {**found, "p": None, "top": []}
        return {**found, "p": round(float(p[token]), 6), "top": self._top(p, LIKELIEST)}

    def _top(self, p: Tensor, n: int) -> list[list[Any]]:
        best = p.topk(min(n, self._n_ids - len(self._unused)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [[token, self._text(token), round(value, 6)] for token, value in pairs]

    def _text(self, token: int) -> str:
        return token_text(self._tokenizer, token)

    def distribution(self, ids: list[int], settings: SamplingConfig) -> dict[str, Any]:
        """What is drawn after `ids`: {"top": [[id, text, p], ...], "kept": tokens with p > 0}.

        settings as in `next_distribution`; at temperature 0 the likeliest has probability 1.
        """
        if self._last is None or self._last[0] != ids:
            window = torch.tensor([ids[-self._model.config.context_length :]], device=self._device)
            with torch.no_grad(), inference(self._model):
                logits = self._model.forward(window, last_only=True)[:, -1]  # (1, V)
            self._last = (list(ids), self._known(logits))
        logits = self._last[1]
        if settings.temperature == 0:
            p = torch.zeros_like(logits[0], dtype=torch.float32)
            p[logits[0].argmax()] = 1.0
        else:
            settings = replace(settings, repetition_penalty=1.0)  # the page has no such slider
            p = next_distribution(logits, settings, None)[0]
        return {"top": [t for t in self._top(p, SHOWN) if t[2] > 0], "kept": int((p > 0).sum())}

    def attention(self, ids: list[int], layer: int, head: int) -> dict[str, Any]:
        """One head's map over the last context_length ids: {"start", "size": T, "weights"}.

        weights: (T, T) bytes, row by row, base64; 255 is a weight of 1. start: how many ids of the
        beginning are outside the context. Raises ValueError for a head the model does not have.
        """
        c = self._model.config
        if not (0 <= layer < c.n_layers and 0 <= head < c.n_heads):
            raise ValueError(
                f"layer {layer}, head {head}: expected 0 to {c.n_layers - 1} and "
                f"0 to {c.n_heads - 1}"
            )
        window = ids[-c.context_length :]
        maps = attention_maps(self._model, torch.tensor([window], device=self._device))
        weights = (maps[layer, 0, head] * 255).round().to(torch.uint8).cpu().numpy()
        packed = base64.b64encode(weights.tobytes()).decode()
        return {"start": len(ids) - len(window), "size": len(window), "weights": packed}

    def lens(self, ids: list[int]) -> list[list[list[Any]]]:
        """What each layer would predict after `ids`, from the embedding up: the likeliest tokens
        [id, text, p] of the L + 1 residual streams, decoded by the final norm and the head."""
        window = torch.tensor([ids[-self._model.config.context_length :]], device=self._device)
        logits = self._known(logit_lens(self._model, window)[:, 0, -1])  # (L + 1, V)
        return [self._top(row.softmax(-1), LENS_TOKENS) for row in logits.float()]
