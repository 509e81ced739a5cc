"""Ranks that are killed, stopped or left alone; real torchrun where it matters."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch
from faultlib import (
    ROOT,
    Job,
    Shared,
    around_steps,
    bits,
    ended,
    train,
    train_ranks,
    verified,
    wait_for,
)

import training.run
from training import startup
from training.config import Config, with_values
from training.console import Console
from training.distributed import join_ranks
from training.step import train_step

STEPS = 12
RUN = {"dropout": 0.2, "max_steps": STEPS, "eval_interval": 4, "checkpoint_interval": 2}
RUN |= {"micro_batch": 1, "quiet": "true", "reduction": "exact"}


def torchrun(world: int, script: list[str], *options: str, **more) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    command += [f"--nproc_per_node={world}", *script]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, **more)


@pytest.mark.parametrize("jobs", [1, pytest.param(20, marks=pytest.mark.faults)])
def test_a_random_rank_killed_under_torchrun_is_restarted(jobs, tiny_argv, tmp_path, figure):
    """The bits are those of one rank that was never killed."""
    assert train(tiny_argv(tmp_path / "plain", **RUN)) == 0
    wanted, rng, equal = bits(tmp_path / "plain", STEPS), random.Random(jobs), 0
    for number in range(jobs):
        argv = tiny_argv(tmp_path / str(number), **RUN)
        victim = [str(rng.randrange(2)), str(rng.randrange(1, STEPS))]
        job = torchrun(2, ["tests/rank_killer.py", *victim, *argv], "--max-restarts=2")
        told = job.communicate(timeout=1200)[1]
        assert job.returncode == 0, told
        assert "exitcode: -9" in told  # it was killed
        assert bits(tmp_path / str(number), STEPS) == wanted
        equal += 1
    figure(
        f"random rank killed under torchrun --max-restarts, {jobs} jobs",
        f"{equal} of {jobs} end, bit-equal to one rank never killed",
    )


def stopping(shared: Shared, victim: int, at: int):
    """Return a hook: the victim stops itself (SIGSTOP) before step `at` + 1 and records when."""

    def stop(state, setup) -> None:
        if (setup.ranks.rank, state.step) == (victim, at):
            shared[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGSTOP)

    def patch() -> None:
        training.run.take_step = around_steps(before=stop)

    return patch


@pytest.mark.parametrize(
    "world, victim, limit",
    [
        (2, 1, 2.0),
        pytest.param(2, 0, 5.0, marks=pytest.mark.faults),
        pytest.param(4, 3, 5.0, marks=pytest.mark.faults),
        pytest.param(4, 1, 10.0, marks=pytest.mark.faults),
    ],
)
def test_a_stopped_rank_is_named_and_the_others_end(
    world, victim, limit, tiny_argv, tmp_path, figure
):
    shared = Shared()
    argv = tiny_argv(tmp_path / "run", **{**RUN, "timeout": limit})
    job = Job(world, argv, tmp_path, before=stopping(shared, victim, 4))
    others = [pid for rank, pid in enumerate(job.pids) if rank != victim]
    codes = [ended(pid) for pid in others]
    seconds = time.monotonic() - shared[0]
    os.kill(job.pids[victim], signal.SIGKILL)
    ended(job.pids[victim])
    assert codes == [7] * len(others), job.text()
    assert seconds < limit + 5
    for rank, log in enumerate(job.logs):
        if rank != victim:
            assert f"waited for rank {victim}: step 5, " in log.read_text(), log.read_text()
    figure(
        f"SIGSTOP on rank {victim} of {world}, time-out {limit:g} s",
        f"the others end after {seconds:.1f} s and name rank and step",
    )


@pytest.mark.parametrize("reduction", ["exact", pytest.param("fast", marks=pytest.mark.faults)])
def test_a_gradient_not_finite_on_one_rank_changes_no_weight_on_any(reduction, tiny_argv, tmp_path):
    """In step 5 on rank 1: both ranks end and name step and windows, and step 4 stays saved."""
    options = {**RUN, "reduction": reduction, "interval": 1}
    train_ranks(2, tiny_argv(tmp_path / "plain", **{**options, "keep_checkpoints": 9}), tmp_path)

    def patch() -> None:
        step = training.run.train_step

        def bad(setup, batches, number, n_targets):
            if number == 4 and setup.ranks.rank == 1:
                setup.model.embed.weight.register_hook(lambda gradient: gradient / 0)
            return step(setup, batches, number, n_targets)

        training.run.train_step = bad

    job = Job(2, tiny_argv(tmp_path / "run", **options), tmp_path / "bad", before=patch)
    assert job.wait() == [4, 4], job.text()
    for log in job.logs:
        told = log.read_text().splitlines()[-1]
        assert "step 5: loss" in told and "no weight was changed. Its windows: " in told
    assert verified(tmp_path / "run") == [2, 4]
    assert bits(tmp_path / "run", 4) == bits(tmp_path / "plain", 4)


@pytest.mark.faults
def test_no_orphans_when_torchrun_itself_is_killed(tiny_argv, tmp_path, figure):
    """After kill -9 of torchrun the ranks save and end."""
    argv = tiny_argv(tmp_path / "run", **{**RUN, "max_steps": 100_000})
    job = torchrun(2, ["train.py", *argv])
    wait_for(lambda: (tmp_path / "run" / "checkpoints").is_dir(), 120)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True)
    workers = [int(pid) for pid in children.stdout.split()]
    assert len(workers) == 2
    began = time.monotonic()
    job.kill()
    job.wait()
    wait_for(lambda: not any(alive(pid) for pid in workers), 60)
    seconds = time.monotonic() - began
    assert verified(tmp_path / "run")
    figure("kill -9 of torchrun", f"no orphans; the ranks end after {seconds:.1f} s, saved")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.faults
def test_sigterm_to_torchrun_saves_at_the_current_step(tiny_argv, tmp_path):
    argv = tiny_argv(tmp_path / "run", **{**RUN, "max_steps": 100_000, "quiet": "false"})
    job = torchrun(2, ["train.py", *argv], stdout=subprocess.PIPE)
    wait_for(lambda: (tmp_path / "run" / "checkpoints").is_dir(), 120)
    job.terminate()
    said, _ = job.communicate(timeout=60)
    stopped = re.search(r"stopped at step (\d+) of", said)
    assert stopped and verified(tmp_path / "run")[-1] == int(stopped[1])


@pytest.mark.faults
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_time_per_step_exact_against_fast(micro_batch, tmp_path, figure):
    """Two ranks of one thread, 8 or 2 micro-batches per step. The two ways take turns, so that both
    suffer from other work on the machine alike."""

    def command(argv: list[str]) -> int:
        ranks = join_ranks("auto", 300)
        ranks.start("cpu")
        options = {"model.n_layers": 4, "model.d_model": 256, "model.context_length": 256}
        options |= {"data.global_batch": 8, "data.micro_batch": micro_batch}
        options |= {"run.dtype": "float32", "run.threads": 1}
        times: dict[str, list[float]] = {"exact": [], "fast": []}
        setups = {}
        for way in times:
            config = with_values(Config(), {**options, "parallel.reduction": way})
            config = startup.resolve(config, ranks, 4096, Console(quiet=True))
            model = startup.build_model(config, ranks)
            setups[way] = startup.build_setup(config, model, ranks, Console())
        batch = torch.randint(4096, (micro_batch, 256))
        share = [(batch, batch)] * (4 // micro_batch)
        for step in range(24):
            way = ("exact", "fast")[step % 2]
            ranks.sum_ints([1], "beginning together")
            began = time.perf_counter()
            train_step(setups[way], share, step)
            times[way].append(time.perf_counter() - began)
        exact, fast = (statistics.median(seconds[2:]) for seconds in times.values())
        if ranks.first:
            print(f"RATIO {exact:.4f} {fast:.4f}")
        ranks.close()
        return 0

    job = Job(2, [], tmp_path, command=command)
    assert job.wait(600) == [0, 0], job.text()
    exact, fast = map(float, re.search(r"RATIO (\S+) (\S+)", job.text()).groups())
    figure(
        f"time per step, exact against fast, 2 ranks, {8 // micro_batch} micro-batches of "
        f"{micro_batch} x 256, 4 layers x 256",
        f"{1e3 * exact:.0f} ms / {1e3 * fast:.0f} ms = {exact / fast:.2f}",
    )
