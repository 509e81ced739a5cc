"""Batches as a pure function of their index: nothing is stored, nothing needs to be replayed.

Windows are counted over the whole run. In epoch e window number k stands at place k of an order
that a keyed bijection gives (a Feistel network with cycle walking, after Black and Rogaway, "Ciphers
with arbitrary finite domains", 2002), so window 10^12 costs what window 0 costs.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import torch

ROUNDS = 6
SMALLEST_HALF = 3  # bits: a Feistel network over fewer mixes badly


def key_numbers(*key: object) -> np.ndarray:
    """(8,) uint64 that depend on every part of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=64).digest()
    return np.frombuffer(digest, dtype="<u8")


def permute(index: np.ndarray, n: int, key: object) -> np.ndarray:
    """Where a keyed bijection of [0, n) takes each index: uint64 in, uint64 out, same shape."""
    half = max(SMALLEST_HALF, ((n - 1).bit_length() + 1) // 2)
    round_keys = key_numbers("order", key)[:ROUNDS]
    result = _feistel(np.asarray(index, dtype=np.uint64), half, round_keys)
    outside = result >= n
    while outside.any():  # walk the cycle until it comes back into [0, n)
        result[outside] = _feistel(result[outside], half, round_keys)
        outside = result >= n
    return result


def _feistel(x: np.ndarray, half: int, round_keys: np.ndarray) -> np.ndarray:
    """A bijection of [0, 4^half): in each round one half is changed by a hash of the other."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> bits, x & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every bit of the input moves every bit of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class BatchLoader:
    """`batch(i)` is micro-batch i % M of step i // M, M = global_batch / micro_batch.

    The windows of a step depend on (data, seed, step) alone; each epoch visits every window once,
    and the last partial batch flows into the next epoch. From epoch 1 on the grid of windows is
    shifted, so that a small text is not always cut at the same places.
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

    def locate(self, i: int) -> list[tuple[int, int, int]]:
        """(epoch, window, shift) of each row of batch i."""
        step, j = divmod(i, self.micro_batches)
        first = step * self.global_batch + j * self.micro_batch
        rows = []
        n = len(self.windows)
        while len(rows) < self.micro_batch:
            epoch, place = divmod(first + len(rows), n)
            count = min(self.micro_batch - len(rows), n - place)
            places = np.arange(place, place + count, dtype=np.uint64)
            order = permute(places, n, (self.seed, epoch))
            shift = self.shift(epoch)
            rows += [(epoch, int(window), shift) for window in order]
        return rows

    def shift(self, epoch: int) -> int:
        """How far the grid of windows is moved in an epoch; 0 in the first."""
        if epoch == 0:
            return 0
        return int(key_numbers("shift", self.seed, epoch)[0]) % self.windows.context_length

    def batch(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets) of micro-batch i, (B, T) int64 each."""
        pairs = [self.windows.pair(window, shift) for _, window, shift in self.locate(i)]
        tokens, targets = zip(*pairs, strict=True)
        return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(targets))


def prefetch(
    loader: BatchLoader, indices: Iterable[int], device: torch.device, depth: int = 2
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of these indices on `device`, read ahead by a thread.

    What goes wrong in the thread is raised here; closing the iterator ends the thread.
    """
    ready: queue.Queue = queue.Queue(depth)
    closed = threading.Event()

    def give(item) -> None:
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
                # Only a pinned copy runs beside the GPU's work.
                give(tuple(t.pin_memory() for t in batch) if device.type == "cuda" else batch)
            give(None)
        except BaseException as error:
            give(error)

    thread = threading.Thread(target=read, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            tokens, targets = item
            yield tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
    finally:
        closed.set()
        thread.join()
