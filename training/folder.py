"""The folder of a run: one training at a time, and nothing in it is ever overwritten."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from data.command import make_folder
from data.options import ConfigError
from training.manifest import free_name

# What a run writes into its folder, run.json first.
WRITTEN = ("run.json", "metrics.jsonl", "snapshots.jsonl", "checkpoints", "report.html")


class FolderHeld(RuntimeError):
    """Another process is training in this folder."""

    exit_code = 6


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder` until the block ends. Raises FolderHeld naming the process that has it.

    The lock is the kernel's (flock), so it ends with its process however that ends: the file that
    stays behind blocks nobody.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no flock
        yield
        return
    make_folder(folder, "run.out_dir")
    path = folder / ".lock"
    with open(path, "a+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise FolderHeld(
                f"{folder} is in use by {holder}; wait for it or use another --out_dir"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def check_own(folder: Path) -> None:
    """Raises ConfigError for a folder with files that a run would write to, but that no run left:
    they are someone's. Other files may be there: a log, say."""
    if (folder / "run.json").exists() or any(folder.glob("checkpoints/step-*")):
        return
    if found := [name for name in WRITTEN if (folder / name).exists()]:
        raise ConfigError(
            f"run.out_dir={folder}: holds {', '.join(found)}, but no run.json: not a run's folder. "
            "Choose another --out_dir, or --overwrite=true to move this one aside"
        )


def move_aside(folder: Path) -> Path:
    """Rename an old run's folder to the first free name of folder.old, folder.old-1, ..."""
    aside = free_name(folder.with_name(folder.name + ".old"))
    os.rename(folder, aside)
    return aside


def next_attempt(metrics: Path) -> int:
    """1 for a new run; else one more than the last attempt that metrics.jsonl tells of."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, os.path.getsize(metrics) - (1 << 16)))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 1
    for line in reversed(lines):  # the last one may be torn
        try:
            return int(json.loads(line)["attempt"]) + 1
        except (ValueError, KeyError, TypeError):
            continue
    return 1


def read_metrics(path: Path) -> list[dict]:
    """The figures of metrics.jsonl, one line per step and kind: of each step the highest attempt.

    Events (the start of a process, notes, fits) are left to training.history, and a line that is
    torn (a kill while it was written) is left out. What a later attempt did again replaces what it
    was.
    """
    best: dict[tuple[int, bool], dict] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
                key = (int(entry["step"]), "val_loss" in entry)
            except (ValueError, KeyError, TypeError):
                continue
            if entry.keys() & {"start", "note", "fit"}:
                continue
            if key not in best or entry.get("attempt", 0) >= best[key].get("attempt", 0):
                best[key] = entry
    return [best[key] for key in sorted(best)]
