"""Runs on Apple GPUs, which have no float64. A fake takes their place: tensors that are moved to
"mps" stay in this machine's memory, are marked, and refuse what Apple's would refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import sample
from tools import evaluate

MPS, CPU = torch.device("mps"), torch.device("cpu")
LOSSES = {"loss", "val_loss"}


def is_place(value: object) -> bool:
    return isinstance(value, (torch.device, str))


def marked(value: object) -> bool:
    return isinstance(value, Tensor) and "on_mps" in value.__dict__


class AppleGpu(TorchFunctionMode):
    """Functions of marked tensors return marked tensors, until one is moved to the CPU."""

    functions = 0  # number of functions that computed on the GPU

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.device, torch._C._nn._parse_to):  # they only name a device
            return function(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs or {}))
        there = any(map(marked, leaves))
        if function == Tensor.device.__get__ and there:
            return MPS
        if function == Tensor.is_cpu.__get__ and there:
            return False
        if function in (Tensor.numpy, Tensor.__array__) and there:
            raise TypeError("can't convert mps:0 device type tensor to numpy")
        moved_there = any(leaf == MPS or leaf == "mps" for leaf in leaves if is_place(leaf))
        moved_back = function is Tensor.cpu or CPU in filter(is_place, leaves)
        args, kwargs = tree_map(
            lambda leaf: CPU if is_place(leaf) and leaf in (MPS, "mps") else leaf,
            (args, kwargs or {}),
        )
        found = function(*args, **kwargs)
        if (moved_there or moved_back) and any(found is leaf for leaf in leaves):
            found = found.clone()  # a real move returns another tensor
        if function == Tensor.data.__set__ and marked(args[1]):
            args[0].on_mps = True
        if moved_there or (there and not moved_back):
            self.functions += 1
            return tree_map(self._mark, found)
        return found

    def _mark(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if value.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        if not marked(value):
            value.on_mps = True
        return value


@pytest.fixture
def apple(monkeypatch):
    generator = torch.Generator
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "manual_seed", torch.default_generator.manual_seed)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    with AppleGpu() as gpu:
        yield gpu


def test_the_fake_gpu_refuses_what_an_apple_gpu_refuses(apple):
    x = torch.ones(3).to("mps")
    assert (x * 2).device == x[0].device == torch.zeros(2, device=MPS).device == MPS
    assert x.cpu().device == x.to(CPU).device == torch.ones(1).device == CPU
    assert x.cpu().double().sum() == 3
    for refused in (
        lambda: x.double(),
        lambda: x.to(torch.float64),
        lambda: torch.ones(2, dtype=torch.float64).to(MPS),
        lambda: torch.zeros(2, dtype=torch.float64, device="mps"),
        lambda: x.sum(dtype=torch.float64),
        lambda: x.numpy(),
    ):
        with pytest.raises(TypeError):
            refused()
    model = torch.nn.Linear(3, 2).to(MPS)
    model(x).sum().backward()
    assert model.weight.device == model.weight.grad.device == MPS


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line.get("loss", line.get("val_loss")) for line in lines if line.keys() & LOSSES]


def test_a_run_with_snapshots_and_resume(apple, train_tiny, tmp_path, monkeypatch):
    """device=auto uses the GPU for both optimizers, clipping, evaluation, snapshots, checkpoint,
    sample and resume; the losses are those of a CPU up to rounding."""
    monkeypatch.setattr("training.observer.SAMPLE_TOKENS", 5)
    monkeypatch.setattr("training.observer.try_report", lambda *arguments: True)  # takes seconds
    run = {"report": True, "optimizer": "muon", "qk_norm": True, "eval_interval": 2, "interval": 1}
    for name, device in (("mps", "auto"), ("cpu", "cpu")):
        apple.functions = 0
        for steps in (2, 3):
            more = {"max_steps": steps, "resume": "changed" if steps > 2 else "auto"}
            assert train_tiny(tmp_path / name, device=device, **run, **more) == 0
        assert (apple.functions > 1000) == (device == "auto")
        assert (tmp_path / name / "snapshots.jsonl").read_text().count("\n") == 2
    found = losses(tmp_path / "mps")
    assert len(found) == 5 and found == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_sampling_and_evaluation(apple, trained_once, tiny_folder, command):
    for main, *argv in (
        (sample.main, trained_once, "--prompt=def ", "--max_new_tokens=20", "--top_p=0.9"),
        (evaluate.main, trained_once, f"--source={tiny_folder / 'text.txt'}"),
    ):
        apple.functions = 0
        code, _, err = command(main, *argv, "--device=mps")
        assert code == 0, err
        assert apple.functions > 100
