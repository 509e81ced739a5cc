"""The text policy: what bytes of a file become which text, the same on every platform.

Text is UTF-8 without NUL bytes. A byte-order mark at the start of a document is dropped; CRLF and
lone CR become a newline. A document over PIECE_BYTES is encoded in pieces; where they are cut
defines its ids.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cli.options import ConfigError

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
