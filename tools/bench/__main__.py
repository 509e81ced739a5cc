"""Measure: `python -m tools.bench MODE [--name=value ...]`. Prints one table.

    data       preparation against the tokenizer library alone; the loader's share of a step
    compress   bits per byte of `xz -9` on the validation text, alone and given the training text
    loss       seconds from `python` to exit, and the validation loss, beside nanoGPT's
    train      a training step's share of the matrix-product peak, beside nanoGPT's
    start      seconds to the first step, and to the help, beside importing torch
    processes  tokens per second of N processes of a thread each, beside one with N threads
    memory     peak of a step with a large vocabulary, beside that of plain logits
    growth     time and memory by context length and width, beside the FLOP count
    kernels    time of a step without each hand-written module, relative to one with all
    decode     tokens per second beside reading the weights, nanoGPT and Hugging Face
    gpu        correctness, MFU, decoding and memory on a GPU

Every figure is a ratio within one run: machines differ, and are noisy.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Annotated, Literal

from cli.command import run_command
from cli.options import ConfigError, parse_arguments, parse_options

# mode -> where bench_<mode> is: tools/bench/<part>.py. Its parameters are the options it reads.
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
    "gpu": "gpu",
}


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and how often. Each mode reads some of it and refuses the rest."""

    source: Annotated[str | None, "text; stdlib, or that of the config, unless given"] = None
    tokenizer: Annotated[str, "data, compress: tokenizer to prepare the text with"] = "bpe:4096"
    copies: Annotated[int, "data: times the text is repeated for the speed of preparation"] = 24
    workers: Annotated[int | None, "data: processes; all cores unless given"] = None
    config: Annotated[str | None, "loss, start, processes: the config; their own unless given"] = (
        None
    )
    peer: Annotated[str, "loss, train, decode: a folder of nanoGPT to measure beside ours"] = ""
    seeds: Annotated[int, "loss: runs, each of another seed"] = 5
    tries: Annotated[int, "start, processes: runs of each kind, in turn"] = 5
    steps: Annotated[int | None, "train, processes: steps that are timed; enough unless given"] = (
        None
    )
    size: Annotated[Literal["1", "2", "3", "all"], "train: which of nanoGPT's three sizes"] = "all"
    cores: Annotated[int, "processes: how many, and how many threads for one"] = 2
    device: Annotated[Literal["cuda", "cpu"], "gpu: cpu for a trial of its logic"] = "cuda"
    quick: Annotated[bool, "train, memory, growth, kernels, decode, gpu: toy sizes, to try it"] = (
        False
    )

    def problems(self) -> list[str]:
        low = {"copies": 1, "workers": 1, "seeds": 1, "tries": 1, "steps": 1, "cores": 1}
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
        raise ConfigError(f"{', '.join(unread)}: {mode} does not read it; its options: {known}")
    return bench(**{name: getattr(options, name) for name in reads}) or 0


def mode_function(mode: str):
    """bench_<mode>, imported when it is asked for: torch takes a second."""
    return getattr(importlib.import_module(f"tools.bench.{MODES[mode]}"), f"bench_{mode}")


if __name__ == "__main__":
    run_command(main)
