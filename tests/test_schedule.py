"""The learning rate of every step against values worked out by hand, and general properties."""

from __future__ import annotations

import math

import pytest

from training.config import ScheduleConfig
from training.optimizer import lr_factor

ROOT = math.sqrt(0.5)


def factors(max_steps: int, schedule: str, warmup: int, **options) -> list[float]:
    config = ScheduleConfig(schedule=schedule, warmup_steps=warmup, **options)
    return [lr_factor(step, max_steps, config) for step in range(max_steps)]


@pytest.mark.parametrize(
    ("schedule", "warmup", "options", "expected"),
    [
        ("constant", 3, {}, [0.25, 0.5, 0.75, 1, 1, 1]),
        # Warmup is never longer than the run.
        ("constant", 1000, {}, [1 / 5, 2 / 5, 3 / 5, 4 / 5]),
        # The last 40% of 10 steps decay: 4/4 of the peak at step 6, then 3/4, 2/4, 1/4.
        ("wsd", 1, {"decay_fraction": 0.4}, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        ("wsd", 0, {"decay_fraction": 0.0}, [1] * 5),
        # From 1 to 0.2 in steps of 0.8 / 4.
        ("wsd", 0, {"decay_fraction": 1.0, "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4]),
        # A triangle: warmup ends where the decay begins.
        ("wsd", 5, {"decay_fraction": 0.5}, [1/6, 2/6, 3/6, 4/6, 5/6, 1, 0.8, 0.6, 0.4, 0.2]),
        # They overlap, rising by 1/9 and falling by 1/8 per step: the lower one counts.
        ("wsd", 8, {"decay_fraction": 1.0}, [1/9, 2/9, 3/9, 4/9, 4/8, 3/8, 2/8, 1/8]),
        # After 2 steps of warmup a half cosine over 4: at 0, 45, 90, 135 degrees.
        ("cosine", 2, {}, [1 / 3, 2 / 3, 1, (1 + ROOT) / 2, 0.5, (1 - ROOT) / 2]),
        # Half way along the cosine: the mean of 1 and 0.2.
        ("cosine", 0, {"min_lr_ratio": 0.2}, [1, 0.6 + 0.4 * ROOT, 0.6, 0.6 - 0.4 * ROOT]),
    ],
)  # fmt: skip
def test_every_factor_by_hand(schedule, warmup, options, expected):
    assert factors(len(expected), schedule, warmup, **options) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize("max_steps", [1, 2, 7, 100])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.5, 1.0])
def test_every_factor_is_above_0_and_at_most_1(schedule, max_steps, decay):
    for warmup in (0, 1, 50, 100, 1000):
        found = factors(max_steps, schedule, warmup, decay_fraction=decay)
        assert len(found) == max_steps
        assert all(0 < factor <= 1 for factor in found)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_no_factor_jumps(schedule):
    """However warmup and decay overlap, one step changes the factor by no more than a slope."""
    for warmup in (10, 40, 90, 300):
        found = factors(100, schedule, warmup, decay_fraction=0.5)
        changes = [abs(b - a) for a, b in zip(found, found[1:], strict=False)]
        assert max(changes) < 0.17  # the steepest: a cosine over the last 10 steps
