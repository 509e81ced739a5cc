"""A page for one person: served on this machine only, behind a token in its address.

The packages starlette and uvicorn are optional; they are imported where they are used.
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
from typing import Any

from cli.options import ConfigError

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost")
# A page is one file: it loads nothing, and no text in it can run.
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def require_packages(what: str) -> None:
    """Raise ConfigError if a package that serves pages is missing. what: who needs it."""
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{what} needs the package {name}: pip install starlette uvicorn")


def port_problems(port: int) -> list[str]:
    if 0 <= port < 1 << 16:
        return []
    return [f"port={port}: must be in [0, 65535]; 0 takes any free port"]


def check_request(request: Any, token: str, secret: str) -> None:
    """Refuse a request under another host name, or without the secret, with status 403.

    Any web page could reach the server by a name that it points to 127.0.0.1.
    """
    from starlette.exceptions import HTTPException

    if request.url.hostname not in HOSTS:
        raise HTTPException(403, "this server answers requests to 127.0.0.1 only")
    if not secrets.compare_digest(token.encode(), secret.encode()):
        raise HTTPException(403, "the token is missing or wrong: open the address as printed")


def page_headers() -> tuple[str, dict[str, str]]:
    """Return a nonce for the page's scripts, and headers that allow no other script."""
    nonce = secrets.token_urlsafe(12)
    return nonce, {**HEADERS, "Content-Security-Policy": POLICY.format(nonce=nonce)}


def open_listener(port: int) -> socket.socket:
    """Return a socket on this port of this machine, 0: any free one. Raises ConfigError."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()  # now: a request may come before the server runs
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port={port}: cannot be opened ({error.strerror}); --port=0 takes a free one"
        ) from error
    return listener


def address_of(listener: socket.socket, secret: str) -> str:
    return f"http://{HOST}:{listener.getsockname()[1]}/?token={secret}"


def make_server(app: Any) -> Any:
    """Return a uvicorn server for `app`; requests that do not end are cut off after 3 s."""
    import uvicorn

    config = uvicorn.Config(app, timeout_graceful_shutdown=3, log_level="error", access_log=False)
    return uvicorn.Server(config)
