"""What preparation, the loader and general compressors do with the same text."""

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
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 27}]  # sees all it was given


def bench_data(*, source: str | None, tokenizer: str, copies: int, workers: int | None) -> None:
    """How fast text becomes ids, and what the loader costs."""
    config = checked(source, tokenizer)
    cores = workers or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        bench_preparation(config, copies, Path(folder), cores)
    bench_loader()


def checked(source: str | None, tokenizer: str) -> DataConfig:
    """The data of these options. Raises ConfigError for what is wrong with them."""
    config = DataConfig(source=source or "stdlib", tokenizer=tokenizer)
    if problems := config.problems():
        raise ConfigError(problems)
    return config


def bench_preparation(config: DataConfig, copies: int, folder: Path, cores: int) -> None:
    """MB/s of `data.prepare` on all cores, against the tokenizer library alone on one.

    Starting and training a tokenizer, on a sample of bounded size, cost the same for any text: what
    `copies` more copies of it take is preparation alone.
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
    """Size a second of what `long` has more than `short`, each (copies of the size, seconds)."""
    return size * (long[0] - short[0]) / max(1e-9, long[1] - short[1])


def seconds_to_prepare(tokenizer: str, text: bytes, copies: int, folder: Path, cores: int) -> float:
    """Wall time of `data.prepare` on some copies of the text, in a process of its own."""
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
    """MB/s of the tokenizer's own encoder over the whole text, in 512 kB pieces, again and again.

    The mean, as preparation's is: the best moments of a machine do not last.
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
    """A window set of any size that reads nothing: what is left is the cost of the order."""

    context_length = 256

    def __init__(self, n_windows: int) -> None:
        self.sizes, self.weights = [n_windows], [1.0]
        self._ids = np.zeros(self.context_length, dtype=np.int64)

    def pair(self, i: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        return self._ids, self._ids


def bench_loader() -> None:
    """Milliseconds of batch(i), early and late; its share of a training step of small.py."""
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
    config = load_config([str(ROOT / "config/small.py")])
    folder = prepare(config.data, say=lambda text: None, progress=False)
    shape = config.model.resolved(load_tokenizer(folder / "tokenizer").vocab_size)
    setup = training_setup(shape, config.data.global_batch, optim=config.optim)
    batch = random_batch(setup, config.data.global_batch)
    return config, 1e3 * float(np.median([step_seconds(setup, batch, step) for step in range(8)]))


def bench_compress(*, source: str | None, tokenizer: str) -> None:
    """What a general compressor makes of the same validation bytes: the bar for bits per byte."""
    folder = prepare(checked(source, tokenizer))
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
