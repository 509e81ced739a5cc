"""Advice: for each of the four topics, runs that deserve it and runs that do not."""

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


def training(losses: list[float], every: int = 10, **more: float) -> list[dict]:
    # 10 windows of 256 tokens per step: 1 s each
    more = {"tokens_per_second": 2560.0, **more}
    return [{"step": every * (i + 1), "loss": loss, **more} for i, loss in enumerate(losses)]


def evaluated(*pairs: tuple[float, float]) -> list[dict]:
    """One training line and one evaluation for each (training, validation)."""
    entries = []
    for number, (loss, val_loss) in enumerate(pairs, start=1):
        entries += [{"step": number, "loss": loss}, {"step": number, "val_loss": val_loss}]
    return entries


def waiting(shares: list[float], **more: float) -> list[dict]:
    entries = training([3.0] * len(shares), **more)
    return [{**e, "data_wait": share} for e, share in zip(entries, shares, strict=True)]


LEARNED = [*training([3.0] * 20), {"step": 200, "val_loss": 3.1}, {"step": 210, "loss": GUESSING}]
# After ten full steps, short documents fill a tenth of the windows: a step then takes 0.1 s, of
# which 0.015 s are waited.
SHORT = [{**e, "tokens": 23_040 + 256 * e["step"]} for e in waiting([0.15] * 4)]
COURSES = {  # log, topics given with the step; max_steps and windows in the text if not the usual
    "a guess, said after a tenth": (training([GUESSING] * 30), [(100, "guessing")]),
    "falls": (training([GUESSING - 0.05 * i for i in range(30)]), []),
    # A tenth is step 4; the warmup of 5 steps and 20 more come first: step 25, logged at 30.
    "a guess in a short run": (training([GUESSING] * 4), [(30, "guessing")], 40),
    "learned and fell back": (LEARNED, []),
    "validation rises twice while training falls": (
        evaluated((3.0, 3.0), (2.5, 2.8), (2.0, 2.9), (1.5, 3.1), (1.0, 3.5)),
        [(4, "overfitting")],
    ),
    "validation falls": (evaluated((3.0, 3.0), (2.5, 2.8), (2.0, 2.7), (1.5, 2.6)), []),
    "training rises too": (
        evaluated((3.0, 3.0), (2.5, 2.8), (2.6, 2.9), (2.7, 3.1), (2.8, 3.3)), [],
    ),
    "rises by a hair": (evaluated((3.0, 3.0), (2.5, 2.8), (2.0, 2.81), (1.5, 2.805)), []),
    "rises once": (evaluated((3.0, 3.0), (2.5, 2.8), (2.0, 2.9)), []),
    "rises and returns": (evaluated((3.0, 3.0), (2.5, 2.8), (2.0, 2.9), (1.5, 2.801)), []),
    # 10 windows per step of 100: the 4th epoch ends with step 40.
    "a fifth epoch": (training([3.0] * 5), [(50, "repeating")], 1000, 100),
    "four epochs": (training([3.0] * 4), [], 1000, 100),
    "waits on three lines": (waiting([0.2] * 4), [(30, "waiting")]),
    "waits for a tenth": (waiting([0.1] * 4), []),
    "waits for milliseconds": (waiting([0.5] * 4, tokens_per_second=2560 / 0.03), []),
    "waits, of full windows": (waiting([0.15] * 4), [(30, "waiting")]),
    "waits, of short documents": (SHORT, []),
    "hiccups": (waiting([0.9, 0.0, 0.5, 0.5, 0.0, 0.5]), []),
}  # fmt: skip


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
def test_advice_is_given_when_it_applies_and_once(course):
    entries, wanted, max_steps, n_windows = (*course, *(1000, 10**6)[len(course) - 2 :])
    asked = adviser(n_windows)
    assert [(e["step"], topic) for e in entries for topic, _ in asked.see(e, max_steps)] == wanted


def test_a_guess_is_explained_with_its_numbers():
    (_, text), *_ = adviser().see({"step": 100, "loss": 4.6}, 1000)
    assert "after 100 steps the loss is 4.60" in text
    assert "ln V = 4.61" in text and "optim.lr=1e-09" in text


def test_repeated_text_is_foreseen_at_the_start():
    asked = adviser(n_windows=100)
    assert asked.plan(40) == []
    ((topic, text),) = asked.plan(56)
    assert topic == "repeating" and "56 steps are 5.6 epochs" in text
    assert asked.see({"step": 50, "loss": 3.0}, 56) == []  # given already


def test_advice_given_before_a_resume_is_not_repeated():
    asked = adviser()
    assert asked.see({"step": 100, "note": "...", "about": "guessing"}, 1000) == []
    assert asked.see({"step": 110, "loss": GUESSING}, 1000) == []


def test_a_run_prints_advice_once_and_logs_it(train_tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("training.advice.NOTICEABLE", 60)  # a busy machine is not the run's fault
    # 2,142 characters in windows of 16 are 133; 8 windows per step: 80 steps are 4.8 epochs.
    options = {"max_steps": 80, "global_batch": 8, "eval_interval": 40, "checkpoint_interval": 40}
    assert train_tiny(tmp_path / "run", **options) == 0
    assert capsys.readouterr().out.count("advice: 80 steps are 4.8 epochs") == 1
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"about": "repeating"') == 1
    assert train_tiny(tmp_path / "run", **{**options, "max_steps": 90, "resume": "changed"}) == 0
    assert train_tiny(tmp_path / "other") == 0  # enough text
    assert "advice: " not in capsys.readouterr().out
