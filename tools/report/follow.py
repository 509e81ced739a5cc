"""Follow the runs in a folder: read what they append, and tell what changed on the page."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from cli.options import ConfigError
from tools.report.compare import comparison, run_table
from training.report.history import METRICS, RUN_JSON, SNAPSHOTS, History, read_config
from training.report.page import ATTENTION, GENERATOR, page_data

READ = (RUN_JSON, METRICS, SNAPSHOTS)  # the only files of a run that are read for its report
OFTEN = 0.5  # seconds; the folder is not looked at more often, however many pages are open

Stamp = tuple[int, int, int]  # inode, size, time of the last change


class Followed:
    """One run. It is read from the start again if its files were replaced, cut or moved away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stamps: dict[str, Stamp | None] = {}
        self.history: History | None = None

    def update(self) -> bool:
        """Read what is new and return whether anything is. Raises OSError or ConfigError if the
        folder holds no run."""
        stamps = {name: stamp(self.folder / name) for name in READ}
        if stamps == self.stamps:
            return False
        if self.history is None or self._is_another(self.history, stamps):
            self.history = None  # if the next line fails, it is tried again
            self.history = History(self.folder, read_config(self.folder))
        self.history.update()
        self.stamps = stamps
        return True

    def _is_another(self, history: History, stamps: dict[str, Stamp | None]) -> bool:
        if stamps[RUN_JSON] != self.stamps[RUN_JSON]:
            return True
        for name, read in history.offsets.items():
            old, new = self.stamps[name], stamps[name]
            if old and (new is None or new[0] != old[0] or new[1] < read):
                return True
        return False


def stamp(path: Path) -> Stamp | None:
    """Return what tells whether a file has changed; None if it is not there.

    Raises OSError if it is a link or anything but a file: nothing outside the folder is read.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a file")
    return found.st_ino, found.st_size, found.st_mtime_ns


class Folder:
    """All runs in a folder, or the run that the folder is. Used by several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[str, Followed] = {}
        self._lock = threading.Lock()
        self._looked = -1e9

    @property
    def name(self) -> str:
        return os.path.basename(os.path.abspath(self.root))

    def page(self, wanted: Sequence[str]) -> dict[str, Any]:
        """Return all that the page shows if these runs are chosen; of none, the newest is."""
        with self._lock:
            if time.monotonic() - self._looked > OFTEN:
                self._look()
                self._looked = time.monotonic()
            runs = {name: run.history for name, run in self.runs.items() if run.history}
            chosen = [name for name in dict.fromkeys(wanted) if name in runs]
            if not chosen and runs:
                chosen = [max(runs, key=lambda name: runs[name].last_time)]
            shown = [runs[name] for name in chosen]
            data = page_data(shown[0]) if len(shown) == 1 else comparison(shown)
            if len(chosen) == 1 and self.attention(chosen[0]):
                data["attention"] = chosen[0]
            return {**data, "chosen": chosen, "table": run_table(list(runs.values()))}

    def _look(self) -> None:
        """Find the runs, new ones too, and read what they have appended."""
        found = {}
        if (self.root / RUN_JSON).is_file():
            found[self.name] = self.root
        else:
            with os.scandir(self.root) as entries:
                folders = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
            found = {name: self.root / name for name in folders}
        for name in self.runs.keys() - found.keys():
            del self.runs[name]
        for name, folder in found.items():
            if not (folder / RUN_JSON).is_file():
                self.runs.pop(name, None)
                continue
            run = self.runs.setdefault(name, Followed(folder))
            try:
                run.update()
            except (OSError, ConfigError):  # moved away at this moment, or not readable
                del self.runs[name]

    def attention(self, name: str) -> bytes | None:
        """Return the attention page of a run, if tools.attention has written one there."""
        run = self.runs.get(name)
        if run is None:
            return None
        try:
            if stamp(run.folder / ATTENTION) is None:
                return None
            page = (run.folder / ATTENTION).read_bytes()
        except OSError:
            return None
        return page if GENERATOR.encode() in page[:1000] else None


# The messages


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of the page that differ; of the curves, only the rows that differ.

    If other runs are shown, that is all of `new`, with "reset" for the page to drop what it has.
    """
    if old.keys() != new.keys() or old["chosen"] != new["chosen"]:
        return {**new, "reset": True}
    found = {name: value for name, value in new.items() if old[name] != value}
    if "runs" in found:
        pairs = zip(old["runs"], new["runs"], strict=True)
        found["runs"] = [
            {**run, **{rows: tail(before[rows], run[rows]) for rows in ("training", "validation")}}
            for before, run in pairs
        ]
    return found


def tail(old: dict[str, list[Any]], new: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the columns of `new` without the first rows, which `old` has, too: "keep" of them."""
    pairs = zip(zip(*old.values(), strict=True), zip(*new.values(), strict=True), strict=False)
    keep = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return {"keep": keep, **{name: column[keep:] for name, column in new.items()}}
