"""Read metrics.jsonl and snapshots.jsonl: one JSON object per line, appended to by every process
that works on the run. A line that a kill or a disk has damaged is skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_LINE = 1 << 24  # bytes; a longer line is damage, and is never held in memory whole
STEP_MARK = b'"loss":'  # in the line of a training step and in no other: a quote in a text is \"
EVENTS = {"start", "end", "note", "fit"}  # entries that hold no metrics

# A log of more than LONG_LOG bytes is sampled where a few entries will do: some of each LOG_BLOCK,
# and all of the last LOG_TAIL bytes.
LONG_LOG, LOG_BLOCK, LOG_TAIL = 1 << 22, 1 << 20, 1 << 16


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_start(value: Any) -> bool:
    """Whether this describes the start of a process: its command, data and environment."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("command", ""), str)
        and all(isinstance(value.get(name, {}), dict) for name in ("data", "environment"))
    )


def _is_passage(value: Any) -> bool:
    """Whether this is a list of [text, loss, [[text, probability], ...]], one item per token."""

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
    **dict.fromkeys(["step", "attempt", "fit"], lambda v: type(v) is int and 0 <= v < 1 << 62),
    # None is written for a figure that is not finite.
    **dict.fromkeys(FIGURES, lambda v: v is None or (_is_number(v) and abs(v) < 1e300)),
    **dict.fromkeys(["end", "note", "prompt", "sample"], lambda v: isinstance(v, str)),
    "time": lambda v: _is_number(v) and 0 <= v < 1e11,  # seconds since 1970
    "start": _is_start,
    "passage": _is_passage,
}


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the entry of one line, or None if the line is torn, damaged or has wrong types."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or "step" not in entry:
        return None
    entry.setdefault("attempt", 0)
    is_right = all(CHECKS[name](value) for name, value in entry.items() if name in CHECKS)
    return entry if is_right else None


def iter_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines from the current position on, in bounded memory whatever their length."""
    return iter(lambda: file.readline(LONGEST_LINE), b"")


def read_entries(file: BinaryIO, mark: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the entries from the current position on, of lines that contain `mark`.

    The position stays before a last line that is incomplete: it may still be being written.
    """
    for line in iter_lines(file):
        if mark in line and (entry := parse_line(line)) is not None:
            yield entry
        elif not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            file.seek(-len(line), os.SEEK_CUR)
            return


def read_spread(file: BinaryIO, most: int, ordinary: bytes) -> Iterator[dict[str, Any]]:
    """Yield entries like `read_entries`, but only a sample of a log of more than LONG_LOG bytes.

    About `most` of the lines that contain `ordinary` are parsed, evenly spread, and all of them at
    the end. Of the other lines each one is parsed, and the line before it: the training metrics at
    an evaluation.
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
    """Yield the entries of a file, of lines that contain `mark`; nothing if there is no file."""
    if path.exists():
        with open(path, "rb") as file:
            yield from read_entries(file, mark)


def next_attempt(metrics: Path) -> int:
    """Return 1 for a new run, else one more than the last attempt in metrics.jsonl.

    The file is read backwards in blocks, so that a run is known to have begun however much of the
    end is damaged.
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
    """Return the metrics in metrics.jsonl, one entry per step and kind, from its highest attempt.

    A resume repeats the steps after its checkpoint: the later attempt replaces the earlier one.
    Events (process starts, notes, fits) are left out.
    """
    best: dict[tuple[int, bool], dict[str, Any]] = {}
    for entry in read_lines(path):
        key = (entry["step"], "val_loss" in entry)
        if entry.keys() & EVENTS:
            continue
        if key not in best or entry["attempt"] >= best[key]["attempt"]:
            best[key] = entry
    return [best[key] for key in sorted(best)]
