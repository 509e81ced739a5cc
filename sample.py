"""Continue a prompt: `python sample.py out/small --prompt "def "`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cli.command import ended_by_ctrl_c, run_command, shown
from cli.options import ConfigError, parse_sections

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from torch import Tensor

    from data.tokenizer import Tokenizer
    from model.config import SamplingConfig
    from model.gpt import GPT

USAGE = (
    'python sample.py RUN [--name=value ...], such as: python sample.py out/small --prompt "def "'
)


@dataclass(frozen=True)
class SampleOptions:
    """What to continue, how often, and where it runs."""

    prompt: Annotated[str, "text to continue; empty: from the start of a document"] = ""
    prompt_file: Annotated[str, "read the prompt from this file (UTF-8); -: standard input"] = ""
    special: Annotated[bool, "special tokens in the prompt are read as such, not as text"] = False
    num_samples: Annotated[int, "continuations, drawn side by side"] = 1
    seed: Annotated[int, "the same seed draws the same samples"] = 1
    stop: Annotated[tuple[str, ...], "end at this text, which is not printed; may be repeated"] = ()
    ignore_eot: Annotated[bool, "go on after the end of a document"] = False
    stream: Annotated[bool, "print characters as they come (one sample only)"] = True
    which: Annotated[str, "checkpoint: best, latest or a step; best if there is one"] = ""
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps"] = "auto"
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], "of the matrix products"] = (
        "float32"
    )
    threads: Annotated[int | None, "CPU threads; torch's choice unless given"] = None

    def problems(self) -> list[str]:
        """What is wrong, in plain words."""
        found = []
        if self.prompt and self.prompt_file:
            found.append("prompt and prompt_file are both given: keep one")
        if self.num_samples < 1:
            found.append(f"num_samples={self.num_samples}: must be at least 1")
        if not 0 <= self.seed < 2**63:
            found.append(f"seed={self.seed}: must be in [0, 2**63)")
        if any(text == "" for text in self.stop):
            found.append("stop is empty: give the text to stop at")
        if self.threads is not None and self.threads < 1:
            found.append(f"threads={self.threads}: must be at least 1 (or none)")
        return found


def main(argv: list[str]) -> int:
    """Read the options, the checkpoint and the prompt; print the continuations."""
    from model.config import SamplingConfig

    parsed, (run,) = parse_sections(
        argv, {"": SampleOptions, "sampling": SamplingConfig}, usage=USAGE, positionals=["RUN"]
    )
    options, settings = parsed[""], parsed["sampling"]
    prompt = read_prompt(options)

    with ended_by_ctrl_c():
        import torch

        from training.device import Precision
        from training.distributed import pick_device
        from training.weights import load_for_sampling

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    model, tokenizer = load_for_sampling(Path(run), options.which, device)
    with Precision(getattr(torch, options.dtype), device.type).autocast():
        write_samples(model, tokenizer, prompt, options, settings)
    return 0


def read_prompt(options: SampleOptions) -> str:
    """The prompt's text; in a file, as in the data, every end of line counts as a newline.

    Raises ConfigError for a file that is not there, and for what is not UTF-8.
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
    """Print the continuations: one as it comes, several one after the other once they are done, or
    as far as they are at Ctrl-C."""
    pieces = continuations(model, tokenizer, prompt, options, settings)
    if options.num_samples == 1 and options.stream:
        print(shown(prompt, sys.stdout), end="", flush=True)
        try:
            for _, text in pieces:
                print(shown(text, sys.stdout), end="", flush=True)
        finally:
            print()
        return
    texts = [prompt] * options.num_samples
    try:
        for row, text in pieces:
            texts[row] += text
    finally:
        for number, text in enumerate(texts, start=1):
            if options.num_samples > 1:
                print(f"--- sample {number}")
            print(shown(text, sys.stdout))


def continuations(
    model: GPT, tokenizer: Tokenizer, prompt: str, options: SampleOptions, settings: SamplingConfig
) -> Iterator[tuple[int, str]]:
    """(sample number from 0, new text), interleaved, until every sample has ended.

    A prompt longer than the context is said. Raises ConfigError, at once, for characters that the
    tokenizer does not know and for ids that the model does not know.
    """
    import torch

    from data.tokenizer import StreamDecoder, prompt_ids
    from model.generate import generate

    ids, first, skip = prompt_ids(tokenizer, prompt, model.config.vocab_size, options.special)
    device, context = next(model.parameters()).device, model.config.context_length
    if len(ids) > context:
        print(
            f"note: the prompt has {len(ids)} tokens; the model sees the last {context}",
            file=sys.stderr,
        )
    ends = () if options.ignore_eot else tokenizer.stop_ids
    new_ids = generate(
        model,
        torch.tensor([ids] * options.num_samples, device=device),
        settings,
        torch.Generator(device).manual_seed(options.seed),
        stop_ids=ends,
        never=tokenizer.unused_ids(model.config.vocab_size),
        first_ids=first,
    )
    rows = [Row(StreamDecoder(tokenizer, skip), options.stop) for _ in range(options.num_samples)]
    return texts_of(new_ids, rows, ends)


def texts_of(
    new_ids: Iterator[Tensor], rows: list[Row], ends: Collection[int]
) -> Iterator[tuple[int, str]]:
    """Columns of ids, one id a row, as (row, text) as it becomes certain."""
    for column in new_ids:
        for number, (row, token) in enumerate(zip(rows, column.tolist(), strict=True)):
            text = row.push(token, ends=token in ends)
            if text:
                yield number, text
        if all(row.ended for row in rows):
            return
    for number, row in enumerate(rows):
        if not row.ended:
            yield number, row.finish()


class Row:
    """One sample's way from ids to text: complete characters, and nothing of a stop string."""

    def __init__(self, decoder, stops: tuple[str, ...]) -> None:
        self.decoder, self.stops = decoder, stops
        self.held = ""  # may be the beginning of a stop string
        self.ended = False

    def push(self, token: int, ends: bool = False) -> str:
        """The text that this id makes certain; after the end, nothing more."""
        if self.ended:
            return ""
        if ends:
            return self.finish()
        return self._certain(self.held + self.decoder.push(token))

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        text = self._certain(self.held + self.decoder.finish())
        self.ended = True
        return text + self.held

    def _certain(self, text: str) -> str:
        places = [text.find(stop) for stop in self.stops if stop in text]
        if places:
            self.ended, self.held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in sizes if text.endswith(stop[:n])), 0)


if __name__ == "__main__":
    run_command(main)
