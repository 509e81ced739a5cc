"""Prepared folders beside each other: found by what they were made from, held, listed, removed.

A folder's name ends in a hash of the content, the tokenizer and the options that it was made from.
It is never changed or replaced: other content is another folder. Its time is that of its last use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from cli.command import make_folder
from cli.files import try_lock
from cli.options import ConfigError
from data.meta import META_FILE, DamagedData, read_meta

SOURCE_FILE = "source.json"
KEY_LENGTH = 12
POLL_SECONDS = 0.2
Say = Callable[[str], None]


def key_of(made_from: dict[str, Any]) -> str:
    """The end of a folder's name: a hash of what it is made from, wherever the sources lie."""
    sources = [[source["digest"], source["weight"]] for source in made_from["sources"]]
    matters = json.dumps({**made_from, "sources": sources}, sort_keys=True)
    return hashlib.sha256(matters.encode()).hexdigest()[:KEY_LENGTH]


def partial_folder(root: Path, key: str) -> Path:
    """Where a folder of this key is made, to be renamed once it is complete."""
    return root / f".{key}.partial"


def find_key(root: Path, key: str) -> Path | None:
    """The complete folder of this key, whatever else its name says."""
    return next(filter(is_complete, sorted(root.glob(f"[!.]*-{key}"))), None)


def find_fingerprint(root: Path, fingerprint: str, hint: str = "") -> Path | None:
    """The folder of prepared data with this fingerprint; `hint` is looked at first."""
    hinted = [Path(hint)] if hint else []
    for folder in [*hinted, *sorted(root.glob("[!.]*"))]:
        with contextlib.suppress(ConfigError, DamagedData, OSError):
            if read_meta(folder).fingerprint == fingerprint:
                return folder
    return None


def is_complete(folder: Path) -> bool:
    """Whether a folder was prepared to the end."""
    return (folder / META_FILE).is_file()


def read_made_from(folder: Path) -> dict[str, Any]:
    """What a folder was made from, as source.json says; {} if that cannot be told."""
    try:
        found = json.loads((folder / SOURCE_FILE).read_text("utf-8"))
        if [source["digest"] for source in found["sources"]]:
            return found
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return {}


def note_use(folder: Path) -> None:
    """Let the folder's time say that it is used now."""
    with contextlib.suppress(OSError):  # somebody else's
        os.utime(folder)


# Locks


@contextmanager
def lock(path: Path, say: Say) -> Iterator[None]:
    """Hold a lock file; waits while another process holds it. The lock ends with its process."""
    make_folder(path.parent, "data.prepared_dir")
    with path.open("a+") as stream:
        waiting = False
        while (state := try_lock(stream)) == "held":
            if not waiting:
                stream.seek(0)
                say(f"waiting for process {stream.read().strip()}, which prepares this data")
            waiting = True
            time.sleep(POLL_SECONDS)
        if state == "no locks":
            say(f"note: {path.parent} has no file locks: prepare with one process at a time")
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


def hold(folder: Path) -> BinaryIO:
    """Hold a folder for as long as the file that this returns is open: it is not removed then.

    Raises ConfigError if it is being removed.
    """
    told = f"{folder} is being removed: run this again"
    try:
        stream = (folder / META_FILE).open("rb")
    except FileNotFoundError:
        raise ConfigError(told) from None
    if try_lock(stream, shared=True) == "held" or not is_complete(folder):
        stream.close()
        raise ConfigError(told)
    return stream


def delete_left(root: Path, pattern: str) -> None:
    """Delete files of this pattern that a process has left that did not end well: it held a lock
    on each."""
    for file in root.glob(pattern):
        with contextlib.suppress(OSError), file.open("ab") as stream:
            if try_lock(stream) == "locked":
                file.unlink()


# Listing and removing


def list_folders(root: Path, say: Say = print) -> None:
    """Say name, source, size and last use of each prepared folder, the last used first."""
    found = _folders(root)
    if not found:
        say(f"{root} holds no prepared data")
    for folder in sorted(found, key=lambda folder: -folder.stat().st_mtime):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
        megabytes = f"{_size(folder) / 1e6:,.1f} MB"
        say(f"{folder.name}  {megabytes}  last used {used}  source {_source(folder)}")


def remove_folder(root: Path, name: str, say: Say = print) -> None:
    """Delete one prepared folder, or one that is not finished. Raises ConfigError if there is none
    of this name, or a process uses it."""
    folder = root / name
    if folder not in _folders(root):
        raise ConfigError(f"remove={name}: {root} holds no prepared data of this name; see --list")
    if folder.is_symlink():
        raise ConfigError(f"remove={name}: is a link to {folder.resolve()}: delete both yourself")
    unfinished = not is_complete(folder)
    file = root / f".{_key(folder)}.lock" if unfinished else folder / META_FILE
    with file.open("ab") as stream:
        state = try_lock(stream)
        if state == "held":
            doing = "is being prepared" if unfinished else "is used by a run"
            raise ConfigError(f"remove={name}: {doing}: wait until that process has ended")
        if state == "no locks":
            say(f"note: {root} has no file locks: whether a run uses {name} cannot be seen")
        size, source = _size(folder), _source(folder)
        # By another name first: half of a folder must not be taken for a whole one.
        os.rename(folder, root / f".removed-{name.strip('.')}-{os.getpid()}")
        for doomed in root.glob(".removed-*"):  # and what a kill has left of another one
            shutil.rmtree(doomed, ignore_errors=True)
    say(f"removed {folder} ({size / 1e6:,.1f} MB, made from {source})")


def _folders(root: Path) -> list[Path]:
    """Prepared folders, and those that are not finished; nothing that is somebody else's."""
    complete = [folder for folder in root.glob("[!.]*") if is_complete(folder)]
    partial = [folder for folder in root.glob(".*.partial") if len(_key(folder)) == KEY_LENGTH]
    return [folder for folder in [*complete, *partial] if (folder / SOURCE_FILE).is_file()]


def _key(folder: Path) -> str:
    return folder.name.removeprefix(".").removesuffix(".partial")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _source(folder: Path) -> str:
    """The sources that a folder says it was made from."""
    made_from = read_made_from(folder)
    if made_from:
        specs = [source.get("spec", "?") for source in made_from["sources"]]
        return " + ".join(specs) + " (not finished)" * (not is_complete(folder))
    try:
        return read_meta(folder).source
    except (ConfigError, DamagedData):
        return "?"
