"""Documents out of files: text, JSON lines and arrays, csv, parquet, arrow.

.gz, .bz2, .xz and .zst are seen through, by their first bytes and not only by their names.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cli.options import ConfigError
from data.tokenizer import characters_of, ids_of

# The text policy: what bytes of a file become which text, the same on every platform.
#
# Text is UTF-8 without NUL bytes. A byte-order mark at the start of a document is dropped; CRLF and
# lone CR become a newline. A document over PIECE_BYTES is encoded in pieces; where they are cut
# defines its ids.

PIECE_BYTES = 1 << 20
HEAD_BYTES = 1 << 16  # that are looked at to see whether a file is text at all
NOT_TEXT = 0.3  # share of bytes there that are neither UTF-8 nor NUL: this is no damage any more


class Piece(NamedTuple):
    """A document, or at most PIECE_BYTES of a longer one."""

    text: str
    first: bool  # the document starts here
    last: bool  # and ends here
    read: int  # bytes of the file that were read for it, for the progress bar
    split: str = ""  # train or val, if its file's name says so


def document_pieces(chunks: Iterable[tuple[str, int]]) -> Iterator[Piece]:
    """One document, given as (text, bytes read) chunks; none if it is white space alone."""
    return cut(normalised(chunks))


def row_pieces(text: str, read: int) -> Iterator[Piece]:
    """One document that is in memory as a whole; the same, sooner for the many that are short."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if len(text) > PIECE_BYTES // 4:  # a character has at most 4 bytes
        yield from cut([(text, read)])
    elif text.strip():
        yield Piece(text, True, True, read)


def separated_pieces(chunks: Iterable[tuple[str, int]], separator: str) -> Iterator[Piece]:
    """Several documents with a separator between them, which belongs to none."""
    between = separator.replace("\r\n", "\n").replace("\r", "\n")
    parts = _parts(normalised(chunks), between)
    for text, read, ends in parts:
        if ends:
            yield from row_pieces(text, read)
        else:
            yield from cut(_until_the_end((text, read, ends), parts))


def _parts(chunks: Iterable[tuple[str, int]], separator: str) -> Iterator[tuple[str, int, bool]]:
    """(text, bytes read, whether a document ends with it); what may begin a separator waits."""
    rest = ""
    for text, read in chunks:
        *whole, rest = (rest + text).split(separator)
        for part in whole:
            yield part, read, True
            read = 0
        sure = max(0, len(rest) - len(separator) + 1)
        if sure or read:
            yield rest[:sure], read, False
        rest = rest[sure:]
    yield rest, 0, True


def _until_the_end(
    part: tuple[str, int, bool], parts: Iterator[tuple[str, int, bool]]
) -> Iterator[tuple[str, int]]:
    """The chunks of one document, the first of which is `part`."""
    text, read, ends = part
    while not ends:
        yield text, read
        text, read, ends = next(parts)
    yield text, read


def refuse_binary(chunks: Iterable[tuple[bytes, int]], name: object) -> Iterator[tuple[bytes, int]]:
    """The same chunks. Raises ConfigError if they begin like something that is not text at all."""
    first = True
    for chunk, read in chunks:
        head, first = chunk[:HEAD_BYTES] if first else b"", False
        if head.startswith((b"\xff\xfe", b"\xfe\xff")) and b"\0" in head:
            raise ConfigError(
                f"{name}: is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8 FILE > NEW)"
            )
        bad = len(head) > 64 and head.decode("utf-8", "replace").count("\ufffd") + head.count(0)
        if bad > NOT_TEXT * len(head):
            raise ConfigError(
                f"{name}: is not UTF-8 text ({bad:,} of its first {len(head):,} bytes are not): "
                "convert it, or leave it out"
            )
        yield chunk, read


def without_nul(
    chunks: Iterable[tuple[bytes, int]], name: object, errors: str
) -> Iterator[tuple[bytes, int]]:
    """The same chunks with U+FFFD for NUL bytes; ConfigError with the offset, if strict."""
    offset = 0
    for chunk, read in chunks:
        at = chunk.find(0)
        if at >= 0 and errors == "strict":
            raise ConfigError(
                f"{name}: byte 0x00 at offset {offset + at} is not text: mend the file, or put "
                "U+FFFD in such places with --errors=replace"
            )
        offset += len(chunk)
        yield chunk if at < 0 else chunk.replace(b"\0", b"\xef\xbf\xbd"), read


def decoded(
    chunks: Iterable[tuple[bytes, int]], name: object, errors: str
) -> Iterator[tuple[str, int]]:
    """UTF-8 chunks as text. Raises ConfigError with the offset of what is not UTF-8, if strict."""
    rest, offset = b"", 0
    for chunk, read in chunks:
        text, used = decode(rest + chunk, errors, name, offset, final=False)
        rest = (rest + chunk)[used:]
        offset += used
        yield text, read
    yield decode(rest, errors, name, offset)[0], 0


def decode(
    data: bytes, errors: str, name: object, offset: int, final: bool = True
) -> tuple[str, int]:
    """(text, bytes used) of UTF-8 data that stands at `offset` of the file called `name`."""
    try:
        return codecs.utf_8_decode(data, errors, final)
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise ConfigError(
            f"{name}: byte {data[error.start]:#04x} at offset {at} is not UTF-8: convert the file, "
            "or put U+FFFD in such places with --errors=replace"
        ) from None


def without_surrogates(text: str, errors: str, name: object) -> str:
    """The text without half surrogate pairs, which JSON can spell; ConfigError, if strict."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise ConfigError(
                f"{name}: character {error.start} of the text is U+{ord(text[error.start]):04X}, "
                "half of a surrogate pair: mend it, or put U+FFFD there with --errors=replace"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def normalised(chunks: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """The same text without a byte-order mark at its start and with newlines as \\n alone."""
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    at_start = True
    for text, read in chunks:
        if at_start and text:
            text, at_start = text.removeprefix("\ufeff"), False
        yield newlines.decode(text), read
    yield newlines.decode("", final=True), 0


def cut(chunks: Iterable[tuple[str, int]]) -> Iterator[Piece]:
    """Pieces of one document: cut after newlines, else between characters."""
    buffer, read, first = b"", 0, True
    for text, n in chunks:
        buffer += text.encode("utf-8")
        read += n
        start = 0
        while len(buffer) - start > PIECE_BYTES:
            end = piece_end(buffer, start)
            yield Piece(buffer[start:end].decode("utf-8"), first, False, read)
            start, read, first = end, 0, False
        buffer = buffer[start:]  # once for each chunk: a long one is cut in linear time
    text = buffer.decode("utf-8")
    if not first or text.strip():
        yield Piece(text, first, True, read)


def piece_end(buffer: bytes, start: int = 0) -> int:
    """Where the piece that begins at `start` of a longer buffer ends."""
    end = buffer.rfind(b"\n", start, start + PIECE_BYTES) + 1
    if end:
        return end
    end = start + PIECE_BYTES
    while buffer[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end


READ_BYTES = 1 << 20
LINE_BYTES = 64 << 20  # of one row: what is longer would fill the memory, even from a small .gz
TABLE_ROWS = 1000
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# What a folder is searched for, beside STRUCTURED; a file or glob that is named is always read.
TEXT = ".txt .md .rst .tex .org .log .srt .html .htm .xml .yaml .yml .toml .ini .cfg"
CODE = (
    ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .cs .swift .js .jsx .ts .tsx .css "
    ".rb .php .pl .lua .r .jl .hs .ml .sh .bash .ps1 .sql"
)
TEXT_SUFFIXES, CODE_SUFFIXES = frozenset(TEXT.split()), frozenset(CODE.split())
STRUCTURED = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".bin": "ids",
    ".npy": "ids",
}
FIRST_BYTES = {
    b"\x1f\x8b\x08": "gz",
    b"BZh": "bz2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zst",
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "an empty zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"\x1f\x9d": "compressed by compress",
    b"LZIP": "compressed by lzip",
    b"%PDF-": "a PDF",
}
AFTER_BZH = re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")  # "BZh" alone may be text


class Row(NamedTuple):
    """One row of a file, as it is there: an object, a string, a list of ids."""

    name: str  # of the file and the place in it, for messages
    value: Any
    read: int  # bytes of the file that were read for it


class How(NamedTuple):
    """How files are read: the options that text depends on."""

    text_field: str = "text"
    errors: str = "strict"
    separator: str = ""
    n_ids: int = 0  # of the vocabulary, where the source holds ids instead of text


def suffix_of(file: Path) -> str:
    """The suffix in lower case, one of compression not counted."""
    name = Path(file.stem) if file.suffix.lower() in COMPRESSED else file
    return name.suffix.lower()


def kind_of(file: Path) -> str:
    """What a file's name says that it is: text, ids, or a key of READERS.

    "json" has to be looked into (`form_of`), and so has a file whose suffix says nothing.
    """
    suffix = suffix_of(file)
    is_text = suffix in TEXT_SUFFIXES or suffix in CODE_SUFFIXES
    return STRUCTURED.get(suffix, "text" if is_text else "json")


def form_of(file: Path, how: How) -> str:
    """What a file is read as: its kind, once "json" is seen to be "jsonl", "values" or "text"."""
    kind = kind_of(file)
    if kind != "json":
        return kind
    head, whole = _first_line(file)
    if head[:1] not in (b"{", b"["):
        return "text"
    if head[:1] == b"{" and whole and isinstance(_json_or_none(head), dict):
        return "jsonl"
    try:
        value = next(_json_items(file, how), Row("", None, 0)).value
    except ConfigError:
        return "text"
    if head[:1] == b"[":
        return "values" if isinstance(value, (dict, str, list)) else "text"
    return "values" if isinstance(value, dict) and how.text_field in value else "text"


def looks_like_lines(file: Path) -> bool:
    """Whether a file begins as JSON lines do, whatever it is called."""
    head, whole = _first_line(file)
    return whole and head[:1] == b"{" and isinstance(_json_or_none(head), dict)


def _first_line(file: Path) -> tuple[bytes, bool]:
    """The first line that is not blank, as far as it may be an object; whether that is all."""
    parts: list[bytes] = []
    size = 0
    for chunk, _ in chunks(file):
        chunk = chunk if parts else chunk.lstrip(b"\xef\xbb\xbf \t\r\n")
        line, newline, _ = chunk.partition(b"\n")
        parts += [line] if line else []
        size += len(line)
        if newline or size > LINE_BYTES or (parts and parts[0][:1] != b"{"):
            return b"".join(parts), size <= LINE_BYTES
    return b"".join(parts), True


def _json_or_none(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def file_pieces(file: Path, how: How, form: str | None = None) -> Iterator[Piece]:
    """The documents of one file. Raises ConfigError for damage, by name and byte offset or row."""
    form = form or form_of(file, how)
    if form == "text":
        pieces = text_pieces(file, how)
        yield from ids_pieces(pieces, file, how.n_ids) if how.n_ids else pieces
        return
    for name, value, read in READERS[form](file, how):
        if how.n_ids:
            ids = ids_of([] if value is None else value, how.n_ids, name)
            yield from cut([(characters_of(ids), read)])
        else:
            yield from row_pieces(as_text(value, how, name), read)


def ids_pieces(pieces: Iterator[Piece], file: Path, n_ids: int) -> Iterator[Piece]:
    """Pieces of numbers with white space between them, as one character for each id."""
    rest, done = "", 0
    for piece in pieces:
        text = piece.text if piece.first else rest + piece.text
        end = len(text)
        while end and not (piece.last or text[end - 1].isspace()):
            end -= 1  # a number that the next piece may go on with
        ids = ids_of(text[:end], n_ids, str(file), done)
        rest, done = text[end:], done + len(ids)
        yield piece._replace(text=characters_of(ids))


# Bytes


def chunks(file: Path) -> Iterator[tuple[bytes, int]]:
    """(bytes, how far the file itself was read for them) of a file, decompressed.

    Raises ConfigError if it cannot be read or decompressed, or is an archive of files.
    """
    offset = position = 0
    packing = ""
    try:
        with file.open("rb") as raw:
            packing = _packing(file, raw.read(512))
            raw.seek(0)
            with _decompressed(raw, file, packing) as stream:
                while chunk := stream.read(READ_BYTES):
                    if packing and offset == 0:
                        _refuse_packed(file, chunk, "compressed ")
                    yield chunk, raw.tell() - position
                    offset, position = offset + len(chunk), raw.tell()
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, PermissionError):
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        at = f" after {offset} decompressed bytes" if packing else ""
        raise ConfigError(f"{file}: cannot be read{at}: {error}") from None


def _packing(file: Path, head: bytes) -> str:
    """gz, bz2, xz or zst by the first bytes, else by the name; "" for what is not compressed."""
    found = _first_bytes(head)
    if found in ("gz", "bz2", "xz", "zst"):
        return found
    _refuse_packed(file, head, "")
    suffix = file.suffix.lower()
    return suffix[1:] if suffix in COMPRESSED else ""


def _first_bytes(head: bytes) -> str:
    found = next((name for mark, name in FIRST_BYTES.items() if head.startswith(mark)), "")
    if found == "bz2" and not AFTER_BZH.match(head):
        return ""
    return found or ("a tar archive" if head[257:262] == b"ustar" else "")


def _refuse_packed(file: Path, head: bytes, within: str) -> None:
    """Raise ConfigError for what is read only once somebody has unpacked it."""
    found = _first_bytes(head)
    if found:
        found = f"a {found} file" if found in ("gz", "bz2", "xz", "zst") else found
        what = "convert it to text" if "PDF" in found else "unpack it, and name what comes out"
        raise ConfigError(f"{file}: is {within}{found}, not text: {what}")


def _decompressed(raw: BinaryIO, file: Path, packing: str) -> Any:
    if packing == "gz":
        return gzip.GzipFile(fileobj=raw)
    if packing == "bz2":
        return bz2.BZ2File(raw)
    if packing == "xz":
        return lzma.LZMAFile(raw)
    if packing == "zst":
        return pyarrow_for(file).CompressedInputStream(raw, "zstd")
    return raw


def is_compressed(file: Path) -> bool:
    """Whether a file is compressed, by its first bytes or its name; archives are refused."""
    with file.open("rb") as raw:
        return bool(_packing(file, raw.read(512)))


def pyarrow_for(file: Path) -> Any:
    """The pyarrow package. Raises ConfigError that says why it is needed if it is missing."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"{file}: reading it needs pyarrow: pip install pyarrow") from None
    return pyarrow


# Text


def text_pieces(file: Path, how: How) -> Iterator[Piece]:
    """A text file is one document, or several with a separator between them."""
    text = _text(file, how)
    return separated_pieces(text, how.separator) if how.separator else document_pieces(text)


def _text(file: Path, how: How) -> Iterator[tuple[str, int]]:
    raw = without_nul(refuse_binary(chunks(file), file), file, how.errors)
    return decoded(raw, file, how.errors)


# JSON


def json_lines(file: Path, how: How) -> Iterator[Row]:
    """Each line that is not blank is one row."""
    offset = 0
    for number, (line, read) in enumerate(_lines(file), start=1):
        name = f"{file}, line {number}"
        start = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
        text, _ = decode(line[start:], how.errors, file, offset + start)
        if text.strip():
            try:
                value = field_of(json.loads(text), how.text_field, name)
            except RecursionError:
                raise ConfigError(f"{name} (offset {offset}): nested too deep") from None
            except json.JSONDecodeError as error:
                raise ConfigError(f"{name} (offset {offset}): not JSON: {error}") from None
            yield Row(name, value, read)
        offset += len(line) + 1


def _lines(file: Path) -> Iterator[tuple[bytes, int]]:
    """(line without its newline, bytes read) of a file."""
    parts: list[bytes] = []  # of the line that is not complete; joined once, however long it gets
    read = size = number = 0
    for chunk, n in chunks(file):
        first, *others = chunk.split(b"\n")
        parts.append(first)
        read, size = read + n, size + len(first)
        for other in others:
            yield b"".join(parts), read
            parts, read, size, number = [other], 0, len(other), number + 1
        if size > LINE_BYTES:
            raise _too_long(f"{file}, line {number + 1}")
    yield b"".join(parts), read


def _too_long(name: str) -> ConfigError:
    return ConfigError(
        f"{name}: longer than {LINE_BYTES >> 20} MB, the most that one row may have: split it into "
        "several, or write its text to a file of its own"
    )


def json_values(file: Path, how: How) -> Iterator[Row]:
    """The items of an array, or one value after the other, each a row."""
    for name, value, read in _json_items(file, how):
        yield Row(name, field_of(value, how.text_field, name), read)


def _json_items(file: Path, how: How) -> Iterator[Row]:
    """The values as they are. Takes time linear in the file.

    The buffer is filled with at least as much again whenever a value does not end in it.
    """
    decoder, text = json.JSONDecoder(), decoded(chunks(file), file, how.errors)
    buffer, at, number, in_array, read = "", 0, 0, False, 0
    while True:
        at = _BETWEEN.match(buffer, at).end()
        mark = buffer[at : at + 1]
        if mark == "[" and number == 0 and not in_array:
            in_array, at = True, at + 1
            continue
        if mark == "]" and in_array:
            return
        name, value, end = f"{file}, item {number}", None, len(buffer)
        problem = "the file ends before its array does" if in_array else ""
        if mark:
            try:
                value, end = decoder.raw_decode(buffer, at)
            except RecursionError:
                raise ConfigError(f"{name}: nested too deep") from None
            except json.JSONDecodeError as error:
                problem = f"not JSON: {error.msg}"
                if not _is_cut(error, len(buffer)):
                    raise ConfigError(f"{name}: {problem}") from None
        if end == len(buffer):  # it may go on
            more, n = _as_much_again(text, len(buffer) - at)
            if len(buffer) - at > LINE_BYTES:
                raise _too_long(name)
            buffer, at, read = buffer[at:] + more, 0, read + n
            if more:
                continue
            if value is None:
                if problem:
                    raise ConfigError(f"{name}: {problem}")
                return
            end = len(buffer)
        yield Row(name, value, read)
        at, number, read = end, number + 1, 0


_BETWEEN = re.compile(r"[\s,\ufeff]*")


def _is_cut(error: json.JSONDecodeError, size: int) -> bool:
    """Whether a value is not JSON only because the buffer ends in the middle of it."""
    return error.msg.startswith("Unterminated string") or error.pos > size - 16


def _as_much_again(text: Iterator[tuple[str, int]], size: int) -> tuple[str, int]:
    parts: list[str] = []
    found = read = 0
    for part, n in text:
        parts.append(part)
        found, read = found + len(part), read + n
        if found > size:
            break
    return "".join(parts), read


def field_of(row: Any, text_field: str, name: str) -> Any:
    """What one row holds in the field; a row that is a string or a list is taken whole."""
    if isinstance(row, dict):
        check_field(text_field, row, name)
        return row[text_field]
    if isinstance(row, (str, list)):
        return row
    raise ConfigError(f"{name}: must be a JSON object with a field {text_field!r}")


def as_text(value: Any, how: How, name: str) -> str:
    """The text of a row; "" for null. Raises ConfigError if it is not text."""
    if value is not None and not isinstance(value, str):
        what = f"field {how.text_field!r} holds"
        raise ConfigError(f"{name}: {what} {type(value).__name__}, not text")
    return without_surrogates(value or "", how.errors, name)


def check_field(text_field: str, fields: Iterable[str], name: str) -> None:
    """Raise ConfigError unless the field is one of these."""
    if text_field not in fields:
        there = ", ".join(map(repr, fields)) or "none"
        raise ConfigError(
            f"{name}: has no field {text_field!r}, only {there}: choose one with --text_field, or "
            "leave the file out"
        )


# Tables


def delimited_rows(file: Path, how: How) -> Iterator[Row]:
    """Rows of a .csv or .tsv file, whose first line names the columns."""
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        rest = ""
        for text, n in normalised(_text(file, how)):
            *whole, rest = (rest + text).split("\n")
            read += n
            for line in whole:
                yield line + "\n"
            if len(rest) > LINE_BYTES:
                raise _too_long(f"{file}, row {number}")
        yield from [rest] if rest else []

    csv.field_size_limit(LINE_BYTES)
    number = 0
    table = csv.reader(lines(), delimiter="\t" if kind_of(file) == "tsv" else ",", strict=True)
    try:
        header = next(table, None)
        if header is None:
            return
        check_field(how.text_field, header, str(file))
        for row in table:
            number += 1
            if not row:
                continue  # a blank line
            name = f"{file}, row {number} (line {table.line_num})"
            if len(row) != len(header):
                raise ConfigError(f"{name}: has {len(row)} columns, the first line {len(header)}")
            yield Row(name, row[header.index(how.text_field)], read)
            read = 0
    except csv.Error as error:
        raise ConfigError(f"{file}, line {table.line_num}: cannot be read: {error}") from None


def parquet_rows(file: Path, how: How) -> Iterator[Row]:
    """Rows of a .parquet file, read a few at a time."""
    pyarrow_for(file)
    from pyarrow.parquet import ParquetFile

    def batches() -> Iterator[Any]:
        with ParquetFile(file) as table:
            check_field(how.text_field, table.schema_arrow.names, str(file))
            yield from table.iter_batches(TABLE_ROWS, columns=[how.text_field])

    def n_rows() -> int:
        with ParquetFile(file) as table:
            return table.metadata.num_rows

    return _columnar_rows(file, "parquet", batches, n_rows)


def arrow_rows(file: Path, how: How) -> Iterator[Row]:
    """Rows of an Arrow file, in its stream form (`datasets.save_to_disk`) or its file form."""
    pyarrow = pyarrow_for(file)

    def batches() -> Iterator[Any]:
        with pyarrow.memory_map(str(file)) as stream:
            is_file = stream.read(6) == b"ARROW1"
            stream.seek(0)
            opened = pyarrow.ipc.open_file(stream) if is_file else pyarrow.ipc.open_stream(stream)
            with opened as table:
                check_field(how.text_field, table.schema.names, str(file))
                count = table.num_record_batches if is_file else None
                some = map(table.get_batch, range(count)) if is_file else table
                for batch in some:
                    column = batch.select([how.text_field])
                    for at in range(0, batch.num_rows, TABLE_ROWS):
                        yield column.slice(at, TABLE_ROWS)

    def n_rows() -> int:
        return sum(batch.num_rows for batch in batches())

    return _columnar_rows(file, "arrow", batches, n_rows)


def _columnar_rows(
    file: Path, kind: str, batches: Callable[[], Iterator[Any]], n_rows: Callable[[], int]
) -> Iterator[Row]:
    """Rows of batches of one column; each is said to take an equal share of the file."""
    import pyarrow

    try:
        size, done = file.stat().st_size, 0
        rows = n_rows()
        for batch in batches():
            for value in batch.column(0).to_pylist():
                read = size * (done + 1) // rows - size * done // rows
                yield Row(f"{file}, row {done}", value, read)
                done += 1
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as {kind}: {error}") from None


READERS: dict[str, Callable[[Path, How], Iterator[Row]]] = {
    "jsonl": json_lines,
    "values": json_values,
    "csv": delimited_rows,
    "tsv": delimited_rows,
    "parquet": parquet_rows,
    "arrow": arrow_rows,
}
