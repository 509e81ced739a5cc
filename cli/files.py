"""Files that are complete or absent; locks and syncs, with one warning where there are none."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 20  # bytes written and hashed at a time

Piece = bytes | memoryview
Entry = dict[str, Any]  # {"size": bytes, "sha256": hex}

# What Lustre, NFS and FUSE mounts say to a call that they do not know or allow. Not EIO or ENOSPC:
# these are faults of the disk.
NOT_OFFERED = ("ENOSYS", "ENOTSUP", "EOPNOTSUPP", "EINVAL", "ENOTTY", "EBADF", "EACCES", "EPERM")


def write_file(path: Path, pieces: Iterable[Piece]) -> Entry:
    """Write the pieces one after the other, surely on disk; returns the manifest's entry.

    Raises OSError that names `path` when the disk is full or not writable.
    """
    digest, size = hashlib.sha256(), 0
    with named_in_errors(path), open(path, "wb") as file:
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                part = piece[start : start + CHUNK]
                file.write(part)
                digest.update(part)
            size += len(piece)
        file.flush()
        sync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Let an OSError of a write, which does not know its file, say which it was."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file by a rename, so that a reader or a kill never meets half of it.

    Raises OSError that names `path` when the disk is full or not writable.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        data = content.encode() if isinstance(content, str) else content
        write_file(temporary, [data])
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):  # renamed, or never made on a read-only disk
            temporary.unlink()


def json_bytes(value: Any) -> bytes:
    """The JSON of a small file that people may look at."""
    return json.dumps(value, indent=1).encode()


def free_name(path: Path) -> Path:
    """`path`, or the first of path-1, path-2 ... that does not exist."""
    candidate, number = path, 0
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def try_lock(stream: IO, shared: bool = False) -> str:
    """Lock an open file until it is closed (flock, so a process that is killed lets go, too).

    Returns "locked", "held" if another process has it, or "no locks" if there are none on this
    platform or file system.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return "no locks"
    try:
        fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError as error:
        if error.errno == errno.EACCES:  # what some systems say in the place of EWOULDBLOCK
            return "held"
        if not _is_offered(error, "ENOLCK"):
            return "no locks"
        raise
    return "locked"


def sync(handle: int) -> None:
    """os.fsync, where the file system offers it: what was written is on the disk afterwards."""
    try:
        os.fsync(handle)
    except OSError as error:
        if _is_offered(error):
            raise
        _warn_of_no_sync(error)


def sync_folder(path: Path) -> None:
    """Make the names in a folder sure on disk, as `sync` does for the content of a file."""
    if os.name == "nt":  # folders cannot be opened there
        return
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        if _is_offered(error):
            raise
        _warn_of_no_sync(error)
        return
    try:
        sync(handle)
    finally:
        os.close(handle)


def _warn_of_no_sync(error: OSError) -> None:
    warn_once(
        f"this file system cannot sync what it holds ({error.strerror}): after a power cut the "
        "files written last may be missing"
    )


def _is_offered(error: OSError, *more: str) -> bool:
    """Whether a call failed for another reason than that the file system does not offer it."""
    return errno.errorcode.get(error.errno or 0) not in (*NOT_OFFERED, *more)


@functools.cache
def warn_once(text: str) -> None:
    """Say it on stderr the first time that this process says it."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
