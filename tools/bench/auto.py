"""The config chosen for a text, vs configs around it that cost as many CPU seconds."""

from __future__ import annotations

import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data.config import DataConfig
from data.fetch import TEXTS
from data.survey import survey
from tools.bench.runs import ROOT, TRAIN, run_seconds
from tools.bench.step import in_fresh_process, random_batch, training_setup
from tools.bench.table import show
from training.choose import DROPOUTS, SIZES, TOKENIZERS, Machine, choose, config_text, heads_of
from training.config import Config, seconds_of, values_of, with_values
from training.metrics import read_metrics
from training.step import train_step

REPEATS = 8
CODE_BYTES = 20_000_000


def bench_auto(*, source: str | None, seconds: int) -> None:
    """For each text, train the choice and the configs around it, each for `seconds` of one core."""
    with tempfile.TemporaryDirectory() as folder:
        texts = [source] if source else texts_in(Path(folder))
        for number, text in enumerate(texts):
            rows = []
            for name, config in contenders(text, seconds, Path(folder, "prepared")):
                rows.append((name, *bits_per_byte(config, Path(folder, f"run-{number}"))))
                print(f"{text}: {name}, {rows[-1][1]:.3f}", file=sys.stderr, flush=True)
            show_auto(text, rows)


def texts_in(folder: Path) -> list[str]:
    """Return 50 KB of Shakespeare, all of it, 20 MB of code in one file, and a folder of code."""
    play = (ROOT / TEXTS["shakespeare"].path).read_bytes()
    part, code = folder / "50_KB.txt", folder / "20_MB.txt"
    part.write_bytes(play[:50_000])
    with code.open("w", encoding="utf-8") as file:
        for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            file.write(path.read_text(encoding="utf-8", errors="replace"))
            if file.tell() > CODE_BYTES:
                break
    return [str(part), str(ROOT / TEXTS["shakespeare"].path), str(code), str(ROOT / "training")]


def contenders(text: str, seconds: float, prepared: Path) -> Iterator[tuple[str, Config]]:
    """Yield the choice and its neighbors: one option of each is the next smaller or larger."""
    rate = cpu_flops()
    machine = Machine("this machine", rate, layer_seconds=0.0, memory=None)
    given = {"data.source": text, "data.prepared_dir": str(prepared), "run.out_dir": "out"}
    given |= {"run.threads": 1, "run.dtype": "float32", "run.eval_windows": 0, "log.report": False}
    looked = survey(DataConfig(source=text))
    free = choose(looked, machine, given)  # it may want less than ten minutes
    least = min(seconds, seconds_of(free.run.time_budget))
    chosen = choose(looked, machine, {**given, "run.time_budget": f"{least}s"})
    yield "chosen", lasting(chosen, least)
    for name, values in around(chosen):
        yield name, lasting(with_values(chosen, values), least)
    if least < seconds:
        yield "twice as long", lasting(chosen, 2 * least)


def around(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, changed options) of the neighbors of a config."""
    model, optim = config.model, config.optim
    names = [name for _, name in TOKENIZERS]
    for name in beside(names, config.data.tokenizer):
        yield name, {"data.tokenizer": name}
    for layers, width in beside(SIZES, (model.n_layers, model.d_model)):
        size = {"model.n_layers": layers, "model.d_model": width, "model.n_heads": heads_of(width)}
        yield f"{layers} x {width}", size
    for dropout in beside([dropout for _, dropout in DROPOUTS], model.dropout):
        yield f"dropout {dropout:g}", {"model.dropout": dropout}
    for factor in (0.5, 2):
        rates = {"optim.lr": factor * optim.lr, "optim.muon_lr": factor * optim.muon_lr}
        yield f"rates x {factor:g}", rates


def beside(values: list, value: Any) -> list:
    """Return the values next to `value` in a list."""
    at = values.index(value)
    return values[max(0, at - 1) : at] + values[at + 1 : at + 2]


def lasting(config: Config, seconds: float) -> Config:
    """Return the config with the number of steps that cost `seconds` of one core."""
    steps = max(1, int(seconds / in_fresh_process(step_seconds, config)))
    lengths = dict.fromkeys(["max_steps", "eval_interval", "checkpoint_interval"], steps)
    values = {f"run.{name}": value for name, value in lengths.items()}
    return with_values(config, {**values, "run.time_budget": ""})


def step_seconds(config: Config) -> float:
    """Return the CPU seconds of a step on one thread: the least of several, since a busy machine
    slows down some."""
    torch.set_num_threads(1)
    name = config.data.tokenizer
    size = int(name.partition(":")[2] or 257)
    setup = training_setup(
        config.model.resolved(size), config.data.global_batch, optim=config.optim
    )
    batch, times = random_batch(setup, config.data.global_batch), []
    for step in range(REPEATS):
        start = time.process_time()
        train_step(setup, [batch], step)
        times.append(time.process_time() - start)
    return min(times)


def cpu_flops() -> float:
    """Return the FLOPs per CPU second of a typical step, counted as `choose` counts them."""
    values = values_of(Config())
    config = with_values(Config(), {"optim.optimizer": "muon", "data.tokenizer": "bpe:1024"})
    tokens = values["data.global_batch"] * values["model.context_length"]
    parameters = 12 * values["model.n_layers"] * values["model.d_model"] ** 2
    parameters += 1024 * values["model.d_model"]
    return 6 * parameters * tokens / in_fresh_process(step_seconds, config)


def bits_per_byte(config: Config, folder: Path) -> tuple[float, Config]:
    """Train, and return the bits per byte of the last evaluation, over all validation text."""
    path = folder / f"{time.monotonic_ns()}.py"
    folder.mkdir(exist_ok=True)
    out = path.with_suffix("")
    path.write_text(config_text(with_values(config, {"run.out_dir": str(out)})), encoding="utf-8")
    run_seconds([TRAIN, str(path)])
    lines = list(read_metrics(out / "metrics.jsonl"))
    return [line["bits_per_byte"] for line in lines if "val_loss" in line][-1], config


def show_auto(text: str, rows: list[tuple[str, float, Config]]) -> None:
    """Print the table of one text, best first."""
    ours, best = rows[0][1], min(bits for _, bits, _ in rows)
    table = [
        [
            name,
            f"{bits:.3f}",
            f"{bits / ours:.3f}",
            config.data.tokenizer,
            f"{config.model.n_layers} x {config.model.d_model}",
            f"{config.model.dropout:g}",
            f"{config.run.max_steps:,}",
        ]
        for name, bits, config in sorted(rows, key=lambda row: row[1])
    ]
    show(
        [Path(text).name, "bits/byte", "vs chosen", "tokenizer", "model", "dropout", "steps"],
        table,
        f"chosen / best: {ours / best:.3f}; all but 'twice as long' cost the same CPU seconds",
    )
