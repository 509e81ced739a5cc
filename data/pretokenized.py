"""Files of ids that others wrote: nanoGPT's .bin (no header) and llm.c's (1 KiB of header)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.encode import Encoded, Ids
from data.options import ConfigError
from data.sources import Source
from data.split import Split
from data.vocabulary import Tokenizer

HEADER_BYTES = 1024
LLM_C_MAGIC = {20240520: "<u2", 20240801: "<u4"}
CHUNK_IDS = 1 << 20


class IdsFile(NamedTuple):
    """One .bin file: where its ids start, how many they are, and of which dtype."""

    path: Path
    offset: int
    dtype: str
    n_ids: int


def look_at(path: Path, vocab_size: int) -> IdsFile:
    """What a .bin file holds. Raises ConfigError if it is cut short.

    Without llm.c's header the ids are uint16, as nanoGPT writes them, unless the vocabulary needs
    uint32.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = np.frombuffer(stream.read(12).ljust(12, b"\0"), dtype="<i4").tolist()
    if size >= HEADER_BYTES and header[0] in LLM_C_MAGIC:
        dtype, count, offset = LLM_C_MAGIC[header[0]], header[2], HEADER_BYTES
        if size != offset + count * np.dtype(dtype).itemsize:
            raise ConfigError(f"{path}: its header promises {count} ids, but it has {size} bytes")
        return IdsFile(path, offset, dtype, count)
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    if size % np.dtype(dtype).itemsize:
        raise ConfigError(f"{path}: {size} bytes are no whole number of {dtype[1:]} ids")
    return IdsFile(path, 0, dtype, size // np.dtype(dtype).itemsize)


def encoded_ids(
    source: Source, split: Split, tokenizer: Tokenizer, dtype: str
) -> Iterator[Encoded]:
    """The ids of a source's files, split by the files' names or else by the tail."""
    paths = [p for p in source.files if split.mode != "rest" or p not in source.val_files]
    files = [look_at(path, tokenizer.vocab_size) for path in paths]
    by_name = split.mode == "files"
    total = sum(file.n_ids for file in files)
    left = int(total * (1 - split.val_fraction))  # all or none of them for "none" and "only"
    begun: set[str] = set()
    for file in files:
        read = file.offset
        if by_name:
            left = 0 if file.path in source.val_files else file.n_ids
        for ids in _chunks(file, tokenizer.vocab_size):
            found = {"train": ids[:left], "val": ids[left:]}
            left -= len(found["train"])
            done = Encoded(read=read + ids.nbytes)
            for split, some in found.items():
                if len(some):
                    done.splits[split] = _described(some, tokenizer, dtype, split not in begun)
                    begun.add(split)
            yield done
            read = 0


def _chunks(file: IdsFile, vocab_size: int) -> Iterator[np.ndarray]:
    """The ids, some at a time. Raises ConfigError for one that the vocabulary does not have."""
    item = np.dtype(file.dtype).itemsize
    with file.path.open("rb") as stream:
        for start in range(0, file.n_ids, CHUNK_IDS):
            stream.seek(file.offset + start * item)
            ids = np.frombuffer(stream.read(CHUNK_IDS * item), dtype=file.dtype)
            if int(ids.max()) >= vocab_size:
                at = int((ids >= vocab_size).argmax())
                raise ConfigError(
                    f"{file.path}: token {start + at} is id {ids[at]}, but the tokenizer has "
                    f"{vocab_size} ids: name the tokenizer that made the file with --tokenizer"
                )
            yield ids


def _described(ids: np.ndarray, tokenizer: Tokenizer, dtype: str, first: bool) -> Ids:
    """Ids with their document starts: after each end-of-text, and at the very beginning."""
    ends = np.flatnonzero(ids == (-1 if tokenizer.eot is None else tokenizer.eot))
    starts = np.concatenate([[0] if first else [], ends + 1]).astype(np.int64)
    n_bytes = int(tokenizer.byte_lengths()[ids].sum())
    return Ids(ids.astype(dtype), starts, n_bytes, len(ends))
