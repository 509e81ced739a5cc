"""Batches: every window once per epoch, the same for any number of ranks and any micro-batch."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shards import documents

from cli.options import ConfigError
from data.config import DataConfig
from data.loader import CYCLE, BatchLoader, permute, prefetch, schedule, shares
from data.shards import IGNORE_INDEX, Windows
from model.loss import IGNORE_INDEX as MODELS_IGNORE_INDEX

CPU = torch.device("cpu")


class Simulated:
    """Windows of any number without data: window i holds i and the shift."""

    def __init__(self, n_windows: int, context_length: int = 2) -> None:
        self.context_length, self.sizes, self.weights = context_length, [n_windows], [1.0]

    def pair(self, i: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        return np.array([i, shift]), np.array([shift, i])


class SimulatedMixture(Simulated):
    def __init__(self, sizes: list[int], weights: list[float]) -> None:
        super().__init__(0)
        self.sizes, self.weights = sizes, weights


def loader(n_windows: int, *, seed: int = 1, global_batch: int = 8, micro_batch: int | None = None):
    windows = Simulated(n_windows)
    return BatchLoader(windows, seed=seed, global_batch=global_batch, micro_batch=micro_batch)


def windows_of(loader: BatchLoader, batches: range) -> list[int]:
    return [window for i in batches for _, window, _ in loader.locate(i)]


# The keyed permutation


@given(st.integers(1, 3000), st.integers())
@settings(max_examples=60, deadline=None)
def test_the_order_is_a_permutation(n, key):
    order = permute(np.arange(n, dtype=np.uint64), n, key)
    assert order.dtype == np.uint64
    assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [63, 64, 65, 4095, 4096, 4097, 65537, 300_000])
def test_the_order_is_a_permutation_around_powers_of_two(n):
    assert len(np.unique(permute(np.arange(n, dtype=np.uint64), n, 0))) == n


@given(st.integers(2, 2**62), st.data())
@settings(max_examples=100, deadline=None)
def test_large_orders_stay_in_range_without_collisions(n, data):
    some = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=20, unique=True))
    found = permute(np.array(some, dtype=np.uint64), n, "key")
    assert all(0 <= x < n for x in found.tolist())
    assert len(set(found.tolist())) == len(some)
    one_by_one = [int(permute(np.array([i], dtype=np.uint64), n, "key")[0]) for i in some]
    assert one_by_one == found.tolist()


@pytest.mark.parametrize("n", [3, 10, 100])
def test_every_position_is_equally_likely_for_every_window(n):
    keys = 600
    first = np.array([permute(np.array([0, n - 1], np.uint64), n, key) for key in range(keys)])
    for column in first.T:
        counts = np.bincount(column.astype(int), minlength=n)
        spread = ((counts - keys / n) ** 2 / (keys / n)).sum()  # chi-squared, n - 1 degrees
        assert spread < (n - 1) + 6 * np.sqrt(2 * (n - 1)) + 6


def test_neighbors_are_separated():
    n = 100_000
    order = permute(np.arange(n, dtype=np.uint64), n, 7).astype(np.int64)
    steps = np.abs(np.diff(order))
    assert abs(steps.mean() / (n / 3) - 1) < 0.02  # the mean distance of two random places
    assert np.abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02


# Batches


@pytest.mark.parametrize("n_windows", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize(("micro_batch", "ranks"), [(8, 1), (4, 2), (2, 1), (2, 4), (1, 3), (1, 8)])
def test_every_window_comes_once_per_epoch_for_any_number_of_ranks(n_windows, micro_batch, ranks):
    """Rank r takes micro-batches r, r + ranks, ... of each step; together they see all of it."""
    steps = 3 * n_windows
    split = loader(n_windows, micro_batch=micro_batch)
    M = split.micro_batches
    shares = [[j for j in range(M) if j % ranks == rank] for rank in range(ranks)]
    seen = []
    for step in range(steps):
        rows = {j: split.locate(step * M + j) for share in shares for j in share}
        seen += [row for j in sorted(rows) for row in rows[j]]
    epochs = Counter((epoch, window) for epoch, window, _ in seen)
    assert max(epochs.values()) == 1
    complete = len(seen) // n_windows
    for epoch in range(complete):
        assert {w for e, w in epochs if e == epoch} == set(range(n_windows))
    assert seen == [row for step in range(steps) for row in loader(n_windows).locate(step)]


def test_batches_of_a_step_are_its_micro_batches():
    whole, split = loader(100, global_batch=12), loader(100, global_batch=12, micro_batch=3)
    of_step = {step: whole.batch(step) for step in (0, 1, 8, 9, 12345)}
    for step in (12345, 1, 8, 0, 9):  # in another order: a batch depends on its index alone
        parts = [split.batch(step * 4 + j) for j in range(4)]
        tokens, targets = of_step[step]
        assert torch.equal(torch.cat([p[0] for p in parts]), tokens)
        assert torch.equal(torch.cat([p[1] for p in parts]), targets)
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.shape == (12, 2)


def test_each_seed_and_epoch_has_its_own_order():
    orders = [windows_of(loader(64, seed=seed), range(8)) for seed in range(4)]
    orders += [windows_of(loader(64), range(e * 8, e * 8 + 8)) for e in range(1, 4)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert all(sorted(order) == list(range(64)) for order in orders)


def test_the_order_of_a_seed_never_changes():
    """Another order would change every run that is resumed or repeated."""
    known = [4, 0, 13, 1, 6, 10, 5, 16, 17, 18, 9, 2, 7, 11, 14, 3]
    assert windows_of(loader(20, seed=1337), range(2)) == known
    mixture = SimulatedMixture([50, 400], [0.3, 0.7])
    mixture.context_length = 100
    known = [(22, 37, 76), (8, 446, 69), (4, 187, 49), (8, 293, 69)]
    assert BatchLoader(mixture, seed=1337, global_batch=4).locate(700) == known


def test_the_grid_is_shifted_from_the_second_epoch_on():
    shifted = BatchLoader(Simulated(8, context_length=100), seed=3, global_batch=8)
    shifts = [{shift for _, _, shift in shifted.locate(epoch)} for epoch in range(30)]
    assert shifts[0] == {0} != shifts[1]
    assert all(len(shift) == 1 for shift in shifts)
    values = {shift.pop() for shift in shifts}
    assert len(values) > 20
    assert all(0 <= value < 100 for value in values)
    tokens, targets = shifted.batch(5)
    assert tokens[:, 1].tolist() == [shifted.locate(5)[0][2]] * 8


@pytest.mark.parametrize("kind", ["packed", "document"])
@pytest.mark.parametrize("document_mask", [False, True])
def test_batches_hold_the_windows_that_locate_names(tmp_path, kind, document_mask):
    folder, _ = documents(tmp_path, [5, 1, 30, 16, 17, 2, 90] * 5, [100])
    windows = Windows(folder, "train", 16, kind, document_mask)
    batches = BatchLoader(windows, seed=1, global_batch=8, micro_batch=4)
    found = list(prefetch(batches, range(20), CPU))
    for i, parts in enumerate(found):
        rows = [windows.pair(window, shift) for _, window, shift in batches.locate(i)]
        assert len(parts) == 2 + document_mask
        for part, expected in zip(parts, zip(*rows, strict=True), strict=True):
            assert part.dtype == torch.int64
            assert part.tolist() == np.stack(expected).tolist()
    assert len({tuple(row) for parts in found for row in parts[-1].tolist()}) > 5


def test_index_ten_to_the_nine_costs_what_index_zero_costs():
    large = loader(10**9, global_batch=32)

    def seconds(first: int) -> float:
        times = []
        for i in range(first, first + 60):
            began = time.perf_counter()
            large.batch(i)
            times.append(time.perf_counter() - began)
        return float(np.min(times))

    seconds(0)
    near, far, later = seconds(0), seconds(10**9), seconds(10**12)
    assert far < 3 * near + 1e-4
    assert later < 3 * near + 1e-4


@pytest.mark.parametrize("micro_batch", [3, 5, 16])
def test_a_micro_batch_that_does_not_divide_is_refused(micro_batch):
    with pytest.raises(ValueError, match=f"{micro_batch} does not divide"):
        loader(10, micro_batch=micro_batch)
    problems = DataConfig(global_batch=8, micro_batch=micro_batch).problems()
    assert str(micro_batch) in problems[0]
    assert "8" in problems[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"global_batch": 0},
        {"micro_batch": 0},
        {"micro_batch": -2},
        {"workers": -1},
        {"val_fraction": 1.0},
        {"val_fraction": -0.1},
        {"source": " "},
        {"text_field": ""},
        *({"tokenizer": name} for name in ("ids", "ids:", "ids:0", "ids:x", "ids:2000000")),
    ],
)
def test_options_out_of_range_are_refused_by_name(wrong):
    ((name, value),) = wrong.items()
    (problem,) = DataConfig(**wrong).problems()
    assert problem.startswith(f"data.{name}")
    assert str(value).strip() in problem


def test_model_and_data_ignore_the_same_target():
    assert IGNORE_INDEX == MODELS_IGNORE_INDEX


# Mixtures


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=6))
def test_shares_match_the_weights_to_one_window_per_cycle(weights):
    counts = shares(weights)
    assert counts.sum() == CYCLE
    assert np.abs(counts - np.array(weights) / sum(weights) * CYCLE).max() < 1
    assert shares([0.33334, 0.66666]).tolist() == [
        3333,
        6667,
    ]  # the largest remainder is rounded up


def test_a_weight_too_small_for_one_window_is_refused():
    with pytest.raises(ConfigError, match="1/10000"):
        shares([1.0, 1e-6])


@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.5, 0.25, 0.25], [0.001, 0.999]])
def test_the_schedule_draws_each_source_by_its_weight(weights):
    counts = shares(weights)
    sources, within = schedule(np.arange(2 * CYCLE, dtype=np.uint64), counts, 5)
    for source, count in enumerate(counts):
        mine = within[sources == source]
        assert sorted(mine.tolist()) == list(range(2 * count))  # each number once, none left out
        assert mine[:count].max() == count - 1
        part = (sources[: CYCLE // 2] == source).mean()
        assert abs(part - weights[source]) < 0.03
    # Every cycle and every seed has its own order.
    assert (sources[:CYCLE] != sources[CYCLE:]).any()
    assert (sources != schedule(np.arange(2 * CYCLE, dtype=np.uint64), counts, 6)[0]).any()
    some = np.array([3, CYCLE - 1, CYCLE, CYCLE + 7], dtype=np.uint64)
    again, within_again = schedule(some, counts, 5)
    assert again.tolist() == sources[some].tolist()
    assert within_again.tolist() == within[some].tolist()


def test_each_source_of_a_mixture_has_its_own_epochs():
    mixture = SimulatedMixture([50, 400], [0.5, 0.5])
    batches = BatchLoader(mixture, seed=1, global_batch=500, micro_batch=100)
    rows = [row for i in range(2 * CYCLE // 100) for row in batches.locate(i)]
    small = Counter((e, w) for e, w, _ in rows if w < 50)
    large = Counter((e, w) for e, w, _ in rows if w >= 50)
    assert set(small.values()) == set(large.values()) == {1}
    assert sum(small.values()) == sum(large.values()) == CYCLE
    for epoch in range(CYCLE // 400):
        assert {w for e, w in large if e == epoch} == set(range(50, 450))
    assert {w for _, w, shift in rows if shift} == set(range(450))
    whole = BatchLoader(mixture, seed=1, global_batch=500)
    assert whole.locate(7) == [row for j in range(5) for row in batches.locate(35 + j)]


# Prefetching


def test_prefetch_yields_the_batches_in_order():
    batches = loader(100)
    found = list(prefetch(batches, [5, 0, 3], CPU))
    assert [b[0].tolist() for b in found] == [batches.batch(i)[0].tolist() for i in (5, 0, 3)]


class Failing(Simulated):
    def pair(self, i: int, shift: int = 0):
        if i == 5:
            raise OSError("the disk is gone")
        return super().pair(i, shift)


def test_an_error_in_the_thread_is_raised_in_the_consumer():
    batches = BatchLoader(Failing(8), seed=1, global_batch=1)
    place = windows_of(batches, range(8)).index(5)
    found = []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in prefetch(batches, range(8), CPU):
            found.append(batch)
    assert len(found) == place
    assert not reading()


def reading() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "prefetch" and t.is_alive()]


def test_prefetch_reads_a_little_ahead_and_its_thread_ends_with_it():
    asked = []

    def indices():
        for i in range(10**9):
            asked.append(i)
            yield i

    batches = prefetch(loader(100), indices(), CPU, depth=3)
    assert not asked  # nothing is read before the first batch is requested
    next(batches)
    time.sleep(0.3)
    assert len(asked) <= 6
    assert reading()
    batches.close()
    assert not reading()


@pytest.mark.gpu
def test_prefetch_copies_to_the_gpu():
    batches = loader(100)
    for i, (tokens, targets) in enumerate(prefetch(batches, range(50), torch.device("cuda"))):
        assert tokens.device.type == targets.device.type == "cuda"
        assert torch.equal(tokens.cpu(), batches.batch(i)[0])
