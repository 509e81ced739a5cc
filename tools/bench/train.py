"""A training step as a fraction of the machine's peak, at nanoGPT's three sizes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from model.config import ModelConfig
from model.inspect import meta_model
from tools.bench.peer import PeerStep, peer_folder, peer_model
from tools.bench.step import (
    GPT2_SHAPED,
    alternate,
    random_batch,
    seconds_of,
    served,
    share_of_peak,
    step_seconds,
    training_setup,
)
from tools.bench.table import show
from training.device import measured_peak, pick_dtype


@dataclass(frozen=True)
class Size:
    """A model, its windows per step, the number of timed steps, and how many of them in a row.

    Short steps are timed several in a row, because the threads of the other side keep spinning for
    some milliseconds after its turn.
    """

    n_layers: int
    d_model: int
    n_heads: int
    context_length: int
    vocab_size: int
    batch: int
    steps: int
    in_a_row: int = 1

    @property
    def shape(self) -> ModelConfig:
        return ModelConfig(
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            d_model=self.d_model,
            context_length=self.context_length,
            **GPT2_SHAPED,
        ).resolved(self.vocab_size)

    @property
    def name(self) -> str:
        return f"{self.n_layers} x {self.d_model}, T {self.context_length}, B {self.batch}"


# nanoGPT's CPU and GPU examples for Shakespeare, and GPT-2's smallest model.
SIZES = {
    "1": Size(4, 128, 4, context_length=64, vocab_size=65, batch=12, steps=200, in_a_row=10),
    "2": Size(6, 384, 6, context_length=256, vocab_size=65, batch=16, steps=10),
    "3": Size(12, 768, 12, context_length=256, vocab_size=50304, batch=4, steps=6),
}
TOY = Size(1, 16, 2, context_length=8, vocab_size=65, batch=2, steps=3)
WARMUP = 2


def bench_train(*, size: str, peer: str, steps: int | None, quick: bool) -> None:
    """Measure ours, and the peer's if there is one, alternating."""
    folder = peer_folder(peer) if peer else None
    chosen = [TOY] if quick else list(SIZES.values()) if size == "all" else [SIZES[size]]
    rows = []
    for one in chosen:
        auto = default_dtype(one)
        found = measure(one, folder, steps or one.steps, 64 if quick else 2048, auto)
        rows.append(train_row(one.name, auto, *found))
    header = ["float32", "ms per step", "of the peak"]
    header += ["nanoGPT ms", "of the peak", "ours / nanoGPT"] if folder else []
    header += ["dtype=auto", "ms per step"] + (["ours / nanoGPT"] if folder else [])
    threads = torch.get_num_threads()
    show(
        header,
        rows,
        "of the peak: FLOPs of a step (6 per matrix parameter and token + 12 L C T per token) per "
        "second of its median time,",
        f"over the best of 20 float32 products of 2048 x 2048 before and after ({threads} threads)",
        "dtype=auto: the default of a run here; nanoGPT's is float32 on a CPU",
    )


def default_dtype(one: Size) -> str:
    """Return the dtype that auto stands for, at this size on this machine."""
    return pick_dtype("auto", torch.device("cpu"), one.d_model)[0]


def train_row(
    name: str, auto: str, seconds: dict[str, float], flops: float, peak: float
) -> list[str]:
    """seconds: per step of "ours", of "auto" if that is not float32, of a "peer" if any."""
    ours, theirs, narrow = seconds["ours"], seconds.get("peer"), seconds.get("auto")
    row = [name, f"{1e3 * ours:.1f}", f"{share_of_peak(flops, ours, peak):.2f}"]
    if theirs is not None:
        row += [f"{1e3 * theirs:.1f}", f"{share_of_peak(flops, theirs, peak):.2f}"]
        row.append(f"{ours / theirs:.2f}")
    default = ours if narrow is None else narrow
    row += [auto, f"{1e3 * default:.1f}"]
    return row + ([f"{default / theirs:.2f}"] if theirs is not None else [])


def measure(
    one: Size, peer: Path | None, steps: int, product: int, auto: str
) -> tuple[dict[str, float], float, float]:
    """Return (seconds per step of each, FLOPs per step, FLOP/s of the machine).

    product: rows of the square matrices. auto: another dtype to measure ours in. Each side has a
    process of its own, set up like its own train.py.
    """
    makers = {"ours": (our_step, one, "float32")}
    makers |= {"auto": (our_step, one, auto)} if auto != "float32" else {}
    makers |= {"peer": (peer_step, one, peer)} if peer else {}
    with ExitStack() as stack:
        works = {name: stack.enter_context(served(*maker)) for name, maker in makers.items()}
        machine = (torch.device("cpu"), torch.float32, product, 20)
        before = measured_peak(*machine)
        seconds = alternate(works, max(1, steps // one.in_a_row), WARMUP)
        peak = max(before, measured_peak(*machine))
    return seconds, flops_of_step(one), peak


def flops_of_step(one: Size) -> int:
    T = one.context_length
    return meta_model(one.shape).flops_per_token(T) * one.batch * T


def our_step(one: Size, dtype: str) -> Callable[[], float]:
    """Return a function that takes our steps and returns their median seconds."""
    setup = training_setup(one.shape, one.batch, dtype=dtype)
    batch, number = random_batch(setup, one.batch), itertools.count()
    return median_of(one.in_a_row, lambda: step_seconds(setup, batch, next(number)))


def peer_step(one: Size, peer: Path) -> Callable[[], float]:
    """Return the same for nanoGPT."""
    step = PeerStep(peer_model(peer, one.shape))
    rng = torch.Generator().manual_seed(1)
    size = (2, one.batch, one.context_length)
    tokens, targets = torch.randint(one.vocab_size, size, generator=rng)
    return median_of(one.in_a_row, lambda: seconds_of(lambda: step(tokens, targets)))


def median_of(n: int, timed: Callable[[], float]) -> Callable[[], float]:
    """Return a function that calls `timed` n times in a row."""
    return lambda: statistics.median(timed() for _ in range(n))
