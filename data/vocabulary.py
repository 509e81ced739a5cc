"""Text to ids and back. A tokenizer is a table (the bytes of each id) and a way to encode.

The text of special tokens is plain text here; the end-of-text enters only as an id.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cli.options import ConfigError

FILE = "plaingpt_tokenizer.json"
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Tokenizer:
    """`table[i]` holds the bytes that id i stands for; none for the end-of-text and other specials.

    eot: the id that follows each document in the data. encode_array: text -> (n,) integer array,
    special tokens' text being plain text. special: text of special tokens -> id. files: what
    `save` writes, name -> content. bos: ids at the start of each document. ends: the ids that end a
    sample, if there are others than eot. encode_special: text -> ids, with special tokens, where
    that is not a matter of cutting them out. spells: whether ids stand for bytes of text. lossy:
    whether decoding may give another text.
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
    spells: bool = True
    lossy: bool = False

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
        return np.array([len(piece) * self.spells for piece in self.table], dtype=np.int64)

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
            raise unknown_characters(Counter(text), alphabet)
        return ids

    return Tokenizer(
        name="char",
        table=[c.encode("utf-8") for c in alphabet] + [b""] * with_eot,
        eot=len(alphabet) if with_eot else None,
        encode_array=encode,
        special={END_OF_TEXT: len(alphabet)} if with_eot else {},
        files={FILE: described("char", alphabet=alphabet, eot=with_eot)},
    )


def lost_bytes(text: str, spelled: str) -> int:
    """Bytes of the characters that `spelled`, a text encoded and decoded, has fewer of than `text`.

    Where they stand is not compared: no tokenizer moves characters.
    """
    missing = np.bincount(code_points(text), minlength=0x110000)
    missing -= np.bincount(code_points(spelled), minlength=0x110000)
    codes = np.flatnonzero(missing > 0)
    widths = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
    return int((missing[codes] * widths).sum())


# Ids that are no text


FIRST_CHARACTER = 0x3400  # beyond digits and white space
SURROGATES = range(0xD800, 0xE000)


def ids_tokenizer(size: int) -> Tokenizer:
    """Ids that somebody made of music, molecules, moves ...: 0 to size - 1, written as numbers.

    On their way through preparation ids are text of one character each (`characters_of`), so that
    they are cut, split and dealt to processes as text is.
    """

    def encode(text: str) -> np.ndarray:
        codes = code_points(text).astype(np.int64)
        if len(codes) and codes.min() >= FIRST_CHARACTER:
            ids = codes - FIRST_CHARACTER - len(SURROGATES) * (codes >= SURROGATES.stop)
        else:
            ids = ids_of(text, size, f"tokenizer ids:{size}")
        return ids

    return Tokenizer(
        name=f"ids:{size}",
        table=[f" {token}".encode() for token in range(size)],
        eot=None,
        encode_array=encode,
        files={FILE: described("ids", size=size)},
        spells=False,
    )


def ids_of(value: str | list, size: int, name: str, first: int = 0) -> np.ndarray:
    """(n,) int64: whole numbers from 0 to size - 1, as text or in a list.

    Raises ConfigError with the place of one that is not; it is counted from `first` on.
    """
    numbers = value.split() if isinstance(value, str) else value
    numbers = numbers if isinstance(numbers, list) else [numbers]
    for at, number in enumerate(numbers):
        is_id = isinstance(number, int) and not isinstance(number, bool)
        if isinstance(number, str):
            is_id = number.isascii() and number.isdigit() and len(number) < 10
        if not is_id or not 0 <= int(number) < size:
            raise ConfigError(
                f"{name}: token {first + at} is {str(number)[:40]!r}, not a whole number from 0 to "
                f"{size - 1}, as data.tokenizer=ids:{size} says"
            )
    return np.array([int(number) for number in numbers], dtype=np.int64)


def characters_of(ids: np.ndarray) -> str:
    """One character for each id; the tokenizer of `ids_tokenizer` takes them back to ids."""
    codes = ids + FIRST_CHARACTER
    codes = codes + len(SURROGATES) * (codes >= SURROGATES.start)
    return codes.astype("<u4").tobytes().decode("utf-32-le")


def code_points(text: str) -> np.ndarray:
    """(n,) uint32: the code point of each character."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def unknown_characters(counts: Mapping[str, int], alphabet: str) -> ConfigError:
    """The error for characters that a char tokenizer has never seen. counts: of a text."""
    unknown = sorted(set(counts) - set(alphabet))
    shown = ", ".join(f"{c!r} (U+{ord(c):04X}) {_times(counts[c])}" for c in unknown[:10])
    more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
    return ConfigError(
        f"the char tokenizer does not know {shown}{more}: its {len(alphabet)} characters are "
        f"{alphabet[:60]!r}{'...' if len(alphabet) > 60 else ''}; leave the unknown ones out, or "
        "train with --tokenizer=byte or bpe:N, which know every character"
    )


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n:,} times"


# Our own byte-level BPE: trained by `tokenizers`, kept as tokenizer.json, encoded by tiktoken.

GIANT_WORD = 1000
JSON_FILE = "tokenizer.json"  # Hugging Face's form

# How text is cut before BPE: GPT-4's rules, but white space after the end of a line goes with the
# line break, and both with the punctuation before them: ":" and the indentation of what follows
# are one piece, which makes source code 6% shorter. Spelled so that the regex engines of tiktoken
# and of `tokenizers` agree. Runs beside something that looks ahead are bounded: on a million spaces
# tiktoken's engine would overflow its stack.
SPLIT_PATTERN = (
    r"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]{1,64}(?:[\r\n]{1,64}[ \t]{0,64}(?= \S)|[\r\n]{0,64})"
    r"|\s{1,64}(?!\S)"
    r"|\s"
)


def train_bpe(name: str, vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of at most vocab_size ids, the last of them the end-of-text.

    It has fewer where the texts hold too few pairs to merge.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trained

    trained = Trained(models.BPE(ignore_merges=True))  # take a known word whole, as tiktoken does
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(_without_giant_words(texts), trainer)
    trained.add_special_tokens([END_OF_TEXT])
    return own_bpe(name, trained.to_str(pretty=True))


def _without_giant_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, cut up where they hold a giant word: training takes its length squared."""
    for text in texts:
        longest = max(map(len, text.split()), default=0)
        if longest > GIANT_WORD or "\n" * GIANT_WORD in text:
            yield from (text[at : at + GIANT_WORD] for at in range(0, len(text), GIANT_WORD))
        else:
            yield text


def own_bpe(name: str, tokenizer_json: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json that `train_bpe` made, encoding through tiktoken."""
    about = json.loads(tokenizer_json)
    vocabulary = about["model"]["vocab"]
    pattern = about["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]  # not today's
    to_byte = byte_of_character()
    table = [b""] * len(vocabulary)
    for characters, token in vocabulary.items():
        table[token] = bytes(to_byte[c] for c in characters)
    encoding = encoding_of(name, pattern, {piece: i for i, piece in enumerate(table)})
    return Tokenizer(
        name=name,
        table=[*table, b""],
        eot=len(table),
        encode_array=lambda text: encoding.encode_to_numpy(text, disallowed_special=()),
        special={END_OF_TEXT: len(table)},
        files={FILE: described("bpe", name=name), JSON_FILE: tokenizer_json},
    )


def encoding_of(name: str, pattern: str, ranks: dict[bytes, int]) -> Any:
    """A tiktoken.Encoding that knows no special tokens, so that their text is plain text."""
    import tiktoken

    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def byte_of_character() -> dict[str, int]:
    """The byte that each character of GPT-2's printable byte alphabet stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}
