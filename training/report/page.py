"""Write report.html: the data of a run in an HTML template.

template.html is the page, filled in the browser by charts.js and report.js. tools/report puts
several runs in it, or sends it the data while the runs train. Python computes data and builds no
HTML, so what a model or a user wrote stays text.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from cli.command import Say
from cli.files import replace_file
from cli.options import ConfigError
from cli.terminal import clock_text, counted
from training.config import OPTIONS, Config
from training.console import percent, short
from training.report.history import REPORT, Entry, History

HERE = Path(__file__).parent
GENERATOR = '<meta name="generator" content="plainGPT">'  # in every page that we write
ATTENTION = "attention.html"  # written into the run's folder by tools.attention
# Columns of metrics.jsonl that are drawn; charts.js says how.
TRAINING = ("loss", "mean", "lr", "grad_norm", "tokens_per_second", "mfu")
VALIDATION = ("val_loss", "perplexity", "bits_per_byte")


def write_report(history: History, path: Path) -> Path:
    """Write the report of a run to `path` and return `path`. Raises OSError if that fails."""
    data, attention = page_data(history), history.folder / ATTENTION
    if attention.is_file():
        data["attention"] = quote(os.path.relpath(attention, path.parent))
    return write_page(data, path)


def write_page(data: dict[str, Any], path: Path) -> Path:
    """Write a page to `path`, completely or not at all, and return `path`.

    Raises OSError if it cannot be written.
    """
    replace_file(path, page_text(data).encode("utf-8", "replace"))
    return path


def page_text(data: dict[str, Any], nonce: str = "", live: str = "") -> str:
    """Return the HTML page that shows `data`.

    nonce: of its scripts, for a server's headers. live: JavaScript that gets the data later.
    """
    files = {"CHARTS": "charts.js", "SCRIPT": "report.js"}
    parts = {name: (HERE / file).read_text(encoding="utf-8") for name, file in files.items()}
    return fill_template(
        HERE / "template.html", data["title"], data, NONCE=nonce, LIVE=live, **parts
    )


def try_report(history: History, say: Say) -> None:
    """Update the report in the folder of a run. A failure prints one line and stops nothing."""
    try:
        history.update()
        write_report(history, history.folder / REPORT)
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


def page_data(history: History) -> dict[str, Any]:
    """Return all that report.js shows. A part that is empty or missing is left out of the page."""
    start = newest_start(history)
    return {
        "title": history.name,
        "runs": [curves(history)],
        "events": events(history),
        "samples": samples(history),
        "status": status(history),
        "about": about(history),
        "headlines": headlines(history),
        "passage": passage(history),
        "commands": commands(history),
        "config": config_options(history.config),
        "data": [[name, shown_value(v)] for name, v in start.get("data", {}).items()],
        "environment": [[name, shown_value(v)] for name, v in start.get("environment", {}).items()],
    }


def newest_start(history: History) -> Entry:
    """Return what the newest process logged about its data and machine."""
    return history.starts[-1]["start"] if history.starts else {}


# Headline numbers


def status(history: History) -> str:
    """Return the state, the step and the time of the last entry in one line."""
    steps, last, state = history.max_steps, history.last_step, history.state
    parts = [history.ended if state == "failed" and history.ended else state]
    parts.append(f"step {last:,} of {steps:,}" + (f" ({last / steps:.0%})" if last < steps else ""))
    if state == "running" and 0 < last < steps:
        seconds = (history.training.last or {}).get("seconds", 0.0)
        parts.append(f"{clock_text(seconds / last * (steps - last))} of training left")
    if history.last_time:
        parts.append(f"last entry {minute_text(history.last_time)}")
    return ", ".join(parts)


def minute_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def about(history: History) -> list[list[str]]:
    """Return what is trained, on what, and where: rows of name and text."""
    config, start = history.config, newest_start(history)
    model, data, machine = config.model, start.get("data", {}), start.get("environment", {})
    shape = [f"{counted(model.n_layers, 'layer')} of width {model.d_model}"]
    shape.append(f"context {model.context_length:,}")
    text = [str(data.get("source", config.data.source))]
    text.append(f"tokenizer {data.get('tokenizer', config.data.tokenizer)}")
    device = [str(machine.get("device", config.run.device)), config.run.dtype]
    if is_whole(count := machine.get("parameters")):
        shape.insert(0, f"{short(count)} parameters")
    if is_whole(count := data.get("tokens to train")):
        text.insert(1, f"{short(count)} tokens")
    if is_whole(count := machine.get("ranks")) and count > 1:
        device.append(f"{count} ranks")
    rows = {"model": shape, "data": text, "device": device}
    return [[name, ", ".join(parts)] for name, parts in rows.items()]


def is_whole(value: Any) -> bool:
    return type(value) is int


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


def decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


# What the charts draw


def curves(history: History) -> dict[str, Any]:
    """Return the columns that the charts draw, and the events they mark."""
    training = [{**entry, "mean": mean} for entry, mean in history.training.curve()]
    return {
        "name": history.name,
        "bytes_per_token": newest_start(history).get("data", {}).get("bytes per token"),
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


def events(history: History) -> list[list[str]]:
    """Return rows of starts, ends and warnings in order of time: step, time, event."""
    rows = []
    found = [*history.starts, *history.notes, *history.ends]
    for entry in sorted(found, key=lambda entry: entry.get("time", 0)):
        first = entry.get("attempt", 1) == 1
        event = entry.get("note") or entry.get("end") or ("started" if first else "resumed")
        rows.append([f"{entry['step']:,}", minute_text(entry.get("time", 0)), event])
    for former, later in zip(history.starts, history.starts[1:], strict=False):
        if (between := later["attempt"] - former["attempt"] - 1) > 0:
            rows.append(["", "", f"{between:,} more starts are not listed"])
    return rows


def samples(history: History) -> list[dict[str, str]]:
    """Return the samples, newest first."""
    losses = {entry["step"]: entry["val_loss"] for entry in history.validation.entries}
    found = []
    for entry in reversed(history.snapshots):
        loss = losses.get(entry["step"])
        name = f"step {entry['step']:,}" + ("" if loss is None else f", loss {loss:.3f}")
        found.append(sample(name, entry))
    return found


def sample(name: str, entry: Entry) -> dict[str, str]:
    return {"name": name, "prompt": entry.get("prompt", ""), "text": entry.get("sample", "")}


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
    run, parent = shlex.quote(str(history.folder)), shlex.quote(str(history.folder.parent))
    prompt = history.config.log.sample_prompt
    option = f" --prompt {shlex.quote(prompt)}" if prompt else ""
    return [
        ("resume", newest_start(history).get("command") or "python train.py CONFIG"),
        ("sample", f"python sample.py {run}{option}"),
        ("try it in the playground", f"python -m tools.play {run}"),
        ("see what each head attends to", f"python -m tools.attention {run}"),
        ("this report; add more runs to compare them", f"python -m tools.report {run}"),
        (
            "follow all runs of the folder while they train",
            f"python -m tools.report {parent} --serve",
        ),
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


def shown_value(value: Any) -> str:
    """Return a value as it would be typed, an integer with thousands separators."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return f"{value:,}" if isinstance(value, int) else str(value)
