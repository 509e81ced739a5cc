"""Documents out of files: one text policy everywhere, and damage is named by place."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path, PurePath

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.options import ConfigError
from data import readers
from data.prepared import content_of
from data.readers import (
    PIECE_BYTES,
    Piece,
    ReadOptions,
    cut,
    decoded,
    normalized,
    row_pieces,
    split_documents,
)
from data.sources import (
    FEW_DOCUMENTS,
    named_split,
    open_source,
    parse_mixture,
    resolve_split,
    split_of,
)

ROOT = Path(__file__).parents[1]


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def documents(spec: object, *options: str, **named: str) -> list[str]:
    """The documents of a source, joined from their pieces; takes the fields of `ReadOptions`."""
    found: list[str] = []
    for piece in open_source(str(spec)).pieces(ReadOptions(*options, **named)):
        if piece.first:
            found.append("")
        found[-1] += piece.text
    return found


def refusal(spec: object, **options) -> str:
    with pytest.raises(ConfigError) as refused:
        documents(spec, **options)
    return str(refused.value)


def document_pieces(chunks) -> list[Piece]:
    return list(cut(split_documents(normalized(chunks), "")))


# The text policy


@pytest.mark.parametrize(
    "content",
    [
        "one\ntwo\n\nthree",
        "one\r\ntwo\r\n\r\nthree",
        "one\rtwo\r\rthree",
        "one\r\ntwo\n\rthree",
        "\ufeffone\ntwo\n\nthree",
        "\ufeffone\r\ntwo\r\n\r\nthree",
    ],
)
def test_a_text_is_the_same_however_it_was_written(tmp_path, content):
    assert documents(write(tmp_path / "a.txt", content)) == ["one\ntwo\n\nthree"]
    as_json = json.dumps({"text": content})
    assert documents(write(tmp_path / "a.jsonl", as_json)) == ["one\ntwo\n\nthree"]


def test_a_mark_inside_a_text_and_a_missing_newline_stay(tmp_path):
    content = "a\ufeffb\x0cd\u2028e"
    assert documents(write(tmp_path / "a.txt", content)) == [content]


@given(
    data=st.lists(st.sampled_from(["a", "é", "日", "🙂", "\r", "\n", "\ufeff", " "]), max_size=30),
    size=st.integers(1, 7),
)
@settings(max_examples=200, deadline=None)
def test_reading_in_chunks_changes_nothing(data, size):
    raw = "".join(data).encode("utf-8")
    chunks = [(raw[at : at + size], size) for at in range(0, len(raw), size)]
    found = "".join(p.text for p in document_pieces(decoded(chunks, "x", "strict")))
    whole = "".join(data).removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    assert found == (whole if whole.strip() else "")


@given(raw=st.binary(max_size=30), size=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_invalid_utf8_is_found_where_it_is_however_it_is_read(raw, size):
    chunks = [(raw[at : at + size], size) for at in range(0, len(raw), size)]
    replaced = "".join(t for t, _ in decoded(chunks, "file.txt", "replace"))
    assert replaced == raw.decode("utf-8", "replace")
    try:
        whole = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        with pytest.raises(ConfigError, match=rf"file\.txt: byte .* at offset {error.start} "):
            list(decoded(chunks, "file.txt", "strict"))
    else:
        assert "".join(t for t, _ in decoded(chunks, "file.txt", "strict")) == whole


@pytest.mark.parametrize("at", [0, 7, readers.READ_BYTES - 1, readers.READ_BYTES + 5])
@pytest.mark.parametrize("bad", [b"\xe9", b"\xc3", b"\xff\xfe"])
def test_latin_1_is_refused_by_file_and_offset_with_a_way_on(tmp_path, at, bad):
    file = write(tmp_path / "old.txt", b"x" * at + bad + b"t\xc3\xa9\n")
    said = refusal(file)
    assert f"{file}: byte {bad[0]:#04x} at offset {at} " in said
    assert "--errors=replace" in said
    (found,) = documents(file, errors="replace")
    assert found.encode()[: at + 3] == b"x" * at + "\ufffd".encode()
    assert found.endswith("té\n")


def test_the_platforms_encoding_does_not_matter(tmp_path):
    write(tmp_path / "é.txt", "naïve 🙂\n")
    code = (
        "from data.readers import ReadOptions; from data.sources import open_source\n"
        f"pieces = open_source({str(tmp_path)!r}).pieces(ReadOptions())\n"
        "assert [p.text for p in pieces] == ['na\\u00efve \\U0001f642\\n']"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=ROOT)


# Pieces of long documents


def pieces_of(content: str) -> list[Piece]:
    return list(cut([(content, len(content), True)]))


def test_a_document_of_a_mebibyte_is_one_piece():
    assert [len(p.text) for p in pieces_of("x" * PIECE_BYTES)] == [PIECE_BYTES]


def test_a_longer_one_is_cut_after_the_last_newline_that_fits():
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
    def cut_by(chunks: Iterator[str]) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(readers, "PIECE_BYTES", limit)
            return [p.text for p in cut(split_documents(((c, 0) for c in chunks), ""))]

    whole = cut_by([content])
    assert cut_by([content[at : at + chunk] for at in range(0, len(content), chunk)]) == whole
    assert "".join(whole) == (content if content.strip() or len(whole) > 1 else "")


@pytest.mark.parametrize("character", ["x", "é", "日", "🙂", "\n"])
def test_a_row_is_cut_where_a_file_with_its_text_is(character, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 16)
    contents = [character * n for n in range(40)]
    contents += ["\ufeff" + character * 9, f"a\r\n\rb{character * 20}\r", "\ufeff", " \r\n"]
    for content in contents:
        pieces = list(row_pieces(content, 7))
        assert pieces == document_pieces([(content, 7)]), repr(content)
        assert all(len(piece.text.encode()) <= 16 for piece in pieces)


# What is read


def test_a_folder_is_read_in_the_order_of_its_names_without_what_is_no_text(tmp_path):
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a" / "z.py", "first")
    write(tmp_path / "c.jsonl", '{"text": "third"}\n{"text": "fourth"}')
    write(tmp_path / "image.png", b"\x89PNG\xff")
    write(tmp_path / ".git" / "config.txt", "hidden")
    assert documents(tmp_path) == ["first", "second", "third", "fourth"]
    assert "1 x .png" in open_source(str(tmp_path)).notes[0]


def test_runs_and_prepared_data_within_a_folder_are_no_text(tmp_path):
    """Their JSON lines would be, and a run's grow while it is running."""
    write(tmp_path / "a.jsonl", '{"text": "mine"}')
    for name in ("run.json", "metrics.jsonl", "checkpoints/step-1/state.json"):
        write(tmp_path / "out/small" / name, '{"text": "a run"}')
    for name in ("meta.json", "source.json", "tokenizer/x.txt", "train-00-000000.bin"):
        write(tmp_path / "data/prepared/x" / name, '{"text": "prepared"}')
    write(tmp_path / "out/notes.txt", "notes")
    assert documents(tmp_path) == ["mine", "notes"]
    assert open_source(str(tmp_path)).notes == ("2 folders of runs or prepared data left out",)


def test_a_glob_names_exactly_what_is_read(tmp_path):
    for name in ("x1.md", "x2.odd", "y.md"):
        write(tmp_path / name, name)
    assert documents(tmp_path / "x*") == ["x1.md", "x2.odd"]
    assert documents(tmp_path / "**" / "*.md") == ["x1.md", "y.md"]


@pytest.mark.parametrize("name", ["nope.txt", "nope*", "folder", "folder/*.txt"])
def test_nothing_to_read_is_said(tmp_path, name):
    write(tmp_path / "folder" / "picture.png", b"x")
    assert name in refusal(tmp_path / name)


def test_the_standard_library_is_there_without_tests_and_tables():
    source = open_source("stdlib")
    names = [source.name_of(file) for file in source.files]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}
    assert not left_out & {part for name in names for part in name.split("/")}
    assert source.size > 5e6


def test_a_document_of_white_space_alone_is_none(tmp_path):
    lines = [json.dumps({"text": t}) for t in ("a", "", " \n\t", "\ufeff", "b")]
    lines.append('{"text": null}')
    assert documents(write(tmp_path / "a.jsonl", "\n".join(lines))) == ["a", "b"]
    for content in (b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n"):
        assert documents(write(tmp_path / "a.txt", content)) == []


# JSON lines, compressed and not


def test_compressed_lines_are_those_that_were_compressed(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "READ_BYTES", 5000)
    rows = [{"id": i, "body": f"text é {i}\n" * 3} for i in range(2000)]
    raw = "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows))
    write(tmp_path / "a.jsonl", raw)
    write(tmp_path / "b.jsonl.gz", gzip.compress(raw.encode()))
    write(tmp_path / "c.jsonl.zst", pyarrow.compress(raw.encode(), "zstd", asbytes=True))
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        assert documents(tmp_path / name, "body") == [row["body"] for row in rows]
        source = open_source(str(tmp_path / name))
        assert sum(p.read for p in source.pieces(ReadOptions("body"))) == source.size


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.jsonl.zst", "a.parquet"):
        assert "pip install pyarrow" in refusal(write(tmp_path / name, b"x"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "cut sho', "line 3 (offset 32): not JSON"),
        (b"plain text", "line 3 (offset 32): not JSON"),
        (b'["list"]', "line 3: field 'text' holds list, not text"),
        (b"7", "line 3: must be a JSON object"),
        (b'{"body": "x", "id": 1}', "line 3: has no field 'text', only 'body', 'id'"),
        (b'{"text": 5}', "line 3: field 'text' holds int"),
        (b'{"text": "\xe9"}', "byte 0xe9 at offset 43 "),
        (b'{"text": "\\ud83d x"}', "line 3: character 0 of the text is U+D83D"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    file = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n{"text": "ok"}\n' + b" " + line)
    found = refusal(file)
    assert found.startswith(str(file))
    assert said in found


def test_lines_may_end_as_on_windows_and_begin_with_a_mark(tmp_path):
    raw = b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}\r\n'
    assert documents(write(tmp_path / "a.jsonl", raw)) == ["one", "two"]


def test_halves_of_characters_in_json_are_replaced_or_joined(tmp_path):
    lines = [r'{"text": "a \ud83d b"}', r'{"text": "\ud83d\ude42"}']
    file = write(tmp_path / "a.jsonl", "\n".join(lines))
    assert documents(file, errors="replace") == ["a \ufffd b", "🙂"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("size", [5, 30, -1, None])
def test_a_compressed_file_that_is_cut_or_none_is_refused_by_name(tmp_path, suffix, size):
    raw = b'{"text": "a"}\n' * 1000
    packed = gzip.compress(raw) if suffix == "gz" else pyarrow.compress(raw, "zstd", asbytes=True)
    file = write(tmp_path / f"a.jsonl.{suffix}", packed[:size] if size else b"no such thing")
    assert f"{file}: cannot be read" in refusal(file)


# Parquet


def parquet(path: Path, columns: dict) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=700)
    return path


def test_parquet_rows_are_documents(tmp_path):
    texts = [f"row {i} é\r\n" if i % 10 else None for i in range(3000)]
    file = parquet(tmp_path / "a.parquet", {"text": texts, "n": list(range(3000))})
    assert documents(file) == [t.replace("\r\n", "\n") for t in texts if t]
    source = open_source(str(file))
    read = sum(p.read for p in source.pieces(ReadOptions()))
    assert 0.9 * source.size < read <= source.size  # rows of null are no piece


def test_parquet_that_is_none_or_has_another_field_is_refused(tmp_path):
    file = parquet(tmp_path / "a.parquet", {"content": ["x"], "n": [1]})
    assert "has no field 'text', only 'content', 'n'" in refusal(file)
    assert "not text" in refusal(file, text_field="n")
    cut_short = write(tmp_path / "b.parquet", file.read_bytes()[:-7])
    assert f"{cut_short}: cannot be read as parquet" in refusal(cut_short)


# What names of files and folders decide


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.txt", "train"),
        ("TinyStoriesV2-GPT4-valid.txt", "val"),
        ("c4-validation.00000-of-00008.json.gz", "val"),
        ("data/dev-00000.parquet", "val"),
        ("corpus_val_000000.bin", "val"),
        ("eval.jsonl", "val"),
        ("TEST.csv", "test"),
        ("wiki.test.tokens", "test"),
        ("test/part-1.txt", "test"),
        ("test/train_1.txt", "test"),
        ("train/test_of_time.txt", "train"),
        ("dev/train.txt", "train"),
        ("train_test.txt", "test"),
        ("medieval_000.bin", ""),
        ("contest.txt", ""),
        ("evaluation.txt", ""),
        ("developers.txt", ""),
        ("trained.txt", ""),
        ("latest.txt", ""),
        ("src/test_model.py", ""),
        ("val.c", ""),
    ],
)
def test_a_split_is_named_by_whole_words(name, split):
    assert named_split(PurePath(name)) == split


def test_the_test_split_is_left_out_and_the_validation_split_marked(tmp_path):
    for name in ("train-1.txt", "valid.txt", "test.txt", "more.txt"):
        write(tmp_path / name, f"from {name}")
    for spec in (tmp_path, tmp_path / "*.txt"):
        source = open_source(str(spec))
        assert documents(spec) == ["from more.txt", "from train-1.txt", "from valid.txt"]
        assert {file.name for file in source.val_files} == {"valid.txt"}
        assert [note for note in source.notes if "test.txt" in note]
        assert [note for note in source.notes if "validation" in note and "valid.txt" in note]
    assert documents(tmp_path / "test.txt") == ["from test.txt"]  # named itself, it is read


@pytest.mark.parametrize("names", [["test-1.txt", "test-2.txt"], ["val.txt"], ["a.txt", "b.txt"]])
def test_names_that_all_say_the_same_decide_nothing(tmp_path, names):
    for name in names:
        write(tmp_path / "test" / name, name)  # the folder that is named is no part of a name
    source = open_source(str(tmp_path / "test"))
    assert [file.name for file in source.files] == names
    assert not source.val_files
    assert not source.notes


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["README.md", "LICENSE.txt", "train.jsonl"], ["train.jsonl"]),
        (["README.md", "data/a.parquet"], ["data/a.parquet"]),
        (["README.md", "b.md"], ["README.md", "b.md"]),
        (["README.md", "b.py"], ["README.md", "b.py"]),
        (["README.md"], ["README.md"]),
        (["licenses.txt", "a.txt"], ["a.txt", "licenses.txt"]),
        (
            ["dataset_info.json", "state.json", "data-0.arrow", "cache-1.arrow"],
            ["data-0.arrow"],
        ),
        (
            ["dataset_dict.json", "train/data-0.arrow", "train/state.json", "test/data-0.arrow"],
            ["train/data-0.arrow"],
        ),
        (["state.json", "a.txt"], ["a.txt", "state.json"]),
    ],
)
def test_what_is_about_the_data_is_left_out(tmp_path, names, read):
    for name in names:
        write(tmp_path / name, name)
    source = open_source(str(tmp_path))
    assert [source.name_of(file) for file in source.files] == read
    for name in set(names) - set(read):
        assert any(name in note for note in source.notes), name


# Links, odd names


def test_links_are_followed_once(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    write(root / "a.txt", "a")
    write(root / "z" / "b.txt", "b")
    write(outside / "c.txt", "c")
    write(outside / "deep" / "d.txt", "d")
    write(tmp_path / "e.txt", "e")
    for link, target in {
        root / "1": outside,
        root / "2": outside,  # a second time
        root / "3": root,  # loops
        root / "4": tmp_path,
        outside / "deep" / "up": outside,
        root / "5": root / "z",  # read under its own name
        root / "6.txt": root / "a.txt",
        root / "7.txt": tmp_path / "e.txt",
        root / "8.txt": tmp_path / "e.txt",
        root / "9.txt": root / "nowhere.txt",
    }.items():
        link.symlink_to(target)
    source = open_source(str(root))
    names = ["1/c.txt", "1/deep/d.txt", "7.txt", "a.txt", "z/b.txt"]
    assert [source.name_of(file) for file in source.files] == names
    assert "1 broken links left out" in source.notes
    assert "5 links to folders that are read anyway left out" in source.notes
    assert "2 links to files that are read anyway left out" in source.notes


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("w[1]/*.txt", ["one [1].txt", "two.txt"]),
        ("w[1]/one [1].txt", ["one [1].txt"]),
        ("w[1]/one [[]1].txt", ["one [1].txt"]),
        ("w[1]/*[1].txt", ["one [1].txt"]),
        ("w[12]/two.txt", ["two.txt"]),
        ("**/two.txt", ["two.txt", "two.txt"]),
        ("c++", ["a+b.txt"]),
        ("c++/a+*.txt", ["a+b.txt"]),
    ],
)
def test_brackets_and_plus_signs_in_a_path_are_characters(tmp_path, spec, found):
    for name in ("w[1]/one [1].txt", "w[1]/two.txt", "w2/two.txt", "c++/a+b.txt"):
        write(tmp_path / name, name)
    assert [file.name for file in open_source(str(tmp_path / spec)).files] == found


def test_a_plus_sign_alone_is_no_mixture(tmp_path):
    write(tmp_path / "a.txt", "a")
    assert "mixture" not in refusal(tmp_path / "c++" / "nope.txt")
    assert "mixture" in refusal(f"{tmp_path}/a.txt+{tmp_path}/a.txt")


def test_a_name_that_is_not_utf_8_is_a_name(tmp_path):
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    write(file, "text")
    write(tmp_path / "b.txt", "more")
    assert documents(tmp_path) == ["more", "text"]
    assert len(content_of(open_source(str(tmp_path)), tmp_path).digest) == 64


# The hub, with a stand-in for `datasets`


@pytest.fixture
def hub(monkeypatch):
    asked = []
    stand_in = types.SimpleNamespace(rows=[{"text": "one"}, {"text": "two"}], error=None)

    def load_dataset(name, subset, *, split, streaming):
        asked.append((name, subset, split, streaming))
        if stand_in.error:
            raise stand_in.error
        return iter(stand_in.rows)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("data.sources.check_network", lambda spec: None)
    stand_in.asked = asked
    return stand_in


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ("hub:owner/name", ("owner/name", None, "train", True)),
        ("hub:owner/name/part@validation", ("owner/name", "part", "validation", True)),
        ("hub:name@train[:1%]", ("name", None, "train[:1%]", True)),
    ],
)
def test_a_hub_dataset_is_streamed(hub, spec, asked):
    assert documents(spec) == ["one", "two"]
    assert hub.asked == [asked]


def test_of_a_hub_dataset_one_split_alone_is_read_and_that_is_said():
    for spec, split in {"hub:owner/name": "train", "hub:owner/name@test": "test"}.items():
        (note,) = open_source(spec).notes
        assert f"the split {split} only" in note
        assert "--val_source=hub:owner/name@validation" in note


@pytest.mark.parametrize("spec", ["hub:", "hub:a//b", "hub:a/b/c/d", "hub:/x"])
def test_other_spellings_are_refused(spec):
    assert "hub:OWNER/NAME" in refusal(spec)


def test_a_dataset_made_by_a_script_is_refused_with_a_way_on(hub):
    hub.error = RuntimeError("Dataset scripts are no longer supported, but found x.py")
    said = refusal("hub:owner/name")
    assert "scripts" in said
    assert ".parquet or .jsonl" in said


@pytest.mark.parametrize("error", [ConnectionError("no route"), FileNotFoundError("no such name")])
def test_a_hub_that_does_not_answer_is_said(hub, error):
    hub.error = error
    assert (
        f"hub:owner/name: the Hub did not deliver it ({type(error).__name__}: {error})"
        in refusal("hub:owner/name")
    )


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace())
    for variable in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    began = time.perf_counter()
    assert "cannot be reached" in refusal("hub:owner/name")
    assert time.perf_counter() - began < 5


def test_a_hub_row_without_the_field_names_those_there_are(hub):
    hub.rows = [{"text": "a"}, {"content": "b"}]
    assert "row 1: has no field 'text', only 'content'" in refusal("hub:owner/name")


def test_local_files_need_no_datasets(tmp_path):
    write(tmp_path / "a.txt", "x")
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from data.sources import open_source\nfrom data.readers import ReadOptions\n"
        f"assert list(open_source({str(tmp_path / 'a.txt')!r}).pieces(ReadOptions()))\n"
        "assert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Mixtures


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("a.txt*0.7+b.jsonl*0.3", [("a.txt", 0.7), ("b.jsonl", 0.3)]),
        ("a.txt*3+hub:x/y@train*1", [("a.txt", 0.75), ("hub:x/y@train", 0.25)]),
        ("d/*.txt*.5+stdlib*.5", [("d/*.txt", 0.5), ("stdlib", 0.5)]),
        ("c++*1+c*1+d*2", [("c++", 0.25), ("c", 0.25), ("d", 0.5)]),
        ("stdlib", [("stdlib", 1.0)]),
        ("d/*.txt", [("d/*.txt", 1.0)]),
        ("a+b.txt", [("a+b.txt", 1.0)]),
    ],
)
def test_a_mixture_is_spelled_with_weights(spec, parts):
    assert parse_mixture(spec) == parts


def test_a_weight_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="weight is 0"):
        parse_mixture("a*0+b*1")


# Splits


def some(texts: list[str]) -> Iterator[Piece]:
    for content in texts:
        yield from document_pieces([(content, len(content))])


def split_text(mode: str, fraction: float, texts: list[str]) -> tuple[str, dict[str, list[str]]]:
    split = resolve_split(mode, fraction, some(texts))
    found: dict[str, list[str]] = {"train": [], "val": []}
    for part in split.parts(some(texts)):
        if part.first:
            found[part.split].append("")
        found[part.split][-1] += part.text
    return split.mode, found


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("texts", [["日本" * 50], ["a" * 30, "é" * 70, "z"], ["x" * 19] * 3])
def test_the_tail_is_the_last_characters(texts, fraction):
    mode, found = split_text("tail", fraction, texts)
    whole = "".join(texts)
    n = int(len(whole) * (1 - fraction))
    assert mode == "tail"
    assert "".join(found["train"]) == whole[:n]
    assert "".join(found["val"]) == whole[n:]


def test_the_tail_of_tinyshakespeares_length_is_the_known_one():
    split = resolve_split("tail", 0.1, [Piece("x" * 1_115_394, True, True, 0)])
    assert split.train_characters == 1_003_854


def test_a_document_that_the_tail_cuts_ends_only_in_the_validation_split():
    split = resolve_split("tail", 0.5, some(["ab", "cdefgh"]))
    parts = [part[:4] for part in split.parts(some(["ab", "cdefgh"]))]
    assert parts == [
        ("train", "ab", True, True),
        ("train", "cd", True, False),
        ("val", "efgh", True, True),
    ]


def test_few_documents_are_split_by_the_tail_and_many_by_document():
    texts = [f"document {i}" for i in range(400)]
    assert split_text("auto", 0.05, texts[: FEW_DOCUMENTS - 1])[0] == "tail"
    mode, found = split_text("auto", 0.05, texts)
    assert mode == "document"
    assert set(found["train"]) | set(found["val"]) == set(texts)
    assert 5 <= len(found["val"]) <= 40
    # The twentieth document decides, and both of its splits are there.
    assert {split_of(t, 0.5) for t in texts[: FEW_DOCUMENTS - 1]} == {"train", "val"}
    assert split_text("auto", 0.5, texts[: FEW_DOCUMENTS - 1])[0] == "tail"
    assert split_text("auto", 0.5, texts[:FEW_DOCUMENTS])[0] == "document"


def test_auto_takes_the_tail_where_the_hash_would_leave_no_validation_text():
    texts = [t for i in range(100) if split_of(t := f"document {i}", 0.05) == "train"]
    mode, found = split_text("auto", 0.05, texts)
    assert mode == "tail"
    assert found["val"]


def test_adding_documents_moves_none_between_splits():
    few = [f"text number {i}" for i in range(100)]
    more = [f"another {i}" for i in range(50)] + few[::-1] + ["last"]
    _, before = split_text("document", 0.1, few)
    _, after = split_text("document", 0.1, more)
    assert set(before["val"]) <= set(after["val"])
    assert set(before["train"]) <= set(after["train"])
    assert not set(after["train"]) & set(after["val"])


def test_a_long_document_lies_in_one_split():
    long = ["line of text\n" * 300_000, *(f"d{i}" for i in range(60))]
    _, found = split_text("document", 0.3, long)
    assert long[0] in found["train"] + found["val"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere.txt", "no such file or folder"),
        ("*.markdown", "no file matches"),
        ("empty", "the folder holds nothing to read (no files at all)"),
        ("pictures", "nothing to read (2 files of other kinds left out: 2 x .png)"),
        ("a.txt*0.7+b.txt", "each part of a mixture needs a weight"),
    ],
)
def test_why_there_is_nothing_to_read(tmp_path, spec, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    for name in ("a.txt", "b.txt", "pictures/1.png", "pictures/2.png"):
        (tmp_path / name).write_text("text")
    with pytest.raises(ConfigError) as refused:
        open_source(str(tmp_path / spec))
    assert said in str(refused.value)
