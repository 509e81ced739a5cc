"""A conversation with a model, in the terminal or over pipes: `python sample.py RUN --chat`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from cli.options import ConfigError
from cli.terminal import print_line, shown
from data.chat import COUNTS, Messages, render
from data.tokenizer import StreamDecoder, Tokenizer, check_ids
from model.attention import KVCache
from model.config import SamplingConfig
from model.generate import generate
from model.gpt import GPT
from training.inference import Row, new_texts

COMMANDS = "/reset: forget; /save FILE: keep; Ctrl-C: end the answer; Ctrl-D: quit"


class Conversation:
    """Messages, and a model that answers them.

    The keys and values of what was rendered before are kept, so that an answer costs only the ids
    that are new. When the context is full, the oldest turns are no longer shown to the model.

    messages: all so far. left_out: turns that the model no longer sees. cut: whether the last
    answer ended because it reached its limit of tokens.
    Raises ConfigError for a tokenizer without a chat template, or one that refuses `system`.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        system: str = "",
        *,
        seed: int = 1,
        stop: Sequence[str] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"chat=true: {tokenizer.name} has no chat template, so the model was not trained "
                "on conversations; train one with --format=chat, or leave --chat out"
            )
        self.model, self.tokenizer, self.stop = model, tokenizer, tuple(stop)
        self.opening = [{"role": "system", "content": system}] if system else []
        self.rng = torch.Generator(model.head_weight.device).manual_seed(seed)
        self.stop_ids = self._stop_ids()
        self.cache: KVCache | None = None
        self.known: list[int] = []  # ids whose keys and values the cache holds, and maybe one more
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages: Messages = list(self.opening)
        self.left_out, self.cut = 0, False

    def _stop_ids(self) -> tuple[int, ...]:
        """The tokenizer's own, and the special token that ends an answer in the template."""
        talk = [("user", "?"), ("assistant", "!")]
        found = render(
            [*self.opening, *({"role": role, "content": text} for role, text in talk)],
            self.tokenizer,
        )
        ends = set(found.ids[(found.mask & COUNTS) > 0][-1:].tolist())
        return (*self.tokenizer.stop_ids, *(ends & set(self.tokenizer.special.values())))

    def answer(self, question: str, settings: SamplingConfig) -> Generator[str]:
        """Yield the answer in pieces. It joins the messages, also if it is closed before its end.

        Raises ConfigError, and leaves the messages as they were, if the question does not fit the
        context, or the template or the tokenizer refuses it.
        """
        self.messages.append({"role": "user", "content": question})
        try:
            ids = self._prompt(settings)
        except BaseException:  # an impatient Ctrl-C, too: no two questions in a row
            self.messages.pop()
            raise
        settings = replace(
            settings,
            max_new_tokens=min(
                settings.max_new_tokens, self.model.config.context_length - len(ids)
            ),
        )
        row, said = Row(StreamDecoder(self.tokenizer), self.stop), ""
        try:
            new_ids = self._new_ids(ids, settings)
            for _, text in new_texts(new_ids, [row], self.stop_ids):
                said += text
                yield text
        finally:
            self.messages.append({"role": "assistant", "content": said})
            drawn = self.known[len(ids) :]
            self.cut = len(drawn) == settings.max_new_tokens and drawn[-1] not in self.stop_ids

    def _prompt(self, settings: SamplingConfig) -> list[int]:
        """Render the messages, without the oldest turns if there would be no room for an answer."""
        context, first = self.model.config.context_length, len(self.opening)
        room = min(settings.max_new_tokens, context // 4)
        for left_out in range(self.left_out, len(self.messages)):
            recent = self.messages[first + 2 * left_out :]
            ids = render([*self.opening, *recent], self.tokenizer, reply=True).ids.tolist()
            if len(ids) + room <= context:
                break
            if len(recent) == 1:
                raise ConfigError(
                    f"the question has {len(ids)} tokens with what surrounds it, and the context "
                    f"of {context} has to leave {room} for an answer: shorten it"
                )
        check_ids(ids, self.model.config.vocab_size, self.tokenizer)
        self.left_out = left_out
        return ids

    def _new_ids(self, ids: list[int], settings: SamplingConfig) -> Iterator[Tensor]:
        """Draw ids after these, of which the cache may hold the beginning."""
        config, needed = self.model.config, len(ids) + settings.max_new_tokens
        if self.cache is None or self.cache.capacity < needed:  # doubled, so that it happens rarely
            self.cache = KVCache(config.n_layers, min(config.context_length, 2 * needed))
            self.known = []
        pairs = enumerate(zip(self.known, ids, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(self.known), len(ids)))
        self.cache.truncate(min(same, len(ids) - 1))  # the last id's logits are needed
        self.known = list(ids)
        prompt = torch.tensor([ids], device=self.model.head_weight.device)
        never = self.tokenizer.unused_ids(config.vocab_size)
        for new in generate(
            self.model,
            prompt,
            settings,
            self.rng,
            stop_ids=self.stop_ids,
            never=never,
            cache=self.cache,
        ):
            self.known += new.tolist()
            yield new


# The terminal and pipes


def converse(conversation: Conversation, settings: SamplingConfig) -> None:
    """Answer what is typed until Ctrl-D, or each line of standard input if it is not a terminal.

    Over a pipe, each answer is one line, with its newlines escaped.
    Raises ConfigError for a line of a pipe that is not UTF-8 or cannot be answered.
    """
    if not sys.stdin.isatty():
        _converse_over_pipes(conversation, settings)
        return
    with suppress(ImportError):
        import readline  # noqa: F401 (input() then has a history and can be edited)
    print_line(COMMANDS)
    while True:
        try:
            line = input("> ").encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            if not obeyed(line.strip(), conversation, print_line) and line.strip():
                _answer(line, conversation, settings)
        except ConfigError as error:
            print_line(f"error: {error}")
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends the conversation)")
        except EOFError:
            print()
            return


def _answer(line: str, conversation: Conversation, settings: SamplingConfig) -> None:
    """Print an answer while it is generated, until its end or Ctrl-C."""
    left_out, interrupted = conversation.left_out, False
    with _ctrl_c() as pressed, closing(conversation.answer(line, settings)) as answer:
        for text in answer:
            print(shown(text, sys.stdout), end="", flush=True)
            if interrupted := pressed():
                break
    print(" ..." if interrupted or conversation.cut else "")
    if conversation.left_out and not left_out:
        print_line("(the context is full: from here on the model does not see the oldest turns)")


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C is only noted, as the yielded function tells: PyTorch may be at work. Pressed
    again, it raises KeyboardInterrupt."""
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _converse_over_pipes(conversation: Conversation, settings: SamplingConfig) -> None:
    said = conversation.left_out
    for number, raw in enumerate(sys.stdin.buffer, start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"line {number} is not UTF-8 at byte {error.start}") from None
        if obeyed(line.strip(), conversation, lambda text: print_line(text, sys.stderr)):
            continue
        text = "".join(conversation.answer(line, settings)) if line.strip() else ""
        print(shown(text, sys.stdout).replace("\\", "\\\\").replace("\n", "\\n"), flush=True)
        if conversation.left_out and not said:
            print_line("note: the context is full: the oldest turns are left out", sys.stderr)
            said = True


def obeyed(line: str, conversation: Conversation, say: Callable[[str], object]) -> bool:
    """Obey a command; return False for a line that is not one. Raises ConfigError for a command
    that does not exist, or a file that cannot be written or exists already."""
    if not line.startswith("/"):
        return False
    name, _, rest = line.partition(" ")
    if name == "/reset" and not rest:
        conversation.reset()
        say("(the conversation begins again)")
    elif name == "/save" and rest.strip():
        path = Path(rest.strip()).expanduser()
        row = json.dumps({"messages": conversation.messages}, ensure_ascii=False) + "\n"
        try:
            with path.open("x", encoding="utf-8") as stream:  # x: fails if it exists
                stream.write(row)
        except OSError as error:
            raise ConfigError(f"{path}: not saved ({error.strerror}); choose another") from None
        say(f"(saved as {path}: a line of JSON, as --format=chat reads it)")
    else:
        raise ConfigError(f"{line.split()[0]}: not a command; {COMMANDS}")
    return True
