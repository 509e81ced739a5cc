"""The report's curves, drawn by bokeh: figures by name, and what their page needs to show them.

Every figure has columns `step`, `tokens` and `minutes`; the page's buttons choose which of them is
the horizontal axis. The loss is there twice, with a linear and with a logarithmic axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.history import Entry, History, thinned

Figure = Any  # bokeh's; bokeh is imported where it is used: a run can do without

# Told apart by most colour-blind readers, and on white and black alike.
COLOURS = ("#3b7ddd", "#e8590c", "#2f9e44", "#9c36b5", "#c2255c", "#868e96")
AXES = {"step": "step", "tokens": "tokens (millions)", "minutes": "minutes of training"}
MOST_POINTS = 1500  # a curve is drawn with
TIMES = [("step", "@step{0,0}"), ("tokens", "@tokens{0.00} M"), ("time", "@minutes{0.0} min")]
NOTE_COLOUR, START_COLOUR = "#c2255c", "#868e96"

# What else is drawn of each logged step: column -> (title, factor, how the value is written).
OTHER_CURVES = {
    "lr": ("learning rate", 1.0, "0.00e+0"),  # the schedule's factor times optim.lr
    "grad_norm": ("gradient norm, before clipping", 1.0, "0.000"),
    "tokens_per_second": ("tokens per second", 1.0, "0,0"),
    "mfu": ("MFU, % of the hardware's peak", 100.0, "0.0"),
}

FONT = "system-ui, sans-serif"
PLAIN_NUMBER = "return String(Number(tick.toPrecision(3)))"  # 0.0003, not 3.000e-4

# What is pointed at is told in a box of bokeh's, which is white unless told otherwise from inside.
TIP_STYLE = """<style>
:host { background: var(--page) !important; color: var(--ink) !important;
        border-color: var(--line) !important; border-radius: 8px; padding: 6px 10px !important; }
td { padding: 0 0 0 10px; text-align: right; font-variant-numeric: tabular-nums; }
td:first-child { padding: 0; text-align: left; color: var(--soft); }
</style>"""


@dataclass(frozen=True)
class Charts:
    """Parts of a page: the library, the script that fills the divs, and the divs by name."""

    library: str
    script: str
    divs: dict[str, str]


def draw(histories: Sequence[History]) -> Charts:
    """All curves of these runs, overlaid. Raises ImportError without bokeh."""
    from bokeh.embed import components
    from bokeh.resources import Resources

    figures = {
        "loss-linear": loss_figure(histories, "linear"),
        "loss-log": loss_figure(histories, "log"),
    }
    for column, (title, factor, shape) in OTHER_CURVES.items():
        if any(entry.get(column) is not None for h in histories for entry in h.steps):
            figures[column] = small_figure(histories, column, title, factor, shape)
    if any(entry.get("bits_per_byte") for h in histories for entry in h.evaluations):
        figures["bits_per_byte"] = bits_figure(histories)
    script, divs = components(figures)
    return Charts(Resources(mode="inline", components=["bokeh"]).render_js(), script, divs)


# Figures


def loss_figure(histories: Sequence[History], axis: str) -> Figure:
    """Training loss as logged and smoothed, validation loss at each evaluation."""
    plot = new_figure(f"loss-{axis}", 380, y_axis_type=axis)
    for number, history in enumerate(histories):
        train, validation = colours_of(number, len(histories))
        entries, smooth = history.training.rows()
        rows = drawn_rows(entries, "loss")
        rows["smooth"] = [smooth[i] for i in rows.pop("index")]
        hover = [*TIMES, ("loss", "@loss{0.0000}"), ("smoothed", "@smooth{0.0000}")]
        columns = source(rows, history)
        plot.line("step", "loss", source=columns, color=train, alpha=0.35, line_width=1)
        line = plot.line("step", "smooth", source=columns, color=train, line_width=2)
        add_hover(plot, line, hover, "vline")
        rows = drawn_rows(history.evaluations, "val_loss", "perplexity", "bits_per_byte")
        del rows["index"]
        columns = source(rows, history)
        plot.line("step", "val_loss", source=columns, color=validation, line_width=2)
        dots = plot.scatter("step", "val_loss", source=columns, color=validation, size=7)
        hover = [*TIMES, ("validation loss", "@val_loss{0.0000}")]
        hover += [("perplexity", "@perplexity{0.00}"), ("bits per byte", "@bits_per_byte{0.0000}")]
        add_hover(plot, dots, hover, "mouse")
    for history in histories:
        add_events(plot, history)
    return plot


def small_figure(
    histories: Sequence[History], column: str, title: str, factor: float, shape: str
) -> Figure:
    """One column of what is logged at each step."""
    from bokeh.models import CustomJSTickFormatter, NumeralTickFormatter

    plot = new_figure(column, 220, title)
    plot.y_range.start = 0  # a speed that hardly moves shall look like one
    if column == "lr":
        plot.yaxis.formatter = CustomJSTickFormatter(code=PLAIN_NUMBER)
    if column == "tokens_per_second":
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]a")  # 10k
    for number, history in enumerate(histories):
        rows = drawn_rows(history.steps, column)
        del rows["index"]
        rows[column] = [None if y is None else factor * y for y in rows[column]]
        colour = colours_of(number, len(histories))[0]
        line = plot.line("step", column, source=source(rows, history), color=colour, line_width=2)
        add_hover(plot, line, [*TIMES, (title, f"@{column}{{{shape}}}")], "vline")
    for history in histories:
        add_events(plot, history)
    return plot


def bits_figure(histories: Sequence[History]) -> Figure:
    """Bits per byte of the validation text: comparable between tokenizers."""
    plot = new_figure("bits_per_byte", 220, "validation, bits per byte")
    for number, history in enumerate(histories):
        rows = drawn_rows(history.evaluations, "bits_per_byte")
        del rows["index"]
        colour, columns = colours_of(number, len(histories))[1], source(rows, history)
        plot.line("step", "bits_per_byte", source=columns, color=colour, line_width=2)
        dots = plot.scatter("step", "bits_per_byte", source=columns, color=colour, size=7)
        shape = "@bits_per_byte{0.0000}"
        add_hover(plot, dots, [*TIMES, ("bits per byte", shape)], "mouse")
    return plot


def new_figure(name: str, height: int, title: str = "", **options: Any) -> Figure:
    """An empty figure as wide as its place; colours of text and grid are the page's."""
    from bokeh.models import NumeralTickFormatter
    from bokeh.plotting import figure

    plot = figure(
        name=name,
        title=title or None,
        height=height,
        sizing_mode="stretch_width",
        tools="xbox_zoom,reset,save",
        active_drag=None,  # a finger that drags scrolls the page
        toolbar_location="above" if height > 300 else None,
        x_axis_label=AXES["step"],
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **options,
    )
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    plot.xgrid.grid_line_color = None
    plot.xaxis.ticker.desired_num_ticks = 8 if height > 300 else 5
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_style = "normal"
    if title:
        plot.title.text_font = FONT
    plot.toolbar.logo = None
    plot.min_border_right = 16
    plot.min_border_left = 48  # charts below each other begin at one line
    return plot


def colours_of(number: int, runs: int) -> tuple[str, str]:
    """(training, validation): two colours for a single run, one for each of several."""
    if runs == 1:
        return COLOURS[0], COLOURS[1]
    return COLOURS[number % len(COLOURS)], COLOURS[number % len(COLOURS)]


def add_hover(plot: Figure, line: Any, tips: list[tuple[str, str]], mode: str) -> None:
    """Where the line is pointed at, these: (name, value with @column in it)."""
    from bokeh.models import HoverTool

    rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in tips)
    box = f"<b>@run</b><table>{rows}</table>{TIP_STYLE}"
    tool = HoverTool(renderers=[line], tooltips=box, mode=mode, show_arrow=False, visible=False)
    plot.add_tools(tool)


def add_events(plot: Figure, history: History) -> None:
    """Vertical lines where the run was taken up again, and where it said something."""
    import numpy as np

    logged = [{"step": 0, "tokens": 0, "seconds": 0.0}, *history.steps]
    known = {name: [entry[name] for entry in logged] for name in ("step", "tokens", "seconds")}
    kinds = [(START_COLOUR, restart_texts(history)), (NOTE_COLOUR, note_texts(history))]
    for colour, events in kinds:
        if events:
            steps = [step for step, _ in events]
            columns = {
                "step": steps,
                "tokens": np.interp(steps, known["step"], known["tokens"]) / 1e6,
                "minutes": np.interp(steps, known["step"], known["seconds"]) / 60,
                "text": [text for _, text in events],
            }
            lines = plot.vspan("step", source=source(columns, history), color=colour)
            lines.glyph.line_dash, lines.glyph.line_width = "dashed", 1.5
            add_hover(plot, lines, [("step", "@step{0,0}"), ("", "@text")], "mouse")


def restart_texts(history: History) -> list[tuple[int, str]]:
    """(step, what happened) for each process but the first."""
    return [(entry["step"], "taken up again") for entry in history.starts[1:]]


def note_texts(history: History) -> list[tuple[int, str]]:
    return [(entry["step"], str(entry["note"])) for entry in history.notes]


# Columns


def drawn_rows(entries: Sequence[Entry], first: str, *more: str) -> dict[str, list[Any]]:
    """Columns of the entries worth drawing: chosen by `first`, with `index` into the entries."""
    entries_there = [(i, entry) for i, entry in enumerate(entries) if first in entry]
    kept = thinned([entry[first] for _, entry in entries_there], MOST_POINTS)
    chosen = [entries_there[i] for i in kept]
    return {
        "index": [i for i, _ in chosen],
        "step": [entry["step"] for _, entry in chosen],
        "tokens": [entry["tokens"] / 1e6 for _, entry in chosen],
        "minutes": [entry["seconds"] / 60 for _, entry in chosen],
        **{name: [entry.get(name) for _, entry in chosen] for name in (first, *more)},
    }


def source(columns: dict[str, list[Any]], history: History) -> Any:
    """Columns as bokeh wants them: numbers as arrays, a missing one as nan."""
    import numpy as np
    from bokeh.models import ColumnDataSource

    data: dict[str, Any] = {"run": [history.name] * len(columns["step"])}
    for name, values in columns.items():
        is_text = name == "text"
        data[name] = values if is_text else np.array(values, dtype=np.float64)  # None becomes nan
    return ColumnDataSource(data)
