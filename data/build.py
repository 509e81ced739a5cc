"""Builds a prepared folder, shard by shard, so that a killed build continues where it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any

import numpy as np

from data.bpe import train_bpe
from data.config import DataConfig
from data.encode import Encoded, encode_task, grouped, in_order, n_workers
from data.meta import SPLITS, Meta, Shard, fingerprint, write_json, write_meta
from data.options import ConfigError
from data.pretokenized import encoded_ids
from data.record import SOURCE_FILE
from data.sources import Source
from data.split import Split, is_chosen, resolve_split
from data.tokenizer import Tokenizer, load_tokenizer
from data.vocabulary import char_tokenizer, code_points
from data.writer import ShardWriter

SAMPLE_BYTES = 32 << 20  # of text that a BPE is trained on
SAMPLE_SPAN = 16  # the sample is spread over so many times its size
PROGRESS_FILE = "progress.json"
Say = Callable[[str], None]


@dataclass
class Plan:
    """What is built: sources with their weights and splits, and by which options."""

    config: DataConfig
    sources: list[Source]
    weights: list[float]
    splits: list[Split]
    tokenizer: Tokenizer | None  # one that is not made from the text

    def pieces(self, source: Source) -> Iterator:
        return source.pieces(self.config.text_field, self.config.errors)


def make_plan(
    config: DataConfig,
    sources: list[Source],
    weights: list[float],
    tokenizer: Tokenizer | None = None,
) -> Plan:
    """Decide how each source is split. Raises ConfigError for a source that holds no text."""
    splits = []
    for source in sources:
        if source.holds_ids:
            splits.append(_split_of_ids(config, source))
            continue
        if next(source.pieces(config.text_field, config.errors), None) is None:
            raise ConfigError(f"data.source={source.spec} holds no text, or white space alone")
        pieces = source.pieces(config.text_field, config.errors)
        splits.append(resolve_split(config.split, config.val_fraction, pieces))
    return Plan(config, sources, weights, splits, tokenizer)


def _split_of_ids(config: DataConfig, source: Source) -> Split:
    if config.split == "document" or config.tokenizer == "char" or "bpe" in config.tokenizer[:4]:
        raise ConfigError(
            f"data.source={source.spec} holds ids, not text: name the tokenizer that made them "
            f"(--tokenizer={config.tokenizer} is made from text), and use --split=auto or tail"
        )
    return Split("files", config.val_fraction)


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
    path = folder / PROGRESS_FILE
    if path.is_file():
        about = json.loads(path.read_text("utf-8"))
        shards = [Shard(**shard) for shard in about.pop("shards")]
        found = Progress(shards=shards, **about)
        if found.record == record:
            if found.shards:
                say(f"continuing after {len(found.shards)} finished shards")
            return found
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fresh = Progress(record, [0] * len(record), [False] * len(record), [])
    fresh.save(folder)
    return fresh


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
            results = _encoded(plan, number, tokenizer, dtype, partial, done.tasks[number], bar)
            _write_shards(partial, number, results, done, dtype, shard_bytes)
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
    (partial / PROGRESS_FILE).unlink(missing_ok=True)
    _replace(partial, folder)
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
) -> Iterator[Encoded]:
    """The ids of one source, task by task, without the first `skip` tasks."""
    source, split = plan.sources[number], plan.splits[number]
    if source.holds_ids:
        tasks = encoded_ids(source, tokenizer, dtype, plan.config.val_fraction)
        results: Iterator[Encoded] = (task for n, task in enumerate(tasks) if n >= skip)
    else:
        tasks = grouped(split.parts(plan.pieces(source)))
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
                writers[split].append(some.ids, some.starts, some.bytes)
            tasks += 1
            if sum(writer.bytes for writer in writers.values()) >= shard_bytes:
                done.shards += [writers.pop(split).close() for split in sorted(writers)]
                done.tasks[number] = tasks
                done.save(folder)
        done.shards += [writers.pop(split).close() for split in sorted(writers)]
        done.tasks[number], done.complete[number] = tasks, True
        done.save(folder)
    finally:
        for writer in writers.values():
            writer.abandon()


def _check_splits(plan: Plan, meta: Meta, partial: Path) -> None:
    """Refuse a split that nothing fell into, and leave nothing behind."""
    for number, source in enumerate(plan.sources):
        for split in SPLITS:
            if not meta.of(split, number):
                shutil.rmtree(partial)
                raise ConfigError(
                    f"data.source={source.spec}: the {split} split is empty "
                    f"(data.split={plan.splits[number].mode}, data.val_fraction="
                    f"{plan.config.val_fraction}): use more text, --split=tail, or another "
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


def make_tokenizer(plan: Plan, say: Say, sample_bytes: int = SAMPLE_BYTES) -> Tokenizer:
    """The tokenizer that is made from the plan's text: char or bpe:N."""
    name = plan.config.tokenizer
    if name == "char":
        return char_tokenizer(*_alphabet(plan))
    say(f"training {name} on up to {sample_bytes >> 20} MB of the training text")
    vocab_size = int(name.removeprefix("bpe:"))
    tokenizer = train_bpe(name, vocab_size, _sample(plan, sample_bytes))
    if tokenizer.vocab_size < vocab_size:
        say(f"the text holds too little to merge for {name}: {tokenizer.vocab_size} ids")
    return tokenizer


def _alphabet(plan: Plan) -> tuple[str, bool]:
    """The distinct characters of all text, sorted, and whether there are several documents."""
    seen = np.zeros(0x110000, dtype=bool)
    documents = 0
    for source in plan.sources:
        for piece in plan.pieces(source):
            seen[code_points(piece.text)] = True
            documents += piece.first
    return "".join(map(chr, np.flatnonzero(seen))), documents > 1


def _sample(plan: Plan, sample_bytes: int) -> Iterator[str]:
    """Training text, at most sample_bytes, chosen by hash from the beginning of each source."""
    for source, split, weight in zip(plan.sources, plan.splits, plan.weights, strict=True):
        left = sample_bytes * weight
        share = left / min(max(source.size, left), SAMPLE_SPAN * left)
        for part in split.parts(plan.pieces(source)):
            if part.split == "train" and (share == 1 or is_chosen(part.text, share, b"sample")):
                yield part.text
                left -= len(part.text.encode("utf-8"))
                if left <= 0:
                    break
