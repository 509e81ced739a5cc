"""Prepare a source: text -> ids -> shards, once. `python -m data.prepare --source=my.txt`"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from data.config import DataConfig
from data.options import ConfigError, parse_options, run_command
from data.shards import META_FILE, Meta, ShardWriter, read_meta, write_meta
from data.sources import Piece, Source, open_source
from data.bpe import train_bpe
from data.tokenizer import Tokenizer
from data.vocabulary import byte_tokenizer, char_tokenizer

FORMAT = 1


def prepared_folder(config: DataConfig) -> Path:
    """Where the data of these options is, or will be, prepared."""
    root = Path(config.prepared_dir or Path(__file__).parent / "prepared")
    matters = [config.source, config.tokenizer, config.split, config.val_fraction]
    matters += [config.text_field, config.errors, FORMAT]
    key = hashlib.sha256(json.dumps(matters).encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9]+", "_", Path(config.source).stem).strip("_")[:40]
    tokenizer = config.tokenizer.replace(":", "")
    return root / f"{name or 'data'}-{tokenizer}-{key}"


def prepare(config: DataConfig, *, say: Callable = print, progress: bool = True) -> Path:
    folder = prepared_folder(config)
    if (folder / META_FILE).is_file():
        return folder
    source = open_source(config.source)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    pieces = list(source.pieces(config.text_field, config.errors))
    tokenizer = build_tokenizer(config.tokenizer, pieces)
    tokenizer.save(partial / "tokenizer")
    dtype = "uint16" if tokenizer.vocab_size <= 65536 else "uint32"
    writers = {s: ShardWriter(partial, s, 0, 0, dtype) for s in ("train", "val")}
    total = sum(len(p.text) for p in pieces)
    left = int(total * (1 - config.val_fraction))
    for piece in pieces:
        for split, text in (("train", piece.text[:left]), ("val", piece.text[max(0, left) :])):
            if text:
                ids = tokenizer.encode_array(text)
                ends = piece.last and (split == "val" or left >= len(piece.text))
                if ends and tokenizer.eot is not None:
                    ids = np.append(ids, tokenizer.eot)
                starts = np.zeros(int(piece.first), dtype=np.int64)
                writers[split].append(ids, starts, len(text.encode()))
        left = max(0, left - len(piece.text))
    shards = [s for s in (w.close() for w in writers.values()) if s]
    fingerprint = hashlib.sha256("".join(s.sha256 for s in shards).encode()).hexdigest()
    meta = Meta(
        config.source, tokenizer.name, tokenizer.vocab_size, dtype, fingerprint, [1.0], shards
    )
    write_meta(partial, meta)
    os.rename(partial, folder)
    say(f"prepared {folder}: tokens {meta.tokens}, bytes {meta.bytes}")
    return folder


def build_tokenizer(name: str, pieces: list[Piece]) -> Tokenizer:
    if name == "char":
        alphabet = "".join(sorted(set().union(*(p.text for p in pieces))))
        return char_tokenizer(alphabet, sum(p.first for p in pieces) > 1)
    if name == "byte":
        return byte_tokenizer()
    return train_bpe(name, int(name[4:]), (p.text for p in pieces))


def main(argv: list[str]) -> int:
    config, _ = parse_options(argv, DataConfig, usage="python -m data.prepare [--source=...]")
    prepare(config)
    return 0


if __name__ == "__main__":
    run_command(main)
