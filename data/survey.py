"""Look at a text: how much there is, how its paragraphs begin, how many tokens it has."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cli.options import ConfigError
from data.config import TIKTOKEN_SIZES, DataConfig
from data.readers import ReadOptions
from data.sources import Source, open_sources

SAMPLE_BYTES = 2 << 20  # of text, of all sources together
MAX_PROMPT = 40  # bytes
HUB_BYTES = 1 << 30  # taken as the size of a Hub dataset, which does not tell it


@dataclass(frozen=True)
class Survey:
    """Facts about the text of a source, its validation text included."""

    n_bytes: int  # of text in UTF-8; an estimate if not all of it was read
    is_whole: bool  # all of it was read
    prompt: str  # the most common beginning of a paragraph


def survey(config: DataConfig) -> Survey:
    """Read up to SAMPLE_BYTES of the sources of `config`.

    Raises ConfigError if there is nothing to read, or if they hold ids instead of text.
    """
    sources = [source for source in open_sources(config) if not source.validates]
    how = ReadOptions(
        config.text_field,
        config.errors,
        config.separator,
        chat=config.format == "chat",
        max_documents=config.max_documents or 0,
    )
    parts = [_sample(source, how, SAMPLE_BYTES // len(sources)) for source in sources]
    texts = [text for part, _, _ in parts for text in part]
    if not any(text.strip() for text in texts):
        raise ConfigError(f"data.source={config.source}: holds no text, or only white space")
    return Survey(
        n_bytes=sum(size for _, size, _ in parts),
        is_whole=all(whole for _, _, whole in parts),
        prompt=common_beginning(texts),
    )


def _sample(source: Source, how: ReadOptions, limit: int) -> tuple[list[str], int, bool]:
    """Return text from the start of a source, the bytes of its whole text, and whether that is all.

    If it is not, the ratio of text to file so far gives the size: files may be compressed, or hold
    other things.
    """
    texts: list[str] = []
    text_bytes = file_bytes = documents = 0
    for piece in source.pieces(how):
        texts.append(piece.text)
        text_bytes += len(piece.text.encode("utf-8"))
        file_bytes += piece.read
        documents += piece.last
        if text_bytes >= limit:
            break
    else:
        return texts, text_bytes, True
    size = source.size * text_bytes // max(1, file_bytes) if source.files else HUB_BYTES
    if how.max_documents:
        size = min(size, text_bytes * how.max_documents // max(1, documents))
    return texts, max(size, text_bytes), False


PARAGRAPH = re.compile(r"(?:\A|\n[ \t]*\n)([^\W\d_][^\n]{0,80})")  # unindented, after a blank line
LINE = re.compile(r"^([^\W\d_][^\n]{0,80})", re.MULTILINE)


def common_beginning(texts: Sequence[str]) -> str:
    """Return the word that most paragraphs begin with, and the next if most of these share it.

    "KING RICHARD" for plays, "def" for Python: the model has often seen how it continues. Lines
    count if there are no paragraphs. Returns "" if nothing begins with a letter.
    """
    for pattern in (PARAGRAPH, LINE):
        begins = [match[1].split()[:2] for text in texts for match in pattern.finditer(text)]
        begins = [words for words in begins if 3 <= len(words[0].encode()) <= MAX_PROMPT]
        if begins:
            # Of equally common ones the first, since the end of the text may be validation text.
            ((first, count),) = Counter(words[0] for words in begins).most_common(1)
            pairs = Counter(" ".join(words) for words in begins if words[0] == first)
            ((both, shared),) = pairs.most_common(1)
            return both if shared > count / 2 and len(both.encode()) <= MAX_PROMPT else first
    return ""


def bytes_per_token(tokenizer: str) -> float:
    """Guess the bytes that a token of a text in a European language, or of code, stands for."""
    if tokenizer in ("char", "byte"):
        return 1.0
    return max(1.0, 0.43 * math.log2(vocabulary_of(tokenizer)) - 2.0)


def vocabulary_of(tokenizer: str) -> int:
    size = tokenizer.partition(":")[2]
    return int(size) if size.isdigit() else TIKTOKEN_SIZES.get(tokenizer, 256)
