"""Loss per second: a whole training run, from `python` to exit, vs nanoGPT on the same text."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cli.options import ConfigError
from data.prepare import prepare
from tools.bench.data import text_of
from tools.bench.peer import (
    README_COMMAND,
    peer_checkpoint,
    peer_folder,
    prepared_copy,
    vocabulary,
)
from tools.bench.runs import ROOT, TRAIN, run_seconds
from tools.bench.table import show
from training.config import load_config
from training.weights import find_weights

WINDOW = 64  # tokens, of the context of both
BATCH = 256  # windows scored at once

Loss = Callable[[Tensor, Tensor], Tensor]  # tokens and targets (B, T) -> their mean, in nats


@dataclass(frozen=True)
class Outcome:
    """The duration of one process, and the loss of its weights on the validation text."""

    seconds: float
    loss: float


def bench_loss(*, source: str | None, config: str | None, peer: str, seeds: int) -> None:
    """Run ours and the peer's alternately, on prepared data, and score both the same way."""
    path = config or str(ROOT / "config/shakespeare_char_cpu.py")
    asked = load_config([path, *([f"--source={source}"] if source else [])])
    data, T = asked.data, asked.model.context_length
    theirs = peer_folder(peer) if peer else None
    if theirs and data.tokenizer != "char":
        raise ConfigError(f"data.tokenizer={data.tokenizer}: nanoGPT uses characters; use char")
    if T < WINDOW:
        raise ConfigError(f"model.context_length={T}: must be at least {WINDOW}, the scored window")
    prepared = prepare(data, progress=False)
    train, val = (text_of(prepared, split).decode() for split in ("train", "val"))
    rows: list[tuple[Outcome, Outcome | None]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = prepared_copy(theirs, Path(folder, "peer"), train, val) if theirs else None
        for seed in range(1, seeds + 1):
            argv = [TRAIN, path, f"--source={data.source}", f"--seed={seed}"]
            ours = our_run(argv, Path(folder, str(seed)), val)
            rows.append((ours, peer_run(copy, train, val) if copy else None))
    show_loss(Path(path).name, rows)


def our_run(argv: list[str], out: Path, val: str) -> Outcome:
    """Train ours once, and score its last weights."""
    seconds = run_seconds([*argv, f"--out_dir={out}"])
    model, tokenizer = find_weights(out, "latest").load(torch.device("cpu"))
    return Outcome(seconds, text_loss(model, tokenizer.encode(val)))


def peer_run(copy: Path, train: str, val: str) -> Outcome:
    """Train nanoGPT once, and score the checkpoint that it leaves (its seed is fixed)."""
    seconds = run_seconds(README_COMMAND, cwd=copy)
    model, ids = peer_checkpoint(copy), vocabulary(train + val)
    return Outcome(seconds, text_loss(lambda x, y: model(x, y)[1], [ids[c] for c in val]))


@torch.no_grad()
def text_loss(loss: Loss, ids: list[int], T: int = WINDOW) -> float:
    """Return the mean loss over all ids but the first, in windows of T that do not overlap."""
    text = torch.tensor(ids)
    whole = (len(ids) - 1) // T * T
    windows = text[:whole].view(-1, T).split(BATCH), text[1 : whole + 1].view(-1, T).split(BATCH)
    parts = [*zip(*windows, strict=True), (text[None, whole:-1], text[None, whole + 1 :])]
    summed = sum(float(loss(x, y)) * y.numel() for x, y in parts if y.numel())
    return summed / (len(ids) - 1)


def show_loss(name: str, rows: list[tuple[Outcome, Outcome | None]]) -> None:
    """Print the table, with the medians and their ratio."""
    ours, theirs = [one for one, _ in rows], [other for _, other in rows if other]
    header = ["seed", "s", "loss"] + (["nanoGPT s", "loss"] if theirs else [])
    lines = [
        [str(seed), *(f"{value:{form}}" for one in row if one for value, form in cells(one))]
        for seed, row in enumerate([*rows, (middle(ours), middle(theirs))], start=1)
    ]
    lines[-1][0] = "median"
    notes = [
        f"s: from the start of `python train.py {name}` to its exit, on prepared data",
        f"loss: of the last weights, over the whole validation text in windows of {WINDOW}, nats "
        "per token",
    ]
    if theirs:
        ratio = middle(ours).seconds / middle(theirs).seconds
        notes.append(f"median seconds, ours / nanoGPT's (its README's CPU command): {ratio:.3f}")
    show(header, lines, *notes)


def cells(one: Outcome) -> list[tuple[float, str]]:
    return [(one.seconds, ".1f"), (one.loss, ".4f")]


def middle(outcomes: list[Outcome]) -> Outcome | None:
    """Return the medians of seconds and losses, or None if there are no outcomes."""
    if not outcomes:
        return None
    seconds, losses = zip(*((one.seconds, one.loss) for one in outcomes), strict=True)
    return Outcome(statistics.median(seconds), statistics.median(losses))
