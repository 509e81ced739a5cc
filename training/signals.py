"""Being asked to stop: note it, finish the step, save, end. Asked twice by Ctrl-C: end at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType

# HUP: the terminal or the connection is closed. USR1, USR2, XCPU: what batch systems send before
# the time is up. QUIT (Ctrl-\) is left alone: it ends a process at once, and tears nothing either.
STOPPING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")


class Interrupts:
    """While the block runs, signals set `signal` instead of ending the process.

    The loop looks at it once a step, so nothing is ever cut in the middle. A signal that was
    ignored when the process began (nohup, a shell's background job) stays ignored.
    """

    def __init__(self, announce: bool = False) -> None:
        self.signal: int | None = None
        self.stopping = False  # all ranks know that one of them was asked to stop
        self.announce = announce  # say on the terminal that Ctrl-C was heard
        self._before: dict[int, object] = {}

    @property
    def stop(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells have it; 0 if none came."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for name in STOPPING:
                number = getattr(signal, name, None)  # Windows has only two of them
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            os._exit(128 + number)  # checkpoints are complete or absent, so nothing is torn
        self.signal = self.signal or number
        if number == signal.SIGINT and self.announce:  # print() is not safe in a handler
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, b"\nfinishing this step and saving; Ctrl-C once more ends at once\n")
