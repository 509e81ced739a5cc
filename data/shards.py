"""Windows of ids, read from shards and checked as they are read.

Shards are read with pread, not mapped: the page cache serves both alike, but resident memory does
not grow with what has been touched, a shard that becomes shorter is an error instead of SIGBUS, and
every block is checked each time it is read. Shards are opened at the start, so that a run does not
end when their folder is deleted; those beyond `room_for_files` are opened when they are needed.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cli.options import ConfigError
from data.meta import BLOCK_BYTES, DamagedData, Meta, check_size, read_checked, read_meta

__all__ = ["IGNORE_INDEX", "DamagedData", "Windows", "read_meta"]

MAX_OPEN = 1024  # shards of one split; each takes 64 KiB for its checksums
IGNORE_INDEX = -100  # a target that is not learned


class TokenStream:
    """The ids of one split of one source, as if they were one long array."""

    def __init__(
        self, folder: Path, meta: Meta, split: str, source: int, max_open: int = 64
    ) -> None:
        self._folder = Path(folder)
        self._dtype = meta.id_dtype
        self._vocab_size = meta.vocab_size
        self._shards = meta.of(split, source)
        self._ends = np.cumsum([s.tokens for s in self._shards], dtype=np.int64).tolist()
        self._open: OrderedDict[int, tuple[BinaryIO, bytes]] = OrderedDict()
        self.n_tokens = self._ends[-1] if self._ends else 0
        for shard in self._shards:
            check_size(self._folder / shard.file, shard.tokens * self._dtype.itemsize)
        self._max_open = max(1, max_open)
        for number in range(min(self._max_open, len(self._shards))):
            self._opened(number)

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) int64 ids from token `start` on; after the last token comes the first."""
        found = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            position = (start + done) % self.n_tokens
            number = bisect_right(self._ends, position)
            n = min(count - done, self._ends[number] - position)
            first = position - self._ends[number] + self._shards[number].tokens
            found[done : done + n] = self._read_shard(number, first, n)
            done += n
        return found

    def document_starts(self) -> np.ndarray:
        """(documents,) int64: the token at which each document starts, in order."""
        starts = []
        for shard, end in zip(self._shards, self._ends, strict=True):
            path = (self._folder / shard.file).with_suffix(".starts")
            content = read_checked(path, 8 * shard.starts)
            if zlib.crc32(content) != shard.starts_crc:
                raise DamagedData(f"{path} fails its checksum: delete the folder and prepare again")
            starts.append(np.frombuffer(content, dtype="<i8") + (end - shard.tokens))
        found = np.concatenate(starts)
        return found[found < self.n_tokens]  # ids that others made may end in a separator

    def _read_shard(self, number: int, first: int, count: int) -> np.ndarray:
        """Ids of one shard, once the checksum of each block that they touch is right."""
        shard, item = self._shards[number], self._dtype.itemsize
        file, checksums = self._opened(number)
        base = first * item // BLOCK_BYTES * BLOCK_BYTES
        end = -(-(first + count) * item // BLOCK_BYTES) * BLOCK_BYTES
        end = min(end, shard.tokens * item)
        data = memoryview(_pread(file, end - base, base))
        if len(data) != end - base:
            raise DamagedData(f"{self._folder / shard.file} has become shorter while in use")
        for at in range(0, len(data), BLOCK_BYTES):
            block = (base + at) // BLOCK_BYTES
            crc = zlib.crc32(data[at : at + BLOCK_BYTES])
            if crc.to_bytes(4, "little") != checksums[4 * block : 4 * block + 4]:
                raise DamagedData(
                    f"{self._folder / shard.file}: the block at byte {base + at} fails its "
                    "checksum: the file is damaged; delete the folder and prepare again"
                )
        ids = np.frombuffer(data, self._dtype)[first - base // item :][:count]
        if ids.max() >= self._vocab_size:
            at = int((ids >= self._vocab_size).argmax())
            raise DamagedData(
                f"{self._folder / shard.file}: token {first + at} is id {ids[at]}, but the "
                f"vocabulary has {self._vocab_size} ids: delete the folder and prepare again"
            )
        return ids

    def _opened(self, number: int) -> tuple[BinaryIO, bytes]:
        """A shard's file and checksums, opened if they are not."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self._shards[number]
        path = self._folder / shard.file
        n_blocks = -(-shard.tokens * self._dtype.itemsize // BLOCK_BYTES)
        checksums = read_checked(path.with_suffix(".crc"), 4 * n_blocks)
        self._open[number] = (path.open("rb", buffering=0), checksums)
        if len(self._open) > self._max_open:
            self._open.popitem(last=False)[1][0].close()
        return self._open[number]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict()}  # open files stay in their process


def room_for_files() -> int:
    """The number of shards that one split may hold open: a quarter of this process's files."""
    try:
        import resource
    except ImportError:  # Windows
        return 64
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if soft < 0 else max(1, min(MAX_OPEN, soft // 4))


def _pread(file: BinaryIO, count: int, offset: int) -> bytes:
    if hasattr(os, "pread"):  # no shared position: threads and forked processes may read at once
        return os.pread(file.fileno(), count, offset)
    file.seek(offset)
    return file.read(count)


Row = tuple[np.ndarray, ...]  # tokens, targets and, with document_mask, documents: (T,) int64 each


class PackedWindows:
    """Window i holds the T + 1 ids from token i * T on, wherever documents start and end.

    document_mask: rows say which document each token belongs to; takes 8 bytes per document.
    """

    def __init__(
        self, stream: TokenStream, context_length: int, document_mask: bool = False
    ) -> None:
        self.stream = stream
        self.context_length = context_length
        self.n_windows = max(0, (stream.n_tokens - 1) // context_length)
        self._starts = stream.document_starts() if document_mask else None

    def window(self, i: int, shift: int = 0) -> np.ndarray:
        """(T + 1,) ids of window i of the grid moved by `shift`."""
        return self.stream.read(i * self.context_length + shift, self.context_length + 1)

    def pair(self, i: int, shift: int = 0) -> Row:
        """(tokens, targets), (T,) each: every target is the id after its token; and documents."""
        window, first = self.window(i, shift), i * self.context_length + shift + 1
        if self._starts is None:
            return window[:-1], window[1:]
        documents = documents_of(self._starts, self.stream.n_tokens, first, self.context_length)
        return window[:-1], window[1:], documents


def documents_of(starts: np.ndarray, n_tokens: int, first: int, count: int) -> np.ndarray:
    """Number the documents of `count` targets from token `first` on, from 0: (count,) int64.

    starts: tokens at which documents start, ascending. After the last token comes the first, and
    begins a document in any case.

    A token in a row has the document of its target: the separator before a document is where the
    document's first token is predicted, so it is seen with the document that it precedes.
    """
    rounds, places = np.divmod(np.arange(first, first + count), n_tokens)
    numbers = np.searchsorted(starts, places, side="right") + rounds * (len(starts) + 1)
    return numbers - numbers[0]


class DocumentWindows:
    """Windows that start at a document's start and then every T tokens while it lasts.

    The first token of a document's first window is the one before the document, the end-of-text of
    the one before, so that the beginning is learned too. Targets beyond the document's end are
    ignored. Each token is a target once an epoch, with nothing but its own document before it.
    Takes 16 bytes of memory per document.
    """

    def __init__(self, stream: TokenStream, context_length: int) -> None:
        self.stream = stream
        self.context_length = context_length
        self._starts = stream.document_starts()
        lengths = np.diff(self._starts, append=stream.n_tokens)
        self._ends = np.cumsum(-(-lengths // context_length))  # windows up to each document's end
        self.n_windows = int(self._ends[-1])

    def _place(self, i: int) -> tuple[int, int]:
        """(the first target of window i, how many of its targets belong to the document)."""
        document = int(np.searchsorted(self._ends, i, side="right"))
        before = int(self._ends[document - 1]) if document else 0
        first = int(self._starts[document]) + (i - before) * self.context_length
        last = document + 1 == len(self._starts)
        end = self.stream.n_tokens if last else int(self._starts[document + 1])
        return first, min(self.context_length, end - first)

    def window(self, i: int, shift: int = 0) -> np.ndarray:
        """(T + 1,) ids; `shift` has no meaning here, documents are cut where they start."""
        return self.stream.read(self._place(i)[0] - 1, self.context_length + 1)

    def pair(self, i: int, shift: int = 0) -> Row:
        """(tokens, targets), (T,) each; IGNORE_INDEX beyond the end of the document."""
        window = self.window(i)
        targets = window[1:].copy()
        targets[self._place(i)[1] :] = IGNORE_INDEX
        return window[:-1], targets


class SharedWindows(DocumentWindows):
    """Document windows of which as many as fit, one after the other, share a row.

    A document is cut where DocumentWindows cuts it. A row takes the next piece of the text while
    the whole piece fits, so it is one stretch of the stream, and the layout a function of the
    documents' lengths and T alone. Takes 8 bytes more per row.
    """

    def __init__(self, stream: TokenStream, context_length: int) -> None:
        super().__init__(stream, context_length)
        self._edges = self._share_rows()
        self.n_windows = len(self._edges) - 1

    def _share_rows(self) -> np.ndarray:
        """(rows + 1,) int64: the first target of each row, and the end of the last."""
        counts = np.diff(self._ends, prepend=0)  # pieces of each document
        piece = np.arange(self.n_windows) - np.repeat(self._ends - counts, counts)
        starts = np.repeat(self._starts, counts) + piece * self.context_length
        edges = np.append(starts, self.stream.n_tokens)
        # For each piece, the piece that starts the next row if this one starts a row.
        following = np.searchsorted(edges, starts + self.context_length, side="right") - 1
        rows, chain = [0], following.tolist()
        while rows[-1] < self.n_windows:
            rows.append(chain[rows[-1]])
        return edges[rows]

    def _place(self, i: int) -> tuple[int, int]:
        """(the first target of row i, how many of its targets belong to its documents)."""
        first, end = self._edges[i : i + 2].tolist()
        return first, end - first

    def pair(self, i: int, shift: int = 0) -> Row:
        """(tokens, targets, documents), (T,) each; IGNORE_INDEX where no further piece fits."""
        first, T = self._place(i)[0], self.context_length
        documents = documents_of(self._starts, self.stream.n_tokens, first, T)
        return *super().pair(i), documents


def make_windows(
    stream: TokenStream, context_length: int, windows: str, document_mask: bool
) -> PackedWindows | DocumentWindows:
    """The windows of one source. windows: "packed" or "document"."""
    if windows == "packed":
        return PackedWindows(stream, context_length, document_mask)
    return (SharedWindows if document_mask else DocumentWindows)(stream, context_length)


class Windows:
    """The windows of one split, those of a mixture's sources one after the other.

    windows: "packed" or "document". document_mask: documents do not see each other; rows have a
    third part, the number of each token's document, and short document windows share a row.

    Raises ConfigError if a source is too short for one window of context_length (T) + 1 tokens,
    DamagedData for a file that is not as it was written.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        context_length: int,
        windows: str = "packed",
        document_mask: bool = False,
    ) -> None:
        meta = read_meta(folder)
        self.context_length = context_length
        self.meta, self.weights = meta, meta.weights
        self.parts: list[PackedWindows | DocumentWindows] = []
        # A source may only train or only validate; one that is drawn from must be there.
        drawn = range(len(meta.weights)) if split == "train" else ()
        sources = drawn or sorted({shard.source for shard in meta.of(split)}) or [0]
        for source in sources:
            room = room_for_files() // len(sources)
            stream = TokenStream(folder, meta, split, source, room)
            if stream.n_tokens < context_length + 1:
                raise ConfigError(_too_short(meta, split, source, stream.n_tokens, context_length))
            self.parts.append(make_windows(stream, context_length, windows, document_mask))
        self.n_tokens = sum(part.stream.n_tokens for part in self.parts)
        self.offsets = list(accumulate((part.n_windows for part in self.parts), initial=0))
        self.n_windows = self.offsets[-1]

    def __len__(self) -> int:
        return self.n_windows

    @property
    def filled(self) -> float:
        """The share of all windows' positions whose target counts."""
        return min(1.0, self.n_tokens / (self.n_windows * self.context_length))

    def __getitem__(self, i: int) -> np.ndarray:
        return self.window(i)

    def window(self, i: int, shift: int = 0) -> np.ndarray:
        """(T + 1,) int64 ids of window i; packed: of the grid moved by `shift`, read as a ring."""
        part, within = self._locate(i)
        return part.window(within, shift)

    def pair(self, i: int, shift: int = 0) -> Row:
        """(tokens, targets) of window i, (T,) int64 each; IGNORE_INDEX where none is learned. With
        document_mask a third: the number of each token's document within the row, ascending."""
        part, within = self._locate(i)
        return part.pair(within, shift)

    def _locate(self, i: int) -> tuple[PackedWindows | DocumentWindows, int]:
        if not 0 <= i < self.n_windows:
            raise IndexError(f"window {i} of {self.n_windows}")
        number = bisect_right(self.offsets, i) - 1
        return self.parts[number], i - self.offsets[number]


def _too_short(meta: Meta, split: str, source: int, found: int, context_length: int) -> str:
    which = f" of source {source + 1} of the mixture" if len(meta.weights) > 1 else ""
    return (
        f"the {split} split{which} has {found} tokens, one window of "
        f"model.context_length={context_length} needs {context_length + 1}: use a shorter context, "
        "more text, or another --val_fraction"
    )
