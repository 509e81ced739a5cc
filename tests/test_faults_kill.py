"""kill -9 at random moments: nothing is torn, and the run that goes on ends with the same bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from faultlib import Shared, around_steps, bits, ended, fork, leftovers, train, verified, wait_for

import training.checkpoint
import training.run

STEPS = 8
KILLED = {"dropout": 0.2, "max_steps": STEPS, "eval_interval": 4, "checkpoint_interval": 2}
KILLED |= {"quiet": "true", "interval": 1}
BEGAN, STEP, SAVES, SAVING, SAVE_SECONDS = range(5)  # what a child tells


def telling(shared: Shared):
    """A hook: the child tells how far it is and whether it is saving."""

    def patch() -> None:
        save = training.checkpoint.Checkpoints.save

        def begun(state, setup) -> None:
            shared[BEGAN] = 1

        def done(state, setup) -> None:
            shared[STEP] = state.step

        def tell_save(*args) -> bool:
            shared[SAVES] += 1
            shared[SAVING], began = 1, time.monotonic()
            try:
                return save(*args)
            finally:
                shared[SAVING], shared[SAVE_SECONDS] = 0, time.monotonic() - began

        training.run.take_step = around_steps(begun, done)
        training.checkpoint.Checkpoints.save = tell_save

    return patch


class Figures:
    def __init__(self) -> None:
        self.kills = self.in_save = self.torn = self.most_redone = self.equal = 0


def kill_once(argv: list[str], run: Path, wanted, times, rng, inside: bool, told: Figures) -> bool:
    """One run, killed once and gone on with; False if it ended, or was not in a save, as wished."""
    shared = Shared()
    shutil.rmtree(run, ignore_errors=True)
    pid = fork(argv, before=telling(shared))
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
        return False
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
    told.equal += bits(run, STEPS) == wanted and best(run) == best_of(wanted)
    return True


def best(run: Path) -> str:
    return (run / "checkpoints" / "best").read_text().strip()


def best_of(wanted: tuple[str, str, str]) -> str:
    import json

    return f"step-{json.loads(wanted[2])['best_step']}"


def test_a_kill_between_the_last_checkpoint_and_best_is_mended(trained, tiny_argv):
    """The run is finished: the same command has nothing to do but this."""
    place = trained / "checkpoints" / "best"
    wanted = place.read_text()
    place.write_text("step-4\n")
    assert wanted == "step-8\n" and train(tiny_argv(trained)) == 0
    assert place.read_text() == wanted


@pytest.mark.parametrize("n", [20, pytest.param(200, marks=pytest.mark.faults)])
def test_kill_nine_at_random_moments_half_of_them_in_a_save(n, tiny_argv, tmp_path, figure):
    rng, told, shared = random.Random(n), Figures(), Shared()
    argv = tiny_argv(tmp_path / "run", **KILLED)
    assert train(argv, before=telling(shared)) == 0  # also prepares the data
    wanted, began = bits(tmp_path / "run", STEPS), time.monotonic()
    shutil.rmtree(tmp_path / "run")
    assert train(argv, before=telling(shared)) == 0
    times = (time.monotonic() - began, shared[SAVES] / 2, shared[SAVE_SECONDS])
    times = (times[0], int(times[1]), times[2])
    while told.kills < n:
        inside = told.in_save < (n + 1) // 2
        kill_once(argv, tmp_path / "run", wanted, times, rng, inside, told)
    assert (told.equal, told.torn) == (n, 0)
    assert told.most_redone <= 2  # checkpoint_interval
    assert told.in_save >= n // 2
    figure(
        f"kill -9 at {n} random moments, {told.in_save} of them in a save, then resumed to the end",
        f"{told.equal} of {n} bit-equal; torn {told.torn}; most steps redone {told.most_redone}",
    )
