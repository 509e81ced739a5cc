"""The files of a prepared folder: meta.json and shards, how they are written and verified.

A shard is three files: NAME.bin (ids, little-endian), NAME.crc (a CRC-32 for each of its blocks of
4 KiB) and NAME.starts (int64: the tokens at which documents start). With conversations there are
two more: NAME.mask (a byte of flags per id, see data/chat.py) and NAME.mask.crc.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cli.command import Say
from cli.files import json_bytes, replace_file, seal, sync, write_file
from cli.options import ConfigError
from cli.terminal import counted

SPLITS = ("train", "val")
META_FILE = "meta.json"
BLOCK_BYTES = 4096
READ_BYTES = 256 * BLOCK_BYTES
PREPARE_AGAIN = "delete the folder and prepare the data again"


class DamagedData(Exception):
    """Prepared data that differs from what was written."""

    exit_code = 3


@dataclass(frozen=True)
class Shard:
    """One shard: where it belongs, what it holds, and the checksums of its files."""

    split: str
    source: int  # index in the mixture; 0 for a plain source
    file: str
    tokens: int
    starts: int  # number of document starts in .starts
    documents: int  # that end in it, so a document cut by the tail split is counted once
    bytes: int  # of text
    sha256: str
    starts_crc: int
    lost: int = 0  # bytes of text that decoding does not restore
    spelled: int = 0  # bytes that decoding gives, where that was measured
    mask_sha256: str = ""  # of conversations; text has no mask


@dataclass(frozen=True)
class Meta:
    """The content of a prepared folder."""

    source: str
    tokenizer: str
    vocab_size: int
    dtype: str
    fingerprint: str  # hex digest of everything that determines the ids and their order
    splits: list[str]  # how each source was split: tail, document, files, ...
    weights: list[float]  # of the sources that train
    shards: list[Shard]

    def of(self, split: str, source: int | None = None) -> list[Shard]:
        """The shards of one split in order, optionally of one source only."""
        return [s for s in self.shards if s.split == split and source in (None, s.source)]

    def total(self, field: str) -> dict[str, int]:
        """{"train": ..., "val": ...}: the sum of one of the shards' numbers in each split."""
        return {split: sum(getattr(s, field) for s in self.of(split)) for split in SPLITS}

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens in each split."""
        return self.total("tokens")

    @property
    def bytes(self) -> dict[str, int]:
        """UTF-8 bytes of text in each split."""
        return self.total("bytes")

    @property
    def documents(self) -> dict[str, int]:
        """Documents that end in each split."""
        return self.total("documents")

    def byte_scale(self, split: str) -> float:
        """Bytes of text per byte that decoding gives; 1 unless the tokenizer loses text."""
        lossy = self.total("lost")[split] > 0
        return self.bytes[split] / max(1, self.total("spelled")[split]) if lossy else 1.0

    def lost_share(self, *splits: str) -> float:
        """The fraction of the splits' text that decoding does not restore."""
        lost, whole = self.total("lost"), self.bytes
        return sum(lost[split] for split in splits) / max(1, sum(whole[split] for split in splits))

    @property
    def is_chat(self) -> bool:
        """Whether the documents are conversations, with a mask of what counts."""
        return any(shard.mask_sha256 for shard in self.shards)

    @property
    def id_dtype(self) -> np.dtype:
        """The dtype of ids on disk."""
        return np.dtype(self.dtype).newbyteorder("<")


def dtype_for(vocab_size: int) -> str:
    """The smallest dtype of shards that holds all ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def summary(meta: Meta) -> str:
    """Describe prepared data in one line: documents, bytes, tokens and the sizes of the splits."""
    n_bytes, tokens = sum(meta.bytes.values()), sum(meta.tokens.values())
    size = counted(tokens, "token")
    if n_bytes:
        size = f"{counted(n_bytes, 'byte')}, {size} ({n_bytes / tokens:.2f} bytes per token)"
    lost = meta.lost_share(*SPLITS)
    documents = counted(sum(meta.documents.values()), "document")
    return (
        f"{documents}, {size}, train {meta.tokens['train']:,}, "
        f"val {meta.tokens['val']:,} ({', '.join(sorted(set(meta.splits)))})"
        + (f"; the tokenizer loses {lost:.2%} of the text" if lost else "")
    )


# meta.json


def read_meta(folder: Path) -> Meta:
    """Read meta.json and check every byte of it.

    Raises ConfigError if the folder has none, DamagedData if it is not what was written.
    """
    path = Path(folder) / META_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} holds no prepared data ({META_FILE} is missing)")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if about.pop("seal") != seal(about):
            raise ValueError("its content does not match its own hash")
        shards = [Shard(**shard) for shard in about.pop("shards")]
        return Meta(shards=shards, **about)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedData(f"{path} is damaged ({error}): {PREPARE_AGAIN}") from None


def write_meta(folder: Path, meta: Meta) -> None:
    """Write meta.json, which makes a folder of shards complete."""
    about = asdict(meta)
    replace_file(Path(folder) / META_FILE, json_bytes({**about, "seal": seal(about)}))


def read_tokenizer(folder: Path) -> dict[str, bytes]:
    """Read the tokenizer's files in a prepared folder: {name: content}."""
    place = Path(folder) / "tokenizer"
    files = sorted(place.iterdir()) if place.is_dir() else []
    return {file.name: file.read_bytes() for file in files if not file.name.startswith(".")}


def check_tokenizer(folder: Path, meta: Meta, files: dict[str, bytes]) -> None:
    """Raise DamagedData unless these tokenizer files are the ones that made the folder's ids."""
    if fingerprint(files, meta.dtype, meta.weights, meta.shards) != meta.fingerprint:
        raise DamagedData(f"{Path(folder) / 'tokenizer'} is not what was written: {PREPARE_AGAIN}")


def fingerprint(
    tokenizer: dict[str, bytes], dtype: str, weights: list[float], shards: list[Shard]
) -> str:
    """Hash all that determines the ids and their meaning: the shards and the tokenizer's files."""
    files = [[name, hashlib.sha256(tokenizer[name]).hexdigest()] for name in sorted(tokenizer)]
    ids = [[s.split, s.source, s.tokens, s.sha256, *filter(None, [s.mask_sha256])] for s in shards]
    return hashlib.sha256(json.dumps([dtype, weights, files, ids]).encode()).hexdigest()


# Shards


class CheckedFile:
    """Write a file and its checksums; memory does not grow with its size.

    Uses plain write() and no memory map: on a full disk a map dies of SIGBUS, write() raises
    OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._sha = hashlib.sha256()
        self._pending = b""  # less than a block
        self._crcs: list[int] = []

    def write(self, data: bytes) -> None:
        """Append bytes."""
        data = self._pending + data
        whole = len(data) - len(data) % BLOCK_BYTES
        self._write(data[:whole])
        self._pending = data[whole:]

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha.update(data)
        self._crcs += _block_crcs(data)

    def close(self) -> str:
        """Sync the file to disk and write its checksums; return its SHA-256."""
        self._write(self._pending)
        with self._file:
            sync(self._file)
        write_file(crc_file(self.path), [_crc_bytes(self._crcs)])
        return self._sha.hexdigest()

    def abandon(self) -> None:
        """Close the file without finishing it."""
        self._file.close()


def crc_file(path: Path) -> Path:
    """Return the file with the checksums of NAME.bin or NAME.mask."""
    return path.with_suffix(".crc" if path.suffix == ".bin" else f"{path.suffix}.crc")


class ShardWriter:
    """Write one shard."""

    def __init__(self, folder: Path, split: str, source: int, number: int, dtype: str) -> None:
        self.split, self.source = split, source
        self.path = folder / f"{split}-{source:02d}-{number:06d}.bin"
        self.tokens = 0
        self.counts = Counter(documents=0, bytes=0, lost=0, spelled=0)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._ids = CheckedFile(self.path)
        self._mask: CheckedFile | None = None
        self._starts: list[np.ndarray] = []

    def append(
        self, ids: np.ndarray, starts: np.ndarray, mask: np.ndarray | None = None, **counts: int
    ) -> None:
        """Add ids. starts: where in them documents start; mask: of all ids or none; counts: see
        Shard."""
        self._starts.append(starts + self.tokens)
        self.tokens += len(ids)
        self.counts.update(counts)
        self._ids.write(ids.astype(self._dtype).tobytes())
        if mask is not None:
            self._mask = self._mask or CheckedFile(self.path.with_suffix(".mask"))
            self._mask.write(mask.tobytes())

    def close(self) -> Shard | None:
        """Finish the shard and sync it to disk; None, and no file, if nothing was added."""
        if self.tokens == 0:
            self.abandon()
            self.path.unlink()
            return None
        starts = np.concatenate(self._starts).astype("<i8").tobytes()
        write_file(self.path.with_suffix(".starts"), [starts])
        return Shard(
            split=self.split,
            source=self.source,
            file=self.path.name,
            tokens=self.tokens,
            starts=len(starts) // 8,
            sha256=self._ids.close(),
            starts_crc=zlib.crc32(starts),
            mask_sha256=self._mask.close() if self._mask else "",
            **self.counts,
        )

    def abandon(self) -> None:
        """Close the files without finishing the shard."""
        for file in filter(None, (self._ids, self._mask)):
            file.abandon()


def _block_crcs(data: bytes) -> list[int]:
    return [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


def _crc_bytes(crcs: list[int]) -> bytes:
    return np.array(crcs, dtype="<u4").tobytes()


def read_checked(path: Path, size: int) -> bytes:
    """Read a small file of known size. Raises DamagedData if its size differs."""
    check_size(path, size)
    return path.read_bytes()


def check_size(path: Path, size: int) -> None:
    """Raise DamagedData unless the file exists and has this size."""
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        state = "is missing" if found is None else f"has {found} bytes"
        raise DamagedData(f"{path} {state}, {size} were written: {PREPARE_AGAIN}")


def verify(folder: Path, say: Say = print) -> None:
    """Read every byte of a prepared folder. Raises DamagedData that names every damaged file."""
    meta = read_meta(folder)
    damaged: list[str] = []

    def collect(check: Callable[..., None], *arguments: object) -> None:
        try:
            check(*arguments)
        except DamagedData as error:
            damaged.append(str(error))

    for shard in meta.shards:
        collect(_check_shard, folder, meta, shard)
    collect(check_tokenizer, folder, meta, read_tokenizer(folder))
    if damaged:
        raise DamagedData("\n".join(damaged))
    say(f"{folder}: {counted(len(meta.shards), 'shard')} verified; {summary(meta)}")


def _check_shard(folder: Path, meta: Meta, shard: Shard) -> None:
    path = folder / shard.file
    _check_file(path, shard.tokens * meta.id_dtype.itemsize, shard.sha256)
    if shard.mask_sha256:
        _check_file(path.with_suffix(".mask"), shard.tokens, shard.mask_sha256)
    starts = path.with_suffix(".starts")
    if zlib.crc32(read_checked(starts, 8 * shard.starts)) != shard.starts_crc:
        raise DamagedData(f"{starts} differs from what was written")


def _check_file(path: Path, size: int, sha256: str) -> None:
    check_size(path, size)
    whole, crcs = hashlib.sha256(), []
    with path.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            whole.update(chunk)
            crcs += _block_crcs(chunk)
    if whole.hexdigest() != sha256:
        raise DamagedData(f"{path}: its SHA-256 differs from the one that was written")
    if read_checked(crc_file(path), 4 * len(crcs)) != _crc_bytes(crcs):
        raise DamagedData(f"{crc_file(path)} differs from what was written")
