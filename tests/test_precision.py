"""Which device, backend and number format are chosen, on hardware that need not be here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cli.options import ConfigError
from training.device import Precision, cpu_has_bfloat16_units, pick_attention, pick_dtype
from training.distributed import pick_backend, pick_device

CPU, MPS, CUDA = torch.device("cpu"), torch.device("mps"), torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch):
    """gpus(2, (7, 5)): as if this machine had two GPUs of that capability."""

    def pretend(count: int, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


@pytest.fixture
def no_probe(monkeypatch):
    """A GPU must not be asked for what it can do where there is none."""

    def probed(device=None):
        raise AssertionError("no CUDA GPU here")

    monkeypatch.setattr(torch.cuda, "get_device_capability", probed)


@pytest.fixture
def apple(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


# Devices


def test_auto_takes_this_ranks_gpu_else_apples_else_the_cpu(gpus, monkeypatch):
    gpus(2)
    assert pick_device("auto", local_rank=1) == torch.device("cuda", 1)
    gpus(0)
    assert pick_device("auto") == CPU
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == MPS


def test_a_device_that_is_asked_for_is_taken(gpus, apple):
    gpus(2)
    assert pick_device("cpu", local_rank=1) == CPU
    assert pick_device("mps") == MPS
    assert pick_device("cuda", local_rank=1) == torch.device("cuda", 1)
    assert pick_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("count", "name", "rank"), [(0, "cuda", 0), (0, "cuda:0", 0), (1, "cuda:1", 0), (2, "cuda", 2)]
)
def test_a_gpu_that_is_not_there_is_refused(gpus, count, name, rank):
    gpus(count)
    with pytest.raises(ConfigError, match=f"run.device={name}: GPU .* torch sees {count} CUDA GPU"):
        pick_device(name, rank)


def test_what_is_no_device_is_refused():
    with pytest.raises(ConfigError, match="run.device=gpu: allowed are auto, cpu, cuda, cuda:N"):
        pick_device("gpu")
    if not torch.backends.mps.is_available():
        with pytest.raises(ConfigError, match="no Apple GPU"):
            pick_device("mps")


# Number formats


def test_auto_looks_at_the_device_that_was_chosen_and_at_no_other(no_probe, gpus, monkeypatch):
    monkeypatch.setattr("training.device.cpu_has_bfloat16_units", lambda: False)
    assert pick_dtype("auto", CPU, 512)[0] == "float32"
    assert pick_dtype("auto", MPS, 512)[0] == "float32"
    gpus(1, (9, 0))  # a GPU is there, but was not asked for
    assert pick_dtype("auto", CPU, 512)[0] == "float32"
    monkeypatch.setattr("training.device.cpu_has_bfloat16_units", lambda: True)
    assert pick_dtype("auto", CPU, 512)[0] == "bfloat16"
    assert pick_dtype("auto", CPU, 256)[0] == "bfloat16"
    assert pick_dtype("auto", CPU, 255)[0] == "float32"  # conversion would cost more than it saves
    assert pick_dtype("auto", MPS, 512)[0] == "float32"


@pytest.mark.parametrize(
    ("amx", "avx", "units"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_either_unit_of_a_cpu_will_do(monkeypatch, amx, avx, units):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    assert cpu_has_bfloat16_units() is units


def test_a_torch_that_cannot_tell_of_units_has_none(monkeypatch):
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.delattr(torch.cpu, name)
    assert cpu_has_bfloat16_units() is False


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")],
)
def test_bfloat16_only_where_a_gpu_computes_it(gpus, capability, dtype):
    gpus(1, capability)
    chosen, why = pick_dtype("auto", CUDA, 512)
    assert chosen == dtype
    assert "bfloat16 units" in why or "natively" in why
    assert Precision(getattr(torch, chosen), "cpu").scaler().is_enabled() is (dtype == "float16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_format_that_is_asked_for_is_taken(gpus, dtype):
    gpus(1, (7, 5))
    assert pick_dtype(dtype, CUDA, 512) == (dtype, "as set")


@pytest.mark.parametrize("device", [CPU, MPS])
def test_float16_is_for_gpus_of_cuda(device):
    with pytest.raises(ConfigError, match=f"run.dtype=float16 on {device.type}.*--dtype=float32"):
        pick_dtype("float16", device, 512)
    assert pick_dtype("bfloat16", device, 512)[0] == "bfloat16"


def test_only_float16_scales_the_loss():
    enabled = {
        d: Precision(d, "cpu").scaler().is_enabled() for d in (torch.float32, torch.bfloat16)
    }
    assert not any(enabled.values())
    assert Precision(torch.float16, "cpu").scaler().is_enabled()
    off = Precision(torch.float32, "cpu").scaler()
    assert off.scale(torch.ones(())) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_computed_in_the_format_and_weights_stay_float32(dtype):
    layer = torch.nn.Linear(4, 4)
    with Precision(dtype, "cpu").autocast():
        assert layer(torch.ones(2, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_on_apple_gpus_attention_is_the_textbooks():
    assert pick_attention("auto", MPS) == "reference"
    assert pick_attention("auto", CPU) == pick_attention("auto", CUDA) == "sdpa"
    assert pick_attention("sdpa", MPS) == "sdpa"
    assert pick_attention("tiled", CPU) == "tiled"


# Between ranks


def test_without_nccl_gpus_talk_through_gloo_and_it_is_said(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert pick_backend(CUDA, said.append) == "nccl"
    assert not said
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert pick_backend(CUDA, said.append) == "gloo"
    assert len(said) == 1
    assert "nccl" in said[0]
    assert pick_backend(CPU, said.append) == "gloo"
    assert len(said) == 1
