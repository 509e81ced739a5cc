"""Documents from files: text, JSON lines and arrays, csv, parquet, arrow.

Files compressed by gzip, bzip2, xz or zstd are decompressed while reading, whatever their names.

Text is UTF-8 without NUL bytes and the same on every platform: a byte-order mark at the start of a
document is dropped, CRLF and a lone CR become a newline.
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
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cli.options import ConfigError
from data.chat import FIELDS, conversation
from data.tokenizer import characters_of, ids_of

PIECE_BYTES = 1 << 20  # longer documents are encoded in pieces; where they are cut defines the ids
READ_BYTES = 1 << 20
LINE_BYTES = 64 << 20  # per row: a longer one could fill the memory, even from a small .gz
HEAD_BYTES = 1 << 16  # bytes that show whether a file is text at all
NOT_TEXT = 0.3  # with more than this share of bytes that are not text, a file is not damaged text
TABLE_ROWS = 1000

# Files that a folder is searched for, besides STRUCTURED; a file that is named is always read.
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
COMPRESSIONS = ("gz", "bz2", "xz", "zst")
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


class Piece(NamedTuple):
    """A document, or at most PIECE_BYTES of a longer one."""

    text: str
    first: bool  # the document starts here
    last: bool  # the document ends here
    read: int  # bytes of the file that were read for it, for the progress bar
    split: str = ""  # train or val, if the file's name says so
    name: str = ""  # of a conversation, for messages: its file and place


class Row(NamedTuple):
    """A row of a file as it is there: an object, a string or a list of ids."""

    name: str  # file and place in it, for messages
    value: Any
    read: int  # bytes of the file that were read for it


class ReadOptions(NamedTuple):
    """The options that decide which text a file holds."""

    text_field: str = "text"
    errors: str = "strict"
    separator: str = ""
    n_ids: int = 0  # size of the vocabulary if the source holds ids instead of text
    max_documents: int = 0  # of each source, or of each split that its files are named for; 0: all
    chat: bool = False  # rows are conversations; the text of one is the JSON of its messages


# The kind of a file


def suffix_of(file: Path) -> str:
    """Return the suffix in lower case, without that of a compression."""
    name = Path(file.stem) if file.suffix.lower()[1:] in COMPRESSIONS else file
    return name.suffix.lower()


def kind_of(file: Path) -> str:
    """Return the kind of file by its name: text, ids, or a key of READERS; "json" for a file that
    `form_of` has to look into, which is also one with an unknown suffix."""
    suffix = suffix_of(file)
    is_text = suffix in TEXT_SUFFIXES or suffix in CODE_SUFFIXES
    return STRUCTURED.get(suffix, "text" if is_text else "json")


def form_of(file: Path, options: ReadOptions) -> str:
    """Return how a file is read: its kind, where "json" has become "jsonl", "values" or "text"."""
    kind = kind_of(file)
    if kind != "json":
        return kind
    head = _first_line(file)
    if head[:1] not in (b"{", b"["):
        return "text"
    if _is_object(head):
        return "jsonl"
    try:
        value = next(_json_items(file, options), Row("", None, 0)).value
    except ConfigError:
        return "text"
    if head[:1] == b"[":
        return "values" if isinstance(value, (dict, str, list)) else "text"
    is_row = isinstance(value, dict) and (options.chat or options.text_field in value)
    return "values" if is_row else "text"


def looks_like_lines(file: Path) -> bool:
    """Return whether a file begins like JSON lines, whatever its name."""
    return _is_object(_first_line(file))


def _first_line(file: Path) -> bytes:
    """Return the first line that is not blank, or its beginning if that is not "{"."""
    parts: list[bytes] = []
    size = 0
    for chunk, _ in chunks(file):
        chunk = chunk if parts else chunk.lstrip(b"\xef\xbb\xbf \t\r\n")
        line, newline, _ = chunk.partition(b"\n")
        parts += [line] if line else []
        size += len(line)
        if newline or size > LINE_BYTES or (parts and parts[0][:1] != b"{"):
            break
    return b"".join(parts)


def _is_object(line: bytes) -> bool:
    try:
        return line[:1] == b"{" and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def file_pieces(file: Path, options: ReadOptions, form: str | None = None) -> Iterator[Piece]:
    """Yield the documents of a file. Raises ConfigError for damage, with byte offset or row."""
    form = form or form_of(file, options)
    if form == "text" and options.chat:
        raise ConfigError(
            f"{file}: is plain text; conversations (data.format=chat) are rows of JSON lines, of a "
            "JSON array, .csv, .parquet or .arrow"
        )
    if form == "text":
        text = normalized(text_chunks(file, options))
        separator = options.separator.replace("\r\n", "\n").replace("\r", "\n")
        pieces = cut(split_documents(text, separator))
        yield from _pieces_of_numbers(pieces, file, options.n_ids) if options.n_ids else pieces
    else:
        yield from row_pieces(READERS[form](file, options), options)


def row_pieces(rows: Iterable[Row], options: ReadOptions) -> Iterator[Piece]:
    """Yield a document per row: text, or a list of ids if the vocabulary consists of ids."""
    unreported = 0  # bytes of rows that hold no text
    for name, value, read in rows:
        unreported += read
        if options.n_ids:
            ids = ids_of([] if value is None else value, options.n_ids, name)
            pieces = cut([(characters_of(ids), unreported, True)])
        elif options.chat:
            text = json.dumps(conversation(value, name), ensure_ascii=False)
            pieces = iter([Piece(text, True, True, unreported, name=name)])
        else:
            pieces = text_pieces(as_text(value, options, name), unreported)
        for piece in pieces:
            yield piece
            unreported = 0


def _pieces_of_numbers(pieces: Iterator[Piece], file: Path, n_ids: int) -> Iterator[Piece]:
    """Turn numbers separated by white space into one character per id."""
    rest, done = "", 0
    for piece in pieces:
        text = piece.text if piece.first else rest + piece.text
        end = len(text)
        while end and not (piece.last or text[end - 1].isspace()):
            end -= 1  # the last number may continue in the next piece
        ids = ids_of(text[:end], n_ids, str(file), done)
        rest, done = text[end:], done + len(ids)
        yield piece._replace(text=characters_of(ids))


# Bytes


def chunks(file: Path) -> Iterator[tuple[bytes, int]]:
    """Yield (bytes, bytes of the file read for them), decompressed.

    Raises ConfigError if the file cannot be read or decompressed, or is an archive.
    """
    offset = position = 0
    compression = ""
    try:
        with file.open("rb") as raw:
            compression = _compression(file, raw.read(512))
            raw.seek(0)
            with _decompressed(raw, file, compression) as stream:
                while chunk := stream.read(READ_BYTES):
                    if compression and offset == 0 and (inside := _kind_by_bytes(chunk)):
                        raise _not_text(file, inside, " in a compressed file")
                    yield chunk, raw.tell() - position
                    offset, position = offset + len(chunk), raw.tell()
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        at = f" after {offset} decompressed bytes" if compression else ""
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file}: cannot be read{at}: {reason}") from None


def _compression(file: Path, head: bytes) -> str:
    """Return gz, bz2, xz or zst by the first bytes, else by the suffix; "" if not compressed."""
    found = _kind_by_bytes(head)
    if found and found not in COMPRESSIONS:
        raise _not_text(file, found)
    suffix = file.suffix.lower()[1:]
    return found or (suffix if suffix in COMPRESSIONS else "")


def _kind_by_bytes(head: bytes) -> str:
    found = next((name for mark, name in FIRST_BYTES.items() if head.startswith(mark)), "")
    if found == "bz2" and not AFTER_BZH.match(head):
        return ""
    return found or ("a tar archive" if head[257:262] == b"ustar" else "")


def _not_text(file: Path, found: str, where: str = "") -> ConfigError:
    found = f"a {found} file" if found in COMPRESSIONS else found
    what = "convert it to text" if "PDF" in found else "unpack it and name the files inside"
    return ConfigError(f"{file}: is {found}{where}, not text: {what}")


def _decompressed(raw: BinaryIO, file: Path, compression: str) -> Any:
    if compression == "gz":
        return gzip.GzipFile(fileobj=raw)
    if compression == "bz2":
        return bz2.BZ2File(raw)
    if compression == "xz":
        return lzma.LZMAFile(raw)
    if compression == "zst":
        return pyarrow_for(file).CompressedInputStream(raw, "zstd")
    return raw


def is_compressed(file: Path) -> bool:
    """Return whether a file is compressed. Raises ConfigError for an archive."""
    with file.open("rb") as raw:
        return bool(_compression(file, raw.read(512)))


def pyarrow_for(file: Path) -> Any:
    """Return the pyarrow package. Raises ConfigError if it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(f"{file}: reading it needs pyarrow: pip install pyarrow") from None
    return pyarrow


# Text


def text_chunks(file: Path, options: ReadOptions) -> Iterator[tuple[str, int]]:
    """Yield (text, bytes read) of a text file. Raises ConfigError if it is not text, and for
    invalid UTF-8 or NUL bytes unless errors=replace."""
    return decoded(_checked(file, options.errors), file, options.errors)


def _checked(file: Path, errors: str) -> Iterator[tuple[bytes, int]]:
    offset = 0
    for chunk, read in chunks(file):
        if offset == 0:
            _refuse_binary(chunk[:HEAD_BYTES], file)
        at = chunk.find(0)
        if at >= 0 and errors == "strict":
            raise ConfigError(
                f"{file}: byte 0x00 at offset {offset + at} is not text: repair the file, or "
                "replace such bytes by U+FFFD with --errors=replace"
            )
        offset += len(chunk)
        yield chunk if at < 0 else chunk.replace(b"\0", b"\xef\xbf\xbd"), read


def _refuse_binary(head: bytes, file: Path) -> None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and b"\0" in head:
        raise ConfigError(
            f"{file}: is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8 FILE > NEW)"
        )
    bad = len(head) > 64 and head.decode("utf-8", "replace").count("\ufffd") + head.count(0)
    if bad > NOT_TEXT * len(head):
        raise ConfigError(
            f"{file}: is not UTF-8 text ({bad:,} of its first {len(head):,} bytes are not): "
            "convert it, or leave it out"
        )


def decoded(
    chunks: Iterable[tuple[bytes, int]], name: object, errors: str
) -> Iterator[tuple[str, int]]:
    """Decode UTF-8 chunks. Raises ConfigError with the offset of an invalid byte, if strict."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(errors), 0
    for chunk, read in chain(chunks, [(b"", 0)]):
        start = offset - len(decoder.getstate()[0])  # of a character that the last chunk cut
        try:
            yield decoder.decode(chunk, final=not chunk), read
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{name}: byte {error.object[error.start]:#04x} at offset {start + error.start} is "
                "not UTF-8: convert the file, or replace such bytes by U+FFFD with --errors=replace"
            ) from None
        offset += len(chunk)


def normalized(chunks: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Drop a byte-order mark at the start, and make all line ends "\\n"."""
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    at_start = True
    for text, read in chunks:
        if at_start and text:
            text, at_start = text.removeprefix("\ufeff"), False
        yield newlines.decode(text), read
    yield newlines.decode("", final=True), 0


def split_documents(
    chunks: Iterable[tuple[str, int]], separator: str
) -> Iterator[tuple[str, int, bool]]:
    """Split text at a separator, which belongs to no document: yield (text, bytes read, whether a
    document ends here). Without a separator all of it is one document."""
    rest = ""
    for text, read in chunks:
        if not separator:
            yield text, read, False
            continue
        first, *others = (rest + text).split(separator)
        *whole, rest = [first, *(other.removeprefix("\ufeff") for other in others)]
        for part in whole:
            yield part, read, True
            read = 0
        sure = max(0, len(rest) - len(separator) + 1)  # what follows may begin a separator
        yield rest[:sure], read, False
        rest = rest[sure:]
    yield rest, 0, True


def text_pieces(text: str, read: int) -> Iterator[Piece]:
    """Yield the pieces of a document that is in memory. Most are short and need no cutting."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if len(text) > PIECE_BYTES // 4:  # a character has at most 4 bytes
        yield from cut([(text, read, True)])
    elif text.strip():
        yield Piece(text, True, True, read)


def cut(parts: Iterable[tuple[str, int, bool]]) -> Iterator[Piece]:
    """Cut documents, given as by `split_documents`, into pieces: after newlines, else between
    characters. A document of white space only is dropped."""
    buffer, read, first = b"", 0, True
    for text, n, ends in parts:
        buffer += text.encode("utf-8")
        read += n
        start = 0
        while len(buffer) - start > PIECE_BYTES:
            end = piece_end(buffer, start)
            yield Piece(buffer[start:end].decode("utf-8"), first, False, read)
            start, read, first = end, 0, False
        buffer = buffer[start:]  # once per chunk, so that a long one takes linear time
        if ends:
            rest = buffer.decode("utf-8")
            if not first or rest.strip():
                yield Piece(rest, first, True, read)
            buffer, read, first = b"", 0, True


def piece_end(buffer: bytes, start: int = 0) -> int:
    """Return the end of the piece that begins at `start` of a longer buffer."""
    end = buffer.rfind(b"\n", start, start + PIECE_BYTES) + 1
    if end:
        return end
    end = start + PIECE_BYTES
    while buffer[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end


# Rows


def field_of(row: Any, options: ReadOptions, name: str) -> Any:
    """Return the text field of a row. A row that is a string, a list or a conversation is taken
    whole."""
    if options.chat:
        return row
    if isinstance(row, dict):
        check_field(options.text_field, row, name)
        return row[options.text_field]
    if isinstance(row, (str, list)):
        return row
    raise ConfigError(f"{name}: must be a JSON object with a field {options.text_field!r}")


def check_field(text_field: str, fields: Iterable[str], name: str) -> None:
    """Raise ConfigError unless the field is one of these."""
    if text_field not in fields:
        there = ", ".join(map(repr, fields)) or "none"
        raise ConfigError(
            f"{name}: has no field {text_field!r}, only {there}: choose one with --text_field, "
            "leave the file out, or read conversations with --format=chat"
        )


def as_text(value: Any, options: ReadOptions, name: str) -> str:
    """Return the text of a row; "" for null. Raises ConfigError if it is not text, and for half a
    surrogate pair, which JSON can spell, unless errors=replace."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"{name}: field {options.text_field!r} holds {type(value).__name__}, not text"
        )
    text = value or ""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError as error:
        if options.errors == "strict":
            raise ConfigError(
                f"{name}: character {error.start} of the text is U+{ord(text[error.start]):04X}, "
                "half of a surrogate pair: repair it, or replace it by U+FFFD with --errors=replace"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _lines(chunks: Iterable[tuple[str, int]], file: Path) -> Iterator[tuple[str, int]]:
    """Yield (line without its newline, bytes read)."""
    parts: list[str] = []  # of the current line; joined once, so that a long line is not slow
    size = read = 0
    number = 1
    for text, n in chunks:
        first, *others = text.split("\n")
        parts.append(first)
        read, size = read + n, size + len(first)
        for other in others:
            yield "".join(parts), read
            parts, size, read, number = [other], len(other), 0, number + 1
        if size > LINE_BYTES:
            raise _too_long(f"{file}, line {number}")
    if size:
        yield "".join(parts), read


def _too_long(name: str) -> ConfigError:
    return ConfigError(
        f"{name}: longer than {LINE_BYTES >> 20} MB, the maximum for a row: split it into "
        "several, or write its text to a file of its own"
    )


def json_lines(file: Path, options: ReadOptions) -> Iterator[Row]:
    """Yield a row per line that is not blank."""
    offset = 0
    lines = _lines(decoded(chunks(file), file, options.errors), file)
    for number, (line, read) in enumerate(lines, start=1):
        text = line.removeprefix("\ufeff") if number == 1 else line
        if text.strip():
            name = f"{file}, line {number}"
            try:
                value = field_of(json.loads(text), options, name)
            except RecursionError:
                raise ConfigError(f"{name} (offset {offset}): nested too deeply") from None
            except json.JSONDecodeError as error:
                raise ConfigError(f"{name} (offset {offset}): not JSON: {error}") from None
            yield Row(name, value, read)
        offset += len(line.encode("utf-8")) + 1


def json_values(file: Path, options: ReadOptions) -> Iterator[Row]:
    """Yield a row per item of an array, or per value of several that follow each other."""
    for name, value, read in _json_items(file, options):
        yield Row(name, field_of(value, options, name), read)


def _json_items(file: Path, options: ReadOptions) -> Iterator[Row]:
    """Yield the values themselves, in time linear in the file: whenever a value does not end within
    the buffer, the buffer grows to at least twice its size."""
    decoder, text = json.JSONDecoder(), decoded(chunks(file), file, options.errors)
    buffer, at, number, in_array, read = "", 0, 0, False, 0
    while True:
        between = _BETWEEN.match(buffer, at)
        assert between is not None  # it matches the empty text, too
        at = between.end()
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
                raise ConfigError(f"{name}: nested too deeply") from None
            except json.JSONDecodeError as error:
                problem = f"not JSON: {error.msg}"
                # A value that is only cut off, by the end of the buffer, may still be JSON.
                is_cut = error.msg.startswith("Unterminated string")
                if not is_cut and error.pos <= len(buffer) - 16:
                    raise ConfigError(f"{name}: {problem}") from None
        if end == len(buffer):  # the value may continue
            more, n = _take(text, len(buffer) - at)
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


def _take(text: Iterator[tuple[str, int]], size: int) -> tuple[str, int]:
    """Return the next (more than `size` characters, bytes read for them), or what is left."""
    parts: list[str] = []
    found = read = 0
    for part, n in text:
        parts.append(part)
        found, read = found + len(part), read + n
        if found > size:
            break
    return "".join(parts), read


def delimited_rows(file: Path, options: ReadOptions) -> Iterator[Row]:
    """Yield the rows of a .csv or .tsv file, whose first line names the columns."""
    read = number = 0

    def lines() -> Iterator[str]:
        nonlocal read
        for line, n in _lines(normalized(text_chunks(file, options)), file):
            read += n
            yield line + "\n"

    csv.field_size_limit(LINE_BYTES)
    table = csv.reader(lines(), delimiter="\t" if kind_of(file) == "tsv" else ",", strict=True)
    try:
        header = next(table, None)
        if header is None:
            return
        if not options.chat:
            check_field(options.text_field, header, str(file))
        for row in table:
            number += 1
            if not row:
                continue  # a blank line
            name = f"{file}, row {number} (line {table.line_num})"
            if len(row) != len(header):
                raise ConfigError(f"{name}: has {len(row)} columns, the first line {len(header)}")
            fields = dict(zip(header, row, strict=True))
            yield Row(name, fields if options.chat else fields[options.text_field], read)
            read = 0
    except csv.Error as error:
        raise ConfigError(f"{file}, line {table.line_num}: cannot be read: {error}") from None


def parquet_rows(file: Path, options: ReadOptions) -> Iterator[Row]:
    """Yield the rows of a .parquet file."""
    pyarrow_for(file)
    from pyarrow.parquet import ParquetFile

    def batches() -> Iterator[tuple[Any, float]]:
        with ParquetFile(file) as table:
            columns = _columns(table.schema_arrow.names, options, file)
            done = 0
            for batch in table.iter_batches(TABLE_ROWS, columns=columns):
                done += batch.num_rows
                yield batch, done / table.metadata.num_rows

    return _columnar_rows(file, "parquet", batches, options)


def arrow_rows(file: Path, options: ReadOptions) -> Iterator[Row]:
    """Yield the rows of an Arrow file, in the stream format (`datasets.save_to_disk`) or the file
    format."""
    pyarrow = pyarrow_for(file)

    def batches() -> Iterator[tuple[Any, float]]:
        with pyarrow.memory_map(str(file)) as stream:
            is_file = stream.read(6) == b"ARROW1"
            stream.seek(0)
            opened = pyarrow.ipc.open_file(stream) if is_file else pyarrow.ipc.open_stream(stream)
            with opened as table:
                columns = _columns(table.schema.names, options, file)
                count = table.num_record_batches if is_file else 0
                found = map(table.get_batch, range(count)) if is_file else table
                for i, batch in enumerate(found):
                    part = (i + 1) / count if is_file else stream.tell() / stream.size()
                    chosen = batch.select(columns)
                    for at in range(0, batch.num_rows, TABLE_ROWS):
                        yield chosen.slice(at, TABLE_ROWS), part

    return _columnar_rows(file, "arrow", batches, options)


def _columns(names: list[str], options: ReadOptions, file: Path) -> list[str]:
    """Return the columns to read. Raises ConfigError if the text field is not one of them."""
    if options.chat:
        return [name for name in names if name in FIELDS] or names
    check_field(options.text_field, names, str(file))
    return [options.text_field]


def _columnar_rows(
    file: Path,
    kind: str,
    batches: Callable[[], Iterator[tuple[Any, float]]],
    options: ReadOptions,
) -> Iterator[Row]:
    """Yield the rows of (batch of columns, part of the file that is read after it)."""
    import pyarrow

    size, number, position = file.stat().st_size, 0, 0
    try:
        for batch, part in batches():
            rows = batch.to_pylist() if options.chat else batch.column(0).to_pylist()
            for value in rows:
                yield Row(f"{file}, row {number}", value, int(part * size) - position)
                number, position = number + 1, int(part * size)
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as {kind}: {error}") from None


READERS: dict[str, Callable[[Path, ReadOptions], Iterator[Row]]] = {
    "jsonl": json_lines,
    "values": json_values,
    "csv": delimited_rows,
    "tsv": delimited_rows,
    "parquet": parquet_rows,
    "arrow": arrow_rows,
}
