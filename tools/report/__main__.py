"""Write the report of one run, compare several, or follow a folder: `python -m tools.report out`.

`--serve` serves a page on this machine only (127.0.0.1) that follows every run in a folder while
they train. It needs the packages starlette and uvicorn.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

from cli.command import run_command
from cli.options import ConfigError, parse_options
from cli.web import address_of, make_server, open_listener, port_problems, require_packages
from tools.report.address import kept_secret, open_near

if TYPE_CHECKING:
    import uvicorn

    from training.report.history import History

USAGE = "python -m tools.report RUN|FOLDER ... [--out=FILE] or FOLDER --serve, such as: ... out"
FIRST_PORT = 8420
SECRET = ".live"  # in the folder that is served


@dataclass(frozen=True)
class ReportOptions:
    """Options of the report."""

    out: Annotated[str, "file to write; default: RUN/report.html, or ./report.html to compare"] = ""
    serve: Annotated[bool, "serve a page that follows the runs of a folder"] = False
    port: Annotated[int, "TCP port of the page; 0: the first free one from 8420 on"] = 0
    show: Annotated[str, "run that the served page shows first"] = ""
    until_eof: Annotated[bool, "end the server when standard input ends"] = False

    def problems(self) -> list[str]:
        return port_problems(self.port)


def main(argv: list[str]) -> int:
    """Write the report and print its path, or serve until Ctrl-C."""
    options, paths = parse_options(argv, ReportOptions, usage=USAGE, positionals=["RUN..."])
    if options.serve:
        return serve([Path(path) for path in paths], options)
    from tools.report.compare import comparison
    from training.report.history import REPORT
    from training.report.page import check_page, write_page, write_report

    histories = find_runs([Path(path) for path in paths])
    own = histories[0].folder / REPORT
    path = Path(options.out or (own if len(histories) == 1 else REPORT))
    if path != own:  # a run may always replace its own
        check_page(path)
    several = ""
    if len(histories) > 1:
        several = f"{len(histories)} runs, "
        write_page(comparison(histories), path)
    else:
        write_report(histories[0], path)
    print(f"{path}: {several}{path.stat().st_size / 1e3:.0f} kB, open it in a browser")
    return 0


def find_runs(paths: Sequence[Path]) -> list[History]:
    """Return the runs that were named, and those in the folders that were named.

    With several paths, as of `out/*`, what is not a run is skipped with a note. Raises ConfigError
    if no run is left.
    """
    from training.report.history import RUN_JSON, read_history

    found, problems = {}, []
    for path in paths:
        inside = sorted(file.parent for file in path.glob(f"*/{RUN_JSON}"))
        for folder in inside if inside and not (path / RUN_JSON).exists() else [path]:
            try:
                found[folder.resolve()] = read_history(folder)
            except ConfigError as error:
                problems += error.problems
    if not found:
        raise ConfigError(problems)
    for problem in problems:
        print(f"skipped: {problem}")
    return list(found.values())


def serve(paths: Sequence[Path], options: ReportOptions) -> int:
    """Print the address of the page and serve it until Ctrl-C, or until standard input ends."""
    if len(paths) > 1:
        raise ConfigError(f"{len(paths)} folders given: --serve follows one, with all runs in it")
    if not paths[0].is_dir():
        raise ConfigError(f"{paths[0]}: no such folder")
    require_packages("the live page")

    from tools.report.follow import Folder
    from tools.report.server import make_app

    secret = kept_secret(paths[0] / SECRET)
    app = make_app(Folder(paths[0]), secret)
    server = app.state.server = make_server(app)
    with open_listener(options.port) if options.port else open_near(FIRST_PORT) as listener:
        shown = f"&run={quote(options.show, safe='')}" if options.show else ""
        print(f"live page: {address_of(listener, secret)}{shown}", flush=True)
        if options.until_eof:
            os.nice(10) if hasattr(os, "nice") else None  # training comes first
            threading.Thread(target=end_with_stdin, args=[server], daemon=True).start()
        else:
            print("Ctrl-C ends it", flush=True)
        server.run(sockets=[listener])
    return 0


def end_with_stdin(server: uvicorn.Server) -> None:
    """Ask the server to end once the process at the other end of stdin has closed it or ended."""
    while sys.stdin.buffer.read(1 << 16):
        pass
    server.should_exit = True


if __name__ == "__main__":
    run_command(main)
