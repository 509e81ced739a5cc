"""Ranks: what they share, how they notice a lost one, and that they end with torchrun."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
from unittest import mock

import pytest
import torch
from faultlib import Job, Shared, around_steps, ended, fork_command, train, wait_for

import training.distributed
import training.evaluate
import training.observer
import training.run
from cli.options import ConfigError
from training.checkpoint import Checkpoints
from training.distributed import LostRank, Ranks, join_ranks, pick_backend, pick_device
from training.logger import RunLogger
from training.observer import Observer


def with_ranks(do):
    """A command that joins the ranks, does something with them, and leaves."""

    def command(argv: list[str]) -> int:
        ranks = join_ranks("auto", 30)
        ranks.start("cpu")
        try:
            do(ranks)
        finally:
            ranks.close()
        return 0

    return command


# Sharing and meeting


def test_sharing_summing_and_gathering(tmp_path):
    def do(ranks: Ranks) -> None:
        for word in ("first", "second"):  # two in a row do not mix
            found = ranks.share(lambda word=word: {word: [ranks.rank, None, "ü"]}, "a test")
            assert found == {word: [0, None, "ü"]}
        assert ranks.sum_ints([ranks.rank, 2**40], "a test") == [3, 3 * 2**40]
        found = ranks.gather(torch.full((2,), float(ranks.rank)), "a test")
        assert [t.tolist() for t in found] == [[0, 0], [1, 1], [2, 2]]
        assert [int(t) for t in ranks.gather(torch.tensor(ranks.rank), "0-dim")] == [0, 1, 2]

    job = Job(3, [], tmp_path, command=with_ranks(do))
    assert job.wait() == [0, 0, 0], job.text()


class Damaged(Exception):
    exit_code = 3


@pytest.mark.parametrize(
    "error, code",
    [
        (ConfigError("no"), 2),
        (Damaged(), 3),
        (OSError(28, "No space left on device"), 5),
        (SystemExit(9), 9),
        (KeyboardInterrupt(), 130),
        (ValueError("a bug"), 1),
        (None, 1),  # a result that JSON cannot hold
    ],
    ids=repr,
)
def test_an_error_on_rank_0_ends_the_others_quietly_with_the_same_code(tmp_path, error, code):
    def make():
        if error is None:
            return object()
        raise error

    began = time.monotonic()
    job = Job(2, [], tmp_path, command=with_ranks(lambda ranks: ranks.share(make, "a test")))
    assert job.wait() == [code, code], job.text()
    assert time.monotonic() - began < 20  # not the time-out of 30 s
    assert job.logs[1].read_text() == ""


def test_a_rank_may_take_longer_than_the_time_out_while_it_is_alive(tmp_path):
    """For example, one compiles while the others find their kernels in a cache."""

    def do(ranks: Ranks) -> None:
        ranks.timeout = 1.2
        if ranks.rank == 1:
            time.sleep(2.5)
        ranks.meet("compiling the model")

    job = Job(2, [], tmp_path, command=with_ranks(do))
    assert job.wait() == [0, 0], job.text()


def slow_first_rank(owner: object, name: str, call: int, seconds: float):
    """Return a hook: on rank 0 this call of the function takes so long."""

    def patch() -> None:
        original, calls = getattr(owner, name), iter(range(10**6))

        def slow(*arguments, **options):
            if os.environ["RANK"] == "0" and next(calls) == call:
                time.sleep(seconds)
            return original(*arguments, **options)

        setattr(owner, name, slow)

    return patch


# The second evaluation is no better than the first, so nothing is saved after it.
NOT_BEST = {"lr": 1e-20, "max_steps": 12, "checkpoint_interval": 99}
ALONE = {  # what is slow, in which call, and options by which nothing else is due at that step
    "beginning": (training.observer, "RunLogger", 0, {}),
    "log": (RunLogger, "log", 0, {}),
    "evaluation that fits one block": (training.evaluate, "_score", 0, {}),
    "report": (Observer, "evaluated", 1, NOT_BEST),
    "checkpoint": (Checkpoints, "save", 0, {"checkpoint_interval": 3, "eval_interval": 9}),
}


def test_rank_0_may_be_busy_outside_the_loop_for_longer_than_the_time_out(tiny_argv, tmp_path):
    """One run per case, all at once: they mostly wait."""
    jobs = {}
    for name, (*where, options) in ALONE.items():
        folder = tmp_path / name
        argv = tiny_argv(folder / "run", timeout=3, eval_windows=2, **options)
        jobs[name] = Job(2, argv, folder, before=slow_first_rank(*where, 4.5))
    ends = {name: job.wait() for name, job in jobs.items()}
    told = {name: job.text() for name, job in jobs.items() if ends[name] != [0, 0]}
    assert not told, told


def test_a_rank_that_died_before_a_meeting_is_named(tmp_path):
    def do(ranks: Ranks) -> None:
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.timeout = 1.0
        ranks.meet("compiling the model")

    job = Job(2, [], tmp_path, command=with_ranks(do))
    assert job.wait() == [7, -signal.SIGKILL]
    assert "rank 0 waited for rank 1: compiling the model; no sign of life" in job.text()


def test_a_single_process_does_not_communicate():
    ranks = Ranks()
    assert ranks.share(lambda: object, "x") is object
    assert ranks.sum_ints([3], "x") == [3]
    ranks.meet("x")
    ranks.close()


def test_ranks_that_start_with_other_weights_are_found(monkeypatch):
    ranks, weights = Ranks(0, 2), [torch.ones(3), torch.zeros(2, 2)]
    monkeypatch.setattr(Ranks, "gather", lambda self, own, what: [own, own + 1])
    with pytest.raises(RuntimeError, match="rank 1 starts with other weights than rank 0"):
        ranks.check_same(weights, "weights")
    monkeypatch.setattr(Ranks, "gather", lambda self, own, what: [own, own])
    ranks.check_same(weights, "weights")


@pytest.mark.parametrize(
    ("backend", "failed", "left"),
    [("nccl", False, 1), ("nccl", True, 0), ("gloo", False, 1), ("gloo", True, 1)],
)
def test_nccl_is_closed_in_order_only_if_nothing_failed(monkeypatch, backend, failed, left):
    """Closing waits for the others, which may be waiting for this rank."""
    destroyed = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: destroyed.append(1))
    Ranks(0, 2, store=mock.Mock()).close(failed=failed)
    assert len(destroyed) == left


GLOO = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("Gloo connectFullMesh failed with " + GLOO),
        torch.distributed.DistNetworkError("the store has gone"),
        torch.distributed.DistBackendError("NCCL error"),
    ],
    ids=repr,
)
def test_an_error_of_communication_becomes_a_lost_rank(error, monkeypatch):
    monkeypatch.setattr(Ranks, "_silent_ranks", lambda self: [1])
    named = pytest.raises(LostRank, match="rank 0 waited for rank 1: step 3; ")
    with named as caught, Ranks(0, 2).waiting("step 3"):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("their own: [gloo is mentioned]"),
        RuntimeError(),
        torch.OutOfMemoryError("8 GiB"),
        torch.AcceleratorError("device-side assert triggered"),
        NotImplementedError("no such kernel"),
        ValueError("no"),
        LostRank("from further in"),
    ],
    ids=repr,
)
def test_every_other_error_passes_as_it_is(error, world, monkeypatch):
    monkeypatch.setattr(Ranks, "_silent_ranks", lambda self: pytest.fail("no rank is lost"))
    with pytest.raises(type(error)) as caught, Ranks(0, world).waiting("step 3"):
        raise error
    assert caught.value is error


def buggy(where: str, rank: int):
    """Return a hook: in step 4 the model of this rank has a bug, in forward or in backward."""
    import model.gpt

    def patch() -> None:
        forward, step = model.gpt.GPT.forward, training.run.train_step
        at = []

        def bug(*arguments):
            raise RuntimeError("a bug of theirs")

        def note(setup, batches, number, n_targets):
            at[:] = [number] if setup.ranks.rank == rank else []
            return step(setup, batches, number, n_targets)

        def bad(self, *arguments, **options):
            found = forward(self, *arguments, **options)
            if at == [3]:
                bug() if where == "forward" else found.register_hook(bug)
            return found

        training.run.train_step, model.gpt.GPT.forward = note, bad

    return patch


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_bug_in_the_model_keeps_its_traceback_on_one_process(
    where, reduction, tiny_argv, tmp_path
):
    argv = tiny_argv(tmp_path / "run", reduction=reduction)
    assert train(argv, before=buggy(where, 0), log=tmp_path / "log") == 1
    told = (tmp_path / "log").read_text().splitlines()
    assert "Traceback (most recent call last):" in told
    assert told[-1] == "RuntimeError: a bug of theirs"


@pytest.mark.parametrize(
    "where, reduction",
    [
        ("forward", "exact"),
        ("backward", "fast"),
        pytest.param("forward", "fast", marks=pytest.mark.faults),  # DDP's import takes seconds
    ],
)
def test_a_bug_on_one_rank_keeps_its_traceback_and_the_others_lose_that_rank(
    where, reduction, tiny_argv, tmp_path
):
    if reduction == "fast":  # once, for both: DDP imports it when it is made
        importlib.import_module("torch._dynamo")
    argv = tiny_argv(tmp_path / "run", reduction=reduction, timeout=60)
    job = Job(2, argv, tmp_path, before=buggy(where, 1))
    assert job.wait() == [7, 1], job.text()
    lost, bug = (log.read_text().splitlines() for log in job.logs)
    assert bug[-1] == "RuntimeError: a bug of theirs"
    assert lost[-1].startswith("error: rank 0 waited for rank 1: step 4, gradients; "), lost[-1]


def test_a_killed_rank_is_named_with_the_step(tiny_argv, tmp_path):
    def dying(state, setup) -> None:
        if state.step == 3 and setup.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def patch() -> None:
        training.run.take_step = around_steps(before=dying)

    job = Job(2, tiny_argv(tmp_path / "run", timeout=20), tmp_path, before=patch)
    assert job.wait() == [7, -signal.SIGKILL]
    line = job.logs[0].read_text().splitlines()[-1]
    assert line.startswith("error: rank 0 waited for rank 1: step 4, "), line


# torchrun


def test_a_mode_that_does_not_fit_the_launch_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="mode=ddp: needs several processes.*torchrun"):
        join_ranks("ddp", 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="mode=none: but torchrun started 2"):
        join_ranks("none", 1)


def test_a_store_that_cannot_be_reached_is_named(monkeypatch):
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LostRank, match=f"rank 1 waited for the store at 127.0.0.1:{port}"):
            join_ranks("auto", 1)


def test_a_single_process_ties_itself_to_torchrun_too(monkeypatch):
    tied = []
    monkeypatch.setattr(training.distributed, "_die_with_torchrun", lambda: tied.append(1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join_ranks("auto", 1).world == 1 and tied == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can tie a process to its parent")
@pytest.mark.parametrize("under_torchrun", [True, False])
def test_a_killed_parent_stops_the_child_only_under_torchrun(under_torchrun):
    shared = Shared()

    def child(argv: list[str]) -> int:
        training.distributed._die_with_torchrun()
        signal.signal(signal.SIGTERM, lambda *_: shared.__setitem__(1, 1))
        shared[0] = os.getpid()
        while not shared[1] and not shared[2]:
            time.sleep(0.01)
        shared[3] = 1
        return 0

    def parent(argv: list[str]) -> int:
        ended(fork_command(child, []))
        return 0

    env = {"TORCHELASTIC_RUN_ID": "x"} if under_torchrun else {}
    agent = fork_command(parent, [], **env)
    wait_for(lambda: shared[0] != 0)
    os.kill(agent, signal.SIGKILL)
    assert ended(agent) == -signal.SIGKILL
    if under_torchrun:
        wait_for(lambda: shared[3] == 1)
        assert shared[1] == 1
    else:
        time.sleep(0.2)  # nothing can be waited for: nothing shall happen
        assert shared[1] == shared[3] == 0
        shared[2] = 1
        wait_for(lambda: shared[3] == 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_torchrun_that_is_dead_already_is_noticed(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(training.distributed.ctypes, "CDLL", lambda name: type("C", (), {
        "prctl": staticmethod(lambda *arguments: 0)}))  # fmt: skip
    with pytest.raises(LostRank, match="torchrun has been killed"):
        training.distributed._die_with_torchrun()


# Devices


def test_devices(monkeypatch):
    def see(n_gpus: int, mps: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    see(2, mps=False)
    assert pick_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert pick_device("cuda") == torch.device("cuda", 0)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="GPU 2 is not there; torch sees 2"):
        pick_device("cuda", local_rank=2)
    see(0, mps=False)
    assert pick_device("auto") == torch.device("cpu")
    for name, message in (("cuda", "torch sees 0"), ("mps", "no Apple GPU"), ("tpu:x", "must be")):
        with pytest.raises(ConfigError, match=message):
            pick_device(name)
    see(0, mps=True)
    assert pick_device("auto").type == "mps"


def test_the_backend_and_a_note_if_nccl_is_missing(monkeypatch, capsys):
    for has_nccl, backend in ((False, "gloo"), (True, "nccl")):
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda has=has_nccl: has)
        assert pick_backend(torch.device("cpu")) == "gloo"
        assert pick_backend(torch.device("cuda"), announce=False) == backend
        assert capsys.readouterr().out == ""
        assert pick_backend(torch.device("cuda")) == backend
        assert ("without nccl" in capsys.readouterr().out) == (not has_nccl)
