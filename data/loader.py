"""Batches as a pure function of their index, and a thread that reads them ahead."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence

import numpy as np
import torch

from cli.options import ConfigError
from data.shards import Row

Batch = tuple[torch.Tensor, ...]  # tokens, targets and, with document_mask, documents: (B, T) each


class BatchLoader:
    """`batch(i)` is micro-batch i % M of step i // M, where M = global_batch / micro_batch.

    What a step sees depends on (data, seed, step) alone, so a resumed run needs no loader state and
    any number of ranks sees the same windows. Every epoch visits every window once, in an order of
    its own; the last, partial batch of an epoch is filled from the next. From the second epoch on
    the grid of windows is shifted, so that a small text is not always cut at the same places. In a
    mixture each source has its own epochs.

    windows: has `context_length`, `pair(i, shift)` and, for each source, `sizes` and `weights`.
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
        self._counts = shares(windows.weights)
        self._sizes = np.array(windows.sizes, dtype=np.uint64)
        self._offsets = np.cumsum([0, *windows.sizes[:-1]])

    def batch(self, i: int) -> Batch:
        """Micro-batch i: tokens and targets, (B, T) int64 each, IGNORE_INDEX (-100) where a target
        does not count; with document_mask also the document of each token within its row."""
        return stack([self.windows.pair(window, shift) for _, window, shift in self.locate(i)])

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
        """The number of tokens by which the grid is shifted in an epoch; 0 in the first."""
        if epoch == 0:
            return 0
        number = int(key_numbers("shift", self.seed, source, epoch)[0])
        return number % self.windows.context_length


def stack(rows: Sequence[Row]) -> Batch:
    """Stack rows of windows: (B, T) for each of their parts."""
    return tuple(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))


# The order of windows, by arithmetic: nothing is stored or replayed, so window 10^12 costs what
# window 0 costs.

ROUNDS = 6
SMALLEST_HALF = 3  # bits: a Feistel network over fewer mixes badly
ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Knuth's multiplicative hashing
CYCLE = 10_000  # windows of a mixture after which its weights hold exactly


def permute(index: np.ndarray, n: int, key: object) -> np.ndarray:
    """Map each index through a keyed permutation of [0, n); uint64 in and out, n up to 2^62.

    A Feistel network permutes the range up to the next power of 4. An index that lands outside
    [0, n) goes through it again until it is inside: fewer than 4 times on average (cycle walking,
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
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
    """Permute [0, 4^half). Each round XORs one half with a hash of the other, so every round can be
    undone, whatever the hash: the whole is a permutation."""
    bits = np.uint64(half)
    left, right = x >> bits, x & np.uint64((1 << half) - 1)
    for key in round_keys:
        mixed = (right + key) * ODD
        mixed = (mixed ^ (mixed >> np.uint64(32))) * ODD
        left, right = right, left ^ (mixed >> np.uint64(64 - half))
    return (left << bits) | right


def key_numbers(*key: object) -> np.ndarray:
    """Return (8,) uint64 random numbers that depend on every part of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=64).digest()
    return np.frombuffer(digest, dtype="<u8")


def shares(weights: list[float]) -> np.ndarray:
    """(sources,) int64: the number of windows that each source gets per CYCLE; they sum to CYCLE.

    Raises ConfigError if a weight is too small for one window.
    """
    exact = np.array(weights, dtype=np.float64) / sum(weights) * CYCLE
    counts = np.floor(exact).astype(np.int64)
    largest_rest = np.argsort(counts - exact, kind="stable")
    counts[largest_rest[: CYCLE - int(counts.sum())]] += 1
    if counts.min() == 0:
        raise ConfigError(
            f"data.source: the weight {min(weights):.2g} is too small; the smallest is 1/{CYCLE}"
        )
    return counts


def schedule(index: np.ndarray, counts: np.ndarray, key: object) -> tuple[np.ndarray, np.ndarray]:
    """(source, index within the source) of each window of a mixture; counts: from `shares`.

    Each cycle of CYCLE windows is a shuffled deck that holds every source's share exactly.
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


def prefetch(
    loader: BatchLoader,
    indices: Iterable[int],
    device: torch.device,
    depth: int = 2,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[Batch]:
    """Yield the batches of these indices on `device`; a thread reads up to `depth` ahead.

    Ends early once `stop()` is true, even while waiting for a batch. An error in the thread is
    raised here. Closing the iterator ends the thread.
    """
    ready: queue.Queue = queue.Queue(depth)
    closed = threading.Event()

    def put(item: object) -> None:
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
                # Copies to the GPU overlap with its work only if they come from pinned memory.
                put(tuple(part.pin_memory() for part in batch) if device.type == "cuda" else batch)
            put(None)
        except BaseException as error:  # any error belongs to the consumer
            put(error)

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
        thread.join(1)  # not longer: a read that hangs must not hold up the exit
