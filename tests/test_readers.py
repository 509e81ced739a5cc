"""Documents from files of every kind, whatever their names; damage is named by its place."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.options import ConfigError
from data import readers
from data.readers import (
    PIECE_BYTES,
    READ_BYTES,
    Piece,
    ReadOptions,
    cut,
    decoded,
    file_pieces,
    form_of,
    normalized,
    split_documents,
    text_pieces,
)

ROOT = Path(__file__).parents[1]
TEXTS = ["Story one.\nThe cat sat.", 'Sto"ry, two é', "three"]
ROWS = [{"text": text, "url": "u", "body": text.upper()} for text in TEXTS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'id,text\n1,"Story one.\nThe cat sat."\n2,"Sto""ry, two é"\n\n3,three\n'


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def joined(pieces: Iterable[Piece]) -> list[str]:
    """Documents of their pieces."""
    found: list[str] = []
    for piece in pieces:
        found += [""] if piece.first else []
        found[-1] += piece.text
    return found


def documents(file: Path, **options: str) -> list[str]:
    return joined(file_pieces(file, ReadOptions(**options)))


def refusal(file: Path, **options: str) -> str:
    with pytest.raises(ConfigError) as refused:
        documents(file, **options)
    return str(refused.value)


def in_chunks(content: bytes | str, size: int) -> list[tuple]:
    return [(content[at : at + size], size) for at in range(0, len(content), size)]


def document_pieces(chunks: Iterable[tuple[str, int]]) -> list[Piece]:
    return list(cut(split_documents(normalized(chunks), "")))


# The text policy


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("one\ntwo\n\nthree", "one\ntwo\n\nthree"),
        ("one\r\ntwo\r\n\r\nthree", "one\ntwo\n\nthree"),
        ("one\rtwo\r\rthree", "one\ntwo\n\nthree"),
        ("one\r\ntwo\n\rthree", "one\ntwo\n\nthree"),
        ("\ufeffone\ntwo", "one\ntwo"),
        ("\ufeffone\r\ntwo", "one\ntwo"),
        ("a\ufeffb\x0cd\u2028e", "a\ufeffb\x0cd\u2028e"),  # a mark inside stays
        *[("BZh9 is what bzip2 files begin with",) * 2],
        *((blank, None) for blank in ("", "\n\n", "\ufeff", " \r\n\t")),
    ],
)
def test_a_text_is_the_same_however_it_was_written(tmp_path, content, text):
    expected = [] if text is None else [text]
    assert documents(write(tmp_path / "a.txt", content)) == expected
    rows = [{"text": content}, {"text": None}, {"text": "b"}]
    lines = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert documents(lines) == [*expected, "b"]


@given(
    data=st.lists(st.sampled_from(["a", "é", "日", "🙂", "\r", "\n", "\ufeff", " "]), max_size=30),
    size=st.integers(1, 7),
)
@settings(max_examples=200, deadline=None)
def test_reading_in_chunks_changes_nothing(data, size):
    chunks = in_chunks("".join(data).encode("utf-8"), size)
    found = "".join(p.text for p in document_pieces(decoded(chunks, "x", "strict")))
    whole = "".join(data).removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    assert found == (whole if whole.strip() else "")


@given(raw=st.binary(max_size=30), size=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_invalid_utf8_is_found_where_it_is_however_it_is_read(raw, size):
    chunks = in_chunks(raw, size)
    replaced = "".join(t for t, _ in decoded(chunks, "file.txt", "replace"))
    assert replaced == raw.decode("utf-8", "replace")
    try:
        whole = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {raw[error.start]:#04x} at offset {error.start} "
        with pytest.raises(ConfigError, match=rf"file\.txt: {where}"):
            list(decoded(chunks, "file.txt", "strict"))
    else:
        assert "".join(t for t, _ in decoded(chunks, "file.txt", "strict")) == whole


@pytest.mark.parametrize("at", [0, READ_BYTES - 1, READ_BYTES + 5])
@pytest.mark.parametrize("bad", [b"\xe9", b"\xc3", b"\xff\xfe", b"\0"])
def test_a_byte_that_is_not_text_is_refused_by_offset_or_replaced(tmp_path, at, bad):
    file = write(tmp_path / "old.txt", b"x" * at + bad + b"t\xc3\xa9\n")
    said = refusal(file)
    assert said.startswith(f"{file}: byte {bad[0]:#04x} at offset {at} ")
    assert "--errors=replace" in said
    (found,) = documents(file, errors="replace")
    assert found.encode()[: at + 3] == b"x" * at + "\ufffd".encode()
    assert found.endswith("té\n")


def test_the_platforms_encoding_does_not_matter(tmp_path):
    write(tmp_path / "é.txt", "naïve 🙂\n")
    code = (
        "from pathlib import Path; from data.readers import ReadOptions, file_pieces\n"
        f"pieces = file_pieces(next(Path({str(tmp_path)!r}).iterdir()), ReadOptions())\n"
        "assert [p.text for p in pieces] == ['na\\u00efve \\U0001f642\\n']"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=ROOT)


# Pieces of long documents


def pieces_of(content: str) -> list[Piece]:
    return list(cut([(content, len(content), True)]))


def test_a_long_document_is_cut_after_the_last_newline_that_fits():
    assert [len(p.text) for p in pieces_of("x" * PIECE_BYTES)] == [PIECE_BYTES]
    line = "0123456789\n"
    first, second = pieces_of(line * (PIECE_BYTES // 11 + 10))
    assert len(first.text) == PIECE_BYTES // 11 * 11
    assert second.text == line * 10
    assert [first[1:3], second[1:3]] == [(True, False), (False, True)]


@pytest.mark.parametrize("character", ["x", "é", "日", "🙂"])
def test_one_giant_line_is_cut_between_characters(character):
    content = "y" + character * (PIECE_BYTES // 2)
    pieces = pieces_of(content)
    assert "".join(p.text for p in pieces) == content
    assert max(len(p.text.encode()) for p in pieces) <= PIECE_BYTES
    assert all(len(p.text.encode()) > PIECE_BYTES - 4 for p in pieces[:-1])


@given(st.text(alphabet="aé日🙂\n", max_size=60), st.integers(4, 12), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_pieces_depend_on_the_text_alone(content, limit, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE_BYTES", limit)
        whole = [p.text for p in pieces_of(content)]
        assert [p.text for p in document_pieces(in_chunks(content, chunk))] == whole
    assert "".join(whole) == (content if content.strip() or len(whole) > 1 else "")


@pytest.mark.parametrize("character", ["x", "é", "日", "🙂", "\n"])
def test_a_row_is_cut_where_a_file_with_its_text_is(character, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 16)
    contents = [character * n for n in range(40)]
    contents += ["\ufeff" + character * 9, f"a\r\n\rb{character * 20}\r", "\ufeff", " \r\n"]
    for content in contents:
        pieces = list(text_pieces(content, 7))
        assert pieces == document_pieces([(content, 7)]), repr(content)
        assert all(len(piece.text.encode()) <= 16 for piece in pieces)


def test_a_long_row_is_cut_without_copying_what_is_left_of_it_for_each_piece(monkeypatch):
    buffers = []
    monkeypatch.setattr(readers, "piece_end", lambda b, s: buffers.append(b) or s + PIECE_BYTES)
    assert [len(p.text) for p in pieces_of("x" * 5 * PIECE_BYTES)] == [PIECE_BYTES] * 5
    assert len(buffers) == 4
    assert len(set(map(id, buffers))) == 1


# Separators


@given(
    parts=st.lists(st.text(alphabet="ab<|>\n", max_size=12), max_size=6),
    separator=st.sampled_from(["<|>", "\n\n", "|", "aab"]),
    size=st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_a_separator_splits_as_split_does(parts, separator, size):
    content = separator.join(parts)
    found = joined(cut(split_documents(in_chunks(content, size), separator)))
    assert found == [part for part in content.split(separator) if part.strip()]


LONG = "x" * (3 * PIECE_BYTES)


@pytest.mark.parametrize(
    ("name", "content", "separator", "expected"),
    [
        ("a.txt", "one<|endoftext|>two\n<|endoftext|>", "<|endoftext|>", ["one", "two\n"]),
        ("a.txt", "one|\ufefftwo", "|", ["one", "two"]),
        ("a.txt", f"{LONG}<|endoftext|>y", "<|endoftext|>", [LONG, "y"]),
        ("a.txt", "one\ntwo\r\nthree", "\r\n", ["one", "two", "three"]),
        ("a.jsonl", json.dumps({"text": "a|b"}), "|", ["a|b"]),  # rows are documents already
    ],
    ids=range(5),
)
def test_a_separator_splits_text_files_only(tmp_path, name, content, separator, expected):
    assert documents(write(tmp_path / name, content), separator=separator) == expected


# Rows


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.ndjson", LINES),
        ("a.json", LINES),
        ("A.JSON", "\ufeff\n" + LINES.rstrip("\n")),
        ("part-00000", LINES),
        ("a.json", LINES.replace("\n", "\r\n")),
        ("a.jsonl", "\ufeff" + LINES.replace("\n", "\r\n\r\n")),
        ("a.json", json.dumps(ROWS)),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("a.json", " [\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n"),
        ("a.json", json.dumps(TEXTS)),
        ("a.json", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
        ("a.csv", CSV),
        ("a.csv", CSV.rstrip("\n")),
        ("a.csv", "\ufeff" + CSV.replace("\n", "\r\n").replace("one.\r\n", "one.\n")),
        ("a.tsv", CSV.replace("1,", "1\t").replace("2,", "2\t").replace("3,", "3\t")
            .replace("id,", "id\t")),
    ],
)  # fmt: skip
def test_rows_are_documents_whatever_the_file_is_called(tmp_path, name, content):
    assert documents(write(tmp_path / name, content)) == TEXTS


def arrow(path: Path, rows: list[dict], stream: bool) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    return path


def parquet(path: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    return path


TABLES = {
    "parquet": parquet,
    "arrow": lambda path, rows: arrow(path, rows, stream=True),
    "arrow file": lambda path, rows: arrow(path, rows, stream=False),
}


@pytest.mark.parametrize("kind", TABLES)
def test_rows_of_columnar_files_are_documents(tmp_path, kind):
    texts = [f"row {i} é\r\n" if i % 10 else None for i in range(3000)]
    path = tmp_path / f"a.{kind.split()[0]}"
    file = TABLES[kind](path, [{"text": text, "n": i} for i, text in enumerate(texts)])
    assert documents(file) == [t.replace("\r\n", "\n") for t in texts if t]
    size = file.stat().st_size
    assert 0.9 * size < sum(p.read for p in file_pieces(file, ReadOptions())) <= size
    assert "has no field 'nope', only 'text', 'n'" in refusal(file, text_field="nope")
    assert "field 'n' holds int, not text" in refusal(file, text_field="n")
    short = write(path.with_stem("b"), file.read_bytes()[:-200])
    assert f"{short}: cannot be read as {kind.split()[0]}" in refusal(short)


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
def test_the_content_of_a_json_file_decides_how_it_is_read(tmp_path, name, content, form):
    assert form_of(write(tmp_path / name, content), ReadOptions()) == form


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
        found = [row.value for row in readers.json_values(file, ReadOptions())]
    assert found == values


def test_json_lines_are_recognized_by_a_first_line_of_several_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "READ_BYTES", 7)
    file = write(tmp_path / "data.json", LINES.encode())
    assert form_of(file, ReadOptions()) == "jsonl"


TWO_LINES = b'{"text": "fine"}\n{"text": "ok"}\n '
ARRAY = '[{"text": "a"}, '


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", TWO_LINES + b'{"text": "cut sho', "line 3 (offset 32): not JSON"),
        ("a.jsonl", TWO_LINES + b"plain text", "line 3 (offset 32): not JSON"),
        ("a.jsonl", TWO_LINES + b'["list"]', "line 3: field 'text' holds list, not text"),
        ("a.jsonl", TWO_LINES + b"7", "line 3: must be a JSON object"),
        ("a.jsonl", TWO_LINES + b'{"body": "x", "id": 1}',
            "line 3: has no field 'text', only 'body', 'id'"),
        ("a.jsonl", TWO_LINES + b'{"text": 5}', "line 3: field 'text' holds int"),
        ("a.jsonl", TWO_LINES + b'{"text": "\xe9"}', "byte 0xe9 at offset 43 "),
        ("a.jsonl", TWO_LINES + b'{"text": "\\ud83d x"}',
            "line 3: character 0 of the text is U+D83D"),
        ("a.json", ARRAY + '{"text": "b"', "item 1: not JSON"),
        ("a.json", ARRAY, "ends before its array"),
        ("a.json", ARRAY + "oops]" + " " * 50, "item 1: not JSON"),
        ("a.json", ARRAY + "7]", "item 1: must be a JSON object"),
        ("a.json", ARRAY + '{"t": 1}]', "item 1: has no field 'text', only 't'"),
        ("a.csv", 'text\n"never closed\n', "cannot be read"),
        ("a.csv", "a,text\n1,2,3\n", "row 1 (line 2): has 3 columns"),
        ("a.csv", 'text\n"a" b\n', "cannot be read"),
        ("a.csv", "id,body\n", "has no field 'text', only 'id', 'body'"),
        ("a.tsv", "id\tbody\n1\tx\n", "has no field 'text', only 'id', 'body'"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(tmp_path, name, content, said):
    file = write(tmp_path / name, content)
    found = refusal(file)
    assert found.startswith(str(file))
    assert said in found


def test_halves_of_characters_in_json_are_replaced_or_joined(tmp_path):
    lines = [r'{"text": "a \ud83d b"}', r'{"text": "\ud83d\ude42"}']
    file = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert documents(file, errors="replace") == ["a \ufffd b", "🙂"]


# Size and depth


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_a_row_that_is_too_long_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "LINE_BYTES", 1 << 20)
    monkeypatch.setattr(readers, "READ_BYTES", 1 << 16)
    long = "x" * (24 << 20)
    content = '[{"text": "a"}, {"text": "' if name == "a.json" else '{"text": "'
    content = 'text\n"' if "sv" in name else content
    file = write(tmp_path / f"{name}.gz", gzip.compress((content + long).encode()))
    tracemalloc.start()
    try:
        assert "the maximum for a row" in refusal(file) or "limit" in refusal(file)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("depth", [50_000, 3_000_000])
def test_nesting_that_is_too_deep_is_refused(tmp_path, name, depth):
    deep = "[" * depth + "]" * depth
    file = write(tmp_path / name, '{"text": "a"}\n{"text": ' + deep + "}\n")
    assert "line 2 (offset 14): nested too deep" in refusal(file)
    if name == "a.json":
        assert "item 1: nested too deep" in refusal(write(file, f'["a", {deep}]'))


# Compressed files, and files that are not text

COMPRESSORS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda raw: pyarrow.compress(raw, "zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst", ""])
@pytest.mark.parametrize("kind", COMPRESSORS)
def test_compression_is_recognized_by_the_first_bytes(tmp_path, monkeypatch, kind, suffix):
    monkeypatch.setattr(readers, "READ_BYTES", 5000)
    rows = [{"id": i, "text": f"text é {i}\n" * 3} for i in range(500)]
    lines = "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows))
    texts = [row["text"] for row in rows]
    table = "text\n" + "".join(f'"{text}"\n' for text in texts)
    contents = {"a.txt": "".join(texts), "a.jsonl": lines, "a.json": lines, "a.csv": table}
    for name, content in contents.items():
        packed = COMPRESSORS[kind](content.encode())
        file = write(tmp_path / (name + suffix), packed)
        assert documents(file) == (["".join(texts)] if name == "a.txt" else texts)
        if name == "a.jsonl":
            assert sum(p.read for p in file_pieces(file, ReadOptions())) == len(packed)
        if kind != "zst":
            assert "cannot be read after" in refusal(write(file, packed[:-8]))
        for content in (packed[:30], packed[:-1], *([b"no such thing"] * (suffix == f".{kind}"))):
            assert refusal(write(file, content)).startswith(f"{file}: cannot be read")


def a_zip() -> bytes:
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("a.txt", "text")
    return packed.getvalue()


def tar_head() -> bytes:
    return b"a.txt".ljust(257, b"\0") + b"ustar\0" + bytes(300)


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (a_zip(), "zip archive, not text: unpack it"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(99), "7z archive"),
        (b"Rar!\x1a\x07\x01\x00" + bytes(99), "rar archive"),
        (tar_head(), "tar archive"),
        (gzip.compress(tar_head(), mtime=0), "tar archive in a compressed file"),
        (gzip.compress(gzip.compress(b"text", mtime=0), mtime=0), "gz file in a compressed file"),
        (b"%PDF-1.7 ...", "PDF, not text: convert it"),
        (b"\x04\x22\x4d\x18" + bytes(99), "lz4"),
        ("text".encode("utf-16") * 40, "UTF-16"),
        (bytes(range(256)) * 8, "not UTF-8 text"),
        (bytes(4096), "not UTF-8 text"),
        ("Привет, мир\n".encode("koi8-r") * 40, "not UTF-8 text"),
    ],
)
def test_a_file_that_is_not_text_is_refused(tmp_path, errors, content, said):
    for name in ("a.txt", "a", "a.md"):
        assert said in refusal(write(tmp_path / name, content), errors=errors)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.jsonl.zst", "a.parquet"):
        assert "pip install pyarrow" in refusal(write(tmp_path / name, b"x"))
