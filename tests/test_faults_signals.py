"""Every signal at every moment, on one rank or on all: the current step is saved, all ranks end."""

from __future__ import annotations

import os
import signal
import time
from itertools import product

import pytest
from faultlib import Job, Shared, around_steps, bits, ended, fork, leftovers, train, verified

import data.loader
import training.checkpoint
import training.evaluate
import training.run

STEPS, AT = 12, 6
STOPPED = {"dropout": 0.2, "max_steps": STEPS, "eval_interval": 3, "checkpoint_interval": 3}
STOPPED |= {"micro_batch": 1, "quiet": "true", "timeout": 60}
DONE, SENT = 0, 1
SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1"]
MOMENTS = ["step", "evaluation", "save", "data wait"]
WHO = ["one process", "one of two ranks", "two ranks"]


def sending(name: str, moment: str, who: str, shared: Shared):
    """Return a hook: at the given moment around step 6 the process signals itself, once."""

    def patch() -> None:
        now: list = []  # state and setup
        sent: list[int] = []

        def send() -> None:
            if sent or not now or now[0].step < AT - 1:
                return
            if who == WHO[1] and now[1].ranks.first:
                return
            sent.append(getattr(signal, name))
            shared[SENT] = shared[SENT] or time.monotonic()
            os.kill(os.getpid(), sent[0])

        def before(owner, attribute: str, do) -> None:
            original = getattr(owner, attribute)
            setattr(owner, attribute, lambda *a, **k: (do(*a), original(*a, **k))[1])

        def note(state, setup) -> None:
            now[:] = [state, setup]

        def tell(state, setup) -> None:
            shared[DONE] = state.step

        training.run.take_step = around_steps(note, tell)
        if moment == "step":
            before(training.run, "train_step", lambda *a: send())
        elif moment == "evaluation":
            before(training.evaluate, "_score", lambda *a: send())
        elif moment == "save":
            before(training.checkpoint, "write_manifest", lambda *a: send())
        else:  # a read that hangs

            def hang(loader, i: int) -> None:
                if i >= AT * loader.micro_batches:
                    send()
                    time.sleep(60 if sent else 0)

            before(data.loader.BatchLoader, "batch", hang)

    return patch


# The first rank saves: the other, the one that is asked, cannot be in a save.
CASES = [case for case in product(SIGNALS, MOMENTS, WHO) if case[1:] != ("save", WHO[1])]
TENTH = [
    ("SIGTERM", "step", WHO[1]),
    ("SIGINT", "evaluation", WHO[2]),
    ("SIGUSR1", "save", WHO[0]),
    ("SIGTERM", "data wait", WHO[0]),
]


@pytest.mark.parametrize("cases", [TENTH, pytest.param(CASES, marks=pytest.mark.faults)], ids=len)
def test_each_signal_at_each_moment(cases, tiny_argv, tmp_path, figure, monkeypatch):
    # Blocks of one window, so that each rank has some to score.
    monkeypatch.setattr(training.evaluate, "CPU_TOKENS", 1)
    assert train(tiny_argv(tmp_path / "plain", **STOPPED)) == 0
    wanted, slowest = bits(tmp_path / "plain", STEPS), 0.0
    for name, moment, who in cases:
        shared, folder = Shared(), tmp_path / f"{name} {moment} {who}"
        argv = tiny_argv(folder / "run", **STOPPED)
        hook, code = sending(name, moment, who, shared), 128 + getattr(signal, name)
        if who == WHO[0]:
            assert ended(fork(argv, before=hook)) == code, folder.name
        else:
            job = Job(2, argv, folder, before=hook)
            assert job.wait() == [code, code], f"{folder.name}: {job.text()}"
        seconds = time.monotonic() - shared[SENT]
        slowest = max(slowest, seconds)
        done = int(shared[DONE])
        assert AT - 1 <= done <= AT + 1 and verified(folder / "run")[-1] == done, folder.name
        assert not leftovers(folder / "run")
        assert train(argv) == 0
        assert bits(folder / "run", STEPS) == wanted, folder.name
    figure(
        f"{len(cases)} of: each signal, in a step, an evaluation, a save, a hanging read, on one "
        "process, one of two ranks, both",
        f"steps lost 0; slowest end {slowest:.1f} s after the signal",
    )
