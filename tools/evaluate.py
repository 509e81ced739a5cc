"""Measure how well a model predicts a text: `python -m tools.evaluate out/small [--source=TEXT]`.

Without --source the text is the run's validation split, in the windows that the run itself
evaluates, so the result for the last checkpoint is the last validation loss in its log.

With --source, --stride or --context_length, a window slides over the text by `--stride` tokens.
Each token but the first is scored once, in the first window that contains it, with at least
context - stride tokens before it (at the start of the text: all there are). A smaller stride is
slower and gives a lower, fairer loss. A model trained with --document_mask sees one document at a
time here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from cli.command import run_command
from cli.options import ConfigError, parse_options
from cli.terminal import counted

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from data.chat import Messages
    from data.readers import Piece
    from data.shards import Windows
    from data.tokenizer import Tokenizer
    from model.gpt import GPT
    from training.config import Config
    from training.device import Precision
    from training.evaluate import Evaluation
    from training.weights import Weights

USAGE = "python -m tools.evaluate RUN_OR_FOLDER [--source=TEXT] [--stride=N]"
SHOWN_MISTAKES = 5
QUESTIONS_AT_ONCE = 64


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of the evaluation."""

    source: Annotated[
        str, "text to score: a file, folder or glob; default: the run's validation split"
    ] = ""
    task: Annotated[
        str,
        "conversations whose last answers the model is to give: a file or folder",
    ] = ""
    stride: Annotated[int | None, "tokens from window to window; default: half the context"] = None
    context_length: Annotated[int | None, "length of the windows; default: the model's"] = None
    text_field: Annotated[str, "field that holds the text (.jsonl, .parquet)"] = "text"
    errors: Annotated[
        Literal["strict", "replace"], "invalid UTF-8: fail, or replace it with U+FFFD"
    ] = "strict"
    ids: Annotated[
        Literal["auto", "u1", "u2", "u4", "u8"], "width of the ids in a .bin file without a header"
    ] = "auto"
    which: Annotated[str, "checkpoint: best, latest or a step; default: best if there is one"] = ""
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps"] = "auto"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], "compute precision of matrix multiplications"
    ] = "float32"
    threads: Annotated[int | None, "CPU threads; default: torch's choice"] = None

    def problems(self) -> list[str]:
        found = []
        if self.task and self.source:
            found.append("task and source are both given: keep one")
        for name, default in (("text_field", "text"), ("errors", "strict"), ("ids", "auto")):
            if not self.source and (value := getattr(self, name)) != default:
                found.append(f"{name}={value}: has no effect without a text; add --source=TEXT")
        for name in ("stride", "context_length", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name}={value}: must be at least 1")
        return found


def main(argv: list[str]) -> int:
    """Score the text; print the loss, and how it was measured."""
    options, (run,) = parse_options(
        argv, EvaluateOptions, usage=USAGE, positionals=["RUN_OR_FOLDER"]
    )

    import torch

    from training.device import Precision
    from training.distributed import pick_device
    from training.score import score, spelling, window_sizes
    from training.weights import find_weights

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    weights = find_weights(Path(run), options.which)
    # None: a Hugging Face folder
    config = weights.checkpoint.config() if weights.checkpoint is not None else None
    split = None if options.source or options.task else validation_split(weights, config, options)
    model, tokenizer = weights.load(device)
    precision = Precision(getattr(torch, options.dtype), device.type)
    if options.task:
        with precision.autocast():
            print_answers(options, model, tokenizer)
        return 0
    as_the_run = options.stride is None and options.context_length is None
    if split is not None and config is not None and as_the_run:
        found, method = score_split(split, config, model, tokenizer, precision)
    else:
        ids, starts = read_ids(options, tokenizer) if split is None else read_split(split)
        T, stride = window_sizes(model, options.context_length, options.stride)
        masked = config is not None and config.data.document_mask
        with precision.autocast():
            found = score(model, ids, tokenizer, T, stride, starts if masked else None)
        documents = f"{counted(len(starts), 'document')}, {len(ids):,} tokens"
        method = f"{documents}; sliding window: context {T}, stride {stride}"
    if tokenizer.lossy:
        if split is not None:
            scale, lost = split.meta.byte_scale("val"), split.meta.lost_share("val")
        else:
            scale, lost = spelling(source_pieces(options), tokenizer)
        found = replace(found, bytes=round(found.bytes * scale))
        method += f"; the tokenizer loses {lost:.2%} of the text" if lost else ""
    print(f"{options.source or 'validation split'}: {method}")
    print(f"scored: {found.tokens:,} tokens" + f" ({found.bytes:,} bytes)" * bool(found.bytes))
    bits = found.bits_per_byte
    in_bits = "" if bits is None else f", {bits:.6f} bits per byte"
    print(f"loss {found.loss:.6f} nats per token, perplexity {found.perplexity:.4f}{in_bits}")
    return 0


# Answers


class Answer(NamedTuple):
    """A question, the right answer, and the one that the model gave."""

    question: str
    right: str
    given: str

    @property
    def is_right(self) -> bool:
        return self.given.strip() == self.right.strip()


def print_answers(options: EvaluateOptions, model: GPT, tokenizer: Tokenizer) -> None:
    """Print the share of conversations whose last answer the model gives word for word."""
    import json

    from data.readers import ReadOptions
    from data.sources import open_source

    if not tokenizer.chat_template:
        raise ConfigError(
            f"task={options.task}: the tokenizer of these weights has no chat template"
        )
    pieces = open_source(options.task).pieces(ReadOptions(errors=options.errors, chat=True))
    talks = [(piece.name, json.loads(piece.text)) for piece in pieces]
    found = answer_all(model, tokenizer, talks)
    right = sum(answer.is_right for answer in found)
    for answer in [answer for answer in found if not answer.is_right][:SHOWN_MISTAKES]:
        print(f"wrong: {answer.question!r}: {answer.given!r}, not {answer.right!r}")
    print(
        f"{options.task}: {right:,} of {len(found):,} answers are right, word for word: "
        f"{right / max(1, len(found)):.1%}"
    )


def answer_all(model: GPT, tokenizer: Tokenizer, talks: list[tuple[str, Messages]]) -> list[Answer]:
    """Let the model give the last answer of each conversation, always with its likeliest token.

    talks: (name for messages, conversation). Raises ConfigError if one does not end with the
    assistant, or leaves no room for an answer.
    """
    from data.chat import render

    asked: dict[int, list[tuple[list[int], Messages]]] = {}
    for name, messages in talks:
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise ConfigError(f"{name}: does not end with a question and its answer")
        ids = render(messages[:-1], tokenizer, reply=True).ids.tolist()
        if len(ids) >= model.config.context_length:
            raise ConfigError(
                f"{name}: {len(ids)} tokens and an answer exceed the model's context of "
                f"{model.config.context_length}: leave it out"
            )
        asked.setdefault(len(ids), []).append((ids, messages))  # a batch needs one length
    found = []
    for questions in asked.values():
        for first in range(0, len(questions), QUESTIONS_AT_ONCE):
            found += _answers(model, tokenizer, questions[first : first + QUESTIONS_AT_ONCE])
    return found


def _answers(
    model: GPT, tokenizer: Tokenizer, asked: list[tuple[list[int], Messages]]
) -> list[Answer]:
    import torch

    from model.config import SamplingConfig
    from model.generate import generate

    device = next(model.parameters()).device
    longest = max(len(tokenizer.encode(messages[-1]["content"])) for _, messages in asked)
    columns = generate(
        model,
        torch.tensor([ids for ids, _ in asked], device=device),
        # One token more than the longest right answer: what does not end there is wrong.
        SamplingConfig(temperature=0.0, max_new_tokens=longest + 1),
        torch.Generator(device),
        stop_ids=tokenizer.stop_ids,
        never=tokenizer.unused_ids(model.config.vocab_size),
    )
    stops, found = tokenizer.stop_ids, []
    for row, (_, messages) in zip(torch.stack([*columns], 1).tolist(), asked, strict=True):
        end = next((i for i, token in enumerate(row) if token in stops), len(row))
        question, right = (message["content"] for message in messages[-2:])
        found.append(Answer(question, right, tokenizer.decode(row[:end])))
    return found


# Loss


def validation_split(weights: Weights, config: Config | None, options: EvaluateOptions) -> Windows:
    """Return the windows that the run of these weights evaluates.

    Raises ConfigError if they are not from a run, or if it has no validation text or its prepared
    data is gone.
    """
    from data.meta import read_meta
    from data.shards import Windows

    hint = "choose a text, for example --source=my.txt"
    if config is None or weights.checkpoint is None:
        raise ConfigError(f"{weights.path} is not a run and has no validation text; {hint}")
    folder = weights.checkpoint.data_folder(config)
    if not read_meta(folder).of("val"):
        raise ConfigError(f"{weights.path}: the run has no validation text; {hint}")
    data, T = config.data, config.model.context_length
    if data.format == "chat" and (options.stride or options.context_length):
        raise ConfigError(
            "stride, context_length: a sliding window is for text; conversations are scored as the "
            "run itself does"
        )
    return Windows(folder, "val", T, data.windows, data.document_mask)


def score_split(
    split: Windows, config: Config, model: GPT, tokenizer: Tokenizer, precision: Precision
) -> tuple[Evaluation, str]:
    """Return the loss as the run itself computes it, and a description of the windows."""
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
    assert found is not None  # nothing asks it to stop
    kind = config.data.windows + (", documents masked" if config.data.document_mask else "")
    kind = "conversations" if config.data.format == "chat" else kind
    which = f"{len(chosen):,} of {len(split):,} windows of {split.context_length}"
    return found, f"{which} ({kind}), as the run evaluates"


def read_split(split: Windows) -> tuple[list[int], list[int]]:
    """Return the ids of all sources in a row, and the positions where documents start."""
    ids: list[int] = []
    starts: list[int] = []
    for part in split.parts:
        starts += (part.stream.document_starts() + len(ids)).tolist()
        ids += part.stream.read(0, part.stream.n_tokens).tolist()
    return ids, starts


def read_ids(options: EvaluateOptions, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of all documents, joined by end-of-text, and the positions where they start.

    Raises ConfigError if there are fewer than two tokens.
    """
    from data.encode import source_ids
    from data.sources import open_source
    from training.score import text_ids

    source = open_source(options.source)
    if source.holds_ids:
        ids, starts = source_ids(source, tokenizer, options.ids)
    else:
        n_ids = 0 if tokenizer.spells else tokenizer.vocab_size
        ids, starts = text_ids(source_pieces(options, n_ids), tokenizer)
    if len(ids) < 2:
        raise ConfigError(f"source={options.source}: {len(ids)} tokens; a loss needs two")
    return ids, starts


def source_pieces(options: EvaluateOptions, n_ids: int = 0) -> Iterable[Piece]:
    """Read the documents of the text. n_ids: above 0 if its rows may be lists of ids."""
    from data.readers import ReadOptions
    from data.sources import open_source

    reading = ReadOptions(options.text_field, options.errors, n_ids=n_ids)
    return open_source(options.source).pieces(reading)


if __name__ == "__main__":
    run_command(main)
