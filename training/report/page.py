"""Write report.html: the data of one run, or of several to compare, in an HTML template.

template.html is the page, filled in the browser by charts.js and report.js. Python computes data
and builds no HTML, so what a model or a user wrote stays text.
"""

from __future__ import annotations

import html
import json
import math
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cli.command import Say
from cli.files import replace_file
from cli.options import ConfigError
from cli.terminal import clock_text
from training.config import OPTIONS, Config
from training.console import percent, short
from training.report.history import REPORT, Entry, History

HERE = Path(__file__).parent
GENERATOR = '<meta name="generator" content="plainGPT">'  # in every page that we write
# Columns of metrics.jsonl that are drawn; charts.js says how.
TRAINING = ("loss", "smoothed", "lr", "grad_norm", "tokens_per_second", "mfu")
VALIDATION = ("val_loss", "perplexity", "bits_per_byte")


def write_report(histories: Sequence[History], path: Path) -> Path:
    """Write the report of these runs to `path`, completely or not at all, and return `path`.

    Raises OSError if it cannot be written.
    """
    data = page_data(histories)
    scripts = {"CHARTS": "charts.js", "SCRIPT": "report.js"}
    parts = {name: (HERE / file).read_text(encoding="utf-8") for name, file in scripts.items()}
    text = fill_template(HERE / "template.html", data["title"], data, **parts)
    replace_file(path, text.encode("utf-8", "replace"))
    return path


def try_report(history: History, say: Say) -> None:
    """Update the report in the folder of a run. A failure prints one line and stops nothing."""
    try:
        history.update()
        write_report([history], history.folder / REPORT)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        say(f"note: {REPORT} was not updated ({type(error).__name__}: {reason})")


def check_page(path: Path) -> None:
    """Raise ConfigError if a page at `path` would fail or replace a file that is not ours."""
    if not path.parent.is_dir():
        raise ConfigError(f"out={path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"out={path}: is a folder; name a file in it")
    if path.exists():
        ours = path.is_file() and GENERATOR.encode() in path.read_bytes()[:1000]
        if not ours:
            raise ConfigError(
                f"out={path}: already exists and was not written by plainGPT; choose another file"
            )


def fill_template(template: Path, title: str, data: Any, **parts: str) -> str:
    """Return an HTML template with @TITLE@, @DATA@ (as JSON) and @NAME@ of each part replaced.

    @COLORS@ and @THEME@ are what all our pages share: the colors, and the light and dark buttons.
    @STYLE@ is the style of the report.
    """
    shared = {"COLORS": "theme.css", "THEME": "theme.js", "STYLE": "report.css"}
    parts |= {name: (HERE / file).read_text(encoding="utf-8") for name, file in shared.items()}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    values = {"TITLE": html.escape(title), "DATA": text.replace("<", "\\u003c"), **parts}
    # In one pass: a sample may contain "@TITLE@". "<" is escaped because of "</script>".
    pattern = "@(" + "|".join(values) + ")@"
    return re.sub(pattern, lambda match: values[match[1]], template.read_text(encoding="utf-8"))


def page_data(histories: Sequence[History]) -> dict[str, Any]:
    """Return all that report.js shows. A part that is empty or missing is left out of the page."""
    data = {
        "title": " + ".join(history.name for history in histories),
        "runs": [curves(history) for history in histories],
        "events": events(histories),
        "samples": samples(histories),
    }
    if len(histories) > 1:
        return {**data, "comparison": comparison(histories), "differences": differences(histories)}
    (history,) = histories
    start = history.starts[-1]["start"] if history.starts else {}
    return {
        **data,
        "status": status(history),
        "headlines": headlines(history),
        "passage": passage(history),
        "commands": commands(history),
        "config": config_options(history.config),
        "data": [[name, shown_value(v)] for name, v in start.get("data", {}).items()],
        "environment": [[name, shown_value(v)] for name, v in start.get("environment", {}).items()],
    }


# Headline numbers


def status(history: History) -> str:
    steps, last = history.max_steps, history.last_step
    done = last >= steps
    state = "all steps done" if done else f"{last / steps:.0%}"
    later = "" if done else "; updated at every evaluation (reload the page)"
    written = time.strftime("%Y-%m-%d %H:%M")
    return f"step {last:,} of {steps:,}, {state}; written {written}{later}"


def headlines(history: History) -> dict[str, str]:
    best, last = history.best or {}, history.training.last or {}
    speed = last.get("tokens_per_second")
    return {
        "best validation loss": decimals(best.get("val_loss")),
        "best bits per byte": decimals(best.get("bits_per_byte")),
        "best at step": f"{best['step']:,}" if best else "-",
        "last training loss": decimals(last.get("loss")),
        "tokens per second": short(speed) if speed else "-",
        "MFU": percent(last.get("mfu")),
        "training time": clock_text(last.get("seconds", 0.0)),
        "tokens seen": short(last.get("tokens", 0)),
    }


def comparison(histories: Sequence[History]) -> list[list[str]]:
    """Return a row of headline numbers per run, below the titles."""
    rows = [["run", *headlines(histories[0]), "steps"]]
    for history in histories:
        steps = f"{history.last_step:,} of {history.max_steps:,}"
        rows.append([history.name, *headlines(history).values(), steps])
    return rows


def decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


# What the charts draw


def curves(history: History) -> dict[str, Any]:
    """Return the columns that the charts draw, and the events they mark."""
    training = [{**entry, "smoothed": mean} for entry, mean in history.training.curve()]
    return {
        "name": history.name,
        "training": columns(training, TRAINING),
        "validation": columns(history.validation.entries, VALIDATION),
        "marks": marks(history),
    }


def columns(entries: Sequence[Entry], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return {name: values}, and the three possible x axes."""
    return {
        "step": [entry["step"] for entry in entries],
        "tokens": [rounded(entry["tokens"] / 1e6) for entry in entries],
        "minutes": [rounded(entry["seconds"] / 60) for entry in entries],
        **{name: [rounded(entry.get(name)) for entry in entries] for name in names},
    }


def rounded(value: float | None) -> float | None:
    """Keep six digits: the page is smaller, and no reader sees more."""
    return None if value is None else float(f"{value:.6g}")


def marks(history: History) -> list[dict[str, Any]]:
    """Return where the run was resumed and where it warned."""
    found = [(entry["step"], "resumed", "resumed") for entry in history.starts[1:]]
    found += [(entry["step"], "warning", entry["note"]) for entry in history.notes]
    logged = [{"step": 0, "tokens": 0, "seconds": 0.0}, *history.training.entries]
    known = {name: [entry[name] for entry in logged] for name in ("step", "tokens", "seconds")}
    return [
        {
            "kind": kind,
            "text": text,
            "step": step,
            "tokens": rounded(np.interp(step, known["step"], known["tokens"]) / 1e6),
            "minutes": rounded(np.interp(step, known["step"], known["seconds"]) / 60),
        }
        for step, kind, text in found
    ]


# Below the charts


def events(histories: Sequence[History]) -> list[list[str]]:
    """Return rows of starts, resumes and warnings in order of time: run, step, time, event."""
    rows = []
    for history in histories:
        for entry in sorted([*history.starts, *history.notes], key=lambda e: e.get("time", 0)):
            first = entry.get("attempt", 1) == 1
            event = entry.get("note") or ("started" if first else "resumed")
            clock = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.get("time", 0)))
            rows.append([history.name, f"{entry['step']:,}", clock, event])
        for former, later in zip(history.starts, history.starts[1:], strict=False):
            if (between := later["attempt"] - former["attempt"] - 1) > 0:
                rows.append([history.name, "", "", f"{between:,} more starts are not listed"])
    return rows


def samples(histories: Sequence[History]) -> list[dict[str, str]]:
    """Return one run's samples, newest first; of several runs the latest of each."""
    if len(histories) > 1:
        shown = [(run.name, run.snapshots[-1]) for run in histories if run.snapshots]
    else:
        losses = {entry["step"]: entry["val_loss"] for entry in histories[0].validation.entries}
        shown = []
        for entry in reversed(histories[0].snapshots):
            loss = losses.get(entry["step"])
            name = f"step {entry['step']:,}" + ("" if loss is None else f", loss {loss:.3f}")
            shown.append((name, entry))
    return [
        {"name": name, "prompt": entry.get("prompt", ""), "text": entry.get("sample", "")}
        for name, entry in shown
    ]


def passage(history: History) -> dict[str, Any]:
    """Return a validation passage with the loss of each token, as of each evaluation."""
    return {
        "worst": math.log(history.config.model.vocab_size or 2),
        "snapshots": [
            {"title": f"step {entry['step']:,}", "tokens": entry["passage"]}
            for entry in history.snapshots
            if entry.get("passage")
        ],
    }


def commands(history: History) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs."""
    run = shlex.quote(str(history.folder))
    prompt = history.config.log.sample_prompt
    option = f" --prompt {shlex.quote(prompt)}" if prompt else ""
    start = history.starts[-1]["start"] if history.starts else {}
    return [
        ("resume", start.get("command") or "python train.py CONFIG"),
        ("sample", f"python sample.py {run}{option}"),
        ("this report; add more runs to compare them", f"python -m tools.report {run}"),
    ]


def config_options(config: Config) -> dict[str, list[dict[str, Any]]]:
    """Return all options by section; `changed` where the value is not the default."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for option in OPTIONS.values():
        value = getattr(getattr(config, option.section), option.name)
        differs = value != option.default
        derived = option.default in (None, "auto", "")  # filled in when the run began
        sections.setdefault(option.section, []).append(
            {
                "name": option.name,
                "value": shown_value(value),
                "default": shown_value(option.default) if differs else "",
                "changed": differs and not derived,
                "help": option.help,
            }
        )
    return sections


def differences(histories: Sequence[History]) -> list[list[str]]:
    """Return a row for each option in which the runs differ, below the titles."""
    rows = [["option", *(history.name for history in histories)]]
    for option in OPTIONS.values():
        values = [getattr(getattr(h.config, option.section), option.name) for h in histories]
        if any(value != values[0] for value in values):
            rows.append([option.full_name, *map(shown_value, values)])
    return rows


def shown_value(value: Any) -> str:
    """Return a value as it would be typed, an integer with thousands separators."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return f"{value:,}" if isinstance(value, int) else str(value)
