"""Peak speeds by the name of a GPU, MFU and memory settings, against values worked out by hand."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from model.config import ModelConfig
from model.gpt import GPT
from training import device
from training.device import keep_freed_memory, known_peak, model_flops_utilization

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
        # Names that only look like a known one
        ("NVIDIA A10G", None, None),
        ("NVIDIA L40", None, None),
        ("NVIDIA RTX 6000 Ada Generation", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("", None, None),
    ],
)
def test_the_peak_of_a_gpu_by_its_whole_name(name, half, single):
    assert known_peak(name, HALF) == known_peak(name, torch.float16) == half
    assert known_peak(name, SINGLE) == single


@pytest.mark.parametrize(
    ("kind", "name", "peak"),
    [("cuda:0", "NVIDIA A100-SXM4-40GB", 312e12), ("cuda:0", "Some GPU", 5), ("cpu", "", 5),
     ("mps", "", None)],
)  # fmt: skip
def test_an_unknown_gpu_and_a_cpu_are_measured(monkeypatch, kind, name, peak):
    monkeypatch.setattr(device, "measured_peak", lambda *args, **kwargs: 5)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device.peak_flops(torch.device(kind), HALF) == peak


def test_a_measurement_counts_two_operations_per_multiplication(monkeypatch):
    # Four products of 8 x 8 matrices, each of 0.5 s but for one of 0.25: 2 x 512 / 0.25.
    durations = [0.5, 0.5, 0.25, 0.5]
    ticks = iter([t for i, d in enumerate(durations) for t in (10.0 * i, 10.0 * i + d)])
    monkeypatch.setattr("training.device.time.perf_counter", lambda: next(ticks))
    assert device.measured_peak(torch.device("cpu"), SINGLE, size=8, tries=4) == 4096


@pytest.mark.parametrize(
    ("peak", "world", "mfu"),
    # 1,000 tokens/s x 6e9 operations = 6e12 per second.
    [(12e12, 2, 0.25), (12e12, 1, 0.5), (1e12, 1, 1.0), (None, 1, None)],
)
def test_mfu_is_the_models_work_over_the_peak_of_all_ranks(peak, world, mfu):
    assert model_flops_utilization(1000, 6e9, peak, world) == mfu


def test_operations_per_token_by_hand():
    config = ModelConfig(n_layers=2, n_heads=2, n_kv_heads=1, d_model=8, d_mlp=12, mlp="swiglu")
    model = GPT(config.resolved(10))
    # A layer: q 8x8, k and v 4x8, out 8x8, gate, up and down 12x8 each; the head 10x8.
    matrices = 2 * (64 + 32 + 32 + 64 + 3 * 96) + 80
    scores = 12 * 2 * 2 * 4 * 5  # 12 L (H D) T
    assert model.flops_per_token(5) == 6 * matrices + scores


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own setting")
def test_freed_memory_is_reused_by_the_next_step():
    """Allocate and free 32 MB ten times once the heap has grown: no page is faulted in again."""
    assert keep_freed_memory()
    pages = 32 * 2**20 // resource.getpagesize()
    for _ in range(20):
        torch.ones(8 * 2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(8 * 2**20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages
