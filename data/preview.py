"""What preparing would do, without doing it."""

from __future__ import annotations

import time
from itertools import islice

from data.config import DataConfig
from data.encode import n_workers
from data.index import stamps_of
from data.plan import Plan, Say, make_plan, make_tokenizer
from data.sources import open_sources, parts_of
from data.tokenizer import Tokenizer, ready_tokenizer

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
