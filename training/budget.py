"""Length of a run: max_steps, patience, or a time budget (`--time_budget=10m`).

A time budget trains for as many steps as fit into it, with the schedule fitted to their number. It
counts from the first step, across resumes: evaluation and saving included, the time between two
processes not. Rank 0 measures and decides; the other ranks get the number of steps along with the
count of targets, so that all change it at the same step. Every fit (step, max_steps) is saved, so
the learning rate of each step follows from the fits alone and a run can be repeated exactly.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cli.options import ConfigError
from training.checkpoint import TrainState, find_checkpoint
from training.config import Config, OptimConfig, RunConfig, ScheduleConfig, seconds_of
from training.console import UNKNOWN_STEPS
from training.optimizer import lr_factor

FIRST_FIT = 3  # steps measured before the first fit, besides the very first step
FITS = 50  # per budget
WINDOW = 200  # steps over which the speed is measured
PAUSE = 5.0  # times as long as usual: the process or its machine was stopped

Fit = tuple[int, ...]  # (step, max_steps): from this step on the run is this long


def planned_steps(run: RunConfig, state: TrainState) -> int:
    """Return the number of updates of the whole run: with a time budget the latest fit, or
    UNKNOWN_STEPS before the first. Until then warmup and the stable phase need no length."""
    return steps_at(state.fits, state.step) if run.time_budget else run.max_steps


def out_of_patience(run: RunConfig, state: TrainState) -> bool:
    return 0 < run.patience <= state.since_best


def steps_at(fits: Sequence[Fit], step: int) -> int:
    """Return the length that counts for update number `step` + 1."""
    known = [max_steps for since, max_steps in fits if since <= step]
    return known[-1] if known else UNKNOWN_STEPS


def fitted(config: Config, max_steps: int) -> ScheduleConfig:
    """Return the schedule of a run of this length: with a time budget, warmup takes at most a tenth
    of it."""
    schedule = config.schedule
    if not config.run.time_budget:
        return schedule
    warmup = min(schedule.warmup_steps, max(1, max_steps // 10))
    return replace(schedule, warmup_steps=warmup)


def next_factor(config: Config, state: TrainState) -> float:
    """Return the factor of the learning rates in the next update."""
    length = planned_steps(config.run, state)
    return lr_factor(state.step, length, fitted(config, length))


def lengthened(old: RunConfig, new: RunConfig, state: TrainState) -> tuple[Fit, ...]:
    """Return the fits of a run that is resumed with this time budget. If it is another one, its
    first steps are planned at the average speed so far, until the speed is measured again."""
    if old.time_budget == new.time_budget or not new.time_budget or state.step == 0:
        return state.fits
    if new.time_budget.startswith("fits:"):
        return state.fits
    left = max(0.0, seconds_of(new.time_budget) - state.seconds)
    more = int(left * state.step / state.seconds) if state.seconds else UNKNOWN_STEPS
    return (*state.fits, (state.step, state.step + more))


def rate_note(saved: Config, config: Config, state: TrainState) -> str:
    """Return a line on the learning rate after a resume; "" if the resume does not change it."""
    fits = lengthened(saved.run, config.run, state)
    step, length = state.step, planned_steps(config.run, replace(state, fits=fits))
    was, now = ((c.schedule, c.optim, c.run.max_steps, c.run.time_budget) for c in (saved, config))
    if was == now or not 0 < step < length < UNKNOWN_STEPS:
        return ""
    schedule = fitted(config, length)
    factors = [lr_factor(k, length, schedule) for k in range(step, length)]
    before = next_factor(saved, replace(state, step=step - 1))
    old, new = _rates(saved.optim, before), _rates(config.optim, factors[0])
    risen = before < factors[0] and step > saved.schedule.warmup_steps
    verb = "rises again" if risen else "changes"
    line = f"stays at {new}" if old == new else f"{verb} from {old} to {new} in step {step + 1}"
    peak_end = length - factors[::-1].index(max(factors))
    last = f", decays after step {peak_end} to {_rates(config.optim, factors[-1])} in step {length}"
    return f"learning rate: {line}{last if peak_end < length else ', to the end'}"


def _rates(optim: OptimConfig, factor: float) -> str:
    muon = f" (Muon {optim.muon_lr * factor:.3g})" if optim.optimizer == "muon" else ""
    return f"{optim.lr * factor:.3g}{muon}"


def open_budget(run: RunConfig, state: TrainState) -> Budget | None:
    """Start measuring a run's time budget; return None if it has none.

    Raises ConfigError if the run to repeat is missing or had no time budget.
    """
    if not run.time_budget:
        return None
    if not run.time_budget.startswith("fits:"):
        return Budget(seconds_of(run.time_budget), run.eval_interval, state.seconds)
    source = Path(run.time_budget.removeprefix("fits:"))
    try:
        fits = find_checkpoint(source, "latest").state.fits
    except ConfigError as error:
        raise ConfigError(f"run.time_budget={run.time_budget}: {error}") from error
    if not fits:
        raise ConfigError(f"run.time_budget={run.time_budget}: {source} had no time budget")
    return Budget(math.inf, run.eval_interval, state.seconds, replay=fits)


class Budget:
    """Measures a run and computes how many steps fit.

    spent: seconds used by earlier processes. replay: fits of another run to follow instead of
    measuring.

    A pause (SIGSTOP, a debugger, a suspended machine) uses up its time once, but is not expected to
    come again: a duration PAUSE times as long as usual counts as a usual one for the speed.
    """

    def __init__(
        self,
        seconds: float,
        eval_interval: int,
        spent: float = 0.0,
        *,
        replay: Sequence[Fit] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds, self.eval_interval, self.before = seconds, eval_interval, spent
        self.replay = None if replay is None else {step: length for step, length in replay}
        self.clock = clock
        self.began: float | None = None  # when `fit` was called first
        self.accounted = 0.0  # up to this moment all time is attributed
        self.steps = 0
        self.recent: deque[float] = deque(maxlen=WINDOW)  # durations of the last steps
        self.evaluation = 0.0  # duration of the last evaluation, saving and report included
        self.last_evaluation = 0.0  # the same, even if it was a pause
        self.between = 0.0  # time outside steps and evaluations: saving, logging
        self.longest_between = 0.0
        self.next_fit = 0.0

    @property
    def spent(self) -> float:
        """Seconds of the budget used by this process and those before."""
        return self.before + (0.0 if self.began is None else self.clock() - self.began)

    def stepped(self, seconds: float) -> None:
        """Record the duration of a step."""
        self.steps += 1
        self.accounted += seconds
        if self.steps > 1:  # the first compiles kernels and waits for the first data
            self.recent.append(seconds)
        self._note_between()

    def evaluated(self, seconds: float) -> None:
        """Record the duration of an evaluation with all that belongs to it."""
        before = self.last_evaluation
        self.evaluation = seconds if not before or seconds <= PAUSE * before else before
        self.last_evaluation = seconds
        self.accounted += seconds

    def _note_between(self) -> None:
        """Record the time that passed and was neither a step nor an evaluation."""
        now = self.clock()
        seconds, self.accounted = now - self.accounted, now
        usual = max(self.longest_between, self._usual_step())
        self.between += seconds if seconds <= PAUSE * usual or not self.recent else usual
        self.longest_between = max(self.longest_between, seconds)

    def _usual_step(self) -> float:
        return statistics.median(self.recent) if self.recent else 0.0

    def fit(self, step: int) -> int | None:
        """Return how many steps the whole run will have, if it is time for a new estimate before
        update number `step` + 1.

        The time left, minus the last evaluation, is divided by the time per step, each with its
        share of evaluations and of the rest. The clock starts with the first call.
        """
        if self.began is None:
            self.began = self.accounted = self.clock()
        if self.replay is not None:
            return self.replay.get(step)
        if len(self.recent) < FIRST_FIT or self.spent < self.next_fit:
            return None
        self.next_fit = self.spent + self.seconds / FITS
        self._note_between()
        usual = self._usual_step()
        steps = [seconds if seconds <= PAUSE * usual else usual for seconds in self.recent]
        each = statistics.fmean(steps) + self.evaluation / self.eval_interval
        each += max(0.0, self.between) / self.steps
        left = self.seconds - self.spent - self.evaluation
        return step + max(0, int(left / each))
