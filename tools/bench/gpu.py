"""A GPU in one table: correctness of attention, and speed relative to the hardware's limits."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cli.options import ConfigError
from model.attention import ATTENTION, Attend, reference_attention
from model.config import ModelConfig
from model.gpt import GPT
from tools.bench.decode import decode_speed, weights_of_a_token
from tools.bench.step import (
    random_batch,
    seconds_of,
    share_of_peak,
    step_seconds,
    training_setup,
)
from tools.bench.table import show
from training.config import load_config
from training.device import known_peak, measured_peak

ROOT = Path(__file__).parents[2]
KERNELS = ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"]  # sdpa's
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
# B, H, H_kv, T, S, D, causal: training, grouped heads, a cache before, no mask.
CASES = [
    (2, 4, 4, 256, 256, 64, True),
    (2, 4, 2, 256, 256, 64, True),
    (2, 4, 4, 40, 200, 64, True),
    (2, 4, 4, 130, 130, 64, False),
]
WARMUP, STEPS = 3, 10


@dataclass(frozen=True)
class Work:
    """Sizes: rows of the matrix product, bytes to copy, and models with batch sizes to try, largest
    first."""

    product: int
    copy: int
    models: dict[str, tuple[ModelConfig, tuple[int, ...]]]
    prompt_tokens: int
    new_tokens: int


def bench_gpu(*, device: str, quick: bool) -> int:
    """Measure everything, in a few minutes. Returns 1 if attention is wrong somewhere."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device=cuda: there is no CUDA GPU; try the command with --device=cpu --quick=true"
        )
    if device == "cpu" and not quick:
        raise ConfigError("device=cpu: far too slow at these sizes; add --quick=true")
    work, place = (toy_work() if quick else real_work()), torch.device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    right = attention_rows(place)
    peak = measured_peak(place, torch.bfloat16, work.product, tries=20)
    rows = [*right, peak_row(place, peak), decode_row(place, work)]
    rows += [train_row(name, *about, place, peak) for name, about in work.models.items()]
    show(
        ["", "measured", "limit", "ratio", "peak MB"],
        rows,
        "attention: largest error of output and gradients vs the reference in float32, as a "
        "fraction of the largest entry",
        f"matrix product: best of 20 of {work.product}^3 in bfloat16; the limit is the datasheet's",
        "training: a step in bfloat16, compiled on a GPU; the limit is the measured product; ratio "
        "is MFU (6 per matrix parameter + 12 L C T FLOPs per token)",
        f"decoding: {work.prompt_tokens} + {work.new_tokens} tokens, one sequence; the limit is "
        "reading the weights once per token, at the speed of a memory copy",
    )
    return int(any(row[3] == "WRONG" for row in right))


def real_work() -> Work:
    """Return GPT-2's two smallest sizes."""
    small = load_config([str(ROOT / "config/gpt2_124m.py")]).model
    medium = replace(small, n_layers=24, n_heads=16, d_model=1024)
    models = {"124M": (small, (32, 16, 8, 4)), "350M": (medium, (16, 8, 4, 2))}
    return Work(8192, 2**30, models, prompt_tokens=16, new_tokens=128)


def toy_work() -> Work:
    """Return the same with a tiny model."""
    shape = replace(
        real_work().models["124M"][0],
        **{"n_layers": 1, "n_heads": 2, "d_model": 32, "context_length": 32, "vocab_size": 64},
    )
    return Work(64, 2**16, {"toy": (shape, (2, 1))}, prompt_tokens=4, new_tokens=8)


# Attention


def attention_rows(device: torch.device) -> list[list[str]]:
    """Return a row per backend, per sdpa kernel, and per dtype."""
    backends: dict[str, tuple[Attend, Callable[[], AbstractContextManager]]]
    backends = {name: (attend, nullcontext) for name, attend in ATTENTION.items()}
    for name in KERNELS:
        kernel = getattr(SDPBackend, name)
        backends[f"sdpa {name}"] = (ATTENTION["sdpa"], lambda kernel=kernel: sdpa_kernel(kernel))
    rows = []
    for (name, (attend, chosen)), dtype in product(backends.items(), TOLERANCE):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reasons why a kernel refuses a case
            errors = list(attention_errors(attend, chosen, device, dtype))
        label = f"attention {name.removesuffix('_ATTENTION')}, {str(dtype)[6:]}"
        rows.append(attention_row(label, errors, TOLERANCE[dtype]))
    return rows


def attention_row(label: str, errors: list[float], tolerance: float) -> list[str]:
    """errors: of the cases that the kernel accepts."""
    if not errors:
        return [label, "-", f"{tolerance:.0e}", "no kernel", "-"]
    worst = max(errors)
    verdict = f"ok {len(errors)}/{len(CASES)}" if worst <= tolerance else "WRONG"
    return [label, f"{worst:.1e}", f"{tolerance:.0e}", verdict, "-"]


def attention_errors(
    attend: Attend,
    chosen: Callable[[], AbstractContextManager],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[float]:
    """Yield the error of each case that the kernel accepts; nan counts as infinite."""
    for B, H, H_kv, T, S, D, causal in CASES:
        rng = torch.Generator().manual_seed(T)
        sizes = [(B, H, T, D), (B, H_kv, S, D), (B, H_kv, S, D), (B, H, T, D)]
        inputs = [torch.randn(size, generator=rng).to(device, dtype) for size in sizes]
        expected = with_gradients(reference_attention, [x.float() for x in inputs], causal)
        try:
            with chosen():
                found = with_gradients(attend, inputs, causal)
        except RuntimeError:  # "No available kernel"
            continue
        pairs = zip(found, expected, strict=True)
        errors = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs]
        yield max(e if e == e else float("inf") for e in errors)


def with_gradients(attend: Attend, inputs: list[Tensor], causal: bool) -> list[Tensor]:
    """Return the output and the gradients of q, k, v; inputs: q, k, v, gradient of the output."""
    *qkv, grad = inputs
    qkv = [x.detach().requires_grad_() for x in qkv]
    out, _ = attend(*qkv, causal=causal)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


# Speed


def peak_row(device: torch.device, peak: float) -> list[str]:
    """Return the row of the measured peak, compared with the datasheet."""
    known = (
        known_peak(torch.cuda.get_device_name(device), torch.bfloat16) if on_gpu(device) else None
    )
    told = [f"{known / 1e12:.0f} TFLOP/s", f"{peak / known:.2f}"] if known else ["unknown", "-"]
    return ["matrix product, bfloat16", f"{peak / 1e12:.4g} TFLOP/s", *told, "-"]


def decode_row(device: torch.device, work: Work) -> list[str]:
    """Return the row of decoding with the first model."""
    name, (shape, _) = next(iter(work.models.items()))
    model = GPT(shape.resolved(shape.vocab_size))
    model.init_weights(1)
    model = model.to(device).eval()
    forget_memory(device)
    lengths = {"prompt_tokens": work.prompt_tokens, "new_tokens": work.new_tokens}
    speed = decode_speed(model, batch=1, **lengths)
    bound = measured_bandwidth(device, work.copy) / bytes_of_a_token(model)
    told = [f"{speed:.0f} tokens/s", f"{bound:.0f} tokens/s", f"{speed / bound:.2f}"]
    return [f"decoding {name}, float32", *told, memory_text(device)]


def bytes_of_a_token(model: GPT) -> int:
    return sum(weight.nbytes for weight in weights_of_a_token(model))


def measured_bandwidth(device: torch.device, size: int, tries: int = 20) -> float:
    """Return bytes read and written per second: the best of some copies of `size` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(seconds_of(lambda: target.copy_(source), device) for _ in range(tries))
    return 2 * size / best


def train_row(
    name: str, shape: ModelConfig, batches: tuple[int, ...], device: torch.device, peak: float
) -> list[str]:
    """Return the row of training with the largest batch that fits."""
    shape = shape.resolved(shape.vocab_size)
    for batch in batches:
        forget_memory(device)
        try:
            seconds, flops = seconds_of_training(shape, batch, device)
        except torch.OutOfMemoryError:
            continue
        T = shape.context_length
        rate, share = batch * T / seconds, share_of_peak(flops * batch * T, seconds, peak)
        told = [f"{rate:.0f} tokens/s", f"{peak / flops:.0f} tokens/s", f"{share:.2f}"]
        return [f"training {name}, {batch} x {T}, bfloat16", *told, memory_text(device)]
    return [f"training {name}", "does not fit", "-", "-", "-"]


def seconds_of_training(shape: ModelConfig, batch: int, device: torch.device) -> tuple[float, int]:
    """Return (seconds of the median step, FLOPs per token)."""
    setup = training_setup(
        shape, batch, device=device.type, dtype="bfloat16", compiled=on_gpu(device)
    )
    data = random_batch(setup, batch)
    times = [step_seconds(setup, data, step) for step in range(WARMUP + STEPS)]
    flops = setup.model.flops_per_token(shape.context_length)
    return statistics.median(times[WARMUP:]), flops


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def forget_memory(device: torch.device) -> None:
    """Free unused memory and reset the peak."""
    if on_gpu(device):
        gc.collect()  # a compiled model refers to itself
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory_text(device: torch.device) -> str:
    """Return the peak of GPU memory, in MB."""
    return f"{torch.cuda.max_memory_allocated() / 1e6:.0f}" if on_gpu(device) else "-"
