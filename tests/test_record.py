"""Prepared folders: listed, removed on request alone, and never while a run uses them."""

from __future__ import annotations

import errno
import os
import shutil
import time

import pytest

from cli.files import warn_once
from cli.options import ConfigError
from data import prepared
from data.config import DataConfig
from data.meta import read_meta
from data.prepare import main, prepare
from data.prepared import find_fingerprint, hold

TEXT = "".join(f"Line {i} says {i * i % 97} things.\n" for i in range(300))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "prepared"


@pytest.fixture
def make(tmp_path, root):
    """make("a.txt", TEXT): the folder that is prepared from a file of this name and content."""

    def make(name: str, text: str):
        (tmp_path / name).write_text(text)
        config = DataConfig(
            source=str(tmp_path / name), tokenizer="byte", workers=0, prepared_dir=str(root)
        )
        return prepare(config, say=lambda _: None, progress=False)

    return make


def test_a_list_shows_name_source_size_and_last_use(make, root, command, tmp_path):
    first, second = make("a.txt", TEXT), make("b.txt", TEXT * 2)
    os.utime(first, (time.time() + 60,) * 2)
    for other in ("mine", ".mine.partial"):  # not ours, though it has such a file
        (root / other).mkdir()
        (root / other / "meta.json").write_text("{}")
    code, out, err = command(main, "--list", f"--prepared_dir={root}")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [first.name, second.name]
    assert str(tmp_path / "a.txt") in lines[0] and "MB" in lines[0]
    assert time.strftime("%Y-%m-%d") in lines[1]


def test_an_empty_list_says_so(command, root):
    assert f"{root} holds no prepared data" in command(main, "--list", f"--prepared_dir={root}")[1]


def test_use_is_noted(make):
    folder = make("a.txt", TEXT)
    os.utime(folder, (1, 1))
    assert make("a.txt", TEXT) == folder
    assert time.time() - folder.stat().st_mtime < 600


def test_what_is_removed_is_told_and_the_rest_stays(make, root, command):
    first, second = make("a.txt", TEXT), make("b.txt", TEXT * 2)
    (root / ".removed-x-1").mkdir()  # of a removal that was killed
    code, out, _ = command(main, f"--remove={first.name}", f"--prepared_dir={root}")
    assert code == 0
    assert f"removed {first}" in out and "a.txt" in out
    assert not first.exists() and not list(root.glob(".removed-*"))
    assert read_meta(second).tokens["train"] > 0
    assert make("a.txt", TEXT) == first


@pytest.mark.parametrize("name", ["nope", "../a.txt", ".", "", ".sources", "mine", "/etc"])
def test_only_prepared_folders_are_removed(make, root, command, tmp_path, name):
    make("a.txt", TEXT)
    (root / "mine").mkdir()
    (root / "mine/meta.json").write_text("{}")
    before = sorted(path for path in tmp_path.rglob("*") if path.suffix != ".lock")
    code, _, err = command(main, f"--remove={name}", f"--prepared_dir={root}", "--source=nope")
    assert code == 2 and "remove=" in err or name == ""
    assert sorted(path for path in tmp_path.rglob("*") if path.suffix != ".lock") == before


def test_a_link_is_not_removed(make, root, command, tmp_path):
    folder = make("a.txt", TEXT)
    shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    code, _, err = command(main, f"--remove={folder.name}", f"--prepared_dir={root}")
    assert code == 2 and "link" in err
    assert read_meta(folder)


def test_a_folder_that_a_run_holds_is_not_removed(make, root, command):
    folder = make("a.txt", TEXT)
    holders = [hold(folder), hold(folder)]  # two ranks
    for holder in holders:
        code, _, err = command(main, f"--remove={folder.name}", f"--prepared_dir={root}")
        assert code == 2 and "used by a run" in err
        assert read_meta(folder)
        holder.close()
    assert command(main, f"--remove={folder.name}", f"--prepared_dir={root}")[0] == 0


def test_a_folder_that_is_being_removed_is_not_begun_with(make, monkeypatch):
    folder = make("a.txt", TEXT)
    with open(folder / "meta.json", "ab") as remover:
        assert prepared.try_lock(remover) == "locked"
        with pytest.raises(ConfigError, match="being removed"):
            hold(folder)
    try_lock = prepared.try_lock

    def removed_meanwhile(stream, shared):
        shutil.rmtree(folder)
        return try_lock(stream, shared)

    monkeypatch.setattr(prepared, "try_lock", removed_meanwhile)
    for _ in range(2):  # while it is opened, and before
        with pytest.raises(ConfigError, match="being removed"):
            hold(folder)


def test_an_unfinished_folder_is_listed_and_removed_unless_it_is_being_made(make, root, command):
    folder = make("a.txt", TEXT)
    key = folder.name.rpartition("-")[2]
    partial = folder.rename(root / f".{key}.partial")
    (partial / "meta.json").unlink()
    assert "not finished" in command(main, "--list", f"--prepared_dir={root}")[1]
    argv = [f"--remove={partial.name}", f"--prepared_dir={root}"]
    with prepared.lock(root / f".{key}.lock", lambda _: None):
        code, _, err = command(main, *argv)
        assert code == 2 and "being prepared" in err
    assert command(main, *argv)[0] == 0
    assert not partial.exists()


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EINVAL"])
def test_without_locks_one_line_says_so_and_all_goes_on(make, root, command, monkeypatch, name):
    import fcntl

    def flock(*_):
        raise OSError(getattr(errno, name), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = make("a.txt", TEXT)
    hold(folder).close()
    said = []
    with prepared.lock(root / "x", said.append):
        assert "no file locks" in said[0]
    code, out, _ = command(main, f"--remove={folder.name}", f"--prepared_dir={root}")
    assert code == 0 and "no file locks" in out
    assert not folder.exists()


@pytest.mark.parametrize("name", ["ENOSYS", "EOPNOTSUPP", "EINVAL", "EACCES"])
def test_without_syncs_one_line_says_so_and_all_goes_on(make, monkeypatch, capsys, name):
    def fsync(*_):
        raise OSError(getattr(errno, name), "no syncs")

    warn_once.cache_clear()
    monkeypatch.setattr(os, "fsync", fsync)
    folders = make("a.txt", TEXT), make("b.txt", TEXT * 2)
    assert all(prepared.is_complete(folder) for folder in folders)
    assert capsys.readouterr().err.count("warning: this file system cannot sync") == 1


def test_a_folder_is_found_by_its_fingerprint(make, root, tmp_path):
    first, second = make("a.txt", TEXT), make("b.txt", TEXT * 2)
    (first / "meta.json").write_text("{")
    fingerprint = read_meta(second).fingerprint
    assert find_fingerprint(root, fingerprint) == second
    moved = second.rename(tmp_path / "moved")
    assert find_fingerprint(root, fingerprint) is None
    assert find_fingerprint(root, fingerprint, str(moved)) == moved
    assert find_fingerprint(root, "0" * 64, str(moved)) is None
