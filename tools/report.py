"""Write the report of one run, or compare several: `python -m tools.report out/a [out/b ...]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cli.command import run_command
from cli.options import parse_options

USAGE = "python -m tools.report RUN [RUN ...] [--out=FILE], for example: ... out/small"


@dataclass(frozen=True)
class ReportOptions:
    """Options of the report."""

    out: Annotated[str, "file to write; default: RUN/report.html, or ./report.html to compare"] = ""


def main(argv: list[str]) -> int:
    """Write the report and print its path."""
    options, runs = parse_options(argv, ReportOptions, usage=USAGE, positionals=["RUN..."])
    from training.report.history import REPORT, read_history
    from training.report.page import check_page, write_report

    folders = [Path(run) for run in runs]
    own = folders[0] / REPORT
    path = Path(options.out or (own if len(folders) == 1 else REPORT))
    if path != own:  # a run may always replace its own
        check_page(path)
    write_report([read_history(folder) for folder in folders], path)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, open it in a browser")
    return 0


if __name__ == "__main__":
    run_command(main)
