"""How much memory one rank will need, worked out from the config before anything is allocated.

The parts are what a step holds: float32 weights, gradients and optimizer state, what autograd keeps
of the forward ("activations") and the logits. They do not all stand side by side (activations go
as gradients come), so the peak is less than their sum; `Memory.peak` is the largest moment.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cli.limits import cgroup_memory_left
from model.config import ModelConfig, attention_dropout
from model.fast import speed_up
from model.gpt import GPT
from model.inspect import meta_model
from model.loss import CHUNK_TOKENS, LARGE_VOCAB
from training.config import Config
from training.device import Precision
from training.distributed import Ranks
from training.step import pick_reduction

FLOAT = 4  # bytes
HALF = 2
# glibc keeps tensors below 32 MiB in its heap, where what is freed leaves holes: resident memory
# was 1.2 to 1.5 times what was alive, measured over a dozen shapes. GPU allocators are near 1.
HEAP = 1.35
RUNTIME = 30_000_000  # threads, kernels made at run time, batches read ahead


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `gradients` counts all partial sums that live at one time."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    peak: int

    def parts(self) -> dict[str, int]:
        """{"weights": ..., ...} without the peak, in the order of the fields."""
        return {name: size for name, size in vars(self).items() if name != "peak"}


def estimate_memory(
    config: Config, world: int = 1, device: str = "cpu", model: GPT | None = None
) -> Memory:
    """Peak and parts for one of `world` ranks. `config` is resolved: model, micro_batch, dtype.

    model: the model of `config`, where there is one already; else one without memory is built.

    Held against autograd's own count and against the measured peak of real runs in
    tests/test_plan.py. On a GPU the driver's own context (about 0.5 GB) comes on top.
    """
    c, dtype = config.model, config.run.dtype
    model = model or meta_model(c)
    shapes = Counter(tuple(p.shape) for p in model.layers.parameters() if p.dim() == 2)
    matrices = sum(count * math.prod(shape) for shape, count in shapes.items())
    one = FLOAT * model.parameter_count()  # the weights; one gradient; one slot of AdamW
    muon = config.optim.optimizer == "muon"
    optimizer = 2 * one - (FLOAT * matrices if muon else 0)  # Muon keeps one slot
    heap = HEAP if device == "cpu" else 1.0
    tokens = config.data.micro_batch * c.context_length
    activations = tokens * bytes_per_token(c, dtype, device, config.data.document_mask)
    if dtype != "float32":  # autocast's copies of the matrices, until backward has ended
        activations += HALF * (matrices + c.vocab_size * c.d_model)
    activations = round(heap * activations)
    logits = logits_bytes(c, tokens, dtype, device)
    exact = config.parallel.reduction == "exact"
    M = config.data.global_batch // config.data.micro_batch // world
    # Gradients that stand while the last is computed, which fast adds in place.
    sums = one * (partial_sums(M) if exact else int(M > 1))
    join = 2 * one if exact and world > 1 else 0  # what is sent and received
    buckets = one if not exact and world > 1 else 0  # DDP's, for as long as the run lasts
    gradients = round(heap * (sums + one if exact else one))
    moments = [
        round(heap * sums) + activations + logits,  # backward begins
        gradients,  # backward has ended; the last sum is added
        one + join,  # ranks exchange
        one + (_muon_scratch(shapes, device) if muon else 0),  # the update
    ]
    runtime = RUNTIME if device == "cpu" else 0
    peak = one + optimizer + buckets + max(moments) + runtime
    return Memory(one, buckets + max(gradients, one + join), optimizer, activations, logits, peak)


def bytes_per_token(
    c: ModelConfig, dtype: str, device: str = "cpu", document_mask: bool = False
) -> int:
    """What autograd keeps of one token's forward, the logits apart."""
    C, A, K = c.d_model, c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    narrow = FLOAT if dtype == "float32" else HALF
    # A norm keeps its input, the stream, and 1 / rms (or mean and 1 / std).
    norm = FLOAT * (C + (1 if c.norm == "rms" else 2))
    up = 2 if c.mlp == "swiglu" else 1
    # A matrix product keeps its input; under autocast each one casts a copy of its own.
    inputs = (3 + up) * HALF * C if dtype != "float32" else 2 * FLOAT * C
    attention = narrow * (2 * A + 2 * K) + FLOAT * c.n_heads  # q, k, v, out, log of the sums
    if attention_dropout(c) > 0 and device != "cuda":
        # PyTorch's kernel there has no dropout: softmax, mask, product.
        attention = narrow * (2 * A + 2 * K + 3 * c.n_heads * c.context_length)
    if document_mask:
        attention += narrow * c.context_length  # a row of the mask, which PyTorch makes 0 or -inf
    # On CPUs, narrow queries and keys take PyTorch's plain norm, which keeps x and x / rms in
    # float32, and its plain rotation, after which the heads are copied side by side again.
    plain = narrow == HALF and device != "cuda"
    if plain and c.position == "rope" and attention_dropout(c) == 0:
        attention += narrow * A
    if c.qk_norm:
        each = 2 * FLOAT if plain else narrow
        attention += each * (A + K) + FLOAT * (c.n_heads + c.n_kv_heads)
    mlp = narrow * c.d_mlp * (4 if c.mlp == "swiglu" else 2)
    block = 2 * norm + inputs + attention + mlp
    if c.dropout > 0:
        block += 2 * FLOAT * C  # the masks of both branches
    first = 8 + (FLOAT * C if c.dropout > 0 else 0)  # ids, and a mask
    first += 9 if device != "cuda" else 0  # targets again, and whether they count
    head_input = narrow * C
    return c.n_layers * block + norm + head_input + first


def logits_bytes(c: ModelConfig, tokens: int, dtype: str, device: str = "cpu") -> int:
    """At the start of backward: log-probabilities, their gradient, and that of the logits. On CPUs
    model/fast.py writes these over one another, and the most is logits and log-probabilities.

    In chunks the gradient is written over log-probabilities too, and what becomes of it is there
    beside them: the gradients of the head and of its input, and then both again, scaled.
    """
    V, narrow = c.vocab_size, 0 if dtype == "float32" else HALF
    chunked = V >= LARGE_VOCAB and tokens > CHUNK_TOKENS
    rows = CHUNK_TOKENS if chunked else tokens
    if chunked and dtype != "float16":
        found = FLOAT * c.d_model * (V + tokens)
        return max(found + rows * V * (2 * FLOAT + narrow), 2 * found)
    if device != "cuda":
        return rows * V * 2 * FLOAT
    return rows * V * (3 * FLOAT + narrow)


def partial_sums(M: int) -> int:
    """Gradients that training.step.TreeSum holds while the last of M leaves is computed."""
    odd = M // (M & -M)
    return (M // odd).bit_length() - 1 + (odd > 1)


def _muon_scratch(shapes: Counter[tuple[int, ...]], device: str) -> int:
    """What training.optimizer.Muon holds while it works on all matrices of one shape."""
    narrow = HALF if device == "cuda" else FLOAT
    largest = 0
    for (rows, columns), count in shapes.items():
        grams = 2 * narrow * count * min(rows, columns) ** 2
        largest = max(largest, (2 * FLOAT + 4 * narrow) * count * rows * columns + grams)
    return largest


# `--micro_batch=auto`: the largest number of windows a forward that fits this rank's memory.
#
# On a GPU it is tried: a step's worth of memory is taken, and running out of it is caught. On a
# CPU, where running out ends the process, it is estimated (training/memory.py).

CPU_SHARE = 0.5  # of the memory that is free, for all ranks of a machine together
GPU_SHARE = 0.92  # of the whole memory; the rest is for fragments and what others take


def pick_micro_batch(config: Config, ranks: Ranks) -> int:
    """A divisor of this rank's share of the global batch, the same on all ranks; at least 1.

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
    """The largest of the ascending `sizes` that fits, by halving the range; the first if none."""
    low, high = 0, len(sizes)  # sizes[low] is taken to fit, sizes[high] is known not to
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low]


def fits_cpu(config: Config, size: int, ranks: Ranks, free: float) -> bool:
    """Whether the estimate for `size` is within this rank's part of the free memory."""
    sized = replace(
        config,
        data=replace(config.data, micro_batch=size),
        parallel=replace(config.parallel, reduction=reduction_at(config, size, ranks)),
    )
    need = estimate_memory(sized, ranks.world, "cpu").peak
    return need * ranks.local_world <= CPU_SHARE * free


def fits_gpu(config: Config, size: int, ranks: Ranks) -> bool:
    """Forward and backward of `size` windows beside all that a step holds; False if it runs out."""
    total = torch.cuda.get_device_properties(ranks.device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(ranks.device)
    ran = attempt(config, size, ranks)
    used = torch.cuda.max_memory_reserved(ranks.device)
    torch.cuda.empty_cache()
    return ran and used <= GPU_SHARE * total


def attempt(config: Config, size: int, ranks: Ranks) -> bool:
    """Take the memory of a step of `size` windows on the rank's device, once; False if it is not
    there."""
    device, T = ranks.device, config.model.context_length
    precision = Precision(getattr(torch, config.run.dtype), device.type)
    mine = config.data.global_batch // ranks.world // size  # micro-batches of a step
    exact = reduction_at(config, size, ranks) == "exact"
    try:
        model = GPT(config.model, config.run.attention).to(device)
        speed_up(model)
        # The optimizer's two slots, on several ranks what is sent, and sums of gradients.
        slots = 2 + (ranks.world > 1) + (partial_sums(mine) if exact else 0)
        held = [torch.zeros_like(p) for p in model.parameters() for _ in range(slots)]
        parts = 2 + config.data.document_mask
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
    """exact or fast, whichever a run with micro-batches of `size` windows takes."""
    return pick_reduction(config.parallel.reduction, config.data.global_batch // size, ranks)


def available_bytes() -> float | None:
    """Memory that is free on this machine, or within this container's limit; None if unknown."""
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
