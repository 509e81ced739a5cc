"""Documents from where people have them: the standard library, text files, folders, globs.

Text is UTF-8 on every platform. A byte-order mark at the start of a document is dropped, and
CRLF and lone CR become a newline, so the same text gives the same ids wherever it was written.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data.options import ConfigError

PIECE_BYTES = 1 << 20  # a longer document is encoded in pieces; this defines its ids
READ_BYTES = 1 << 20
STDLIB_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "encodings",
    "pydoc_data",
}


class Piece(NamedTuple):
    """A document, or at most PIECE_BYTES of a longer one."""

    text: str
    first: bool  # the document starts here
    last: bool  # and ends here
    read: int  # bytes of the source file that were read for it, for the progress bar


@dataclass(frozen=True)
class Source:
    """Where documents come from: files in the order in which they are read."""

    name: str
    root: Path
    files: list[Path]

    def pieces(self, text_field: str, errors: str) -> Iterator[Piece]:
        """Every document, in pieces. Raises ConfigError for damage, by file and byte offset."""
        for file in self.files:
            with file.open("rb") as stream:
                yield from cut(normalised(decoded(stream, file, errors)))

    def digest(self) -> str:
        """SHA-256 over the names and the content of the files."""
        total = hashlib.sha256()
        for file in self.files:
            total.update(f"{self._relative(file)}\0".encode())
            with file.open("rb") as stream:
                total.update(stream.read())
        return total.hexdigest()

    def stamp(self) -> list[list]:
        """[name, size, mtime in ns] of each file: equal stamps are taken for equal content."""
        return [
            [self._relative(file), file.stat().st_size, file.stat().st_mtime_ns]
            for file in self.files
        ]

    def _relative(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix() if file != self.root else file.name


def open_source(spec: str) -> Source:
    """The source that a name stands for. Raises ConfigError if there is nothing to read."""
    if spec == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return Source(spec, root, _stdlib_files(root))
    path = Path(spec).expanduser().absolute()
    if path.is_file():
        return Source(spec, path, [path])
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return Source(spec, path, files)
    files = sorted(Path(p).absolute() for p in glob.glob(spec, recursive=True))
    files = [p for p in files if p.is_file()]
    if not files:
        raise ConfigError(f"data.source={spec}: no such file, folder or glob")
    return Source(spec, Path("/"), files)


def _stdlib_files(root: Path) -> list[Path]:
    files = root.rglob("*.py")
    kept = [f for f in files if not STDLIB_LEFT_OUT & set(f.relative_to(root).parts)]
    return sorted(kept, key=lambda f: f.relative_to(root).as_posix())


def decoded(stream: BinaryIO, file: Path, errors: str) -> Iterator[tuple[str, int]]:
    """(text, bytes read) of a UTF-8 stream, chunk by chunk."""
    rest, offset = b"", 0
    while True:
        chunk = stream.read(READ_BYTES)
        data = rest + chunk
        try:
            text, used = codecs.utf_8_decode(data, errors, not chunk)
        except UnicodeDecodeError as error:
            at = offset + error.start
            raise ConfigError(
                f"{file}: byte {data[error.start]:#04x} at offset {at} is not UTF-8: convert the "
                "file, or put U+FFFD in such places with --errors=replace"
            ) from None
        rest, offset = data[used:], offset + used
        yield text, len(chunk)
        if not chunk:
            return


def normalised(chunks: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """The same text without a byte-order mark at its start and with newlines as \\n alone."""
    at_start, held = True, ""
    for text, read in chunks:
        text = held + text
        if at_start and text:
            text, at_start = text.removeprefix("\ufeff"), False
        held = "\r" if text.endswith("\r") and read else ""
        text = text[: len(text) - len(held)]
        yield text.replace("\r\n", "\n").replace("\r", "\n"), read


def cut(chunks: Iterable[tuple[str, int]]) -> Iterator[Piece]:
    """One document's text as pieces: after newlines, else between characters."""
    buffer, read, first = b"", 0, True
    for text, n in chunks:
        buffer += text.encode("utf-8")
        read += n
        while len(buffer) > PIECE_BYTES:
            end = _piece_end(buffer)
            yield Piece(buffer[:end].decode("utf-8"), first, False, read)
            buffer, read, first = buffer[end:], 0, False
    text = buffer.decode("utf-8")
    if not first or text.strip():  # a document of white space alone is none
        yield Piece(text, first, True, read)


def _piece_end(buffer: bytes) -> int:
    end = buffer.rfind(b"\n", 0, PIECE_BYTES) + 1
    if end:
        return end
    end = PIECE_BYTES
    while buffer[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end
