"""Locks and syncs, also where a file system does not offer them: then with one warning."""

from __future__ import annotations

import errno
import functools
import os
import sys
from pathlib import Path
from typing import IO

# What Lustre, NFS and FUSE mounts say to a call that they do not know or allow. Not EIO or ENOSPC:
# these are faults of the disk.
NOT_OFFERED = ("ENOSYS", "ENOTSUP", "EOPNOTSUPP", "EINVAL", "ENOTTY", "EBADF", "EACCES", "EPERM")


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
