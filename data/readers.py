"""Documents out of files: plain text, JSON lines, parquet; .gz and .zst are seen through."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data.options import ConfigError
from data.text import Piece, decode, decoded, document_pieces, row_pieces, without_surrogates

READ_BYTES = 1 << 20
PARQUET_ROWS = 1000
COMPRESSED = (".gz", ".zst")


def kind_of(file: Path) -> str:
    """text, jsonl, parquet or ids, by the file's suffix; what is not known is text."""
    suffixes = [s for s in file.suffixes if s.lower() not in COMPRESSED]
    suffix = suffixes[-1].lower() if suffixes else ""
    kinds = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".bin": "ids"}
    return kinds.get(suffix, "text")


def file_pieces(file: Path, text_field: str, errors: str) -> Iterator[Piece]:
    """The documents of one file. Raises ConfigError for damage, by name and byte offset or row."""
    return READERS[kind_of(file)](file, text_field, errors)


def chunks(file: Path) -> Iterator[tuple[bytes, int]]:
    """(bytes, how far the file itself was read for them) of a file, decompressed.

    Raises ConfigError if it cannot be read or decompressed.
    """
    offset = position = 0
    try:
        with file.open("rb") as raw, _decompressed(raw, file) as stream:
            while chunk := stream.read(READ_BYTES):
                yield chunk, raw.tell() - position
                offset, position = offset + len(chunk), raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        at = f" after {offset} decompressed bytes" if file.suffix.lower() in COMPRESSED else ""
        raise ConfigError(f"{file}: cannot be read{at}: {error}") from None


def _decompressed(raw: BinaryIO, file: Path) -> Any:
    if file.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if file.suffix.lower() == ".zst":
        return pyarrow_for(file).CompressedInputStream(raw, "zstd")
    return raw


def pyarrow_for(file: Path) -> Any:
    """The pyarrow package. Raises ConfigError that says why it is needed if it is missing."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"{file}: reading it needs pyarrow: pip install pyarrow") from None
    return pyarrow


def text_pieces(file: Path, text_field: str, errors: str) -> Iterator[Piece]:
    """A text file is one document."""
    return document_pieces(decoded(chunks(file), file, errors))


def jsonl_pieces(file: Path, text_field: str, errors: str) -> Iterator[Piece]:
    """Each line is one document: a JSON object that holds the text in `text_field`."""
    offset = 0
    for number, (line, read) in enumerate(_lines(file), start=1):
        name = f"{file}, line {number}"
        start = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
        text, _ = decode(line[start:], errors, file, offset + start)
        if text.strip():
            try:
                row = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{name} (offset {offset}): not JSON: {error}") from None
            text = text_of(row, text_field, errors, name)
        yield from row_pieces(text, read)
        offset += len(line) + 1


def _lines(file: Path) -> Iterator[tuple[bytes, int]]:
    """(line without its newline, bytes read) of a file."""
    parts: list[bytes] = []  # of the line that is not complete; joined once, however long it gets
    read = 0
    for chunk, n in chunks(file):
        first, *others = chunk.split(b"\n")
        parts.append(first)
        read += n
        for other in others:
            yield b"".join(parts), read
            parts, read = [other], 0
    yield b"".join(parts), read


def text_of(row: Any, text_field: str, errors: str, name: str) -> str:
    """The text of one row; "" for null. Raises ConfigError if the field is missing or no text."""
    if not isinstance(row, dict):
        raise ConfigError(f"{name}: must be a JSON object with a field {text_field!r}")
    check_field(text_field, row, name)
    text = row[text_field]
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{name}: field {text_field!r} holds {type(text).__name__}, not text")
    return without_surrogates(text or "", errors, name)


def check_field(text_field: str, fields: Iterable[str], name: str) -> None:
    """Raise ConfigError unless the field is one of these."""
    if text_field not in fields:
        there = ", ".join(map(repr, fields)) or "none"
        raise ConfigError(
            f"{name}: has no field {text_field!r}, only {there}: choose one with --text_field"
        )


def parquet_pieces(file: Path, text_field: str, errors: str) -> Iterator[Piece]:
    """Each row is one document; rows are read a few at a time."""
    pyarrow = pyarrow_for(file)
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            check_field(text_field, table.schema_arrow.names, str(file))
            size, rows, done = file.stat().st_size, table.metadata.num_rows, 0
            for batch in table.iter_batches(PARQUET_ROWS, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    name = f"{file}, row {done}"
                    text = text_of({text_field: text}, text_field, errors, name)
                    read = size * (done + 1) // rows - size * done // rows
                    yield from row_pieces(text, read)
                    done += 1
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as parquet: {error}") from None


READERS: dict[str, Callable[[Path, str, str], Iterator[Piece]]] = {
    "text": text_pieces,
    "jsonl": jsonl_pieces,
    "parquet": parquet_pieces,
}
