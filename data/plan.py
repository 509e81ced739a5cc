"""What is to be built: sources, how each is split, and the tokenizer that their text makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cli.options import ConfigError
from data.bpe import train_bpe
from data.config import DataConfig
from data.readers import How, form_of
from data.sources import Read, Source
from data.split import Split, is_chosen, resolve_split
from data.text import Piece
from data.vocabulary import Tokenizer, char_tokenizer, code_points, unknown_characters

SAMPLE_BYTES = 32 << 20  # of text that a BPE is trained on
SAMPLE_SPAN = 16  # the sample is spread over so many times its size
Say = Callable[[str], None]


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
