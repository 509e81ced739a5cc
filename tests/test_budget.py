"""Time budgets: fitted on a simulated clock, and repeated exactly from the fits."""

from __future__ import annotations

import json
import random

import pytest

from cli.options import ConfigError
from training import budget as budget_module
from training.budget import Budget, fitted, lengthened, open_budget, rate_note, steps_at
from training.checkpoint import TrainState, find_checkpoint
from training.config import Config, RunConfig, ScheduleConfig, seconds_of, with_values
from training.console import UNKNOWN_STEPS
from training.optimizer import lr_factor


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172_800), ("0.5s", 0.5)]
)
def test_times_are_converted_to_seconds(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["10", "m", "10 m", "0s", "-1m", "1h30m", "1e3s", "\u0663m", "10M"]
)
def test_other_times_are_refused_and_examples_given(text):
    (problem,) = RunConfig(time_budget=text).problems()
    assert f"run.time_budget={text}" in problem
    assert "10m" in problem


# The fit, by hand


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0  # where a clock starts has no meaning

    def __call__(self) -> float:
        return self.now


def measured(seconds: float, eval_interval: int, steps: list[float], spent: float = 0.0):
    """A budget after its first steps, and its clock."""
    clock = Clock()
    budget = Budget(seconds, eval_interval, spent, clock=clock)
    assert budget.fit(0) is None
    for duration in steps:
        clock.now += duration
        budget.stepped(duration)
    return budget, clock


def test_the_first_fit_by_hand():
    budget, clock = measured(100.0, 10, [5.0, 2.0, 2.0])  # the first is slow and does not count
    assert budget.fit(3) is None  # two steps measured: too few
    clock.now += 2.0
    budget.stepped(2.0)
    # 11 s are spent, 89 left, 2 s per step: 44 more
    assert budget.fit(4) == 48
    assert budget.fit(4) is None  # not again before 2% of the budget


def test_evaluations_saving_and_earlier_processes_are_counted_by_hand():
    budget, clock = measured(100.0, 4, [2.0] * 5)
    clock.now += 4.0
    budget.evaluated(4.0)
    clock.now += 5.0  # saving: 1 s per step
    # 19 s spent; 4 kept for the last evaluation; 2 + 4/4 + 1 = 4 s per step: 77 / 4
    assert budget.fit(5) == 5 + 19
    budget, _ = measured(100.0, 1000, [1.0] * 4, spent=60.0)
    assert (budget.spent, budget.fit(54)) == (64.0, 54 + 36)
    budget, _ = measured(10.0, 1000, [5.0] * 4)
    assert budget.fit(4) == 4  # used up: the run ends where it is


# The whole course, simulated


def simulate(
    step_seconds, total=600.0, evaluation=3.0, interval=100, pauses=(), saving=0.0
) -> tuple[float, list, list]:
    """(seconds used, fits, learning-rate factors) of a run whose step N takes step_seconds(N).

    pauses: (step, what it falls into, seconds); saving: seconds of it at each interval.
    """
    paused = lambda *where: sum(p[2] for p in pauses if p[:2] == where)  # noqa: E731
    clock = Clock()
    config = Config(
        schedule=ScheduleConfig(schedule="wsd", warmup_steps=20, decay_fraction=0.5),
        run=RunConfig(time_budget=f"{total}s"),
    )
    budget = Budget(total, interval, clock=clock)
    step, fits, factors = 0, [], []
    while True:
        fit = budget.fit(step)
        if fit:
            fits.append((step, fit))
        length = steps_at(fits, step)
        if step >= length:
            break
        factors.append(lr_factor(step, length, fitted(config, length)))
        seconds = step_seconds(step) + paused(step, "step")
        clock.now += seconds
        budget.stepped(seconds)
        step += 1
        clock.now += paused(step, "between") + saving * (step % interval == 0)
        if step % interval == 0 or step >= length:
            seconds = evaluation + paused(step, "evaluation")
            clock.now += seconds
            budget.evaluated(seconds)
        if step >= length:
            break
    return budget.spent, fits, factors


def noisy(seed: int):
    draw = random.Random(seed).uniform
    return lambda step: draw(0.2, 0.8)


@pytest.mark.parametrize(
    "step_seconds",
    [
        lambda step: 0.5,
        lambda step: 20.0 if step == 0 else 0.1,  # a compiler
        noisy(1),
        lambda step: 0.3 if step < 700 else 0.6,  # another process comes
        lambda step: 0.6 if step < 300 else 0.3,  # and goes
        lambda step: 4.0,  # few steps
    ],
    ids=["steady", "compiled", "noisy", "slower", "faster", "few"],
)
def test_a_run_ends_within_3_percent_of_its_budget_with_its_decay_complete(step_seconds):
    used, fits, factors = simulate(step_seconds)
    assert used == pytest.approx(600, rel=0.03)
    assert max(factors) == 1.0
    decay = 0.5 * fits[-1][1]
    assert factors[-1] <= 1.5 / decay  # one step short of 0
    assert len(factors) == fits[-1][1]


@pytest.mark.parametrize(
    "pauses",
    [
        [(60, "step", 25.0)],
        [(5, "step", 25.0)],
        [(60, "between", 25.0)],
        [(100, "evaluation", 25.0)],
        [(60, "step", 9.0), (61, "step", 9.0), (90, "step", 9.0)],
    ],
    ids=lambda pauses: f"{len(pauses)} in {pauses[0][1]} {pauses[0][0]}",
)
def test_a_pause_uses_up_its_time_once_and_changes_no_later_estimate(pauses):
    """SIGSTOP, a debugger: 60 s at 0.2 s per step are some 290 steps, without 25 s some 165."""
    used, fits, _ = simulate(
        lambda step: 0.2, total=60.0, evaluation=0.5, interval=50, pauses=pauses, saving=0.1
    )
    lost = sum(seconds for _, _, seconds in pauses)
    expected = (60 - lost) / (0.2 + 0.6 / 50)
    last = max(step for step, _, _ in pauses)
    after = [length for step, length in fits if step > last]
    assert after and all(length == pytest.approx(expected, rel=0.08) for length in after)
    assert used == pytest.approx(60, rel=0.03)


def test_slow_saving_is_not_mistaken_for_a_pause():
    used, fits, _ = simulate(lambda step: 0.1, total=200.0, saving=5.0)
    assert used == pytest.approx(200, rel=0.04)
    later = [length for step, length in fits if step > 300]
    assert later and all(length == pytest.approx(200 / 0.18, rel=0.13) for length in later)


def test_a_machine_that_becomes_slower_is_not_mistaken_for_a_pause():
    used, _, _ = simulate(lambda step: 0.1 if step < 200 else 1.0)
    assert used == pytest.approx(600, rel=0.03)


def test_warmup_takes_a_tenth_of_a_time_budget_at_most_and_one_step_at_least():
    config = Config(schedule=ScheduleConfig(warmup_steps=700), run=RunConfig(time_budget="1m"))
    wanted = {1: 1, 2: 1, 9: 1, 10: 1, 19: 1, 20: 2, 50: 5, UNKNOWN_STEPS: 700}
    assert {steps: fitted(config, steps).warmup_steps for steps in wanted} == wanted
    assert fitted(Config(schedule=ScheduleConfig(warmup_steps=700)), 50).warmup_steps == 700


def test_the_length_at_a_step_is_that_of_the_last_fit_before():
    fits = [(5, 100), (20, 90)]
    assert [steps_at(fits, step) for step in (4, 5, 19, 20)] == [UNKNOWN_STEPS, 100, 100, 90]


# Real runs


OPTIONS = {"eval_interval": 1000, "checkpoint_interval": 1000}


@pytest.fixture
def timed(monkeypatch):
    """Let the clock of a budget advance by a hundredth of a second per look."""
    ticks = iter(range(10**6))
    clock = lambda: next(ticks) / 100  # noqa: E731 (a name for the patch)
    original = Budget.__init__

    def init(self, *args, **options):
        original(self, *args, **{"clock": clock, **options})

    monkeypatch.setattr(budget_module.Budget, "__init__", init)


def test_a_run_is_repeated_exactly_from_its_fits(train_tiny, tmp_path, timed, capsys, monkeypatch):
    measured, evaluated = [], Budget.evaluated
    monkeypatch.setattr(
        Budget, "evaluated", lambda *args: measured.append(args[1]) or evaluated(*args)
    )
    first, again = tmp_path / "first", tmp_path / "again"
    assert train_tiny(first, time_budget="2s", **OPTIONS) == 0
    said = capsys.readouterr().out
    assert "training: 2s in steps of 64 tokens (4 x 16, 2 micro-batches), adamw" in said
    state = find_checkpoint(first, "latest").state
    assert len(state.fits) > 1
    assert state.step == state.fits[-1][1] != 20  # the max_steps of config/debug.py does not count
    assert len(measured) == 1 and measured[0] > 0  # the evaluation at the end
    assert train_tiny(again, time_budget=f"fits:{first}", **OPTIONS) == 0
    model = f"checkpoints/step-{state.step}/model.safetensors"
    assert (again / model).read_bytes() == (first / model).read_bytes()
    lines = [json.loads(line) for line in (first / "metrics.jsonl").open()]
    logged = [(line["step"], line["fit"]) for line in lines if "fit" in line]
    assert logged == [tuple(fit) for fit in state.fits]


def test_a_run_whose_time_is_used_up_is_finished(train_tiny, tmp_path, timed, capsys):
    assert train_tiny(tmp_path / "run", time_budget="1s", **OPTIONS) == 0
    step = find_checkpoint(tmp_path / "run").state.step
    capsys.readouterr()
    assert train_tiny(tmp_path / "run", time_budget="1s", **OPTIONS) == 0
    assert f"is finished at step {step}" in capsys.readouterr().out


def test_a_run_without_fits_cannot_be_repeated(trained):
    with pytest.raises(ConfigError, match="had no time budget"):
        open_budget(RunConfig(time_budget=f"fits:{trained}"), TrainState())


def test_no_budget_no_fits(trained):
    assert open_budget(RunConfig(), TrainState()) is None
    assert find_checkpoint(trained).state.fits == ()


@pytest.mark.parametrize(
    ("seconds", "planned"),
    [
        (20.0, 150),  # 100 steps in 20 s: the 10 s that are left hold 50 more
        (40.0, 100),  # more is used already than the new budget has
        (0.0, 100 + UNKNOWN_STEPS),  # trained without a budget: nothing was measured
    ],
)
def test_a_longer_budget_is_planned_at_the_speed_so_far(seconds, planned):
    state = TrainState(step=100, seconds=seconds, fits=((3, 90),))
    old, new = RunConfig(time_budget="20s"), RunConfig(time_budget="30s")
    assert lengthened(old, new, state) == ((3, 90), (100, planned))
    assert lengthened(old, old, state) == ((3, 90),)
    assert lengthened(old, RunConfig(), state) == ((3, 90),)


# The learning rate after a resume


def note_after(step: int, old: dict, new: dict) -> str:
    saved, asked = (with_values(Config(), {"optim.lr": 0.1, **values}) for values in (old, new))
    return rate_note(saved, asked, TrainState(step=step))


WSD = {"schedule.warmup_steps": 0, "schedule.decay_fraction": 0.5, "optim.optimizer": "adamw"}


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        # Of 100 steps the 52nd is the first below the peak, and the last has 1/50 of it; of 200
        # the 102nd, and the last has 1/100.
        (
            100,
            {"run.max_steps": 200},
            "rises again from 0.002 to 0.1 in step 101, decays after step 101 to 0.001 in step 200",
        ),
        (20, {"run.max_steps": 200}, "stays at 0.1, decays after step 101 to 0.001 in step 200"),
        (
            20,
            {"schedule.schedule": "constant"},
            "stays at 0.1, to the end",
        ),
        (
            100,
            {"run.max_steps": 110, "optim.optimizer": "muon", "optim.muon_lr": 0.01},
            "rises again from 0.002 (Muon 0.0002) to 0.0182 (Muon 0.00182) in step 101, decays "
            "after step 101 to 0.00182 (Muon 0.000182) in step 110",
        ),
    ],
)
def test_a_resume_says_what_the_learning_rate_does(step, changes, said):
    optim = {name: value for name, value in changes.items() if name.startswith("optim.")}
    run = {**WSD, "run.max_steps": 100, **optim}
    assert note_after(step, run, {**run, **changes}) == f"learning rate: {said}"


def test_nothing_is_said_of_a_learning_rate_that_stays():
    run = {**WSD, "run.max_steps": 100}
    assert note_after(50, run, {**run, "run.eval_interval": 7}) == ""
    assert note_after(0, run, {**run, "run.max_steps": 200}) == ""
