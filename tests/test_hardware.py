"""Peaks by the name of a GPU, and the share of them that is used, against values made by hand."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from model.config import ModelConfig
from model.gpt import GPT
from training.device import (
    keep_freed_memory,
    known_peak,
    measured_peak,
    model_flops_utilisation,
    peak_flops,
)

HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H100 NVL", 835e12, 60e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H200 NVL", 835e12, 60e12),
        ("NVIDIA GeForce RTX 3090 Ti", 80e12, 40e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("Tesla V100-SXM2-16GB", 125e12, 15.7e12),
        ("Tesla T4", 65e12, 8.1e12),
        ("NVIDIA GeForce RTX 3090", 71e12, 35.6e12),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(name, half, single):
    assert known_peak(name, HALF) == known_peak(name, torch.float16) == half
    assert known_peak(name, SINGLE) == single


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "",
    ],
)
def test_a_gpu_that_only_looks_like_a_known_one_is_unknown(name):
    assert known_peak(name, HALF) is None


def test_a_known_gpu_is_not_measured_and_an_unknown_one_is(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr("training.device.measured_peak", lambda *args, **kwargs: 5.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    assert peak_flops(device, HALF) == 312e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert peak_flops(device, HALF) == 5.0
    assert peak_flops(torch.device("cpu"), SINGLE) == 5.0
    assert peak_flops(torch.device("mps"), SINGLE) is None


def test_a_measurement_counts_two_operations_a_product(monkeypatch):
    # Four products of 8 x 8 matrices, each of 0.5 s but for one of 0.25: 2 x 512 / 0.25.
    durations = [0.5, 0.5, 0.25, 0.5]
    ticks = iter([t for i, d in enumerate(durations) for t in (10.0 * i, 10.0 * i + d)])
    monkeypatch.setattr("training.device.time.perf_counter", lambda: next(ticks))
    assert measured_peak(torch.device("cpu"), SINGLE, size=8, tries=4) == 4096


def test_utilisation_is_the_models_work_over_the_peak_of_all_ranks():
    # 1,000 tokens/s x 6e9 operations = 6e12 a second, of 2 devices with 12e12 each.
    assert model_flops_utilisation(1000, 6e9, peak=12e12, world=2) == pytest.approx(0.25)
    assert model_flops_utilisation(1000, 6e9, peak=12e12, world=1) == pytest.approx(0.5)


def test_utilisation_without_a_peak_is_unknown_and_never_above_1():
    assert model_flops_utilisation(1000, 6e9, peak=None, world=1) is None
    assert model_flops_utilisation(1000, 6e9, peak=1e12, world=1) == 1.0


def test_operations_of_a_token_by_hand():
    config = ModelConfig(n_layers=2, n_heads=2, n_kv_heads=1, d_model=8, d_mlp=12, mlp="swiglu")
    model = GPT(config.resolved(10))
    # A layer: q 8x8, k and v 4x8, out 8x8, gate, up and down 12x8 each; the head 10x8.
    matrices = 2 * (64 + 32 + 32 + 64 + 3 * 96) + 80
    scores = 12 * 2 * 2 * 4 * 5  # 12 L (H D) T
    assert model.flops_per_token(5) == 6 * matrices + scores


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own setting")
def test_memory_that_was_freed_is_there_for_the_next_step():
    """32 MB taken and freed 10 times, after the heap has grown: no page is faulted in again."""
    assert keep_freed_memory()
    pages = 32 * 2**20 // resource.getpagesize()
    for _ in range(20):
        torch.ones(8 * 2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(8 * 2**20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages
