"""Commands in terminals of 60 to 200 columns, drawn by a terminal emulator."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte
import pytest

from cli.command import run_command
from data.prepare import main as prepare
from train import main as train

ROOT = Path(__file__).parents[1]
WIDTHS = pytest.mark.parametrize("columns", [60, 80, 120, 200])


def seen(columns: int, main: Callable, argv: list, stop_at: str = "") -> tuple[int, list[str]]:
    """Run a command in a terminal; return its exit code and the lines on the screen at its end.

    It runs in a fork of this process, which saves the time to import torch.

    The screen is far wider than the terminal says it is: a line that the terminal would break is
    longer than `columns`. stop_at: press Ctrl-C once this text is there.
    """
    screen, written = pyte.Screen(400, 100), b""
    pid, terminal = pty.fork()
    if not pid:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", 100, columns, 0, 0))
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8") for n in (1, 2))  # noqa: SIM115
        sys.argv = ["script.py", *map(str, argv)]
        try:
            run_command(main)
        except SystemExit as ended:
            os._exit(ended.code)
        finally:
            os._exit(1)
    with contextlib.suppress(OSError):  # the command has ended
        while select.select([terminal], [], [], 30)[0]:
            written += os.read(terminal, 1 << 16)
            if stop_at and stop_at.encode() in written:
                os.kill(pid, signal.SIGINT)
                stop_at = ""
    os.kill(pid, signal.SIGKILL)  # if it hangs
    pyte.ByteStream(screen).feed(written)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, [line.rstrip() for line in screen.display if line.strip()]


def breaks(lines: list[str], columns: int) -> list[str]:
    """Return the lines that the terminal would break; a single long word cannot be wrapped."""
    return [line for line in lines if len(line) >= columns and len(line.split()) > 1]


BAR = r"step \d+/\d+( +\d+%( +[━─]{16,})?)?  loss \d\.\d{4}.*  \S+ tokens/s.*  [\d:]+ left"


@WIDTHS
def test_a_run_from_its_opening_to_ctrl_c(columns, tiny_argv, tmp_path):
    argv = tiny_argv(tmp_path / "run", max_steps=999, eval_interval=50, interval=10)
    code, lines = seen(columns, train, argv, stop_at="step 50: validation")
    assert code == 130
    assert not breaks(lines, columns)
    text = "\n".join(lines)
    heads = ["device: cpu", "model:", "data:", "training:", "estimate:", "folder:"]
    assert all(f"\n{head}" in "\n" + text for head in heads)
    assert "saved /" not in text  # no line per checkpoint
    bar = next(line for line in lines if re.match(r"step +\d+/", line))
    assert re.match(BAR, bar)
    assert ("━" in bar or "─" in bar) == (columns >= 80)
    assert ("bits per byte" in bar, "evaluation in" in bar) == (columns >= 120, columns >= 200)
    assert "stopped at step" in text


@WIDTHS
def test_a_run_to_its_end_and_its_samples(columns, tiny_argv, tmp_path):
    code, lines = seen(columns, train, tiny_argv(tmp_path / "run", max_steps=20))
    assert code == 0
    assert any(line.startswith("finished at step 20: all steps done") for line in lines)
    assert any(line.startswith("to generate more: ") for line in lines)
    assert not breaks(lines, columns)


@WIDTHS
def test_mistakes_and_a_dry_run(columns, tmp_path):
    code, lines = seen(columns, train, ["config/debug.py", "--lr=fast", "--batch_sise=3"])
    assert code == 2
    assert sum(line.startswith("error: ") for line in lines) == 2
    assert not breaks(lines, columns)
    (tmp_path / "a.txt").write_text("to be, or not to be, that is the question\n" * 99)
    options = ["--tokenizer=char", f"--prepared_dir={tmp_path}"]
    code, lines = seen(columns, prepare, [f"--source={tmp_path / 'a.txt'}", "--dry_run", *options])
    assert code == 0
    assert "with 1 process" in " ".join(" ".join(lines).split())
    assert not breaks(lines, columns)


@pytest.mark.browser
def test_a_bar_survives_a_window_that_is_resized(tiny_argv, tmp_path):
    """In tmux, which breaks and joins lines as the window changes. Needs Debian's tmux."""
    tmux = [shutil.which("tmux") or pytest.fail("no tmux"), "-S", str(tmp_path / "tmux")]

    def call(*words: object) -> str:
        command = [*tmux, "-f", "/dev/null", *map(str, words)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    whole = BAR + r"(  evaluation in [\d:]+)?"
    argv = tiny_argv(tmp_path / "run", max_steps=10**5, eval_interval=10**5, interval=10)
    call("new-session", "-d", "-x", 200, "-y", 50, "-c", ROOT, sys.executable, "train.py", *argv)
    try:
        for columns in (200, 60, 100, 60, 80, 120):
            call("resize-window", "-x", columns)
            for _ in range(30):
                time.sleep(1)
                text = call("capture-pane", "-p")
                bars = [line for line in text.splitlines() if "/100000" in line or " left" in line]
                if len(bars) == 1 and re.fullmatch(whole, bars[0]):
                    break
            else:
                pytest.fail(f"{columns} columns:\n{text}")
    finally:
        call("kill-server")
