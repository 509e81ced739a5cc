"""Text to ids on all cores, in order: the same ids for any number of processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from cli.limits import usable_cores
from cli.options import ConfigError
from data.readers import is_compressed
from data.sources import Part, Source, Split
from data.tokenizer import Tokenizer, load_tokenizer, lost_bytes

TASK_CHARACTERS = 1 << 19  # text that travels to a process at a time
WAITING = 3  # tasks per process that are in memory

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Ids:
    """Ids of one split out of one task."""

    ids: np.ndarray  # (n,) in the shards' dtype
    starts: np.ndarray  # where in them documents start
    bytes: int  # of the text that they stand for
    documents: int  # that end in them
    lost: int = 0  # of the bytes, those that the ids do not bring back
    spelled: int = 0  # bytes that the ids bring back, where that was measured


@dataclass
class Encoded:
    """What one task gave: ids of each split, and how many bytes of files it took."""

    splits: dict[str, Ids] = field(default_factory=dict)
    read: int = 0

    @property
    def bytes(self) -> int:
        return sum(ids.bytes for ids in self.splits.values())


def grouped(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Tasks: parts in order, together at least TASK_CHARACTERS."""
    task, size = [], 0
    for part in parts:
        task.append(part)
        size += len(part.text)
        if size >= TASK_CHARACTERS:
            yield task
            task, size = [], 0
    if task:
        yield task


def encode_task(folder: Path, dtype: str, task: list[Part]) -> Encoded:
    """Ids of one task, by split."""
    found = Encoded(read=sum(part.read for part in task))
    tokenizer = _tokenizer(folder, folder.stat().st_mtime_ns)
    for split in sorted({part.split for part in task}):
        parts = [part for part in task if part.split == split]
        found.splits[split] = _encode_parts(tokenizer, dtype, parts)
    return found


def _encode_parts(tokenizer: Tokenizer, dtype: str, parts: list[Part]) -> Ids:
    """Ids of text of one split: each document's start, its text and an end-of-text."""
    ids, starts, position = [], [], 0
    bos = np.array(tokenizer.between, dtype=dtype)
    for part in parts:
        some = tokenizer.encode_array(part.text).astype(dtype)
        if part.first:
            # Windows cut at starts begin with the token before: the bos, as when sampling.
            starts.append(position + min(1, len(bos)))
            some = np.concatenate((bos, some))
        if part.last and tokenizer.eot is not None:
            some = np.append(some, np.array(tokenizer.eot, dtype=dtype))
        ids.append(some)
        position += len(some)
    whole, lost, spelled = np.concatenate(ids), 0, b""
    if tokenizer.lossy:
        spelled = tokenizer.decode_bytes(whole.tolist())
        text = "".join(part.text for part in parts)
        lost = lost_bytes(text, spelled.decode("utf-8", errors="replace"))
    return Ids(
        ids=whole,
        starts=np.array(starts, dtype=np.int64),
        bytes=sum(len(part.text.encode("utf-8")) for part in parts) * tokenizer.spells,
        documents=sum(part.last for part in parts),
        lost=lost,
        spelled=len(spelled),
    )


@lru_cache(maxsize=1)
def _tokenizer(folder: Path, made: int) -> Tokenizer:
    """The tokenizer that the folder has held since `made`; another may have been there before."""
    return load_tokenizer(folder)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """`map` on that many processes (in this one for 0 or 1), reading ahead only a little.

    Raises ConfigError if a process dies.
    """
    pool = _pool(workers) if workers > 1 else None
    if pool is None:
        yield from map(function, items)
        return
    waiting: deque = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= WAITING * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ConfigError(
            f"data.workers={workers}: a process that prepares the data died, for lack of memory "
            "perhaps: use fewer --workers; the same command continues"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _pool(workers: int) -> ProcessPoolExecutor | None:
    """That many processes; None, said, where there is no shared memory for their semaphores."""
    # spawn: forking a process that has threads (torch, tokenizers) can hang it.
    context = multiprocessing.get_context("spawn")
    try:
        return ProcessPoolExecutor(workers, mp_context=context, initializer=_follow_parent)
    except (OSError, ImportError, NotImplementedError) as error:
        print(
            f"note: data.workers={workers}: processes cannot share memory here, /dev/shm perhaps "
            f"({error}); preparing in one process"
        )
        return None


def _follow_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and end when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def n_workers(asked: int | None, size: int) -> int:
    """How many processes prepare `size` bytes: all cores, but none for what takes seconds."""
    if asked is not None:
        return asked
    if 0 < size < 32 << 20:
        return 0
    return usable_cores()


# Files of ids that others wrote: nanoGPT's .bin (no header), llm.c's (1 KiB of header), .npy.

HEADER_BYTES = 1024
LLM_C_MAGIC = {20240520: "<u2", 20240801: "<u4"}
CHUNK_IDS = 1 << 20
SAMPLE_IDS = 1 << 18  # that are looked at to see whether the width is right
FEWEST_IDS = 32  # that tell anything
WIDTHS = "--ids=u1, u2, u4 or u8"


class IdsFile(NamedTuple):
    """One .bin file: where its ids start, how many they are, and of which dtype."""

    path: Path
    offset: int
    dtype: str
    n_ids: int


def look_at(path: Path, vocab_size: int, width: str = "auto") -> IdsFile:
    """What a file of ids holds. Raises ConfigError if it is cut short, or if in doubt.

    Without llm.c's or numpy's header the ids are of `width` (u1, u2, u4 or u8); auto: uint16, as
    nanoGPT writes them, unless the vocabulary needs uint32.
    """
    if is_compressed(path):
        raise ConfigError(f"{path}: ids are read in place, and this is compressed: unpack it first")
    size = path.stat().st_size
    if path.suffix.lower() == ".npy":
        return _numpy_file(path)
    with path.open("rb") as stream:
        header = np.frombuffer(stream.read(12).ljust(12, b"\0"), dtype="<i4").tolist()
    if size >= HEADER_BYTES and header[0] in LLM_C_MAGIC:
        dtype, count, offset = LLM_C_MAGIC[header[0]], header[2], HEADER_BYTES
        if size != offset + count * np.dtype(dtype).itemsize:
            raise ConfigError(f"{path}: its header promises {count} ids, but it has {size} bytes")
        return IdsFile(path, offset, dtype, count)
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    dtype = dtype if width == "auto" else f"<{width}"
    if size % np.dtype(dtype).itemsize:
        raise ConfigError(
            f"{path}: {size} bytes are no whole number of {dtype[1:]} ids; another width: {WIDTHS}"
        )
    file = IdsFile(path, 0, dtype, size // np.dtype(dtype).itemsize)
    if width == "auto":
        _check_width(file)
    return file


def _numpy_file(path: Path) -> IdsFile:
    """What an .npy file holds, by its header."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shape = f"{array.dtype} of shape {array.shape}"
        raise ConfigError(f"{path}: holds {shape}, not a row of whole numbers")
    return IdsFile(path, array.offset, array.dtype.str, len(array))


def _check_width(file: IdsFile) -> None:
    """Raise ConfigError where the bytes do not look like ids of the width that was assumed.

    Of ids that are wider every second one, read like this, is nearly always 0.
    """
    ids = np.fromfile(file.path, file.dtype, SAMPLE_IDS)
    if len(ids) < FEWEST_IDS:
        return
    zeros = max(float((ids[first::2] == 0).mean()) for first in (0, 1))
    if zeros > 0.5:
        raise ConfigError(
            f"{file.path}: read as {file.dtype[1:]}, {zeros:.0%} of every second id is 0; say how "
            f"wide its ids are: {WIDTHS}"
        )
    raw = np.frombuffer(ids.tobytes(), dtype=np.uint8)
    printable = ((raw >= 32) & (raw < 127)) | ((raw >= 9) & (raw <= 13))
    if printable.all():
        raise ConfigError(
            f"{file.path}: looks like text, not like ids; rename it .txt to read it as text, or "
            f"say how wide its ids are: {WIDTHS}"
        )


def encoded_ids(
    source: Source, split: Split, tokenizer: Tokenizer, dtype: str, width: str
) -> Iterator[Encoded]:
    """The ids of a source's files, split by the files' names or else by the tail."""
    paths = [p for p in source.files if split.mode != "rest" or p not in source.val_files]
    files = [look_at(path, tokenizer.vocab_size, width) for path in paths]
    total = sum(file.n_ids for file in files)
    left = int(total * (1 - split.val_fraction))  # all or none of them for "none" and "only"
    begun: set[str] = set()
    for file in files:
        read = file.offset
        if split.mode == "files":
            left = 0 if file.path in source.val_files else file.n_ids
        begun = begun if tokenizer.eot is not None else set()  # then each file is a document
        rest = file.n_ids
        for ids in _chunks(file, tokenizer.vocab_size):
            found = {"train": ids[:left], "val": ids[left:]}
            left -= len(found["train"])
            rest -= len(ids)
            done = Encoded(read=read + ids.nbytes)
            for name, some in found.items():
                if len(some):
                    done.splits[name] = _described(some, tokenizer, dtype, name not in begun)
                    begun.add(name)
            if rest == 0 and tokenizer.eot is None:
                done.splits["val" if len(found["val"]) else "train"].documents = 1
            yield done
            read = 0


def source_ids(source: Source, tokenizer: Tokenizer, width: str) -> tuple[list[int], list[int]]:
    """(all ids of a source's files; at which of them documents start)."""
    ids: list[int] = []
    starts: list[int] = []
    for done in encoded_ids(source, Split("none", 0), tokenizer, "uint32", width):
        for some in done.splits.values():
            starts += (some.starts + len(ids)).tolist()
            ids += some.ids.tolist()
    return ids, [start for start in starts if start < len(ids)]


def _chunks(file: IdsFile, vocab_size: int) -> Iterator[np.ndarray]:
    """The ids, some at a time. Raises ConfigError for one that the vocabulary does not have."""
    item = np.dtype(file.dtype).itemsize
    with file.path.open("rb") as stream:
        for start in range(0, file.n_ids, CHUNK_IDS):
            stream.seek(file.offset + start * item)
            ids = np.frombuffer(stream.read(CHUNK_IDS * item), dtype=file.dtype)
            wrong = (ids >= vocab_size) | (ids < 0)
            if wrong.any():
                at = int(wrong.argmax())
                raise ConfigError(
                    f"{file.path}: token {start + at} is id {ids[at]}, but the tokenizer has "
                    f"{vocab_size} ids: name the tokenizer that made the file with --tokenizer, or "
                    f"how wide its ids are: {WIDTHS}"
                )
            yield ids


def _described(ids: np.ndarray, tokenizer: Tokenizer, dtype: str, first: bool) -> Ids:
    """Ids with their document starts: after each end-of-text, and at the very beginning."""
    ends = np.flatnonzero(ids == (-1 if tokenizer.eot is None else tokenizer.eot))
    starts = np.concatenate([[0] if first else [], ends + 1]).astype(np.int64)
    n_bytes = int(tokenizer.byte_lengths()[ids].sum())
    return Ids(ids.astype(dtype), starts, n_bytes, len(ends))
