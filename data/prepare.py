"""Prepare data: text to ids to shards, once per content, tokenizer and options.

    python -m data.prepare --source=my.txt --tokenizer=bpe:4096     prepare it
    python -m data.prepare --source=my.txt --dry_run                show what would be done
    python -m data.prepare --source=my.txt --verify                 check every byte
    python -m data.prepare --list                                   list what has been prepared
    python -m data.prepare --remove=NAME                            delete one of these folders

A folder is built shard by shard as `.KEY.partial` and renamed when it is complete. After a kill the
same command continues behind the last finished shard.
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

import numpy as np

from cli.command import Say, make_folder, run_command
from cli.files import named_in_errors, try_lock
from cli.options import ConfigError, parse_sections
from cli.terminal import clock_text, counted, print_line
from data.build import Build, Plan, make_plan, make_tokenizer
from data.config import DataConfig
from data.meta import dtype_for, read_meta, summary, verify
from data.prepared import (
    content_of,
    delete_left,
    find_key,
    is_complete,
    key_of,
    last_digest,
    list_folders,
    lock,
    near,
    note_use,
    read_made_from,
    remove_folder,
    stamps_of,
    unreadable,
)
from data.sources import STDIN, Source, open_sources, parse_mixture, parts_of
from data.tokenizer import (
    CHATML,
    KIND_FILE,
    Tokenizer,
    chat_tokenizer,
    ready_tokenizer,
    split_pattern,
)

BY_CONTENT = ("hf:", "run:")  # tokenizers that are identified by their files, not by their name
FORMAT = 2  # of prepared folders; part of the key, so another format gets another folder
SHARD_BYTES = 128 << 20  # of text
READ_BYTES = 1 << 20
TRIAL_BYTES = 4 << 20  # of text that a dry run encodes
SHOWN_IDS = 40


def prepare(
    config: DataConfig,
    *,
    say: Say = print_line,
    progress: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Return the folder of shards for these options, and build it if it does not exist.

    One process builds; others that need the same folder wait for it. Raises ConfigError if a source
    cannot be read, OSError if the disk cannot be written.
    """
    with named_in_errors(prepared_root(config)), _standard_input(config) as spool:
        try:
            sources = _opened(config, spool)
        except ConfigError as error:
            folder = _prepared_before(config)
            if folder is None:
                raise
            say(f"{error}; using {folder}, which was prepared from it")
        else:
            folder = _prepare(config, sources, say, progress, shard_bytes)
    note_use(folder)
    return folder


def _prepare(
    config: DataConfig, sources: list[Source], say: Say, progress: bool, shard_bytes: int
) -> Path:
    root = prepared_root(config)
    before = [last_digest(source.spec, root) for source in sources]
    contents = [content_of(source, root, say) for source in sources]
    made_from = _made_from(config, [content.digest for content in contents])
    folder = _folder_for(config, made_from)
    if is_complete(folder):
        return folder
    with lock(root / f".{key_of(made_from)}.lock", say):
        folder = _folder_for(config, made_from)
        if is_complete(folder):  # another process built it meanwhile
            return folder
        for source, old, content in zip(sources, before, contents, strict=True):
            if old not in ("", content.digest):
                say(f"{source.spec} has changed since it was prepared: preparing it again")
        tokenizer = ready_tokenizer(config.tokenizer)  # first: it may not exist
        for source in sources:
            for note in source.notes:
                say(f"{source.spec}: {note}")
        if config.val_source:
            say(
                f"{config.val_source} is the validation text: data.split and data.val_fraction are "
                "not used, and files of the source named for validation are left out"
            )
        plan = make_plan(config, sources, tokenizer)
        stamps = [content.stamps for content in contents]
        meta = Build(plan, made_from, stamps, folder, say).run(progress, shard_bytes)
        say(f"prepared {near(folder)}: {summary(meta)}")
    return folder


@contextmanager
def _standard_input(config: DataConfig) -> Iterator[Path | None]:
    """Save standard input in a file, which can be read twice and is deleted at the end; None if no
    source is standard input. Raises ConfigError if it is empty."""
    option = {spec: "val_source" if not weight else "source" for spec, weight in parts_of(config)}
    if STDIN not in option:
        yield None
        return
    root = prepared_root(config)
    make_folder(root, "data.prepared_dir")
    delete_left(root, ".stdin-*")
    spool = root / f".stdin-{os.getpid()}"
    try:
        with spool.open("wb") as stream:
            try_lock(stream)
            if not sys.stdin.isatty():
                shutil.copyfileobj(sys.stdin.buffer, stream, READ_BYTES)
                stream.flush()
            if stream.tell() == 0:
                raise ConfigError(
                    f"data.{option[STDIN]}=-: standard input is empty; pipe the text in (a run "
                    "that has a checkpoint can do without it)"
                )
            yield spool
    finally:
        spool.unlink(missing_ok=True)


def _opened(config: DataConfig, spool: Path | None = None) -> list[Source]:
    try:
        return open_sources(config, spool)
    except OSError as error:  # no permission for a parent folder, for example
        raise unreadable(error.filename, error) from error


def find_sources(config: DataConfig) -> None:
    """Raise ConfigError if a source is not there. Nothing is read, and the Hub is not asked."""
    if STDIN not in [spec for spec, _ in parts_of(config)]:
        _opened(config)


def _prepared_before(config: DataConfig) -> Path | None:
    """The complete folder of sources that no longer exist, if their content was ever hashed."""
    with contextlib.suppress(ConfigError):
        folder = prepared_folder(config, read=False)
        return folder if is_complete(folder) else None
    return None


# The folder of a config: its name ends in a hash of all that determines the ids


def prepared_root(config: DataConfig) -> Path:
    """The folder that holds the prepared folders."""
    return Path(config.prepared_dir or Path(__file__).parent / "prepared")


def prepared_folder(config: DataConfig, *, read: bool = True) -> Path:
    """The folder that holds, or will hold, the data of these options.

    read: hash the sources; otherwise, or if they no longer exist, use their last known hashes.
    Raises ConfigError if their content is neither readable nor known.
    """
    root = prepared_root(config)
    digests = [last_digest(spec, root) for spec, _ in parts_of(config)]
    if not read and not all(digests):
        raise ConfigError(f"data.source={config.source} has not been prepared")
    if read:
        try:
            digests = [content_of(source, root).digest for source in _opened(config)]
        except ConfigError:
            if not all(digests):
                raise
    return _folder_for(config, _made_from(config, digests))


def _folder_for(config: DataConfig, made_from: dict[str, Any]) -> Path:
    """The complete folder made from this, by whatever name, or else the one to be made."""
    root, key = prepared_root(config), key_of(made_from)
    first = parse_mixture(config.source)[0][0]
    name = re.sub(r"\W+", "_", first.rstrip("/").rpartition("/")[2]).strip("_") or "data"
    tokenizer = re.sub(r"\W+", "", config.tokenizer.rstrip("/").rpartition("/")[2])
    return find_key(root, key) or root / f"{name[:40]}-{tokenizer[:40]}-{key}"


def _made_from(config: DataConfig, digests: list[str]) -> dict[str, Any]:
    """All that determines the ids, and how the sources were typed."""
    sources = [
        {"spec": spec, "weight": weight, "digest": digest}
        for (spec, weight), digest in zip(parts_of(config), digests, strict=True)
    ]
    options = [config.split, config.val_fraction, config.text_field, config.errors]
    part = [f"max_documents={config.max_documents}"] if config.max_documents else []
    return {
        "format": FORMAT,
        "sources": sources,
        "tokenizer": _identity(config),
        "options": [*options, config.separator, config.ids, *part, *_chat_options(config)],
    }


def _chat_options(config: DataConfig) -> list[str]:
    """The format and the chat template, if the rows are conversations; nothing for text."""
    if config.format != "chat":
        return []
    known = ready_tokenizer(config.tokenizer)
    return [config.format, CHATML if known is None else chat_tokenizer(known).chat_template]


def _identity(config: DataConfig) -> str:
    """Identify a tokenizer: by its name if that determines it, otherwise by its files' content."""
    name = config.tokenizer
    if not name.startswith(BY_CONTENT):
        return name + split_pattern(name) if name.startswith("bpe:") else name
    try:
        tokenizer = ready_tokenizer(name)
    except OSError as error:  # the user's mistake, not a disk that cannot be written
        raise ConfigError(f"data.tokenizer={name}: cannot be read: {error}") from error
    assert tokenizer is not None  # a name in BY_CONTENT is never made from the text
    # KIND_FILE holds a path.
    files = {file: text for file, text in tokenizer.files.items() if file != KIND_FILE}
    does: list[object] = [sorted(files.items()), tokenizer.eot, tokenizer.bos]
    if name.startswith("run:"):  # may be of any kind, also one without files
        does.append(list(tokenizer.table))
    return hashlib.sha256(repr(does).encode()).hexdigest()


# The data of a run that is resumed


def difference_from(folder: Path, config: DataConfig, began_with: DataConfig, say: Say) -> str:
    """Explain why `folder`, which a run was trained on, is not what `config` names; "" if it is.

    Content decides: a source may have moved since the run began with the options `began_with`, and
    one that no longer exists, or came on standard input, is not needed. A line says so.
    """
    named, before = source_options(config), source_options(began_with)
    root, made_from = prepared_root(config), read_made_from(folder)
    then = [(source["digest"], source["weight"]) for source in made_from["sources"]]
    try:
        with _standard_input(config) as spool:
            digests = [content_of(s, root, say).digest for s in _opened(config, spool)]
    except ConfigError as error:
        if named != before:
            raise
        say(f"{error}; resuming with {folder}, which was prepared from it")
        digests = [digest for digest, _ in then]
    weights = [weight for _, weight in parts_of(config)]
    if list(zip(digests, weights, strict=True)) != then:
        return f"data.{named}: its content is not what the run was trained on"
    if named != before:
        say(f"data.{named} has the same content as {before}; resuming")
    if not config.tokenizer.startswith(BY_CONTENT):
        return ""
    try:
        same = _identity(config) == made_from.get("tokenizer")
    except ConfigError as error:
        say(f"{error}; resuming with the tokenizer in {folder}")
        return ""
    other = f"data.tokenizer={config.tokenizer}: not the tokenizer that the run was trained with"
    return "" if same else other


def source_options(config: DataConfig) -> str:
    """The options that name the sources, as they would be typed."""
    val = f" --val_source={config.val_source}" if config.val_source else ""
    return f"source={config.source}{val}"


# A dry run


def preview(config: DataConfig, say: Say = print_line) -> None:
    """Report what would be read and made and how long it would take, with a document's tokens."""
    tokenizer, sources = ready_tokenizer(config.tokenizer), open_sources(config)
    for source in sources:
        stamps_of(source)  # raises if a file cannot be read
    plan = make_plan(config, sources, tokenizer)
    for source, split, (_, weight) in zip(sources, plan.splits, parts_of(config), strict=True):
        size = (
            f"{counted(len(source.files), 'file')}, {source.size / 1e6:,.1f} MB, "
            if source.files
            else ""
        )
        say(f"source {source.spec}: {size}weight {weight:.3g}, split: {split.mode}")
        for note in source.notes:
            say(f"{source.spec}: {note}")
    if not any(source.holds_ids for source in sources) and (tokenizer is None or tokenizer.spells):
        _try(plan, tokenizer or make_tokenizer(plan, say, TRIAL_BYTES), say)


def _try(plan: Plan, tokenizer: Tokenizer, say: Say) -> None:
    """Encode the beginning of the text, and extrapolate to the whole."""
    texts, documents = plan.beginning(TRIAL_BYTES)
    size = sum(len(text.encode("utf-8")) for text in texts)
    started = time.perf_counter()
    tokens = sum(len(tokenizer.encode_array(text)) for text in texts)
    seconds = time.perf_counter() - started
    total = sum(source.size for source in plan.sources) or size
    if plan.how.max_documents:
        total = min(total, size * plan.how.max_documents // max(1, documents))
    processes = max(1, plan.workers(total))
    item = np.dtype(dtype_for(tokenizer.vocab_size)).itemsize
    say(
        f"about {total * tokens / size:,.0f} tokens ({size / tokens:.2f} bytes per token), "
        f"{total * tokens / size * item / 1e6:,.1f} MB of shards, "
        f"{clock_text(total * seconds / size / processes)} with "
        f"{counted(processes, 'process', 'processes')}"
    )
    ids = list(islice(tokenizer.encode(texts[0][:1000]), SHOWN_IDS))
    say(f"first document: {'|'.join(tokenizer.decode([i]) for i in ids)!r}")
    say(f"first ids: {ids}")


# The command


@dataclass(frozen=True)
class Actions:
    """Actions other than preparing."""

    dry_run: Annotated[bool, "show what would be done, without doing it"] = False
    verify: Annotated[bool, "check every byte of the prepared data"] = False
    list: Annotated[bool, "list what has been prepared: name, size, last use, source"] = False
    remove: Annotated[str, "delete the prepared folder of this name"] = ""


def main(argv: list[str]) -> int:
    """Run the command: prepare, or the action given instead."""
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
        print_line(f"folder {near(folder)}: {'exists' if is_complete(folder) else 'would be made'}")
    elif actions.verify:
        verify(prepared_folder(config))
    else:
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            print_line(text)

        folder = prepare(config, say=say)
        if not any(text.startswith("prepared ") for text in said):
            print_line(f"{near(folder)} is up to date: {summary(read_meta(folder))}")
    return 0


if __name__ == "__main__":
    run_command(main, outlives_output=True)
