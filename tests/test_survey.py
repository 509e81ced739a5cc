"""A look at a text: its size, its characters, a prompt."""

from __future__ import annotations

import gzip
import json

import pytest

from cli.options import ConfigError
from data.config import DataConfig
from data.survey import common_beginning, survey


def test_a_small_text_is_read_whole(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Émile: aa\n\nÉmile: bb\n\nOther: cc\n", encoding="utf-8")
    found = survey(DataConfig(source=str(path)))
    assert (found.n_bytes, found.is_whole) == (34, True)  # 30 of one byte, 2 of two
    assert found.prompt == "Émile:"


def test_the_size_of_a_large_text_is_estimated(tmp_path):
    row = json.dumps({"text": "x" * 50_000, "id": "y" * 50_000}) + "\n"
    path = tmp_path / "rows.jsonl"
    path.write_text(row * 100)
    found = survey(DataConfig(source=str(path)))
    assert not found.is_whole
    assert found.n_bytes == pytest.approx(5_000_000, rel=0.2)  # half of the file


def test_a_compressed_text_counts_by_its_text(tmp_path):
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"word " * 10_000))
    assert survey(DataConfig(source=str(path))).n_bytes == 50_000


def test_ids_and_empty_texts_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(100))
    (tmp_path / "b.txt").write_text(" \n ")
    with pytest.raises(ConfigError, match="holds ids, not text"):
        survey(DataConfig(source=str(tmp_path / "a.bin")))
    with pytest.raises(ConfigError, match="holds no text"):
        survey(DataConfig(source=str(tmp_path / "b.txt")))


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("ROMEO:\nAy.\n\nJULIET:\nNay.\n\nROMEO:\nSo.\n", "ROMEO:"),
        ("KING HENRY:\nAy.\n\nKING HENRY:\nNo.\n\nKING JOHN:\nSo.\n", "KING HENRY:"),
        ("def f(x):\n    return\n\ndef g():\n    pass\n\n    def h():\n", "def"),
        ("Once more.\n\nThe end is near.\n\nThe start was far.\n", "The"),
        ("- a list\n- of things\nwithout paragraphs\n", "without paragraphs"),
        ("A b\n\nA c\n\nAnother one\n", "Another one"),  # one letter says too little
        ("1 2 3\n\n4 5 6\n", ""),
        ("x" * 100, ""),
    ],
)
def test_the_prompt_is_a_common_beginning(text, prompt):
    assert common_beginning([text]) == prompt
