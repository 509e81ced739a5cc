"""Whole runs in processes of their own: the time to start, and the cost of ranks."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cli.options import ConfigError
from data.prepare import prepare
from tools.bench.table import show
from training.config import load_config
from training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
SMALL = str(ROOT / "config/small.py")


def run_seconds(command: Sequence[str], cwd: Path | None = None, until: str = "") -> float:
    """Return the seconds of a Python command to its exit, or to the first line that begins with
    `until`, after which it is killed.

    Raises ConfigError with its last line of output if it fails, or ends without such a line.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=cwd, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        with process:
            found = False
            for line in process.stdout:
                found = bool(until) and line.startswith(until)
                if found:
                    break
            seconds = time.perf_counter() - start
            if found:
                process.kill()
                return seconds
        seconds = time.perf_counter() - start
        if process.returncode or until:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"no line {until!r}"])[-1]
            code = process.returncode
            raise ConfigError(f"python {' '.join(command)} ended with code {code}: {last}")
    return seconds


def bench_start(*, config: str | None, tries: int) -> None:
    """Time new processes, alternating: the first step of a run, its --help, and torch alone."""
    path = config or SMALL
    prepare(load_config([path]).data, progress=False)
    times: dict[str, list[float]] = {"torch": [], "step": [], "help": []}
    for _ in range(tries):
        with tempfile.TemporaryDirectory() as folder:
            times["torch"].append(run_seconds(["-c", "import torch"]))
            argv = [TRAIN, path, "--max_steps=1", f"--out_dir={folder}/run"]
            times["step"].append(run_seconds(argv, until="step 1/"))
            times["help"].append(run_seconds([TRAIN, "--help"]))
    show_start(Path(path).name, {name: statistics.median(all_) for name, all_ in times.items()})


def show_start(name: str, seconds: dict[str, float]) -> None:
    """Print the table of `start`, from the medians."""
    torch, step, help_ = seconds["torch"], seconds["step"], seconds["help"]
    show(
        ["new process", "s", "vs import torch"],
        [
            ['python -c "import torch"', f"{torch:.2f}", "1.00"],
            [f"python train.py {name}, to the first step", f"{step:.2f}", f"{step / torch:.2f}"],
            ["python train.py --help", f"{help_:.2f}", f"{help_ / torch:.2f}"],
        ],
        f"the first step is logged {step - torch:.2f} s later than torch is imported; medians, on "
        "prepared data",
    )


def bench_processes(*, config: str | None, cores: int, steps: int | None, tries: int) -> None:
    """Run one process with N threads and N with one thread and exact reduction, alternating."""
    path, steps = config or SMALL, steps or 100
    prepare(load_config([path]).data, progress=False)
    rates: dict[int, list[float]] = {1: [], cores: []}
    for _ in range(tries):
        for processes in (1, cores):
            with tempfile.TemporaryDirectory() as folder:
                run_seconds(rank_command(path, Path(folder), processes, cores, steps))
                rates[processes].append(tokens_per_second(Path(folder) / "metrics.jsonl"))
    show_processes(cores, {n: statistics.median(all_) for n, all_ in rates.items()})


def show_processes(cores: int, rates: dict[int, float]) -> None:
    """Print the table of `processes`, from the medians."""
    one, many = rates[1], rates[cores]
    show(
        ["processes x threads", "tokens/s", "ratio"],
        [
            [f"1 x {cores}", f"{one:.0f}", "1.00"],
            [f"{cores} x 1, exact reduction", f"{many:.0f}", f"{many / one:.2f}"],
        ],
        "tokens/s: the median over the log lines of a run but the first; of these the median run",
    )


def rank_command(path: str, out: Path, processes: int, cores: int, steps: int) -> list[str]:
    """Return the command of a run that logs often, and evaluates and saves only at its end."""
    options = {
        "out_dir": out,
        "threads": cores // processes,
        "max_steps": steps,
        "interval": max(1, steps // 10),
        "eval_interval": steps,
        "eval_windows": 8,
        "checkpoint_interval": steps,
        "report": False,
    }
    argv = [TRAIN, path, *(f"--{name}={value}" for name, value in options.items())]
    if processes == 1:
        return argv
    torchrun = ["-m", "torch.distributed.run", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    return [*torchrun, f"--nproc_per_node={processes}", *argv, "--reduction=exact"]


def tokens_per_second(metrics: Path) -> float:
    """Return the median over the lines of a run's log; the first, of step 1, is warmup."""
    lines = [line for line in read_metrics(metrics) if "tokens_per_second" in line]
    if len(lines) < 2:
        raise ConfigError(f"{metrics}: too few steps to measure; use more --steps")
    return statistics.median(line["tokens_per_second"] for line in lines[1:])
