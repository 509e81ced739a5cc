"""Shards of ids on disk, and windows read from them.

A shard is a plain array of ids with a side file of checksums, one CRC-32 for each block of 4 KiB.
Windows are read with pread, not mapped: the page cache serves both alike, but a shard that is
truncated under us is an error instead of SIGBUS, resident memory does not grow, and every block is
checked each time it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from data.options import ConfigError

BLOCK_BYTES = 4096
OPEN_FILES = 64
SPLITS = ("train", "val")
META_FILE = "meta.json"
IGNORE_INDEX = -100  # a target that is not learned


class DamagedData(Exception):
    """Prepared data that is not what was written."""

    exit_code = 3


@dataclass(frozen=True)
class Shard:
    """One file of ids and what is known of it."""

    split: str
    source: int  # position in Meta.sources
    file: str
    tokens: int
    documents: int  # that start in it
    bytes: int  # of text
    sha256: str


@dataclass(frozen=True)
class Meta:
    """What a prepared folder says of itself."""

    source: str
    tokenizer: str
    vocab_size: int
    dtype: str
    fingerprint: str  # of everything that determines the ids
    weights: list[float]  # one for each source of a mixture
    shards: list[Shard]

    def total(self, what: str) -> dict[str, int]:
        """{split: sum over its shards} of "tokens", "documents" or "bytes"."""
        return {
            split: sum(getattr(s, what) for s in self.shards if s.split == split)
            for split in SPLITS
        }

    @property
    def tokens(self) -> dict[str, int]:
        return self.total("tokens")

    @property
    def bytes(self) -> dict[str, int]:
        return self.total("bytes")

    @property
    def documents(self) -> dict[str, int]:
        return self.total("documents")


def read_meta(folder: Path) -> Meta:
    """What a prepared folder holds. Raises ConfigError if it is none, DamagedData if unreadable."""
    path = Path(folder) / META_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} holds no prepared data ({META_FILE} is missing)")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        shards = [Shard(**shard) for shard in about.pop("shards")]
        return Meta(shards=shards, **about)
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedData(f"{path} is damaged ({error}): delete the folder and prepare again")


def write_meta(folder: Path, meta: Meta) -> None:
    """Write meta.json, which makes a folder of shards complete."""
    write_file(Path(folder) / META_FILE, json.dumps(asdict(meta), indent=1))


def write_file(path: Path, text: str) -> None:
    """Replace a small file as a whole, surely on disk."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


class ShardWriter:
    """Writes one shard and its side files, checksumming on the way."""

    def __init__(self, folder: Path, split: str, source: int, number: int, dtype: str) -> None:
        self._about = {
            "split": split,
            "source": source,
            "file": f"{split}-{source:02d}-{number:05d}.bin",
        }
        self._path = folder / self._about["file"]
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._file = self._path.open("wb")
        self._sha = hashlib.sha256()
        self._pending = b""
        self._crcs: list[int] = []
        self._starts: list[np.ndarray] = []
        self._tokens = self._bytes = 0

    def append(self, ids: np.ndarray, starts: np.ndarray, n_bytes: int) -> None:
        """Add ids; `starts` says where in them documents start; n_bytes of text they stand for."""
        self._starts.append(starts.astype("<i8") + self._tokens)
        self._tokens += len(ids)
        self._bytes += n_bytes
        data = self._pending + ids.astype(self._dtype).tobytes()
        whole = len(data) - len(data) % BLOCK_BYTES
        self._write(data[:whole])
        self._pending = data[whole:]

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha.update(data)
        self._crcs += [
            zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)
        ]

    def close(self) -> Shard | None:
        """Finish the shard, surely on disk; None, and no file, if nothing was added."""
        self._write(self._pending)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._tokens == 0:
            self._path.unlink()
            return None
        starts = np.concatenate(self._starts)
        crcs = np.array(self._crcs, dtype="<u4")
        for suffix, array in ((".crc", crcs), (".starts", starts)):
            with self._path.with_suffix(suffix).open("wb") as stream:
                stream.write(array.tobytes())
                stream.flush()
                os.fsync(stream.fileno())
        return Shard(
            **self._about,
            tokens=self._tokens,
            documents=len(starts),
            bytes=self._bytes,
            sha256=self._sha.hexdigest(),
        )


class TokenStream:
    """The ids of one split of one source, in order, as if they were one array."""

    def __init__(self, folder: Path, meta: Meta, split: str, source: int) -> None:
        self._folder = Path(folder)
        self._dtype = np.dtype(meta.dtype).newbyteorder("<")
        self._vocab_size = meta.vocab_size
        self._shards = [s for s in meta.shards if s.split == split and s.source == source]
        self._ends = np.cumsum([s.tokens for s in self._shards], dtype=np.int64)
        self._open: OrderedDict[int, tuple] = OrderedDict()
        self.n_tokens = int(self._ends[-1]) if self._shards else 0
        for shard in self._shards:
            check_size(self._folder / shard.file, shard.tokens * self._dtype.itemsize)

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) int64 ids from token `start` on, round the end to the beginning."""
        parts = []
        position = start % self.n_tokens
        while count > 0:
            number = int(np.searchsorted(self._ends, position, side="right"))
            within = position - (int(self._ends[number]) - self._shards[number].tokens)
            n = min(count, self._shards[number].tokens - within)
            parts.append(self._read_shard(number, within, n))
            count -= n
            position = (position + n) % self.n_tokens
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int64)

    def _read_shard(self, number: int, first: int, count: int) -> np.ndarray:
        """Ids of one shard, after checking the checksum of each block that they touch."""
        shard, item = self._shards[number], self._dtype.itemsize
        file, crcs = self._opened(number)
        first_block = first * item // BLOCK_BYTES
        end_block = -(-(first + count) * item // BLOCK_BYTES)
        base = first_block * BLOCK_BYTES
        end = min(end_block * BLOCK_BYTES, shard.tokens * item)
        data = os.pread(file.fileno(), end - base, base)
        path = self._folder / shard.file
        if len(data) != end - base:
            raise DamagedData(f"{path} has become shorter while in use")
        for block in range(first_block, end_block):
            at = block * BLOCK_BYTES - base
            if zlib.crc32(data[at : at + BLOCK_BYTES]) != crcs[block]:
                raise DamagedData(
                    f"{path}: the block at byte {block * BLOCK_BYTES} fails its checksum: "
                    "the file is damaged; delete the folder and prepare again"
                )
        ids = np.frombuffer(data, self._dtype)[first - base // item :][:count]
        if int(ids.max()) >= self._vocab_size:
            at = int((ids >= self._vocab_size).argmax())
            raise DamagedData(
                f"{path}: token {first + at} is id {ids[at]}, but the vocabulary has "
                f"{self._vocab_size} ids: prepare the data with the tokenizer it is used with"
            )
        return ids

    def _opened(self, number: int) -> tuple:
        """(file, checksums) of a shard; at most OPEN_FILES are open at a time."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        path = self._folder / self._shards[number].file
        n_blocks = -(-self._shards[number].tokens * self._dtype.itemsize // BLOCK_BYTES)
        check_size(path.with_suffix(".crc"), 4 * n_blocks)
        crcs = np.fromfile(path.with_suffix(".crc"), dtype="<u4")
        self._open[number] = (path.open("rb", buffering=0), crcs)
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)[1][0].close()
        return self._open[number]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": OrderedDict()}  # open files stay in their process


def check_size(path: Path, size: int) -> None:
    """Raise DamagedData unless the file is there and has this size."""
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        state = "is missing" if found is None else f"has {found} bytes"
        raise DamagedData(
            f"{path} {state}, {size} were written: delete the folder and prepare again"
        )


class Windows:
    """Windows of context_length + 1 ids of one split, read and checked as they are asked for.

    Raises ConfigError if the split is too short for a single window.
    """

    def __init__(
        self, folder: Path, split: str, context_length: int, windows: str = "packed"
    ) -> None:
        meta = read_meta(folder)
        self._stream = TokenStream(folder, meta, split, 0)
        self.context_length = context_length
        self.n_tokens = self._stream.n_tokens
        self.n_windows = max(0, (self.n_tokens - 1) // context_length)
        if self.n_windows == 0:
            raise ConfigError(
                f"the {split} split has {self.n_tokens} tokens, a window of "
                f"model.context_length={context_length} needs {context_length + 1}: use more "
                "text, a shorter context or another --val_fraction"
            )

    def __len__(self) -> int:
        return self.n_windows

    def __getitem__(self, i: int) -> np.ndarray:
        return self.window(i)

    def window(self, i: int, shift: int = 0) -> np.ndarray:
        """(T + 1,) int64: window i of the grid moved by `shift` tokens, the split read as a ring."""
        if not 0 <= i < self.n_windows:
            raise IndexError(f"window {i} of {self.n_windows}")
        return self._stream.read(i * self.context_length + shift, self.context_length + 1)

    def pair(self, i: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) of window i, (T,) int64 each; IGNORE_INDEX where none is learned."""
        window = self.window(i, shift)
        return window[:-1], window[1:]
