"""The port and the secret of the live page's address, which stay the same if they can."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
from pathlib import Path

from cli.options import ConfigError
from cli.web import open_listener


def open_near(port: int) -> socket.socket:
    """Return a socket on this port or one of the 20 that follow, else on any free one."""
    for near in range(port, port + 20):
        try:
            return open_listener(near)
        except ConfigError:
            continue
    return open_listener(0)


def kept_secret(path: Path) -> str:
    """Return the secret in a file of ours that nobody else can read; make it if there is none.

    So an address stays valid when its server is started again. A file that others could have
    written or read is not used, and a secret that cannot be kept is new each time.
    """
    no_links = getattr(os, "O_NOFOLLOW", 0)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        with open(os.open(path, os.O_RDONLY | no_links), encoding="ascii") as file:
            found, text = os.fstat(file.fileno()), file.read(100).strip()
        private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
        if private and found.st_uid == getattr(os, "getuid", lambda: 0)() and len(text) > 15:
            return text
    secret = secrets.token_urlsafe(16)
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | no_links
        with open(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
            file.write(f"{secret}\n")
    return secret
