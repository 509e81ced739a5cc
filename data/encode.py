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
from typing import TypeVar

import numpy as np

from cli.limits import usable_cores
from cli.options import ConfigError
from data.split import Part
from data.tokenizer import Tokenizer, load_tokenizer
from data.vocabulary import lost_bytes

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
