"""Record a command in a terminal and draw the recording as an animated SVG.

The command runs in a pseudo-terminal; pyte keeps the screen that its output would make. The SVG
holds every screen once, below each other like the frames of a film, and a CSS animation moves the
film. Waiting is cut: a screen with new lines stays long enough to be read, one in which only the
bar has moved is short.
"""

from __future__ import annotations

import errno
import html
import os
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

COLUMNS, ROWS = 80, 24
CELL, LINE = 8.4, 19  # pixels: width of a character, height of a line
BAR_SCREENS = 90  # at most this many screens in which only the bar has moved
READ, MOVE, END = 0.9, 0.12, 6.0  # seconds that a screen stays
SETTLED = 0.05  # seconds after which a screen is taken for complete
COLORS = {
    "default": "#e6e9ee",
    "black": "#8b949e",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",  # pyte's name for yellow
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
}

Event = tuple[float, bytes]  # seconds since the start, output
Span = tuple[int, str, str, bool]  # column, text, color, bold
Screen = tuple[tuple[Span, ...], ...]  # one tuple of spans per row


def record(
    argv: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[list[Event], int]:
    """Run a command in a terminal of COLUMNS x ROWS; return its output and its exit code."""
    import fcntl
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
    began, events = time.monotonic(), []
    with subprocess.Popen(
        argv,
        cwd=folder,
        env={**environment, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        while output := _read(ours):
            events.append((time.monotonic() - began, output))
            sys.stdout.buffer.write(output)  # whoever records wants to watch
            sys.stdout.flush()
        os.close(ours)
    return events, process.returncode


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError as error:
        if error.errno == errno.EIO:  # Linux: the other end is closed
            return b""
        raise


def screens_of(events: Sequence[Event], typed: str) -> list[Screen]:
    """Return the complete screens in order, the first one with the typed command alone."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    screen.set_mode(pyte.modes.LNM)
    stream.feed(f"$ {typed}\n".encode())
    found = [snapshot(screen)]
    ends = [seconds for seconds, _ in events[1:]] + [float("inf")]
    for (seconds, output), end in zip(events, ends, strict=True):
        stream.feed(output)
        if end - seconds >= SETTLED and (now := snapshot(screen)) != found[-1]:
            found.append(now)
    return found


def snapshot(screen) -> Screen:
    return tuple(spans_of(screen.buffer[y]) for y in range(ROWS))


def spans_of(cells) -> tuple[Span, ...]:
    """Join neighboring cells of one look; blanks at the end are left out."""
    spans: list[list] = []
    for x in range(COLUMNS):
        cell = cells[x]
        look = COLORS.get(cell.fg, f"#{cell.fg}"), cell.bold
        if spans and tuple(spans[-1][2:]) == look:
            spans[-1][1] += cell.data
        else:
            spans.append([x, cell.data, *look])
    while spans and not spans[-1][1].strip():
        spans.pop()
    if spans:
        spans[-1][1] = spans[-1][1].rstrip()
    return tuple(tuple(span) for span in spans)


def film_of(screens: Sequence[Screen]) -> list[tuple[Screen, float]]:
    """Return the screens to show, each with its seconds."""
    moved = [False, *(changed_rows(a, b) == 1 for a, b in zip(screens, screens[1:], strict=False))]
    every = max(1, -(-sum(moved) // BAR_SCREENS))
    film, skipped = [], 0
    for screen, only_bar in zip(screens, moved, strict=True):
        if only_bar and (skipped := skipped + 1) % every:
            continue
        film.append((screen, MOVE if only_bar else READ))
    if film[-1][0] != screens[-1]:
        film.append((screens[-1], READ))
    film[-1] = (film[-1][0], END)
    return film


def changed_rows(a: Screen, b: Screen) -> int:
    return sum(row != other for row, other in zip(a, b, strict=True))


def write_svg(path: Path, film: Sequence[tuple[Screen, float]], title: str) -> None:
    """Write the film. A row that comes up again, as nearly all do, is written once."""
    width, height, top = COLUMNS * CELL + 32, ROWS * LINE + 16, 34
    rows: dict[tuple[Span, ...], int] = {}
    frames, keys, now = [], [], 0.0
    total = sum(seconds for _, seconds in film)
    for number, (screen, seconds) in enumerate(film):
        uses = [
            f'<use href="#r{rows.setdefault(row, len(rows))}" y="{y * LINE}"/>'
            for y, row in enumerate(screen)
            if row
        ]
        frames.append(f'<g transform="translate(0 {number * height})">{"".join(uses)}</g>')
        keys.append(f"{100 * now / total:.3f}%{{transform:translateY(-{number * height}px)}}")
        now += seconds
    last = f"transform:translateY(-{(len(film) - 1) * height}px)"
    defined = "\n".join(f'<g id="r{i}">{row_text(row)}</g>' for row, i in rows.items())
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height + top}" '
        f'width="{width:g}" height="{height + top}" xml:space="preserve">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n"
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "white-space:pre}\n"
        f"@keyframes film{{{''.join(keys)}100%{{{last}}}}}\n"
        f"#film{{animation:film {total:.2f}s step-end infinite}}\n"
        f"@media (prefers-reduced-motion:reduce){{#film{{animation:none;{last}}}}}\n"
        f"</style>\n<defs>\n{defined}\n</defs>\n"
        f'<rect width="100%" height="100%" rx="9" fill="#14181f"/>\n'
        f'<text x="50%" y="22" text-anchor="middle" fill="#9aa4b2">{html.escape(title)}</text>\n'
        f'<svg x="16" y="{top}" width="{width - 16:g}" height="{height}">'
        f'<g id="film">\n{chr(10).join(frames)}\n</g></svg>\n</svg>\n',
        encoding="utf-8",
    )


def row_text(row: Sequence[Span]) -> str:
    """Return the SVG of one row; textLength keeps the columns whatever font there is."""
    parts = []
    for x, text, color, bold in row:
        weight = ' font-weight="bold"' if bold else ""
        blanks = len(text) - len(text.lstrip(" "))
        text = text.strip(" ")
        if text:
            parts.append(
                f'<text x="{(x + blanks) * CELL:.1f}" y="14" fill="{color}"{weight} '
                f'textLength="{len(text) * CELL:.1f}" lengthAdjust="spacingAndGlyphs">'
                f"{html.escape(text)}</text>"
            )
    return "".join(parts)
