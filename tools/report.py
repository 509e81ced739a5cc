"""Look at a run, or at several side by side: `python -m tools.report out/a [out/b ...]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cli.command import run_command
from cli.options import ConfigError, parse_options

USAGE = (
    "python -m tools.report RUN [RUN ...] [--out=FILE], such as: python -m tools.report out/small"
)


@dataclass(frozen=True)
class ReportOptions:
    """Where it goes."""

    out: Annotated[str, "the file; RUN/report.html, for several runs report.html here"] = ""


def main(argv: list[str]) -> int:
    """Write the report and say where it is."""
    options, runs = parse_options(argv, ReportOptions, usage=USAGE, positionals=["RUN..."])
    from training.history import REPORT, read_history
    from training.report import check_page, write_report

    folders = [Path(run) for run in runs]
    default = folders[0] / REPORT if len(folders) == 1 else Path(REPORT)
    path = Path(options.out) if options.out else default
    if path != folders[0] / REPORT:  # that one is the run's own
        check_page(path)
    try:
        write_report([read_history(folder) for folder in folders], path)
    except ImportError as error:
        raise ConfigError(
            f"a report needs the package bokeh: pip install bokeh ({error})"
        ) from error
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, open it in a browser")
    return 0


if __name__ == "__main__":
    run_command(main)
