"""Batches as a pure function of their index, and a thread that reads them ahead."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from cli.options import ConfigError
from data.shards import Row

# The order of windows as arithmetic: a keyed bijection and the schedule of a mixture.
#
# Nothing is stored and nothing is replayed, so number 10^12 costs what number 0 costs.

ROUNDS = 6
SMALLEST_HALF = 3  # bits: a Feistel network over fewer mixes badly
ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, Knuth's multiplicative hash
CYCLE = 10_000  # windows after which a mixture's weights hold exactly


def key_numbers(*key: object) -> np.ndarray:
    """(8,) uint64 that depend on every part of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=64).digest()
    return np.frombuffer(digest, dtype="<u8")


def permute(index: np.ndarray, n: int, key: object) -> np.ndarray:
    """Where a keyed bijection of [0, n) takes each index; uint64 in and out, n up to 2^62.

    A Feistel network over the next power of 4, walked until it comes back into [0, n) (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): fewer than 4 steps on average.
    """
    half = max(SMALLEST_HALF, ((n - 1).bit_length() + 1) // 2)
    round_keys = key_numbers("order", key)[:ROUNDS]
    result = _feistel(np.asarray(index, dtype=np.uint64), half, round_keys)
    outside = result >= n
    while outside.any():
        result[outside] = _feistel(result[outside], half, round_keys)
        outside = result >= n
    return result


def _feistel(x: np.ndarray, half: int, round_keys: np.ndarray) -> np.ndarray:
    """A bijection of [0, 4^half): each round changes one half by a hash of the other."""
    bits = np.uint64(half)
    left, right = x >> bits, x & np.uint64((1 << half) - 1)
    for key in round_keys:
        mixed = (right + key) * ODD
        mixed = (mixed ^ (mixed >> np.uint64(32))) * ODD
        left, right = right, left ^ (mixed >> np.uint64(64 - half))
    return (left << bits) | right


def shares(weights: list[float]) -> np.ndarray:
    """(sources,) int64: how many windows of each CYCLE a source gets; they sum to CYCLE.

    Raises ConfigError for a weight that is too small to get one.
    """
    exact = np.array(weights, dtype=np.float64) / sum(weights) * CYCLE
    found = np.floor(exact).astype(np.int64)
    largest_rest = np.argsort(found - exact, kind="stable")
    found[largest_rest[: CYCLE - int(found.sum())]] += 1
    if found.min() == 0:
        raise ConfigError(
            f"data.source: a weight of {min(weights):.2g} is below the smallest, 1/{CYCLE}"
        )
    return found


def schedule(index: np.ndarray, counts: np.ndarray, key: object) -> tuple[np.ndarray, np.ndarray]:
    """(source, its how-manieth window) of each window of a mixture; counts as `shares` gives them.

    Each cycle of CYCLE windows holds every source's share exactly, in an order of its own; where a
    window stands in its source follows from its place in the cycle.
    """
    sources = np.zeros(len(index), dtype=np.int64)
    within = np.array(index, dtype=np.uint64)
    if len(counts) == 1:
        return sources, within
    ends = np.cumsum(counts)
    cycles, places = np.divmod(within, np.uint64(CYCLE))
    for cycle in np.unique(cycles):
        mine = cycles == cycle
        slots = permute(places[mine], CYCLE, ("cycle", key, int(cycle))).astype(np.int64)
        sources[mine] = found = np.searchsorted(ends, slots, side="right")
        rank = slots - (ends - counts)[found]
        within[mine] = (int(cycle) * counts[found] + rank).astype(np.uint64)
    return sources, within


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
