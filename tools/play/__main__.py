"""Open a playground for one model, or for two side by side: `python -m tools.play out/small`.

It serves a page on this machine only (127.0.0.1). The address holds a secret, so that other users
of the machine and other web pages cannot use it. Needs the packages starlette and uvicorn.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from typing import Annotated

from cli.command import run_command
from cli.options import ConfigError, parse_options

USAGE = "python -m tools.play RUN [RUN], for example: python -m tools.play out/small"
HOST = "127.0.0.1"


@dataclass(frozen=True)
class PlayOptions:
    """What to load and where to serve it."""

    port: Annotated[int, "TCP port; 0: any free one"] = 0
    which: Annotated[str, "checkpoint: best, latest or a step; best if there is one"] = ""
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps"] = "auto"

    def problems(self) -> list[str]:
        if not 0 <= self.port < 1 << 16:
            return [f"port={self.port}: must be in [0, 65535]; 0 takes any free port"]
        return []


def main(argv: list[str]) -> int:
    """Load the models, print the address and serve until Ctrl-C."""
    options, runs = parse_options(argv, PlayOptions, usage=USAGE, positionals=["RUN..."])
    if len(runs) > 2:
        raise ConfigError(f"{len(runs)} models given: the playground shows one or two")
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f"the playground needs the package {error.name}: pip install starlette uvicorn"
        ) from error

    from tools.play.server import make_app
    from tools.play.session import Session
    from training.distributed import pick_device
    from training.weights import find_weights

    device = pick_device(options.device)
    sessions = [Session(run, *find_weights(run, options.which).load(device)) for run in runs]
    secret = secrets.token_urlsafe(16)
    app = make_app(sessions, secret)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, options.port))
    except OSError as error:
        raise ConfigError(
            f"port={options.port}: cannot be opened ({error.strerror}); --port=0 takes a free one"
        ) from error
    with listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/?token={secret}"
        print(f"playground: {address}\nCtrl-C ends it", flush=True)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
        server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    run_command(main)
