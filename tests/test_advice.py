"""The four lines of advice: each with a run that deserves it and one that does not."""

from __future__ import annotations

import math

import pytest

from data.config import DataConfig
from training.advice import Adviser
from training.config import Config, OptimConfig, ScheduleConfig

VOCABULARY = 100
GUESSING = math.log(VOCABULARY)  # 4.605
CONFIG = Config(
    data=DataConfig(global_batch=10),
    optim=OptimConfig(lr=1e-9),
    schedule=ScheduleConfig(warmup_steps=5),
)


def adviser(n_windows: int = 10**6) -> Adviser:
    return Adviser(CONFIG, n_windows, VOCABULARY)


def said(entries: list[dict], max_steps: int = 1000, n_windows: int = 10**6) -> list[tuple]:
    """(step, what it is about) of all that is said of a log."""
    asked = adviser(n_windows)
    return [(e["step"], about) for e in entries for about, _ in asked.see(e, max_steps)]


def training(losses: list[float], every: int = 10, **more: float) -> list[dict]:
    # 10 windows of 256 tokens a step: 1 s each
    more = {"tokens_per_second": 2560.0, **more}
    return [{"step": every * (i + 1), "loss": loss, **more} for i, loss in enumerate(losses)]


# Still guessing


def test_a_loss_that_stays_at_that_of_guessing_is_told_after_a_tenth():
    assert said(training([GUESSING] * 30)) == [(100, "guessing")]


def test_a_loss_that_falls_is_not_told():
    assert said(training([GUESSING - 0.05 * i for i in range(30)])) == []


def test_a_short_run_is_given_its_warm_up_first():
    # A tenth is step 4; the warm-up of 5 and 20 steps more come before: step 25, logged at 30.
    assert said(training([GUESSING] * 4), max_steps=40) == [(30, "guessing")]


def test_guessing_is_explained_with_its_numbers():
    (_, text), *_ = adviser().see({"step": 100, "loss": 4.6}, 1000)
    assert "after 100 steps the loss is 4.60" in text
    assert "ln V = 4.61" in text
    assert "optim.lr=1e-09" in text


def test_a_run_that_learned_and_fell_back_is_not_told_that_it_never_began():
    entries = training([3.0] * 20)
    entries.append({"step": 200, "val_loss": 3.1})
    entries += [{"step": 210, "loss": GUESSING}]
    assert said(entries) == []


# Overfitting


def evaluated(pairs: list[tuple[float, float]]) -> list[dict]:
    """A log with one training line and one evaluation for each (training, validation)."""
    entries = []
    for number, (loss, val_loss) in enumerate(pairs, start=1):
        entries += [{"step": number, "loss": loss}, {"step": number, "val_loss": val_loss}]
    return entries


def test_validation_that_rises_while_training_falls_is_told_at_the_second_rise():
    entries = evaluated([(3.0, 3.0), (2.5, 2.8), (2.0, 2.9), (1.5, 3.1), (1.0, 3.5)])
    assert said(entries) == [(4, "overfitting")]


@pytest.mark.parametrize(
    "pairs",
    [
        [(3.0, 3.0), (2.5, 2.8), (2.0, 2.7), (1.5, 2.6), (1.0, 2.6)],  # validation falls
        [(3.0, 3.0), (2.5, 2.8), (2.6, 2.9), (2.7, 3.1), (2.8, 3.3)],  # training rises as well
        [(3.0, 3.0), (2.5, 2.8), (2.0, 2.81), (1.5, 2.805), (1.0, 2.81)],  # by a hair
        [(3.0, 3.0), (2.5, 2.8), (2.0, 2.9)],  # once
        [(3.0, 3.0), (2.5, 2.8), (2.0, 2.9), (1.5, 2.801)],  # and back
    ],
)
def test_other_courses_are_not_overfitting(pairs):
    assert said(evaluated(pairs)) == []


# Repeating


def test_text_read_more_than_four_times_is_told_when_it_happens():
    # 10 windows a step of 100: the 4th epoch ends with step 40.
    assert said(training([3.0] * 5), n_windows=100) == [(50, "repeating")]
    assert said(training([3.0] * 4), n_windows=100) == []


def test_text_that_will_be_read_more_than_four_times_is_told_at_the_start():
    asked = adviser(n_windows=100)
    assert asked.plan(40) == []
    (about, text), *rest = asked.plan(56)
    assert (about, rest) == ("repeating", [])
    assert "56 steps are 5.6 epochs" in text
    assert asked.see({"step": 50, "loss": 3.0}, 56) == []  # it has been said


# Waiting for data


def test_waiting_for_data_is_told_after_three_lines():
    assert said(training([3.0] * 4, data_wait=0.2)) == [(30, "waiting")]
    assert said(training([3.0] * 4, data_wait=0.1)) == []


def test_milliseconds_are_not_worth_telling():
    assert said(training([3.0] * 4, data_wait=0.5, tokens_per_second=2560 / 0.03)) == []


def test_the_seconds_of_a_step_go_by_the_tokens_that_were_learned():
    """Short documents fill a tenth of the windows: a step takes 0.1 s, of which 0.02 are waited."""
    entries = training([3.0] * 4, data_wait=0.15)
    assert said(entries) == [(30, "waiting")]
    for entry in entries:
        entry["tokens"] = 256 * entry["step"]
    assert said(entries) == []


def test_a_slow_start_or_a_hiccup_is_not_waiting():
    entries = training([3.0] * 6)
    for entry, share in zip(entries, [0.9, 0.0, 0.5, 0.5, 0.0, 0.5], strict=True):
        entry["data_wait"] = share
    assert said(entries) == []


# Once


def test_what_was_said_before_a_resume_is_not_said_again():
    asked = adviser()
    assert asked.see({"step": 100, "note": "...", "about": "guessing"}, 1000) == []
    assert asked.see({"step": 110, "loss": GUESSING}, 1000) == []


def test_a_real_run_hears_it_once_and_keeps_it_in_its_log(train_tiny, tmp_path, capsys):
    # 2,142 characters in windows of 16 are 133; 8 windows a step: 80 steps are 4.8 epochs.
    options = {"max_steps": 80, "global_batch": 8, "eval_interval": 40, "checkpoint_interval": 40}
    assert train_tiny(tmp_path / "run", **options) == 0
    assert capsys.readouterr().out.count("advice: 80 steps are 4.8 epochs") == 1
    notes = (tmp_path / "run" / "metrics.jsonl").read_text().count('"about": "repeating"')
    assert notes == 1
    longer = {**options, "max_steps": 90, "resume": "must"}
    assert train_tiny(tmp_path / "run", **longer) == 0
    assert "advice" not in capsys.readouterr().out


def test_a_run_with_text_enough_hears_nothing(train_tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("training.advice.NOTICEABLE", 60)  # a busy machine is not the run's fault
    assert train_tiny(tmp_path / "run") == 0
    assert "advice" not in capsys.readouterr().out
