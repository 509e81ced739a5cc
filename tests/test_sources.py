"""Sources: which files are read, what their names decide, mixtures, the Hub, train/val splits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

from cli.options import ConfigError
from data.prepared import content_of
from data.readers import Piece, ReadOptions, text_pieces
from data.sources import (
    FEW_DOCUMENTS,
    ReadCounts,
    named_split,
    open_source,
    parse_mixture,
    resolve_split,
    split_of,
)
from data.tokenizer import ready_tokenizer

ROOT = Path(__file__).parents[1]


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def documents(spec: object) -> list[str]:
    return [piece.text for piece in open_source(str(spec)).pieces(ReadOptions())]


def refusal(spec: object) -> str:
    with pytest.raises(ConfigError) as refused:
        documents(spec)
    return str(refused.value)


# Files


def test_a_folder_is_read_in_the_order_of_its_names_without_files_that_are_not_text(tmp_path):
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a" / "z.py", "first")
    write(tmp_path / "c.jsonl", '{"text": "third"}\n{"text": "fourth"}')
    write(tmp_path / "image.png", b"\x89PNG\xff")
    write(tmp_path / ".git" / "config.txt", "hidden")
    assert documents(tmp_path) == ["first", "second", "third", "fourth"]
    assert "1 x .png" in open_source(str(tmp_path)).notes[0]


def test_runs_and_prepared_data_within_a_folder_are_left_out(tmp_path):
    """They hold JSON lines, and those of a run grow while it is running."""
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


def test_documents_are_counted_by_kind_of_file(tmp_path):
    long = json.dumps({"text": "x" * (3 << 20)})  # three pieces, one document
    write(tmp_path / "a.jsonl", f'{long}\n{{"text": "b<|e|>"}}')
    write(tmp_path / "c.txt", "c<|e|>d<|e|>")
    counts = ReadCounts(("<|e|>",))
    for _ in open_source(str(tmp_path)).pieces(ReadOptions(), counts):
        pass
    assert counts.lines("") == [
        "2 documents from 1 .jsonl file (JSON lines)",
        "1 document from 1 .txt file (plain text)",
        "the text holds '<|e|>' 2 times, as plain text; if it separates documents, add "
        "--separator='<|e|>'",
    ]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere.txt", "no such file or folder"),
        ("*.markdown", "no file matches"),
        ("pictures/*.txt", "no file matches"),
        ("empty", "the folder holds nothing to read (no files at all)"),
        ("pictures", "nothing to read (2 files of other kinds left out: 2 x .png)"),
        ("a.txt*0.7+b.txt", "each part of a mixture needs a weight"),
    ],
)
def test_a_source_without_anything_to_read_is_refused(tmp_path, spec, said):
    for name in ("a.txt", "b.txt", "pictures/1.png", "pictures/2.png"):
        write(tmp_path / name, "text")
    (tmp_path / "empty").mkdir()
    found = refusal(tmp_path / spec)
    assert found.startswith(f"data.source={tmp_path / spec}: ")
    assert said in found


def test_the_standard_library_is_read_without_tests_and_tables():
    source = open_source("stdlib")
    names = [source.name_of(file) for file in source.files]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}
    assert not left_out & {part for name in names for part in name.split("/")}
    assert source.size > 5e6


# What names of files and folders decide


SPLITS = {
    "train": "train.txt train/test_of_time.txt dev/train.txt",
    "val": "TinyStoriesV2-GPT4-valid.txt c4-validation.00000-of-00008.json.gz eval.jsonl "
    "data/dev-00000.parquet corpus_val_000000.bin",
    "test": "TEST.csv wiki.test.tokens test/part-1.txt test/train_1.txt train_test.txt",
    "": "medieval_000.bin contest.txt evaluation.txt developers.txt trained.txt latest.txt "
    "src/test_model.py val.c",
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_is_named_by_whole_words(split):
    names = SPLITS[split].split()
    assert {name: named_split(PurePath(name)) for name in names} == dict.fromkeys(names, split)


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
def test_names_that_all_name_the_same_split_decide_nothing(tmp_path, names):
    for name in names:
        write(tmp_path / "test" / name, name)  # the name of the source itself does not count
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
def test_files_about_the_data_are_left_out(tmp_path, names, read):
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


def test_a_plus_sign_without_weights_is_not_a_mixture(tmp_path):
    write(tmp_path / "a.txt", "a")
    assert "mixture" not in refusal(tmp_path / "c++" / "nope.txt")
    assert "mixture" in refusal(f"{tmp_path}/a.txt+{tmp_path}/a.txt")


def test_a_file_name_may_be_invalid_utf_8(tmp_path):
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    write(file, "text")
    write(tmp_path / "b.txt", "more")
    assert documents(tmp_path) == ["more", "text"]
    assert len(content_of(open_source(str(tmp_path)), tmp_path).digest) == 64


# The first documents


def first(spec: object, n: int) -> list[str]:
    return [piece.text for piece in open_source(str(spec)).pieces(ReadOptions(max_documents=n))]


def test_only_the_first_documents_are_read(tmp_path):
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.jsonl", '{"text": "two"}\n{"text": "three"}\nnot read')
    write(tmp_path / "c.txt", b"\xff not read")
    assert first(tmp_path, 3) == ["one", "two", "three"]
    assert first(tmp_path, 1) == ["one"]
    with pytest.raises(ConfigError, match="b.jsonl"):
        first(tmp_path, 4)
    long = "line\n" * 500_000  # several pieces are one document
    write(tmp_path / "long.txt", long)
    assert "".join(first(tmp_path / "long.txt", 1)) == long


def test_a_validation_file_has_its_own_first_documents(tmp_path):
    for name, texts in {"train-1": "ab", "train-2": "cd", "val-1": "ef", "val-2": "gh"}.items():
        rows = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        write(tmp_path / f"{name}.jsonl", rows)
    pieces = open_source(str(tmp_path)).pieces(ReadOptions(max_documents=3))
    found = [(piece.text, piece.split) for piece in pieces]
    assert found == [*((t, "") for t in "abc"), *((t, "val") for t in "efg")]


def test_no_more_of_a_hub_dataset_is_fetched_than_asked_for(hub):
    def rows():
        yield from ({"text": text} for text in ("one", "two", "three"))
        pytest.fail("fetched")

    hub.rows = rows()
    assert first("hub:owner/name", 3) == ["one", "two", "three"]


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
    monkeypatch.setattr("data.sources.unreachable", lambda: "")
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
    hub.rows = [{"text": [7, 1]}]  # rows may hold ids, as those of files may
    (piece,) = open_source(spec).pieces(ReadOptions(n_ids=9))
    assert ready_tokenizer("ids:9").encode(piece.text) == [7, 1]


def test_only_one_split_of_a_hub_dataset_is_read_and_a_note_says_so():
    for spec, split in {"hub:owner/name": "train", "hub:owner/name@test": "test"}.items():
        (note,) = open_source(spec).notes
        assert f"the split {split} only" in note
        assert "--val_source=hub:owner/name@validation" in note


@pytest.mark.parametrize("spec", ["hub:", "hub:a//b", "hub:a/b/c/d", "hub:/x"])
def test_a_misspelled_hub_source_is_refused(spec):
    assert "hub:OWNER/NAME" in refusal(spec)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("no route"), "did not deliver it (ConnectionError: no route)"),
        (FileNotFoundError("no name"), "did not deliver it (FileNotFoundError: no name)"),
        (RuntimeError("Dataset scripts are not supported, found x.py"), "no longer runs the load"),
    ],
)
def test_an_error_of_the_hub_is_told_with_an_alternative(hub, error, said):
    hub.error = error
    found = refusal("hub:owner/name")
    assert found.startswith("data.source=hub:owner/name: ")
    assert said in found and ".parquet or .jsonl" in found


def test_an_unreachable_hub_is_reported_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace())
    for variable in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    began = time.perf_counter()
    assert "cannot be reached" in refusal("hub:owner/name")
    assert time.perf_counter() - began < 5


def test_a_dataset_from_the_cache_needs_no_network(tmp_path):
    rows = [{"text": f"document {i}"} for i in range(5)]
    write(tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    # The cache of load_dataset("some/name"), made of a local file's, in a process of its own:
    # `datasets` and huggingface_hub read these variables when they are imported.
    code = f"""
import pathlib, sys
import datasets
from data.readers import ReadOptions
from data.sources import open_source
root = pathlib.Path({str(tmp_path)!r})
datasets.load_dataset("json", data_files=str(root / "rows.jsonl"), cache_dir=str(root / "made"))
(made,) = root.glob("made/json/default-*/0.0.0/*/")
cached = root / "cache/some___name/default/0.0.0" / made.name
cached.parent.mkdir(parents=True)
made.rename(cached)
(cached / "json-train.arrow").rename(cached / "name-train.arrow")
about = (cached / "dataset_info.json").read_text()
(cached / "dataset_info.json").write_text(about.replace('"json"', '"name"'))
print([piece.text for piece in open_source("hub:some/name").pieces(ReadOptions(max_documents=2))])
data = datasets.Dataset.from_dict({{"text": [str(i) for i in range(9)]}})
data.select([8, 2, 5, 7]).save_to_disk(root / "saved", num_shards=2)
print([piece.text for piece in open_source(str(root / "saved")).pieces(ReadOptions())])
try:
    list(open_source("hub:other/name").pieces(ReadOptions()))
except Exception as error:
    print(error)
"""
    variables = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
    variables |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    began = time.perf_counter()
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0] == str(["document 0", "document 1"])
    assert lines[1] == str(["8", "2", "5", "7"])
    assert "http://127.0.0.1:9 cannot be reached" in lines[2]
    assert (
        """python -c 'import datasets; datasets.load_dataset("other/name", split="train")'"""
        in lines[2]
    )
    assert time.perf_counter() - began < 30


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
def test_a_mixture_has_weights(spec, parts):
    assert parse_mixture(spec) == parts
    with pytest.raises(ConfigError, match="weight is 0"):
        parse_mixture("a*0+b*1")


# Splits


def some(texts: list[str]) -> Iterator[Piece]:
    for content in texts:
        yield from text_pieces(content, len(content))


def split_text(mode: str, fraction: float, texts: list[str]) -> tuple[str, dict[str, list[str]]]:
    split = resolve_split(mode, fraction, some(texts))
    found: dict[str, list[str]] = {"train": [], "val": []}
    for part in split.parts(some(texts)):
        if part.first:
            found[part.split].append("")
        found[part.split][-1] += part.text
    return split.mode, found


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "texts",
    [["日本" * 50], ["a" * 30, "é" * 70, "z"], ["x" * 19] * 3, ["two pieces\n" * 120_000]],
    ids=range(4),
)
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


def test_adding_documents_moves_no_document_between_splits():
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
