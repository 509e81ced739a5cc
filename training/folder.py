"""The folder of a run: one training at a time, and nothing in it is ever overwritten."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from cli.command import make_folder
from cli.files import free_name, replace_file, try_lock, warn_once
from cli.options import ConfigError

# What a run writes into its folder, run.json first.
WRITTEN = ("run.json", "metrics.jsonl", "snapshots.jsonl", "checkpoints", "report.html", "wandb_id")
LAUNCH = ".launch"


class FolderHeld(RuntimeError):
    """Another process is training in this folder."""

    exit_code = 6


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder` until the block ends. Raises FolderHeld naming the process that has it.

    The lock is the kernel's (flock), so it ends with its process however that ends: the file that
    stays behind blocks nobody.
    """
    make_folder(folder, "run.out_dir")
    path = folder / ".lock"
    with open(path, "a+", encoding="utf-8", errors="replace") as file:
        found = try_lock(file)
        if found == "held":
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise FolderHeld(
                f"{folder} is in use by {holder}; wait for it or use another --out_dir"
            )
        if found == "no locks":
            warn_once(f"no file locks here: start no second process that trains in {folder}")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def check_own(folder: Path) -> None:
    """Raises ConfigError for a folder with files that a run would write to, but that no run left:
    they are someone's. Other files may be there: a log, say."""
    if (folder / "run.json").exists() or any(folder.glob("checkpoints/step-*")):
        return
    if found := [name for name in WRITTEN if (folder / name).exists()]:
        raise ConfigError(
            f"run.out_dir={folder}: holds {', '.join(found)}, but no run.json: not a run's folder. "
            "Choose another --out_dir, or --overwrite=true to move this one aside"
        )


def has_stepped(folder: Path) -> bool:
    """Whether a run without checkpoints has taken a step, as far as its files tell: the first one
    is always logged."""
    if any((folder / name).exists() for name in ("snapshots.jsonl", "report.html")):
        return True
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            return any(STEP_MARK in line for line in iter_lines(file))
    except FileNotFoundError:
        return False


def move_aside(folder: Path) -> Path:
    """Rename an old run's folder to the first free name of folder.old, folder.old-1, ...

    A link stays a link, to a new folder where the old one was. A folder that cannot be renamed (the
    working directory, a mount point) stays too: what the run wrote goes into folder/old.
    """
    real = folder.resolve()
    if not Path.cwd().resolve().is_relative_to(real):  # else relative paths would lead elsewhere
        aside = free_name(real.with_name(real.name + ".old"))
        try:
            os.rename(real, aside)
        except OSError:  # a mount point, a layer of a container, a parent that is not ours
            pass
        else:
            real.mkdir()
            return aside
    aside = free_name(real / "old")
    aside.mkdir()
    for name in filter(lambda name: os.path.lexists(real / name), WRITTEN):
        os.rename(real / name, aside / name)
    return aside


def was_cleared(folder: Path, proof: Sequence[str]) -> bool:
    """Whether this launch has moved an old run aside already, before it was started again.

    proof: names of the launch, one of which it has then left here (`mark_cleared`).
    """
    try:
        left = (folder / LAUNCH).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return False
    return not set(proof).isdisjoint(left)


def mark_cleared(folder: Path, names: Sequence[str]) -> None:
    """Note which launch has emptied this folder; none if there is nothing that starts it again."""
    if names:
        replace_file(folder / LAUNCH, "".join(f"{name}\n" for name in names))


# metrics.jsonl and snapshots.jsonl: one JSON object per line, appended to by every process that
# works on the run. They are beside the loop: a line that a kill tore or a disk damaged is left out.

LONGEST_LINE = 1 << 24  # bytes; a longer one is damage and is never held as a whole
LONG_LOG = 1 << 22  # bytes; of more than that not every line is parsed, where a few will do ...
LOG_TAIL, LOG_BLOCK = 1 << 16, 1 << 20  # ... but all of its last bytes; read at once
STEP_MARK = b'"loss":'  # in the line of a training step, and in no other: a quote in a text is \"
EVENTS = {"start", "note", "fit"}  # what is neither figures of a step nor of an evaluation


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def is_figure(value: Any) -> bool:
    """A finite number; None stands for one that was not."""
    return value is None or (type(value) in (int, float) and abs(value) < 1e300)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_time(value: Any) -> bool:
    """Seconds since 1970."""
    return type(value) in (int, float) and 0 <= value < 1e11


def is_start(value: Any) -> bool:
    """The start of a process: its command and surroundings."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("command", ""), str)
        and all(isinstance(value.get(name, {}), dict) for name in ("data", "environment"))
    )


def is_passage(value: Any) -> bool:
    """[text, loss, [[text, chance], ...]] per token."""

    def is_pair(pair: Any) -> bool:
        return isinstance(pair, list) and [*map(type, pair)] in ([str, float], [str, int])

    return isinstance(value, list) and all(
        isinstance(token, list)
        and is_pair(token[:2])
        and len(token) == 3
        and isinstance(token[2], list)
        and all(map(is_pair, token[2]))
        for token in value
    )


FIGURES = ["loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "data_wait", "skipped"]
FIGURES += ["val_loss", "perplexity", "bits_per_byte"]
CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(["step", "attempt", "fit"], is_count),
    **dict.fromkeys(FIGURES, is_figure),
    **dict.fromkeys(["note", "prompt", "sample"], is_text),
    "time": is_time,
    "start": is_start,
    "passage": is_passage,
}


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the entry of one line, or None if it is torn, damaged or of wrong types."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or "step" not in entry:
        return None
    entry.setdefault("attempt", 0)
    for name, value in entry.items():
        if name in CHECKS and not CHECKS[name](value):
            return None
    return entry


def iter_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines from the present position on; one of any length costs bounded memory."""
    return iter(lambda: file.readline(LONGEST_LINE), b"")


def read_entries(file: BinaryIO, mark: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the entries of an open .jsonl file from its present position on, one at a time; only
    those of lines with `mark` in them."""
    for line in iter_lines(file):
        if mark in line and (entry := parse_line(line)) is not None:
            yield entry


def read_spread(file: BinaryIO, most: int, ordinary: bytes) -> Iterator[dict[str, Any]]:
    """Yield what `read_entries` does, but of more than LONG_LOG bytes not every entry.

    Of the lines with `ordinary` in them about `most` are parsed, spread evenly, and all at the end;
    of the others each one, and the line before it: the figures of training at an evaluation.
    """
    size = os.fstat(file.fileno()).st_size
    left = size - file.tell()
    stride = left // most if left > LONG_LOG else 0
    while stride and file.tell() < size - LOG_TAIL:
        block = file.read(max(stride, LOG_BLOCK)) + file.readline(LONGEST_LINE)
        if not block:  # the file has become shorter
            break
        lines = block.rstrip(b"\n").split(b"\n")
        every = max(1, stride * len(lines) // len(block))
        others = [i for i, line in enumerate(lines) if ordinary not in line]
        before = (i - 1 for i in others if i)
        last = len(lines) - 1  # the next block may begin with one of the others
        for i in sorted({*range(0, len(lines), every), *others, *before, last}):
            if (entry := parse_line(lines[i])) is not None:
                yield entry
    yield from read_entries(file)


def read_lines(path: Path, mark: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the entries of a .jsonl file, of lines with `mark` in them; a missing file has none."""
    if path.exists():
        with open(path, "rb") as file:
            yield from read_entries(file, mark)


def next_attempt(metrics: Path) -> int:
    """Return 1 for a new run, else one more than the last attempt in metrics.jsonl.

    The file is read from its end, block by block: however much of the end is damaged, a run that
    has begun does not count as a new one.
    """
    if not metrics.exists():
        return 1
    with open(metrics, "rb") as file:
        start, rest = file.seek(0, os.SEEK_END), b""
        while start > 0:
            size = min(start, 1 << 16)
            start = file.seek(start - size)
            lines = (file.read(size) + rest).split(b"\n")
            rest = lines.pop(0) if start else b""  # the line may begin in the block before
            rest = rest if len(rest) < 1 << 20 else b""  # no line of metrics.jsonl is that long
            for entry in map(parse_line, reversed(lines)):
                if entry is not None and entry["attempt"]:
                    return entry["attempt"] + 1
    return 1


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The figures of metrics.jsonl, one entry per step and kind: of each step the highest attempt.

    Events (the start of a process, notes, fits) are in report.history. What a later attempt
    did again replaces what it was.
    """
    best: dict[tuple[int, bool], dict[str, Any]] = {}
    for entry in read_lines(path):
        key = (entry["step"], "val_loss" in entry)
        if entry.keys() & EVENTS:
            continue
        if key not in best or entry["attempt"] >= best[key]["attempt"]:
            best[key] = entry
    return [best[key] for key in sorted(best)]
