"""Read windows of token ids from the shards of a prepared folder, verifying every block read.

Shards are read with pread and not memory-mapped. The page cache serves both equally well, but with
pread the resident memory does not grow with what was read, a file that shrinks is an error instead
of a SIGBUS, and each block is verified every time. Shards are opened at the start, so that a run
survives the deletion of its data.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cli.options import ConfigError
from data.chat import BEGINS, COUNTS
from data.meta import (
    BLOCK_BYTES,
    PREPARE_AGAIN,
    DamagedData,
    Meta,
    Shard,
    check_size,
    crc_file,
    read_checked,
    read_meta,
)

CHUNK_TOKENS = 1 << 20  # of a mask that are looked at together
MAX_OPEN = 1024  # shards per split; each takes 64 KiB of memory for its checksums
# model/loss.py defines the same number: data and model do not import each other, and a test keeps
# the two equal.
IGNORE_INDEX = -100  # targets that do not count; the default of PyTorch's cross_entropy

Row = tuple[np.ndarray, ...]  # tokens, targets and, with document_mask, documents: (T,) int64 each


class Windows:
    """The windows of one split: T tokens each and, as targets, the same text shifted by one token.

    kind: "packed" or "document"; see SourceWindows. In a mixture the windows of the second source
    come after those of the first, and so on.

    document_mask: rows have a third part that numbers the documents, so that attention can keep
    them apart. Conversations are always kept apart, in windows of a kind of their own.

    Raises ConfigError if a source has fewer than T + 1 tokens or no conversation fits, DamagedData
    if a file is not as it was written.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        context_length: int,
        kind: str = "packed",
        document_mask: bool = False,
    ) -> None:
        meta = read_meta(folder)
        self.context_length = context_length
        self.meta, self.weights = meta, meta.weights
        # Training draws from every source; a source without validation text is fine.
        validating = sorted({shard.source for shard in meta.of(split)}) or [0]
        sources = range(len(meta.weights)) if split == "train" else validating
        self.parts: list[SourceWindows | ChatWindows] = []
        for source in sources:
            part = folder, meta, split, source, room_for_files() // len(sources)
            if meta.is_chat:
                self.parts.append(ChatWindows(*part[:-1], context_length, part[-1] // 2))
                if not self.parts[-1].n_windows:
                    raise ConfigError(_none_fits(split, context_length))
                continue
            stream = TokenStream(*part)
            if stream.n_tokens < context_length + 1:
                raise ConfigError(_too_short(meta, split, source, stream.n_tokens, context_length))
            self.parts.append(SourceWindows(stream, context_length, kind, document_mask))
        self.sizes = [part.n_windows for part in self.parts]
        self.n_tokens = sum(part.stream.n_tokens for part in self.parts)
        self._offsets = list(accumulate(self.sizes, initial=0))

    def __len__(self) -> int:
        return self._offsets[-1]

    def __getitem__(self, i: int) -> np.ndarray:
        """Return window i. With `__len__` this makes Windows a dataset for torch's DataLoader."""
        return self.window(i)

    def window(self, i: int, shift: int = 0) -> np.ndarray:
        """(T + 1,) int64: the tokens of window i and its last target."""
        source, within = self._locate(i)
        return source.window(within, shift)

    def pair(self, i: int, shift: int = 0) -> Row:
        """(tokens, targets) of window i, (T,) int64 each; IGNORE_INDEX where there is no target.
        With document_mask also each token's document, numbered from 0 within the row."""
        source, within = self._locate(i)
        return source.pair(within, shift)

    @property
    def filled(self) -> float:
        """The fraction of all positions that have a target."""
        return min(1.0, self.n_tokens / (len(self) * self.context_length))

    @property
    def too_long(self) -> str:
        """A report of the conversations that were cut or left out as too long; "" if all fit."""
        parts = [part for part in self.parts if isinstance(part, ChatWindows)]
        total, cut = sum(p.n_documents for p in parts), sum(p.n_cut for p in parts)
        left_out = sum(p.n_left_out for p in parts)
        if not cut + left_out:
            return ""
        return (
            f"{cut + left_out:,} of {total:,} conversations are longer than the context of "
            f"{self.context_length}: {cut:,} begin at a later message, {left_out:,} are left out, "
            "as their last words alone are longer"
        )

    def _locate(self, i: int) -> tuple[SourceWindows | ChatWindows, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} of {len(self)}")
        number = bisect_right(self._offsets, i) - 1
        return self.parts[number], i - self._offsets[number]


def _none_fits(split: str, context_length: int) -> str:
    return (
        f"no conversation of the {split} split fits model.context_length={context_length}: even "
        "the last answers are longer; use a longer context"
    )


def _too_short(meta: Meta, split: str, source: int, found: int, context_length: int) -> str:
    which = f" of source {source + 1} of the mixture" if len(meta.weights) > 1 else ""
    return (
        f"the {split} split{which} has {found} tokens, but one window of "
        f"model.context_length={context_length} needs {context_length + 1}: use a shorter context, "
        "more text, or another --val_fraction"
    )


class SourceWindows:
    """The windows of one source.

    packed: a regular grid. The targets of window i are the T tokens from i * T + 1 on, wherever
    documents start. `shift` moves the grid; after the last token comes the first.

    document: a window starts with every document and then every T tokens until the document ends;
    targets beyond its end are ignored. The first token of a document's first window is the token
    before the document, usually an end-of-text, so that the first word is learned too.
    With document_mask short windows share a row while they fit. `shift` has no effect.
    """

    def __init__(
        self, stream: TokenStream, context_length: int, kind: str, document_mask: bool
    ) -> None:
        self.stream, self.context_length = stream, context_length
        self.n_windows = (stream.n_tokens - 1) // context_length
        self._starts = self._edges = None
        if kind == "document" or document_mask:
            starts = stream.document_starts()
            self._starts = starts if document_mask else None
            if kind == "document":
                edges = document_edges(starts, stream.n_tokens, context_length)
                self._edges = share_rows(edges, context_length) if document_mask else edges
                self.n_windows = len(self._edges) - 1

    def window(self, i: int, shift: int = 0) -> np.ndarray:
        """(T + 1,) int64: the tokens of window i and its last target."""
        return self.stream.read(self._targets(i, shift)[0] - 1, self.context_length + 1)

    def pair(self, i: int, shift: int = 0) -> Row:
        """(tokens, targets[, documents]) of window i, (T,) int64 each; see Windows.pair."""
        T = self.context_length
        first, count = self._targets(i, shift)
        ids = self.stream.read(first - 1, T + 1)
        tokens, targets = ids[:-1], ids[1:]  # the target of a token is the next token
        if count < T:
            targets = targets.copy()  # it shares memory with tokens
            targets[count:] = IGNORE_INDEX
        if self._starts is None:
            return tokens, targets
        return tokens, targets, documents_of(self._starts, self.stream.n_tokens, first, T)

    def _targets(self, i: int, shift: int) -> tuple[int, int]:
        """(position of the first target of window i, number of its targets)."""
        if self._edges is None:
            return i * self.context_length + shift + 1, self.context_length
        first, end = self._edges[i : i + 2].tolist()
        return first, end - first


class ChatWindows:
    """The windows of one source of conversations: each row holds whole ones, while they fit, and
    only what the assistant says is a target.

    A conversation with more than T + 1 tokens begins at a later message; one whose last words alone
    are longer is left out. `shift` has no effect.
    """

    def __init__(
        self, folder: Path, meta: Meta, split: str, source: int, context_length: int, max_open: int
    ) -> None:
        place = folder, meta, split, source, max_open
        self.stream, self.mask = TokenStream(*place), TokenStream(*place, suffix=".mask")
        self.context_length = context_length
        self._starts = self.stream.document_starts()
        begins, last = self._flags()
        ends = np.append(self._starts[1:] - 1, self.stream.n_tokens)
        first = cut_at_messages(self._starts, ends, begins, context_length)
        kept = (ends - first <= context_length) & (last >= first)
        self.n_documents, self.n_left_out = len(kept), int((~kept).sum())
        self.n_cut = int((kept & (first > self._starts)).sum())
        self._rows = share_chat_rows(first, ends, kept, context_length)
        self.n_windows = len(self._rows)

    def _flags(self) -> tuple[np.ndarray, np.ndarray]:
        """(positions at which messages begin, last position that counts in each conversation)."""
        begins, last = [], np.full(len(self._starts), -1)
        for at in range(0, self.mask.n_tokens, CHUNK_TOKENS):
            flags = self.mask.read(at, min(CHUNK_TOKENS, self.mask.n_tokens - at))
            begins.append(np.flatnonzero(flags & BEGINS) + at)
            counted = np.flatnonzero(flags & COUNTS) + at
            np.maximum.at(last, np.searchsorted(self._starts, counted, side="right") - 1, counted)
        return np.concatenate(begins), last

    def window(self, i: int, shift: int = 0) -> np.ndarray:
        """(T + 1,) int64: the tokens of window i and its last target."""
        return self.stream.read(self._rows[i, 0] - 1, self.context_length + 1)

    def pair(self, i: int, shift: int = 0) -> Row:
        """(tokens, targets, documents) of window i, (T,) int64 each; see Windows.pair."""
        T = self.context_length
        first, end = self._rows[i].tolist()
        ids = self.window(i)
        tokens, targets = ids[:-1], ids[1:].copy()  # else they would share memory
        targets[self.mask.read(first, T) & COUNTS == 0] = IGNORE_INDEX
        targets[end - first :] = IGNORE_INDEX
        return tokens, targets, documents_of(self._starts, self.stream.n_tokens, first, T)


def cut_at_messages(
    starts: np.ndarray, ends: np.ndarray, begins: np.ndarray, context_length: int
) -> np.ndarray:
    """Return the first target of each conversation, (n,) int64: `starts`, or if more than T targets
    remain until `ends`, the one after the earliest token that begins a message and leaves at most
    T, if there is one. begins: positions of those tokens, ascending."""
    at = np.searchsorted(begins, ends - context_length - 1)
    later = np.append(begins, np.iinfo(np.int64).max - 1)[at] + 1
    return np.where((ends - starts > context_length) & (later < ends), later, starts)


def share_chat_rows(
    first: np.ndarray, ends: np.ndarray, kept: np.ndarray, context_length: int
) -> np.ndarray:
    """(rows, 2) int64: first target and end of each row. A row takes the next conversation while it
    fits, is whole and follows immediately; between two there is one token that is no target."""
    rows: list[list[int]] = []
    for start, end in zip(first[kept].tolist(), ends[kept].tolist(), strict=True):
        follows = rows and start == rows[-1][1] + 1
        if follows and end - rows[-1][0] <= context_length:
            rows[-1][1] = end
        else:
            rows.append([start, end])
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def document_edges(starts: np.ndarray, n_tokens: int, context_length: int) -> np.ndarray:
    """(windows + 1,) int64: the first target of each document window, and the end of the last."""
    lengths = np.diff(starts, append=n_tokens)
    counts = -(-lengths // context_length)  # windows per document
    first_windows = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(first_windows, counts)
    return np.append(np.repeat(starts, counts) + within * context_length, n_tokens)


def share_rows(edges: np.ndarray, context_length: int) -> np.ndarray:
    """(rows + 1,) int64: the same edges, but a row takes further windows while they fit whole.

    A row remains one stretch of the text, and the layout depends on the lengths of the documents
    and on T alone.
    """
    # For each window, the window that starts the next row if this one starts a row.
    next_row = np.searchsorted(edges, edges[:-1] + context_length, side="right") - 1
    rows, next_row = [0], next_row.tolist()
    while rows[-1] < len(next_row):
        rows.append(next_row[rows[-1]])
    return edges[rows]


def documents_of(starts: np.ndarray, n_tokens: int, first: int, count: int) -> np.ndarray:
    """Number the documents of `count` targets from position `first` on, from 0: (count,) int64.

    starts: positions at which documents start, ascending. After the last token comes the first,
    which always begins a document.

    A token in a row has the document of its target: the separator before a document is where the
    document's first token is predicted, so it is seen with the document that it precedes.
    """
    rounds, places = np.divmod(np.arange(first, first + count), n_tokens)
    numbers = np.searchsorted(starts, places, side="right") + rounds * (len(starts) + 1)
    return numbers - numbers[0]


class TokenStream:
    """The ids of one split of one source, addressed as if they were one long array.

    suffix: ".mask" for the flags of the ids instead.
    """

    def __init__(
        self,
        folder: Path,
        meta: Meta,
        split: str,
        source: int,
        max_open: int = 64,
        suffix: str = ".bin",
    ) -> None:
        self._folder, self._suffix = Path(folder), suffix
        self._dtype, self._vocab_size = meta.id_dtype, meta.vocab_size
        if suffix == ".mask":
            self._dtype, self._vocab_size = np.dtype("u1"), (COUNTS | BEGINS) + 1
        self._shards = meta.of(split, source)
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self.n_tokens = self._ends[-1] if self._ends else 0
        self._max_open = max(1, max_open)
        self._open: dict[int, tuple[BinaryIO, bytes]] = {}
        for number, shard in enumerate(self._shards):
            check_size(self._path(shard), shard.tokens * self._dtype.itemsize)
            if number < self._max_open:
                self._opened(number)

    def _path(self, shard: Shard) -> Path:
        return (self._folder / shard.file).with_suffix(self._suffix)

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) int64 ids from position `start` on; after the last token comes the first."""
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
        """(documents,) int64: the position at which each document starts, ascending."""
        starts = []
        for shard, end in zip(self._shards, self._ends, strict=True):
            path = (self._folder / shard.file).with_suffix(".starts")
            content = read_checked(path, 8 * shard.starts)
            if zlib.crc32(content) != shard.starts_crc:
                raise DamagedData(f"{path} fails its checksum: {PREPARE_AGAIN}")
            starts.append(np.frombuffer(content, dtype="<i8") + (end - shard.tokens))
        found = np.concatenate(starts)
        return found[found < self.n_tokens]  # ids from elsewhere may end in a separator

    def _read_shard(self, number: int, first: int, count: int) -> np.ndarray:
        """`count` ids of one shard; verifies the checksum of each block that they touch."""
        shard, item = self._shards[number], self._dtype.itemsize
        path = self._path(shard)
        file, checksums = self._opened(number)
        begin = first * item // BLOCK_BYTES * BLOCK_BYTES
        end = -(-(first + count) * item // BLOCK_BYTES) * BLOCK_BYTES
        end = min(end, shard.tokens * item)
        data = memoryview(_pread(file, end - begin, begin))
        if len(data) != end - begin:
            raise DamagedData(f"{path} has become shorter while in use")
        for at in range(0, len(data), BLOCK_BYTES):
            block = (begin + at) // BLOCK_BYTES
            crc = zlib.crc32(data[at : at + BLOCK_BYTES])
            if crc.to_bytes(4, "little") != checksums[4 * block : 4 * block + 4]:
                raise DamagedData(
                    f"{path}: the block at byte {begin + at} fails its checksum, so the file is "
                    f"damaged: {PREPARE_AGAIN}"
                )
        ids = np.frombuffer(data, self._dtype)[first - begin // item :][:count]
        if ids.max() >= self._vocab_size:
            at = int((ids >= self._vocab_size).argmax())
            raise DamagedData(
                f"{path}: token {first + at} is id {ids[at]}, but the vocabulary has "
                f"{self._vocab_size} ids: {PREPARE_AGAIN}"
            )
        return ids

    def _opened(self, number: int) -> tuple[BinaryIO, bytes]:
        """Return a shard's file and checksums; opens it if needed, at most max_open at a time."""
        if number not in self._open:
            shard = self._shards[number]
            path = self._path(shard)
            n_blocks = -(-shard.tokens * self._dtype.itemsize // BLOCK_BYTES)
            checksums = read_checked(crc_file(path), 4 * n_blocks)
            if len(self._open) >= self._max_open:
                self._open.pop(next(iter(self._open)))[0].close()
            self._open[number] = path.open("rb", buffering=0), checksums
        return self._open[number]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": {}}  # open files cannot be pickled


def room_for_files() -> int:
    """Return how many shards one split may hold open: a quarter of the process's file limit."""
    try:
        import resource
    except ImportError:  # Windows
        return 64
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if soft < 0 else max(1, min(MAX_OPEN, soft // 4))


def _pread(file: BinaryIO, count: int, offset: int) -> bytes:
    if hasattr(os, "pread"):  # moves no file position: threads and forked processes can share it
        return os.pread(file.fileno(), count, offset)
    file.seek(offset)
    return file.read(count)
