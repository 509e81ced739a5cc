"""kill -9 at random moments: no checkpoint is torn, and the resumed run ends with the same bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from faultlib import Shared, around_steps, bits, ended, fork, leftovers, train, verified, wait_for
from test_chat import write_talks

import training.checkpoint
import training.run

STEPS = 8
KILLED = {"dropout": 0.2, "max_steps": STEPS, "eval_interval": 4, "checkpoint_interval": 2}
KILLED |= {"quiet": "true", "interval": 1}
BEGAN, STEP, SAVES, SAVING, SAVE_SECONDS = range(5)  # what a child reports


def reporting(shared: Shared):
    """A hook with which the child reports how far it is and whether it is saving."""

    def patch() -> None:
        save = training.checkpoint.Checkpoints.save

        def begun(state, setup) -> None:
            shared[BEGAN] = 1

        def done(state, setup) -> None:
            shared[STEP] = state.step

        def reported_save(*args) -> bool:
            shared[SAVES] += 1
            shared[SAVING], began = 1, time.monotonic()
            try:
                return save(*args)
            finally:
                shared[SAVING], shared[SAVE_SECONDS] = 0, time.monotonic() - began

        training.run.take_step = around_steps(begun, done)
        training.checkpoint.Checkpoints.save = reported_save

    return patch


class Figures:
    def __init__(self) -> None:
        self.kills = self.in_save = self.torn = self.most_redone = self.equal = 0


def kill_once(argv: list[str], run: Path, wanted, times, rng, inside: bool, told: Figures) -> None:
    """Kill one run and resume it. Counts unless it ended before, or was to be killed inside a save
    and was not."""
    shared = Shared()
    shutil.rmtree(run, ignore_errors=True)
    pid = fork(argv, before=reporting(shared))
    seconds, saves, save_seconds = times
    if inside:
        nth = rng.randint(1, saves)
        wait_for(lambda: shared[SAVES] >= nth, pid=pid)
        time.sleep(rng.uniform(0, save_seconds))
    else:
        wait_for(lambda: shared[BEGAN] == 1, pid=pid)
        time.sleep(rng.uniform(0, seconds))
    os.kill(pid, signal.SIGKILL)
    if ended(pid) == 0 or (inside and not shared[SAVING]):
        return
    told.kills += 1
    told.in_save += int(shared[SAVING])
    try:
        good = verified(run)
    except Exception:
        told.torn += 1
        good = []
    told.most_redone = max(told.most_redone, int(shared[STEP]) - max(good, default=0))
    assert train(argv) == 0
    assert not leftovers(run)
    best = (run / "checkpoints" / "best").read_text().strip()
    best_step = json.loads(wanted[2])["best_step"]
    told.equal += bits(run, STEPS) == wanted and best == f"step-{best_step}"


def test_a_kill_between_the_last_checkpoint_and_best_is_mended(trained, tiny_argv):
    """The run is finished: the same command has nothing else to do."""
    place = trained / "checkpoints" / "best"
    wanted = place.read_text()
    place.write_text("step-4\n")
    assert wanted == "step-8\n" and train(tiny_argv(trained)) == 0
    assert place.read_text() == wanted


@pytest.mark.parametrize(
    ("n", "chat"),
    [
        (20, False),
        pytest.param(20, True, marks=pytest.mark.faults),
        pytest.param(200, False, marks=pytest.mark.faults),
    ],
)
def test_kill_9_at_random_moments_half_of_them_during_a_save(n, chat, tiny_argv, tmp_path, figure):
    rng, told, shared, options = random.Random(n), Figures(), Shared(), {}
    if chat:
        options = {"source": write_talks(tmp_path / "talks.jsonl"), "format": "chat"}
        options |= {"tokenizer": "byte", "split": "document", "context_length": 64}
    argv, what = tiny_argv(tmp_path / "run", **KILLED, **options), " (conversations)" * chat
    assert train(argv, before=reporting(shared)) == 0  # also prepares the data
    wanted, began = bits(tmp_path / "run", STEPS), time.monotonic()
    shutil.rmtree(tmp_path / "run")
    assert train(argv, before=reporting(shared)) == 0
    times = (time.monotonic() - began, shared[SAVES] / 2, shared[SAVE_SECONDS])
    times = (times[0], int(times[1]), times[2])
    while told.kills < n:
        inside = told.in_save < (n + 1) // 2
        kill_once(argv, tmp_path / "run", wanted, times, rng, inside, told)
    assert (told.equal, told.torn) == (n, 0)
    assert told.most_redone <= 2  # checkpoint_interval
    assert told.in_save >= n // 2
    figure(
        f"kill -9 at {n} random moments{what}, {told.in_save} of them in a save, then resumed to "
        "the end",
        f"{told.equal} of {n} bit-equal; torn {told.torn}; most steps redone {told.most_redone}",
    )
