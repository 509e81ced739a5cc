"""Files that are complete or absent, locks, and a warning where the file system offers neither."""

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

from cli.terminal import print_line

CHUNK = 1 << 20  # bytes written and hashed at a time

Piece = bytes | memoryview
Entry = dict[str, Any]  # {"size": bytes, "sha256": hex}

# Errors of Lustre, NFS and FUSE mounts for a call that they do not support or allow. Not EIO or
# ENOSPC: these are faults of the disk.
NOT_OFFERED = ("ENOSYS", "ENOTSUP", "EOPNOTSUPP", "EINVAL", "ENOTTY", "EBADF", "EACCES", "EPERM")


def write_file(path: Path, pieces: Iterable[Piece]) -> Entry:
    """Write the pieces one after another and flush them to the disk; return size and SHA-256.

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
        sync(file)
    return {"size": size, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError of a write, which does not know it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file by a rename, so that a reader, or a kill, never leaves half of it.

    Raises OSError that names `path` when the disk is full or not writable.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        write_file(temporary, [content.encode() if isinstance(content, str) else content])
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):  # renamed, or never created on a read-only disk
            temporary.unlink()


def json_bytes(value: Any) -> bytes:
    """Return the JSON of a small file that people may read."""
    return json.dumps(value, indent=1).encode()


def seal(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, which is stored in it as "seal".

    It reveals accidental changes, not intended ones: anybody can compute it again.
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def free_name(path: Path) -> Path:
    """Return `path`, or the first of path-1, path-2 ... that does not exist."""
    candidate, number = path, 0
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def try_lock(stream: IO[Any], shared: bool = False) -> str:
    """Lock an open file until it is closed, or its process ends in any way (flock).

    Returns "locked", "held" if another process has it, or "no locks" if this platform or file
    system has none. (The package filelock has no shared locks of this kind, and raises an error
    where there are no locks.)
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return "no locks"
    try:
        fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        # Some systems say EACCES instead of EWOULDBLOCK.
        if isinstance(error, BlockingIOError) or error.errno == errno.EACCES:
            return "held"
        if _is_one_of(error, (*NOT_OFFERED, "ENOLCK")):
            return "no locks"
        raise
    return "locked"


def sync(stream: IO[Any]) -> None:
    """Flush a file to the disk with os.fsync, so that it survives a power cut."""
    stream.flush()
    with _sync_is_optional():
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk: a new or renamed file is lost without that."""
    if os.name == "nt":  # folders cannot be opened there
        return
    with _sync_is_optional():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _sync_is_optional() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not _is_one_of(error, NOT_OFFERED):
            raise
        warn_once(
            f"this file system cannot flush files to the disk ({error.strerror}): after a power "
            "cut, the files written last may be missing"
        )


def _is_one_of(error: OSError, names: tuple[str, ...]) -> bool:
    return errno.errorcode.get(error.errno or 0) in names


@functools.cache
def warn_once(text: str) -> None:
    """Print a warning to stderr, once per process."""
    print_line(f"warning: {text}", sys.stderr)
