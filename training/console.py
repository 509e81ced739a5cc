"""The terminal: messages and progress of a run. Rank 0 alone prints."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from cli.terminal import clock_text, columns_of, for_terminal, print_line

UNKNOWN_STEPS = 10**9  # the length of a run whose time budget has not been fitted yet

# Parts of the bar's line from left to right, and in the order in which they get room.
PLACES = ("step", "percent", "bar", "loss", "bits", "speed", "MFU", "left", "evaluation")
ADDED = ("step", "loss", "left", "speed", "percent", "bar", "bits", "MFU", "evaluation")
SHORTEST_BAR = 16  # columns


class Console:
    """Prints lines and shows progress, as a bar on a terminal and as plain lines elsewhere.

    `say` is for progress, which --quiet hides; `print` is for results and warnings. Ranks other
    than the first print nothing.
    """

    def __init__(self, first: bool = True, quiet: bool = False) -> None:
        self.first, self.quiet = first, quiet
        self.bar: Any = None
        self.figures: dict[str, str] = {}  # what the bar shows, by part
        self.next_evaluation: int | None = None
        self.first_step, self.max_steps = 0, UNKNOWN_STEPS
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line unless the run is quiet."""
        if not self.quiet:
            self.print(text)

    def print(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.first and self.bar is None:
            print_line(text)
        elif self.first:
            self._shape_bar(self.bar.n)
            self.bar.write(for_terminal(text, sys.stdout), file=sys.stdout)

    def open_progress(self, first_step: int, max_steps: int) -> None:
        """Start the clock, and the bar if this is a terminal."""
        self.first_step, self.max_steps = first_step, max_steps
        self.started = time.monotonic()
        both = sys.stdout.isatty() and sys.stderr.isatty()  # what goes to a file has plain lines
        if self.first and not self.quiet and both:
            from tqdm import tqdm

            cells = "─━" if "utf" in sys.stderr.encoding.lower() else "-#"
            self.bar = tqdm(initial=first_step, ascii=cells, bar_format=" ")
            self._shape_bar(first_step)

    def close_progress(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def set_length(self, max_steps: int) -> None:
        """Change the planned length of the run."""
        self.max_steps = max_steps

    def advance(self, step: int) -> None:
        """Move the bar, if there is one, to `step`."""
        if self.bar is not None:
            self._shape_bar(step)
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
        self.next_evaluation = next_evaluation
        bits = {} if bits_per_byte is None else {"bits": f"{bits_per_byte:.3f} bits per byte"}
        speed = {"speed": f"{short(tokens_per_second)} tokens/s", "MFU": f"MFU {percent(mfu)}"}
        self.figures = {"loss": f"loss {loss:.4f}", **bits, **speed}
        if self.bar is not None:
            self._shape_bar(step)
            self.bar.refresh()
        else:
            parts = self._parts(step)
            self.say(f"{parts.pop('step')}: {', '.join(parts.values())}")

    def _parts(self, step: int) -> dict[str, str]:
        """Return the texts of a progress line by name."""
        known, ahead = self.max_steps < UNKNOWN_STEPS, self.next_evaluation
        parts = {"step": f"step {step}" + f"/{self.max_steps}" * known, **self.figures}
        if known:
            parts["left"] = f"{clock_text(self.eta(step))} left"
        if ahead is not None and ahead > step:
            parts["evaluation"] = f"evaluation in {clock_text(self.eta(step, ahead))}"
        return parts

    def _shape_bar(self, step: int) -> None:
        """Tell tqdm what to show at this step in the window's present width."""
        length, columns = len(str(self.bar)), columns_of(sys.stderr) or 80
        if length > columns:  # the window became narrower: terminals have broken the line into rows
            self.bar.fp.write(f"\r\033[{(length - 1) // columns}A\033[J")  # erase them all
            self.bar.sp = self.bar.status_printer(self.bar.fp)  # which knows what it would erase
        parts = self._parts(step)
        if self.max_steps < UNKNOWN_STEPS:
            self.bar.total = self.max_steps
            parts |= {"percent": f"{100 * step // self.max_steps:2}%", "bar": "-" * SHORTEST_BAR}
        self.bar.ncols = columns - 1  # after the last column some terminals start a new line
        self.bar.bar_format = bar_format(parts, self.bar.ncols)

    def eta(self, step: int, target: int | None = None) -> float:
        """Seconds to the end, or to step `target`, at the average speed of this process."""
        done = step - self.first_step
        elapsed = time.monotonic() - self.started
        left = (self.max_steps if target is None else target) - step
        return elapsed / done * left if done > 0 else math.inf


def bar_format(parts: dict[str, str], columns: int) -> str:
    """Return a line of the parts that fit; see PLACES. tqdm fills it up with the bar, at {bar}."""
    names = [name for name in ADDED if name in parts]
    while len("  ".join(parts[name] for name in names)) > columns:
        names.pop()
    return "  ".join((parts | {"bar": "{bar}"})[name] for name in PLACES if name in names)


def short(number: float) -> str:
    """1234567 -> "1.23M"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def percent(share: float | None) -> str:
    """0.456 -> "46%", None -> "n/a"."""
    return "n/a" if share is None else f"{share:.0%}"
