"""Text to ids and back. A tokenizer is a table (the bytes of each id) and a way to encode.

The text of special tokens is plain text here; the end-of-text enters only as an id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.options import ConfigError

FILE = "plaingpt_tokenizer.json"
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Tokenizer:
    """`table[i]` holds the bytes that id i stands for; none for the end-of-text and other specials.

    eot: the id that follows each document in the data. encode_array: text -> (n,) integer array,
    special tokens' text being plain text. special: text of special tokens -> id. files: what
    `save` writes, name -> content. bos: ids at the start of each document. ends: the ids that end a
    sample, if there are others than eot. encode_special: text -> ids, with special tokens, where
    that is not a matter of cutting them out.
    """

    name: str
    table: Sequence[bytes]
    eot: int | None
    encode_array: Callable[[str], np.ndarray]
    special: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict, repr=False)
    bos: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    encode_special: Callable[[str], list[int]] | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends a sample."""
        own = () if self.eot is None or self.eot in self.ends else (self.eot,)
        return (*self.ends, *own)

    @property
    def between(self) -> tuple[int, ...]:
        """`bos` for a document that follows another: nothing where the end-of-text is the bos, for
        it stands there already."""
        return () if self.bos == (self.eot,) else self.bos

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text; the text of special tokens is plain text unless `special`."""
        if not special or not self.special:
            return self.encode_array(text).tolist()
        if self.encode_special is not None:
            return self.encode_special(text)
        names = sorted(self.special, key=len, reverse=True)
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
            is_special = part in self.special
            ids += [self.special[part]] if is_special else self.encode_array(part).tolist()
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that the ids stand for. Raises ValueError for an id that is none of ours."""
        return b"".join(self.bytes_of(int(i)) for i in ids)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one id. Raises ValueError for an id outside the vocabulary."""
        if not 0 <= token < len(self.table):
            raise ValueError(f"id {token} is outside the vocabulary of {len(self.table)} ids")
        return self.table[token]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD, an end-of-text nothing."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def unused_ids(self, n_ids: int) -> list[int]:
        """The ids below n_ids that belong to no token: holes, and a vocabulary padded to n_ids."""
        used = set(self.special.values())
        holes = [i for i, piece in enumerate(self.table[:n_ids]) if not piece and i not in used]
        return [*holes, *range(len(self.table), n_ids)]

    def byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int64: how many bytes each id stands for."""
        return np.array([len(piece) for piece in self.table], dtype=np.int64)

    def save(self, folder: Path) -> None:
        """Write the small plain files from which `load_tokenizer` reads it back."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_text(content, encoding="utf-8", newline="\n")


def described(kind: str, **about) -> str:
    """The content of the file that says which kind of tokenizer a folder holds."""
    return json.dumps({"kind": kind, **about}, indent=1)


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 the end-of-text."""
    return Tokenizer(
        name="byte",
        table=[bytes([b]) for b in range(256)] + [b""],
        eot=256,
        encode_array=lambda text: np.frombuffer(text.encode("utf-8"), dtype=np.uint8),
        special={END_OF_TEXT: 256},
        files={FILE: described("byte")},
    )


def char_tokenizer(alphabet: str, with_eot: bool) -> Tokenizer:
    """One id for each character of `alphabet` (distinct, sorted); the end-of-text comes last."""
    codes = code_points(alphabet)
    id_of = np.full(0x110000, -1, dtype=np.int64)
    id_of[codes] = np.arange(len(codes))

    def encode(text: str) -> np.ndarray:
        ids = id_of[code_points(text)]
        if (ids < 0).any():
            raise unknown_characters(text, alphabet)
        return ids

    return Tokenizer(
        name="char",
        table=[c.encode("utf-8") for c in alphabet] + [b""] * with_eot,
        eot=len(alphabet) if with_eot else None,
        encode_array=encode,
        special={END_OF_TEXT: len(alphabet)} if with_eot else {},
        files={FILE: described("char", alphabet=alphabet, eot=with_eot)},
    )


def code_points(text: str) -> np.ndarray:
    """(n,) uint32: the code point of each character."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def unknown_characters(text: str, alphabet: str) -> ConfigError:
    """The error for characters that a char tokenizer has never seen."""
    unknown = sorted(set(text) - set(alphabet))
    shown = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in unknown[:10])
    more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
    return ConfigError(
        f"the char tokenizer does not know {shown}{more}: its {len(alphabet)} characters are "
        f"{alphabet[:60]!r}{'...' if len(alphabet) > 60 else ''}; leave the unknown ones out, or "
        "train with --tokenizer=byte or bpe:N, which know every character"
    )
