"""The text policy: what bytes of a file become which text, the same on every platform.

Text is UTF-8. A byte-order mark at the start of a document is dropped; CRLF and lone CR become a
newline. A document over PIECE_BYTES is encoded in pieces; where they are cut defines its ids.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from data.options import ConfigError

PIECE_BYTES = 1 << 20


class Piece(NamedTuple):
    """A document, or at most PIECE_BYTES of a longer one."""

    text: str
    first: bool  # the document starts here
    last: bool  # and ends here
    read: int  # bytes of the file that were read for it, for the progress bar


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
        while len(buffer) > PIECE_BYTES:
            end = piece_end(buffer)
            yield Piece(buffer[:end].decode("utf-8"), first, False, read)
            buffer, read, first = buffer[end:], 0, False
    text = buffer.decode("utf-8")
    if not first or text.strip():
        yield Piece(text, first, True, read)


def piece_end(buffer: bytes) -> int:
    """Where the first piece of a longer buffer ends."""
    end = buffer.rfind(b"\n", 0, PIECE_BYTES) + 1
    if end:
        return end
    end = PIECE_BYTES
    while buffer[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end
