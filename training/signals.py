"""Being asked to stop: note it, finish the step, save, end. Asked twice by Ctrl-C: end at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType

STOPPING = ("SIGTERM", "SIGINT", "SIGUSR1")  # USR1: what batch systems send before the time is up


class Interrupts:
    """While the block runs, signals set `signal` instead of ending the process.

    The loop looks at it once a step, so nothing is ever cut in the middle.
    """

    def __init__(self, announce: bool = False) -> None:
        self.signal: int | None = None
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
                number = getattr(signal, name, None)  # Windows has no USR1
                if number is not None:
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
