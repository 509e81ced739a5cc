"""Batches as a pure function of their index, and a thread that reads them ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from data.order import key_numbers, permute, schedule, shares
from data.shards import Row

__all__ = ["BatchLoader", "permute", "prefetch"]

Batch = tuple[torch.Tensor, ...]  # tokens, targets and, with document_mask, documents: (B, T) each


class BatchLoader:
    """`batch(i)` is micro-batch i % M of step i // M, M = global_batch / micro_batch.

    Windows are counted from step * global_batch on; what a step sees depends on (data, seed, step)
    alone. Each epoch visits every window once, in an order of its own, and the last partial batch
    flows into the next epoch. From epoch 1 on the grid of windows is shifted, so that a small text
    is not always cut at the same places. In a mixture each source has epochs of its own.

    `windows` has len(), `context_length` and `pair(i, shift)`; a mixture `parts` and `weights` too.
    """

    def __init__(
        self, windows, *, seed: int, global_batch: int, micro_batch: int | None = None
    ) -> None:
        self.windows = windows
        self.seed = seed
        self.global_batch = global_batch
        self.micro_batch = micro_batch or global_batch
        if global_batch % self.micro_batch:
            raise ValueError(f"micro_batch={micro_batch} does not divide {global_batch=}")
        self.micro_batches = global_batch // self.micro_batch
        self._counts = shares(getattr(windows, "weights", [1.0]))
        sizes = [part.n_windows for part in getattr(windows, "parts", ())] or [len(windows)]
        self._sizes = np.array(sizes, dtype=np.uint64)
        self._offsets = np.cumsum([0, *sizes[:-1]])

    def locate(self, i: int) -> list[tuple[int, int, int]]:
        """(epoch, window, shift) of each row of batch i."""
        step, j = divmod(i, self.micro_batches)
        first = step * self.global_batch + j * self.micro_batch
        numbers = np.arange(first, first + self.micro_batch, dtype=np.uint64)
        sources, within = schedule(numbers, self._counts, self.seed)
        epochs, places = np.divmod(within, self._sizes[sources])
        found = np.empty((self.micro_batch, 3), dtype=np.int64)
        for source, epoch in sorted(set(zip(sources.tolist(), epochs.tolist(), strict=True))):
            mine = (sources == source) & (epochs == epoch)
            order = permute(places[mine], int(self._sizes[source]), (self.seed, source, epoch))
            found[mine, 0] = epoch
            found[mine, 1] = order.astype(np.int64) + self._offsets[source]
            found[mine, 2] = self._shift(source, epoch)
        return [(epoch, window, shift) for epoch, window, shift in found.tolist()]

    def _shift(self, source: int, epoch: int) -> int:
        """How far the grid of windows is moved in an epoch; not at all in the first."""
        if epoch == 0:
            return 0
        number = int(key_numbers("shift", self.seed, source, epoch)[0])
        return number % self.windows.context_length

    def batch(self, i: int) -> Batch:
        """Micro-batch i: tokens and targets, (B, T) int64 each, -100 where nothing is learned; with
        document_mask also the number of each token's document within its row, (B, T) int64."""
        return stack([self.windows.pair(window, shift) for _, window, shift in self.locate(i)])


def stack(rows: Sequence[Row]) -> Batch:
    """Rows of windows, side by side: (B, T) for each of their parts."""
    return tuple(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))


def prefetch(
    loader: BatchLoader,
    indices: Iterable[int],
    device: torch.device,
    depth: int = 2,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Batch]:
    """The batches of these indices on `device`, read up to `depth` ahead by a thread.

    Ends early once `stop()` is true, even while a batch is waited for.

    What goes wrong in the thread is raised here. Closing the iterator ends the thread.
    """
    ready: queue.Queue = queue.Queue(depth)
    closed = threading.Event()

    def give(item: object) -> None:
        while not closed.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for i in indices:
                if closed.is_set():
                    return
                batch = loader.batch(i)
                # Only from pinned memory does the copy run beside the GPU's work.
                give(tuple(part.pin_memory() for part in batch) if device.type == "cuda" else batch)
            give(None)
        except BaseException as error:  # whatever it is, it belongs to the consumer
            give(error)

    thread = threading.Thread(target=read, name="prefetch", daemon=True)
    thread.start()
    try:
        while not stop():
            try:
                item = ready.get(timeout=0.1)
            except queue.Empty:
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield tuple(part.to(device, non_blocking=True) for part in item)
    finally:
        closed.set()
        thread.join(1)  # a read that hangs must not hold up the end
