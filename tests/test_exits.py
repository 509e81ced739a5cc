"""Whatever ends a run, the last complete update is saved unless it is in doubt."""

from __future__ import annotations

import errno
import math
import os
import pkgutil
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from faultlib import Job, around_steps, bits, ended, fork, leftovers, train, verified

import training.run
from data.meta import DamagedData
from training.distributed import LostRank
from training.step import NonFinite

# Nothing is saved in the course of the run, so that what is there was saved on the way out.
ALONE = {"max_steps": 8, "eval_interval": 100, "checkpoint_interval": 100, "interval": 1}
ALONE |= {"dropout": 0.2}


@pytest.fixture(scope="module")
def plain(train_tiny, tmp_path_factory) -> Path:
    """An undisturbed run of 8 steps."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    assert train_tiny(folder, **ALONE) == 0
    return folder


def failing_at(step: int, place: str, error: BaseException, patch, late=False) -> None:
    """Let the function at `place` raise in update `step`, before or after it has done its work."""
    owner, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    inner, now = getattr(owner, name), [0]

    def note(state, setup):
        now[0] = state.step + 1

    def failing(*args, **options):
        if now[0] != step:
            return inner(*args, **options)
        if late:
            inner(*args, **options)
        raise error

    patch.setattr("training.run.take_step", around_steps(before=note))
    patch.setattr(owner, name, failing)


# (what fails, its error, the update, the step that is then saved)
ENDS = {
    "a damaged shard": ("training.run.count_targets", DamagedData("train-0 is damaged"), 5, 4),
    "the model": ("training.step._backward", RuntimeError("a bug in the model"), 5, 4),
    "memory": ("training.step._backward", torch.OutOfMemoryError("CUDA out of memory"), 5, 4),
    "a lost rank": ("training.step.sum_over_ranks", LostRank("rank 1 is gone"), 5, 4),
    "the log": ("training.logger.RunLogger.event", OSError(errno.ENOSPC, "full"), 5, 5),
    "the bar": ("training.console.Console.advance", OSError(errno.EIO, "gone"), 5, 5),
    "the advice": ("training.advice.Adviser.see", KeyError("a bug"), 5, 5),
    # The weights are in doubt, or there is nothing to save.
    "no number": ("training.run.train_step", NonFinite("loss nan"), 5, None),
    "half an update": ("training.optimizer.Optimizers.step", RuntimeError("in it"), 5, None),
    "an update not counted": ("training.optimizer.Optimizers.step", RuntimeError("after"), 5, None),
    "a kill": ("training.step._backward", KeyboardInterrupt(), 5, None),
    "the first update": ("training.step._backward", RuntimeError("at once"), 1, None),
}


@pytest.mark.parametrize(("place", "error", "update", "saved"), ENDS.values(), ids=ENDS)
def test_an_error_saves_the_last_update_unless_it_is_in_doubt_and_is_then_raised(
    place, error, update, saved, train_tiny, tmp_path, monkeypatch, plain, capsys
):
    with monkeypatch.context() as patch, pytest.raises(type(error)) as raised:
        failing_at(update, place, error, patch, late=str(error) == "after")
        train_tiny(tmp_path / "run", **ALONE)
    assert error in (raised.value, raised.value.__cause__)  # NonFinite also names the windows
    assert verified(tmp_path / "run") == ([] if saved is None else [saved])
    assert (f"step {saved} was saved" in capsys.readouterr().out) == (saved is not None)
    if saved is not None:
        assert train_tiny(tmp_path / "run", **ALONE) == 0
        assert bits(tmp_path / "run", 8) == bits(plain, 8)


def test_a_save_that_fails_is_not_tried_again_and_hides_no_error(
    train_tiny, tmp_path, monkeypatch, capsys
):
    tried = []

    def full(*args, **options):
        tried.append(args)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("training.checkpoint.write_file", full)
    with pytest.raises(OSError, match="full"):
        train_tiny(tmp_path / "run", **{**ALONE, "checkpoint_interval": 2})
    assert len(tried) == 1
    error = RuntimeError("a bug in the model")
    failing_at(5, "training.step._backward", error, monkeypatch)
    with pytest.raises(RuntimeError) as raised:
        train_tiny(tmp_path / "other", **ALONE)
    assert raised.value is error and len(tried) == 2
    assert "step 4 was not saved: " in capsys.readouterr().out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_alone(rank, tiny_argv, tmp_path, plain):
    """Rank 0 saves whether it fails itself or loses the other rank; neither waits for long."""
    argv = tiny_argv(tmp_path / "run", **ALONE, micro_batch=1, timeout=60)

    def fail(state, setup):
        if state.step == 4 and setup.ranks.rank == rank:
            raise ZeroDivisionError("this rank alone")

    def patch() -> None:
        training.run.take_step = around_steps(before=fail)

    job = Job(2, argv, tmp_path / "logs", before=patch)
    codes = job.wait(limit=40)
    assert codes[rank] == 1 and codes[1 - rank] == 7, job.text()
    assert "ZeroDivisionError" in job.logs[rank].read_text()
    assert verified(tmp_path / "run") == [4]
    assert not leftovers(tmp_path / "run")


@pytest.mark.parametrize("where", ["weights", "optimizer"])
def test_an_update_that_is_not_finite_is_never_saved(where, train_tiny, tmp_path, plain):
    """The run ends with 4; the same command resumes from the checkpoint before."""

    def spoil(state, setup) -> None:
        tensors = dict(setup.model.named_parameters())
        if where == "optimizer":
            tensors = setup.optimizers.state_tensors()
        if state.step == 6:
            with torch.no_grad():
                next(t for t in tensors.values() if t.dim() == 2)[0, 0] = math.inf

    options = {**ALONE, "checkpoint_interval": 2}
    bad = pytest.raises(NonFinite, match="step 6: ")
    with mock.patch("training.run.take_step", around_steps(after=spoil)), bad as raised:
        train_tiny(tmp_path / "run", **options)
    assert raised.value.exit_code == 4
    assert verified(tmp_path / "run") == [2, 4]
    assert train_tiny(tmp_path / "run", **options) == 0
    assert bits(tmp_path / "run", 8) == bits(plain, 8)


# Output


def test_training_outlives_its_output(tiny_argv, tmp_path, plain):
    """The reader has gone (`| head`), and there is a bar: stdout and stderr fail."""

    def patch() -> None:
        take, give = os.pipe()
        os.dup2(give, 1)
        os.dup2(give, 2)
        os.close(give)
        os.close(take)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr.isatty = lambda: True

    argv = tiny_argv(tmp_path / "run", **ALONE)
    assert ended(fork(argv, before=patch)) == 0
    assert bits(tmp_path / "run", 8) == bits(plain, 8)
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert log.count('"loss"') == 8


def test_the_command_without_streams(tiny_argv, tmp_path, plain):
    """As a daemon starts it: sys.stdout and sys.stderr are None."""

    def patch() -> None:
        for number in (0, 1, 2):
            os.close(number)
        sys.stdin = sys.stdout = sys.stderr = None

    assert train(tiny_argv(tmp_path / "run", **ALONE), before=patch) == 0
    assert bits(tmp_path / "run", 8) == bits(plain, 8)


@pytest.mark.parametrize("ignored", [False, True], ids=["hung up", "nohup"])
def test_a_terminal_that_is_closed(ignored, tiny_argv, tmp_path, plain):
    """SIGHUP and a stdout that fails: saved, and 129; under nohup the run continues to its end."""
    argv = tiny_argv(tmp_path / "run", **ALONE)

    def hang_up(state, setup):
        if state.step == 4:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            os.kill(os.getpid(), signal.SIGHUP)

    def patch() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        training.run.take_step = around_steps(before=hang_up)

    assert train(argv, before=patch) == (0 if ignored else 128 + signal.SIGHUP)
    if not ignored:
        assert verified(tmp_path / "run")[-1] in (4, 5)
        assert train(argv) == 0
    assert bits(tmp_path / "run", 8) == bits(plain, 8)
