"""The order of windows as arithmetic: a keyed bijection and the schedule of a mixture.

Nothing is stored and nothing is replayed, so number 10^12 costs what number 0 costs.
"""

from __future__ import annotations

import hashlib

import numpy as np

from cli.options import ConfigError

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
