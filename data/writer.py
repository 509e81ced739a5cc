"""Writes shards: ids, one CRC-32 for each block of 4 KiB, and where documents start."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np

from cli.files import sync
from data.meta import BLOCK_BYTES, Shard


class ShardWriter:
    """Writes one shard, checksumming on the way; memory does not grow with it.

    Plain write(), never a map: on a full disk a map dies of SIGBUS, write() raises OSError.
    """

    def __init__(self, folder: Path, split: str, source: int, number: int, dtype: str) -> None:
        self.split, self.source = split, source
        self.path = folder / f"{split}-{source:02d}-{number:06d}.bin"
        self.tokens = self.bytes = self.documents = self.lost = self.spelled = 0
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._file = self.path.open("wb")
        self._sha = hashlib.sha256()
        self._pending = b""  # less than a block
        self._crcs: list[int] = []
        self._starts: list[np.ndarray] = []

    def append(self, ids: np.ndarray, starts: np.ndarray, n_bytes: int, documents: int) -> None:
        """Add ids that stand for n_bytes of text; documents begin at `starts`, so many end."""
        self._starts.append(starts + self.tokens)
        self.tokens += len(ids)
        self.bytes += n_bytes
        self.documents += documents
        data = self._pending + ids.astype(self._dtype).tobytes()
        whole = len(data) - len(data) % BLOCK_BYTES
        self._write(data[:whole])
        self._pending = data[whole:]

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha.update(data)
        blocks = range(0, len(data), BLOCK_BYTES)
        self._crcs += [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in blocks]

    def close(self) -> Shard | None:
        """Finish the shard, surely on disk; None, and no file, if nothing was added."""
        self._write(self._pending)
        _close(self._file)
        if self.tokens == 0:
            self.path.unlink()
            return None
        starts = np.concatenate(self._starts).astype("<i8").tobytes()
        for suffix, content in (
            (".crc", np.array(self._crcs, dtype="<u4").tobytes()),
            (".starts", starts),
        ):
            stream = self.path.with_suffix(suffix).open("wb")
            stream.write(content)
            _close(stream)
        return Shard(
            split=self.split,
            source=self.source,
            file=self.path.name,
            tokens=self.tokens,
            starts=len(starts) // 8,
            documents=self.documents,
            bytes=self.bytes,
            sha256=self._sha.hexdigest(),
            starts_crc=zlib.crc32(starts),
            lost=self.lost,
            spelled=self.spelled,
        )

    def abandon(self) -> None:
        """Let go of the file without finishing it."""
        self._file.close()


def _close(stream) -> None:
    """Close a file once its content is on disk."""
    with stream:
        stream.flush()
        sync(stream.fileno())
