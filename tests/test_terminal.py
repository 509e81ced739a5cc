"""Text for people: plurals, times, lines wrapped and colored for a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import struct
import termios

import pytest

from cli.terminal import GREEN, PLAIN, RED, YELLOW, clock_text, counted, for_terminal


def test_plurals():
    assert counted(1, "file") == "1 file"
    assert counted(0, "file") == "0 files"
    assert counted(12_345, "file") == "12,345 files"
    assert counted(1, "process", "processes") == "1 process"
    assert counted(2, "process", "processes") == "2 processes"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (75, "1:15"),
        (3599.6, "1:00:00"),
        (3771, "1:02:51"),
        (86_399, "23:59:59"),
        (2 * 86_400 + 3 * 3600 + 10 * 60 + 5, "2d 03:10"),
        (math.inf, "?"),
    ],
)
def test_one_format_of_times(seconds, text):
    assert clock_text(seconds) == text


@pytest.fixture
def terminal(monkeypatch):
    """terminal(columns): a stream to a terminal of that width."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    with contextlib.ExitStack() as stack:

        def open_terminal(columns: int):
            ours, theirs = os.openpty()
            stack.callback(os.close, ours)
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 10, columns, 0, 0))
            return stack.enter_context(open(theirs, "w"))

        yield open_terminal


LINE = "data: my_text.txt, 1,234 tokens for training"


def test_a_long_line_is_wrapped_at_words_on_a_terminal_only(terminal):
    wrapped = "data: my_text.txt,\n  1,234 tokens for\n  training"
    assert for_terminal(LINE, terminal(19)) == wrapped
    assert for_terminal(f"{LINE}\n\nshort", terminal(19)) == f"{wrapped}\n\nshort"
    assert for_terminal(LINE, terminal(45)) == LINE  # 44 characters; the last column stays empty
    assert for_terminal("a /very/long/path/of/its/own", terminal(19)) == (
        "a\n  /very/long/path/of/its/own"
    )
    assert for_terminal(LINE, terminal(0)) == LINE  # of unknown width: 80
    assert for_terminal(LINE * 9, io.StringIO()) == LINE * 9


@pytest.mark.parametrize(
    ("text", "color"),
    [
        ("error: e", RED),
        ("warning: w", YELLOW),
        ("advice: a", YELLOW),
        ("note: n", YELLOW),
        ("step 5: ... (best so far)", GREEN),
        ("step 5: ...", ""),
    ],
)
def test_colors_on_a_terminal_and_nowhere_else(text, color, terminal, monkeypatch):
    stream = terminal(80)
    assert for_terminal(text, stream) == (f"{color}{text}{PLAIN}" if color else text)
    assert for_terminal(text, io.StringIO()) == text
    monkeypatch.setenv("NO_COLOR", "1")
    assert for_terminal(text, stream) == text
