"""Prepared folders and their sources: content hashes, lookup, locks, listing and removing.

A folder's name ends in a hash of the content, tokenizer and options that it was made from. It is
never changed or replaced: other content gets another folder. Its modification time is that of its
last use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cli.command import Say, make_folder
from cli.files import replace_file, try_lock
from cli.options import ConfigError
from cli.terminal import print_line
from data.meta import META_FILE, DamagedData, read_meta
from data.readers import READ_BYTES, kind_of
from data.sources import STDIN, Source, absolute

INDEX_FOLDER = ".sources"
SAMPLE_BYTES = 4096  # at each of three places in a file
LARGE = 2 << 30  # bytes that take seconds to hash
MOST_NAMED = 10  # files in one error
STALE_LINES = 1000  # kept before an index file is rewritten

SOURCE_FILE = "source.json"
KEY_LENGTH = 12
POLL_SECONDS = 0.2


# The content of sources

Stamp = tuple[str, int, int, str]  # a file's name, size, time in ns and hash of its samples


@dataclass(frozen=True)
class Content:
    """The content of a source: one hash of it, and its files' stamps from before it was hashed."""

    digest: str
    stamps: list[Stamp]


def content_of(source: Source, root: Path, say: Say = lambda text: None) -> Content:
    """Hash a source, without reading the files that the index in `root` knows by their stamp.

    Raises ConfigError for a file that cannot be read.
    """
    if not source.files:  # a hub dataset is known by its name alone
        return Content(hashlib.sha256(source.spec.encode()).hexdigest(), [])
    index, stamps = Index(root, source.spec), stamps_of(source)
    unknown = sum(stamp[1] for stamp in stamps if stamp not in index.hashes)
    if unknown > LARGE:
        say(f"{source.spec}: hashing {unknown / 1e9:,.1f} GB, once; the result is remembered")
    total, hashes = hashlib.sha256(), {}
    for file, stamp in zip(source.files, stamps, strict=True):
        if stamp not in index.hashes:
            index.hashes[stamp] = _sha256(file)
            index.append([*stamp, index.hashes[stamp]])
        hashes[stamp] = index.hashes[stamp]
        # Of a file named itself only its kind matters; in a folder names decide order and split.
        label = kind_of(file) if file == source.root else source.name_of(file)
        total.update(os.fsencode(f"{label}\0{hashes[stamp]}\n"))
    index.finish(total.hexdigest(), hashes)
    return Content(total.hexdigest(), stamps)


def last_digest(spec: str, root: Path) -> str:
    """The digest of a source when it was last hashed; "" if it never was."""
    return Index(root, spec).digest


def stamps_of(source: Source) -> list[Stamp]:
    """Stamp each file: files with equal stamps are assumed to be equal, which is cheap to check.

    Misses only a change that keeps a file's size, its time and the three sampled blocks.
    Raises ConfigError that names the files that cannot be read.
    """
    stamps, problems = [], []
    for file in source.files:
        try:
            stamps.append(_stamp(source.name_of(file), file))
        except ConfigError as error:
            problems += error.problems
    if problems:
        more = len(problems) - MOST_NAMED
        raise ConfigError(
            problems[:MOST_NAMED] + [f"{more} more files cannot be read"] * (more > 0)
        )
    return stamps


def looks_unchanged(source: Source, stamps: list[Stamp]) -> bool:
    """Whether each file still has the size and time of its stamp: cheaper than `stamps_of`."""
    try:
        stats = [file.stat() for file in source.files]
    except OSError:
        return False
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats] == [stamp[1:3] for stamp in stamps]


def unreadable(file: object, error: OSError) -> ConfigError:
    """Turn an OSError on a source into a ConfigError; as an OSError it would exit with the code of
    a disk that cannot be written."""
    return ConfigError(f"data.source: {file} cannot be read: {error.strerror or error}")


def _stamp(name: str, file: Path) -> Stamp:
    try:
        with file.open("rb") as stream:
            stat = os.fstat(stream.fileno())
            sample = hashlib.sha256()
            for at in (0, stat.st_size // 2, stat.st_size - SAMPLE_BYTES):
                stream.seek(max(0, at))
                sample.update(stream.read(SAMPLE_BYTES))
    except OSError as error:
        raise unreadable(file, error) from error
    return name, stat.st_size, stat.st_mtime_ns, sample.hexdigest()[:16]


def _sha256(file: Path) -> str:
    content = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(READ_BYTES):
                content.update(chunk)
    except OSError as error:
        raise unreadable(file, error) from error
    return content.hexdigest()


class Index:
    """The remembered hashes of one source: .sources/NAME.jsonl next to the prepared folders.

    Each line is a CRC-32 and a JSON list: a file's stamp and SHA-256, or the digest of the whole
    source. Lines are only appended, so several processes may write and a kill loses the work on
    one file. A torn or damaged line is skipped, and its file is hashed again.
    """

    def __init__(self, root: Path, spec: str) -> None:
        self.hashes: dict[Stamp, str] = {}
        self.digest = ""
        self._lines: list[bytes] = []
        # Standard input is new each time. Every Python has its own standard library.
        name = sysconfig.get_paths()["stdlib"] if spec == "stdlib" else str(absolute(spec))
        name = spec if spec.startswith("hub:") else name
        key = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        self._path = None if spec == STDIN else root / INDEX_FOLDER / f"{key}.jsonl"
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._lines = list(filter(None, self._path.read_bytes().split(b"\n")))
        for entry in map(_entry, self._lines):
            if len(entry) == 5:
                self.hashes[tuple(entry[:4])] = entry[4]
            elif len(entry) == 1:
                self.digest = entry[0]

    def append(self, entry: list) -> None:
        """Append a line; an index that cannot be written is done without."""
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("ab") as stream:
                    stream.write(_line(entry))
            except OSError:
                self._path = None

    def finish(self, digest: str, hashes: dict[Stamp, str]) -> None:
        """Remember the digest of the source; rewrite the file if most of it is out of date."""
        if digest != self.digest:
            self.append([digest])
        if self._path is not None and len(self._lines) > len(hashes) + STALE_LINES:
            entries: list[list[Any]] = [
                *([*stamp, sha256] for stamp, sha256 in hashes.items()),
                [digest],
            ]
            with contextlib.suppress(OSError):  # the old file serves as well
                replace_file(self._path, b"".join(_line(entry) for entry in entries))


def _line(entry: Sequence[Any]) -> bytes:
    text = json.dumps(entry).encode()
    # A newline at the start too: what a kill or a full disk has torn remains a line of its own.
    return b"\n%08x %s\n" % (zlib.crc32(text), text)


def _entry(line: bytes) -> list:
    """Parse a line; [] if it is damaged."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return []
    try:
        entry = json.loads(text)
    except ValueError:
        return []
    return entry if isinstance(entry, list) else []


# Finding folders


def key_of(made_from: dict[str, Any]) -> str:
    """The end of a folder's name: a hash of what it is made from, wherever the sources are."""
    sources = [[source["digest"], source["weight"]] for source in made_from["sources"]]
    matters = json.dumps({**made_from, "sources": sources}, sort_keys=True)
    return hashlib.sha256(matters.encode()).hexdigest()[:KEY_LENGTH]


def partial_folder(root: Path, key: str) -> Path:
    """The folder of this key while it is built; it is renamed once it is complete."""
    return root / f".{key}.partial"


def find_key(root: Path, key: str) -> Path | None:
    """The complete folder of this key, whatever the rest of its name is."""
    return next(filter(is_complete, sorted(root.glob(f"[!.]*-{key}"))), None)


def find_fingerprint(root: Path, fingerprint: str, hint: str = "") -> Path | None:
    """The folder of prepared data with this fingerprint; looks at `hint` first."""
    hinted = [Path(hint)] if hint else []
    for folder in [*hinted, *sorted(root.glob("[!.]*"))]:
        with contextlib.suppress(ConfigError, DamagedData, OSError):
            if read_meta(folder).fingerprint == fingerprint:
                return folder
    return None


def is_complete(folder: Path) -> bool:
    """Whether a folder has been prepared to the end."""
    return (folder / META_FILE).is_file()


def read_made_from(folder: Path) -> dict[str, Any]:
    """Read what a folder was made from (source.json); {} if that is missing or damaged."""
    try:
        found = json.loads((folder / SOURCE_FILE).read_text("utf-8"))
        if [source["digest"] for source in found["sources"]]:
            return found
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return {}


def near(folder: Path) -> str:
    """Write a folder for messages: from the working folder on, if it lies in that."""
    with contextlib.suppress(ValueError, OSError):  # elsewhere; the working folder is gone
        folder = folder.relative_to(Path.cwd())
    return str(folder)


def note_use(folder: Path) -> None:
    """Set the folder's modification time to now."""
    with contextlib.suppress(OSError):  # somebody else's folder
        os.utime(folder)


# Locks


@contextmanager
def lock(path: Path, say: Say) -> Iterator[None]:
    """Hold a lock file, after waiting for another process that holds it. The lock ends with the
    process."""
    make_folder(path.parent, "data.prepared_dir")
    with path.open("a+") as stream:
        waiting = False
        while (state := try_lock(stream)) == "held":
            if not waiting:
                stream.seek(0)
                say(f"waiting for process {stream.read().strip()}, which prepares the same data")
            waiting = True
            time.sleep(POLL_SECONDS)
        if state == "no locks":
            say(f"note: {path.parent} has no file locks: prepare with one process at a time")
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


def hold(folder: Path) -> BinaryIO:
    """Protect a folder from removal for as long as the returned file is open.

    Raises ConfigError if it is being removed.
    """
    removed = ConfigError(f"{folder} is being removed: run the command again")
    try:
        stream = (folder / META_FILE).open("rb")
    except FileNotFoundError:
        raise removed from None
    if try_lock(stream, shared=True) == "held" or not is_complete(folder):
        stream.close()
        raise removed
    return stream


def delete_left(root: Path, pattern: str) -> None:
    """Delete the files of this pattern whose process has died; a live one holds a lock on each."""
    for file in root.glob(pattern):
        with contextlib.suppress(OSError), file.open("ab") as stream:
            if try_lock(stream) == "locked":
                file.unlink()


# Listing and removing


def list_folders(root: Path, say: Say = print_line) -> None:
    """Print the name, size, last use and source of each prepared folder, the last used first."""
    found = _folders(root)
    if not found:
        say(f"{near(root)} holds no prepared data")
    for folder in sorted(found, key=lambda folder: -folder.stat().st_mtime):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
        say(f"{folder.name}  {_megabytes(folder)}  last used {used}  source {_source(folder)}")


def remove_folder(root: Path, name: str, say: Say = print_line) -> None:
    """Delete one prepared or unfinished folder. Raises ConfigError if there is none of this name,
    or if a process is using it."""
    folder = root / name
    if folder not in _folders(root):
        raise ConfigError(f"remove={name}: not prepared data in {root}; --list shows what there is")
    if folder.is_symlink():
        raise ConfigError(f"remove={name}: is a link to {folder.resolve()}; delete both yourself")
    unfinished = not is_complete(folder)
    file = root / f".{_key(folder)}.lock" if unfinished else folder / META_FILE
    with file.open("ab") as stream:
        state = try_lock(stream)
        if state == "held":
            doing = "is being prepared" if unfinished else "is used by a run"
            raise ConfigError(f"remove={name}: {doing}: wait until that process has ended")
        if state == "no locks":
            say(f"note: {root} has no file locks, so a run that uses {name} would not be noticed")
        about = f"{_megabytes(folder)}, made from {_source(folder)}"
        # Renamed first: half of a folder must not be taken for a whole one.
        os.rename(folder, root / f".removed-{name.strip('.')}-{os.getpid()}")
        for doomed in root.glob(".removed-*"):  # also what a killed removal has left
            shutil.rmtree(doomed, ignore_errors=True)
    say(f"removed {folder} ({about})")


def _folders(root: Path) -> list[Path]:
    """Prepared and unfinished folders, and nothing that plainGPT did not write."""
    complete = [folder for folder in root.glob("[!.]*") if is_complete(folder)]
    partial = [folder for folder in root.glob(".*.partial") if len(_key(folder)) == KEY_LENGTH]
    return [folder for folder in [*complete, *partial] if (folder / SOURCE_FILE).is_file()]


def _key(folder: Path) -> str:
    return folder.name.removeprefix(".").removesuffix(".partial")


def _megabytes(folder: Path) -> str:
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{size / 1e6:,.1f} MB"


def _source(folder: Path) -> str:
    """The sources that a folder was made from, as they were typed."""
    made_from = read_made_from(folder)
    if made_from:
        specs = [source.get("spec", "?") for source in made_from["sources"]]
        return " + ".join(specs) + " (not finished)" * (not is_complete(folder))
    try:
        return read_meta(folder).source
    except (ConfigError, DamagedData):
        return "?"
