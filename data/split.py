"""Which text trains and which validates.

`tail`: the last val_fraction of the characters. `document`: whole documents by a hash of their
text, so that adding files never moves a document between splits. `auto`: the tail for fewer than
20 documents, or where the hash would leave a split empty; else by document. `files`: as the names
of files and folders say. `none`: everything trains. `only`: everything validates. `rest`: what is
named for validation is left out, the rest trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from data.text import Piece

FEW_DOCUMENTS = 20


class Part(NamedTuple):
    """A piece of text that belongs to one split."""

    split: str
    text: str
    first: bool  # a document starts here, as far as this split is concerned
    last: bool  # the document really ends here, so an end-of-text follows
    read: int


@dataclass(frozen=True)
class Split:
    """How one source is split; `train_characters` counts for the tail only."""

    mode: str
    val_fraction: float
    train_characters: int = 0

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        """The same text, each part with its split."""
        if self.mode == "tail":
            return self._by_tail(pieces)
        return self._by_document(pieces) if self.mode == "document" else self._as_named(pieces)

    def _as_named(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        every = {"none": "train", "only": "val"}.get(self.mode)
        for piece in pieces:
            if self.mode != "rest" or piece.split != "val":
                yield Part(every or piece.split or "train", *piece[:4])

    def _by_document(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        split = "train"
        for piece in pieces:
            if piece.first:
                split = split_of(piece.text, self.val_fraction)
            yield Part(split, *piece[:4])

    def _by_tail(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        left = self.train_characters
        val_begun = False
        for piece in pieces:
            head, tail = piece.text[:left], piece.text[left:]
            left -= len(head)
            if head:
                ends = piece.last and not tail
                yield Part("train", head, piece.first, ends, 0 if tail else piece.read)
            if tail:
                first = piece.first or not val_begun
                yield Part("val", tail, first, piece.last, piece.read)
                val_begun = True


def split_of(text: str, val_fraction: float) -> str:
    """The split of a document, by the hash of its first piece."""
    return "val" if is_chosen(text, val_fraction, b"split") else "train"


def is_chosen(text: str, share: float, purpose: bytes) -> bool:
    """Whether a text belongs to a share of all texts, by its hash: always the same answer."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def resolve_split(mode: str, val_fraction: float, pieces: Iterable[Piece]) -> Split:
    """The split of one source, from its pieces; only the tail needs to see them all."""
    if val_fraction == 0:
        return Split("none", 0)
    if mode == "document":
        return Split(mode, val_fraction)
    characters, documents, splits = 0, 0, set()
    for piece in pieces:
        characters += len(piece.text)
        if mode == "auto" and piece.first:
            documents += 1
            splits.add(split_of(piece.text, val_fraction))
            if documents >= FEW_DOCUMENTS and len(splits) == 2:
                return Split("document", val_fraction)
    return Split("tail", val_fraction, int(characters * (1 - val_fraction)))
