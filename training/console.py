"""The terminal: messages and progress of a run. Rank 0 alone prints."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

UNKNOWN_STEPS = 10**9  # the length of a run whose time budget has not been fitted yet

YELLOW, GREEN, PLAIN = "\033[33m", "\033[32m", "\033[0m"


class Console:
    """Prints lines and shows progress, as a bar on a terminal and as plain lines elsewhere.

    `say` is for progress, which --quiet hides; `print` is for results and warnings. Ranks other
    than the first print nothing.
    """

    def __init__(self, first: bool = True, quiet: bool = False) -> None:
        self.first, self.quiet = first, quiet
        self.bar: Any = None
        self.first_step, self.max_steps = 0, UNKNOWN_STEPS
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line unless the run is quiet."""
        if not self.quiet:
            self.print(text)

    def print(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self.first:
            return
        text = colored(text)
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def open_progress(self, first_step: int, max_steps: int) -> None:
        """Start the clock, and the bar if this is a terminal."""
        self.first_step, self.max_steps = first_step, max_steps
        self.started = time.monotonic()
        if self.first and not self.quiet and sys.stderr.isatty():
            from tqdm import tqdm

            # smoothing=0: the time left is estimated from the average speed, evaluations included,
            # as in `eta`. The drawing comes last, so that a narrow terminal cuts off nothing else.
            text = "{n_fmt}/{total_fmt}, {remaining} left{postfix} {bar}"
            shape = {"bar_format": text, "dynamic_ncols": True, "smoothing": 0}
            total = max_steps if max_steps < UNKNOWN_STEPS else None
            self.bar = tqdm(total=total, initial=first_step, **shape)

    def close_progress(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def set_length(self, max_steps: int) -> None:
        """Change the planned length of the run."""
        self.max_steps = max_steps
        if self.bar is not None:
            self.bar.total = max_steps

    def advance(self, step: int) -> None:
        """Move the bar, if there is one, to `step`."""
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def progress(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        mfu: float | None = None,
        *,
        bits_per_byte: float | None = None,
        next_evaluation: int | None = None,
    ) -> None:
        """Show the latest figures on the bar, or print them with the time left.

        next_evaluation: the step of the next evaluation, if there will be one.
        """
        figures = f"loss {loss:.4f}"
        if bits_per_byte is not None:
            figures += f", {bits_per_byte:.3f} bits per byte"
        figures += f", {short(tokens_per_second)} tokens/s"
        used = f", MFU {percent(mfu)}"
        ahead = ""
        if next_evaluation is not None and next_evaluation > step:
            ahead = f", evaluation in {clock_text(self.eta(step, next_evaluation))}"
        if self.bar is not None:
            self.bar.set_postfix_str(figures + ahead + used)
            return
        known = self.max_steps < UNKNOWN_STEPS
        of = f"{step}/{self.max_steps}" if known else f"{step}"
        left = f", {clock_text(self.eta(step))} left" if known else ""
        self.say(f"step {of}: {figures}{used}{left}{ahead}")

    def eta(self, step: int, target: int | None = None) -> float:
        """Seconds to the end, or to step `target`, at the average speed of this process."""
        done = step - self.first_step
        elapsed = time.monotonic() - self.started
        left = (self.max_steps if target is None else target) - step
        return elapsed / done * left if done > 0 else math.inf


def colored(text: str) -> str:
    """Color warnings and advice yellow, a best evaluation green, on a terminal, unless NO_COLOR is
    set (https://no-color.org)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    if text.startswith(("warning", "advice", "note")):
        return f"{YELLOW}{text}{PLAIN}"
    return f"{GREEN}{text}{PLAIN}" if text.endswith("(best so far)") else text


def clock_text(seconds: float) -> str:
    """75 -> "1:15", 3700 -> "1:01:40"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(number: float) -> str:
    """1234567 -> "1.23M"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def percent(share: float | None) -> str:
    """0.456 -> "46%", None -> "n/a"."""
    return "n/a" if share is None else f"{share:.0%}"
