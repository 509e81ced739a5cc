"""Text to ids to shards, once for each content, tokenizer and options.

    python -m data.prepare --source=my.txt --tokenizer=bpe:4096     prepare it
    python -m data.prepare --source=my.txt --dry_run                say what would happen
    python -m data.prepare --source=my.txt --verify                 check every byte of it
    python -m data.prepare --list                                   what has been prepared
    python -m data.prepare --remove=NAME                            delete one of these

A folder is made as `.KEY.partial`, shard by shard, and renamed when it is complete; killed on the
way, the same command continues after the last finished shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from cli.command import Say, make_folder, run_command
from cli.files import try_lock
from cli.options import ConfigError, parse_sections
from data.build import Plan, build, make_plan, make_tokenizer
from data.config import DataConfig
from data.encode import n_workers
from data.meta import read_meta, summary, verify
from data.prepared import (
    Content,
    content_of,
    delete_left,
    find_key,
    is_complete,
    key_of,
    last_digest,
    list_folders,
    lock,
    note_use,
    read_made_from,
    remove_folder,
    stamps_of,
    unreadable,
)
from data.sources import STDIN, Source, open_sources, parse_mixture, parts_of
from data.tokenizer import FILE, SPLIT_PATTERN, Tokenizer, ready_tokenizer

# What preparing would do, without doing it.

TRIAL_BYTES = 4 << 20  # that are encoded
SHOWN_IDS = 40


def preview(config: DataConfig, say: Say = print) -> None:
    """Say what preparing would read, make and take, and show the first document's tokens."""
    ready = ready_tokenizer(config.tokenizer)
    sources, weights = open_sources(config), [weight for _, weight in parts_of(config)]
    for source in sources:
        stamps_of(source)  # raises if a file cannot be read
    plan = make_plan(config, sources, weights, ready)
    for source, split, weight in zip(sources, plan.splits, weights, strict=True):
        size = f"{len(source.files):,} files, {source.size / 1e6:,.1f} MB, " if source.files else ""
        say(f"source {source.spec}: {size}weight {weight:.3g}, split: {split.mode}")
        for note in source.notes:
            say(f"{source.spec}: {note}")
    if not any(source.holds_ids for source in sources) and (ready is None or ready.spells):
        _try(plan, ready or make_tokenizer(plan, say, TRIAL_BYTES), say)


def _try(plan: Plan, tokenizer: Tokenizer, say: Say) -> None:
    """Encode the beginning of the text, and say what follows from it for the whole."""
    texts, size = [], 0
    for piece in plan.pieces(plan.sources[0]):
        texts.append(piece.text)
        size += len(piece.text.encode("utf-8"))
        if size >= TRIAL_BYTES:
            break
    started = time.perf_counter()
    tokens = sum(len(tokenizer.encode_array(text)) for text in texts)
    seconds = time.perf_counter() - started
    total = sum(source.size for source in plan.sources) or size
    processes = max(1, n_workers(plan.config.workers, total))
    item = 2 if tokenizer.vocab_size <= 1 << 16 else 4
    say(
        f"about {total * tokens / size:,.0f} tokens ({size / tokens:.2f} bytes a token), "
        f"{total * tokens / size * item / 1e6:,.1f} MB of shards, "
        f"{total * seconds / size / processes:.0f} s with {processes} processes"
    )
    ids = list(islice(tokenizer.encode(texts[0][:1000]), SHOWN_IDS))
    say(f"first document: {'|'.join(tokenizer.decode([i]) for i in ids)!r}")
    say(f"first ids: {ids}")


FORMAT = 2  # of the prepared folder; another one is another folder
SHARD_BYTES = 128 << 20  # of text
READ_BYTES = 1 << 20


def prepared_root(config: DataConfig) -> Path:
    """The folder that prepared folders lie in."""
    return Path(config.prepared_dir or Path(__file__).parent / "prepared")


def prepared_folder(config: DataConfig, *, read: bool = True) -> Path:
    """Where the data of these options is, or will be.

    read: hash the sources, unless they are known; else take them for what they last were.
    Raises ConfigError if it is not known, and cannot be read, what they hold.
    """
    root = prepared_root(config)
    made_from = _made_from(config, _digests(config, root, read), _ready(config))
    return _folder_for(config, root, made_from)


def _folder_for(config: DataConfig, root: Path, made_from: dict[str, Any]) -> Path:
    """The complete folder made from this, or else the one that it would be: what is prepared, the
    tokenizer, and the key."""
    first = parse_mixture(config.source)[0][0]
    name = re.sub(r"\W+", "_", first.rstrip("/").rpartition("/")[2]).strip("_") or "data"
    tokenizer = re.sub(r"\W+", "", config.tokenizer.rstrip("/").rpartition("/")[2])
    key = key_of(made_from)
    return find_key(root, key) or root / f"{name[:40]}-{tokenizer[:40]}-{key}"


def _made_from(config: DataConfig, digests: list[str], ready: Tokenizer | None) -> dict[str, Any]:
    """All that determines the ids, and the spelling of the sources for the reader."""
    sources = [
        {"spec": spec, "weight": weight, "digest": digest}
        for (spec, weight), digest in zip(parts_of(config), digests, strict=True)
    ]
    return {
        "format": FORMAT,
        "sources": sources,
        "tokenizer": _identity(config.tokenizer, ready),
        "options": _what_matters(config),
    }


def _what_matters(config: DataConfig) -> list:
    """The options, apart from source and tokenizer, that determine the ids."""
    options = [config.split, config.val_fraction, config.text_field, config.errors]
    return [*options, config.separator, config.ids]


def _identity(name: str, ready: Tokenizer | None) -> str:
    """What a tokenizer does: by name if that says it all, else by the content of its files."""
    if ready is not None:
        files = {file: text for file, text in ready.files.items() if file != FILE}  # it has a path
        does = [sorted(files.items()), ready.eot, ready.bos]
        if name.startswith("run:"):  # of any kind
            does.append(list(ready.table))
        return hashlib.sha256(repr(does).encode()).hexdigest()
    return name + SPLIT_PATTERN if name.startswith("bpe:") else name


def _ready(config: DataConfig) -> Tokenizer | None:
    """The tokenizer, if only its files say what it is."""
    if not config.tokenizer.startswith(("hf:", "run:")):
        return None
    try:
        return ready_tokenizer(config.tokenizer)
    except OSError as error:  # a mistake, and no disk that cannot be written
        raise ConfigError(f"data.tokenizer={config.tokenizer}: cannot be read: {error}") from error


def _digests(config: DataConfig, root: Path, read: bool) -> list[str]:
    """The content of each source; what it last was if one cannot, or shall not, be read."""
    last = [last_digest(spec, root) for spec, _ in parts_of(config)]
    if not read and not all(last):
        raise ConfigError(f"data.source={config.source} has not been prepared")
    try:
        return [content_of(s, root).digest for s in _opened(config)] if read else last
    except ConfigError:
        if not all(last):
            raise
        return last


def _opened(config: DataConfig, spool: Path | None = None) -> list[Source]:
    """The sources, with what came on standard input in the file `spool`."""
    try:
        return open_sources(config, spool)
    except OSError as error:  # a folder above one is closed to us, say
        raise unreadable(error.filename, error) from error


def prepare(
    config: DataConfig,
    *,
    say: Say = print,
    progress: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """The folder of shards of these options, made if it is not there.

    One process prepares; others that ask for the same wait and find it. Raises ConfigError for what
    cannot be read, OSError for a disk that cannot be written.
    """
    root = prepared_root(config)
    specs = [spec for spec, _ in parts_of(config)]
    try:
        with _standard_input(root) if STDIN in specs else contextlib.nullcontext() as spool:
            if spool is not None and spool.stat().st_size == 0:
                raise ConfigError(
                    "data.source=-: nothing came on standard input. A run that has a checkpoint "
                    "goes on without it; else pipe the text in again"
                )
            folder = _prepare(config, root, specs, spool, say, progress, shard_bytes)
    except OSError as error:
        error.filename = error.filename or str(root)
        raise
    note_use(folder)
    return folder


def _prepare(
    config: DataConfig,
    root: Path,
    specs: list[str],
    spool: Path | None,
    say: Say,
    progress: bool,
    shard_bytes: int,
) -> Path:
    """See `prepare`; what comes on standard input is in the file `spool`."""
    try:
        sources = _opened(config, spool)
    except ConfigError as error:
        folder = _prepared_before(config, specs)
        if folder is None:
            raise
        say(f"{error}; using {folder}, which was prepared from it")
        return folder
    before = [last_digest(spec, root) for spec in specs]
    contents = [content_of(source, root, say) for source in sources]
    made_from = _made_from(config, [content.digest for content in contents], _ready(config))
    folder = _folder_for(config, root, made_from)
    if is_complete(folder):
        return folder
    with lock(root / f".{key_of(made_from)}.lock", say):
        folder = _folder_for(config, root, made_from)
        if not is_complete(folder):  # nobody has made it while we waited
            for spec, old, content in zip(specs, before, contents, strict=True):
                if old not in ("", content.digest):
                    say(f"{spec} has changed since it was prepared: preparing it anew")
            _make(config, sources, contents, made_from, folder, say, progress, shard_bytes)
    return folder


def _prepared_before(config: DataConfig, specs: list[str]) -> Path | None:
    """The folder prepared from sources that are no longer there, if there is one."""
    if STDIN in specs:
        return None
    with contextlib.suppress(ConfigError):
        folder = prepared_folder(config)
        return folder if is_complete(folder) else None
    return None


@contextmanager
def _standard_input(root: Path) -> Iterator[Path]:
    """Standard input as a file, which can be read twice; it is deleted in the end."""
    make_folder(root, "data.prepared_dir")
    delete_left(root, ".stdin-*")
    spool = root / f".stdin-{os.getpid()}"
    try:
        with spool.open("wb") as stream:
            try_lock(stream)
            if not sys.stdin.isatty():
                shutil.copyfileobj(sys.stdin.buffer, stream, READ_BYTES)
                stream.flush()
            yield spool
    finally:
        spool.unlink(missing_ok=True)


def _make(
    config: DataConfig,
    sources: list[Source],
    contents: list[Content],
    made_from: dict[str, Any],
    folder: Path,
    say: Say,
    progress: bool,
    shard_bytes: int,
) -> None:
    tokenizer = ready_tokenizer(config.tokenizer)  # first: it may not be there
    for source in sources:
        for note in source.notes:
            say(f"{source.spec}: {note}")
    if config.val_source:
        say(
            f"{config.val_source} validates: data.split and data.val_fraction decide nothing, and "
            "files of the source that are named for validation are left out"
        )
    weights = [source["weight"] for source in made_from["sources"]]
    plan = make_plan(config, sources, weights, tokenizer)
    stamps = [content.stamps for content in contents]
    meta = build(plan, made_from, stamps, folder, say, progress, shard_bytes)
    say(f"prepared {folder}: {summary(meta)}")


def difference_from(folder: Path, config: DataConfig, began_with: DataConfig, say: Say) -> str:
    """Why `folder`, which a run was trained on, is not what its config names; "" if it is.

    Content decides: a source may lie elsewhere than `began_with`, the run's own, says, and one that
    is gone, or comes on standard input no more, is not needed. Each is said.
    """
    named, before = source_options(config), source_options(began_with)
    root, made_from = prepared_root(config), read_made_from(folder)
    then = [(source["digest"], source["weight"]) for source in made_from["sources"]]
    parts = parts_of(config)
    from_stdin = any(spec == STDIN for spec, _ in parts)
    with _standard_input(root) if from_stdin else contextlib.nullcontext() as spool:
        try:
            if spool is not None and spool.stat().st_size == 0:
                raise ConfigError("data.source=-: nothing came on standard input")
            digests = [content_of(s, root, say).digest for s in _opened(config, spool)]
        except ConfigError as error:
            if named != before:
                raise
            say(f"{error}; going on with {folder}, which was prepared from it")
            digests = [digest for digest, _ in then]
    weights = [weight for _, weight in parts]
    if list(zip(digests, weights, strict=True)) != then:
        return f"data.{named}: its content is not what the run was trained on"
    if named != before:
        say(f"data.{named} holds what {before} held; going on")
    return _tokenizer_difference(folder, config, made_from.get("tokenizer", ""), say)


def source_options(config: DataConfig) -> str:
    """What is read, as it would be typed."""
    return f"source={config.source}" + (
        f" --val_source={config.val_source}" * bool(config.val_source)
    )


def _tokenizer_difference(folder: Path, config: DataConfig, identity: str, say: Say) -> str:
    try:
        ready = _ready(config)
    except ConfigError as error:
        say(f"{error}; going on with the tokenizer in {folder}")
        return ""
    if ready is not None and _identity(config.tokenizer, ready) != identity:
        return f"data.tokenizer={config.tokenizer}: not the one that the run was trained with"
    return ""


@dataclass(frozen=True)
class Actions:
    """What to do other than to prepare."""

    dry_run: Annotated[bool, "say what would happen, and prepare nothing"] = False
    verify: Annotated[bool, "check every byte of what was prepared"] = False
    list: Annotated[bool, "list what was prepared: name, size, last use, source"] = False
    remove: Annotated[str, "delete the prepared folder of this name"] = ""


def main(argv: list[str]) -> int:
    """The command: prepare, or what is asked for instead."""
    usage = (
        "python -m data.prepare [--source=... --tokenizer=...] "
        "[--dry_run | --verify | --list | --remove=NAME]"
    )
    sections, _ = parse_sections(argv, {"data": DataConfig, "": Actions}, usage=usage)
    config, actions = sections["data"], sections[""]
    if (actions.dry_run or actions.verify) and STDIN in [spec for spec, _ in parts_of(config)]:
        option = "dry_run" if actions.dry_run else "verify"
        raise ConfigError(
            f"{option}=true: standard input (--{source_options(config)}) can be read only once, to "
            "prepare it; save the text in a file and name that"
        )
    if actions.list:
        list_folders(prepared_root(config))
    elif actions.remove:
        remove_folder(prepared_root(config), actions.remove)
    elif actions.dry_run:
        preview(config)
        folder = prepared_folder(config)
        print(f"folder {folder}: {'is there' if is_complete(folder) else 'would be made'}")
    elif actions.verify:
        verify(prepared_folder(config))
    else:
        made: list[str] = []
        folder = prepare(config, say=lambda text: made.append(text) or print(text))
        if not any(text.startswith(f"prepared {folder}") for text in made):
            print(f"{folder} is there: {summary(read_meta(folder))}")
    return 0


if __name__ == "__main__":
    run_command(main, outlives_output=True)
