"""Data preparation, the loader, and a general compressor on the same text."""

from __future__ import annotations

import lzma
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from cli.options import ConfigError
from data.build import SAMPLE_BYTES
from data.config import DataConfig
from data.loader import BatchLoader
from data.meta import read_meta
from data.prepare import prepare
from data.shards import TokenStream, Windows
from data.tokenizer import load_tokenizer
from tools.bench.step import random_batch, step_seconds, training_setup
from training.config import load_config

ROOT = Path(__file__).parents[2]
FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 27}
]  # a dictionary larger than the text


def bench_data(*, source: str | None, tokenizer: str, copies: int, workers: int | None) -> None:
    """Measure the speed of data preparation, and the cost of the loader."""
    config = checked(source, tokenizer)
    cores = workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        bench_preparation(config, copies, Path(folder), cores)
    bench_loader()


def checked(source: str | None, tokenizer: str) -> DataConfig:
    """Return the DataConfig of these options. Raises ConfigError listing their mistakes."""
    config = DataConfig(source=source or "stdlib", tokenizer=tokenizer)
    if problems := config.problems():
        raise ConfigError(problems)
    return config


def bench_preparation(config: DataConfig, copies: int, folder: Path, cores: int) -> None:
    """Compare MB/s of `data.prepare` on all cores with the tokenizer library alone on one.

    Starting up and training a tokenizer, on a sample of bounded size, take the same time for any
    text. So the time of `copies` more copies is preparation alone.
    """
    prepared = prepare(config, say=lambda text: None, progress=False)
    text = b"".join(text_of(prepared, split) for split in ("train", "val"))
    base = -(-SAMPLE_BYTES // len(text))  # copies that fill the sample
    alone = library_speed(load_tokenizer(prepared / "tokenizer"), text)
    short = seconds_to_prepare(config.tokenizer, text, base, folder, cores)
    long = seconds_to_prepare(config.tokenizer, text, base + copies, folder, cores)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    megabytes = len(text) / 1e6
    speed = marginal_speed(megabytes, (base, short), (base + copies, long))
    print(
        f"preparation on {cores} cores: {base * megabytes:.0f} MB in {short:.1f} s with all that "
        f"is done once, {copies * megabytes:.0f} MB more at {speed:.2f} MB/s"
    )
    print(f"tokenizer library alone, one core: {alone:.2f} MB/s")
    print(f"ratio: {speed / (alone * cores):.2f} of library x cores; peak memory {peak:.0f} MB")


def marginal_speed(size: float, short: tuple[int, float], long: tuple[int, float]) -> float:
    """Return size per second of what `long` has beyond `short`, each (copies, seconds)."""
    return size * (long[0] - short[0]) / max(1e-9, long[1] - short[1])


def seconds_to_prepare(tokenizer: str, text: bytes, copies: int, folder: Path, cores: int) -> float:
    """Return the wall time of a `data.prepare` process on some copies of the text."""
    source = folder / f"text-{copies}.txt"
    with source.open("wb") as file:
        for _ in range(copies):
            file.write(text)
    command = [sys.executable, "-m", "data.prepare", f"--source={source}", f"--workers={cores}"]
    command += [f"--tokenizer={tokenizer}", f"--prepared_dir={folder}"]
    start = time.perf_counter()
    subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def library_speed(tokenizer, text: bytes, seconds: float = 5.0) -> float:
    """Return MB/s of the tokenizer's own encoder over the whole text, in 512 kB pieces.

    The mean of several rounds, as for preparation: the best moments of a machine do not last.
    """
    pieces = [
        text[i : i + (1 << 19)].decode("utf-8", "ignore") for i in range(0, len(text), 1 << 19)
    ]
    tokenizer.encode_array(pieces[0])  # builds what it builds at first use
    rounds, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        for piece in pieces:
            tokenizer.encode_array(piece)
        rounds += 1
    return rounds * len(text) / 1e6 / (time.perf_counter() - start)


class Simulated:
    """Windows without data, any number of them: what remains is the cost of the order."""

    context_length = 256

    def __init__(self, n_windows: int) -> None:
        self.sizes, self.weights = [n_windows], [1.0]
        self._ids = np.zeros(self.context_length, dtype=np.int64)

    def pair(self, i: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        return self._ids, self._ids


def bench_loader() -> None:
    """Measure milliseconds of batch(i), early and late, and its share of a step of small.py."""
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
    """Return the median time of a batch, from batch `first` on."""
    times = []
    for i in range(first, first + tries):
        start = time.perf_counter()
        loader.batch(i)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def small_step():
    """Return the config of small.py and the median milliseconds of its steps."""
    config = load_config([str(ROOT / "config/small.py")])
    folder = prepare(config.data, say=lambda text: None, progress=False)
    shape = config.model.resolved(load_tokenizer(folder / "tokenizer").vocab_size)
    setup = training_setup(shape, config.data.global_batch, optim=config.optim)
    batch = random_batch(setup, config.data.global_batch)
    return config, 1e3 * float(np.median([step_seconds(setup, batch, step) for step in range(8)]))


def bench_compress(*, source: str | None, tokenizer: str) -> None:
    """Compress the validation text with xz: the bar for bits per byte."""
    folder = prepare(checked(source, tokenizer))
    train, val = (text_of(folder, split) for split in ("train", "val"))
    alone, given = 8 * xz(val) / len(val), 8 * (xz(train + val) - xz(train)) / len(val)
    print(f"training text {len(train):,} bytes, validation text {len(val):,} bytes")
    print(f"xz -9 on the validation text alone:     {alone:.3f} bits per byte")
    print(f"xz -9 with the training text before it: {given:.3f} bits per byte")


def xz(text: bytes) -> int:
    """Return the compressed size in bytes."""
    return len(lzma.compress(text, format=lzma.FORMAT_XZ, filters=FILTERS))


def text_of(folder: Path, split: str) -> bytes:
    """Return all text of a split, decoded from its shards."""
    meta, tokenizer = read_meta(folder), load_tokenizer(folder / "tokenizer")
    stream = TokenStream(folder, meta, split, 0)
    return tokenizer.decode_bytes(stream.read(0, meta.tokens[split]).tolist())
