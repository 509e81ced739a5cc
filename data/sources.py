"""Where documents come from: the standard library, files, folders, globs, a hub, or a mixture."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.hub import hub_pieces, parse_hub
from data.options import ConfigError
from data.readers import COMPRESSED, READ_BYTES, file_pieces, kind_of
from data.text import Piece

STDIN = "-"
# Apart from third-party packages and tests: tables that are near-duplicates of each other.
STDLIB_LEFT_OUT = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"]
)
# What a folder is searched for; a file or glob that is named is read whatever its suffix.
TEXT_SUFFIXES = frozenset(
    [
        ".txt",
        ".md",
        ".rst",
        ".tex",
        ".org",
        ".csv",
        ".tsv",
        ".log",
        ".srt",
        ".html",
        ".htm",
        ".xml",
        ".json",
        ".yaml",
        ".yml",
        ".toml",
        ".ini",
        ".cfg",
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cu",
        ".rs",
        ".go",
        ".java",
        ".kt",
        ".scala",
        ".cs",
        ".swift",
        ".js",
        ".jsx",
        ".ts",
        ".tsx",
        ".css",
        ".rb",
        ".php",
        ".pl",
        ".lua",
        ".r",
        ".jl",
        ".hs",
        ".ml",
        ".sh",
        ".bash",
        ".ps1",
        ".sql",
    ]
)
# A folder with these files is a run, or prepared data, and no text: it may lie in the source.
OURS = ({"run.json", "metrics.jsonl"}, {"meta.json", "source.json"})
PART = re.compile(r"(.+?)\*(\d+\.?\d*|\.\d+)(?:\+|$)")


@dataclass(frozen=True)
class Source:
    """Files in the order in which they are read; none for a hub dataset."""

    spec: str
    root: Path
    files: tuple[Path, ...]
    note: str = ""  # what was left out

    def pieces(self, text_field: str, errors: str) -> Iterator[Piece]:
        """Every document, in pieces. Raises ConfigError for damage, by file and byte offset."""
        if self.spec.startswith("hub:"):
            yield from hub_pieces(self.spec, text_field, errors)
        for file in self.files:
            yield from file_pieces(file, text_field, errors)

    @property
    def holds_ids(self) -> bool:
        """Whether these are files of ids that somebody else's tokenizer made."""
        return bool(self.files) and kind_of(self.files[0]) == "ids"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    def stamp(self) -> list[list]:
        """[name, size, mtime in ns] of each file; equal stamps are taken for equal content."""
        stats = [(self.name_of(file), file.stat()) for file in self.files]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]

    def digest(self) -> str:
        """SHA-256 over the names and the content of all files; of the name alone for a hub."""
        total = hashlib.sha256(self.spec.encode() if not self.files else b"")
        for file in self.files:
            content = hashlib.sha256()
            with file.open("rb") as stream:
                while chunk := stream.read(READ_BYTES):
                    content.update(chunk)
            total.update(f"{self.name_of(file)}\0{content.hexdigest()}\n".encode())
        return total.hexdigest()

    def name_of(self, file: Path) -> str:
        """A file's name within the source."""
        return file.name if file == self.root else file.relative_to(self.root).as_posix()


def parse_mixture(text: str) -> list[tuple[str, float]]:
    """(source, weight) of each part of `A*0.7+B*0.3`; one part with weight 1 for a plain source.

    Weights sum to 1. Raises ConfigError for a weight of 0.
    """
    found = list(PART.finditer(text))
    whole = "".join(match[0] for match in found) == text
    if len(found) < 2 or not whole or Path(text).exists():
        return [(text, 1.0)]
    weights = [float(match[2]) for match in found]
    if min(weights) == 0:
        raise ConfigError(f"data.source={text}: a weight is 0: leave that source out")
    return [(m[1], weight / sum(weights)) for m, weight in zip(found, weights, strict=True)]


def open_source(spec: str, stdin_file: Path | None = None) -> Source:
    """The source of a name. Raises ConfigError if there is nothing to read, or it is a mix-up."""
    if spec.startswith("hub:"):
        parse_hub(spec)
        return Source(spec, Path(), ())
    if spec == STDIN:
        if stdin_file is None:
            raise ConfigError("data.source=-: standard input can be read only once: prepare it")
        return Source(spec, stdin_file, (stdin_file,))
    if spec == "stdlib":
        return _stdlib()
    path = absolute(spec)
    if path.is_file():
        source = Source(spec, path, (path,))
    elif path.is_dir():
        source = _folder(spec, path)
    else:
        matches = sorted(glob.glob(str(path), recursive=True))
        files = tuple(p for p in map(Path, matches) if p.is_file())
        source = Source(spec, Path(path.anchor), files)
    if not source.files:
        raise ConfigError(f"data.source={spec}: {_why_nothing(spec, path, source.note)}")
    kinds = {kind_of(file) for file in source.files}
    if "ids" in kinds and len(kinds) > 1:
        raise ConfigError(f"data.source={spec}: mixes .bin files of ids with text: name one kind")
    return source


def _why_nothing(spec: str, path: Path, note: str) -> str:
    """Why there is no file to read."""
    if path.is_dir():
        return f"the folder holds nothing to read ({note or 'no file at all'})"
    why = "no file matches" if glob.has_magic(spec) else "no such file or folder"
    if "+" in spec:
        why += "; each part of a mixture needs a weight above 0, such as A*0.7+B*0.3"
    return why


def absolute(spec: str) -> Path:
    """The path that a file, folder or glob means, from wherever it is looked at."""
    return Path(spec).expanduser().absolute()


def _stdlib() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = set(inside) - STDLIB_LEFT_OUT  # not walked: site-packages may be huge
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return Source("stdlib", root, _sorted(files, root))


def _folder(spec: str, root: Path) -> Source:
    found, ours = [], 0
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if not name.startswith(".")]
        if any(mark.issubset(names) for mark in OURS):
            inside[:], ours = [], ours + 1
            continue
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    found = [file for file in found if file.is_file()]
    kept = [f for f in found if kind_of(f) != "text" or _text_suffix(f) in TEXT_SUFFIXES]
    left_out = Counter(_text_suffix(f) or "no suffix" for f in set(found) - set(kept))
    kinds = ", ".join(f"{n} x {suffix}" for suffix, n in left_out.most_common(5))
    notes = [f"{left_out.total()} files of other kinds left out: {kinds}"] if left_out else []
    notes += [f"{ours} folders of runs or prepared data left out"] if ours else []
    return Source(spec, root, _sorted(kept, root), "; ".join(notes))


def _text_suffix(file: Path) -> str:
    name = Path(file.stem) if file.suffix.lower() in COMPRESSED else file
    return name.suffix.lower()


def _sorted(files: list[Path], root: Path) -> tuple[Path, ...]:
    # By the name's characters, so that the order is the same on every platform.
    return tuple(sorted(files, key=lambda file: file.relative_to(root).as_posix()))
