"""Checks a prepared folder to the last byte, and says in a line what it holds."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np

from data.meta import (
    BLOCK_BYTES,
    SPLITS,
    DamagedData,
    Meta,
    Shard,
    check_size,
    check_tokenizer,
    read_meta,
)
from data.plan import Say

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
