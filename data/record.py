"""What a prepared folder was made from, and who may prepare it now."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from data.command import make_folder
from data.meta import META_FILE, write_json
from data.sources import Source

SOURCE_FILE = "source.json"
POLL_SECONDS = 0.2


def source_record(sources: list[Source]) -> list[dict]:
    """What identifies the content of each source: a cheap stamp and a SHA-256."""
    return [{"stamp": source.stamp(), "sha256": source.digest()} for source in sources]


def is_complete(folder: Path) -> bool:
    """Whether a folder was prepared to the end."""
    return (folder / META_FILE).is_file() and (folder / SOURCE_FILE).is_file()


def is_current(folder: Path, sources: list[Source]) -> bool:
    """Whether a folder was made from files of the same names, sizes and times; reads none."""
    return is_complete(folder) and _known(folder, "stamp") == [s.stamp() for s in sources]


def has_same_content(folder: Path, record: list[dict]) -> bool:
    """Whether a folder was made from the same bytes; their new times are then noted in it."""
    if not is_complete(folder) or _known(folder, "sha256") != [e["sha256"] for e in record]:
        return False
    if os.access(folder, os.W_OK):
        write_json(folder / SOURCE_FILE, record)
    return True


def _known(folder: Path, what: str) -> list:
    try:
        return [entry[what] for entry in json.loads((folder / SOURCE_FILE).read_text("utf-8"))]
    except (ValueError, TypeError, KeyError, RecursionError):  # damaged: nothing is known
        return []


@contextmanager
def lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file; waits while another process holds it. The lock ends with its process."""
    try:
        import fcntl
    except ImportError:
        say("this platform has no file locks: prepare with one process at a time")
        yield
        return
    make_folder(path.parent, "data.prepared_dir")
    with path.open("a+") as stream:
        waiting = False
        while not _try_lock(fcntl, stream):
            if not waiting:
                stream.seek(0)
                say(f"waiting for process {stream.read().strip()}, which prepares this data")
            waiting = True
            time.sleep(POLL_SECONDS)
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


def _try_lock(fcntl, stream) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
