"""The blocks of the report's page: HTML made from what a run's folder tells."""

from __future__ import annotations

import html
import json
import math
import shlex
import time
from collections.abc import Iterable, Sequence
from typing import Any

from training.charts import COLOURS, NOTE_COLOUR, START_COLOUR, Charts, note_texts, restart_texts
from training.config import OPTIONS, Config
from training.console import clock_text, percent, short
from training.history import MOST_SNAPSHOTS, Entry, History


def status(history: History) -> str:
    """How far the run is, and when that was written."""
    steps, last = history.max_steps, history.last_step
    written = time.strftime("%Y-%m-%d %H:%M")
    if last >= steps:
        state, again = "all steps done", ""
    else:
        state, again = f"{last / steps:.0%}", ", and anew at every evaluation: reload for it"
    return f'<p class="soft">step {last:,} of {steps:,}, {state}; written {written}{again}</p>'


def tiles(history: History) -> str:
    """The figures one looks for first."""
    best, last = history.best, history.steps[-1] if history.steps else {}
    shown = [
        (figure(best, "val_loss", ".4f"), f"best validation loss, step {best['step']:,}")
        if best
        else ("-", "validation loss"),
        (figure(best, "bits_per_byte", ".4f"), "bits per byte, at that step"),
        (figure(last, "loss", ".4f"), "training loss, last step"),
        (short(last.get("tokens_per_second") or math.nan), "tokens per second"),
        (percent(last.get("mfu")), "MFU"),
        (clock_text(last.get("seconds", math.nan)), "trained"),
        (short(last.get("tokens", 0)), "tokens seen"),
        (f"{history.last_step:,}", f"of {history.max_steps:,} steps"),
    ]
    boxes = (f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for value, name in shown)
    return f'<div class="tiles">{"".join(boxes)}</div>'


def figure(entry: Entry | None, name: str, shape: str) -> str:
    """A value of an entry as text; "-" if it is not there or not finite."""
    value = (entry or {}).get(name)
    return "-" if value is None else format(value, shape)


def comparison(histories: Sequence[History]) -> str:
    """A line of final figures for each run."""
    rows = []
    for number, history in enumerate(histories):
        best, last = history.best, history.steps[-1] if history.steps else {}
        rows.append(
            [
                key(COLOURS[number % len(COLOURS)], "", history.name),
                f"{history.last_step:,} of {history.max_steps:,}",
                figure(best, "val_loss", ".4f"),
                figure(best, "bits_per_byte", ".4f"),
                clock_text(last.get("seconds", math.nan)),
                short(last.get("tokens_per_second") or math.nan),
            ]
        )
    titles = ["run", "steps", "best loss", "bits per byte", "trained", "tokens/s"]
    return table(titles, rows)


def curves(histories: Sequence[History], charts: Charts) -> str:
    """The buttons, the legend and all charts."""
    axis = choice("axis", {"step": "steps", "tokens": "tokens", "minutes": "time"}, "step")
    scale = choice("scale", {"linear": "linear", "log": "log"}, "linear")
    rest = (f"<div>{div}</div>" for name, div in charts.divs.items() if "loss" not in name)
    return (
        f'<h2>Loss</h2><div class="bar">{axis}{scale}{legend(histories)}</div>\n'
        f'<div class="chart" id="loss-linear">{charts.divs["loss-linear"]}</div>\n'
        f'<div class="chart" id="loss-log" hidden>{charts.divs["loss-log"]}</div>\n'
        f'<div class="charts">{"".join(rest)}</div>'
    )


def heading(title: str) -> str:
    """The page's title, and beside it the choice of its colours."""
    theme = choice("theme", {"light": "light", "dark": "dark"}, "light")
    return f"<header><h1>{escape(title)}</h1>{theme}</header>"


def choice(sets: str, values: dict[str, str], pressed: str) -> str:
    """Buttons of which one is pressed."""
    buttons = (
        f'<button type="button" data-sets="{sets}" data-value="{value}" '
        f'aria-pressed="{str(value == pressed).lower()}">{text}</button>'
        for value, text in values.items()
    )
    return f'<div class="choice" role="group" aria-label="{sets}">{"".join(buttons)}</div>'


def legend(histories: Sequence[History]) -> str:
    if len(histories) > 1:
        keys = [(COLOURS[n % len(COLOURS)], "", h.name) for n, h in enumerate(histories)]
        keys.append(("var(--soft)", "thin", "training; dots: validation"))
    else:
        keys = [(COLOURS[0], "", "training, smoothed"), (COLOURS[0], "thin", "as logged")]
        keys.append((COLOURS[1], "", "validation"))
    if any(restart_texts(history) for history in histories):
        keys.append((START_COLOUR, "dashed", "taken up again"))
    if any(note_texts(history) for history in histories):
        keys.append((NOTE_COLOUR, "dashed", "a warning"))
    return f'<div class="legend">{"".join(key(*shown) for shown in keys)}</div>'


def key(colour: str, kind: str, text: str) -> str:
    """A piece of a line, and what it stands for."""
    return f'<span class="key"><i class="{kind}" style="color:{colour}"></i>{escape(text)}</span>'


def events(histories: Sequence[History]) -> str:
    """Warnings and restarts, in the order of steps."""
    rows = []
    for history in histories:
        name = [escape(history.name)] if len(histories) > 1 else []
        for entry in sorted([*history.starts, *history.notes], key=lambda e: e.get("time", 0)):
            first = entry.get("attempt", 1) == 1
            what = entry.get("note") or ("began" if first else "taken up again")
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.get("time", 0)))
            when = f'<span class="mono">{when}</span>'
            rows.append([*name, f"{entry['step']:,}", when, escape(str(what))])
        for former, later in zip(history.starts, history.starts[1:], strict=False):
            if (between := later["attempt"] - former["attempt"] - 1) > 0:
                rows.append([*name, "", "", f"{between:,} more starts are not listed"])
    titles = [*(["run"] if len(histories) > 1 else []), "step", "when", "what"]
    return f"<h2>What happened</h2>{table(titles, rows)}" if rows else ""


def samples(histories: Sequence[History]) -> str:
    """The same prompt at each evaluation; of several runs, at each one's last."""
    if len(histories) > 1:
        title = "Samples, the last of each run"
        shown = [
            (history.name, history.snapshots[-1]) for history in histories if history.snapshots
        ]
    else:
        title = "Samples from one prompt, the newest first"
        losses = {entry["step"]: entry["val_loss"] for entry in histories[0].evaluations}
        shown = []
        for entry in reversed(spread(histories[0].snapshots)):
            loss = losses.get(entry["step"])
            name = f"step {entry['step']:,}" + ("" if loss is None else f", loss {loss:.3f}")
            shown.append((name, entry))
    cards = []
    for name, entry in shown:
        prompt, text = entry.get("prompt", ""), entry.get("sample", "")
        marked = f"<mark>{escape(prompt)}</mark>{escape(text.removeprefix(prompt))}"
        cards.append(f'<div class="card"><b>{escape(name)}</b><pre>{marked}</pre></div>')
    if not cards:
        return ""
    return f'<h2>{title}</h2><div class="cards">{"".join(cards)}</div>'


def passage(history: History) -> str:
    """A validation passage coloured by loss, at each evaluation."""
    shown = [entry for entry in spread(history.snapshots) if entry.get("passage")]
    if not shown:
        return ""
    worst = math.log(history.config.model.vocab_size or 2)
    data = {
        "worst": worst,
        "snapshots": [
            {"title": f"step {entry['step']:,}", "tokens": entry["passage"]} for entry in shown
        ],
    }
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    last = len(shown) - 1
    slider = (
        f'<input type="range" id="evaluation" min="0" max="{last}" value="{last}" '
        'aria-label="evaluation">'
        if last
        else ""
    )
    return (
        "<h2>A validation passage, coloured by the loss of each token</h2>"
        '<p class="soft">Point at a token, or use the arrow keys: its loss and the likeliest in '
        "its place. The slider goes through the evaluations.</p>"
        f'<div class="bar">{slider}<b id="passage-step"></b><span class="soft">0 '
        f'<span class="scale"></span> {worst:.1f} nats = ln V, knowing nothing</span></div>'
        '<div id="passage" class="mono" tabindex="0"></div><div id="token" role="status"></div>'
        f'<script type="application/json" id="passage-data">{text}</script>'
    )


def commands(history: History) -> str:
    """What to type to go on and to sample."""
    run = shlex.quote(str(history.folder))
    prompt = history.config.log.sample_prompt
    sample = f"python sample.py {run}" + (f" --prompt {shlex.quote(prompt)}" if prompt else "")
    start = history.starts[-1]["start"] if history.starts else {}
    resume = start.get("command") or "python train.py CONFIG"
    lines = [
        ("go on where it stopped (a finished run says so)", resume),
        ("sample", sample),
        ("this report, or a comparison with another run", f"python -m tools.report {run}"),
    ]
    shown = (f'<div class="command">{name}<pre>{escape(text)}</pre></div>' for name, text in lines)
    return f"<h2>Commands</h2>{''.join(shown)}"


def config_table(config: Config) -> str:
    """Every option by section; marked where it is not the default."""
    sections: dict[str, list[str]] = {}
    for option in OPTIONS.values():
        value = getattr(getattr(config, option.section), option.name)
        left_open = option.default in (None, "auto", "")  # filled in when the run began
        changed = value != option.default and not left_open
        default = "" if value == option.default else escape(shown_value(option.default))
        sections.setdefault(option.section, []).append(
            f'<tr class="{"changed" if changed else "same"}" title="{escape(option.help)}">'
            f"<td>{option.name}</td><td>{escape(shown_value(value))}</td>"
            f'<td class="soft">{default}</td></tr>'
        )
    tables = (
        f"<table><tr><th>{name}</th><th></th><th>default</th></tr>{''.join(rows)}</table>"
        for name, rows in sections.items()
    )
    return (
        '<h2>Config</h2><p class="soft">Marked: other than the default. '
        '<label class="bar-only"><input type="checkbox" id="changes-only"> these only</label></p>'
        f'<div class="sections">{"".join(tables)}</div>'
    )


def config_differences(histories: Sequence[History]) -> str:
    """Options in which the runs differ."""
    rows = []
    for option in OPTIONS.values():
        values = [getattr(getattr(h.config, option.section), option.name) for h in histories]
        if any(value != values[0] for value in values):
            rows.append([option.full_name, *(escape(shown_value(value)) for value in values)])
    names = [escape(history.name) for history in histories]
    return f"<h2>Where their configs differ</h2>{table(['option', *names], rows)}"


def surroundings(history: History) -> str:
    """The data and the machine, as the last process found them."""
    if not history.starts:
        return ""
    start = history.starts[-1]["start"]
    tables = []
    for name in ("data", "environment"):
        rows = [[escape(key), escape(shown_value(v))] for key, v in start.get(name, {}).items()]
        tables.append(f"<div><h2>{name.capitalize()}</h2>{table([], rows)}</div>")
    return f'<div class="columns">{"".join(tables)}</div>'


# Small things


def table(titles: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def spread(entries: Sequence[Entry]) -> list[Entry]:
    """At most MOST_SNAPSHOTS, evenly, with the first and the last."""
    if len(entries) <= MOST_SNAPSHOTS:
        return list(entries)
    last = len(entries) - 1
    return [entries[i * last // (MOST_SNAPSHOTS - 1)] for i in range(MOST_SNAPSHOTS)]


def shown_value(value: Any) -> str:
    """A value as it would be typed; a whole number with its thousands apart."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return f"{value:,}" if isinstance(value, int) else str(value)


def escape(text: str) -> str:
    return html.escape(str(text))
