"""Preparing data: the same bytes however it is done, and nothing that looks complete but is not."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from cli.files import try_lock
from cli.options import ConfigError
from data import build, encode, readers
from data.build import make_plan
from data.config import DataConfig
from data.meta import DamagedData, ShardWriter, read_meta, verify
from data.prepare import main, prepare, prepared_folder, preview
from data.shards import IGNORE_INDEX, Windows
from data.sources import Part, open_sources
from data.tokenizer import char_tokenizer, characters_of, load_tokenizer, ready_tokenizer

ROOT = Path(__file__).parents[1]
LINES = [f"Line {i} says {i * i % 97} things, naïvely.\n" for i in range(4000)]
TEXT = "".join(LINES)


@pytest.fixture
def work(tmp_path):
    """A folder that holds a.txt."""
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    return tmp_path


def options(work: Path, source: object = None, **changes) -> DataConfig:
    defaults = {"tokenizer": "byte", "val_fraction": 0.1, "workers": 0}
    return DataConfig(
        source=str(source or work / "a.txt"),
        prepared_dir=str(work / "prepared"),
        **{**defaults, **changes},
    )


def write_rows(path: Path, texts: list) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def prepared(config: DataConfig, **more) -> Path:
    return prepare(config, say=lambda _: None, progress=False, **more)


def ids_of(folder: Path, split: str) -> np.ndarray:
    meta = read_meta(folder)
    parts = [np.fromfile(folder / shard.file, meta.id_dtype) for shard in meta.of(split)]
    return np.concatenate(parts)


def texts_of(folder: Path) -> tuple[str, str]:
    tokenizer = load_tokenizer(folder / "tokenizer")
    return tuple(tokenizer.decode(ids_of(folder, split)) for split in ("train", "val"))


def content(folder: Path) -> dict[str, str]:
    """{name: hash} of every file of prepared data, except for the one with times."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != "source.json"]
    return {
        f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files
    }


def leftovers(folder: Path) -> list[str]:
    """The names in a folder of prepared folders, except for locks and the index."""
    names = [p.name for p in folder.iterdir()] if folder.exists() else []
    return [name for name in names if not name.endswith((".lock", ".sources"))]


def refusal(config: DataConfig, **more) -> str:
    with pytest.raises(ConfigError) as refused:
        prepared(config, **more)
    return str(refused.value)


# Documents and splits


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe:400", "bpe:400:llama"])
def test_all_text_is_prepared_and_split_at_its_tail(work, tokenizer):
    folder = prepared(options(work, tokenizer=tokenizer))
    cut = int(len(TEXT) * 0.9)
    assert texts_of(folder) == (TEXT[:cut], TEXT[cut:])
    meta = read_meta(folder)
    assert meta.bytes == {"train": len(TEXT[:cut].encode()), "val": len(TEXT[cut:].encode())}
    assert meta.tokens == {s: len(ids_of(folder, s)) for s in ("train", "val")}
    lengths = load_tokenizer(folder / "tokenizer").byte_lengths()
    for split in ("train", "val"):
        assert lengths[ids_of(folder, split)].sum() == meta.bytes[split]
    assert sum(meta.documents.values()) == 1
    assert meta.dtype == "uint16"
    assert folder.name.startswith("a_txt-" + tokenizer.replace(":", ""))


def test_an_end_of_text_follows_each_document_but_not_a_cut(work):
    texts = ["one", "two\n", "three and more"]
    write_rows(work / "b.jsonl", texts)
    folder = prepared(options(work, work / "b.jsonl", val_fraction=0.5))
    eot = 256
    expected = [[*text.encode(), eot] for text in texts]
    train, val = ids_of(folder, "train").tolist(), ids_of(folder, "val").tolist()
    assert train + val == sum(expected, [])
    assert train[-1] != eot  # the tail begins inside the third document
    windows = Windows(folder, "train", 3, "document")
    assert [windows.pair(i)[1].tolist() for i in range(4)] == [
        list(b"one"),
        [eot, IGNORE_INDEX, IGNORE_INDEX],
        list(b"two"),
        [10, eot, IGNORE_INDEX],
    ]
    assert windows.pair(2)[0][0] == eot
    tail = Windows(folder, "val", 3, "document")
    targets = np.concatenate([tail.pair(i)[1] for i in range(len(tail))])
    assert targets[targets != IGNORE_INDEX].tolist() == val


def test_a_tail_that_begins_inside_a_document_is_read_from_its_first_token(work, small):
    folder = prepared(options(work))
    windows = Windows(folder, "val", 50, "document")
    targets = np.concatenate([windows.pair(i)[1] for i in range(len(windows))])
    assert targets[targets != IGNORE_INDEX].tolist() == ids_of(folder, "val").tolist()


def test_a_char_tokenizer_has_an_end_of_text_only_for_several_documents(work):
    assert load_tokenizer(prepared(options(work, tokenizer="char")) / "tokenizer").eot is None
    (work / "b.txt").write_text("b")
    several = prepared(options(work, work / "*.txt", tokenizer="char"))
    assert load_tokenizer(several / "tokenizer").eot == len(set(TEXT) | {"b"})


@pytest.mark.parametrize("size", [65535, 65536, 65537])
def test_the_dtype_holds_vocabularies_around_65536_ids(work, size):
    characters = [chr(c) for c in range(0x21, 0x20000) if not 0xD800 <= c < 0xE000]
    characters = [c for c in characters if c not in "\r\ufeff" and not c.isspace()][:size]
    (work / "wide.txt").write_text("".join(characters), encoding="utf-8")
    folder = prepared(options(work, work / "wide.txt", tokenizer="char"))
    meta = read_meta(folder)
    assert meta.vocab_size == size
    assert meta.dtype == ("uint16" if size <= 65536 else "uint32")
    assert "".join(texts_of(folder)) == "".join(characters)
    verify(folder, lambda _: None)


def test_special_tokens_spelled_in_the_text_are_plain_text(work):
    (work / "b.txt").write_text("a<|endoftext|>b" * 100)
    folder = prepared(options(work, work / "b.txt", tokenizer="bpe:300"))
    eot = load_tokenizer(folder / "tokenizer").eot
    assert (ids_of(folder, "train") == eot).sum() == 0
    assert (ids_of(folder, "val") == eot).sum() == 1


@pytest.mark.parametrize(
    "text",
    [
        "x" * (2 * readers.PIECE_BYTES + 5),
        " " * 10**6 + "end",
        "no final newline",
        "\ufeffa\r\nb\rc\nd" * 100,
        "日本語🙂" * 200_000,
    ],
    ids=["giant line", "spaces", "short", "newlines", "long"],
)
def test_unusual_texts_are_restored(work, text):
    (work / "odd.txt").write_bytes(text.encode())
    folder = prepared(options(work, work / "odd.txt", tokenizer="bpe:300"))
    expected = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    assert "".join(texts_of(folder)) == expected


def test_line_endings_and_byte_order_marks_do_not_change_the_ids(work):
    found = set()
    for name, raw in {
        "lf": TEXT.encode(),
        "crlf": TEXT.replace("\n", "\r\n").encode(),
        "cr": TEXT.replace("\n", "\r").encode(),
        "mark": b"\xef\xbb\xbf" + TEXT.encode(),
    }.items():
        (work / name).mkdir()
        (work / name / "a.txt").write_bytes(raw)
        folder = prepared(options(work, work / name / "a.txt", tokenizer="bpe:300"))
        found.add(read_meta(folder).fingerprint)
    assert len(found) == 1


# Refused texts leave nothing behind


@pytest.mark.parametrize("raw", [b"", b"\n\n", b" \r\n\t", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("tokenizer", ["char", "bpe:300"])
def test_an_empty_text_is_refused(work, raw, tokenizer):
    (work / "a.txt").write_bytes(raw)
    assert "holds no text" in refusal(options(work, tokenizer=tokenizer))
    assert leftovers(work / "prepared") == []


def test_an_empty_split_is_refused_with_advice(work):
    write_rows(work / "b.jsonl", ["only one"] * 3)
    for advice, config in {
        "the val split is empty (data.split=document, data.val_fraction=0.01)": options(
            work, work / "b.jsonl", split="document", val_fraction=0.01
        ),
        "the train split is empty (data.split=tail": options(
            work, work / "b.jsonl", val_fraction=0.99
        ),
    }.items():
        message = refusal(config)
        assert advice in message
        assert ("--split=tail" in message) == (config.split == "document")  # not if it is used
    assert leftovers(work / "prepared") == []


def test_invalid_utf8_is_refused_by_offset_or_replaced(work):
    raw = TEXT.encode()[:5000] + b"\xe9" + TEXT.encode()[5000:]
    (work / "a.txt").write_bytes(raw)
    for workers in (0, 2):
        assert "offset 5000 " in refusal(options(work, workers=workers))
    folder = prepared(options(work, errors="replace"))
    assert "".join(texts_of(folder)) == raw.decode("utf-8", "replace")


# Processes and shards do not change the ids


SHARD = 40_000


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Make pieces and tasks a few kilobytes, so that a small text has many of each."""
    patch.setattr(readers, "PIECE_BYTES", 16_000)
    patch.setattr(encode, "TASK_CHARACTERS", 8_000)


@pytest.fixture
def small(monkeypatch):
    shrink(monkeypatch)


@pytest.fixture(scope="module")
def reference_made(tmp_path_factory):
    work = tmp_path_factory.mktemp("reference")
    rows = ["".join(LINES[i : i + 40]) for i in range(0, len(LINES), 40)]
    write_rows(work / "a.jsonl", [*rows[:30], TEXT[:100_000], *rows[30:]])
    config = options(work, work / "a.jsonl", tokenizer="bpe:400")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        return config, prepared(config, shard_bytes=SHARD)


@pytest.fixture
def reference(reference_made, small):
    """(options, prepared folder) of many documents; one is longer than a shard."""
    return reference_made


def test_any_number_of_processes_writes_the_same_files(reference, tmp_path):
    config, folder = reference
    for workers in (1, 2):
        again = replace(config, prepared_dir=str(tmp_path / str(workers)), workers=workers)
        assert content(prepared(again, shard_bytes=SHARD)) == content(folder)


def test_a_document_may_be_longer_than_a_shard(reference):
    config, folder = reference
    assert len(read_meta(folder).of("train")) > 2
    rows = [json.loads(line)["text"] for line in Path(config.source).read_text().splitlines()]
    tokenizer = load_tokenizer(folder / "tokenizer")
    found = []
    for split in ("train", "val"):
        ids = ids_of(folder, split)
        ends = np.flatnonzero(ids == tokenizer.eot) + 1
        found += [tokenizer.decode(part) for part in np.split(ids, ends)[:-1]]
    assert sorted(found) == sorted(rows)
    verify(folder, lambda _: None)


def test_the_shard_size_does_not_change_the_ids(reference, tmp_path):
    config, folder = reference
    one = prepared(replace(config, prepared_dir=str(tmp_path)))
    for split in ("train", "val"):
        assert len(read_meta(one).of(split)) == 1
        assert ids_of(one, split).tolist() == ids_of(folder, split).tolist()
        for kind in ("packed", "document"):
            first, second = Windows(one, split, 64, kind), Windows(folder, split, 64, kind)
            assert len(first) == len(second)
            for i in range(0, len(first), 97):
                assert np.array_equal(first.pair(i), second.pair(i))


# Unchanged, changed and missing sources


def test_an_unchanged_source_is_not_read_or_prepared_again(work, monkeypatch):
    config = options(work)
    folder = prepared(config)
    monkeypatch.setattr(build, "make_tokenizer", lambda *_: pytest.fail("prepared again"))
    os.utime(work / "a.txt", (1, 1))
    assert prepared(config) == folder  # read again, but not prepared
    monkeypatch.setattr("data.prepared._sha256", lambda _: pytest.fail("read again"))
    assert prepared(config) == folder
    more = {"global_batch": 3, "micro_batch": 1, "windows": "document", "workers": 2}
    assert prepared(replace(config, **more)) == folder  # options that do not change the ids


def test_a_changed_source_is_prepared_again_with_a_message(work):
    config, said = options(work), []
    before = prepared(config)
    (work / "a.txt").write_text(TEXT.replace("Line 7", "Lime 7"))
    folder = prepare(config, say=said.append, progress=False)
    assert [line.partition(": ")[2] for line in said][0] == "preparing it again"
    assert "a.txt has changed" in said[0] and len(said) == 2
    assert read_meta(folder).fingerprint != read_meta(before).fingerprint
    assert "Lime 7" in texts_of(folder)[0]
    assert "".join(texts_of(before)) == TEXT  # a run may be reading it
    assert sorted(leftovers(work / "prepared")) == sorted([before.name, folder.name])
    (work / "a.txt").write_text(TEXT)
    assert prepared(config) == before


def test_a_tokenizer_replaced_in_its_folder_is_loaded_again(work):
    task = [Part("train", "abc", True, True, 3)]
    for alphabet, ids in (("abc", [0, 1, 2]), ("ab!c", [1, 2, 3])):
        shutil.rmtree(work / "tokenizer", ignore_errors=True)
        char_tokenizer("".join(sorted(alphabet)), False).save(work / "tokenizer")
        found = encode.encode_task(work / "tokenizer", "uint16", task).splits["train"]
        assert found.ids.tolist() == ids


@pytest.mark.parametrize("spec", ["elsewhere/a.txt", "./a.txt", "../{}/a.txt", "b.md"])
def test_the_same_content_elsewhere_gives_the_same_folder(work, spec, monkeypatch):
    folder = prepared(options(work))
    (work / "elsewhere").mkdir()
    for copy in ("elsewhere/a.txt", "b.md"):
        shutil.copy(work / "a.txt", work / copy)
    monkeypatch.chdir(work)
    monkeypatch.setattr(build, "encode_task", lambda *_: pytest.fail("prepared again"))
    assert prepared(options(work, spec.format(work.name))) == folder


def test_a_tokenizer_is_identified_by_its_content(work):
    own = prepared(options(work, tokenizer="bpe:300")) / "tokenizer"
    for name in ("one", "two"):
        shutil.copytree(own, work / name)
    first = prepared(options(work, tokenizer=f"hf:{work / 'one'}"))
    assert "".join(texts_of(first)) == TEXT
    two = options(work, tokenizer=f"hf:{work / 'two'}")
    assert prepared(two) == first
    eot = json.dumps({"eos_token": "L"})  # another end-of-text
    (work / "two/tokenizer_config.json").write_text(eot)
    second = prepared(two)
    other = prepared(options(work, tokenizer="bpe:310")) / "tokenizer" / "tokenizer.json"
    shutil.copy(other, work / "two")
    assert len({first, second, prepared(two)}) == 3


def test_prepared_data_is_used_after_its_source_is_deleted(work):
    config, said = options(work), []
    folder = prepared(config)
    (work / "a.txt").unlink()
    assert prepare(config, say=said.append) == folder
    assert "no such file" in said[0]
    assert str(folder) in said[0]


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "char"},
        {"val_fraction": 0.2},
        {"split": "tail"},
        {"errors": "replace"},
        {"text_field": "body"},
        {"separator": "|"},
        {"ids": "u4"},
        {"val_source": "b.txt"},
        {"source": "b.txt"},
    ],
)
def test_options_that_change_the_ids_change_the_folder(work, change, monkeypatch):
    (work / "b.txt").write_text("other")
    monkeypatch.chdir(work)
    assert prepared_folder(options(work)) != prepared_folder(replace(options(work), **change))


# Interruptions and failures


def flags(config: DataConfig) -> list[str]:
    names = ("source", "tokenizer", "val_fraction", "prepared_dir", "workers")
    return [f"--{name}={getattr(config, name)}" for name in names]


SCRIPT = [sys.executable, "-m", "data.prepare"]


def run(config: DataConfig, limit: int, amount: int) -> subprocess.CompletedProcess:
    """Prepare in a process of its own, under a limit of the operating system."""

    def before() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(limit, (amount, amount))

    return subprocess.run(
        [*SCRIPT, *flags(config)], cwd=ROOT, capture_output=True, text=True, preexec_fn=before
    )


class Killed(BaseException):
    """Stands for a kill of the process."""


def encode_until(monkeypatch, count: int) -> list:
    """Let `count` more tasks be encoded before a kill; returns the list of those that were."""
    encoded: list = []

    def encode_task(folder, dtype, task):
        if len(encoded) == count:
            raise Killed
        encoded.append(task)
        return encode.encode_task(folder, dtype, task)

    monkeypatch.setattr(build, "encode_task", encode_task)
    return encoded


@pytest.mark.parametrize("after", [0, 1, 9, 20])
def test_a_killed_preparation_continues_after_its_last_finished_shard(
    reference, tmp_path, monkeypatch, after
):
    config, folder = reference
    config = replace(config, prepared_dir=str(tmp_path))
    encode_until(monkeypatch, after)
    with pytest.raises(Killed):
        prepared(config, shard_bytes=SHARD)
    with pytest.raises(ConfigError, match="no prepared data"):
        Windows(prepared_folder(config), "train", 8)
    lines = next(tmp_path.glob(".*/progress.jsonl")).read_text().splitlines()
    finished = json.loads(lines[-1])[1] if lines else 0
    assert (finished > 0) == (after >= 9)
    monkeypatch.setattr(build, "make_tokenizer", lambda *_: pytest.fail("trained again"))
    rest = encode_until(monkeypatch, 10**6)
    assert content(prepared(config, shard_bytes=SHARD)) == content(folder)
    plan = make_plan(config, open_sources(config))
    tasks = list(encode.grouped(plan.splits[0].parts(plan.pieces(plan.sources[0]))))
    assert rest == tasks[finished:]  # what was finished was not done again
    assert leftovers(tmp_path) == [folder.name]


def test_a_killed_build_of_a_mixture_continues_within_its_source(work, monkeypatch):
    some_ids().astype("<u2").tofile(work / "b.bin")
    monkeypatch.setattr(encode, "CHUNK_IDS", 333)
    config = options(work, f"{work / 'a.txt'}*0.5+{work / 'b.bin'}*0.5")
    other = replace(config, prepared_dir=str(work / "other"))
    whole = content(prepared(other, shard_bytes=1000))

    def killed(*arguments):
        yield from islice(encode.encoded_ids(*arguments), 8)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(build, "encoded_ids", killed)
        with pytest.raises(Killed):
            prepared(config, shard_bytes=1000)
    monkeypatch.setattr(build, "grouped", lambda _: pytest.fail("a.txt was complete"))
    assert content(prepared(config, shard_bytes=1000)) == whole


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_kill_around_the_final_rename_loses_nothing(work, monkeypatch, at):
    config = options(work)
    rename = os.rename

    def killed(source, target):
        if at == "after" or not source.name.endswith(".partial"):
            rename(source, target)
        if source.name.endswith(".partial"):
            raise Killed

    monkeypatch.setattr("data.build.os.rename", killed)
    with pytest.raises(Killed):
        prepared(config)
    monkeypatch.undo()
    monkeypatch.setattr(build, "encode_task", lambda *_: pytest.fail("encoded again"))
    folder = prepared(config)
    assert "".join(texts_of(folder)) == TEXT
    assert leftovers(work / "prepared") == [folder.name]


@pytest.mark.parametrize("keeps_time", [False, True])
def test_a_source_that_changes_while_it_is_read_is_refused(work, monkeypatch, keeps_time):
    texts = work / "texts"
    texts.mkdir()
    for name in ("a.txt", "b.txt"):
        (texts / name).write_text(TEXT)
    before = (texts / "b.txt").stat().st_mtime_ns
    monkeypatch.setattr(encode, "TASK_CHARACTERS", 1)

    def write(text: str) -> None:
        (texts / "b.txt").write_text(text)
        if keeps_time:
            os.utime(texts / "b.txt", ns=(before, before))

    def change(*arguments):
        write(TEXT.replace("Line", "Lime"))
        return encode.encode_task(*arguments)

    monkeypatch.setattr(build, "encode_task", change)
    assert "changed while it was read" in refusal(options(work, texts))
    monkeypatch.setattr(build, "encode_task", encode.encode_task)
    write(TEXT)
    assert "Lime" not in "".join(texts_of(prepared(options(work, texts))))


@pytest.mark.parametrize("what", ["shards", "tokenizer"])
def test_a_build_killed_while_its_source_was_changed_keeps_none_of_the_change(
    work, monkeypatch, what
):
    texts, before, encoded = work / "texts", time.time_ns() - 10**10, []
    texts.mkdir()

    def write(word: str) -> None:
        for i in range(20):
            path = texts / f"{i:02d}.txt"
            path.write_text("".join(LINES[10 * i : 10 * i + 10]).replace("Line", word))
            if word == "Line":
                os.utime(path, ns=(before, before))  # as a copy that keeps times

    def changing(*arguments):
        write("Lime")
        encoded.append(what)
        if encoded.count("shards") == 9:
            raise Killed
        return inner(*arguments)

    write("Line")
    config = options(work, texts, tokenizer="bpe:300")
    monkeypatch.setattr(encode, "TASK_CHARACTERS", 1)
    inner = build.encode_task if what == "shards" else build.make_tokenizer
    with monkeypatch.context() as patch:
        if what == "tokenizer":
            encode_until(patch, 0)
        patch.setattr(build, inner.__name__, changing)
        with pytest.raises((Killed, ConfigError)):
            prepared(config, shard_bytes=200)
    write("Line")
    continued = prepared(config, shard_bytes=200)
    (work / "fresh").mkdir()
    fresh = prepared(replace(config, prepared_dir=str(work / "fresh")), shard_bytes=200)
    assert content(continued) == content(fresh)


def test_a_full_disk_leaves_nothing_that_looks_complete(work):
    config = options(work)
    ended = run(config, resource.RLIMIT_FSIZE, 100_000)
    assert ended.returncode == 5, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: ")
    assert str(work / "prepared") in ended.stderr
    assert not prepared_folder(config).exists()
    assert "".join(texts_of(prepared(config))) == TEXT


def test_a_worker_that_dies_is_an_error(work, monkeypatch):
    (work / "b.txt").write_text(TEXT * 20)
    config = options(work, work / "b.txt", workers=2)
    monkeypatch.setattr(encode, "_follow_parent", die)
    with pytest.raises(ConfigError, match="workers=2: a process .* died"):
        prepared(config)
    assert not prepared_folder(config).exists()


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(38, "no")])
def test_without_shared_memory_one_process_prepares(work, monkeypatch, capsys, error):
    """Without a writable /dev/shm, semaphores cannot be made."""
    import _multiprocessing

    def no_semaphores(*_):
        raise error

    monkeypatch.setattr(_multiprocessing, "SemLock", no_semaphores)
    assert "".join(texts_of(prepared(options(work, workers=3)))) == TEXT
    assert "data.workers=3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "method"), [("a.txt", "is_file"), ("a.txt", "open"), ("tokenizer.json", "read_text")]
)
def test_an_unreadable_source_or_tokenizer_is_a_users_mistake(
    work, monkeypatch, command, name, method
):
    """Its exit code is not that of a disk that cannot be written, which is an OSError too."""
    own = prepared(options(work, tokenizer="bpe:300")) / "tokenizer"
    real = getattr(Path, method)

    def closed(self, *arguments, **options):
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, method, closed)
    argv = [f"--source={work / 'a.txt'}", f"--tokenizer=hf:{own}"]
    code, _, err = command(main, *argv, f"--prepared_dir={work / 'prepared'}")
    assert code == 2
    assert name in err and "Permission denied" in err


@pytest.mark.parametrize("cut", [1, 40, -1, None])
def test_a_torn_journal_is_read_up_to_the_tear(reference, tmp_path, monkeypatch, cut):
    config, folder = reference
    config = replace(config, prepared_dir=str(tmp_path))
    encode_until(monkeypatch, 20)
    with pytest.raises(Killed):
        prepared(config, shard_bytes=SHARD)
    (journal,) = tmp_path.glob(".*/progress.jsonl")
    *whole, last = journal.read_bytes().splitlines(keepends=True)
    torn = b"\0" * 300 if cut is None else last[:cut]
    journal.write_bytes(b"".join(whole) + torn)
    encode_until(monkeypatch, 12)
    with pytest.raises(Killed):
        prepared(config, shard_bytes=SHARD)
    lines = journal.read_bytes().splitlines()
    assert len(lines) > len(whole) > 0
    assert all(json.loads(line) for line in lines)
    encode_until(monkeypatch, 10**6)
    assert content(prepared(config, shard_bytes=SHARD)) == content(folder)


def test_the_journal_is_only_appended_to(reference, tmp_path, monkeypatch):
    config, folder = reference
    written, add = [], build.Journal.add

    def adding(self, *arguments):
        before = self.path.read_bytes()
        add(self, *arguments)
        assert self.path.read_bytes().startswith(before)
        written.append(self.path.stat().st_size - len(before))

    monkeypatch.setattr(build.Journal, "add", adding)
    prepared(replace(config, prepared_dir=str(tmp_path)), shard_bytes=SHARD)
    assert len(written) > 3
    assert max(written) < 2000  # whatever came before


def test_leftovers_of_a_killed_pipe_are_deleted(work, monkeypatch):
    root = work / "prepared"
    root.mkdir()
    (root / ".stdin-1").write_text("left")
    with (root / ".stdin-2").open("wb") as other:  # another process reads its own
        assert try_lock(other) == "locked"

        def encode_task(*arguments):
            with (root / f".stdin-{os.getpid()}").open("ab") as own:
                assert try_lock(own) == "held"
            return encode.encode_task(*arguments)

        monkeypatch.setattr(build, "encode_task", encode_task)
        monkeypatch.setattr("sys.stdin", Stdin(TEXT.encode()))
        folder = prepared(options(work, "-"))
    assert sorted(leftovers(root)) == sorted([".stdin-2", folder.name])


def die() -> None:
    os._exit(9)


def running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()


@pytest.mark.faults
def test_workers_exit_when_their_parent_is_killed(work):
    (work / "b.txt").write_text(TEXT * 200)
    config = options(work, work / "b.txt", tokenizer="byte", workers=2)
    process = subprocess.Popen(
        [*SCRIPT, *flags(config)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def children() -> list[int]:
        found = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True).stdout
        rows = [tuple(map(int, line.split())) for line in found.splitlines()[1:]]
        return [pid for pid, parent in rows if parent == process.pid]

    deadline = time.time() + 60
    while len(children()) < 2 and time.time() < deadline:
        time.sleep(0.05)
    workers = children()
    assert len(workers) >= 2
    process.kill()
    process.wait()
    while [pid for pid in workers if running(pid)] and time.time() < deadline:
        time.sleep(0.1)
    assert [pid for pid in workers if running(pid)] == []
    folder = prepared(config)
    assert sum(read_meta(folder).tokens.values()) == 200 * len(TEXT.encode()) + 1


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["lines", "one document"])
def test_two_gigabytes_in_one_gigabyte_of_address_space(work, kind):
    source = work / ("big.jsonl" if kind == "lines" else "big.txt")
    block = TEXT * 60
    row = json.dumps({"text": TEXT[:3000]}) + "\n"
    with source.open("w") as stream:
        while stream.tell() < 2 << 30:
            stream.write(row * 3000 if kind == "lines" else block)
    config = options(work, source, tokenizer="byte", workers=2)
    ended = run(config, resource.RLIMIT_AS, 1 << 30)
    assert ended.returncode == 0, ended.stderr[-2000:]
    print(ended.stdout)
    assert sum(read_meta(prepared_folder(config)).tokens.values()) > 1.8e9


# Verifying


def test_verify_reads_every_byte(reference, tmp_path):
    _, folder = reference
    copy = tmp_path / "copy"
    said = []
    verify(folder, said.append)
    assert "shards verified" in said[0]
    for file in sorted(f.relative_to(folder) for f in folder.rglob("*") if f.is_file()):
        raw = bytearray((folder / file).read_bytes())
        if file.name == "source.json" or not raw:  # no document may start in a shard
            continue
        shutil.copytree(folder, copy)
        raw[len(raw) // 2] ^= 1
        (copy / file).write_bytes(raw)
        with pytest.raises(DamagedData) as refused:
            verify(copy)
        assert refused.value.exit_code == 3
        shutil.rmtree(copy)


def test_verify_does_not_trust_the_checksum_file(work):
    folder = prepared(options(work))
    ids = np.full(read_meta(folder).of("val")[0].tokens, 65)
    writer = ShardWriter(work, "val", 0, 0, "uint16")
    writer.append(ids, np.array([0]), bytes=len(ids), documents=1)
    writer.close()
    (target,) = folder.glob("val*.bin")
    for suffix in (".bin", ".crc"):
        shutil.copy(writer.path.with_suffix(suffix), target.with_suffix(suffix))
    with pytest.raises(DamagedData, match="SHA-256"):
        verify(folder)


# The command


def test_the_command_reports_new_and_existing_data(work, command):
    config = options(work, tokenizer="bpe:300")
    (code, first, _), (again, second, _) = (command(main, *flags(config)) for _ in range(2))
    assert code == again == 0
    folder = prepared_folder(config)
    meta = read_meta(folder)
    tokens, n_bytes = sum(meta.tokens.values()), len(TEXT.encode())
    for part in (
        f"prepared {folder}",
        " 1 document",
        f"{n_bytes:,} bytes",
        f"{tokens:,} tokens",
        f"{n_bytes / tokens:.2f} bytes per token",
        f"train {meta.tokens['train']:,}",
        f"val {meta.tokens['val']:,}",
    ):
        assert part in first.splitlines()[-1]
    assert second.startswith(f"{folder} is up to date: 1 document,")
    assert command(main, *flags(config), "--verify")[0] == 0
    next(folder.glob("val*.bin")).write_bytes(b"")
    code, _, err = command(main, *flags(config), "--verify")
    assert code == 3 and err.startswith("error: ")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--tokenizer=bpe:5", "bpe:5"),
        ("--source=nope.txt", "nope.txt"),
        ("--val_fraction=2", "val_fraction=2"),
        ("--sorce=x", "data.source"),
        ("--errors=ignore", "strict or replace"),
    ],
)
def test_mistakes_exit_with_code_2(work, capsys, flag, said):
    with pytest.raises(ConfigError) as refused:
        main([flag, f"--prepared_dir={work / 'prepared'}"])
    assert refused.value.exit_code == 2
    assert said in refused.value.problems[0]
    assert leftovers(work / "prepared") == []


def test_progress_reaches_the_end(work, monkeypatch):
    updates = []

    class Bar:
        def __init__(self, total, **_) -> None:
            self.total, self.n = total, 0

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            updates.append((self.n, self.total))

        def update(self, n: int) -> None:
            assert n >= 0
            self.n += n

    monkeypatch.setattr("tqdm.tqdm", Bar)
    for size in (1, 1000, 70_001):
        (work / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode()[: size * 2] + b"\r\n")
        prepare(options(work), say=lambda _: None)
        assert updates[-1] == ((work / "a.txt").stat().st_size,) * 2
    write_rows(work / "b.jsonl", [None] * 5 + ["some text"] * 5)
    prepare(options(work, work / "b.jsonl", val_fraction=0.5), say=lambda _: None)
    assert updates[-1] == ((work / "b.jsonl").stat().st_size,) * 2


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe:400", "bpe:400:llama"])
def test_a_dry_run_makes_nothing_and_predicts_the_size(work, tokenizer):
    said = []
    preview(options(work, tokenizer=tokenizer), said.append)
    assert "1 file, 0.1 MB" in said[0]
    about = int(re.search(r"about ([\d,]+) tokens", "".join(said))[1].replace(",", ""))
    assert leftovers(work / "prepared") == []
    real = sum(read_meta(prepared(options(work, tokenizer=tokenizer))).tokens.values())
    assert abs(about / real - 1) < 0.05
    assert "Line" in said[-2].replace("|", "")


def test_importing_is_light():
    code = (
        "import sys, threading, data.prepare\n"
        "assert threading.active_count() == 1\n"
        "heavy = {'torch', 'tokenizers', 'tiktoken', 'datasets', 'pyarrow', 'tqdm'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Standard input


class Stdin(io.TextIOWrapper):
    def __init__(self, raw: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(raw))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def test_standard_input_is_a_source(work, monkeypatch):
    config = options(work, "-")
    for raw, terminal, told in (
        (b"", False, "standard input is empty"),
        (b"", True, "standard input is empty"),
        (b" \n", False, "holds no text"),
    ):
        monkeypatch.setattr("sys.stdin", Stdin(raw, terminal))
        said = refusal(config)
        assert "data.source=-" in said and told in said
        assert leftovers(work / "prepared") == []
    monkeypatch.setattr("sys.stdin", Stdin(TEXT.encode()))
    folder = prepared(config)
    assert "".join(texts_of(folder)) == TEXT
    assert leftovers(work / "prepared") == [folder.name]
    monkeypatch.setattr("sys.stdin", Stdin(TEXT.encode()))
    assert prepared(config) == folder  # the same text again
    monkeypatch.setattr("sys.stdin", Stdin(TEXT.encode() + b"more"))
    other = prepared(config)
    assert other != folder
    assert ["".join(texts_of(f)) for f in (folder, other)] == [TEXT, TEXT + "more"]
    monkeypatch.setattr("sys.stdin", Stdin(b""))  # which of the two is meant cannot be known
    assert "standard input is empty" in refusal(config)


@pytest.mark.parametrize("action", ["dry_run", "verify"])
@pytest.mark.parametrize("option", ["source", "val_source"])
def test_standard_input_can_only_be_prepared(work, monkeypatch, command, action, option):
    monkeypatch.setattr("sys.stdin", Stdin(TEXT.encode()))
    typed = {"source": work / "a.txt", option: "-", "tokenizer": "byte"}
    argv = [f"--{name}={value}" for name, value in typed.items()]
    code, out, err = command(main, *argv, f"--prepared_dir={work / 'prepared'}", f"--{action}")
    assert (code, out) == (2, "")
    assert f"{action}=true" in err and f"--{option}=-" in err and "file" in err


def test_json_lines_on_standard_input_are_documents(work, monkeypatch):
    raw = "".join(json.dumps({"text": f"Story {i}.", "url": "u"}) + "\n" for i in range(60))
    for content in (raw.encode(), gzip.compress(raw.encode())):
        monkeypatch.setattr("sys.stdin", Stdin(content))
        meta = read_meta(prepared(options(work, "-")))
        assert sum(meta.documents.values()) == 60


def test_a_file_as_prepared_dir_is_refused(work, command):
    file = work / "mine.txt"
    file.write_text("mine")
    argv = [f"--source={file}", "--tokenizer=byte", "--workers=0", f"--prepared_dir={file}"]
    code, out, err = command(main, *argv)
    assert (code, out) == (2, "")
    assert err == f"error: data.prepared_dir={file}: {file} is a file, not a folder\n"
    assert file.read_text() == "mine"


# Mixtures


def test_a_mixture_has_one_tokenizer_and_shards_per_source(work):
    (work / "b.txt").write_text("Ω" * 3000 + "b")
    config = options(work, f"{work / 'a.txt'}*0.75+{work / 'b.txt'}*0.25", tokenizer="char")
    folder = prepared(config)
    meta = read_meta(folder)
    assert meta.weights == [0.75, 0.25]
    tokenizer = load_tokenizer(folder / "tokenizer")
    for number, whole in enumerate((TEXT, "Ω" * 3000 + "b")):
        parts = [np.fromfile(folder / s.file, "<u2") for s in meta.of("train", number)]
        assert tokenizer.decode(np.concatenate(parts)) == whole[: int(len(whole) * 0.9)]
    windows = Windows(folder, "train", 32)
    assert len(windows.parts) == 2
    other = replace(config, source=config.source.replace("0.75", "0.8").replace("0.25", "0.2"))
    assert read_meta(prepared(other)).fingerprint != meta.fingerprint


# Notes about the files of a source


def told(config: DataConfig) -> list[str]:
    said: list[str] = []
    prepare(config, say=said.append, progress=False)
    return said


def test_the_kinds_of_files_are_reported(work):
    folder = work / "mixed"
    folder.mkdir()
    for name, content in {
        "a.csv": "text,n\none,1\ntwo,2\n",
        "b.json": '{\n "not": "ours"\n}',
        "c.jsonl": '{"text": "three"}\n',
        "d.txt": '{"text": "four"}\n',
        "e.md": "five",
        "f.png": "six",
        "README.md": "a card",
        "test.txt": "seven",
    }.items():
        (folder / name).write_text(content)
    said = "\n".join(told(options(work, folder, val_fraction=0.3)))
    for line in (
        "2 documents from 1 .csv file (csv)",
        "1 document from 1 .json file (plain text: neither JSON lines nor",
        "1 document from 1 .jsonl file (JSON lines)",
        "1 document from 1 .txt file (plain text; 1 of them look like JSON lines",
        "1 document from 1 .md file (plain text)",
        "1 file of other kinds left out: 1 x .png",
        "about the data, left out: README.md",
        "test split left out, by name: test.txt",
    ):
        assert f"{folder}: {line}" in said, line


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("a.txt", {"text_field": "body"}),
        ("b.bin", {"text_field": "body"}),
        ("c.json", {"text_field": "body"}),
        ("d.jsonl", {"separator": "|"}),
    ],
)
def test_options_that_apply_to_no_file_are_refused(work, name, option):
    some_ids().astype("<u2").tofile(work / "b.bin")
    (work / "c.json").write_text("plain text")
    write_rows(work / "d.jsonl", ["a"])
    ((key, value),) = option.items()
    message = refusal(options(work, work / name, **option))
    assert message.startswith(f"data.{key}=") and value in message and "no file" in message


@pytest.mark.parametrize("split", ["auto", "tail", "document"])
def test_files_named_for_validation_are_the_validation_split(work, split):
    folder = work / "named"
    folder.mkdir()
    for name, word in {"train.jsonl": "train", "valid.jsonl": "val", "test.jsonl": "test"}.items():
        write_rows(folder / name, [f"{word} {i}\n" for i in range(100)])
    train, val = texts_of(prepared(options(work, folder, split=split, val_fraction=0.3)))
    assert "test" not in train + val
    assert (train.count("train"), val.count("val")) == (100, 100) or split != "auto"
    assert train.count("train") + val.count("train") == 100
    assert ("val" in train or split == "tail") == (split != "auto")
    if split == "auto":  # names decide, whatever the fraction is
        again = texts_of(prepared(options(work, folder, split=split, val_fraction=0.0)))
        assert again == (train, val)


# Validation text and separators


@pytest.mark.parametrize("split", ["auto", "tail", "document"])
@pytest.mark.parametrize("name", ["a.txt", "b.jsonl", "c.bin"])
def test_a_val_fraction_of_0_means_no_validation(work, split, name):
    write_rows(work / "b.jsonl", LINES[:99])
    some_ids().astype("<u2").tofile(work / "c.bin")
    if (name, split) == ("c.bin", "document"):
        return
    folder = prepared(options(work, work / name, split=split, val_fraction=0.0))
    meta = read_meta(folder)
    assert meta.of("val") == []
    assert meta.splits == ["none"]
    whole = {"a.txt": len(TEXT.encode()) + 1, "c.bin": 5000}
    assert meta.tokens["train"] == whole.get(name, meta.tokens["train"])
    verify(folder, lambda _: None)


@pytest.mark.parametrize("fraction", [0.1, 0.0])
def test_a_validation_source_is_the_only_validation_text(work, fraction):
    (work / "v.txt").write_text("validation only\n" * 50)
    config = options(work, val_fraction=fraction, val_source=str(work / "v.txt"), split="tail")
    said = told(config)
    folder = prepared(config)
    assert texts_of(folder) == (TEXT, "validation only\n" * 50)
    meta = read_meta(folder)
    assert (meta.weights, meta.splits) == ([1.0], ["rest", "only"])
    assert any("is the validation text" in line and "val_fraction" in line for line in said)
    assert len(Windows(folder, "train", 32).parts) == len(Windows(folder, "val", 32).parts) == 1
    assert prepared_folder(config) != prepared_folder(replace(config, val_source=""))
    verify(folder, lambda _: None)


def test_a_mixture_with_ids_can_be_the_validation_source(work):
    (work / "b.txt").write_text("b" * 900)
    write_rows(work / "v.jsonl", ["one", "two"])
    some_ids().astype("<u2").tofile(work / "v.bin")
    source = f"{work / 'a.txt'}*0.75+{work / 'b.txt'}*0.25"
    val = f"{work / 'v.jsonl'}*1+{work / 'v.bin'}*9"
    folder = prepared(options(work, source, val_source=val))
    meta = read_meta(folder)
    assert meta.weights == [0.75, 0.25]
    assert [shard.source for shard in meta.of("train")] == [0, 1]
    assert [shard.source for shard in meta.of("val")] == [2, 3]
    assert [shard.tokens for shard in meta.of("val")] == [8, 5000]
    assert Windows(folder, "train", 4).weights == [0.75, 0.25]
    assert Windows(folder, "val", 4).n_tokens == 5008


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_a_validation_source_replaces_files_named_for_validation(work, kind):
    folder, val = work / "named", work / "other"
    for place in (folder, val):
        place.mkdir()
        for number, name in enumerate(["train", "val", "test"]):
            if kind == "text":
                (place / f"{name}.txt").write_text(f"{name} of {place.name}")
            else:
                np.full(99, number + 1 + 3 * (place == val), "<u2").tofile(place / f"{name}.bin")
    made = prepared(options(work, folder, val_source=str(val)))
    if kind == "text":
        assert texts_of(made) == ("train of named", "val of other")
    else:
        assert [set(ids_of(made, split)) for split in ("train", "val")] == [{1}, {5}]


def test_validation_text_must_not_be_trained_on(work):
    folder = work / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("a" * 99)
    (folder / "held.txt").write_text("h" * 99)
    for val in (folder / "held.txt", folder):
        said = refusal(options(work, folder, val_source=str(val)))
        assert said.startswith(f"data.val_source={val}: ")
        assert "held.txt" in said
    (folder / "held.txt").rename(folder / "val.txt")
    config = options(work, folder, val_source=str(folder / "val.txt"))
    assert texts_of(prepared(config)) == ("a" * 99, "h" * 99)
    assert "data.val_source=nope" in refusal(options(work, val_source="nope"))
    (work / "empty.txt").write_text(" ")
    said = refusal(options(work, val_source=str(work / "empty.txt")))
    assert said.startswith(f"data.val_source={work / 'empty.txt'} holds no text")
    assert "val_source=-" in refusal(options(work, "-", val_source="-"))


def test_a_separator_makes_documents_of_a_text_file(work):
    stories = [f"Story {i}.\n" for i in range(100)]
    (work / "s.txt").write_text("<|endoftext|>\n".join(stories))
    config = options(work, work / "s.txt")
    assert sum(read_meta(prepared(config)).documents.values()) == 1
    said = told(replace(config, prepared_dir=str(work / "again")))
    assert any("'<|endoftext|>' 99 times" in line and "--separator=" in line for line in said)
    split = replace(config, separator="<|endoftext|>\n")
    assert prepared_folder(split) != prepared_folder(config)
    assert not any("<|endoftext|>" in line for line in told(split))
    folder = prepared(split)
    assert sum(read_meta(folder).documents.values()) == 100
    assert read_meta(folder).splits == ["document"]
    nowhere = told(replace(config, separator="<eos>"))
    assert any("<eos>" in line and "splits no file" in line for line in nowhere)


# Files of ids


def llm_c(path: Path, ids: np.ndarray, dtype: str, count: int | None = None) -> Path:
    header = np.zeros(256, dtype="<i4")
    header[:3] = (20240520 if dtype == "<u2" else 20240801, 1, count or len(ids))
    path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    return path


def some_ids(count: int = 5000) -> np.ndarray:
    ids = np.random.default_rng(0).integers(0, 256, count)
    ids[99::100] = 256
    return ids


@pytest.mark.parametrize("form", ["<u2 header", "<u4 header", "<u2"])
def test_a_bin_file_of_ids_is_used_as_is(work, form, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_IDS", 333)
    ids, path = some_ids(), work / "tokens.bin"
    if "header" in form:
        llm_c(path, ids, form[:3])
    else:
        ids.astype(form).tofile(path)
    folder = prepared(options(work, path), shard_bytes=1000)
    train, val = ids_of(folder, "train"), ids_of(folder, "val")
    assert train.tolist() == ids[:4500].tolist()
    assert val.tolist() == ids[4500:].tolist()
    meta = read_meta(folder)
    assert meta.bytes == {"train": 4500 - 45, "val": 500 - 5}
    assert meta.documents == {"train": 45, "val": 5}
    windows = Windows(folder, "train", 100, "document")
    assert len(windows) == 45
    # The last id is an end-of-text, after which no document starts.
    starts = windows.parts[0].stream.document_starts()
    assert starts.tolist() == list(range(0, 4500, 100))
    assert all((windows.pair(i)[1] != IGNORE_INDEX).all() for i in range(45))
    verify(folder, lambda _: None)


@pytest.mark.parametrize("form", ["<u1", "<u2", "<u4", "<u8", "npy <i8", "npy <u2", "npy >i4"])
def test_ids_of_any_width_are_read_if_it_is_given(work, form):
    ids, path = np.arange(5000) % 250, work / ("t.npy" if "npy" in form else "t.bin")
    np.save(path, ids.astype(form[4:])) if "npy" in form else ids.astype(form).tofile(path)
    width = "auto" if "npy" in form else form[1:]
    folder = prepared(options(work, path, ids=width))
    assert ids_of(folder, "train").tolist() == ids[:4500].tolist()


def npy(array: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(array))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("t.bin", np.arange(1, 999).astype("<u4").tobytes(), "--ids=u1, u2, u4 or u8"),
        ("t.bin", np.arange(1, 999).astype("<u8").tobytes(), "--ids="),
        ("t.bin", np.arange(1, 999).astype(">u4").tobytes(), "--ids="),
        ("t.bin", b"The cat sat on the mat. " * 99, "looks like text"),
        ("t.bin", b"\0" * 1001, "file size 1001 is not a multiple of 2"),
        ("t.bin", gzip.compress(b"x" * 999, mtime=0), "compressed"),
        ("t.bin.gz", gzip.compress(b"x" * 999, mtime=0), "unpack it first"),
        ("t.bin", b"PK\x03\x04" + bytes(99), "zip archive"),  # PyTorch's own .bin
        ("t.npy", npy([1.0, 2.0]), "not a one-dimensional array of integers"),
        ("t.npy", npy([[1, 2], [3, 4]]), "not a one-dimensional array of integers"),
        ("t.npy", npy([5, -1, 7]), "token 1 is id -1"),
        ("t.npy", b"nothing", "cannot be read"),
    ],
)
def test_doubtful_files_of_ids_are_refused(work, name, content, told):
    (work / name).write_bytes(content)
    message = refusal(options(work, work / name))
    assert told in message and str(work / name) in message


def test_file_names_decide_the_split_of_ids_by_whole_words(work):
    ids, folder = some_ids(), work / "bins"
    folder.mkdir()
    for number, name in enumerate(["latest_000.bin", "medieval_000.bin", "test.bin"]):
        ids[number * 1000 : number * 1000 + 1000].astype("<u2").tofile(folder / name)
    for split in ("auto", "tail"):
        made = prepared(options(work, folder, split=split))
        assert ids_of(made, "train").tolist() == ids[:1800].tolist()
        assert ids_of(made, "val").tolist() == ids[1800:2000].tolist()
    (folder / "medieval_000.bin").rename(folder / "corpus_val_0.bin")
    made = prepared(options(work, folder))
    assert ids_of(made, "train").tolist() == ids[:1000].tolist()
    assert ids_of(made, "val").tolist() == ids[1000:2000].tolist()


def test_inconsistent_files_of_ids_are_refused(work):
    path, ids = work / "tokens.bin", some_ids()
    ids[1234] = 257
    ids.astype("<u2").tofile(path)
    message = refusal(options(work, path))
    assert f"{path}: token 1234 is id 257, but the tokenizer has 257" in message
    llm_c(path, some_ids(), "<u2", count=5001)
    assert "header promises 5001 ids" in refusal(options(work, path))
    for wrong in ({"tokenizer": "char"}, {"tokenizer": "bpe:300"}, {"split": "document"}):
        assert "holds ids, not text" in refusal(options(work, path, **wrong))
    assert "mixes files of ids" in refusal(options(work, work / "*"))


# Ids that do not stand for text


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet", "a.npy", "a.bin"])
def test_numbers_in_any_format_are_ids(work, name):
    rows = [[(i * j) % 300 for j in range(1, 40)] for i in range(60)]
    whole, path = sum(rows, []), work / name
    content = {
        ".txt": " ".join(map(str, whole)) + "\n",
        ".jsonl": "\n".join(json.dumps({"notes": row}) for row in rows),
        ".json": json.dumps([{"notes": " ".join(map(str, row))} for row in rows]),
    }
    if path.suffix in content:
        path.write_text(content[path.suffix])
    elif name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"notes": rows}), path)
    else:
        array = np.array(whole, dtype="<u2")
        np.save(path, array) if name == "a.npy" else array.tofile(path)
    has_rows = name in ("a.jsonl", "a.json", "a.parquet")
    field = "notes" if has_rows else "text"
    folder = prepared(options(work, path, tokenizer="ids:300", text_field=field, split="tail"))
    meta = read_meta(folder)
    train, val = ids_of(folder, "train").tolist(), ids_of(folder, "val").tolist()
    assert train + val == whole
    assert len(train) == int(0.9 * len(whole))
    assert (meta.vocab_size, sum(meta.bytes.values())) == (300, 0)
    assert sum(meta.documents.values()) == (60 if has_rows else 1)
    starts = Windows(folder, "train", 8).parts[0].stream.document_starts().tolist()
    assert starts == (list(range(0, len(train), 39)) if has_rows else [0])
    verify(folder, lambda _: None)
    if name == "a.bin":  # no id is an end-of-text, so each file is a document
        shutil.copy(path, work / "b.bin")
        folder = prepared(options(work, work / "*.bin", tokenizer="ids:300", val_fraction=0.0))
        starts = Windows(folder, "train", 8).parts[0].stream.document_starts().tolist()
        assert starts == [0, len(whole)] and read_meta(folder).documents["train"] == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "1 2 9 3", "token 2 is '9'"),
        ("a.txt", "1 2\nx", "token 2 is 'x'"),
        ("a.txt", "1 -2", "token 1 is '-2'"),
        ("a.txt", "1 " + "9" * 5000, "token 1 is '999"),
        ("a.txt", "1 ²", "token 1 is '²'"),
        ("a.jsonl", '{"text": [1]}\n{"text": [1, 12]}', "line 2: token 1 is '12'"),
        ("a.jsonl", '{"text": [1.5]}', "line 1: token 0 is '1.5'"),
        ("a.jsonl", '{"text": [true]}', "line 1: token 0 is 'True'"),
        ("a.jsonl", '{"text": [[1]]}', "line 1: token 0 is '[1]'"),
        ("a.jsonl", '{"text": {"a": 1}}', "line 1: token 0 is"),
    ],
)
def test_an_invalid_id_is_refused_by_position(work, name, content, said):
    (work / name).write_text(content)
    found = refusal(options(work, work / name, tokenizer="ids:9"))
    assert found.startswith(str(work / name))
    assert said in found


def test_a_number_is_never_cut_in_two(work, small):
    ids = [i % 9999 for i in range(20_000)]
    (work / "a.txt").write_text(" ".join(map(str, ids)))  # one line, far longer than a piece
    folder = prepared(options(work, tokenizer="ids:9999"))
    assert [*ids_of(folder, "train"), *ids_of(folder, "val")] == ids


def test_the_ids_tokenizer_encodes_and_decodes_numbers(tmp_path):
    made = ready_tokenizer("ids:1000000")
    ids = np.array([0, 5, 41983, 41984, 42000, 999_999])
    assert made.encode_array(characters_of(ids)).tolist() == ids.tolist()
    assert made.decode(ids) == " 0 5 41983 41984 42000 999999"
    assert made.encode(made.decode(ids)) == ids.tolist()
    assert not made.byte_lengths().any()
    made.save(tmp_path)
    assert load_tokenizer(tmp_path).name == "ids:1000000"
    with pytest.raises(ConfigError, match="token 1 is '1000000'"):
        made.encode("3 1000000")
    assert ready_tokenizer("ids:9").encode("") == []


# The first documents


def test_the_first_documents_have_a_folder_of_their_own(work):
    write_rows(work / "rows.jsonl", [f"row {i}" for i in range(100)])
    source = work / "rows.jsonl"
    few, all_rows = options(work, source, max_documents=30), options(work, source)
    assert prepared_folder(few) != prepared_folder(all_rows)
    said: list[str] = []
    meta = read_meta(prepare(few, say=said.append))
    assert sum(shard.documents for shard in meta.shards) == 30
    assert any("30 documents from 1 .jsonl file" in line for line in said)


def test_a_bpe_of_the_first_documents_is_trained_on_all_of_them(work, monkeypatch):
    write_rows(work / "rows.jsonl", LINES)
    config = options(work, work / "rows.jsonl", tokenizer="bpe:300", max_documents=50)
    plan = make_plan(config, open_sources(config))
    # So small a sample would be spread over the whole file, of which little is read.
    texts = list(build._sample(plan, 1000))
    assert sum(len(text.encode()) for text in texts) >= 1000


def test_ids_have_no_first_documents(work):
    np.arange(100, dtype=np.uint16).tofile(work / "ids.bin")
    config = options(work, work / "ids.bin", tokenizer="ids:100", ids="u2", max_documents=3)
    with pytest.raises(ConfigError, match="data.max_documents=3: .* holds ids without documents"):
        prepare(config)
