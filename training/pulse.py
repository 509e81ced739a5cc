"""Signs of life: how the others can tell a busy rank from a lost one."""

from __future__ import annotations

import contextlib
import threading

import torch.distributed as dist

BEAT_SECONDS = 1.0


class Pulse:
    """A thread that counts up alive/RANK in the store: this process is there, however busy."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(store, rank), daemon=True)
        self._thread.start()

    def _beat(self, store: dist.Store, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # the store's host has gone: nobody listens
            while not self._done.is_set():
                store.add(f"alive/{rank}", 1)
                self._done.wait(BEAT_SECONDS)

    def stop(self) -> None:
        """End the thread; waits for a beat under way."""
        self._done.set()
        self._thread.join(BEAT_SECONDS)
