"""Documents out of files of every kind, whatever their names; what is not text is refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
import zipfile
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.options import ConfigError
from data import readers
from data.readers import (
    PIECE_BYTES,
    ReadOptions,
    cut,
    file_pieces,
    form_of,
    json_values,
    split_documents,
)

TEXTS = ["Story one.\nThe cat sat.", 'Sto"ry, two é', "three"]
ROWS = [{"text": text, "url": "u", "body": text.upper()} for text in TEXTS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def documents(file: Path, how: ReadOptions = ReadOptions()) -> list[str]:  # noqa: B008
    found: list[str] = []
    for piece in file_pieces(file, how):
        found += [""] if piece.first else []
        found[-1] += piece.text
    return found


def refusal(file: Path, how: ReadOptions = ReadOptions()) -> str:  # noqa: B008
    with pytest.raises(ConfigError) as refused:
        documents(file, how)
    return str(refused.value)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def arrow(path: Path, rows: list[dict], stream: bool) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


CSV = 'id,text\n1,"Story one.\nThe cat sat."\n2,"Sto""ry, two é"\n\n3,three\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.ndjson", LINES),
        ("a.json", LINES),
        ("A.JSON", "\ufeff\n" + LINES.rstrip("\n")),
        ("part-00000", LINES),
        ("a.json", LINES.replace("\n", "\r\n")),
        ("a.json", json.dumps(ROWS)),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("a.json", " [\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n"),
        ("a.json", json.dumps(TEXTS)),
        ("a.json", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
        ("a.csv", CSV),
        ("a.csv", "\ufeff" + CSV.replace("\n", "\r\n").replace("one.\r\n", "one.\n")),
        (
            "a.tsv",
            CSV.replace("1,", "1\t")
            .replace("2,", "2\t")
            .replace("3,", "3\t")
            .replace("id,", "id\t"),
        ),
    ],
)
def test_rows_are_documents_whatever_the_file_is_called(tmp_path, name, content):
    assert documents(written(tmp_path / name, content)) == TEXTS


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_files_are_read_in_both_forms(tmp_path, stream):
    assert documents(arrow(tmp_path / "a.arrow", ROWS, stream)) == TEXTS
    assert "has no field 'nope', only 'text'" in refusal(tmp_path / "a.arrow", ReadOptions("nope"))
    cut_short = written(tmp_path / "b.arrow", (tmp_path / "a.arrow").read_bytes()[:-200])
    assert "cannot be read as arrow" in refusal(cut_short)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.tsv"])
def test_a_field_that_is_not_there_is_refused(tmp_path, name):
    contents = {".csv": CSV, ".tsv": "id\ttext\n1\tx\n"}
    file = written(tmp_path / name, contents.get(Path(name).suffix, LINES))
    assert "has no field 'nope'" in refusal(file, ReadOptions("nope"))


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("a.json", '{\n "name": "x",\n "text2": 3\n}', "text"),
        ("a.json", '{\n "text": "x"\n}', "values"),
        ("a.json", "[1, 2, 3]", "text"),
        ("a.json", "[unquoted]", "text"),
        ("a.json", "no JSON", "text"),
        ("a.json", "", "text"),
        ("a", "[Section]\nx = 1", "text"),
        ("a.txt", LINES, "text"),
        ("a.py", LINES, "text"),
        ("a.json.gz", gzip.compress(LINES.encode(), mtime=0), "jsonl"),
        ("a.json", gzip.compress(LINES.encode(), mtime=0), "jsonl"),
    ],
)
def test_a_json_file_is_looked_into(tmp_path, name, content, form):
    assert form_of(written(tmp_path / name, content), ReadOptions()) == form


@given(
    values=st.lists(st.text(max_size=20) | st.lists(st.text(max_size=9)), max_size=12),
    indent=st.sampled_from([None, 0, 3]),
    size=st.integers(1, 9),
)
@settings(max_examples=150, deadline=None)
def test_an_array_is_the_same_however_it_is_read(tmp_path_factory, values, indent, size):
    file = tmp_path_factory.getbasetemp() / "values.json"
    file.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "READ_BYTES", size)
        assert [row.value for row in json_values(file, ReadOptions())] == values


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"text": "a"}, {"text": "b"', "item 1: not JSON"),
        ('[{"text": "a"},', "ends before its array"),
        ('[{"text": "a"}, oops]' + " " * 50, "item 1: not JSON"),
        ('[{"text": "a"}, 7]', "item 1: must be a JSON object"),
        ('[{"text": "a"}, {"t": 1}]', "item 1: has no field 'text'"),
    ],
)
def test_a_bad_array_is_refused_by_item(tmp_path, content, said):
    assert said in refusal(written(tmp_path / "a.json", content))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('text\n"never closed\n', "cannot be read"),
        ("a,text\n1,2,3\n", "row 1 (line 2): has 3 columns"),
        ('text\n"a" b\n', "cannot be read"),
    ],
)
def test_a_bad_table_is_refused_by_row(tmp_path, content, said):
    assert said in refusal(written(tmp_path / "a.csv", content))


# Size and depth


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_a_row_that_is_too_long_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "LINE_BYTES", 1 << 20)
    monkeypatch.setattr(readers, "READ_BYTES", 1 << 16)
    long = "x" * (24 << 20)
    content = '[{"text": "a"}, {"text": "' if name == "a.json" else '{"text": "'
    content = 'text\n"' if "sv" in name else content
    file = written(tmp_path / f"{name}.gz", gzip.compress((content + long).encode()))
    tracemalloc.start()
    try:
        assert "the maximum for a row" in refusal(file) or "limit" in refusal(file)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("depth", [50_000, 3_000_000])
def test_nesting_that_is_too_deep_is_refused(tmp_path, name, depth):
    nested = '{"text": "a"}\n{"text": ' + "[" * depth + "]" * depth + "}\n"
    assert "line 2 (offset 14): nested too deep" in refusal(written(tmp_path / name, nested))
    array = '["a", ' + "[" * depth + "]" * depth + "]"
    if name == "a.json":
        assert "item 1: nested too deep" in refusal(written(tmp_path / name, array))


def test_a_long_row_is_cut_without_copying_what_is_left_of_it_for_each_piece():
    buffers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "piece_end", lambda b, s: buffers.append(b) or s + PIECE_BYTES)
        assert [len(p.text) for p in cut([("x" * 5 * PIECE_BYTES, 9, True)])] == [PIECE_BYTES] * 5
    assert len(buffers) == 4
    assert len(set(map(id, buffers))) == 1


# Compressed files, and what is not text


ZIP = b"PK\x03\x04" + bytes(100)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ""])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compression_is_seen_by_the_first_bytes(tmp_path, name, suffix, pack):
    content = {"a.txt": "a text", "a.csv": CSV}.get(name, LINES)
    file = written(tmp_path / (name + suffix), pack(content.encode()))
    assert documents(file) == (["a text"] if name == "a.txt" else TEXTS)
    rest = written(tmp_path / ("b" + name + suffix), pack(content.encode() * 50)[:-8])
    assert "cannot be read after" in refusal(rest)


def tar_head() -> bytes:
    return b"a.txt".ljust(257, b"\0") + b"ustar\0" + bytes(300)


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ZIP, "zip archive"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(99), "7z archive"),
        (b"Rar!\x1a\x07\x01\x00" + bytes(99), "rar archive"),
        (tar_head(), "tar archive"),
        (gzip.compress(tar_head(), mtime=0), "tar archive"),
        (gzip.compress(gzip.compress(b"text", mtime=0), mtime=0), "gz file"),
        (b"%PDF-1.7 ...", "PDF"),
        (b"\x04\x22\x4d\x18" + bytes(99), "lz4"),
        ("text".encode("utf-16") * 40, "UTF-16"),
        (bytes(range(256)) * 8, "not UTF-8 text"),
        (bytes(4096), "not UTF-8 text"),
        ("Привет, мир\n".encode("koi8-r") * 40, "not UTF-8 text"),
    ],
)
def test_what_is_not_text_is_refused_whatever_errors_says(tmp_path, errors, content, said):
    for name in ("a.txt", "a", "a.md"):
        assert said in refusal(written(tmp_path / name, content), ReadOptions("text", errors))


def test_a_zip_that_python_made_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    assert "unpack it" in refusal(tmp_path / "a.zip", ReadOptions("text", "replace"))


def test_a_text_may_begin_like_a_compressed_file(tmp_path):
    assert documents(written(tmp_path / "a.txt", "BZh9 is what bzip2 files begin with")) != []


def test_a_nul_byte_is_refused_by_place_and_replaced_when_asked(tmp_path):
    file = written(tmp_path / "a.log", b"x" * readers.READ_BYTES + b"ab\0c\n")
    assert f"byte 0x00 at offset {readers.READ_BYTES + 2} is not text" in refusal(file)
    (found,) = documents(file, ReadOptions("text", "replace"))
    assert found.endswith("ab\ufffdc\n")


# Separators


@given(
    parts=st.lists(st.text(alphabet="ab<|>\n", max_size=12), max_size=6),
    separator=st.sampled_from(["<|>", "\n\n", "|", "aab"]),
    size=st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_a_separator_splits_as_split_does(parts, separator, size):
    content = separator.join(parts)
    chunks = [(content[at : at + size], size) for at in range(0, len(content), size)]
    found: list[str] = []
    for piece in cut(split_documents(chunks, separator)):
        found += [""] if piece.first else []
        found[-1] += piece.text
    assert found == [part for part in content.split(separator) if part.strip()]


def test_a_separator_splits_text_files_alone(tmp_path):
    how = ReadOptions("text", "strict", "<|endoftext|>")
    assert documents(written(tmp_path / "a.txt", "one<|endoftext|>two\n<|endoftext|>"), how) == [
        "one",
        "two\n",
    ]
    line = json.dumps({"text": "a<|endoftext|>b"})
    assert documents(written(tmp_path / "a.jsonl", line), how) == ["a<|endoftext|>b"]
    long = "x" * (3 * PIECE_BYTES)
    assert documents(written(tmp_path / "b.txt", long + "<|endoftext|>y"), how) == [long, "y"]
    lines = ReadOptions("text", "strict", "\r\n")
    assert documents(written(tmp_path / "c.txt", "one\ntwo\r\nthree"), lines) == [
        "one",
        "two",
        "three",
    ]
