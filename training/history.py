"""What a run's folder tells of the run: its curves, its events, what it said at each evaluation.

    metrics.jsonl     figures (read by training.folder.read_metrics) and events: the start of each
                      process with its surroundings, warnings, changes of the budget
    snapshots.jsonl   a sample and a scored passage for each evaluation
    run.json          the config

Everything is read from files, so that a report can be made while the run goes on, and after it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.options import ConfigError
from training.config import Config, from_json
from training.folder import read_metrics

METRICS, SNAPSHOTS, REPORT = "metrics.jsonl", "snapshots.jsonl", "report.html"
Entry = dict[str, Any]


@dataclass(frozen=True)
class History:
    """One run as its folder has it. Each list is in the order of steps."""

    folder: Path
    config: Config
    steps: list[Entry]  # what was logged of training, with `tokens` and `seconds` so far
    evaluations: list[Entry]  # the same of validation
    starts: list[Entry]  # one for each process that worked on it
    notes: list[Entry]  # warnings, with their text under "note"
    fits: list[Entry]  # of a time budget: the length of the run from a step on, under "fit"
    snapshots: list[Entry]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def last_step(self) -> int:
        return max((entry["step"] for entry in [*self.steps, *self.evaluations]), default=0)

    @property
    def max_steps(self) -> int:
        """The length of the run, as far as is known."""
        return self.fits[-1]["fit"] if self.fits else self.config.run.max_steps

    @property
    def best(self) -> Entry | None:
        """The evaluation with the lowest loss."""
        scored = [entry for entry in self.evaluations if entry["val_loss"] is not None]
        return min(scored, key=lambda entry: entry["val_loss"], default=None)


def read_history(folder: Path) -> History:
    """The run in `folder`. Raises ConfigError if there is none."""
    try:
        config = from_json((folder / "run.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder} holds no run (run.json: {error.strerror})") from error
    entries, events = [], []
    if (folder / METRICS).exists():
        entries, events = read_metrics(folder / METRICS), list(read_lines(folder / METRICS))
    per_step = config.data.global_batch * config.model.context_length
    add_progress(entries, per_step)
    return History(
        folder,
        config,
        steps=[entry for entry in entries if "loss" in entry],
        evaluations=[entry for entry in entries if "val_loss" in entry],
        starts=[entry for entry in events if "start" in entry],
        notes=[entry for entry in events if "note" in entry],
        fits=[entry for entry in events if "fit" in entry],
        snapshots=latest_of_each_step(read_lines(folder / SNAPSHOTS)),
    )


def read_lines(path: Path) -> Iterator[Entry]:
    """The objects of a .jsonl file; a torn line is left out, a missing file has none."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                yield entry


def latest_of_each_step(entries: Iterator[Entry]) -> list[Entry]:
    """In the order of steps; what a later attempt did again replaces what it was."""
    found: dict[int, Entry] = {}
    for entry in entries:
        known = found.get(entry["step"])
        if known is None or entry.get("attempt", 0) >= known.get("attempt", 0):
            found[entry["step"]] = entry
    return [found[step] for step in sorted(found)]


def add_progress(entries: Sequence[Entry], tokens_per_step: int) -> None:
    """Give each entry, in the order of steps, its `tokens` and `seconds` of training so far.

    Seconds are counted from tokens_per_second, so evaluation, saving and the time between two
    processes are not in them. Steps of which no speed is known add none.
    """
    last_step, seconds = 0, 0.0
    for entry in entries:
        speed = entry.get("tokens_per_second")
        if speed:
            seconds += (entry["step"] - last_step) * tokens_per_step / speed
            last_step = entry["step"]
        entry["tokens"] = entry["step"] * tokens_per_step
        entry["seconds"] = seconds


def interpolator(entries: Sequence[Entry]) -> Callable[[int], float]:
    """Seconds of training at any step, on the line between the entries around it."""
    points = [(0, 0.0), *((entry["step"], entry["seconds"]) for entry in entries)]

    def at(step: int) -> float:
        for (left, before), (right, after) in zip(points, points[1:], strict=False):
            if left <= step <= right:
                return before + (after - before) * (step - left) / max(1, right - left)
        return points[-1][1]

    return at


def thinned(values: Sequence[float | None], limit: int) -> list[int]:
    """Indices of at most about `limit` values to draw: of each stretch the lowest and the highest.

    Leaving out every other point would lose the spikes that one looks for.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    size = math.ceil(2 * len(values) / limit)
    kept = {0, len(values) - 1}
    for first in range(0, len(values), size):
        stretch = [i for i in range(first, min(first + size, len(values))) if values[i] is not None]
        if stretch:
            kept |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return sorted(kept)


def smoothed(values: Sequence[float | None], half_life: float) -> list[float | None]:
    """Exponential moving average, without the usual bias towards the first value.

    half_life: values after which one counts half. None (not finite) is left out and stays None.
    """
    keep = 0.5 ** (1 / half_life)
    total = weight = 0.0
    found: list[float | None] = []
    for value in values:
        if value is None:
            found.append(None)
            continue
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(total / weight)
    return found
