"""Build a prepared folder shard by shard; a build that was killed continues where it stopped."""

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

import numpy as np

from cli.command import Say
from cli.files import json_bytes, replace_file, sync, sync_folder
from cli.options import ConfigError
from data.config import DataConfig
from data.encode import (
    Encoded,
    encode_chat_task,
    encode_task,
    encoded_ids,
    grouped,
    in_order,
    n_workers,
    text_of,
)
from data.meta import (
    META_FILE,
    SPLITS,
    Meta,
    Shard,
    ShardWriter,
    dtype_for,
    fingerprint,
    read_tokenizer,
    write_meta,
)
from data.prepared import SOURCE_FILE, Stamp, key_of, looks_unchanged, partial_folder, stamps_of
from data.readers import Piece, ReadOptions, form_of
from data.sources import ReadCounts, Source, Split, is_chosen, parts_of, resolve_split
from data.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    char_tokenizer,
    chat_tokenizer,
    code_points,
    load_tokenizer,
    train_bpe,
    unknown_characters,
)

SAMPLE_BYTES = 32 << 20  # of text that a BPE is trained on
SAMPLE_SPAN = 16  # the sample is spread over this many times its size
PROGRESS_FILE = "progress.jsonl"


# The plan


@dataclass
class Plan:
    """A build to be done: its sources, how to read and split them, and the tokenizer."""

    config: DataConfig
    sources: list[Source]
    how: ReadOptions
    splits: list[Split]
    tokenizer: Tokenizer | None  # None: made from the text

    @property
    def weights(self) -> list[float]:
        """The weights of the sources that train; they come before those that only validate."""
        return [weight for _, weight in parts_of(self.config) if weight]

    def workers(self, size: int) -> int:
        """Return the number of processes that encode `size` bytes (0: unknown)."""
        return n_workers(self.config.workers, size)

    def pieces(self, source: Source, counts: ReadCounts | None = None) -> Iterator[Piece]:
        """Yield the documents of one source; `counts` counts what is found."""
        return source.pieces(self.how, counts)

    def beginning(self, n_bytes: int) -> tuple[list[str], int]:
        """Return the first texts of the first source, and the number of documents they end."""
        texts, size, documents = [], 0, 0
        for piece in self.pieces(self.sources[0]):
            texts.append(text_of(piece))
            documents += piece.last
            size += len(texts[-1].encode("utf-8"))
            if size >= n_bytes:
                break
        return texts, documents


def make_plan(
    config: DataConfig, sources: list[Source], tokenizer: Tokenizer | None = None
) -> Plan:
    """Decide how each source is split. Raises ConfigError for a source without text."""
    is_ids = config.tokenizer.startswith("ids:")
    n_ids = int(config.tokenizer.removeprefix("ids:")) if is_ids else 0
    chat = config.format == "chat"
    limit = config.max_documents or 0
    how = ReadOptions(config.text_field, config.errors, config.separator, n_ids, limit, chat)
    _check_applies(how, sources)
    splits = []
    for source in sources:
        if source.holds_ids:
            _check_ids(config, source, tokenizer)
        elif next(source.pieces(how), None) is None:
            option = "data.val_source" if source.validates else "data.source"
            raise ConfigError(f"{option}={source.spec} holds no text, or only white space")
        splits.append(_split(config, source, how))
    plan = Plan(config, sources, how, splits, tokenizer)
    if tokenizer is not None and tokenizer.name == "char":
        _check_characters(plan, tokenizer)
    return plan


def _check_applies(how: ReadOptions, sources: list[Source]) -> None:
    """Raise ConfigError for an option that applies to no file of the sources."""
    files = [file for source in sources for file in source.files]
    typed = how.text_field != ReadOptions().text_field and all(
        source.files for source in sources
    )  # no hub
    if typed and all(form_of(file, how) in ("text", "ids") for file in files):
        raise ConfigError(
            f"data.text_field={how.text_field}: no file of the source has fields, all are plain "
            "text or ids; JSON lines and arrays, .csv, .tsv, .parquet and .arrow have them"
        )
    if how.separator and all(form_of(file, how) != "text" for file in files):
        raise ConfigError(
            f"data.separator={how.separator!r}: no file of the source is plain text; in the others "
            "each row is a document already"
        )


def _check_ids(config: DataConfig, source: Source, tokenizer: Tokenizer | None) -> None:
    if config.format == "chat":
        raise ConfigError(f"data.source={source.spec} holds ids, not conversations")
    if config.max_documents is not None:
        raise ConfigError(
            f"data.max_documents={config.max_documents}: data.source={source.spec} holds ids "
            "without documents; leave the option out"
        )
    if config.split == "document" or tokenizer is None:
        raise ConfigError(
            f"data.source={source.spec} holds ids, not text: name the tokenizer that made them "
            f"(--tokenizer={config.tokenizer} is made from text), and use --split=auto or tail"
        )


def _split(config: DataConfig, source: Source, how: ReadOptions) -> Split:
    if source.validates:
        return Split("only", 1)
    if config.val_source:
        return Split("rest", 0)
    if source.val_files and config.split == "auto":
        return Split("files", config.val_fraction)
    if source.holds_ids:
        return Split("tail" if config.val_fraction else "none", config.val_fraction)
    return resolve_split(config.split, config.val_fraction, source.pieces(how), how.chat)


def _check_characters(plan: Plan, tokenizer: Tokenizer) -> None:
    """Raise ConfigError that lists every character that the char tokenizer of a run lacks."""
    alphabet = b"".join(tokenizer.table).decode("utf-8")
    known = np.zeros(0x110000, dtype=bool)  # for every Unicode character
    known[code_points(alphabet)] = True
    unknown: Counter[int] = Counter()
    for source in plan.sources:
        for piece in () if source.holds_ids else plan.pieces(source):
            points = code_points(text_of(piece))
            unknown.update(points[~known[points]].tolist())
    if unknown:
        raise unknown_characters({chr(code): n for code, n in unknown.items()}, alphabet)


# A tokenizer from the text


def make_tokenizer(plan: Plan, say: Say, sample_bytes: int = SAMPLE_BYTES) -> Tokenizer:
    """Make the tokenizer that the config names, char or bpe:N, from the plan's text."""
    name = plan.config.tokenizer
    if name == "char":
        return char_tokenizer(*_alphabet(plan))
    say(f"training {name} on up to {sample_bytes >> 20} MB of the training text")
    vocab_size = int(name.split(":")[1])
    tokenizer = train_bpe(name, vocab_size, _sample(plan, sample_bytes))
    if tokenizer.vocab_size < vocab_size:
        say(f"{name}: the text is too small for that many ids; using {tokenizer.vocab_size}")
    return tokenizer


def _alphabet(plan: Plan) -> tuple[str, bool]:
    """(the distinct characters of the text, sorted; whether there are several documents)."""
    seen = np.zeros(0x110000, dtype=bool)
    documents = 0
    for source in plan.sources:
        for piece in plan.pieces(source):
            seen[code_points(text_of(piece))] = True
            documents += piece.first
    return "".join(map(chr, np.flatnonzero(seen))), documents > 1


def _sample(plan: Plan, sample_bytes: int) -> Iterator[str]:
    """Yield at most sample_bytes of training text, chosen by hash from the start of each source."""
    # Not strict: the sources that only validate come last and have no weight.
    for source, split, weight in zip(plan.sources, plan.splits, plan.weights, strict=False):
        left = sample_bytes * weight
        size = 0 if plan.how.max_documents else source.size  # else unknown: take what comes first
        share = left / min(max(size, left), SAMPLE_SPAN * left)
        for part in split.parts(plan.pieces(source)):
            if part.split == "train" and (share == 1 or is_chosen(part.text, share, b"sample")):
                yield text_of(part)
                left -= len(part.text.encode("utf-8"))
                if left <= 0:
                    break


# The build


class Journal:
    """The progress of a build: a file with one JSON line per group of finished shards.

    It is only appended to, so that the time for it does not grow with the number of shards.
    """

    def __init__(self, path: Path, n_sources: int) -> None:
        self.path = path
        self.done = [(0, False)] * n_sources  # (tasks done, whether that is all) of each source
        self.shards: list[Shard] = []

    def add(self, source: int, tasks: int, complete: bool, shards: list[Shard]) -> None:
        """Record, synced to disk, that these shards hold the source's tasks up to `tasks`."""
        entry = [source, tasks, complete, [asdict(shard) for shard in shards]]
        with self.path.open("ab") as stream:
            stream.write(json.dumps(entry).encode() + b"\n")
            sync(stream)
        self.done[source] = tasks, complete
        self.shards += shards

    def read(self) -> None:
        """Read the file, and cut off a last line that a kill has torn."""
        good = 0
        with self.path.open("r+b") as stream:
            for line in stream:
                try:
                    source, tasks, complete, shards = json.loads(line)
                    shards = [Shard(**shard) for shard in shards]
                    if not line.endswith(b"\n"):
                        break
                    self.done[source] = tasks, complete
                except (ValueError, TypeError, IndexError):
                    break
                self.shards += shards
                good += len(line)
            stream.truncate(good)


class Build:
    """The build of one prepared folder, whose name ends in the key of `made_from`.

    It is built as `.KEY.partial` and renamed when it is complete.

    stamps: of each source's files, taken before their content was hashed.
    """

    def __init__(
        self,
        plan: Plan,
        made_from: dict[str, Any],
        stamps: list[list[Stamp]],
        folder: Path,
        say: Say,
    ) -> None:
        self.plan, self.stamps, self.folder, self.say = plan, stamps, folder, say
        self.partial = partial_folder(folder.parent, key_of(made_from))
        self.journal = Journal(self.partial / PROGRESS_FILE, len(plan.sources))
        if self.journal.path.is_file():
            self.journal.read()
            if self.journal.shards:
                say(f"continuing; shards already finished: {len(self.journal.shards)}")
        else:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            replace_file(self.partial / SOURCE_FILE, json_bytes(made_from))
            self.journal.path.touch()
        self.tokenizer = self._saved_tokenizer()
        self.dtype = dtype_for(self.tokenizer.vocab_size)

    def run(self, progress: bool, shard_bytes: int) -> Meta:
        """Build the folder. progress: show a bar; shard_bytes: of text per shard."""
        from tqdm import tqdm

        sources = self.plan.sources
        with tqdm(
            total=sum(source.size for source in sources) or None,
            unit="B",
            unit_scale=True,
            bar_format="preparing  {percentage:.0f}%  {bar}  {n_fmt}/{total_fmt}  {rate_fmt}",
            disable=None if progress else True,  # None: unless stderr is a terminal
        ) as bar:
            for number, source in enumerate(sources):
                if self.journal.done[number][1]:
                    bar.update(source.size)
                    continue
                counts = ReadCounts(_end_texts(self.tokenizer))
                self._write_shards(number, self._encoded(number, bar, counts), shard_bytes)
                for line in counts.lines(self.plan.config.separator):
                    self.say(f"{source.spec}: {line}")
            if bar.total:
                bar.update(bar.total - bar.n)
        return self._finish()

    def _saved_tokenizer(self) -> Tokenizer:
        """Load the tokenizer of this build, which is made once and saved in its folder."""
        path = self.partial / "tokenizer"
        if not path.is_dir():
            tokenizer = self.plan.tokenizer or make_tokenizer(self.plan, self.say)
            if self.plan.how.chat:
                tokenizer = chat_tokenizer(tokenizer)
            for number in range(len(self.plan.sources)):
                self._check_unchanged(number)
            tokenizer.save(self.partial / "tokenizer.tmp")
            os.rename(self.partial / "tokenizer.tmp", path)
        return load_tokenizer(path)

    def _encoded(self, number: int, bar: Any, counts: ReadCounts) -> Iterator[Encoded]:
        """Yield the ids of one source, task by task, except for the tasks that are done."""
        plan, skip = self.plan, self.journal.done[number][0]
        source, split = plan.sources[number], plan.splits[number]
        if source.holds_ids:
            ids = encoded_ids(source, split, self.tokenizer, self.dtype, plan.config.ids)
            results: Iterator[Encoded] = islice(ids, skip, None)
        else:
            tasks = grouped(split.parts(plan.pieces(source, counts)))
            for _ in range(skip):
                bar.update(sum(part.read for part in next(tasks)))
            function = encode_chat_task if plan.how.chat else encode_task
            encode = bind(function, self.partial / "tokenizer", self.dtype)
            results = in_order(encode, tasks, plan.workers(source.size))
        for result in results:
            bar.update(result.read if source.files else result.bytes)
            yield result

    def _write_shards(self, number: int, results: Iterator[Encoded], shard_bytes: int) -> None:
        """Write the ids of one source, with one shard per split for every shard_bytes of text."""
        writers: dict[str, ShardWriter] = {}
        tasks = self.journal.done[number][0]

        def finish(complete: bool) -> None:
            # First, so that the journal lists no shard of other content than the folder is named
            # for, whatever happens next.
            self._check_unchanged(number)
            closed = [writers.pop(split).close() for split in sorted(writers)]
            shards = [shard for shard in closed if shard is not None]
            self.journal.add(number, tasks, complete, shards)

        try:
            for result in results:
                for split, some in result.splits.items():
                    if split not in writers:
                        writers[split] = ShardWriter(self.partial, split, number, tasks, self.dtype)
                    writers[split].append(some.ids, some.starts, some.mask, **some.counts)
                tasks += 1
                # Ids that stand for no text count as one byte each.
                if sum(w.counts["bytes"] or w.tokens for w in writers.values()) >= shard_bytes:
                    finish(complete=False)
            finish(complete=True)
        finally:
            for writer in writers.values():
                writer.abandon()

    def _check_unchanged(self, number: int) -> None:
        if not looks_unchanged(self.plan.sources[number], self.stamps[number]):
            raise self._changed()

    def _changed(self) -> ConfigError:
        source = self.plan.config.source
        return ConfigError(f"data.source={source} changed while it was read: run the command again")

    def _finish(self) -> Meta:
        """Write meta.json and give the folder its name."""
        plan, shards = self.plan, self.journal.shards
        meta = Meta(
            source=plan.config.source,
            tokenizer=self.tokenizer.name,
            vocab_size=self.tokenizer.vocab_size,
            dtype=self.dtype,
            fingerprint=fingerprint(read_tokenizer(self.partial), self.dtype, plan.weights, shards),
            splits=[split.mode for split in plan.splits],
            weights=plan.weights,
            shards=shards,
        )
        self._check_splits(meta)
        if self.stamps != [stamps_of(source) for source in plan.sources]:
            shutil.rmtree(self.partial)  # it may mix the old content with the new
            raise self._changed()
        if self.folder.exists():
            raise ConfigError(
                f"{self.folder} is in the way; it has no {META_FILE}, so it is not prepared data: "
                "move or delete it"
            )
        write_meta(self.partial, meta)
        os.rename(self.partial, self.folder)
        sync_folder(self.folder.parent)
        (self.folder / PROGRESS_FILE).unlink(missing_ok=True)  # last: needed to continue until here
        return meta

    def _check_splits(self, meta: Meta) -> None:
        """Raise ConfigError if a split is empty, and leave nothing behind."""
        needed = {"none": ["train"], "rest": ["train"], "only": ["val"]}
        config = self.plan.config
        for number, source in enumerate(self.plan.sources):
            for split in needed.get(meta.splits[number], SPLITS):
                if not meta.of(split, number):
                    shutil.rmtree(self.partial)
                    mode = meta.splits[number]
                    other = "" if mode == "tail" else "--split=tail, "
                    raise ConfigError(
                        f"data.source={source.spec}: the {split} split is empty "
                        f"(data.split={mode}, data.val_fraction={config.val_fraction}): "
                        f"use more text, {other}or another --val_fraction"
                    )


def _end_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Spellings of an end-of-text: the usual one and this tokenizer's own."""
    own = [text for text, token in tokenizer.special.items() if token == tokenizer.eot]
    return tuple(dict.fromkeys([END_OF_TEXT, *own]))
