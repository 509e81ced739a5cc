"""Benchmarks: `python -m tools.bench MODE [--name=value ...]` prints one table.

    data       speed of data preparation vs the tokenizer library; the loader's share of a step
    compress   bits per byte of `xz -9` on the validation text, alone and given the training text
    loss       seconds from `python` to exit, and validation loss, vs nanoGPT
    train      a training step as a fraction of the matrix-product peak, vs nanoGPT
    start      seconds to the first step and to --help, vs `import torch`
    processes  tokens per second of N processes with one thread each, vs one with N threads
    memory     peak memory of a step with a large vocabulary, vs plain logits
    growth     time and memory by context length and width, vs the FLOP count
    kernels    time of a step without each hand-written module, relative to one with all
    decode     tokens per second, vs reading the weights, nanoGPT and Hugging Face
    auto       the config chosen for a text vs those around it, each for the same CPU seconds
    gpu        correctness, MFU, decoding and memory on a GPU
    pictures   no table but the pictures in docs/: a fresh run recorded in a terminal, and its pages

Compare only figures of one run: machines differ, and are noisy.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Annotated, Literal

from cli.command import run_command
from cli.options import ConfigError, parse_arguments, parse_options

# mode -> the module of bench_<mode>, whose parameters are the options that the mode reads.
MODES = {
    "data": "data",
    "compress": "data",
    "loss": "loss",
    "train": "train",
    "start": "runs",
    "processes": "runs",
    "memory": "cost",
    "growth": "cost",
    "kernels": "cost",
    "decode": "decode",
    "auto": "auto",
    "gpu": "gpu",
    "pictures": "pictures",
}


@dataclass(frozen=True)
class BenchOptions:
    """Options of all modes. Each mode reads some of them and refuses the rest."""

    source: Annotated[str | None, "text to use; default: stdlib, or the config's source"] = None
    tokenizer: Annotated[str, "data, compress: tokenizer to prepare the text with"] = "bpe:4096"
    copies: Annotated[int, "data: copies of the text to prepare"] = 24
    workers: Annotated[int | None, "data: worker processes; default: all cores"] = None
    config: Annotated[
        str | None, "loss, start, processes, pictures: config to run; each has a default"
    ] = None
    peer: Annotated[str, "loss, train, decode: nanoGPT folder to compare with"] = ""
    seeds: Annotated[int, "loss: number of runs, each with its own seed"] = 5
    tries: Annotated[int, "start, processes: number of runs of each kind, alternating"] = 5
    steps: Annotated[int | None, "train, processes: number of timed steps; default: enough"] = None
    size: Annotated[Literal["1", "2", "3", "all"], "train: which of nanoGPT's three sizes"] = "all"
    cores: Annotated[int, "processes: number of processes, and of threads of the single one"] = 2
    seconds: Annotated[int, "auto: CPU seconds of each training run"] = 60
    device: Annotated[Literal["cuda", "cpu"], "gpu: cpu only tests the benchmark itself"] = "cuda"
    out: Annotated[str, "pictures: existing folder to write them to"] = "docs"
    quick: Annotated[
        bool, "train, memory, growth, kernels, decode, gpu: toy sizes, to try the command"
    ] = False

    def problems(self) -> list[str]:
        names = ("copies", "workers", "seeds", "tries", "steps", "cores", "seconds")
        low = dict.fromkeys(names, 1)
        values = {name: getattr(self, name) for name in low}
        return [
            f"{name}={value}: must be at least {low[name]}"
            for name, value in values.items()
            if value is not None and value < low[name]
        ]


def main(argv: list[str]) -> int:
    """Run the mode that the first argument names."""
    usage = f"python -m tools.bench {'|'.join(MODES)} [--name=value ...]"
    options, (mode,) = parse_options(argv, BenchOptions, usage=usage, positionals=["MODE"])
    if mode not in MODES:
        raise ConfigError(f"MODE={mode}: must be one of {', '.join(MODES)}")
    bench = mode_function(mode)
    reads = inspect.signature(bench).parameters
    given = parse_arguments(argv, {"": BenchOptions}).values[""]
    if unread := [f"--{name}" for name in given if name not in reads]:
        known = ", ".join(f"--{name}" for name in reads) or "none"
        raise ConfigError(f"{', '.join(unread)}: not an option of {mode}; it has: {known}")
    return bench(**{name: getattr(options, name) for name in reads}) or 0


def mode_function(mode: str):
    """Import and return bench_<mode>; only now, because importing torch takes a second."""
    return getattr(importlib.import_module(f"tools.bench.{MODES[mode]}"), f"bench_{mode}")


if __name__ == "__main__":
    run_command(main)
