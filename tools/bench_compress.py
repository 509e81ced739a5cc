"""What a general compressor makes of the same validation bytes: the bar for bits per byte."""

from __future__ import annotations

import lzma
from pathlib import Path

from data.meta import read_meta
from data.options import parse_options
from data.prepare import prepare
from data.shards import TokenStream
from data.tokenizer import load_tokenizer
from tools.bench_data import BenchDataOptions

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 27}]  # sees all it was given


def main(argv: list[str]) -> int:
    """Print the table for one prepared source."""
    usage = "python -m tools.bench compress [--source=... --tokenizer=...]"
    options, _ = parse_options(argv, BenchDataOptions, usage=usage)
    folder = prepare(options.data_config())
    train, val = (text_of(folder, split) for split in ("train", "val"))
    alone, given = 8 * xz(val) / len(val), 8 * (xz(train + val) - xz(train)) / len(val)
    print(f"training text {len(train):,} bytes, validation text {len(val):,} bytes")
    print(f"xz -9 on the validation text alone:     {alone:.3f} bits per byte")
    print(f"xz -9 with the training text before it: {given:.3f} bits per byte")
    return 0


def xz(text: bytes) -> int:
    """Size in bytes."""
    return len(lzma.compress(text, format=lzma.FORMAT_XZ, filters=FILTERS))


def text_of(folder: Path, split: str) -> bytes:
    """All text of a split, decoded from its shards."""
    meta, tokenizer = read_meta(folder), load_tokenizer(folder / "tokenizer")
    stream = TokenStream(folder, meta, split, 0)
    return tokenizer.decode_bytes(stream.read(0, meta.tokens[split]).tolist())
