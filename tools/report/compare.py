"""The data of the page that compares runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.config import OPTIONS
from training.report.history import History
from training.report.page import curves, events, headlines, minute_text, sample, shown_value

NAMES = {"run.out_dir"}  # options that only name a run


def comparison(histories: Sequence[History]) -> dict[str, Any]:
    """Return all that report.js shows of several runs."""
    return {
        "title": " + ".join(history.name for history in histories),
        "unit": "bits" if tokenizers_differ(histories) else "loss",
        "table": run_table(histories),
        "runs": [curves(history) for history in histories],
        "events": [[history.name, *row] for history in histories for row in events(history)],
        "samples": [sample(run.name, run.snapshots[-1]) for run in histories if run.snapshots],
        "differences": differences(histories),
    }


def tokenizers_differ(histories: Sequence[History]) -> bool:
    """Whether the losses per token of the runs cannot be compared."""

    def tokenizer(history: History) -> tuple[Any, ...]:
        data = history.config.data
        own = data.tokenizer.startswith(("bpe:", "char"))  # made from the data
        return data.tokenizer, history.config.model.vocab_size, data.source if own else ""

    return len({tokenizer(history) for history in histories}) > 1


def run_table(histories: Sequence[History]) -> dict[str, Any]:
    """Return a row per run: its name, its state, and the headline numbers as [text, number].

    The first column decides the order. It is the best validation loss, or bits per byte if the
    runs have different tokenizers: their losses per token cannot be compared.
    """
    first = ["validation loss", "bits per byte"]
    if tokenizers_differ(histories):
        first.reverse()
    names = [*first, "step", "training loss", "tokens/s", "MFU", "time", "tokens", "last entry"]
    rows: list[dict[str, Any]] = []
    for history in histories:
        best, last = history.best or {}, history.training.last or {}
        (loss, bits, _, training, speed, mfu, seconds, tokens) = headlines(history).values()
        step, newest = history.last_step, history.last_time
        cells: dict[str, list[Any]] = {
            "validation loss": [loss, best.get("val_loss")],
            "bits per byte": [bits, best.get("bits_per_byte")],
            "step": [f"{step:,} of {history.max_steps:,}", step],
            "training loss": [training, last.get("loss")],
            "tokens/s": [speed, last.get("tokens_per_second")],
            "MFU": [mfu, last.get("mfu")],
            "time": [seconds, last.get("seconds", 0.0)],
            "tokens": [tokens, last.get("tokens", 0)],
            "last entry": [minute_text(newest)[5:] if newest else "-", newest],  # without year
        }
        in_order = [cells[name] for name in names]
        rows.append({"name": history.name, "state": history.state, "cells": in_order})
    end = (True, 0.0)  # a run without an evaluation
    rows.sort(key=lambda row: end if (v := row["cells"][0][1]) is None else (False, v))
    return {"columns": names, "rows": rows}


def differences(histories: Sequence[History]) -> list[list[str]]:
    """Return a row for each option in which the runs differ, below the titles."""
    rows = [["option", *(history.name for history in histories)]]
    for option in OPTIONS.values():
        values = [getattr(getattr(h.config, option.section), option.name) for h in histories]
        differ = any(value != values[0] for value in values)
        if differ and option.full_name not in NAMES:
            rows.append([option.full_name, *map(shown_value, values)])
    return rows
