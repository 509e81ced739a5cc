"""Generate text from a trained model: `python sample.py out/small --prompt "def "`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cli.command import ended_by_ctrl_c, run_command, shown
from cli.options import (
    AT_LEAST_1,
    AT_LEAST_1_OR_NONE,
    SEED,
    ConfigError,
    out_of_range,
    parse_sections,
)

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from torch import Tensor

    from data.tokenizer import StreamDecoder, Tokenizer
    from model.config import SamplingConfig
    from model.gpt import GPT

USAGE = (
    "python sample.py RUN [--name=value ...], "
    'for example: python sample.py out/small --prompt "def "'
)


@dataclass(frozen=True)
class SampleOptions:
    """Prompt, number of samples, checkpoint and device."""

    prompt: Annotated[str, "text to continue; default: the start of a document"] = ""
    prompt_file: Annotated[str, "read the prompt from this file (UTF-8); -: standard input"] = ""
    special: Annotated[bool, "parse special tokens in the prompt, such as <|endoftext|>"] = False
    num_samples: Annotated[int, "number of samples, generated as one batch"] = 1
    seed: Annotated[int, "random seed"] = 1
    stop: Annotated[tuple[str, ...], "stop before this text; may be repeated"] = ()
    ignore_eot: Annotated[bool, "continue after the end of a document"] = False
    stream: Annotated[bool, "print text while it is generated (one sample only)"] = True
    which: Annotated[str, "checkpoint: best, latest or a step; default: best if there is one"] = ""
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps"] = "auto"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        "compute precision (dtype of matrix multiplications)",
    ] = "float32"
    threads: Annotated[int | None, "CPU threads; default: PyTorch's choice"] = None

    def problems(self) -> list[str]:
        rules = {"num_samples": AT_LEAST_1, "seed": SEED, "threads": AT_LEAST_1_OR_NONE}
        found = out_of_range("", self, rules)
        if self.prompt and self.prompt_file:
            found.append("prompt and prompt_file are both given: keep one")
        if "" in self.stop:
            found.append("stop is empty: give the text to stop at")
        return found


def main(argv: list[str]) -> int:
    """Parse the options, load the checkpoint and print the samples."""
    from model.config import SamplingConfig

    sections = {"": SampleOptions, "sampling": SamplingConfig}
    parsed, (run,) = parse_sections(argv, sections, usage=USAGE, positionals=["RUN"])
    options, settings = parsed[""], parsed["sampling"]
    prompt = read_prompt(options)

    with ended_by_ctrl_c():
        import torch

        from training.device import Precision
        from training.distributed import pick_device
        from training.weights import find_weights

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    model, tokenizer = find_weights(run, options.which).load(device)
    with Precision(getattr(torch, options.dtype), device.type).autocast():
        write_samples(model, tokenizer, prompt, options, settings)
    return 0


def read_prompt(options: SampleOptions) -> str:
    """Return the prompt. Line ends in a file become newlines, as they do in training data.

    Raises ConfigError if the file cannot be read or the prompt is not UTF-8.
    """
    name = f"prompt_file={options.prompt_file}" if options.prompt_file else "prompt"
    try:
        if options.prompt_file == "-":
            raw = sys.stdin.buffer.read()
        elif options.prompt_file:
            raw = Path(options.prompt_file).read_bytes()
        else:  # where the locale is not UTF-8, Python hides the bytes typed in surrogates
            return options.prompt.encode("utf-8", "surrogateescape").decode("utf-8")
        return raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeError as error:
        where = f" at byte {error.start}" if isinstance(error, UnicodeDecodeError) else ""
        raise ConfigError(f"{name}: not UTF-8{where}") from error
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error


def write_samples(
    model: GPT, tokenizer: Tokenizer, prompt: str, options: SampleOptions, settings: SamplingConfig
) -> None:
    """Print one sample while it is generated, or several once all are done or Ctrl-C is pressed.

    Raises ConfigError for characters that the tokenizer, or ids that the model does not know.
    """
    import torch

    from data.tokenizer import StreamDecoder, prompt_ids
    from model.generate import generate

    vocab_size, context = model.config.vocab_size, model.config.context_length
    ids, first_ids, skip = prompt_ids(tokenizer, prompt, vocab_size, options.special)
    if len(ids) > context:
        note = f"note: the prompt has {len(ids)} tokens; the model sees only the last {context}"
        print(note, file=sys.stderr)
    device = next(model.parameters()).device
    stop_ids = () if options.ignore_eot else tokenizer.stop_ids
    new_ids = generate(
        model,
        torch.tensor([ids] * options.num_samples, device=device),
        settings,
        torch.Generator(device).manual_seed(options.seed),
        stop_ids=stop_ids,
        never=tokenizer.unused_ids(vocab_size),
        first_ids=first_ids,
    )
    rows = [Row(StreamDecoder(tokenizer, skip), options.stop) for _ in range(options.num_samples)]
    texts, streaming = [prompt] * len(rows), options.stream and len(rows) == 1
    if streaming:
        print(shown(prompt, sys.stdout), end="", flush=True)
    try:
        for number, text in new_texts(new_ids, rows, stop_ids):
            texts[number] += text
            if streaming:
                print(shown(text, sys.stdout), end="", flush=True)
    finally:  # Ctrl-C ends the samples where they are
        if streaming:
            print()
        for number, text in enumerate([] if streaming else texts, start=1):
            if len(rows) > 1:
                print(f"--- sample {number}")
            print(shown(text, sys.stdout))


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


if __name__ == "__main__":
    run_command(main)
