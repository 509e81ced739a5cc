"""Content hashes of sources, remembered so that an unchanged source is not read again.

`.sources/NAME.jsonl` beside the prepared folders belongs to one source. Each line is a CRC-32 and a
JSON list: a file's name, size, time, sample and SHA-256, or the digest of the whole source. Lines
are only appended, so several processes may write, and a kill while hashing loses one file's work.
A line that is torn or damaged is left out, and its file hashed again.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cli.command import Say, make_folder
from cli.files import replace_file, try_lock
from cli.options import ConfigError
from data.meta import META_FILE, DamagedData, read_meta
from data.readers import READ_BYTES, kind_of
from data.sources import STDIN, Source, absolute

# Content hashes of sources, remembered so that an unchanged source is not read again.
#
# `.sources/NAME.jsonl` beside the prepared folders belongs to one source. Each line is a CRC-32 and
# a JSON list: a file's name, size, time, sample and SHA-256, or the digest of the whole source.
# Lines are only appended, so several processes may write, and a kill while hashing loses one file's
# work. A line that is torn or damaged is left out, and its file hashed again.

INDEX_FOLDER = ".sources"
SAMPLE_BYTES = 4096  # at each of three places
LARGE = 2 << 30  # bytes that take seconds to hash
MOST_NAMED = 10  # files, in an error
STALE_LINES = 1000  # that are kept before the file is written anew

Stamp = tuple[str, int, int, str]  # a file's name, size, time in ns and sample


@dataclass(frozen=True)
class Content:
    """What a source holds: one hash for all of it, and the stamps it was computed under."""

    digest: str
    stamps: list[Stamp]


@dataclass
class _Known:
    """What the index says of one source."""

    path: Path | None  # None: remembers nothing
    hashes: dict[Stamp, str] = field(default_factory=dict)
    digest: str = ""  # of the whole source, when it was last looked at
    lines: int = 0

    def note(self, entry: list) -> None:
        """Append a line; a folder that is not ours to write is no hindrance."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as stream:
                stream.write(_line(entry))
        except OSError:
            self.path = None


def content_of(source: Source, root: Path | None, say: Say = lambda text: None) -> Content:
    """The content of a source. Files that the index in `root` knows by stamp are not read again.

    Raises ConfigError for a file that cannot be read.
    """
    if not source.files:  # of a hub dataset the name is all that is known
        return Content(hashlib.sha256(source.spec.encode()).hexdigest(), [])
    known = _read(root, source.spec)
    stamps, total = stamps_of(source), hashlib.sha256()
    hashes = {}
    unknown = sum(stamp[1] for stamp in stamps if stamp not in known.hashes)
    if unknown > LARGE:
        say(f"{source.spec}: hashing {unknown / 1e9:,.1f} GB; what is hashed is remembered")
    for file, stamp in zip(source.files, stamps, strict=True):
        if stamp not in known.hashes:
            known.hashes[stamp] = _sha256(file)
            known.note([*stamp, known.hashes[stamp]])
        hashes[stamp] = known.hashes[stamp]
        total.update(os.fsencode(f"{_label(source, file)}\0{hashes[stamp]}\n"))
    digest = total.hexdigest()
    if known.digest != digest:
        known.note([digest])
    if known.path is not None and known.lines > len(hashes) + STALE_LINES:
        _rewrite(known.path, hashes, digest)
    return Content(digest, stamps)


def last_digest(spec: str, root: Path) -> str:
    """The digest that a source had when it was last looked at; "" if it never was."""
    return _read(root, spec).digest


def stamps_of(source: Source) -> list[Stamp]:
    """What tells cheaply whether a file has changed: equal stamps are taken for equal content.

    A change that keeps a file's size, its time and the three sampled blocks is not seen.
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
    """Whether each file still has the size and the time of its stamp: cheaper than `stamps_of`."""
    try:
        stats = [file.stat() for file in source.files]
    except OSError:
        return False
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats] == [stamp[1:3] for stamp in stamps]


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


def unreadable(file: object, error: OSError) -> ConfigError:
    """The mistake of a source that cannot be read. Not the OSError itself: its exit code would say
    that a disk cannot be written."""
    return ConfigError(f"data.source: {file} cannot be read: {error.strerror or error}")


def _label(source: Source, file: Path) -> str:
    """What matters about a file's name: within a folder all of it, for the files' order and split;
    of a file that is named itself only how it is read."""
    return source.name_of(file) if file != source.root else kind_of(file)


def _read(root: Path | None, spec: str) -> _Known:
    """What the index knows of a source; nothing of standard input, which is new each time."""
    if root is None or spec == STDIN:
        return _Known(None)
    if spec == "stdlib":  # every Python has its own
        name = sysconfig.get_paths()["stdlib"]
    else:
        name = spec if spec.startswith("hub:") else str(absolute(spec))
    known = _Known(
        root / INDEX_FOLDER / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}.jsonl"
    )
    assert known.path is not None
    try:
        lines = list(filter(None, known.path.read_bytes().split(b"\n")))
    except OSError:
        return known
    for line in lines:
        entry = _entry(line)
        if entry is not None and len(entry) == 5:
            known.hashes[tuple(entry[:4])] = entry[4]
        elif entry is not None and len(entry) == 1:
            known.digest = entry[0]
    known.lines = len(lines)
    return known


def _line(entry: list) -> bytes:
    text = json.dumps(entry).encode()
    # The newline comes first too: what a kill or a full disk has torn stays a line of its own.
    return b"\n%08x %s\n" % (zlib.crc32(text), text)


def _entry(line: bytes) -> list | None:
    """The list of a line; None if it is not as it was written."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, list) else None


def _rewrite(path: Path, hashes: dict[Stamp, str], digest: str) -> None:
    """Leave out what is no longer so; as a whole, so that a reader meets the old or the new."""
    entries = [*([*stamp, sha256] for stamp, sha256 in hashes.items()), [digest]]
    with contextlib.suppress(OSError):  # the old one does, too
        replace_file(path, b"".join(map(_line, entries)))


# Prepared folders beside each other: found by what they were made from, held, listed, removed.
#
# A folder's name ends in a hash of the content, the tokenizer and the options that it was made
# from. It is never changed or replaced: other content is another folder. Its time is that of its
# last use.

SOURCE_FILE = "source.json"
KEY_LENGTH = 12
POLL_SECONDS = 0.2


def key_of(made_from: dict[str, Any]) -> str:
    """The end of a folder's name: a hash of what it is made from, wherever the sources lie."""
    sources = [[source["digest"], source["weight"]] for source in made_from["sources"]]
    matters = json.dumps({**made_from, "sources": sources}, sort_keys=True)
    return hashlib.sha256(matters.encode()).hexdigest()[:KEY_LENGTH]


def partial_folder(root: Path, key: str) -> Path:
    """Where a folder of this key is made, to be renamed once it is complete."""
    return root / f".{key}.partial"


def find_key(root: Path, key: str) -> Path | None:
    """The complete folder of this key, whatever else its name says."""
    return next(filter(is_complete, sorted(root.glob(f"[!.]*-{key}"))), None)


def find_fingerprint(root: Path, fingerprint: str, hint: str = "") -> Path | None:
    """The folder of prepared data with this fingerprint; `hint` is looked at first."""
    hinted = [Path(hint)] if hint else []
    for folder in [*hinted, *sorted(root.glob("[!.]*"))]:
        with contextlib.suppress(ConfigError, DamagedData, OSError):
            if read_meta(folder).fingerprint == fingerprint:
                return folder
    return None


def is_complete(folder: Path) -> bool:
    """Whether a folder was prepared to the end."""
    return (folder / META_FILE).is_file()


def read_made_from(folder: Path) -> dict[str, Any]:
    """What a folder was made from, as source.json says; {} if that cannot be told."""
    try:
        found = json.loads((folder / SOURCE_FILE).read_text("utf-8"))
        if [source["digest"] for source in found["sources"]]:
            return found
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return {}


def note_use(folder: Path) -> None:
    """Let the folder's time say that it is used now."""
    with contextlib.suppress(OSError):  # somebody else's
        os.utime(folder)


# Locks


@contextmanager
def lock(path: Path, say: Say) -> Iterator[None]:
    """Hold a lock file; waits while another process holds it. The lock ends with its process."""
    make_folder(path.parent, "data.prepared_dir")
    with path.open("a+") as stream:
        waiting = False
        while (state := try_lock(stream)) == "held":
            if not waiting:
                stream.seek(0)
                say(f"waiting for process {stream.read().strip()}, which prepares this data")
            waiting = True
            time.sleep(POLL_SECONDS)
        if state == "no locks":
            say(f"note: {path.parent} has no file locks: prepare with one process at a time")
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


def hold(folder: Path) -> BinaryIO:
    """Hold a folder for as long as the file that this returns is open: it is not removed then.

    Raises ConfigError if it is being removed.
    """
    told = f"{folder} is being removed: run this again"
    try:
        stream = (folder / META_FILE).open("rb")
    except FileNotFoundError:
        raise ConfigError(told) from None
    if try_lock(stream, shared=True) == "held" or not is_complete(folder):
        stream.close()
        raise ConfigError(told)
    return stream


def delete_left(root: Path, pattern: str) -> None:
    """Delete files of this pattern that a process has left that did not end well: it held a lock
    on each."""
    for file in root.glob(pattern):
        with contextlib.suppress(OSError), file.open("ab") as stream:
            if try_lock(stream) == "locked":
                file.unlink()


# Listing and removing


def list_folders(root: Path, say: Say = print) -> None:
    """Say name, source, size and last use of each prepared folder, the last used first."""
    found = _folders(root)
    if not found:
        say(f"{root} holds no prepared data")
    for folder in sorted(found, key=lambda folder: -folder.stat().st_mtime):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
        megabytes = f"{_size(folder) / 1e6:,.1f} MB"
        say(f"{folder.name}  {megabytes}  last used {used}  source {_source(folder)}")


def remove_folder(root: Path, name: str, say: Say = print) -> None:
    """Delete one prepared folder, or one that is not finished. Raises ConfigError if there is none
    of this name, or a process uses it."""
    folder = root / name
    if folder not in _folders(root):
        raise ConfigError(f"remove={name}: {root} holds no prepared data of this name; see --list")
    if folder.is_symlink():
        raise ConfigError(f"remove={name}: is a link to {folder.resolve()}: delete both yourself")
    unfinished = not is_complete(folder)
    file = root / f".{_key(folder)}.lock" if unfinished else folder / META_FILE
    with file.open("ab") as stream:
        state = try_lock(stream)
        if state == "held":
            doing = "is being prepared" if unfinished else "is used by a run"
            raise ConfigError(f"remove={name}: {doing}: wait until that process has ended")
        if state == "no locks":
            say(f"note: {root} has no file locks: whether a run uses {name} cannot be seen")
        size, source = _size(folder), _source(folder)
        # By another name first: half of a folder must not be taken for a whole one.
        os.rename(folder, root / f".removed-{name.strip('.')}-{os.getpid()}")
        for doomed in root.glob(".removed-*"):  # and what a kill has left of another one
            shutil.rmtree(doomed, ignore_errors=True)
    say(f"removed {folder} ({size / 1e6:,.1f} MB, made from {source})")


def _folders(root: Path) -> list[Path]:
    """Prepared folders, and those that are not finished; nothing that is somebody else's."""
    complete = [folder for folder in root.glob("[!.]*") if is_complete(folder)]
    partial = [folder for folder in root.glob(".*.partial") if len(_key(folder)) == KEY_LENGTH]
    return [folder for folder in [*complete, *partial] if (folder / SOURCE_FILE).is_file()]


def _key(folder: Path) -> str:
    return folder.name.removeprefix(".").removesuffix(".partial")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _source(folder: Path) -> str:
    """The sources that a folder says it was made from."""
    made_from = read_made_from(folder)
    if made_from:
        specs = [source.get("spec", "?") for source in made_from["sources"]]
        return " + ".join(specs) + " (not finished)" * (not is_complete(folder))
    try:
        return read_meta(folder).source
    except (ConfigError, DamagedData):
        return "?"
