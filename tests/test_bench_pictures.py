"""The pictures in docs/: what a terminal showed becomes a film; every page is photographed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cli.options import ConfigError
from tools.bench import recording
from tools.bench.pictures import bench_pictures
from tools.bench.recording import COLORS, END, MOVE, READ, film_of, record, screens_of, write_svg

SVG = "{http://www.w3.org/2000/svg}"
PLAIN, GREEN = COLORS["default"], COLORS["green"]
# Seconds and output. The screen at 1.01 is not complete: its line is being drawn again.
EVENTS = [
    (0.5, b"model: 1 layer\r\n"),
    (1.0, b"1/3 #"),
    (1.01, b"\r      \r"),
    (1.02, b"2/3 ##"),
    (2.0, b"\r\x1b[32mbest\x1b[0m so far\r\n3/3 ###"),
]


def test_complete_screens_are_kept_with_their_colors():
    screens = screens_of(EVENTS, "train <&>")
    assert [[row for row in screen if row] for screen in screens] == [
        [typed := ((0, "$ train <&>", PLAIN, False),)],
        [typed, model := ((0, "model: 1 layer", PLAIN, False),)],
        [typed, model, ((0, "2/3 ##", PLAIN, False),)],
        [
            typed,
            model,
            ((0, "best", GREEN, False), (4, " so far", PLAIN, False)),
            ((0, "3/3 ###", PLAIN, False),),
        ],
    ]


def bar(step: int) -> recording.Screen:
    head = ((0, "model", PLAIN, False),)
    return (head, ((0, f"step {step}", PLAIN, False),)) + ((),) * 22


def test_of_the_screens_in_which_only_the_bar_moved_few_are_kept(monkeypatch):
    monkeypatch.setattr(recording, "BAR_SCREENS", 2)
    done = (*bar(5)[:2], ((0, "finished", PLAIN, False),), ((0, "sample", PLAIN, False),)) + (
        ((),) * 20
    )
    film = film_of([bar(0), bar(1), bar(2), bar(3), bar(4), bar(5), done])
    # Five screens moved only the bar: every third of them is kept.
    assert film == [(bar(0), READ), (bar(3), MOVE), (done, END)]
    assert film_of([bar(0), bar(1), bar(2), bar(3)])[-1] == (bar(3), END)  # the last one always


def test_the_svg_shows_every_screen_and_writes_a_row_once(tmp_path):
    path = tmp_path / "film.svg"
    hostile = ((2, "  <b>&", GREEN, True),)
    film = [(bar(0), 1.0), (bar(0)[:1] + (hostile,) + ((),) * 22, 3.0)]
    write_svg(path, film, "a <title>")
    root = ElementTree.parse(path).getroot()
    assert root.find(f"{SVG}title").text == "a <title>"
    rows = {g.get("id"): [t.text for t in g] for g in root.find(f"{SVG}defs")}
    assert rows == {"r0": ["model"], "r1": ["step 0"], "r2": ["<b>&"]}
    first, second = root.find(f"{SVG}svg/{SVG}g")
    assert [(u.get("href"), u.get("y")) for u in first] == [("#r0", "0"), ("#r1", "19")]
    assert [(u.get("href"), u.get("y")) for u in second] == [("#r0", "0"), ("#r2", "19")]
    # 24 lines of 19 pixels and a margin of 16; the first screen lasts 1 of 4 seconds.
    assert second.get("transform") == "translate(0 472)"
    style = root.find(f"{SVG}style").text
    assert "25.000%{transform:translateY(-472px)}" in style and "film 4.00s" in style
    text = root.find(f"{SVG}defs")[2][0]
    assert (text.get("x"), text.get("fill"), text.get("font-weight")) == ("33.6", GREEN, "bold")
    assert text.get("textLength") == "33.6"  # 4 characters of 8.4 pixels, from column 4 on


def test_a_command_is_recorded_in_a_terminal_of_80_columns(tmp_path):
    code = "import os, sys; print(os.get_terminal_size().columns, os.getcwd()); sys.exit(3)"
    events, status = record([sys.executable, "-c", code], tmp_path, os.environ)
    output = b"".join(part for _, part in events).decode()
    assert (output, status) == (f"80 {tmp_path}\r\n", 3)


def test_mistakes_are_told_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        bench_pictures("small", str(tmp_path / "nowhere"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="apt install chromium"):
        bench_pictures("small", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.browser
def test_the_pages_of_a_run_are_photographed(train_tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "docs"
    assert train_tiny(Path("out/tiny"), tokenizer="byte", max_steps=4) == 0
    out.mkdir()
    bench_pictures("tiny", "docs")
    assert sorted(path.name for path in out.iterdir()) == [
        "attention.png",
        "play.png",
        "report.png",
    ]
    for path in out.iterdir():
        head = Path(path).read_bytes()[:24]
        size = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
        assert size == (1200, 940)
