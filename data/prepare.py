"""Text to ids to shards, once for each source and tokenizer.

    python -m data.prepare --source=my.txt --tokenizer=bpe:4096     prepare it
    python -m data.prepare --source=my.txt --dry_run                say what would happen
    python -m data.prepare --source=my.txt --verify                 check every byte of it

A folder is made as `.NAME.partial`, shard by shard, and renamed when it is complete; killed on the
way, the same command continues after the last finished shard.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from data.bpe import SPLIT_PATTERN
from data.build import build
from data.command import run_command
from data.config import DataConfig
from data.meta import META_FILE, read_meta
from data.options import ConfigError, parse_sections
from data.plan import Say, make_plan
from data.pretrained import opening_ids
from data.preview import preview
from data.record import has_same_content, is_complete, is_current, lock, source_record
from data.sources import STDIN, Source, absolute, open_source, parse_mixture
from data.tokenizer import ready_tokenizer
from data.verify import summary, verify

FORMAT = 2  # of the prepared folder; another one is another folder
SHARD_BYTES = 128 << 20  # of text
READ_BYTES = 1 << 20


def prepared_folder(config: DataConfig) -> Path:
    """Where the data of these options is, or will be: source + tokenizer + hash of the options."""
    root = Path(config.prepared_dir or Path(__file__).parent / "prepared")
    key = hashlib.sha256(json.dumps(_what_matters(config)).encode()).hexdigest()[:8]
    first = parse_mixture(config.source)[0][0]
    name = re.sub(r"\W+", "_", first.rstrip("/").rpartition("/")[2]).strip("_")
    tokenizer = re.sub(r"\W+", "", config.tokenizer.rstrip("/").rpartition("/")[2])
    return root / f"{name[:40] or 'data'}-{tokenizer[:40]}-{key}"


def _what_matters(config: DataConfig) -> list:
    """Everything but the sources' content that determines the ids."""
    sources = [[_identity(spec), weight] for spec, weight in parse_mixture(config.source)]
    tokenizer = config.tokenizer
    file = Path(tokenizer.removeprefix("hf:")).expanduser() / "tokenizer.json"
    if tokenizer.startswith("hf:") and file.is_file():
        tokenizer = hashlib.sha256(file.read_bytes()).hexdigest()
        tokenizer += "".join(f" {i}" for i in opening_ids(file.read_text(encoding="utf-8")))
    elif tokenizer.startswith("bpe:"):
        tokenizer += SPLIT_PATTERN
    options = [config.split, config.val_fraction, config.text_field, config.errors]
    return [FORMAT, sources, tokenizer, *options]


def _identity(spec: str) -> str:
    if spec == "stdlib":  # every Python has its own
        return f"stdlib {'.'.join(map(str, sys.version_info[:3]))}"
    return spec if spec == STDIN or spec.startswith("hub:") else str(absolute(spec))


def prepare(
    config: DataConfig,
    *,
    say: Say = print,
    progress: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """The folder of shards of these options, made if it is not there or no longer current.

    One process prepares; others that ask for the same wait and find it. Raises ConfigError for what
    cannot be read, OSError for a disk that cannot be written.
    """
    folder = prepared_folder(config)
    parts = parse_mixture(config.source)
    from_stdin = STDIN in [spec for spec, _ in parts]
    if not from_stdin and _is_there(folder, parts, say):
        return folder
    spool = folder.with_name(f".{folder.name}.stdin")
    try:
        with lock(folder.with_name(f".{folder.name}.lock"), say), _removed(spool):
            if from_stdin and not _spool(spool) and is_complete(folder):
                say(f"nothing came on standard input; using {folder}, prepared from what once came")
                return folder
            sources = [open_source(spec, spool) for spec, _ in parts]
            if not is_current(folder, sources):  # nobody has made it while we waited
                weights = [weight for _, weight in parts]
                _prepare(config, sources, weights, folder, say, progress, shard_bytes)
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise
    return folder


@contextmanager
def _removed(file: Path) -> Iterator[None]:
    """Remove a file at the end, whatever happens."""
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _is_there(folder: Path, parts: list[tuple[str, float]], say: Say) -> bool:
    """Whether the folder can be used without reading the sources."""
    try:
        sources = [open_source(spec) for spec, _ in parts]
    except ConfigError as error:
        if not is_complete(folder):
            raise
        say(f"{error}; using {folder}, which was prepared from it")
        return True
    return is_current(folder, sources)


def _spool(spool: Path) -> bool:
    """Keep standard input in a file, which can be read twice; False if nothing comes."""
    spool.parent.mkdir(parents=True, exist_ok=True)
    with spool.open("wb") as stream:
        if not sys.stdin.isatty():
            shutil.copyfileobj(sys.stdin.buffer, stream, READ_BYTES)
        return stream.tell() > 0


def _prepare(
    config: DataConfig,
    sources: list[Source],
    weights: list[float],
    folder: Path,
    say: Say,
    progress: bool,
    shard_bytes: int,
) -> None:
    tokenizer = ready_tokenizer(config.tokenizer)  # first: it may not be there
    record = source_record(sources)
    if has_same_content(folder, record):
        return
    if is_complete(folder):
        name = "standard input" if config.source == STDIN else config.source
        say(f"{name} has changed since it was prepared: preparing it anew")
    for source in sources:
        for note in source.notes:
            say(f"{source.spec}: {note}")
    plan = make_plan(config, sources, weights, tokenizer)
    say(f"prepared {folder}: {summary(build(plan, record, folder, say, progress, shard_bytes))}")


def _completed_at(folder: Path) -> int | None:
    """When a folder was prepared to the end; None if it was not."""
    return (folder / META_FILE).stat().st_mtime_ns if is_complete(folder) else None


@dataclass(frozen=True)
class Actions:
    """What to do other than to prepare."""

    dry_run: Annotated[bool, "say what would happen, and prepare nothing"] = False
    verify: Annotated[bool, "check every byte of what was prepared"] = False


def main(argv: list[str]) -> int:
    """The command: prepare, or what is asked for instead."""
    usage = "python -m data.prepare [--source=... --tokenizer=...] [--dry_run | --verify]"
    sections, _ = parse_sections(argv, {"data": DataConfig, "": Actions}, usage=usage)
    config, actions = sections["data"], sections[""]
    if actions.dry_run:
        preview(config)
        folder = prepared_folder(config)
        print(f"folder {folder}: {'is there' if is_complete(folder) else 'would be made'}")
    elif actions.verify:
        verify(prepared_folder(config))
    else:
        before = _completed_at(prepared_folder(config))
        folder = prepare(config)
        if _completed_at(folder) == before:
            print(f"{folder} is there: {summary(read_meta(folder))}")
    return 0


if __name__ == "__main__":
    run_command(main, outlives_output=True)
