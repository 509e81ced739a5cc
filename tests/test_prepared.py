"""Prepared folders: content hashes of their sources, and listing, removing and holding them."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from cli.files import try_lock, warn_once
from cli.options import ConfigError
from data import prepared
from data.config import DataConfig
from data.meta import read_meta
from data.prepare import main, prepare
from data.prepared import content_of, find_fingerprint, hold, is_complete, last_digest, lock, near
from data.sources import Source, open_source

# The content of sources


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


def test_only_new_and_changed_files_are_read(folder, hashed):
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


def test_slow_hashing_is_announced_once(folder, monkeypatch):
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
def test_content_decides_and_not_its_location(folder, tmp_path, pattern):
    there = tmp_path / "elsewhere/deep"
    shutil.copytree(folder, there)
    assert digest(folder, there) == digest(folder)
    assert digest(folder, f"{there}/../deep/") == digest(folder)
    assert digest(folder, there / pattern) == digest(folder, folder / pattern)
    for name, same in {"renamed.md": True, "a.csv": False}.items():  # .csv is read differently
        shutil.copy(folder / "a.txt", tmp_path / name)
        assert (digest(folder, tmp_path / name) == digest(folder, folder / "a.txt")) == same
    os.rename(there / "a.txt", there / "z.txt")  # another order
    assert digest(folder, there) != digest(folder)


def test_a_damaged_index_never_gives_a_wrong_digest(folder, hashed):
    """Flipped bits, truncations and foreign lines."""
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


def test_the_index_does_not_grow_forever(folder, monkeypatch):
    monkeypatch.setattr(prepared, "STALE_LINES", 5)
    for number in range(20):
        (folder / "a.txt").write_text(str(number))
        last = digest(folder)
    assert len(index_file(folder).read_bytes().split()) < 80
    assert last_digest(str(folder), folder.parent / "prepared") == last


def test_unreadable_files_are_a_users_mistake(folder, monkeypatch, command):
    """The exit code is 2 and not 5, which means that a disk cannot be written."""
    opened = Path.open

    def refuse(self, *arguments, **options):
        if self.suffix == ".txt":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr("data.prepared.MOST_NAMED", 1)
    argv = [f"--source={folder}", "--tokenizer=byte", f"--prepared_dir={folder.parent / 'new'}"]
    for action in ([], ["--dry_run"]):
        code, _, err = command(main, *argv, *action)
        assert code == 2
        assert "a.txt cannot be read: Permission denied" in err and "b.txt" not in err
        assert "1 more files cannot be read" in err


def test_a_hub_dataset_is_identified_by_its_name(tmp_path):
    hub = [Source(f"hub:a/{name}", Path(), ()) for name in "bcb"]
    digests = [content_of(source, tmp_path).digest for source in hub]
    assert digests[0] == digests[2] != digests[1]


# Prepared folders

TEXT = "".join(f"Line {i} says {i * i % 97} things.\n" for i in range(300))


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "prepared"


@pytest.fixture
def make(tmp_path, root):
    """make("a.txt", TEXT): the folder that is prepared from a file of this name and content."""

    def make(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        config = DataConfig(
            source=str(tmp_path / name), tokenizer="byte", workers=0, prepared_dir=str(root)
        )
        return prepare(config, say=lambda _: None, progress=False)

    return make


@pytest.fixture
def act(command, root):
    """act("--list"): (exit code, stdout, stderr) of the command in `root`."""
    return lambda *argv: command(main, *argv, f"--prepared_dir={root}")


def test_the_list_shows_name_source_size_and_last_use(make, root, act, tmp_path):
    assert f"{root} holds no prepared data" in act("--list")[1]
    first, second = make("a.txt", TEXT), make("b.txt", TEXT * 2)
    os.utime(first, (time.time() + 60,) * 2)
    for other in ("mine", ".mine.partial"):  # not ours, although they hold a meta.json
        (root / other).mkdir()
        (root / other / "meta.json").write_text("{}")
    code, out, err = act("--list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [first.name, second.name]
    assert str(tmp_path / "a.txt") in lines[0] and "MB" in lines[0]
    assert time.strftime("%Y-%m-%d") in lines[1]
    os.utime(first, (1, 1))
    assert make("a.txt", TEXT) == first
    assert time.time() - first.stat().st_mtime < 600  # its use was noted


def test_a_removed_folder_is_reported_and_the_others_stay(make, root, act):
    first, second = make("a.txt", TEXT), make("b.txt", TEXT * 2)
    (root / ".removed-x-1").mkdir()  # left by a removal that was killed
    code, out, _ = act(f"--remove={first.name}")
    assert code == 0
    assert f"removed {first}" in out and "a.txt" in out
    assert not first.exists() and not list(root.glob(".removed-*"))
    assert read_meta(second).tokens["train"] > 0
    assert make("a.txt", TEXT) == first


@pytest.mark.parametrize("name", ["nope", "../a.txt", ".", "", ".sources", "mine", "/etc"])
def test_only_prepared_folders_are_removed(make, root, act, tmp_path, name):
    make("a.txt", TEXT)
    (root / "mine").mkdir()
    (root / "mine/meta.json").write_text("{}")
    before = sorted(path for path in tmp_path.rglob("*") if path.suffix != ".lock")
    code, _, err = act(f"--remove={name}", "--source=nope")
    assert code == 2 and "remove=" in err or name == ""
    assert sorted(path for path in tmp_path.rglob("*") if path.suffix != ".lock") == before


def test_a_link_is_not_removed(make, act, tmp_path):
    folder = make("a.txt", TEXT)
    shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    code, _, err = act(f"--remove={folder.name}")
    assert code == 2 and "link" in err
    assert read_meta(folder)


def test_a_folder_that_a_run_holds_is_not_removed(make, act):
    folder = make("a.txt", TEXT)
    holders = [hold(folder), hold(folder)]  # two ranks
    for holder in holders:
        code, _, err = act(f"--remove={folder.name}")
        assert code == 2 and "used by a run" in err
        assert read_meta(folder)
        holder.close()
    assert act(f"--remove={folder.name}")[0] == 0


def test_a_folder_that_is_being_removed_cannot_be_held(make, monkeypatch):
    folder = make("a.txt", TEXT)
    with open(folder / "meta.json", "ab") as remover:
        assert try_lock(remover) == "locked"
        with pytest.raises(ConfigError, match="being removed"):
            hold(folder)

    def removed_meanwhile(stream, shared):
        shutil.rmtree(folder)
        return try_lock(stream, shared)

    monkeypatch.setattr(prepared, "try_lock", removed_meanwhile)
    for _ in range(2):  # removed after it was opened, and before
        with pytest.raises(ConfigError, match="being removed"):
            hold(folder)


def test_an_unfinished_folder_is_removed_unless_it_is_being_built(make, root, act):
    folder = make("a.txt", TEXT)
    key = folder.name.rpartition("-")[2]
    partial = folder.rename(root / f".{key}.partial")
    (partial / "meta.json").unlink()
    assert "not finished" in act("--list")[1]
    with lock(root / f".{key}.lock", lambda _: None):
        code, _, err = act(f"--remove={partial.name}")
        assert code == 2 and "being prepared" in err
    assert act(f"--remove={partial.name}")[0] == 0
    assert not partial.exists()


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EINVAL"])
def test_without_file_locks_everything_works_with_a_note(make, root, act, monkeypatch, name):
    def flock(*_):
        raise OSError(getattr(errno, name), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = make("a.txt", TEXT)
    hold(folder).close()
    said = []
    with lock(root / "x", said.append):
        assert "no file locks" in said[0]
    code, out, _ = act(f"--remove={folder.name}")
    assert code == 0 and "no file locks" in out
    assert not folder.exists()


@pytest.mark.parametrize("name", ["ENOSYS", "EOPNOTSUPP", "EINVAL", "EACCES"])
def test_without_fsync_everything_works_with_one_warning(make, monkeypatch, capsys, name):
    def fsync(*_):
        raise OSError(getattr(errno, name), "no syncs")

    warn_once.cache_clear()
    monkeypatch.setattr(os, "fsync", fsync)
    assert is_complete(make("a.txt", TEXT)) and is_complete(make("b.txt", TEXT * 2))
    assert capsys.readouterr().err.count("warning: this file system cannot flush") == 1


def test_a_folder_is_found_by_its_fingerprint(make, root, tmp_path):
    first, second = make("a.txt", TEXT), make("b.txt", TEXT * 2)
    (first / "meta.json").write_text("{")
    fingerprint = read_meta(second).fingerprint
    assert find_fingerprint(root, fingerprint) == second
    moved = second.rename(tmp_path / "moved")
    assert find_fingerprint(root, fingerprint) is None
    assert find_fingerprint(root, fingerprint, str(moved)) == moved
    assert find_fingerprint(root, "0" * 64, str(moved)) is None


def test_messages_name_folders_from_the_working_folder_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert near(tmp_path / "data" / "prepared") == "data/prepared"
    for elsewhere in (tmp_path.parent / "a", Path("data/prepared"), Path("../a")):
        assert near(elsewhere) == str(elsewhere)
