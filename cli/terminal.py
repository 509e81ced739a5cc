"""Text for people: plurals and times; lines wrapped and colored for a terminal."""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from contextlib import suppress
from typing import TextIO

RED, YELLOW, GREEN, PLAIN = "\033[31m", "\033[33m", "\033[32m", "\033[0m"


def counted(number: int, thing: str, things: str = "") -> str:
    """Count things: (1, "file") -> "1 file", (2000, "file") -> "2,000 files".

    things: the plural, if it is not formed with an s.
    """
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def clock_text(seconds: float) -> str:
    """75 -> "1:15", 3700 -> "1:01:40", 183600 -> "2d 03:00", infinity -> "?"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def columns_of(stream: TextIO) -> int | None:
    """Return the present width of the terminal that a stream writes to; None if it is not one."""
    with suppress(OSError, ValueError):
        if stream.isatty():
            return os.get_terminal_size(stream.fileno()).columns or 80  # 0: it does not know
    return None


def shown(text: str, stream: TextIO) -> str:
    """Return the text as it is; for a terminal, escape the control characters it would obey."""
    if not stream.isatty():
        return text
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: m[0].encode("unicode_escape").decode(), text
    )


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line, to stdout by default, as `for_terminal` gives it."""
    print(for_terminal(text, stream or sys.stdout), file=stream, flush=True)


def for_terminal(text: str, stream: TextIO) -> str:
    """Return the text unchanged or, if `stream` is a terminal, wrapped at words and colored.

    A word that is longer than a line is left to the terminal to break.
    """
    columns = columns_of(stream)
    if columns is None:
        return text
    wrap = textwrap.TextWrapper(
        width=columns - 1,  # some terminals go to the next line once the last column is filled
        subsequent_indent="  ",
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return colored("\n".join(wrap.fill(line) for line in text.split("\n")))


def colored(text: str) -> str:
    """Color an error red, warnings and advice yellow, a best evaluation green.

    Nothing is colored if NO_COLOR is set (https://no-color.org).
    """
    color = ""
    if text.startswith("error"):
        color = RED
    elif text.startswith(("warning", "advice", "note")):
        color = YELLOW
    elif text.endswith("(best so far)"):
        color = GREEN
    if not color or os.environ.get("NO_COLOR"):
        return text
    return f"{color}{text}{PLAIN}"
