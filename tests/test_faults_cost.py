"""Duration of a save, for the main config and for 124M parameters."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch

from model.gpt import GPT
from training.checkpoint import Checkpoints, TrainState
from training.config import read_config, to_json
from training.optimizer import Optimizers

CONFIGS = Path(__file__).parents[1] / "config"


@pytest.mark.faults
@pytest.mark.parametrize("name, vocab_size, times", [("small", 4096, 5), ("gpt2_124m", 50_304, 2)])
def test_duration_of_a_save(name, vocab_size, times, tmp_path, figure):
    config = read_config(CONFIGS / f"{name}.py")
    model = GPT(config.model.resolved(vocab_size))
    model.init_weights(1)
    optim = Optimizers(model, config.optim, torch.device("cpu")).state_tensors()
    checkpoints, seconds = Checkpoints(tmp_path / "c", lambda text: None), []
    for step in range(1, times + 1):
        state, began = TrainState(step=step), time.perf_counter()
        tokenizer = {"t.json": b"{}"}
        checkpoints.save(
            state, dict(model.named_parameters()), optim, to_json(config), tokenizer, {}
        )
        seconds.append(time.perf_counter() - began)
        checkpoints.prune(2)
    size = sum(path.stat().st_size for path in checkpoints.path(times).rglob("*") if path.is_file())
    began = time.perf_counter()
    found = Checkpoints(checkpoints.folder, lambda text: None).newest()
    verifying = time.perf_counter() - began
    assert torch.equal(found.model_tensors()["embed.weight"], model.embed.weight)
    save = statistics.median(seconds)
    millions = model.parameter_count() / 1e6
    figure(
        f"a save of {name}.py, {millions:.1f}M parameters, {size / 1e6:.0f} MB",
        f"{save:.2f} s ({size / save / 1e6:.0f} MB/s); verifying it {verifying:.2f} s",
    )
