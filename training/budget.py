"""`--time_budget=10m`: as many steps as fit into that time, the schedule fitted to them.

The budget counts from the first step of the run, over resumes: evaluating and saving included, the
time between two processes not. Rank 0 measures and decides; the number of steps rides to the others
with the count of targets, so that all change it at the same step. Every fit (step, max_steps) is
saved, so the learning rate of each step is known from the fits alone and a run can be replayed.
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
from training.config import Config, RunConfig, ScheduleConfig, seconds_of
from training.console import UNKNOWN_STEPS
from training.optimizer import lr_factor

FIRST_FIT = 3  # steps measured before the first fit; the very first, which warms up, is not
FITS = 50  # in a budget
WINDOW = 200  # steps that the speed is measured over
PAUSE = (
    5.0  # times as long as usual: the process was stopped, or its machine; will not happen again
)
Fit = tuple[int, ...]  # (step, max_steps): from this step on the run is this long


def steps_at(fits: Sequence[Fit], step: int) -> int:
    """The length of the run that counts for the update number `step` + 1."""
    known = [max_steps for since, max_steps in fits if since <= step]
    return known[-1] if known else UNKNOWN_STEPS


def planned_steps(run: RunConfig, state: TrainState) -> int:
    """Number of updates of the whole run: an estimate if it has a time budget, UNKNOWN_STEPS before
    the first."""
    return steps_at(state.fits, state.step) if run.time_budget else run.max_steps


def out_of_patience(run: RunConfig, state: TrainState) -> bool:
    return 0 < run.patience <= state.since_best


def fitted(config: Config, max_steps: int) -> ScheduleConfig:
    """The schedule of a run so long; with a time budget the warm-up takes a tenth of it at most."""
    schedule = config.schedule
    if not config.run.time_budget:
        return schedule
    warmup = min(schedule.warmup_steps, max(1, max_steps // 10))
    return replace(schedule, warmup_steps=warmup)


def next_factor(config: Config, state: TrainState) -> float:
    """Factor of the learning rates in the next update."""
    length = planned_steps(config.run, state)
    return lr_factor(state.step, length, fitted(config, length))


def lengthened(old: RunConfig, new: RunConfig, state: TrainState) -> tuple[Fit, ...]:
    """The fits of a run that is resumed with another time budget: the first steps are taken at the
    speed so far, until the new speed is measured. The run's own if the budget is as it was."""
    if old.time_budget == new.time_budget or not new.time_budget or state.step == 0:
        return state.fits
    if new.time_budget.startswith("fits:"):
        return state.fits
    left = max(0.0, seconds_of(new.time_budget) - state.seconds)
    more = int(left * state.step / state.seconds) if state.seconds else UNKNOWN_STEPS
    return (*state.fits, (state.step, state.step + more))


def open_budget(run: RunConfig, state: TrainState) -> Budget | None:
    """What keeps a run's time budget; None if it has none.

    Raises ConfigError if the run to replay is not there or has no budget.
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
    """Measures a run and says how many steps fit.

    `spent` is what earlier processes used, in seconds. `replay` gives fits of another run to follow
    instead of measuring.
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
        self.began: float | None = None
        self.recent: deque[float] = deque(maxlen=WINDOW)  # seconds of each of the last steps
        self.steps = 0
        self.stepping = self.evaluating = 0.0  # seconds in all, in this process
        self.evaluation = 0.0  # the last one's seconds, saving and report included; no pause
        self.last_evaluation = 0.0  # the same, a pause included
        self.between = 0.0  # seconds between steps and evaluations (saving, logging); no pauses
        self.seen_between = self.longest_between = 0.0  # the same, pauses included
        self.next_fit = 0.0

    @property
    def spent(self) -> float:
        """Seconds of the budget that are used, by this process and those before."""
        return self.before + self._here()

    def _here(self) -> float:
        return 0.0 if self.began is None else self.clock() - self.began

    def stepped(self, seconds: float) -> None:
        """Record the duration of a step."""
        self.steps += 1
        self.stepping += seconds
        if self.steps > 1:  # the first makes kernels, compiles, waits for the first data
            self.recent.append(seconds)
        self._note_between()

    def evaluated(self, seconds: float) -> None:
        """Record the duration of an evaluation with all that goes with it."""
        before = self.last_evaluation
        self.evaluation = seconds if not before or seconds <= PAUSE * before else before
        self.last_evaluation = seconds
        self.evaluating += seconds

    def _note_between(self) -> None:
        """Record what has passed since the last look, and was neither a step nor an evaluation."""
        seconds = self._here() - self.stepping - self.evaluating - self.seen_between
        usual = max(self.longest_between, self._usual_step())
        self.between += seconds if seconds <= PAUSE * usual or not self.recent else usual
        self.seen_between += seconds
        self.longest_between = max(self.longest_between, seconds)

    def _usual_step(self) -> float:
        return statistics.median(self.recent) if self.recent else 0.0

    def fit(self, step: int) -> int | None:
        """How many steps the whole run shall have, if it is time to say so before `step` + 1.

        What is left, without the last evaluation, is divided by what a step takes with its share of
        evaluations and of the rest (saving, logging). The clock runs from the first call on. A
        pause (SIGSTOP, a debugger) uses up its time once and is not expected to come again.
        """
        if self.began is None:
            self.began = self.clock()
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
