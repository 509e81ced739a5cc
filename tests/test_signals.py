"""Signals: the first is noted, a second Ctrl-C ends the process at once."""

from __future__ import annotations

import os
import signal
import time

import pytest
from faultlib import Shared, ended, fork, fork_command, leftovers, train, verified, wait_for

import training.checkpoint
from training.signals import STOPPING, Interrupts


@pytest.fixture(autouse=True)
def not_ignored():
    """Handle signals as a foreground job of a shell does: these tests may run in the background."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in STOPPING}
    for name in STOPPING:
        usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
        signal.signal(getattr(signal, name), usual)
    yield
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_signal_is_noted_and_gives_the_exit_code_of_shells(name, capfd):
    before = signal.getsignal(getattr(signal, name))
    with Interrupts(announce=True) as interrupts:
        assert not interrupts.asked and interrupts.exit_code == 0
        os.kill(os.getpid(), getattr(signal, name))
        assert interrupts.asked and interrupts.exit_code == 128 + getattr(signal, name)
    assert signal.getsignal(getattr(signal, name)) == before
    assert ("Ctrl-C again quits at once" in capfd.readouterr().err) == (name == "SIGINT")


@pytest.mark.parametrize("name", STOPPING)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(name):
    """nohup ignores SIGHUP, a shell SIGINT for a job in the background."""
    signal.signal(getattr(signal, name), signal.SIG_IGN)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), getattr(signal, name))
        assert not interrupts.asked


def test_the_first_signal_decides_the_exit_code():
    with Interrupts() as interrupts:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
    assert interrupts.exit_code == 128 + signal.SIGTERM


def test_handlers_are_put_back_after_an_error_and_others_are_left_alone():
    handlers = lambda: [signal.getsignal(number) for number in signal.valid_signals()]  # noqa: E731
    before = handlers()
    with pytest.raises(ZeroDivisionError), Interrupts():
        changed = [a for a, b in zip(before, handlers(), strict=True) if a != b]
        assert len(changed) == len(STOPPING)  # SIGQUIT and SIGPIPE are not among them
        raise ZeroDivisionError
    assert handlers() == before


def test_a_second_ctrl_c_ends_at_once():
    def command(argv: list[str]) -> int:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return 0  # never reached

    assert ended(fork_command(command, [])) == 130


def test_a_second_ctrl_c_during_a_save_damages_nothing(tiny_argv, tmp_path):
    """Sent while step-8 is being written; the same command then resumes from step-4."""
    shared, argv = Shared(), tiny_argv(tmp_path / "run", max_steps=12, dropout=0.1)

    def patch() -> None:
        write = training.checkpoint.write_manifest

        def slow(folder, step, *rest) -> None:
            shared[0] = step
            while step == 8 and not shared[1]:
                time.sleep(0.001)
            write(folder, step, *rest)

        training.checkpoint.write_manifest = slow

    pid = fork(argv, before=patch)
    wait_for(lambda: shared[0] == 8, pid=pid)
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        os.kill(pid, signal.SIGINT)  # two at one instant would count as one
        time.sleep(0.01)
    assert ended(pid) == 130
    assert verified(tmp_path / "run") == [4]
    assert train(argv) == 0
    assert verified(tmp_path / "run") == [8, 12] and not leftovers(tmp_path / "run")
