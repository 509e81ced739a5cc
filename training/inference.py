"""Use a model from Python: load it, continue a text, measure how well it predicts a text.

    model, tokenizer = load("out/small")
    print(generate_text(model, tokenizer, "def ", max_new_tokens=100, temperature=0.8))
    print(score_text(model, tokenizer, "def f(x):\\n    return x\\n").bits_per_byte)

sample.py and tools/evaluate.py call the same functions. See docs/python.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cli.options import ConfigError
from data.readers import Piece
from data.tokenizer import StreamDecoder, Tokenizer, prompt_ids
from model.config import SamplingConfig
from model.generate import generate
from model.gpt import GPT
from training.distributed import pick_device
from training.evaluate import Evaluation
from training.score import score, spelling, text_ids, window_sizes
from training.weights import find_weights


def load(name: str | Path, which: str = "", *, device: str = "auto") -> tuple[GPT, Tokenizer]:
    """Load a model, in evaluation mode, and its tokenizer.

    name: a run, a checkpoint, a Hugging Face folder or hub:OWNER/NAME.
    which: of a run: best, latest or a step; default: best if there is one.
    device: auto, cpu, cuda, cuda:N or mps.
    Raises ConfigError if there is no such model, and DamagedCheckpoint or DamagedFolder if
    something is damaged.
    """
    return find_weights(name, which).load(pick_device(device))


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    seed: int = 1,
    stop: Sequence[str] = (),
    **settings: Any,
) -> str:
    """Return the prompt and what the model writes after it, up to the end of the document.

    prompt: an empty one is the start of a document; of a long one the last context_length tokens
        are seen.
    stop: texts to stop before.
    settings: fields of SamplingConfig, such as temperature, top_k and max_new_tokens.
    Raises ConfigError for a setting out of range, and for characters or ids that the tokenizer or
    the model does not have.
    """
    sampling = SamplingConfig(**settings)
    if problems := sampling.problems():
        raise ConfigError(problems)
    new = continuations(model, tokenizer, prompt, sampling, seed=seed, stop=stop)
    return prompt + "".join(text for _, text in new)


def score_text(
    model: GPT, tokenizer: Tokenizer, text: str, *, stride: int | None = None
) -> Evaluation:
    """Return the loss on a text, with its perplexity and bits_per_byte.

    A window of the model's context slides over the text by `stride` tokens, by default half the
    context; every token but the first is predicted once.
    Raises ConfigError for less than two tokens, a stride beyond the context, and characters or ids
    that the tokenizer or the model does not have.
    """
    piece = Piece(text, first=True, last=True, read=0)
    ids, _ = text_ids([piece], tokenizer)
    if len(ids) < 2:
        raise ConfigError(f"the text has too few tokens ({len(ids)}): a loss needs two")
    found = score(model, ids, tokenizer, *window_sizes(model, None, stride))
    if tokenizer.lossy:  # what it cannot spell counts as text, too
        found = replace(found, bytes=round(found.bytes * spelling([piece], tokenizer)[0]))
    return found


def continuations(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | list[int],
    settings: SamplingConfig,
    *,
    rows: int = 1,
    seed: int = 1,
    stop: Sequence[str] = (),
    special: bool = False,
    ignore_eot: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> Iterator[tuple[int, str]]:
    """Return an iterator over (row, new text), of `rows` samples that are generated as one batch.

    prompt: a text, or ids of the model. special: recognize special tokens in the text. ignore_eot:
    continue after the end of a document. say: called with a note if the prompt is longer than the
    context.
    Raises ConfigError, before anything is generated, for characters that the tokenizer, or ids that
    the model does not know.
    """
    vocab_size, context = model.config.vocab_size, model.config.context_length
    if isinstance(prompt, str):
        ids, first_ids, skip = prompt_ids(tokenizer, prompt, vocab_size, special)
    else:
        ids, first_ids, skip = prompt, [], 0
    if len(ids) > context:
        say(f"note: the prompt has {len(ids)} tokens; the model sees only the last {context}")
    device = next(model.parameters()).device
    stop_ids = () if ignore_eot else tokenizer.stop_ids
    new_ids = generate(
        model,
        torch.tensor([ids] * rows, device=device),
        settings,
        torch.Generator(device).manual_seed(seed),
        stop_ids=stop_ids,
        never=tokenizer.unused_ids(vocab_size),
        first_ids=first_ids,
    )
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    texts = [Row(StreamDecoder(tokenizer, skip), stops) for _ in range(rows)]
    return new_texts(new_ids, texts, stop_ids)


def new_texts(
    new_ids: Iterator[Tensor], rows: list[Row], stop_ids: Collection[int]
) -> Iterator[tuple[int, str]]:
    """Yield (row, new text) until every row has ended; `new_ids` are one id per row, (B,)."""
    for column in new_ids:
        for number, (row, token) in enumerate(zip(rows, column.tolist(), strict=True)):
            if not row.ended:
                yield number, row.finish() if token in stop_ids else row.push(token)
        if all(row.ended for row in rows):
            return
    for number, row in enumerate(rows):
        if not row.ended:
            yield number, row.finish()


class Row:
    """Turn the ids of one sample into text: complete characters, up to the first stop text."""

    def __init__(self, decoder: StreamDecoder, stops: tuple[str, ...]) -> None:
        self.decoder, self.stops = decoder, stops
        self.held = ""  # the end of the text so far, which may be the beginning of a stop text
        self.ended = False

    def push(self, token: int) -> str:
        """Return the text that is certain after this id."""
        return self._release(self.decoder.push(token))

    def finish(self) -> str:
        """Return the rest of the text: no id follows."""
        text = self._release(self.decoder.finish()) + self.held
        self.ended = True
        return text

    def _release(self, new: str) -> str:
        text = self.held + new
        starts = [text.find(stop) for stop in self.stops if stop in text]
        if starts:
            self.ended, self.held = True, ""
            return text[: min(starts)]
        lengths = [n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n])]
        certain = len(text) - max(lengths, default=0)
        self.held = text[certain:]
        return text[:certain]
