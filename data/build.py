"""Builds a prepared folder, shard by shard, so that a killed build continues where it was."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial as bind
from itertools import islice
from pathlib import Path
from typing import Any

from data.encode import Encoded, encode_task, grouped, in_order, n_workers
from data.meta import SPLITS, Meta, Shard, fingerprint, write_json, write_meta
from data.options import ConfigError
from data.plan import Plan, Say, make_tokenizer
from data.pretokenized import encoded_ids
from data.record import SOURCE_FILE
from data.sources import what_was_read
from data.tokenizer import Tokenizer, load_tokenizer
from data.writer import ShardWriter

PROGRESS_FILE = "progress.json"


@dataclass
class Progress:
    """How far a build has come; saved after each shard."""

    record: list[dict]
    tasks: list[int]  # done of each source
    complete: list[bool]  # sources that are done
    shards: list[Shard]

    def save(self, folder: Path) -> None:
        write_json(folder / PROGRESS_FILE, asdict(self))


def _continued(folder: Path, record: list[dict], say: Say) -> Progress:
    """The progress of a build of the same content, or a fresh one in an empty folder."""
    found = _read_progress(folder / PROGRESS_FILE)
    if found is not None and found.record == record:
        if found.shards:
            say(f"continuing after {len(found.shards)} finished shards")
        return found
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fresh = Progress(record, [0] * len(record), [False] * len(record), [])
    fresh.save(folder)
    return fresh


def _read_progress(path: Path) -> Progress | None:
    """The progress that was saved; None if none was, or it cannot be read."""
    try:
        about = json.loads(path.read_text("utf-8"))
        shards = [Shard(**shard) for shard in about.pop("shards")]
        return Progress(shards=shards, **about)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None


def build(
    plan: Plan, record: list[dict], folder: Path, say: Say, progress: bool, shard_bytes: int
) -> Meta:
    """Make the folder from the plan's sources, whose content `record` identifies."""
    partial = folder.with_name(f".{folder.name}.partial")
    done = _continued(partial, record, say)
    tokenizer = _kept_tokenizer(plan, partial, say)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    with _bar(plan, folder.name, progress) as bar:
        for number in range(len(plan.sources)):
            if done.complete[number]:
                bar.update(plan.sources[number].size)
                continue
            skip, read = done.tasks[number], Counter()
            results = _encoded(plan, number, tokenizer, dtype, partial, skip, bar, read)
            _write_shards(partial, number, results, done, dtype, shard_bytes)
            for line in what_was_read(read):
                say(f"{plan.sources[number].spec}: {line}")
        if bar.total:
            bar.update(bar.total - bar.n)
    meta = Meta(
        source=plan.config.source,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        fingerprint=fingerprint(partial, dtype, plan.weights, done.shards),
        splits=[split.mode for split in plan.splits],
        weights=plan.weights,
        shards=done.shards,
    )
    _check_splits(plan, meta, partial)
    if [entry["stamp"] for entry in record] != [source.stamp() for source in plan.sources]:
        raise ConfigError(f"data.source={plan.config.source} changed meanwhile: run this again")
    write_json(partial / SOURCE_FILE, record)
    write_meta(partial, meta)
    _replace(partial, folder)
    (folder / PROGRESS_FILE).unlink(missing_ok=True)  # last: until here it can be continued
    return meta


def _bar(plan: Plan, name: str, progress: bool) -> Any:
    from tqdm import tqdm

    total = sum(source.size for source in plan.sources) or None
    return tqdm(
        total=total, unit="B", unit_scale=True, desc=name, disable=None if progress else True
    )


def _encoded(
    plan: Plan,
    number: int,
    tokenizer: Tokenizer,
    dtype: str,
    folder: Path,
    skip: int,
    bar: Any,
    read: Counter,
) -> Iterator[Encoded]:
    """The ids of one source, task by task, without the first `skip` tasks; `read` counts."""
    source, split = plan.sources[number], plan.splits[number]
    if source.holds_ids:
        ids = encoded_ids(source, split, tokenizer, dtype)
        results: Iterator[Encoded] = islice(ids, skip, None)
    else:
        tasks = grouped(split.parts(plan.pieces(source, read)))
        for _ in range(skip):
            bar.update(sum(part.read for part in next(tasks)))
        encode = bind(encode_task, folder / "tokenizer", dtype)
        results = in_order(encode, tasks, n_workers(plan.config.workers, source.size))
    for result in results:
        bar.update(result.read if source.files else result.bytes)
        yield result


def _write_shards(
    folder: Path,
    number: int,
    results: Iterator[Encoded],
    done: Progress,
    dtype: str,
    shard_bytes: int,
) -> None:
    """Write one source's ids; a shard of each split is finished with every shard_bytes of text."""
    writers: dict[str, ShardWriter] = {}
    tasks = done.tasks[number]
    try:
        for result in results:
            for split, some in result.splits.items():
                if split not in writers:
                    writers[split] = ShardWriter(folder, split, number, tasks, dtype)
                writers[split].append(some.ids, some.starts, some.bytes, some.documents)
            tasks += 1
            if sum(writer.bytes for writer in writers.values()) >= shard_bytes:
                done.shards += _closed(writers)
                done.tasks[number] = tasks
                done.save(folder)
        done.shards += _closed(writers)
        done.tasks[number], done.complete[number] = tasks, True
        done.save(folder)
    finally:
        for writer in writers.values():
            writer.abandon()


def _closed(writers: dict[str, ShardWriter]) -> list[Shard]:
    """The finished shards of all splits; none are open afterwards."""
    shards = [writers.pop(split).close() for split in sorted(writers)]
    return [shard for shard in shards if shard is not None]


def _check_splits(plan: Plan, meta: Meta, partial: Path) -> None:
    """Refuse a split that nothing fell into, and leave nothing behind."""
    for number, source in enumerate(plan.sources):
        for split in SPLITS if plan.config.val_fraction > 0 else ("train",):
            if not meta.of(split, number):
                other = "" if plan.splits[number].mode == "tail" else "--split=tail, "
                shutil.rmtree(partial)
                raise ConfigError(
                    f"data.source={source.spec}: the {split} split is empty "
                    f"(data.split={plan.splits[number].mode}, data.val_fraction="
                    f"{plan.config.val_fraction}): use more text, {other}or another "
                    "--val_fraction"
                )


def _replace(partial: Path, folder: Path) -> None:
    """Put a complete folder in its place, surely on disk; the one before it is deleted."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder.parent, os.O_DIRECTORY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(old, ignore_errors=True)


# The tokenizer


def _kept_tokenizer(plan: Plan, folder: Path, say: Say) -> Tokenizer:
    """The tokenizer of a build: made once, kept in the folder."""
    path = folder / "tokenizer"
    if not path.is_dir():
        tokenizer = plan.tokenizer or make_tokenizer(plan, say)
        temporary = folder / "tokenizer.tmp"
        tokenizer.save(temporary)
        os.rename(temporary, path)
    return load_tokenizer(path)
