"""Downloading a text: complete and right, or absent with a clear message."""

from __future__ import annotations

import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cli.options import ConfigError
from data import fetch as module
from data.config import DataConfig
from data.fetch import TEXTS, Text, command_for, fetch, main
from data.prepare import prepare
from training.choose import load_or_choose

GOOD = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


class Answers(BaseHTTPRequestHandler):
    """/good gives the text, /short breaks off, /endless never ends by itself, the rest is 404."""

    def do_GET(self):
        size = {"/good": len(GOOD), "/short": len(GOOD), "/endless": 10**12}.get(self.path)
        self.send_response(200 if size else 404)
        self.send_header("Content-Length", str(size or 0))
        self.end_headers()
        body = {"/good": GOOD, "/short": GOOD[:10], "/endless": GOOD + b"x" * 1000}
        self.wfile.write(body.get(self.path, b""))

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with HTTPServer(("127.0.0.1", 0), Answers) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def text(tmp_path, monkeypatch, server) -> Text:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "*")
    known = Text("data/shakespeare.txt", f"{server}/good", len(GOOD), sha256(GOOD).hexdigest())
    monkeypatch.setitem(module.TEXTS, "shakespeare", known)
    return known


def test_the_text_is_downloaded_once(text, command):
    code, out, err = command(main, "shakespeare")
    assert (code, err) == (0, "")
    assert "python train.py data/shakespeare.txt" in out
    assert Path(text.path).read_bytes() == GOOD
    assert f"{text.path} was there already" in command(main, "shakespeare")[1]


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("/missing", "cannot be read (Not Found)"),
        ("/short", "not the expected text (10 bytes"),
        ("/endless", f"not the expected text (more than {len(GOOD)} bytes"),
    ],
)
def test_a_failed_download_leaves_nothing(page, told, text, server, command):
    code, _, err = command(main, "shakespeare", f"--source={server}{page}")
    assert code == 2 and told in err and "--source" in err
    assert not list(Path().rglob("*.txt*"))


def test_no_network_is_told_with_what_to_do(text, command, server):
    code, _, err = command(main, "shakespeare", "--source=http://127.0.0.1:1/good")
    assert code == 2 and "cannot be read" in err and "--source=FILE" in err


def test_a_file_serves_as_the_source(text, tmp_path):
    (tmp_path / "copy.txt").write_bytes(GOOD)
    assert fetch(text, str(tmp_path / "copy.txt"))
    assert Path(text.path).read_bytes() == GOOD


def test_another_file_in_its_place_is_never_replaced(text):
    Path("data").mkdir()
    Path(text.path).write_text("mine")
    with pytest.raises(ConfigError, match="exists and holds something else"):
        fetch(text)
    assert Path(text.path).read_text() == "mine"


def test_an_unknown_name_lists_the_known_ones(command):
    code, _, err = command(main, "milton")
    assert code == 2 and "TEXT=milton: must be shakespeare" in err


def test_a_run_without_the_text_names_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        prepare(DataConfig(source="data/shakespeare.txt", prepared_dir="prepared"))
    assert "no such file or folder; to get it: python -m data.fetch shakespeare" in str(
        caught.value
    )
    with pytest.raises(ConfigError, match="python -m data.fetch shakespeare"):
        load_or_choose(["data/shakespeare.txt"])
    assert command_for("data/other.txt") == ""


def test_the_shipped_configs_name_the_text_that_is_fetched():
    root = Path(__file__).parents[1]
    for name in ("shakespeare_char", "finetune_shakespeare"):
        assert f'"{TEXTS["shakespeare"].path}"' in (root / f"config/{name}.py").read_text()
