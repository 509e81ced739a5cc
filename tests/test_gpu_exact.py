"""Resume and repeat on a GPU. Deselected where there is none: `pytest -m gpu`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from faultlib import bits

from training.checkpoint import read_manifest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
GPU = {"device": "cuda", "dropout": 0.1, "max_steps": 12, "eval_interval": 5, "quiet": "true"}
GPU |= {"checkpoint_interval": 3, "keep_checkpoints": 99, "d_model": 64, "n_layers": 2}


@pytest.fixture
def run(tiny_argv, tmp_path):
    """run(name, from_run=, step=, ...): train, perhaps from a checkpoint of another run."""
    from train import main

    def train(name: str, from_run: Path | None = None, step: int = 6, **options) -> Path:
        folder = tmp_path / name
        if from_run is not None:
            place = f"checkpoints/step-{step}"
            shutil.copytree(from_run / place, folder / place)
        try:
            assert main(tiny_argv(folder, **{**GPU, **options})) == 0
        finally:
            torch.use_deterministic_algorithms(False)
        return folder

    return train


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_deterministic_runs_repeat_and_resume_with_the_same_bits(run, dtype, optimizer):
    options = {"dtype": dtype, "optimizer": optimizer, "deterministic": "true"}
    wanted = bits(run("plain", **options), 12)
    assert bits(run("again", **options), 12) == wanted
    assert bits(run("resumed", run("whole", **options), **options), 12) == wanted


def test_the_scale_of_float16_is_the_same_after_a_resume(run):
    whole = run("whole", dtype="float16", deterministic="true")
    resumed = run("resumed", whole, dtype="float16", deterministic="true")
    scales = [
        json.loads((folder / "checkpoints/step-12/state.json").read_text())["scaler"]
        for folder in (whole, resumed)
    ]
    assert scales[0] == scales[1] and scales[0]["scale"] > 0


def test_a_resume_needs_no_more_memory_than_the_start(run):
    big = {"d_model": 512, "n_layers": 8, "d_mlp": 2048}
    peaks, source = [], None
    for name in ("whole", "resumed"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        source = run(name, source, **big)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.05 * peaks[0]


@pytest.mark.parametrize("there, here", [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_moves_between_devices(run, there, here):
    whole = run("whole", device=there)
    moved = run("moved", whole, device=here, resume="changed")
    assert read_manifest(moved / "checkpoints/step-12")["step"] == 12
