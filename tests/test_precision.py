"""Device, backend and number format chosen on hardware that this machine need not have."""

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
    """gpus(2, (7, 5)): pretend that this machine has two GPUs of that capability."""

    def pretend(count: int, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


# Devices


@pytest.mark.parametrize(
    ("count", "apple", "asked", "rank", "device"),
    [
        (2, False, "auto", 1, "cuda:1"),
        (0, False, "auto", 0, "cpu"),
        (0, True, "auto", 0, "mps"),
        (2, True, "cpu", 1, "cpu"),
        (2, True, "mps", 0, "mps"),
        (2, True, "cuda", 1, "cuda:1"),
        (2, True, "cuda:1", 0, "cuda:1"),
    ],
)
def test_auto_takes_this_ranks_gpu_else_apples_else_the_cpu(
    gpus, monkeypatch, count, apple, asked, rank, device
):
    gpus(count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)
    assert pick_device(asked, rank) == torch.device(device)


@pytest.mark.parametrize(
    ("count", "name", "rank", "reason"),
    [
        (0, "cuda", 0, "GPU .* torch sees 0 CUDA GPU"),
        (0, "cuda:0", 0, "GPU .* torch sees 0 CUDA GPU"),
        (1, "cuda:1", 0, "GPU .* torch sees 1 CUDA GPU"),
        (2, "cuda", 2, "GPU .* torch sees 2 CUDA GPU"),
        (0, "gpu", 0, "must be auto, cpu, cuda, cuda:N"),
        (0, "mps", 0, "no Apple GPU"),
    ],
)
def test_a_device_that_does_not_exist_is_refused(gpus, monkeypatch, count, name, rank, reason):
    gpus(count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"run.device={name}: .*{reason}"):
        pick_device(name, rank)


# Number formats


@pytest.mark.parametrize(
    ("device", "width", "units", "dtype"),
    [
        (CPU, 512, False, "float32"),
        (CPU, 512, True, "bfloat16"),
        (CPU, 256, True, "bfloat16"),
        (CPU, 255, True, "float32"),  # casting would cost more than it saves
        (MPS, 512, True, "float32"),
    ],
)
def test_auto_looks_at_the_chosen_device_only(monkeypatch, device, width, units, dtype):
    def probed(device=None):
        raise AssertionError("no CUDA GPU here")

    monkeypatch.setattr(torch.cuda, "get_device_capability", probed)
    monkeypatch.setattr("training.device.cpu_has_bfloat16_units", lambda: units)
    assert pick_dtype("auto", device, width)[0] == dtype


@pytest.mark.parametrize(
    ("amx", "avx", "units"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_either_unit_of_a_cpu_is_enough(monkeypatch, amx, avx, units):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    assert cpu_has_bfloat16_units() is units


def test_a_torch_without_the_probes_has_no_units(monkeypatch):
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
    assert why == {"bfloat16": "native on this GPU", "float16": "no bfloat16 on this GPU"}[dtype]


def test_a_format_that_is_asked_for_is_taken_but_float16_only_on_cuda(gpus):
    gpus(1, (7, 5))
    for dtype in ("float32", "bfloat16", "float16"):
        assert pick_dtype(dtype, CUDA, 512) == (dtype, "as set")
    for device in (CPU, MPS):
        assert pick_dtype("bfloat16", device, 512)[0] == "bfloat16"
        with pytest.raises(ConfigError, match=f"float16 on {device.type}.*--dtype=float32"):
            pick_dtype("float16", device, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_use_the_format_weights_stay_float32_and_only_float16_is_scaled(dtype):
    layer, precision = torch.nn.Linear(4, 4), Precision(dtype, "cpu")
    with precision.autocast():
        assert layer(torch.ones(2, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32
    assert precision.scaler().is_enabled() is (dtype == torch.float16)
    assert (float(precision.scaler().scale(torch.ones(()))) == 1) is (dtype != torch.float16)


def test_on_apple_gpus_attention_is_the_reference():
    assert pick_attention("auto", MPS) == "reference"
    assert pick_attention("auto", CPU) == pick_attention("auto", CUDA) == "sdpa"
    assert pick_attention("sdpa", MPS) == "sdpa"
    assert pick_attention("tiled", CPU) == "tiled"


# Between ranks


def test_without_nccl_gpus_use_gloo_with_a_message(monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert pick_backend(CUDA) == "nccl"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert pick_backend(CPU) == pick_backend(CUDA, announce=False) == "gloo"
    assert capsys.readouterr().out == ""
    assert pick_backend(CUDA) == "gloo"
    assert "nccl" in capsys.readouterr().out
