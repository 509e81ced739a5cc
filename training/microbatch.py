"""`--micro_batch=auto`: the largest number of windows a forward that fits this rank's memory.

On a GPU it is tried: a step's worth of memory is taken, and running out of it is caught. On a CPU,
where running out ends the process, it is estimated (training/memory.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cli.limits import cgroup_memory_left
from model.fast import speed_up
from model.gpt import GPT
from training.config import Config
from training.distributed import Ranks
from training.memory import estimate_memory, partial_sums
from training.precision import Precision
from training.reduction import pick_reduction

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
