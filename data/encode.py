"""Turn text into ids on all cores, in order, and read files of ids that others made."""

from __future__ import annotations

import json
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
from data.chat import plain_text, render
from data.meta import dtype_for
from data.readers import Piece, is_compressed
from data.sources import Part, Source, Split
from data.tokenizer import Tokenizer, load_tokenizer, lost_bytes

TASK_CHARACTERS = 1 << 19  # of text per task
TASKS_AHEAD = 3  # tasks per process that are in memory
FEW_BYTES = 32 << 20  # encoded in seconds by one process, before others would have started

Item = TypeVar("Item")
Result = TypeVar("Result")


class Ids(NamedTuple):
    """The ids of one split in one task."""

    ids: np.ndarray  # (n,), in the dtype of the shards
    starts: np.ndarray  # where in them documents start
    counts: dict[str, int]  # documents, bytes, lost and spelled, as in Shard
    mask: np.ndarray | None = None  # (n,) uint8 flags of conversations, see data/chat.py


@dataclass
class Encoded:
    """The result of one task: the ids of each split, and the number of bytes read from files."""

    splits: dict[str, Ids] = field(default_factory=dict)
    read: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of text."""
        return sum(ids.counts["bytes"] for ids in self.splits.values())


# Text to ids


def text_of(piece: Piece | Part) -> str:
    """Return the text of a piece that a tokenizer has to know."""
    return plain_text(json.loads(piece.text)) if piece.name else piece.text


def grouped(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Group parts into tasks of at least TASK_CHARACTERS, in order."""
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
    """Encode one task with the tokenizer saved in `folder`."""
    return _encoded(folder, dtype, task, _encode_text)


def encode_chat_task(folder: Path, dtype: str, task: list[Part]) -> Encoded:
    """Encode one task of conversations. Raises ConfigError that names the row."""
    return _encoded(folder, dtype, task, _encode_chat)


def _encoded(
    folder: Path, dtype: str, task: list[Part], encode: Callable[[Tokenizer, str, list[Part]], Ids]
) -> Encoded:
    tokenizer = _tokenizer(folder, folder.stat().st_mtime_ns)
    splits = {
        split: encode(tokenizer, dtype, [part for part in task if part.split == split])
        for split in sorted({part.split for part in task})
    }
    return Encoded(splits, sum(part.read for part in task))


@lru_cache(maxsize=1)
def _tokenizer(folder: Path, changed: int) -> Tokenizer:
    """Load the tokenizer once per process and per version of its folder."""
    return load_tokenizer(folder)


def _encode_text(tokenizer: Tokenizer, dtype: str, parts: list[Part]) -> Ids:
    """Encode text of one split: each document is its opening ids, its text and an end-of-text."""
    ids, starts, position = [], [], 0
    bos = np.array(tokenizer.between, dtype=dtype)
    for part in parts:
        some = tokenizer.encode_array(part.text).astype(dtype)
        if part.first:
            # The first window of a document begins one token before it: with the bos, as in
            # sampling.
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
    counts = {
        "bytes": sum(len(part.text.encode("utf-8")) for part in parts) * tokenizer.spells,
        "documents": sum(part.last for part in parts),
        "lost": lost,
        "spelled": len(spelled),
    }
    return Ids(whole, np.array(starts, dtype=np.int64), counts)


def _encode_chat(tokenizer: Tokenizer, dtype: str, parts: list[Part]) -> Ids:
    """Encode conversations of one split."""
    found, starts, position = [], [], 0
    for part in parts:
        try:
            found.append(render(json.loads(part.text), tokenizer))
        except ConfigError as error:
            raise ConfigError([f"{part.name}: {problem}" for problem in error.problems]) from None
        # Windows begin one token before a document: with the first of the conversation.
        starts.append(position + 1)
        position += len(found[-1].ids)
    ids = np.concatenate([rendered.ids for rendered in found])
    n_bytes = int(tokenizer.byte_lengths()[ids].sum())
    return Ids(
        ids.astype(dtype),
        np.array(starts, dtype=np.int64),
        {"bytes": n_bytes, "documents": len(parts), "spelled": n_bytes},
        np.concatenate([rendered.mask for rendered in found]),
    )


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """`map` on that many processes (0 or 1: in this one), reading only a little ahead.

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
            if len(waiting) >= TASKS_AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ConfigError(
            f"data.workers={workers}: a process that prepares the data died, perhaps for lack of "
            "memory: use fewer --workers; the same command continues where this one stopped"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _pool(workers: int) -> ProcessPoolExecutor | None:
    """Start the processes; None, with a note, if there is no shared memory for semaphores."""
    # spawn: forking a process that has threads (torch, tokenizers) can hang it.
    context = multiprocessing.get_context("spawn")
    try:
        return ProcessPoolExecutor(workers, mp_context=context, initializer=_follow_parent)
    except (OSError, ImportError, NotImplementedError) as error:
        print(
            f"note: data.workers={workers}: no shared memory here, perhaps no /dev/shm ({error}); "
            "preparing in one process"
        )
        return None


def _follow_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and exit when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def n_workers(workers: int | None, size: int) -> int:
    """Return the number of processes for `size` bytes (0: unknown): all cores unless given."""
    if workers is not None:
        return workers
    return 0 if 0 < size < FEW_BYTES else usable_cores()


# Files of ids from elsewhere: nanoGPT's .bin (no header), llm.c's .bin (a header of 1 KiB), .npy

HEADER_BYTES = 1024
LLM_C_MAGIC = {20240520: "<u2", 20240801: "<u4"}
CHUNK_IDS = 1 << 20
SAMPLE_IDS = 1 << 18  # looked at to see whether the assumed width is right
FEWEST_IDS = 32  # fewer tell nothing
WIDTHS = "--ids=u1, u2, u4 or u8"


class IdsFile(NamedTuple):
    """A file of ids: where they start, their dtype and their number."""

    path: Path
    offset: int
    dtype: str
    n_ids: int


def _find_ids(path: Path, vocab_size: int, width: str = "auto") -> IdsFile:
    """Find the ids in a file. Raises ConfigError if it is cut short or its width is in doubt.

    Without a header (llm.c's or numpy's) the ids have `width` (u1, u2, u4 or u8); auto: uint16, as
    nanoGPT writes them, or uint32 if the vocabulary needs it.
    """
    if is_compressed(path):
        raise ConfigError(f"{path}: files of ids cannot be compressed: unpack it first")
    if path.suffix.lower() == ".npy":
        return _numpy_file(path)
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = np.frombuffer(stream.read(12).ljust(12, b"\0"), dtype="<i4").tolist()
    if size >= HEADER_BYTES and header[0] in LLM_C_MAGIC:
        of_header, count = LLM_C_MAGIC[header[0]], header[2]
        if size != HEADER_BYTES + count * np.dtype(of_header).itemsize:
            raise ConfigError(f"{path}: its header promises {count} ids, but it has {size} bytes")
        return IdsFile(path, HEADER_BYTES, of_header, count)
    dtype = np.dtype(dtype_for(vocab_size) if width == "auto" else width).newbyteorder("<")
    if size % dtype.itemsize:
        raise ConfigError(
            f"{path}: file size {size} is not a multiple of {dtype.itemsize} ({dtype} ids); give "
            f"the width of its ids: {WIDTHS}"
        )
    file = IdsFile(path, 0, dtype.str, size // dtype.itemsize)
    if width == "auto":
        _check_width(file)
    return file


def _numpy_file(path: Path) -> IdsFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shape = f"{array.dtype} of shape {array.shape}"
        raise ConfigError(f"{path}: holds {shape}, not a one-dimensional array of integers")
    return IdsFile(path, array.offset, array.dtype.str, len(array))


def _check_width(file: IdsFile) -> None:
    """Raise ConfigError if the bytes do not look like ids of the assumed width.

    If the ids are in fact twice as wide, every second number read is nearly always 0.
    """
    ids = np.fromfile(file.path, file.dtype, SAMPLE_IDS)
    if len(ids) < FEWEST_IDS:
        return
    zeros = max(float((ids[first::2] == 0).mean()) for first in (0, 1))
    if zeros > 0.5:
        raise ConfigError(
            f"{file.path}: read as {ids.dtype}, {zeros:.0%} of every second id is 0; give the "
            f"width of its ids: {WIDTHS}"
        )
    raw = np.frombuffer(ids.tobytes(), dtype=np.uint8)
    printable = ((raw >= 32) & (raw < 127)) | ((raw >= 9) & (raw <= 13))
    if printable.all():
        raise ConfigError(
            f"{file.path}: looks like text, not like ids; rename it .txt to read it as text, or "
            f"give the width of its ids: {WIDTHS}"
        )


def encoded_ids(
    source: Source, split: Split, tokenizer: Tokenizer, dtype: str, width: str
) -> Iterator[Encoded]:
    """Yield the ids of a source's files, split by the names of the files or else by the tail."""
    paths = [p for p in source.files if split.mode != "rest" or p not in source.val_files]
    files = [_find_ids(path, tokenizer.vocab_size, width) for path in paths]
    total = sum(file.n_ids for file in files)
    left = int(total * (1 - split.val_fraction))  # all or none of them for "none" and "only"
    begun: set[str] = set()  # splits that have a document start already
    for file in files:
        read = file.offset
        if split.mode == "files":
            left = 0 if file.path in source.val_files else file.n_ids
        if tokenizer.eot is None:  # then each file is one document
            begun = set()
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
                done.splits["val" if len(found["val"]) else "train"].counts["documents"] = 1
            yield done
            read = 0


def _chunks(file: IdsFile, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield the ids in chunks. Raises ConfigError for an id outside the vocabulary."""
    item = np.dtype(file.dtype).itemsize
    for start in range(0, file.n_ids, CHUNK_IDS):
        ids = np.fromfile(file.path, file.dtype, CHUNK_IDS, offset=file.offset + start * item)
        wrong = (ids >= vocab_size) | (ids < 0)
        if wrong.any():
            at = int(wrong.argmax())
            raise ConfigError(
                f"{file.path}: token {start + at} is id {ids[at]}, but the tokenizer has "
                f"{vocab_size} ids: name the tokenizer that made the file with --tokenizer, or "
                f"give the width of its ids: {WIDTHS}"
            )
        yield ids


def _described(ids: np.ndarray, tokenizer: Tokenizer, dtype: str, first: bool) -> Ids:
    """Find document starts: after each end-of-text and, if this is the `first` chunk, at 0."""
    ends = np.flatnonzero(ids == (-1 if tokenizer.eot is None else tokenizer.eot))
    starts = np.concatenate([[0] if first else [], ends + 1]).astype(np.int64)
    n_bytes = int(tokenizer.byte_lengths()[ids].sum())
    return Ids(ids.astype(dtype), starts, {"documents": len(ends), "bytes": n_bytes})


def source_ids(source: Source, tokenizer: Tokenizer, width: str) -> tuple[list[int], list[int]]:
    """(all ids of a source's files, positions at which documents start)."""
    ids: list[int] = []
    starts: list[int] = []
    for done in encoded_ids(source, Split("none", 0), tokenizer, "uint32", width):
        for some in done.splits.values():
            starts += (some.starts + len(ids)).tolist()
            ids += some.ids.tolist()
    return ids, [start for start in starts if start < len(ids)]
