"""Open a playground for one model, or for two side by side: `python -m tools.play out/small`.

It serves a page on this machine only (127.0.0.1). The address holds a secret, so that other users
of the machine and other web pages cannot use it. Needs the packages starlette and uvicorn.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated

from cli.command import run_command
from cli.options import ConfigError, parse_options
from cli.web import address_of, make_server, open_listener, port_problems, require_packages

USAGE = "python -m tools.play RUN [RUN], for example: python -m tools.play out/small"


@dataclass(frozen=True)
class PlayOptions:
    """What to load and where to serve it."""

    port: Annotated[int, "TCP port; 0: any free one"] = 0
    which: Annotated[str, "checkpoint: best, latest or a step; best if there is one"] = ""
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps"] = "auto"

    def problems(self) -> list[str]:
        return port_problems(self.port)


def main(argv: list[str]) -> int:
    """Load the models, print the address and serve until Ctrl-C."""
    options, runs = parse_options(argv, PlayOptions, usage=USAGE, positionals=["RUN..."])
    if len(runs) > 2:
        raise ConfigError(f"{len(runs)} models given: the playground shows one or two")
    require_packages("the playground")

    from tools.play.server import make_app
    from tools.play.session import Session
    from training.distributed import pick_device
    from training.weights import find_weights

    device = pick_device(options.device)
    sessions = [Session(run, *find_weights(run, options.which).load(device)) for run in runs]
    secret = secrets.token_urlsafe(16)
    app = make_app(sessions, secret)
    with open_listener(options.port) as listener:
        address = address_of(listener, secret)
        print(f"playground: {address}\nCtrl-C ends it", flush=True)
        make_server(app).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    run_command(main)
