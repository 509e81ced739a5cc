"""The real training step on random tokens: its time and its peak memory."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from cli.options import ConfigError
from data.config import DataConfig
from model.config import ModelConfig
from model.fast import speed_up
from model.gpt import GPT
from training.config import Config, OptimConfig, ParallelConfig, RunConfig
from training.distributed import Ranks
from training.startup import build_setup, prepare_process
from training.step import Setup, train_step

Result = TypeVar("Result")
SPAWN = multiprocessing.get_context("spawn")

# nanoGPT's architecture: GPT-2's without biases, and with the exact GELU.
GPT2_SHAPED = {
    "norm": "layer",
    "norm_eps": 1e-5,
    "mlp": "gelu_erf",
    "position": "learned",
    "qk_norm": False,
    "bias": False,
    "tie_embeddings": True,
}


def training_setup(
    shape: ModelConfig,
    batch: int,
    *,
    optim: OptimConfig | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    compiled: bool = False,
    model_class: type[GPT] = GPT,
) -> Setup:
    """Return the setup of a training run, in this process. shape: resolved.

    A step is one micro-batch of `batch` windows, with AdamW unless `optim` says otherwise.
    """
    config = Config(
        model=shape,
        data=DataConfig(global_batch=batch, micro_batch=batch),
        optim=optim or OptimConfig(),
        parallel=ParallelConfig(reduction="exact" if device == "cpu" else "fast"),
        run=RunConfig(
            device=device, dtype=dtype, compile=compiled, threads=torch.get_num_threads()
        ),
    )
    prepare_process(config)
    model = model_class(shape)
    speed_up(model)
    model.init_weights(config.run.seed)
    ranks = Ranks(device=torch.device(device))
    return build_setup(config, model.to(ranks.device), ranks, print)


def random_batch(setup: Setup, batch: int, T: int | None = None) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, (batch, T) each; T defaults to the whole context."""
    shape, rng = setup.model.config, torch.Generator().manual_seed(1)
    size = (2, batch, T or shape.context_length)
    tokens, targets = torch.randint(shape.vocab_size, size, generator=rng)
    return tokens.to(setup.ranks.device), targets.to(setup.ranks.device)


def step_seconds(setup: Setup, batch: tuple[Tensor, Tensor], step: int) -> float:
    """Return the seconds of one step, from the batch to the updated weights."""
    return seconds_of(lambda: train_step(setup, [batch], step), setup.ranks.device)


def seconds_of(work: Callable[[], Any], device: torch.device | None = None) -> float:
    """Return the seconds that `work` takes, including what it leaves the GPU to do."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def alternate(
    works: Mapping[str, Callable[[], float]], rounds: int, warmup: int
) -> dict[str, float]:
    """Call each once per round and return the medians of their results, such as seconds.

    So all see the same load of the machine. The first `warmup` rounds do not count.
    """
    given = [{name: work() for name, work in works.items()} for _ in range(warmup + rounds)]
    return {name: statistics.median(one[name] for one in given[warmup:]) for name in works}


def share_of_peak(flops: float, seconds: float, peak: float) -> float:
    """Return `flops` in `seconds` as a fraction of `peak` (FLOP/s)."""
    return flops / seconds / peak


def peak_memory(work: Callable[[], Any]) -> int:
    """Return the peak growth, in bytes, of this process's resident memory while `work` runs.

    Raises ConfigError where the kernel does not record the peak (anywhere but on Linux).
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
        before = _resident("VmRSS")
        work()
        return _resident("VmHWM") - before
    except FileNotFoundError as error:
        raise ConfigError("peak memory is read from /proc, which only Linux has") from error


def _resident(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def in_fresh_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a module-level function in a new process and return its result."""
    with served(partial, function, *arguments) as call:
        return call()


@contextmanager
def served(make: Callable[..., Callable[[], Result]], *arguments: Any) -> Iterator[Callable]:
    """Run `make(*arguments)`, which returns a function without arguments, in a new process.

    The block gets a function that calls the other one there, and raises what it raises.

    Raises ConfigError if the process has ended.
    """
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_serve, args=(there, make, arguments), daemon=True)
    process.start()
    there.close()

    def call() -> Result:
        try:
            here.send("call")
            result = here.recv()
        except (EOFError, ConnectionError) as error:  # it ended before it answered
            process.join()
            code = process.exitcode
            how = f"killed by signal {-code}: out of memory?" if code < 0 else f"exit code {code}"
            raise ConfigError(f"the measured process has ended ({how})") from error
        if isinstance(result, Exception):
            raise result
        return result

    try:
        yield call
    finally:
        here.close()  # which ends it
        process.join()


def _serve(pipe: Connection, make: Callable[..., Callable[[], Any]], arguments: tuple) -> None:
    function = None
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        try:
            function = function or make(*arguments)
            pipe.send(function())
        except Exception as error:
            pipe.send(error)
