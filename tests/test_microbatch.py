"""`--micro_batch=auto`: the largest size that fits, by trial or estimate, equal on all ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from data.config import DataConfig
from model.config import ModelConfig
from model.gpt import GPT
from training import memory
from training.config import Config, ParallelConfig, RunConfig
from training.distributed import Ranks
from training.memory import attempt, estimate_memory, largest, pick_micro_batch

CONFIG = Config(
    model=ModelConfig(n_layers=1, n_heads=2, d_model=16, context_length=16).resolved(50),
    data=DataConfig(global_batch=12, micro_batch="auto"),
    run=RunConfig(dtype="float32", attention="sdpa"),
)


@pytest.mark.parametrize("limit", range(0, 14))
def test_the_largest_that_fits_is_found(limit):
    sizes, tried = [1, 2, 3, 4, 6, 12], []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert largest(sizes, fits) == max([size for size in sizes if size <= limit], default=1)
    assert len(tried) <= 3


def need(size: int) -> int:
    sized = replace(CONFIG, data=replace(CONFIG.data, micro_batch=size))
    sized = replace(sized, parallel=ParallelConfig(reduction="exact"))  # what auto is on a CPU
    return estimate_memory(sized).peak


@pytest.mark.parametrize("size", [2, 4, 6])
def test_on_a_cpu_the_estimate_stays_within_half_of_what_is_free(monkeypatch, size):
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * need(size))
    assert pick_micro_batch(CONFIG, Ranks()) == size
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * need(size) - 2)
    assert pick_micro_batch(CONFIG, Ranks()) < size


@pytest.mark.parametrize(("free", "size"), [(1e15, 12), (None, 12), (1, 1)])
def test_with_enough_or_unknown_memory_it_is_the_whole_share(monkeypatch, free, size):
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    assert pick_micro_batch(CONFIG, Ranks()) == size


def test_running_out_of_memory_is_caught(monkeypatch):
    assert attempt(CONFIG, 4, Ranks())
    forward = GPT.forward

    def small_only(self, tokens, *args, **options):
        if len(tokens) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, tokens, *args, **options)

    monkeypatch.setattr(GPT, "forward", small_only)
    assert not attempt(CONFIG, 4, Ranks())
    assert largest([1, 2, 3, 4, 6, 12], lambda size: attempt(CONFIG, size, Ranks())) == 3


@pytest.mark.parametrize(
    ("reduction", "size", "world", "forwards", "held"),
    [
        ("fast", 12, 1, 1, 2),  # one micro-batch: the optimizer's two slots beside its gradient
        ("fast", 4, 1, 2, 2),  # the second works while the first's gradient is there
        ("fast", 2, 2, 2, 3),  # and what is sent
        ("exact", 12, 1, 1, 2),
        ("exact", 3, 1, 1, 4),  # 4 micro-batches: two sums wait for the last one
    ],
)
def test_a_trial_holds_what_a_step_holds(monkeypatch, reduction, size, world, forwards, held):
    config = replace(CONFIG, parallel=ParallelConfig(reduction=reduction))
    gradients, zeros, slots, found = [], torch.zeros_like, [], []

    class Watched(GPT):
        def forward(self, tokens, *args, **options):
            assert tokens.shape == (size, 16)
            gradients.append(all(p.grad is not None for p in self.parameters()))
            found.append(sum(slots))
            return super().forward(tokens, *args, **options)

    monkeypatch.setattr("training.network.GPT", Watched)
    monkeypatch.setattr(torch, "zeros_like", lambda p: slots.append(p.numel()) or zeros(p))
    assert attempt(config, size, Ranks(world=world))
    assert gradients == [False, True][:forwards]
    assert found[0] == held * GPT(CONFIG.model).parameter_count()


def test_free_memory_is_the_machines_or_the_containers(monkeypatch):
    free = memory.available_bytes()
    assert free is None or 1e7 < free < 1e14
    monkeypatch.setattr(memory, "cgroup_memory_left", lambda: 12345)
    assert memory.available_bytes() == 12345


def test_a_run_saves_what_was_chosen_and_keeps_it(train_tiny, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr("training.startup.pick_micro_batch", lambda config, ranks: 2)
    assert train_tiny(folder, micro_batch="auto", max_steps=4) == 0
    assert json.loads((folder / "run.json").read_text())["data"]["micro_batch"] == 2
    monkeypatch.setattr("training.startup.pick_micro_batch", lambda config, ranks: 4)
    assert train_tiny(folder, micro_batch="auto", max_steps=8, resume="changed") == 0
    assert json.loads((folder / "run.json").read_text())["data"]["micro_batch"] == 2
