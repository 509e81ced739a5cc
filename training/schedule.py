"""The learning rate as a pure function of progress, so that nothing about it has to be saved."""

from __future__ import annotations

import math

from training.config import ScheduleConfig


def lr_factor(step: int, max_steps: int, config: ScheduleConfig) -> float:
    """What every learning rate is multiplied by in the update number `step` + 1, in (0, 1].

    step counts from 0 to max_steps - 1. Warm-up rises linearly over warmup_steps and is above 0 at
    once. The rest of the run
      constant  stays at 1;
      cosine    falls to min_lr_ratio along half a cosine (Loshchilov & Hutter 2016);
      wsd       stays at 1 and falls linearly over the last decay_fraction of the run
                (Zhai et al. 2022; Hu et al. 2024, "MiniCPM").
    The falling part ends one step after the last: the last update still moves a little. Where
    warm-up reaches into it, the lower of the two holds.
    """
    warmup = min(config.warmup_steps, max_steps)
    rising = min(1.0, (step + 1) / (warmup + 1))
    left = max_steps - step
    if config.schedule == "constant":
        return rising
    if config.schedule == "cosine":
        fallen = 1 - min(1.0, left / max(1, max_steps - warmup))
        shape = 0.5 * (1 + math.cos(math.pi * fallen))
    else:
        shape = min(1.0, left / max(1.0, config.decay_fraction * max_steps))
    return min(rising, config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
