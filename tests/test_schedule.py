"""The learning rate of every step against values worked out by hand, and what holds for all."""

from __future__ import annotations

import math

import pytest

from training.config import ScheduleConfig
from training.optimizer import lr_factor


def factors(max_steps: int, **options) -> list[float]:
    config = ScheduleConfig(**options)
    return [lr_factor(step, max_steps, config) for step in range(max_steps)]


def test_constant_rises_then_stays():
    assert factors(6, schedule="constant", warmup_steps=3) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_a_warm_up_longer_than_the_run_is_as_long_as_the_run():
    assert factors(4, schedule="constant", warmup_steps=1000) == [1 / 5, 2 / 5, 3 / 5, 4 / 5]


def test_wsd_rises_stays_and_falls_in_a_line():
    # 10 steps, the last 40% decay: 4/4 of the peak at step 6, then 3/4, 2/4, 1/4.
    expected = [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    found = factors(10, schedule="wsd", warmup_steps=1, decay_fraction=0.4)
    assert found == pytest.approx(expected)


def test_cosine_is_half_a_cosine_after_the_warm_up():
    # 2 steps of warm-up, then 4 of the half cosine: cos at 0, 45, 90, 135 degrees.
    root = math.sqrt(0.5)
    expected = [1 / 3, 2 / 3, 1, (1 + root) / 2, 0.5, (1 - root) / 2]
    assert factors(6, schedule="cosine", warmup_steps=2) == pytest.approx(expected)


def test_the_falling_part_ends_at_min_lr_ratio():
    # Falls from 1 to 0.2 in steps of 0.8 / 4.
    found = factors(4, schedule="wsd", warmup_steps=0, decay_fraction=1.0, min_lr_ratio=0.2)
    assert found == pytest.approx([1, 0.8, 0.6, 0.4])
    # Half way along the cosine: the mean of 1 and 0.2.
    assert factors(4, schedule="cosine", warmup_steps=0, min_lr_ratio=0.2)[2] == pytest.approx(0.6)


def test_no_decay_at_all_is_constant():
    assert factors(5, schedule="wsd", warmup_steps=0, decay_fraction=0.0) == [1] * 5


def test_warm_up_as_long_as_the_decay_makes_a_triangle():
    found = factors(10, schedule="wsd", warmup_steps=5, decay_fraction=0.5)
    assert found == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 0.8, 0.6, 0.4, 0.2])


def test_where_warm_up_reaches_into_the_decay_the_lower_holds():
    # Rising by 1/9 a step, falling by 1/8: they cross between steps 4 and 5.
    found = factors(8, schedule="wsd", warmup_steps=8, decay_fraction=1.0)
    assert found == pytest.approx([1 / 9, 2 / 9, 3 / 9, 4 / 9, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize("max_steps", [1, 2, 7, 100])
@pytest.mark.parametrize("warmup", [0, 1, 50, 100, 1000])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.5, 1.0])
def test_every_factor_is_above_0_and_at_most_1(schedule, max_steps, warmup, decay):
    found = factors(max_steps, schedule=schedule, warmup_steps=warmup, decay_fraction=decay)
    assert len(found) == max_steps
    assert all(0 < factor <= 1 for factor in found)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_nothing_jumps(schedule):
    """However warm-up and decay overlap, one step changes the factor by no more than a slope."""
    for warmup in (10, 40, 90, 300):
        found = factors(100, schedule=schedule, warmup_steps=warmup, decay_fraction=0.5)
        changes = [abs(b - a) for a, b in zip(found, found[1:], strict=False)]
        assert max(changes) < 0.17  # the steepest: a cosine over the last 10 steps
