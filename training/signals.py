"""Stopping on a signal: finish the step, save, exit. A second Ctrl-C exits at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# HUP: the terminal or connection was closed. USR1, USR2, XCPU: sent by batch systems before the
# time limit. QUIT (Ctrl-\) keeps its default, which ends the process at once and damages nothing.
STOPPING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")


class Interrupts:
    """While the block runs, a signal sets `signal` instead of ending the process.

    The loop looks at it once per step, so nothing is interrupted halfway. A signal that was ignored
    when the process started (nohup, background jobs) stays ignored.
    """

    def __init__(self, announce: bool = False) -> None:
        self.signal: int | None = None
        self.agreed = False  # all ranks know that one of them was asked to stop
        self.announce = announce  # tell the terminal that Ctrl-C was received
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + signal, the convention of shells; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for name in STOPPING:
                number = getattr(signal, name, None)  # Windows has only two of them
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            os._exit(128 + number)  # safe: a checkpoint is complete or absent
        self.signal = self.signal or number
        if number == signal.SIGINT and self.announce:
            with contextlib.suppress(OSError):  # the terminal may be gone; print() is unsafe here
                os.write(2, b"\nsaving and stopping; Ctrl-C again quits at once\n")
