"""report.html: a run to look at, one file that needs neither network nor server.

`python -m tools.report` makes it from a run's folder, training after every evaluation. Several runs
are overlaid. The blocks of the page are training/page.py's, the curves training/charts.py's;
report.css and report.js go into the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cli.command import Say
from cli.files import replace_file
from cli.options import ConfigError
from training import page
from training.charts import Charts, draw
from training.history import REPORT, History

GENERATOR = '<meta name="generator" content="plainGPT">'  # by which our pages know each other


def write_report(histories: Sequence[History], path: Path) -> Path:
    """Write the report of these runs to `path`, as a whole or not at all; returns `path`.

    Raises ImportError without bokeh, OSError if not writable.
    """
    text = make_page(histories, draw(histories))
    replace_file(path, text.encode("utf-8", "replace"))
    return path


def check_page(path: Path) -> None:
    """Raises ConfigError unless a page of ours may be written there: over another one of ours, but
    over nothing else."""
    if not path.parent.is_dir():
        raise ConfigError(f"out={path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"out={path}: is a folder; name a file in it")
    if path.exists():
        ours = path.is_file() and GENERATOR.encode() in path.read_bytes()[:1000]
        if not ours:
            raise ConfigError(f"out={path}: exists, and is no page of ours; name another file")


def try_report(history: History, say: Say) -> bool:
    """Write a run's own report, with what its files have grown by. Whatever goes wrong is one line
    and never stops the run; False if there will be no report, for want of a package."""
    try:
        history.update()
        write_report([history], history.folder / REPORT)
    except ImportError:
        say(f"note: no {REPORT} without the package bokeh: `pip install bokeh` brings it")
        return False
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        say(f"note: no {REPORT} this time ({type(error).__name__}: {reason})")
    return True


def make_page(histories: Sequence[History], charts: Charts) -> str:
    """The whole page."""
    only = histories[0] if len(histories) == 1 else None
    title = " + ".join(history.name for history in histories)
    blocks = [
        page.heading(title),
        page.status(only) if only else page.comparison(histories),
        page.tiles(only) if only else "",
        page.curves(histories, charts),
        page.events(histories),
        page.samples(histories),
        page.passage(only) if only else "",
        page.commands(only) if only else "",
        page.config_table(only.config) if only else page.config_differences(histories),
        page.surroundings(only) if only else "",
    ]
    here = Path(__file__).parent
    style = (here / "report.css").read_text(encoding="utf-8")
    script = (here / "report.js").read_text(encoding="utf-8")
    body = "\n".join(block for block in blocks if block)
    return (
        '<!doctype html>\n<html lang="en" data-theme="light"><head><meta charset="utf-8">\n'
        f"{GENERATOR}\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{page.escape(title)}</title>\n<style>\n{style}</style>\n</head><body>\n{body}\n"
        f"{charts.library}\n{charts.script}\n<script>\n{script}</script>\n</body></html>\n"
    )
