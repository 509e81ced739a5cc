"""Measure: `python -m tools.bench MODE [--name=value ...]`. Prints one table.

    data       preparation against the tokenizer library alone; the loader's share of a step
    compress   bits per byte of `xz -9` on the validation text, alone and given the training text

Every figure is a ratio within one run: machines differ, and are noisy.
"""

from __future__ import annotations

import lzma
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from data.config import DataConfig
from data.meta import read_meta
from data.options import ConfigError, parse_options, run_command
from data.prepare import prepare
from data.shards import TokenStream, Windows
from data.tokenizer import load_tokenizer

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 27}]  # sees all it was given


@dataclass(frozen=True)
class BenchOptions:
    """Which text and tokenizer."""

    source: Annotated[str, "text to prepare"] = "stdlib"
    tokenizer: Annotated[str, "tokenizer to prepare it with"] = "bpe:4096"
    copies: Annotated[int, "times the source is repeated for the speed of preparation"] = 8
    workers: Annotated[int | None, "processes; all cores unless given"] = None

    def problems(self) -> list[str]:
        found = self.data_config().problems()
        if self.copies < 1:
            found.append(f"copies={self.copies}: must be at least 1")
        return found

    def data_config(self) -> DataConfig:
        return DataConfig(source=self.source, tokenizer=self.tokenizer)


def main(argv: list[str]) -> int:
    """Run the mode that the first argument names."""
    usage = f"python -m tools.bench {'|'.join(MODES)} [--name=value ...]"
    options, (mode,) = parse_options(argv, BenchOptions, usage=usage, positionals=["MODE"])
    if mode not in MODES:
        raise ConfigError(f"MODE={mode}: must be one of {', '.join(MODES)}")
    MODES[mode](options)
    return 0


def bench_data(options: BenchOptions) -> None:
    """How fast text becomes ids, and what the loader costs."""
    cores = options.workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        bench_preparation(options, Path(folder), cores)
    bench_loader()


def bench_preparation(options: BenchOptions, folder: Path, cores: int) -> None:
    """MB/s of `data.prepare` on all cores, against the tokenizer library alone on one."""

    quiet = {"say": lambda text: None, "progress": False}
    prepared = prepare(options.data_config(), **quiet)
    text = b"".join(text_of(prepared, split) for split in ("train", "val"))
    source = folder / "text.txt"
    with source.open("wb") as file:
        for _ in range(options.copies):
            file.write(text)
    megabytes = options.copies * len(text) / 1e6
    # The tokenizer is given, so that its training is not part of the figure.
    tokenizer = load_tokenizer(prepared / "tokenizer")
    alone = library_speed(tokenizer, text)
    command = [sys.executable, "-m", "data.prepare", f"--source={source}"]
    command += [f"--tokenizer={options.tokenizer}", f"--prepared_dir={folder}"]
    command += [f"--workers={cores}"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    whole = megabytes / (time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"preparation: {megabytes:.0f} MB on {cores} cores: {whole:.2f} MB/s, all included")
    print(f"tokenizer library alone, one core: {alone:.2f} MB/s")
    print(f"ratio: {whole / (alone * cores):.2f} of library x cores; peak memory {peak:.0f} MB")


def library_speed(tokenizer, text: bytes, seconds: float = 5.0) -> float:
    """MB/s of the tokenizer's own encoder on 512 kB pieces: the best within the time."""
    pieces = [
        text[i : i + (1 << 19)].decode("utf-8", "ignore") for i in range(0, len(text), 1 << 19)
    ]
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for piece in pieces:
            start = time.perf_counter()
            tokenizer.encode_array(piece)
            best = max(best, len(piece.encode()) / 1e6 / (time.perf_counter() - start))
    return best


class Simulated:
    """A window set of any size that reads nothing: what is left is the cost of the order."""

    context_length = 256

    def __init__(self, n_windows: int) -> None:
        self.n_windows = n_windows
        self._ids = np.zeros(self.context_length, dtype=np.int64)

    def __len__(self) -> int:
        return self.n_windows

    def pair(self, i: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        return self._ids, self._ids


def bench_loader() -> None:
    """Milliseconds of batch(i), early and late; its share of a training step of small.py."""
    from data.loader import BatchLoader

    far = BatchLoader(Simulated(2 * 10**9), seed=1, global_batch=32)
    at_0, at_far = milliseconds(far, 0), milliseconds(far, 10**9 // 32)
    print(f"batch() of 32 in 2 x 10^9 windows: {at_0:.3f} ms at window 0, {at_far:.3f} at 10^9")
    config, step_ms = small_step()
    folder = prepare(config.data, say=lambda text: None, progress=False)
    windows = Windows(folder, "train", config.model.context_length)
    loader = BatchLoader(windows, seed=1, global_batch=config.data.global_batch)
    cost = milliseconds(loader, 0)
    print(
        f"config/small.py: loader {cost:.2f} ms, training step {step_ms:.0f} ms: "
        f"{cost / step_ms:.2%} of it"
    )


def milliseconds(loader, first: int, tries: int = 50) -> float:
    """The median time of a batch, from batch `first` on."""
    times = []
    for i in range(first, first + tries):
        start = time.perf_counter()
        loader.batch(i)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def small_step():
    """The config of small.py and the median milliseconds of one of its steps."""
    import torch

    from model.gpt import GPT
    from training.config import load_config
    from training.distributed import Ranks
    from training.optimizer import Optimizers
    from training.precision import Precision
    from training.step import Setup, train_step

    config = load_config(["config/small.py"])
    folder = prepare(config.data, say=lambda text: None, progress=False)
    shape = config.model.resolved(load_tokenizer(folder / "tokenizer").vocab_size)
    model = GPT(shape)
    model.init_weights(1)
    precision = Precision(torch.float32, "cpu")
    optimizers = Optimizers(model, config.optim, "cpu")
    setup = Setup(model, optimizers, precision.scaler(), precision, Ranks(), "exact", 1, 1, 1.0)
    batch = torch.zeros(config.data.global_batch, shape.context_length, dtype=torch.int64)
    times = []
    for step in range(8):
        start = time.perf_counter()
        train_step(setup, [(batch, batch)], step)
        times.append(time.perf_counter() - start)
    return config, 1e3 * float(np.median(times))


def bench_compress(options: BenchOptions) -> None:
    """What a general compressor makes of the same validation bytes: the bar for bits per byte."""
    folder = prepare(options.data_config())
    train, val = (text_of(folder, split) for split in ("train", "val"))
    alone, given = 8 * xz(val) / len(val), 8 * (xz(train + val) - xz(train)) / len(val)
    print(f"training text {len(train):,} bytes, validation text {len(val):,} bytes")
    print(f"xz -9 on the validation text alone:     {alone:.3f} bits per byte")
    print(f"xz -9 with the training text before it: {given:.3f} bits per byte")


def xz(text: bytes) -> int:
    """Size in bytes."""
    return len(lzma.compress(text, format=lzma.FORMAT_XZ, filters=FILTERS))


def text_of(folder: Path, split: str) -> bytes:
    """All text of a split, decoded from its shards."""
    meta, tokenizer = read_meta(folder), load_tokenizer(folder / "tokenizer")
    stream = TokenStream(folder, meta, split, 0)
    return tokenizer.decode_bytes(stream.read(0, meta.tokens[split]).tolist())


MODES = {"data": bench_data, "compress": bench_compress}

if __name__ == "__main__":
    run_command(main)
