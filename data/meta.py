"""What a prepared folder says of itself: meta.json, with one entry for each shard in it.

A shard is three files: NAME.bin (ids, little-endian), NAME.crc (a CRC-32 for each block of 4 KiB of
it) and NAME.starts (int64: at which of its tokens documents start).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cli.command import Say
from cli.files import json_bytes, replace_file, sync
from cli.options import ConfigError

SPLITS = ("train", "val")
META_FILE = "meta.json"
BLOCK_BYTES = 4096
PREPARE_AGAIN = "delete the folder and prepare the data again"


class DamagedData(Exception):
    """Prepared data that is not what was written."""

    exit_code = 3


@dataclass(frozen=True)
class Shard:
    """One shard: whose it is, what it holds, and the checksums of its files."""

    split: str
    source: int  # position in the mixture; 0 for a plain source
    file: str
    tokens: int
    starts: int  # of documents, as .starts lists them
    documents: int  # that end in it: one that the tail cuts is counted once
    bytes: int  # of text
    sha256: str
    starts_crc: int
    lost: int = 0  # of the bytes, those that the ids do not bring back
    spelled: int = 0  # bytes that the ids bring back, where that was measured


@dataclass(frozen=True)
class Meta:
    """What a prepared folder holds."""

    source: str
    tokenizer: str
    vocab_size: int
    dtype: str
    fingerprint: str  # hex, of everything that determines the ids and their order
    splits: list[str]  # how each source of the mixture was split: tail, document or files
    weights: list[float]  # of each source of the mixture
    shards: list[Shard]

    @property
    def tokens(self) -> dict[str, int]:
        """{"train": ..., "val": ...}"""
        return {split: sum(s.tokens for s in self.of(split)) for split in SPLITS}

    @property
    def bytes(self) -> dict[str, int]:
        """UTF-8 bytes of text in each split."""
        return {split: sum(s.bytes for s in self.of(split)) for split in SPLITS}

    def byte_scale(self, split: str) -> float:
        """Bytes of the split's text per byte that its ids bring back; 1 unless text is lost."""
        shards = self.of(split)
        spelled = sum(s.spelled for s in shards)
        return self.bytes[split] / max(1, spelled) if any(s.lost for s in shards) else 1.0

    def lost_share(self, *splits: str) -> float:
        """Share of the splits' text that the ids do not bring back."""
        lost = sum(s.lost for s in self.shards if s.split in splits)
        return lost / max(1, sum(self.bytes[split] for split in splits))

    @property
    def documents(self) -> dict[str, int]:
        """Documents that end in each split."""
        return {split: sum(s.documents for s in self.of(split)) for split in SPLITS}

    def of(self, split: str, source: int | None = None) -> list[Shard]:
        """The shards of one split, in order; of one source of the mixture if it is given."""
        return [s for s in self.shards if s.split == split and source in (None, s.source)]

    @property
    def id_dtype(self) -> np.dtype:
        """The dtype of ids on disk."""
        return np.dtype(self.dtype).newbyteorder("<")


def read_meta(folder: Path) -> Meta:
    """What a prepared folder holds, every byte of meta.json checked.

    Raises ConfigError if it is none, DamagedData if it is not what was written.
    """
    path = Path(folder) / META_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} holds no prepared data ({META_FILE} is missing)")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if about.pop("seal") != _seal(about):
            raise ValueError("its own hash does not fit")
        shards = [Shard(**shard) for shard in about.pop("shards")]
        return Meta(shards=shards, **about)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedData(f"{path} is damaged ({error}): {PREPARE_AGAIN}") from None


def read_tokenizer(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files in a prepared folder, by name."""
    place = Path(folder) / "tokenizer"
    files = sorted(place.iterdir()) if place.is_dir() else []
    return {file.name: file.read_bytes() for file in files if not file.name.startswith(".")}


def check_tokenizer(folder: Path, meta: Meta, files: dict[str, bytes] | None = None) -> None:
    """Raise DamagedData unless the tokenizer's files are those that made the ids.

    files: their content, if it is in memory.
    """
    files = read_tokenizer(folder) if files is None else files
    if fingerprint(files, meta.dtype, meta.weights, meta.shards) != meta.fingerprint:
        raise DamagedData(f"{Path(folder) / 'tokenizer'} is not what was written: {PREPARE_AGAIN}")


def write_meta(folder: Path, meta: Meta) -> None:
    """Write meta.json, which makes a folder of shards complete."""
    about = asdict(meta)
    replace_file(Path(folder) / META_FILE, json_bytes({**about, "seal": _seal(about)}))


def _seal(about: dict) -> str:
    """A hash of meta.json's content, kept in it: what has changed since is noticed."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def fingerprint(
    tokenizer: dict[str, bytes], dtype: str, weights: list[float], shards: list[Shard]
) -> str:
    """Hex of all that determines the ids and their meaning: shards and tokenizer files."""
    files = [[name, hashlib.sha256(tokenizer[name]).hexdigest()] for name in sorted(tokenizer)]
    ids = [[s.split, s.source, s.tokens, s.sha256] for s in shards]
    return hashlib.sha256(json.dumps([dtype, weights, files, ids]).encode()).hexdigest()


def read_checked(path: Path, size: int) -> bytes:
    """A small file of known size. Raises DamagedData if it has another."""
    check_size(path, size)
    return path.read_bytes()


def check_size(path: Path, size: int) -> None:
    """Raise DamagedData unless the file is there and has this size."""
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        state = "is missing" if found is None else f"has {found} bytes"
        raise DamagedData(f"{path} {state}, {size} were written: {PREPARE_AGAIN}")


# Writes shards: ids, one CRC-32 for each block of 4 KiB, and where documents start.


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


# Checks a prepared folder to the last byte, and says in a line what it holds.

READ_BYTES = 256 * BLOCK_BYTES


def summary(meta: Meta) -> str:
    """One line: documents, bytes, tokens, bytes per token and the sizes of the splits."""
    n_bytes, tokens = sum(meta.bytes.values()), sum(meta.tokens.values())
    size = f"{tokens:,} tokens"
    if n_bytes:
        size = f"{n_bytes:,} bytes, {size} ({n_bytes / tokens:.2f} bytes a token)"
    lost = meta.lost_share(*SPLITS)
    spelling = f"; the tokenizer does not bring back {lost:.2%} of the text"
    return (
        f"{sum(meta.documents.values()):,} documents, {size}, train {meta.tokens['train']:,}, "
        f"val {meta.tokens['val']:,} ({', '.join(sorted(set(meta.splits)))})"
        + (spelling if lost else "")
    )


def verify(folder: Path, say: Say = print) -> None:
    """Read every byte of a prepared folder. Raises DamagedData that names each damaged file."""
    meta = read_meta(folder)
    damaged = []
    for shard in meta.shards:
        try:
            _check_shard(folder / shard.file, shard, meta.id_dtype.itemsize)
        except DamagedData as error:
            damaged.append(str(error))
    try:
        check_tokenizer(folder, meta)
    except DamagedData as error:
        damaged.append(str(error))
    if damaged:
        raise DamagedData("\n".join(damaged))
    say(f"{folder}: {len(meta.shards)} shards are what was written; {summary(meta)}")


def _check_shard(path: Path, shard: Shard, item_bytes: int) -> None:
    check_size(path, shard.tokens * item_bytes)
    whole, blocks = hashlib.sha256(), []
    with path.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            whole.update(chunk)
            places = range(0, len(chunk), BLOCK_BYTES)
            blocks += [zlib.crc32(chunk[at : at + BLOCK_BYTES]) for at in places]
    if whole.hexdigest() != shard.sha256:
        raise DamagedData(f"{path}: its SHA-256 is not the one that was written")
    checksums = path.with_suffix(".crc")
    check_size(checksums, 4 * len(blocks))
    if checksums.read_bytes() != np.array(blocks, dtype="<u4").tobytes():
        raise DamagedData(f"{checksums}: is not what was written")
    starts = path.with_suffix(".starts")
    check_size(starts, 8 * shard.starts)
    if zlib.crc32(starts.read_bytes()) != shard.starts_crc:
        raise DamagedData(f"{starts}: is not what was written")
