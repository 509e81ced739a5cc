"""Content hashes are remembered; whatever happens to the index, the content is what counts."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from data import prepared
from data.prepare import main as prepare_main
from data.prepared import content_of, last_digest
from data.sources import Source, open_source


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the files that are read as a whole."""
    names: list[str] = []
    sha256 = prepared._sha256

    def counting(file: Path) -> str:
        names.append(file.name)
        return sha256(file)

    monkeypatch.setattr(prepared, "_sha256", counting)
    return names


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / "texts" / name).write_text(f"The text of {name}. " * 2000)
    return tmp_path / "texts"


def digest(folder: Path, spec: object = None) -> str:
    return content_of(open_source(str(spec or folder)), folder.parent / "prepared").digest


def index_file(folder: Path) -> Path:
    return next((folder.parent / "prepared/.sources").iterdir())


def test_only_what_is_new_or_changed_is_read(folder, hashed):
    first = digest(folder)
    assert sorted(hashed) == ["a.txt", "b.txt", "c.md"]
    assert digest(folder) == first
    os.utime(folder / "b.txt", (1, 1))
    assert digest(folder) == first
    (folder / "d.txt").write_text("new")
    assert digest(folder) != first
    assert hashed[3:] == ["b.txt", "d.txt"]
    (folder / "d.txt").unlink()
    assert digest(folder) == first
    assert len(hashed) == 5
    assert last_digest(str(folder), folder.parent / "prepared") == first


def test_hashing_that_takes_long_is_said_once(folder, monkeypatch):
    monkeypatch.setattr(prepared, "LARGE", 50_000)
    said: list[str] = []
    for _ in range(2):
        content_of(open_source(str(folder)), folder.parent / "prepared", said.append)
        content_of(open_source(str(folder / "a.txt")), folder.parent / "prepared", said.append)
    assert len(said) == 1 and str(folder) in said[0]


@pytest.mark.parametrize("at", [0, 20_000, -1])
def test_a_change_that_keeps_size_and_time_is_seen_in_the_samples(folder, at):
    file = folder / "a.txt"
    before, stat = digest(folder), file.stat()
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest(folder) != before


@pytest.mark.parametrize("pattern", ["*.txt", "**/*.txt"])
def test_content_counts_and_not_where_it_lies(folder, tmp_path, pattern):
    there = tmp_path / "elsewhere/deep"
    shutil.copytree(folder, there)
    assert digest(folder, there) == digest(folder)
    assert digest(folder, f"{there}/../deep/") == digest(folder)
    assert digest(folder, there / pattern) == digest(folder, folder / pattern)
    shutil.copy(folder / "a.txt", tmp_path / "renamed.md")
    assert digest(folder, tmp_path / "renamed.md") == digest(folder, folder / "a.txt")
    os.rename(there / "a.txt", there / "z.txt")  # another order
    assert digest(folder, there) != digest(folder)


def test_a_name_that_says_how_a_file_is_read_counts(folder, tmp_path):
    shutil.copy(folder / "a.txt", tmp_path / "a.csv")
    assert digest(folder, tmp_path / "a.csv") != digest(folder, folder / "a.txt")


def test_a_damaged_index_is_no_index(folder, hashed):
    """Flipped bits, truncations, lines of others: never a wrong digest."""
    right, rng = digest(folder), random.Random(1)
    good = index_file(folder).read_bytes()
    for _ in range(100):
        raw = bytearray(good)
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        index_file(folder).write_bytes(raw)
        assert digest(folder) == right
        index_file(folder).write_bytes(good[: rng.randrange(len(good))])
        assert digest(folder) == right
        assert last_digest(str(folder), folder.parent / "prepared") == right
    index_file(folder).write_bytes(b"\xff\x00[]\n{}\n\n 1\n00000000 [1]\n" + good)
    hashed.clear()
    assert digest(folder) == right
    assert hashed == []


@pytest.mark.parametrize("state", ["missing", "folder", "cannot be written"])
def test_without_an_index_files_are_read_again(folder, hashed, state, monkeypatch):
    right, path = digest(folder), index_file(folder)
    hashed.clear()
    path.unlink()
    if state == "folder":
        path.mkdir()
    if state == "cannot be written":
        opened = Path.open

        def refuse(self, mode="r", *arguments, **options):
            if "a" in mode:
                raise PermissionError(13, "Permission denied")
            return opened(self, mode, *arguments, **options)

        monkeypatch.setattr(Path, "open", refuse)
    assert digest(folder) == right
    assert len(hashed) == 3


def test_a_kill_while_hashing_loses_one_file(folder, hashed, monkeypatch):
    counting = prepared._sha256

    def killed(file: Path) -> str:
        if file.name == "c.md":
            raise KeyboardInterrupt
        return counting(file)

    monkeypatch.setattr(prepared, "_sha256", killed)
    with pytest.raises(KeyboardInterrupt):
        digest(folder)
    monkeypatch.setattr(prepared, "_sha256", counting)
    digest(folder)
    assert hashed == ["a.txt", "b.txt", "c.md"]


def test_the_index_does_not_grow_without_end(folder, monkeypatch):
    monkeypatch.setattr(prepared, "STALE_LINES", 5)
    for number in range(20):
        (folder / "a.txt").write_text(str(number))
        last = digest(folder)
    assert len(index_file(folder).read_bytes().split()) < 80
    assert last_digest(str(folder), folder.parent / "prepared") == last


def test_files_that_cannot_be_read_are_the_users_to_mend(folder, monkeypatch, command):
    """Exit code 2 and not 5, which is for disks that cannot be written."""
    opened = Path.open

    def refuse(self, *arguments, **options):
        if self.suffix == ".txt":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr("data.prepared.MOST_NAMED", 1)
    prepared = f"--prepared_dir={folder.parent / 'prepared'}"
    for action in ([], ["--dry_run"]):
        argv = [f"--source={folder}", "--tokenizer=byte", prepared, *action]
        code, out, err = command(prepare_main, *argv)
        assert code == 2
        assert "a.txt cannot be read: Permission denied" in err and "b.txt" not in err
        assert "1 more files cannot be read" in err


def test_a_name_that_is_not_utf_8_is_hashed_too(folder):
    before = digest(folder)
    with open(os.fsencode(folder) + b"/\xff.txt", "w") as stream:
        stream.write("text")
    assert digest(folder) != before
    assert digest(folder) == digest(folder)


def test_of_a_hub_dataset_the_name_is_all_that_is_known(tmp_path):
    hub = [Source(f"hub:a/{name}", Path(), ()) for name in "bcb"]
    digests = [content_of(source, tmp_path).digest for source in hub]
    assert digests[0] == digests[2] != digests[1]
