"""Exact: a run that is resumed, or on another number of ranks, has the bits of the plain run.

Weights and optimizer state are compared by their hashes, not printed losses: with one thread more
the losses look the same and the bits differ.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faultlib import ROOT, Job, bits, train, train_ranks, verified

import training.run

STEPS = 31
# 74 windows, 4 a step: the first epoch ends in step 19. Evaluations at 7, 14, 21 and 28.
EXACT = {
    "dropout": 0.2,
    "val_fraction": 0.6,
    "global_batch": 4,
    "micro_batch": 1,
    "max_steps": STEPS,
    "eval_interval": 7,
    "checkpoint_interval": 1,
    "keep_checkpoints": 100,
    "grad_clip": 0.5,  # below the usual norm: every step is clipped
    "quiet": "true",
    "reduction": "exact",
}
ALL = list(range(1, STEPS))
RECIPES = {
    "adamw float32": {},
    "muon float32": {"optimizer": "muon"},
    "adamw bfloat16": {"dtype": "bfloat16"},
    "muon bfloat16": {"optimizer": "muon", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def plain(tiny_argv, tmp_path_factory):
    """plain(recipe): the folder of an uninterrupted run; each is trained once."""
    made: dict[str, Path] = {}

    def run(recipe: str) -> Path:
        if recipe not in made:
            made[recipe] = tmp_path_factory.mktemp("plain") / "run"
            assert train(tiny_argv(made[recipe], **EXACT, **RECIPES[recipe])) == 0
        return made[recipe]

    return run


def resume(plain: Path, step: int, to: Path) -> None:
    """Make a folder as it was when the run was killed after saving `step`."""
    (to / "checkpoints").mkdir(parents=True)
    shutil.copytree(plain / "checkpoints" / f"step-{step}", to / "checkpoints" / f"step-{step}")


@pytest.mark.parametrize(
    "recipe, steps",
    [
        ("adamw float32", [5, 14, 18]),  # mid-epoch, after an evaluation, before the epoch's end
        ("muon bfloat16", [19]),
        *(pytest.param(recipe, ALL, marks=pytest.mark.faults) for recipe in RECIPES),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_a_run_resumed_at_any_step_ends_with_the_same_bits(
    plain, recipe, steps, tiny_argv, tmp_path, figure
):
    whole = plain(recipe)
    wanted = bits(whole, STEPS)
    assert wanted[0] != bits(whole, STEPS - 1)[0]  # or nothing would be compared
    good = 0
    for step in steps:
        folder = tmp_path / str(step)
        resume(whole, step, folder)
        options = {**EXACT, **RECIPES[recipe], "checkpoint_interval": 1000}
        assert train(tiny_argv(folder, **options)) == 0
        assert bits(folder, STEPS) == wanted, f"{recipe}, resumed at step {step}"
        good += 1
        shutil.rmtree(folder)
    figure(f"resume at each of {len(steps)} steps over an epoch's end, {recipe}", f"{good} equal")


def stop_after(step: int, rank: int = 0):
    """Return a hook: the rank gets SIGTERM in the middle of update number `step`."""

    def patch() -> None:
        train_step = training.run.train_step

        def asked(setup, batches, number, n_targets):
            if number == step - 1 and setup.ranks.rank == rank:
                os.kill(os.getpid(), signal.SIGTERM)
            return train_step(setup, batches, number, n_targets)

        training.run.train_step = asked

    return patch


@pytest.mark.parametrize(
    "recipe", ["muon bfloat16", pytest.param("adamw float32", marks=pytest.mark.faults)]
)
def test_one_two_and_four_ranks_in_turn_give_the_bits_of_one(plain, recipe, tiny_argv, tmp_path):
    options = {**EXACT, **RECIPES[recipe], "checkpoint_interval": 1000}
    argv = tiny_argv(tmp_path / "run", **options)
    for world, stop in ((1, 4), (2, 11), (4, 20)):
        if world == 1:
            assert train(argv, before=stop_after(stop)) == 128 + signal.SIGTERM
        else:  # another rank than the first is asked
            job = Job(world, argv, tmp_path, before=stop_after(stop, rank=world - 1))
            assert job.wait() == [128 + signal.SIGTERM] * world, job.text()
        assert verified(tmp_path / "run")[-1] == stop
    log = tmp_path / "log"
    assert train(tiny_argv(tmp_path / "run", **{**options, "quiet": "false"}), log=log) == 0
    assert "note: world was 4, now 1" in log.read_text()
    assert bits(tmp_path / "run", STEPS) == bits(plain(recipe), STEPS)


@pytest.mark.parametrize("windows", ["packed", "document"])
def test_masked_documents_keep_the_bits_over_ranks_and_a_resume(
    windows, tiny_argv, short_documents, tmp_path
):
    few = {**EXACT, **short_documents, "windows": windows, "max_steps": 7, "val_fraction": 0.2}
    whole, again, masked = tmp_path / "whole", tmp_path / "again", {"document_mask": True}
    train_ranks(2, tiny_argv(whole, **few, **masked), tmp_path)
    resume(whole, 3, again)
    assert train(tiny_argv(again, **few, **masked)) == 0
    assert bits(again, 7) == bits(whole, 7)
    log = tmp_path / "log"
    assert train(tiny_argv(again, **few, document_mask=False), log=log) == 2
    assert "data.document_mask: the run has true, the command says false" in log.read_text()


@pytest.mark.parametrize("micro_batches, worlds", [(6, (1, 2)), (12, (1, 2, 4))])
def test_a_number_of_micro_batches_that_is_no_power_of_two(
    micro_batches, worlds, tiny_argv, tmp_path
):
    few = {**EXACT, "global_batch": micro_batches, "max_steps": 5, "checkpoint_interval": 5}
    found = set()
    for world in worlds:
        train_ranks(world, tiny_argv(tmp_path / str(world), **few), tmp_path)
        found.add(bits(tmp_path / str(world), 5))
    assert len(found) == 1


def test_three_ranks_are_refused_when_exact_is_asked(tiny_argv, tmp_path):
    job = Job(3, tiny_argv(tmp_path / "run", **{**EXACT, "global_batch": 6}), tmp_path)
    assert job.wait() == [2, 2, 2]
    assert "parallel.reduction=exact: the number of ranks, 3, must be" in job.text()


def test_fast_reduction_on_two_ranks_gives_the_losses_of_one(tiny_argv, tmp_path):
    import torch._dynamo  # noqa: F401 (DDP does; once here instead of once a rank)

    losses = []
    for world in (1, 2):
        few = {**EXACT, "max_steps": 5, "reduction": "fast", "interval": 1, "eval_interval": 99}
        folder = tmp_path / str(world)
        train_ranks(world, tiny_argv(folder, **few), tmp_path)
        losses.append(log_of(folder, "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def log_of(run: Path, name: str) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_one_thread_more_is_another_recipe_and_is_kept(plain, tiny_argv, tmp_path):
    resume(plain("adamw float32"), 5, tmp_path / "run")
    argv = tiny_argv(tmp_path / "run", **{**EXACT, "threads": 2})
    log = tmp_path / "log"
    assert train(argv, log=log) == 2
    assert "run.threads: the run has 1, the command says 2" in log.read_text()


def torchrun(world: int, argv: list[str], **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={world}", "train.py", *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, **options)


@pytest.mark.faults
def test_torchrun_with_two_ranks_gives_the_bits_of_one(plain, tiny_argv, tmp_path):
    done = torchrun(2, tiny_argv(tmp_path / "run", **{**EXACT, "checkpoint_interval": 1000}))
    assert done.returncode == 0, done.stderr
    assert bits(tmp_path / "run", STEPS) == bits(plain("adamw float32"), STEPS)


@pytest.mark.faults
@pytest.mark.parametrize("recipe", ["adamw float32", "muon float32", "adamw bfloat16"])
def test_torchrun_with_one_two_and_four_ranks_in_turn(plain, recipe, tiny_argv, tmp_path, figure):
    """Each leg ends at a step of its own; the last goes to the end."""
    argv = tiny_argv(tmp_path / "run", **EXACT, **RECIPES[recipe])
    for world, stop in ((1, 6), (2, 13), (4, 22)):
        done = torchrun(world, argv, timeout=300)
        assert done.returncode == 0, done.stderr
        for step in range(stop + 1, STEPS + 1):  # as if it had been killed after step `stop`
            shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step}")
    assert torchrun(1, argv).returncode == 0
    assert bits(tmp_path / "run", STEPS) == bits(plain(recipe), STEPS)
    figure(f"1 -> 2 -> 4 -> 1 ranks by torchrun, exact, {recipe}", "one SHA-256")
