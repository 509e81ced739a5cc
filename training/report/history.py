"""Read the history of a run from its folder: curves, events, samples.

    metrics.jsonl     figures of training steps and evaluations; events (the start and the end of
                      each process, warnings, changes of the time budget)
    snapshots.jsonl   a sample and a scored passage for each evaluation
    run.json          the config

A log can have millions of lines, so it is thinned while it is read: memory does not grow with its
length, and spikes are kept. A process reads each line that it logs itself. Of a long log that it
finds on disk it reads the evaluations, the events and some of the training steps
(training/metrics.py: read_spread).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cli.options import ConfigError
from training.config import Config, from_json
from training.folder import holder_lives
from training.metrics import STEP_MARK, read_spread

RUN_JSON, METRICS, SNAPSHOTS = "run.json", "metrics.jsonl", "snapshots.jsonl"
REPORT = "report.html"
MOST_STRETCHES = 300  # per log; a long one has at least half as many
MOST_EVENTS = 200  # of each kind
MOST_SNAPSHOTS = 12
SILENT = 600.0  # seconds after which a run on another machine no longer counts as running
# For a long file: about how many lines to read, and of which kind; all other lines are read.
READ = {METRICS: (8_000, STEP_MARK), SNAPSHOTS: (20 * MOST_SNAPSHOTS, b"")}
Entry = dict[str, Any]  # one line


class Stretch:
    """Consecutive entries of a log, reduced to the last one and the extremes of each column."""

    def __init__(self) -> None:
        self.count = 0  # of all entries
        self.finite, self.total = 0, 0.0  # number and sum of the first column's finite values
        self.extremes: dict[str, tuple[Entry, Entry]] = {}  # column -> (lowest, highest)
        self.last: Entry = {}

    def add(self, entry: Entry, columns: Sequence[str]) -> None:
        self.count, self.last = self.count + 1, entry
        for column in columns:
            if entry.get(column) is not None:
                self._compare(entry, column)
        if (value := entry.get(columns[0])) is not None:
            self.finite, self.total = self.finite + 1, self.total + value

    def _compare(self, entry: Entry, column: str) -> None:
        low, high = self.extremes.get(column, (entry, entry))
        low = entry if entry[column] < low[column] else low
        high = entry if entry[column] > high[column] else high
        self.extremes[column] = low, high

    def join(self, later: Stretch) -> None:
        """Add the entries of the stretch that follows."""
        self.count, self.last = self.count + later.count, later.last
        self.finite, self.total = self.finite + later.finite, self.total + later.total
        for column, pair in later.extremes.items():
            for entry in pair:
                self._compare(entry, column)

    @property
    def mean(self) -> float | None:
        return self.total / self.finite if self.finite else None

    @property
    def entries(self) -> list[Entry]:
        """The extremes and the last entry, in order of steps."""
        pairs = [*self.extremes.values(), (self.last,)]
        kept = {entry["step"]: entry for pair in pairs for entry in pair}
        return [kept[step] for step in sorted(kept)]


class Thinned:
    """A log reduced to at most MOST_STRETCHES stretches of equal length.

    Keeping every tenth entry would lose the spikes that a reader looks for, so each stretch keeps
    its extremes. When there are too many stretches, neighbors are joined.
    """

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self.size = 1  # entries in a full stretch
        self.stretches: list[Stretch] = []

    @property
    def last(self) -> Entry | None:
        return self.stretches[-1].last if self.stretches else None

    @property
    def entries(self) -> list[Entry]:
        """The entries that are kept, in order of steps."""
        return [entry for stretch in self.stretches for entry in stretch.entries]

    def add(self, entry: Entry) -> None:
        """Append an entry. If the step was logged before, call `cut` first."""
        if not self.stretches or self.stretches[-1].count >= self.size:
            self.stretches.append(Stretch())
        self.stretches[-1].add(entry, self.columns)
        if len(self.stretches) > MOST_STRETCHES:
            self.size *= 2
            for first, second in zip(self.stretches[::2], self.stretches[1::2], strict=False):
                first.join(second)
            del self.stretches[1::2]

    def cut(self, step: int) -> None:
        """Drop everything from `step` on: a later attempt repeats it."""
        while self.last is not None and self.last["step"] >= step:
            for entry in self.stretches.pop().entries:
                if entry["step"] < step:
                    self.add(entry)

    def curve(self) -> list[tuple[Entry, float | None]]:
        """Return the kept entries, the last one of each stretch with its mean of the first column.

        The page draws a smooth line through the means; extremes alone would mislead it.
        """
        return [
            (entry, stretch.mean if entry is stretch.last else None)
            for stretch in self.stretches
            for entry in stretch.entries
        ]


class History:
    """One run, as far as `update` has read its folder. All lists are in order of steps."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config = folder, config
        # MFU is a multiple of tokens_per_second and has the same extremes.
        self.training = Thinned("loss", "lr", "grad_norm", "tokens_per_second")
        self.validation = Thinned("val_loss", "bits_per_byte")
        self.starts: list[Entry] = []  # one per process that worked on the run
        self.notes: list[Entry] = []  # warnings, their text under "note"
        self.ends: list[Entry] = []  # one per process that could say how it ended, under "end"
        self.ended: str | None = None  # how the last process ended, if it said so
        self.fits: list[Entry] = []  # estimates of the number of steps under a time budget
        self.snapshots: list[Entry] = []
        self.offsets = {METRICS: 0, SNAPSHOTS: 0}  # bytes read so far

    @property
    def name(self) -> str:
        return os.path.basename(os.path.abspath(self.folder))  # of out_dir=. too

    @property
    def last_step(self) -> int:
        ends = (self.training.last, self.validation.last)
        return max((entry["step"] for entry in ends if entry is not None), default=0)

    @property
    def max_steps(self) -> int:
        """The planned number of steps (an estimate under a time budget)."""
        run = self.config.run  # a run may have been resumed without its budget
        return self.fits[-1]["fit"] if self.fits and run.time_budget else run.max_steps

    @property
    def best(self) -> Entry | None:
        """The evaluation with the lowest loss."""
        scored = [entry for entry in self.validation.entries if entry["val_loss"] is not None]
        return min(scored, key=lambda entry: entry["val_loss"], default=None)

    @property
    def state(self) -> str:
        """running, finished, stopped or failed."""
        if self.ended is not None:
            return self.ended.partition(":")[0]
        lives = holder_lives(self.folder)
        if lives is None:  # on another machine: judge by its log
            lives = time.time() - self.last_time < SILENT
        if lives:
            return "running"
        return "finished" if self.last_step >= self.max_steps else "failed"

    @property
    def last_time(self) -> float:
        """Seconds since 1970 of the newest entry."""
        newest = [self.training.last, self.validation.last, *self.starts[-1:], *self.ends[-1:]]
        return max((entry.get("time", 0.0) for entry in newest if entry), default=0.0)

    def update(self) -> None:
        """Read what was appended to both files."""
        for _ in self.read_metrics():
            pass
        for entry in self._new_entries(SNAPSHOTS):
            self._keep_snapshot(entry)
        for start in self.starts:  # drop what an earlier attempt did beyond this step
            earlier, step = range(1, start["attempt"]), start["step"]
            self.snapshots = [
                old
                for old in self.snapshots
                if old["step"] <= step or old["attempt"] not in earlier
            ]

    def read_metrics(self) -> Iterator[Entry]:
        """Yield each new entry of metrics.jsonl once it is recorded here."""
        for entry in self._new_entries(METRICS):
            self._record(entry)
            yield entry

    def _new_entries(self, name: str) -> Iterator[Entry]:
        path = self.folder / name
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self.offsets[name])
                yield from read_spread(file, *READ[name])
                self.offsets[name] = file.tell()

    def _record(self, entry: Entry) -> None:
        step = entry["step"]
        if "start" in entry:  # drop what an earlier attempt did beyond this step
            self.training.cut(step + 1)
            self.validation.cut(step + 1)
            self.fits = [fit for fit in self.fits if fit["step"] <= step]
            self.ended = None
        self.ended = entry.get("end", self.ended)
        kinds = {"start": self.starts, "end": self.ends, "note": self.notes, "fit": self.fits}
        for kind, events in kinds.items():
            if kind in entry:
                events.append(entry)
                del events[1:-MOST_EVENTS]  # the first and the newest stay
        for kind, figures in (("loss", self.training), ("val_loss", self.validation)):
            if kind in entry:
                figures.cut(step)
                self._add_progress(entry)
                figures.add(entry)

    def _add_progress(self, entry: Entry) -> None:
        """Set the entry's `tokens` and `seconds` of training so far.

        Seconds follow from tokens_per_second, so evaluation, saving and the time between two
        processes do not count. Between two lines that were read there may be others, and one slow
        step must not count for all of them: no more time is added than the clock shows. In a log
        without `tokens`, every position of every window counts.
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
        if len(self.snapshots) > MOST_SNAPSHOTS:
            steps = [snapshot["step"] for snapshot in self.snapshots]
            gaps = [after - before for before, after in zip(steps, steps[2:], strict=False)]
            del self.snapshots[1 + gaps.index(min(gaps))]


def read_config(folder: Path) -> Config:
    """Return the config of the run in `folder`. Raises ConfigError if there is none."""
    try:
        return from_json((folder / RUN_JSON).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{folder} is not the folder of a run (run.json: {reason})") from error


def read_history(folder: Path) -> History:
    """Return the run in `folder` with all that it logged. Raises ConfigError if there is none."""
    history = History(folder, read_config(folder))
    history.update()
    return history
