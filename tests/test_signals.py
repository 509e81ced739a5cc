"""Asked to stop: once is noted, twice by Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
import time

import pytest
from faultlib import Shared, ended, fork, fork_command, leftovers, train, verified, wait_for

import training.checkpoint
from training.signals import Interrupts


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_is_noted_and_told_as_shells_do(name, capfd):
    before = signal.getsignal(getattr(signal, name))
    with Interrupts(announce=True) as interrupts:
        assert not interrupts.stop and interrupts.exit_code == 0
        os.kill(os.getpid(), getattr(signal, name))
        assert interrupts.stop and interrupts.exit_code == 128 + getattr(signal, name)
    assert signal.getsignal(getattr(signal, name)) == before
    assert ("Ctrl-C once more ends at once" in capfd.readouterr().err) == (name == "SIGINT")


def test_the_first_signal_decides_the_exit_code():
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts.exit_code == 128 + signal.SIGTERM


def test_handlers_are_put_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Interrupts():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_ctrl_c_ends_at_once():
    def command(argv: list[str]) -> int:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return 0  # never reached

    assert ended(fork_command(command, [])) == 130


def test_a_second_ctrl_c_in_the_middle_of_a_save_tears_nothing(tiny_argv, tmp_path):
    """Sent while step-8 is being written; the same command then goes on from step-4."""
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
