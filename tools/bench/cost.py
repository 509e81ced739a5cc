"""Cost of a step: memory with a large vocabulary, hand-written kernels, growth with the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.fast import FASTER, speed_up
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from tools.bench.step import (
    alternate,
    in_fresh_process,
    peak_memory,
    random_batch,
    step_seconds,
    training_setup,
)
from tools.bench.table import show
from training.step import Setup, train_step

TIMED_STEPS = 3


class PlainLossGPT(GPT):
    """The same model with all logits at once and PyTorch's own loss."""

    def forward(self, tokens: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
        logits = super().forward(tokens)  # (B, T, V)
        return F.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction=reduction,
        )


def bench_memory(*, quick: bool) -> None:
    """Compare the peak memory of a step: loss in chunks, and plain logits with cross_entropy."""
    shape = ModelConfig(n_layers=4, n_heads=4, d_model=256, context_length=1024).resolved(50304)
    batch = 8
    if quick:
        small = {"n_layers": 1, "d_model": 16, "d_mlp": 16, "d_head": 4, "vocab_size": 17_000}
        shape, batch = replace(shape, **small), 2
    (ours, ours_s), (plain, plain_s) = (
        in_fresh_process(cost_of_step, shape, batch, kind) for kind in (GPT, PlainLossGPT)
    )
    B, T, V = batch, shape.context_length, shape.vocab_size
    name = f"{shape.n_layers} x {shape.d_model}, V {V:,}, {B} x {T} tokens"
    show(
        [name, "peak of a step, MB", "seconds"],
        [
            ["ours, logits in chunks", f"{ours / 1e6:.0f}", f"{ours_s:.2f}"],
            ["plain", f"{plain / 1e6:.0f}", f"{plain_s:.2f}"],
        ],
        f"ours / plain: {ours / plain:.2f} of the memory, {ours_s / plain_s:.2f} of the time; "
        "peak: growth of resident memory during a training step, each in a process of its own",
        "plain: all logits at once and torch.nn.functional.cross_entropy, the same model otherwise",
    )


def cost_of_step(shape: ModelConfig, batch: int, model_class: type[GPT]) -> tuple[int, float]:
    """Return bytes of a training step on top of weights and optimizer, and its seconds."""
    setup = training_setup(shape, batch, model_class=model_class)
    # A short step first, because thread pools and kernels allocate memory once.
    train_step(setup, [random_batch(setup, 1, 8)], 0)
    tokens = random_batch(setup, batch)
    memory = peak_memory(lambda: train_step(setup, [tokens], 1))
    return memory, min(step_seconds(setup, tokens, 2 + i) for i in range(TIMED_STEPS))


def bench_kernels(*, quick: bool) -> None:
    """Time a step without each hand-written module of model/fast.py, relative to one with all."""
    torch.set_num_threads(1)
    small = ModelConfig(n_layers=4, n_heads=4, d_model=128, context_length=64)
    sizes = {  # (shape, vocabulary, windows per step, steps in a row)
        "4 x 128": (small, 65, 12, 10),
        "6 x 384": (
            replace(small, n_layers=6, n_heads=6, d_model=384, context_length=256),
            65,
            16,
            1,
        ),
        "4 x 128, V 4096": (replace(small, context_length=256), 4096, 32, 1),
        "4 x 256, V 50304": (replace(small, d_model=256, context_length=256), 50304, 8, 1),
    }
    if quick:
        sizes = {"1 x 16": (replace(small, n_layers=1, d_model=16), 65, 2, 1)}
    rows = []
    for name, (shape, V, batch, in_a_row) in sizes.items():
        setup = training_setup(shape.resolved(V), batch)
        work = partial(steps_without, setup, random_batch(setup, batch), in_a_row)
        found = alternate({p: partial(work, p) for p in (None, *FASTER)}, 1 if quick else 15, 1)
        rows += [[name, plain.__name__, f"{found[plain] / found[None]:.2f}"] for plain in FASTER]
    show(
        ["float32", "plain module", "time"],
        rows,
        "time: CPU time of a step on one thread with this module in plain PyTorch, over that of a "
        "step with none; medians of alternating rounds",
    )


def steps_without(
    setup: Setup, batch: tuple[Tensor, Tensor], steps: int, plain: type | None
) -> float:
    """Return the CPU seconds of some steps with the modules of one class in plain PyTorch."""
    speed_up(setup.model)
    for module in setup.model.modules():
        if plain and type(module) is FASTER[plain]:
            module.__class__ = plain
    return cpu_seconds(lambda: [train_step(setup, [batch], step) for step in range(steps)])


def bench_growth(*, quick: bool) -> None:
    """Measure time and memory per token by context length, then by width."""
    base = ModelConfig(n_layers=4, n_heads=4, d_model=256, context_length=256)
    tokens = 64 if quick else 4096  # of a step
    lengths = [16, 32] if quick else [128, 256, 512, 1024, 2048, 4096]
    widths = [16, 32] if quick else [128, 256, 512, 1024]
    if quick:
        base = replace(base, n_layers=1, n_heads=1, d_model=16, context_length=16)
    by_length = [replace(base, context_length=T) for T in lengths]
    by_width = [replace(base, d_model=C, n_heads=max(1, C // 64)) for C in widths]
    show(
        ["", "CPU ms per 1,000 tokens", "MFLOPs per token", "time / FLOPs", "KB per token"],
        [
            *growth_rows([f"T {s.context_length}" for s in by_length], by_length, tokens),
            *growth_rows([f"width {s.d_model}" for s in by_width], by_width, tokens),
        ],
        f"{base.n_layers} layers, {tokens} tokens per step; T at width {base.d_model}, widths at T "
        f"{base.context_length}, heads of width 64; CPU time on one thread",
        "time / FLOPs: how much longer a token takes than in the first row, over how many more "
        "FLOPs it has:",
        "below 1 it is cheaper than the count says (which does not halve attention for causality)",
        "KB: growth of resident memory during a step; each row in a process of its own",
    )


def growth_rows(names: list[str], shapes: list[ModelConfig], tokens: int) -> list[list[str]]:
    """A row of the table for each shape."""
    shapes = [shape.resolved(256) for shape in shapes]
    costs = [in_fresh_process(cost_per_token, shape, tokens) for shape in shapes]
    ratios = time_over_flops([(seconds, flops) for seconds, flops, _ in costs])
    return [
        [name, f"{1e6 * seconds:.1f}", f"{flops / 1e6:.1f}", f"{ratio:.2f}", f"{memory / 1e3:.1f}"]
        for name, (seconds, flops, memory), ratio in zip(names, costs, ratios, strict=True)
    ]


def time_over_flops(costs: list[tuple[float, float]]) -> list[float]:
    """Seconds over FLOPs of each, in units of the first's."""
    (seconds, flops), *_ = costs
    return [(s / seconds) / (f / flops) for s, f in costs]


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time that this process spends on `work`."""
    start = time.process_time()
    work()
    return time.process_time() - start


def cost_per_token(shape: ModelConfig, tokens: int) -> tuple[float, int, float]:
    """Return (seconds, FLOPs, bytes) per token of a training step.

    CPU time of one thread, because rows are minutes apart and other load must not count.
    """
    torch.set_num_threads(1)
    T = shape.context_length
    batch = tokens // T
    setup = training_setup(shape, batch)
    train_step(setup, [random_batch(setup, 1, 8)], 0)
    data = random_batch(setup, batch)
    memory = peak_memory(lambda: train_step(setup, [data], 1))
    seconds = min(cpu_seconds(partial(train_step, setup, [data], i)) for i in range(TIMED_STEPS))
    return seconds / tokens, setup.model.flops_per_token(T), memory / tokens
