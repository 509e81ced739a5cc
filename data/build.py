"""Builds a prepared folder, shard by shard, so that a killed build continues where it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial as bind
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from cli.command import Say
from cli.files import json_bytes, replace_file, sync, sync_folder
from cli.options import ConfigError
from data.config import DataConfig
from data.encode import Encoded, encode_task, encoded_ids, grouped, in_order, n_workers
from data.meta import (
    META_FILE,
    SPLITS,
    Meta,
    Shard,
    ShardWriter,
    fingerprint,
    read_tokenizer,
    write_meta,
)
from data.prepared import SOURCE_FILE, Stamp, key_of, looks_unchanged, partial_folder, stamps_of
from data.readers import How, Piece, form_of
from data.sources import Read, Source, Split, is_chosen, resolve_split
from data.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    char_tokenizer,
    code_points,
    load_tokenizer,
    train_bpe,
    unknown_characters,
)

# What is to be built: sources, how each is split, and the tokenizer that their text makes.

SAMPLE_BYTES = 32 << 20  # of text that a BPE is trained on
SAMPLE_SPAN = 16  # the sample is spread over so many times its size


@dataclass
class Plan:
    """What is built: sources with their weights and splits, and by which options."""

    config: DataConfig
    sources: list[Source]
    weights: list[float]  # of those that train, which come first
    splits: list[Split]
    tokenizer: Tokenizer | None  # one that is not made from the text

    def pieces(self, source: Source, read: Read | None = None) -> Iterator[Piece]:
        """The documents of one source; `read` notes what is found."""
        return source.pieces(how_to_read(self.config), read)


def how_to_read(config: DataConfig) -> How:
    """The options that decide which text the files hold."""
    is_ids = config.tokenizer.startswith("ids:")
    n_ids = int(config.tokenizer.removeprefix("ids:")) if is_ids else 0
    return How(config.text_field, config.errors, config.separator, n_ids)


def make_plan(
    config: DataConfig,
    sources: list[Source],
    weights: list[float],
    tokenizer: Tokenizer | None = None,
) -> Plan:
    """Decide how each source is split. Raises ConfigError for a source that holds no text."""
    how = how_to_read(config)
    _check_applies(how, sources)
    splits = []
    for source in sources:
        if source.holds_ids:
            _check_ids(config, source, tokenizer)
        elif next(source.pieces(how), None) is None:
            option = "data.val_source" if source.validates else "data.source"
            raise ConfigError(f"{option}={source.spec} holds no text, or white space alone")
        splits.append(_split(config, source, how))
    plan = Plan(config, sources, [weight for weight in weights if weight], splits, tokenizer)
    if tokenizer is not None and tokenizer.name == "char":
        _check_characters(plan, tokenizer)
    return plan


def _check_characters(plan: Plan, tokenizer: Tokenizer) -> None:
    """Raise ConfigError naming every character of the text that a run's tokenizer does not know."""
    counts = np.zeros(0x110000, dtype=np.int64)
    for source in plan.sources:
        for piece in () if source.holds_ids else plan.pieces(source):
            counts += np.bincount(code_points(piece.text), minlength=len(counts))
    found = {chr(code): int(counts[code]) for code in np.flatnonzero(counts)}
    alphabet = b"".join(tokenizer.table).decode("utf-8")
    if set(found) - set(alphabet):
        raise unknown_characters(found, alphabet)


def _split(config: DataConfig, source: Source, how: How) -> Split:
    """How one source is split."""
    if source.validates:
        return Split("only", 1)
    if config.val_source:
        return Split("rest", 0)
    if source.val_files and config.split == "auto":
        return Split("files", config.val_fraction)
    if source.holds_ids:
        return Split("tail" if config.val_fraction else "none", config.val_fraction)
    return resolve_split(config.split, config.val_fraction, source.pieces(how))


def _check_applies(how: How, sources: list[Source]) -> None:
    """Raise ConfigError for an option that no file of the sources can obey."""
    files = [file for source in sources for file in source.files]
    typed = how.text_field != How().text_field and all(source.files for source in sources)  # no hub
    if typed and all(form_of(file, how) in ("text", "ids") for file in files):
        raise ConfigError(
            f"data.text_field={how.text_field}: no file of the source has fields, they are read as "
            "plain text or ids; JSON lines and arrays, .csv, .tsv, .parquet and .arrow have them"
        )
    if how.separator and all(form_of(file, how) != "text" for file in files):
        raise ConfigError(
            f"data.separator={how.separator!r}: no file of the source is plain text; each row of "
            "the others is a document already"
        )


def _check_ids(config: DataConfig, source: Source, tokenizer: Tokenizer | None) -> None:
    if config.split == "document" or tokenizer is None:
        raise ConfigError(
            f"data.source={source.spec} holds ids, not text: name the tokenizer that made them "
            f"(--tokenizer={config.tokenizer} is made from text), and use --split=auto or tail"
        )


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
    """Training text, at most sample_bytes, chosen by hash from the beginning of each source; those
    that only validate come last and have no weight."""
    for source, split, weight in zip(plan.sources, plan.splits, plan.weights, strict=False):
        left = sample_bytes * weight
        share = left / min(max(source.size, left), SAMPLE_SPAN * left)
        for part in split.parts(plan.pieces(source)):
            if part.split == "train" and (share == 1 or is_chosen(part.text, share, b"sample")):
                yield part.text
                left -= len(part.text.encode("utf-8"))
                if left <= 0:
                    break


PROGRESS_FILE = "progress.jsonl"


@dataclass
class Progress:
    """How far a build has come: a journal with one line after each shard, so that the time for it
    does not grow with the number of shards."""

    path: Path
    tasks: list[int]  # done of each source
    complete: list[bool]  # sources that are done
    shards: list[Shard]

    def add(self, number: int, tasks: int, complete: bool, shards: list[Shard]) -> None:
        """Note, surely on disk, that these shards hold a source's tasks up to here."""
        entry = [number, tasks, complete, [asdict(shard) for shard in shards]]
        with self.path.open("ab") as stream:
            stream.write(json.dumps(entry).encode() + b"\n")
            stream.flush()
            sync(stream.fileno())
        self._take(number, tasks, complete, shards)

    def _take(self, number: int, tasks: int, complete: bool, shards: list[Shard]) -> None:
        self.tasks[number], self.complete[number] = tasks, complete
        self.shards += shards

    def read(self) -> None:
        """Take what the journal says, and cut off a last line that a kill has torn."""
        good = 0
        with self.path.open("r+b") as stream:
            for line in stream:
                try:
                    number, tasks, complete, shards = json.loads(line)
                    shards = [Shard(**shard) for shard in shards]
                    if not line.endswith(b"\n"):
                        break
                    self._take(number, tasks, complete, shards)
                except (ValueError, TypeError, IndexError):
                    break
                good += len(line)
            stream.truncate(good)


def _continued(partial: Path, made_from: dict[str, Any], say: Say) -> Progress:
    """The progress of a build that was begun, or of one in a fresh folder."""
    n_sources = len(made_from["sources"])
    found = Progress(partial / PROGRESS_FILE, [0] * n_sources, [False] * n_sources, [])
    if found.path.is_file():
        found.read()
        if found.shards:
            say(f"continuing after {len(found.shards)} finished shards")
        return found
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    replace_file(partial / SOURCE_FILE, json_bytes(made_from))
    found.path.touch()
    return found


def build(
    plan: Plan,
    made_from: dict[str, Any],
    stamps: list[list[Stamp]],
    folder: Path,
    say: Say,
    progress: bool,
    shard_bytes: int,
) -> Meta:
    """Make the folder from the plan's sources. Its name ends in the key of `made_from`.

    stamps: of each source's files, from before their content was hashed.
    """
    partial = partial_folder(folder.parent, key_of(made_from))
    done = _continued(partial, made_from, say)
    tokenizer = _kept_tokenizer(plan, stamps, partial, say)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    with _bar(plan, folder.name, progress) as bar:
        for number in range(len(plan.sources)):
            if done.complete[number]:
                bar.update(plan.sources[number].size)
                continue
            skip, read = done.tasks[number], Read(_ends(tokenizer))
            results = _encoded(plan, number, tokenizer, dtype, partial, skip, bar, read)
            check = bind(_check_unchanged, plan, number, stamps[number])
            _write_shards(partial, number, results, done, check, dtype, shard_bytes)
            for line in read.lines(plan.config.separator):
                say(f"{plan.sources[number].spec}: {line}")
        if bar.total:
            bar.update(bar.total - bar.n)
    meta = Meta(
        source=plan.config.source,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        fingerprint=fingerprint(read_tokenizer(partial), dtype, plan.weights, done.shards),
        splits=[split.mode for split in plan.splits],
        weights=plan.weights,
        shards=done.shards,
    )
    _check_splits(plan, meta, partial)
    if stamps != [stamps_of(source) for source in plan.sources]:
        shutil.rmtree(partial)  # it may hold some of the one content and some of the other
        raise _changed(plan)
    write_meta(partial, meta)
    _put(partial, folder)
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
    read: Read,
) -> Iterator[Encoded]:
    """The ids of one source, task by task, without the first `skip` tasks."""
    source, split = plan.sources[number], plan.splits[number]
    if source.holds_ids:
        ids = encoded_ids(source, split, tokenizer, dtype, plan.config.ids)
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
    check: Callable[[], None],
    dtype: str,
    shard_bytes: int,
) -> None:
    """Write one source's ids; a shard of each split is finished with every shard_bytes of text.

    check: raises if the source has changed. It is called before shards are noted, so that those
    noted hold the content that the folder is named after, whatever happens next.
    """
    writers: dict[str, ShardWriter] = {}
    tasks = done.tasks[number]
    try:
        for result in results:
            for split, some in result.splits.items():
                if split not in writers:
                    writers[split] = ShardWriter(folder, split, number, tasks, dtype)
                writers[split].append(some.ids, some.starts, some.bytes, some.documents)
                writers[split].lost += some.lost
                writers[split].spelled += some.spelled
            tasks += 1
            # Ids that stand for no text count as a byte each.
            if sum(w.bytes or w.tokens for w in writers.values()) >= shard_bytes:
                check()
                done.add(number, tasks, False, _closed(writers))
        check()
        done.add(number, tasks, True, _closed(writers))
    finally:
        for writer in writers.values():
            writer.abandon()


def _check_unchanged(plan: Plan, number: int, stamps: list[Stamp]) -> None:
    if not looks_unchanged(plan.sources[number], stamps):
        raise _changed(plan)


def _changed(plan: Plan) -> ConfigError:
    return ConfigError(f"data.source={plan.config.source} changed meanwhile: run this again")


def _closed(writers: dict[str, ShardWriter]) -> list[Shard]:
    """The finished shards of all splits; none are open afterwards."""
    shards = [writers.pop(split).close() for split in sorted(writers)]
    return [shard for shard in shards if shard is not None]


def _check_splits(plan: Plan, meta: Meta, partial: Path) -> None:
    """Refuse a split that nothing fell into, and leave nothing behind."""
    for number, source in enumerate(plan.sources):
        mode = plan.splits[number].mode
        for split in {"none": ["train"], "rest": ["train"], "only": ["val"]}.get(mode, SPLITS):
            if not meta.of(split, number):
                other = "" if mode == "tail" else "--split=tail, "
                shutil.rmtree(partial)
                raise ConfigError(
                    f"data.source={source.spec}: the {split} split is empty "
                    f"(data.split={mode}, data.val_fraction="
                    f"{plan.config.val_fraction}): use more text, {other}or another "
                    "--val_fraction"
                )


def _put(partial: Path, folder: Path) -> None:
    """Give a complete folder its name, surely on disk. What has this name already stays."""
    if folder.exists():
        raise ConfigError(f"{folder} is in the way, and holds no {META_FILE}: move or delete it")
    os.rename(partial, folder)
    sync_folder(folder.parent)


# The tokenizer


def _ends(tokenizer: Tokenizer) -> tuple[str, ...]:
    """How an end-of-text is spelled: as most do, and as this tokenizer does."""
    own = [text for text, token in tokenizer.special.items() if token == tokenizer.eot]
    return tuple(dict.fromkeys([END_OF_TEXT, *own]))


def _kept_tokenizer(plan: Plan, stamps: list[list[Stamp]], folder: Path, say: Say) -> Tokenizer:
    """The tokenizer of a build: made once, kept in the folder."""
    path = folder / "tokenizer"
    if not path.is_dir():
        tokenizer = plan.tokenizer or make_tokenizer(plan, say)
        for number in range(len(plan.sources)):
            _check_unchanged(plan, number, stamps[number])
        temporary = folder / "tokenizer.tmp"
        tokenizer.save(temporary)
        os.rename(temporary, path)
    return load_tokenizer(path)
