"""The history of a run, read from its folder: curves, events, samples.

    metrics.jsonl     figures and events: the start of each process with its surroundings, warnings,
                      changes of the budget
    snapshots.jsonl   a sample and a scored passage for each evaluation
    run.json          the config

Everything is read from files, so a report can be made during the run and after it. A long log is
thinned while it is read: what is kept does not grow with its length. A process that logs reads each
of its own lines and keeps the spikes; of a long log that it finds there, only the evaluations, the
events and some of the training steps are read (training/folder.py: read_spread).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from cli.options import ConfigError
from training.config import Config, from_json
from training.folder import STEP_MARK, read_spread

METRICS, SNAPSHOTS, REPORT = "metrics.jsonl", "snapshots.jsonl", "report.html"
MOST_STRETCHES = 1500  # of a log, at the most; half of them at the least, once it is long
MOST_EVENTS = 200  # kept of each kind, the newest
MOST_SNAPSHOTS = 12  # evenly spread ones that a report shows
BATCH = 1024  # entries thinned at once
# Of a long file: about how many of which lines are read.
READ = {METRICS: (8_000, STEP_MARK), SNAPSHOTS: (20 * MOST_SNAPSHOTS, b"")}
Entry = dict[str, Any]


class Thinned:
    """A log in at most MOST_STRETCHES stretches of equal length, of each the extremes.

    Of each stretch the entries with the lowest and the highest value of each column are kept:
    leaving out every other point would lose the spikes that one looks for. Where stretches become
    too many, neighbours are merged. An entry of a step that is already there replaces it and all
    that follows: a later attempt did it again.
    """

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self.size = 1  # entries in a full stretch
        self.stretches: list[Stretch] = []
        self.fresh: list[Entry] = []  # not yet in a stretch
        self.last: Entry | None = None
        self._rows: tuple[list[Entry], list[float | None]] | None = None  # until the log grows

    def add(self, entry: Entry) -> None:
        """Append an entry; `cut` first if its step is not a new one."""
        self.fresh.append(entry)
        self.last, self._rows = entry, None
        if len(self.fresh) >= min(self.size, BATCH):
            self._gather()

    def cut(self, step: int) -> None:
        """Forget everything from `step` on."""
        if self.last is None or self.last["step"] < step:
            return
        self._gather()
        self._rows = None
        while self.stretches and self.stretches[-1].entries[-1]["step"] >= step:
            stretch = self.stretches.pop()
            self.fresh = [entry for entry in stretch.entries if entry["step"] < step] + self.fresh
        self.last = (self.fresh or (self.stretches[-1].entries if self.stretches else [None]))[-1]

    def _gather(self) -> None:
        """Put the fresh entries into the last stretch, or into a new one if that is full."""
        if not self.fresh:
            return
        new, self.fresh = Stretch(self.fresh, self.columns), []
        if self.stretches and self.stretches[-1].count + new.count <= self.size:
            new = self.stretches.pop().joined(new, self.columns)
        self.stretches.append(new)
        if len(self.stretches) > MOST_STRETCHES:
            self.size *= 2
            pairs = zip(self.stretches[::2], self.stretches[1::2], strict=False)
            odd = self.stretches[len(self.stretches) // 2 * 2 :]
            self.stretches = [left.joined(right, self.columns) for left, right in pairs] + odd

    def rows(self) -> tuple[list[Entry], list[float | None]]:
        """The entries kept, and for each the smoothed mean of the first column around it."""
        if self._rows is not None:
            return self._rows
        self._gather()
        # Over less than a point, as with few of them, this changes nothing.
        half_life = max(1, len(self.stretches)) / 150
        means = smoothed([stretch.mean for stretch in self.stretches], half_life)
        pairs = [
            (entry, mean)
            for stretch, mean in zip(self.stretches, means, strict=True)
            for entry in stretch.entries
        ]
        if self.last is not None and pairs[-1][0] is not self.last:
            pairs.append((self.last, means[-1]))
        self._rows = [entry for entry, _ in pairs], [mean for _, mean in pairs]
        return self._rows


class Stretch:
    """Consecutive entries of a log: how many, the mean of the first column, and the extremes."""

    def __init__(self, entries: list[Entry], columns: Sequence[str]) -> None:
        values = [entry[columns[0]] for entry in entries if entry.get(columns[0]) is not None]
        self.count, self.finite, self.total = len(entries), len(values), math.fsum(values)
        self.entries = extremes(entries, columns)

    @property
    def mean(self) -> float | None:
        return self.total / self.finite if self.finite else None

    def joined(self, other: Stretch, columns: Sequence[str]) -> Stretch:
        """This one and the next as one."""
        both = Stretch([*self.entries, *other.entries], columns)
        both.count, both.finite = self.count + other.count, self.finite + other.finite
        both.total = self.total + other.total
        return both


def extremes(entries: list[Entry], columns: Sequence[str]) -> list[Entry]:
    """The entries with the lowest and the highest value of each column, in the order of steps."""
    if len(entries) <= 1:
        return entries
    kept: dict[int, Entry] = {}
    for column in columns:
        known = [entry for entry in entries if entry.get(column) is not None]
        if known:
            for chosen in (min, max):
                entry = chosen(known, key=itemgetter(column))
                kept[entry["step"]] = entry
    return [kept[step] for step in sorted(kept)] or entries[:1]


class History:
    """One run, as far as `update` has read its folder. Lists are in the order of steps."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config = folder, config
        # The MFU is a multiple of tokens_per_second: it has the same extremes.
        self.training = Thinned("loss", "lr", "grad_norm", "tokens_per_second")
        self.validation = Thinned("val_loss", "bits_per_byte")
        self.starts: list[Entry] = []  # one for each process that worked on it
        self.notes: list[Entry] = []  # warnings, with their text under "note"
        self.fits: list[Entry] = []  # the length of a run with a time budget, under "fit"
        self.snapshots: list[Entry] = []  # thinned as well
        self.offsets = {METRICS: 0, SNAPSHOTS: 0}  # bytes read so far

    @property
    def name(self) -> str:
        return os.path.basename(os.path.abspath(self.folder))  # of out_dir=. too

    @property
    def steps(self) -> list[Entry]:
        """Logged training steps, thinned, with `tokens` and `seconds` of training so far."""
        return self.training.rows()[0]

    @property
    def evaluations(self) -> list[Entry]:
        """Evaluations, thinned, with the same."""
        return self.validation.rows()[0]

    @property
    def last_step(self) -> int:
        ends = (self.training.last, self.validation.last)
        return max((entry["step"] for entry in ends if entry is not None), default=0)

    @property
    def max_steps(self) -> int:
        """The length of the run, as far as is known."""
        run = self.config.run  # a run may have gone on without its budget
        return self.fits[-1]["fit"] if self.fits and run.time_budget else run.max_steps

    @property
    def best(self) -> Entry | None:
        """The evaluation with the lowest loss."""
        scored = [entry for entry in self.evaluations if entry["val_loss"] is not None]
        return min(scored, key=lambda entry: entry["val_loss"], default=None)

    def update(self) -> None:
        """Read what both files have grown by."""
        for _ in self.read_metrics():
            pass
        for entry in self._new_entries(SNAPSHOTS):
            self._keep_snapshot(entry)
        for start in self.starts:  # what an earlier attempt said beyond it is not in the run
            earlier, step = range(1, start["attempt"]), start["step"]
            self.snapshots = [
                old
                for old in self.snapshots
                if old["step"] <= step or old["attempt"] not in earlier
            ]

    def read_metrics(self) -> Iterator[Entry]:
        """Yield each new entry of metrics.jsonl once it is taken in."""
        for entry in self._new_entries(METRICS):
            self._take_in(entry)
            yield entry

    def _new_entries(self, name: str) -> Iterator[Entry]:
        path = self.folder / name
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self.offsets[name])
                yield from read_spread(file, *READ[name])
                self.offsets[name] = file.tell()

    def _take_in(self, entry: Entry) -> None:
        step = entry["step"]
        if "start" in entry:  # what an earlier attempt did beyond this step is not in the run
            self.training.cut(step + 1)
            self.validation.cut(step + 1)
            self.fits = [fit for fit in self.fits if fit["step"] <= step]
        for kind, events in (("start", self.starts), ("note", self.notes), ("fit", self.fits)):
            if kind in entry:
                events.append(entry)
                del events[1:-MOST_EVENTS]
        for kind, figures in (("loss", self.training), ("val_loss", self.validation)):
            if kind in entry:
                figures.cut(step)
                self._add_progress(entry)
                figures.add(entry)

    def _add_progress(self, entry: Entry) -> None:
        """Give an entry its `tokens` and `seconds` of training so far.

        Seconds are counted from tokens_per_second, so evaluation, saving and the time between two
        processes are not in them; steps of which no speed is known add none. Between two lines that
        were read there may be others: that one stood still for hours must not count for them all,
        so there is no more time than passed by the clock. A log without `tokens` is taken to have
        trained on every position of every window.
        """
        last = self.training.last or {"step": 0, "tokens": 0, "seconds": 0.0}
        per_step = self.config.data.global_batch * self.config.model.context_length
        tokens, speed = entry.get("tokens"), entry.get("tokens_per_second")
        if tokens is None:
            tokens = last["tokens"] + max(0, entry["step"] - last["step"]) * per_step
        seconds = max(0, tokens - last["tokens"]) / speed if speed else 0.0
        if "time" in entry and "time" in last:  # the two clocks differ a little
            seconds = min(seconds, max(0.0, entry["time"] - last["time"]) + 1.0)
        entry.update(tokens=tokens, seconds=last["seconds"] + seconds)

    def _keep_snapshot(self, entry: Entry) -> None:
        """Keep the first, the newest and some between, at about equal distances."""
        self.snapshots = [old for old in self.snapshots if old["step"] < entry["step"]] + [entry]
        if len(self.snapshots) > 2 * MOST_SNAPSHOTS:
            steps = [snapshot["step"] for snapshot in self.snapshots]
            gaps = [after - before for before, after in zip(steps, steps[2:], strict=False)]
            del self.snapshots[1 + gaps.index(min(gaps))]


def read_config(folder: Path) -> Config:
    """The config of the run in `folder`. Raises ConfigError if there is none."""
    try:
        return from_json((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{folder} holds no run (run.json: {reason})") from error


def read_history(folder: Path) -> History:
    """The run in `folder`, with all that it has logged. Raises ConfigError if there is none."""
    history = History(folder, read_config(folder))
    history.update()
    return history


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
