"""Memory of one rank, estimated before a run, and `--micro_batch=auto`, which chooses by it.

A step holds float32 weights, gradients and optimizer state, what autograd keeps of the forward
pass for the backward pass ("activations") and the logits. These do not add up to `Memory.peak`, the
largest moment of a step: activations are freed as gradients appear, exchanging or updating needs
scratch memory, and a process on a CPU needs RUNTIME besides.

Activations are counted, not calculated: a forward pass runs, and every tensor that autograd saves
is seen. So a new module is right without a word here.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cli.limits import cgroup_memory_left
from model.config import ModelConfig, ResolvedConfig
from model.gpt import GPT
from model.layers import RMSNorm
from model.loss import CHUNK_TOKENS, LARGE_VOCAB
from training.config import Config, RunConfig, with_values
from training.device import Precision, pick_attention
from training.distributed import Ranks
from training.network import new_network
from training.step import pick_reduction

FLOAT, HALF = 4, 2  # bytes
# glibc keeps tensors below 64 MiB (device.keep_freed_memory) in its heap, where freed blocks leave
# holes: resident memory was 1.4 to 1.6 times what autograd keeps, in runs of tests/test_plan.py.
# GPU allocators are near 1.
HEAP = 1.45
RUNTIME = 30_000_000  # threads, kernels compiled at run time, batches read ahead


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `gradients` includes all partial sums that are alive at the same time."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    peak: int


def estimate_memory(
    config: Config, world: int = 1, device: str = "cpu", model: GPT | None = None
) -> Memory:
    """Estimate the peak and its parts for one of `world` ranks.

    config: resolved (model, micro_batch, dtype).
    model: the model of `config` if it exists already: one or two windows run through it. Otherwise
        a model without memory is built, which needs an import of 1.5 seconds.

    tests/test_plan.py compares the result with autograd's count and with the peak of real runs. On
    a GPU the driver's context (about 0.5 GB) comes on top.
    """
    c, run, dtype = config.model.resolved(), _network_options(config, device), config.run.dtype
    tokens = config.data.micro_batch_size * c.context_length
    heap = HEAP if device == "cpu" else 1.0
    activations = round(heap * activation_bytes(config, device, model))
    if model is None:
        with torch.device("meta"):
            model = new_network(c, run, seed=None)
    shapes = Counter(tuple(p.shape) for p in model.layers.parameters() if p.dim() == 2)
    logits = logits_bytes(c, tokens, dtype, device, trains_head=not run.lora_rank)
    weights = FLOAT * model.parameter_count()
    # One gradient; one slot of AdamW. As large as the weights, unless LoRA has frozen them.
    one = FLOAT * sum(p.numel() for p in model.trained_parameters().values())
    muon = config.optim.optimizer == "muon" and not run.lora_rank
    matrices = sum(count * math.prod(shape) for shape, count in shapes.items())
    optimizer = 2 * one - (FLOAT * matrices if muon else 0)  # Muon keeps one slot
    exact = config.parallel.reduction == "exact"
    M = config.data.global_batch // config.data.micro_batch_size // world
    # Gradients that exist while the last one is computed. `fast` adds in place.
    sums = one * (partial_sums(M) if exact else int(M > 1))
    exchange = 2 * one if exact and world > 1 else 0  # what is sent and received
    buckets = one if not exact and world > 1 else 0  # DDP's, for the whole run
    gradients = round(heap * (sums + one if exact else one))
    moments = [
        round(heap * sums) + activations + logits,  # backward begins
        gradients,  # backward has ended; the last sum is added
        one + exchange,  # ranks exchange gradients
        one + (_muon_scratch(shapes, device) if muon else 0),  # the update
    ]
    runtime = RUNTIME if device == "cpu" else 0
    peak = weights + optimizer + buckets + max(moments) + runtime
    gradients = buckets + max(gradients, one + exchange)
    return Memory(weights, gradients, optimizer, activations, logits, peak)


def _network_options(config: Config, device: str) -> RunConfig:
    """Return the options that new_network reads, the others at their defaults."""
    run, attention = config.run, pick_attention(config.run.attention, torch.device(device))
    return RunConfig(attention=attention, init_from=run.init_from, lora_rank=run.lora_rank)


# Counting activations


def activation_bytes(config: Config, device: str = "cpu", model: GPT | None = None) -> int:
    """Count what autograd keeps of the forward pass of one micro-batch, up to the loss.

    One window is counted, and two: the difference is what each further window adds. The rest (the
    narrow copies of the weights that autocast makes) is there once.
    """
    n, documents = config.data.micro_batch_size, config.data.apart
    dtype = getattr(torch, config.run.dtype)
    if model is None:
        run = _network_options(config, device)
        one, two = _count_without_memory(config.model, run, dtype, device, documents)
    else:
        one = two = saved_bytes(model, 1, dtype, documents)
        if n > 1:
            two = saved_bytes(model, 2, dtype, documents)
    return one + (n - 1) * (two - one)


def saved_bytes(model: GPT, windows: int, dtype: torch.dtype, documents: bool) -> int:
    """Run a forward pass of so many full windows and add up what autograd saves for backward.

    The logits and the loss are left out (`logits_bytes` has them), the head's input is not.
    """
    device, c = model.head_weight.device, model.config
    held = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}  # views of one storage are counted once

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in held:
            saved[storage._cdata] = storage
        return t

    tokens = torch.zeros(windows, c.context_length, dtype=torch.int64, device=device)
    numbers = tokens if documents else None
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with Precision(dtype, device.type).autocast(), hooks, torch.enable_grad():
        model.forward(tokens, documents=numbers, last_only=True)  # not a compiled __call__
    total = sum(storage.nbytes() for storage in saved.values())
    if dtype != torch.float32:  # autocast copies the head's input, here of the last position alone
        total += HALF * windows * (c.context_length - 1) * c.d_model
    return total


@functools.cache
def _count_without_memory(
    config: ModelConfig, run: RunConfig, dtype: torch.dtype, device: str, documents: bool
) -> tuple[int, int]:
    """Return saved_bytes of one window and of two, of a model whose tensors have no values.

    They pretend to be on a CPU, because torch cannot pretend to have a GPU. Where a GPU has one
    kernel for what a CPU does in several, a stand-in keeps what that kernel keeps.
    """
    from torch._subclasses import fake_tensor

    narrow = torch.float32 if dtype == torch.float32 else torch.bfloat16  # float16 has its size

    def count(stand_ins: bool, seed: int | None = None) -> tuple[int, int]:
        model = new_network(config, run, seed=seed)
        if stand_ins:
            _use_gpu_stand_ins(model, run.attention)
        one, two = (saved_bytes(model, n, narrow, documents) for n in (1, 2))
        return one, two

    try:
        with fake_tensor.FakeTensorMode():
            return count(stand_ins=device == "cuda")
    except (
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.DataDependentOutputException,
    ):  # a module that looks at values, such as a router, needs values
        return count(stand_ins=False, seed=0)


class _FusedNorm(torch.autograd.Function):
    """Stand-in for rms_norm on a GPU: keeps x, the weight and 1 / rms."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


def _use_gpu_stand_ins(model: GPT, attention: str) -> None:
    class GpuRMSNorm(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return _FusedNorm.apply(x, self.weight)

    def fused_attention(q, k, v, *, documents=None, dropout_p=0.0, **options):
        """Call the operators that torch picks on a GPU; without values they run on any device."""
        if documents is None and q.dtype != torch.float32:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(q, k, v, dropout_p, True)[0], None
        mask = None if documents is None else q.new_empty(len(q), 1, q.shape[2], q.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(q, k, v, mask, True, dropout_p, mask is None)[0], None

    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.__class__ = GpuRMSNorm
    if attention == "sdpa":
        model.use_attention(fused_attention)


# What the count does not see: the loss, whose peak is within its backward pass, and the optimizer


def logits_bytes(
    c: ResolvedConfig, tokens: int, dtype: str, device: str = "cpu", trains_head: bool = True
) -> int:
    """Return the bytes that the loss holds when backward begins.

    These are log-probabilities, their gradient and the gradient of the logits. On a CPU,
    model/fast.py writes one over the other; it also keeps targets and whether they count. In
    chunks, too, gradients are written over log-probabilities; in addition there are the gradients
    of the head and of its input, and then both again, scaled.
    """
    V, narrow = c.vocab_size, 0 if dtype == "float32" else HALF
    chunked = V >= LARGE_VOCAB and tokens > CHUNK_TOKENS
    rows = CHUNK_TOKENS if chunked else tokens
    if chunked and dtype != "float16":
        gradients = FLOAT * c.d_model * (V * trains_head + tokens)
        return max(gradients + rows * V * (2 * FLOAT + narrow), 2 * gradients)
    if device != "cuda":
        return rows * (V * 2 * FLOAT + 9)
    return rows * V * (3 * FLOAT + narrow)


def partial_sums(M: int) -> int:
    """Return how many sums training.step.TreeSum holds while the last of M gradients is made."""
    odd = M // (M & -M)
    return (M // odd).bit_length() - 1 + (odd > 1)


def _muon_scratch(shapes: Counter[tuple[int, ...]], device: str) -> int:
    """Return what training.optimizer.Muon allocates to update all matrices of one shape at once."""
    narrow = HALF if device == "cuda" else FLOAT
    largest = 0
    for (rows, columns), count in shapes.items():
        grams = 2 * narrow * count * min(rows, columns) ** 2
        largest = max(largest, (2 * FLOAT + 4 * narrow) * count * rows * columns + grams)
    return largest


# --micro_batch=auto: the largest number of windows per forward pass that fits this rank's memory.
#
# On a GPU sizes are tried: a step's memory is allocated, and running out of it is caught. On a CPU
# that would end the process, so the estimate decides.

CPU_SHARE = 0.5  # of the free memory, for all ranks of a machine together
GPU_SHARE = 0.92  # of all memory; the rest is for fragmentation and other processes


def pick_micro_batch(config: Config, ranks: Ranks) -> int:
    """Choose a divisor of this rank's share of the global batch, at least 1, equal on all ranks.

    config: the model, run.dtype and run.attention are resolved.
    """
    share = max(1, config.data.global_batch // ranks.world)
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    if ranks.device.type == "cuda":
        found = largest(sizes, lambda size: fits_gpu(config, size, ranks))
    else:
        free = available_bytes()
        found = largest(sizes, lambda size: free is None or fits_cpu(config, size, ranks, free))
    return min(int(n) for n in ranks.gather(torch.tensor([found]), "choosing the micro-batch"))


def largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return the largest of the ascending `sizes` that fits, by bisection; the first if none."""
    low, high = 0, len(sizes)  # sizes[low] is taken to fit, sizes[high] is known not to
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low]


def fits_cpu(config: Config, size: int, ranks: Ranks, free: float) -> bool:
    """Return whether the estimate for `size` is within this rank's share of the free memory."""
    reduction = reduction_at(config, size, ranks)
    sized = with_values(config, {"data.micro_batch": size, "parallel.reduction": reduction})
    need = estimate_memory(sized, ranks.world, "cpu").peak
    return need * ranks.local_world <= CPU_SHARE * free


def fits_gpu(config: Config, size: int, ranks: Ranks) -> bool:
    """Return whether a step with micro-batches of `size` windows runs within GPU_SHARE."""
    total = torch.cuda.get_device_properties(ranks.device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(ranks.device)
    ran = attempt(config, size, ranks)
    used = torch.cuda.max_memory_reserved(ranks.device)
    torch.cuda.empty_cache()
    return ran and used <= GPU_SHARE * total


def attempt(config: Config, size: int, ranks: Ranks) -> bool:
    """Allocate what a step of `size` windows needs, once; False if the device runs out."""
    device, T = ranks.device, config.model.context_length
    precision = Precision(getattr(torch, config.run.dtype), device.type)
    mine = config.data.global_batch // ranks.world // size  # micro-batches per step on this rank
    exact = reduction_at(config, size, ranks) == "exact"
    try:
        model = new_network(config.model, config.run, seed=None).to(device)
        # The optimizer's two slots, the send buffer if there are several ranks, partial sums.
        slots = 2 + (ranks.world > 1) + (partial_sums(mine) if exact else 0)
        trained = model.trained_parameters().values()
        held = [torch.zeros_like(p) for p in trained for _ in range(slots)]
        parts = 2 + config.data.apart
        batch = torch.zeros(parts, size, T, dtype=torch.int64, device=device)
        for _ in range(1 if exact else min(mine, 2)):  # the second adds to the first's gradient
            with precision.autocast():
                loss = model(*batch, reduction="sum")
            loss.backward()
            del loss
        del held
    except torch.OutOfMemoryError:
        return False
    return True


def reduction_at(config: Config, size: int, ranks: Ranks) -> str:
    """Return the reduction, exact or fast, of a run with micro-batches of `size` windows."""
    return pick_reduction(config.parallel.reduction, config.data.global_batch // size, ranks)


def available_bytes() -> float | None:
    """Return the free memory of this machine or container; None if unknown."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(s.split()[1]) for s in lines if s.startswith("MemAvailable")]
    except OSError:  # not Linux
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    if (left := cgroup_memory_left()) is not None:
        found.append(left)
    return min(found, default=None)
