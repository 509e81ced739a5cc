"""Generate text from a trained model: `python sample.py out/small "def "`."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cli.command import ended_by_ctrl_c, run_command
from cli.elsewhere import SAMPLING
from cli.options import (
    AT_LEAST_1,
    AT_LEAST_1_OR_NONE,
    SEED,
    ConfigError,
    out_of_range,
    parse_sections,
)
from cli.terminal import print_line, shown

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from data.tokenizer import Tokenizer
    from model.config import SamplingConfig
    from model.gpt import GPT

USAGE = (
    "python sample.py RUN [PROMPT] [--name=value ...], "
    'for example: python sample.py out/small "def "'
)


@dataclass(frozen=True)
class SampleOptions:
    """Prompt, number of samples, checkpoint and device."""

    prompt: Annotated[str, "text to continue; default: the start of a document"] = ""
    prompt_file: Annotated[str, "read the prompt from this file (UTF-8); -: standard input"] = ""
    chat: Annotated[bool, "hold a conversation; piped lines are answered one by one"] = False
    system: Annotated[str, "system message of the conversation"] = ""
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
        if self.system and not self.chat:
            found.append("system has an effect only with --chat")
        default = SampleOptions()
        for name in ("prompt", "prompt_file", "special", "num_samples", "ignore_eot", "stream"):
            if self.chat and getattr(self, name) != getattr(default, name):
                found.append(f"{name} has no effect with --chat: remove it")
        if "" in self.stop:
            found.append("stop is empty: give the text to stop at")
        return found


def main(argv: list[str]) -> int:
    """Parse the options, load the checkpoint and print the samples."""
    from model.config import SamplingConfig

    sections = {"": SampleOptions, "sampling": SamplingConfig}
    parsed, (run, *typed) = parse_sections(
        argv, sections, usage=USAGE, positionals=["RUN", "[PROMPT]"], hints=SAMPLING
    )
    options, settings = parsed[""], parsed["sampling"]
    if typed:
        options = with_prompt(options, typed[0])
    prompt = read_prompt(options)

    with ended_by_ctrl_c():
        import torch

        from training.device import Precision
        from training.inference import load

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load(run, options.which, device=options.device)
    device = model.head_weight.device.type
    with Precision(getattr(torch, options.dtype), device).autocast():
        if options.chat:
            from training.chat import Conversation, converse

            stop, seed = options.stop, options.seed
            talk = Conversation(model, tokenizer, options.system, seed=seed, stop=stop)
            converse(talk, settings)
        else:
            write_samples(model, tokenizer, prompt, options, settings)
    return 0


def with_prompt(options: SampleOptions, prompt: str) -> SampleOptions:
    """Return the options with the prompt that was typed without --prompt.

    Raises ConfigError if there is another one.
    """
    if options.chat:
        raise ConfigError(f"unexpected argument {prompt!r}: with --chat, type it when asked")
    if options.prompt or options.prompt_file:
        raise ConfigError(f"the prompt is given twice, as {prompt!r} and as an option: keep one")
    return replace(options, prompt=prompt)


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
    from training.inference import continuations

    new = continuations(
        model,
        tokenizer,
        prompt,
        settings,
        rows=options.num_samples,
        seed=options.seed,
        stop=options.stop,
        special=options.special,
        ignore_eot=options.ignore_eot,
        say=functools.partial(print_line, stream=sys.stderr),
    )
    texts = [prompt] * options.num_samples
    streaming = options.stream and len(texts) == 1
    if streaming:
        print(shown(prompt, sys.stdout), end="", flush=True)
    try:
        for number, text in new:
            texts[number] += text
            if streaming:
                print(shown(text, sys.stdout), end="", flush=True)
    finally:  # Ctrl-C ends the samples where they are
        if streaming:
            print()
        for number, text in enumerate([] if streaming else texts, start=1):
            if len(texts) > 1:
                print(f"--- sample {number}")
            print(shown(text, sys.stdout))


if __name__ == "__main__":
    run_command(main)
