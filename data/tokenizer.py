"""Text to ids and back.

A tokenizer is a table (the bytes of each id) and a function that encodes text. Characters, bytes,
our own BPE, tiktoken and tokenizer.json all become the same `Tokenizer`; `ready_tokenizer` makes it
by name, `load_tokenizer` from a folder.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import json
import os
import re
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cli.files import replace_file
from cli.options import ConfigError
from data.meta import DamagedData

END_OF_TEXT = "<|endoftext|>"
KIND_FILE = "plaingpt_tokenizer.json"  # what kind of tokenizer a folder holds
JSON_FILE = "tokenizer.json"  # Hugging Face's format
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
RANKS_FILE = "ranks.tiktoken"  # tiktoken's format: per line a token in base64 and its rank


@dataclass(frozen=True)
class Tokenizer:
    """`table[i]` holds the bytes of id i; empty for the end-of-text and other special tokens.

    eot: the id that follows each document in the data, if there is one.
    encode_array: text -> (n,) integer array. Text that looks like a special token is plain text, so
        that a document which mentions "<|endoftext|>" does not end there.
    special: special tokens, text -> id.
    files: what `save` writes, name -> content.
    bos: ids at the start of each document.
    ends: the ids that end a sample, if there are others than eot.
    encode_special: text -> a `tokenizers.Encoding` (ids, offsets) with special tokens recognized,
        unless splitting at them is enough.
    chat_template: Jinja source that renders conversations (data/chat.py); "" without one.
    spells: False if ids do not stand for bytes of text.
    lossy: True if decoding may give another text.
    """

    name: str
    table: Sequence[bytes]
    eot: int | None
    encode_array: Callable[[str], np.ndarray]
    special: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict, repr=False)
    bos: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    encode_special: Callable[[str], Any] | None = None
    spells: bool = True
    lossy: bool = False
    chat_template: str = ""

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """All ids that end a sample."""
        return self.ends if self.eot is None or self.eot in self.ends else (*self.ends, self.eot)

    @property
    def between(self) -> tuple[int, ...]:
        """Ids between the end-of-text of one document and the next document: `bos`, unless it is
        the end-of-text, which is there already."""
        return () if self.bos == (self.eot,) else self.bos

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text; with `special`, special tokens in it are recognized."""
        if not special or not self.special:
            return self.encode_array(text).tolist()
        if self.encode_special is not None:
            return self.encode_special(text).ids
        names = sorted(self.special, key=len, reverse=True)  # the longest that fits wins
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
            is_special = part in self.special
            ids += [self.special[part]] if is_special else self.encode_array(part).tolist()
        return ids

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one id. Raises ValueError for an id outside the vocabulary."""
        if not 0 <= token < len(self.table):
            raise ValueError(f"id {token} is outside the vocabulary of {len(self.table)} ids")
        return self.table[token]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of the ids. Raises ValueError for an id outside the vocabulary."""
        return b"".join(self.bytes_of(int(i)) for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids; invalid UTF-8 becomes U+FFFD, special tokens disappear."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def unused_ids(self, n_ids: int) -> list[int]:
        """Return the ids below n_ids, the size of the model's vocabulary, that belong to no
        token: holes in the table, and padding after it."""
        used = set(self.special.values())
        holes = [i for i, piece in enumerate(self.table[:n_ids]) if not piece and i not in used]
        return [*holes, *range(len(self.table), n_ids)]

    def byte_lengths(self) -> np.ndarray:
        """Return the number of bytes of text per id, (vocab_size,) int64."""
        return np.array([len(piece) * self.spells for piece in self.table], dtype=np.int64)

    def save(self, folder: Path) -> None:
        """Write the text files that `load_tokenizer` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_text(content, encoding="utf-8", newline="\n")


class StreamDecoder:
    """Decode ids one by one into complete characters: together the text of `decode`, without the
    first `skip` characters (see `prompt_ids`)."""

    def __init__(self, tokenizer: Tokenizer, skip: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the characters that this id completes; none if it ends inside one."""
        text = self._decoder.decode(self._tokenizer.bytes_of(int(token)))
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]

    def finish(self) -> str:
        """Return U+FFFD if the ids ended inside a character, else an empty string."""
        return self._decoder.decode(b"", final=True)


# Choosing one: by name, or from a folder. A new kind needs a branch in both.


def ready_tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer of this name; None if it is made from the text (char, bpe:N).

    Raises ConfigError if it cannot be found, read or fetched.
    """
    kind, _, rest = name.partition(":")
    if kind in ("char", "bpe"):
        return None
    if kind == "byte":
        return byte_tokenizer()
    if kind == "ids":
        return ids_tokenizer(int(rest))
    if kind == "hf":
        return hf_from_folder(rest)
    if kind == "run":
        return load_tokenizer(_folder_in_run(rest))
    return tiktoken_by_name(name)


def _folder_in_run(run: str) -> Path:
    """Return the tokenizer folder of a checkpoint, or of the newest checkpoint of a run."""
    path = Path(run).expanduser()
    # step-1000 comes after step-999, so shorter names first.
    steps = sorted(path.glob("checkpoints/step-*/tokenizer"), key=lambda p: (len(str(p)), str(p)))
    found = [folder for folder in (path / "tokenizer", *steps) if (folder / KIND_FILE).is_file()]
    if not found:
        raise ConfigError(f"data.tokenizer=run:{run}: holds no checkpoint with a tokenizer")
    return found[-1]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that `save` wrote to this folder, or that of a Hugging Face folder.

    Uses no network. Raises ConfigError if there is none, DamagedData if it cannot be read.
    """

    def text(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    try:
        if not (folder / KIND_FILE).is_file():
            return hf_from_folder(folder)
        loaded = _of_kind(json.loads(text(KIND_FILE)), text)
        if (folder / TEMPLATE_FILE).is_file():
            loaded = chat_tokenizer(replace(loaded, chat_template=text(TEMPLATE_FILE)))
        return loaded
    except (ConfigError, PermissionError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise DamagedData(f"{folder}: the tokenizer cannot be read ({error!r})") from error


def _of_kind(about: dict[str, Any], text: Callable[[str], str]) -> Tokenizer:
    """Return the tokenizer that KIND_FILE describes; text: name of a file -> its content."""
    kind = about.pop("kind")
    if kind == "char":
        return char_tokenizer(about["alphabet"], about["eot"])
    if kind == "byte":
        return byte_tokenizer()
    if kind == "ids":
        return ids_tokenizer(about["size"])
    if kind == "bpe":
        return own_bpe(about["name"], text(JSON_FILE))
    if kind == "hf":
        ends = about.get("ends", ())
        return hf_from_json(about["name"], text(JSON_FILE), text(CONFIG_FILE), ends)
    return tiktoken_from_ranks(about, text(RANKS_FILE))


def _described(kind: str, **about) -> str:
    """Return the content of KIND_FILE."""
    return json.dumps({"kind": kind, **about}, indent=1)


# Conversations

TURN_STARTS, TURN_ENDS = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chat_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with a chat template, to be saved with it: its own, or else ChatML.

    ChatML's tokens are reserved ids after all others, unless the tokenizer has them already.
    """
    template = tokenizer.chat_template
    if not template:
        template = ("{{ bos_token }}" if tokenizer.bos else "") + CHATML
    if template.endswith(CHATML):
        names = [name for name in (TURN_STARTS, TURN_ENDS) if name not in tokenizer.special]
        tokenizer = _with_special(tokenizer, names)
        first = tokenizer.special[TURN_ENDS]
        tokenizer = replace(tokenizer, ends=(first, *(i for i in tokenizer.ends if i != first)))
    files = {**tokenizer.files, TEMPLATE_FILE: template}
    return replace(tokenizer, files=files, chat_template=template)


def _with_special(tokenizer: Tokenizer, names: Sequence[str]) -> Tokenizer:
    """Append special tokens to the vocabulary."""
    new = {name: tokenizer.vocab_size + i for i, name in enumerate(names)}
    files = dict(tokenizer.files)
    if new and JSON_FILE in files:
        about, flags = (
            json.loads(files[JSON_FILE]),
            ("single_word", "lstrip", "rstrip", "normalized"),
        )
        about["added_tokens"] += [
            {"id": i, "content": name, **dict.fromkeys(flags, False), "special": True}
            for name, i in new.items()
        ]
        files[JSON_FILE] = json.dumps(about, indent=2, ensure_ascii=False)
    if new and tokenizer.encode_special is not None:
        made = hf_from_json(tokenizer.name, files[JSON_FILE], files[CONFIG_FILE], tokenizer.ends)
        return replace(made, chat_template=tokenizer.chat_template)
    table = [*tokenizer.table, *(b"" for _ in new)]
    return replace(tokenizer, table=table, special={**tokenizer.special, **new}, files=files)


# Prompts


def check_ids(ids: Sequence[int], n_ids: int, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if an id is not in the model's vocabulary of n_ids ids."""
    if ids and max(ids) >= n_ids:
        raise ConfigError(
            f"the text contains id {max(ids)}, but the model has only {n_ids} ids: the tokenizer "
            f"{tokenizer.name} ({tokenizer.vocab_size} ids) belongs to another model"
        )


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that replace an empty prompt: the document start, the end-of-text (a document
    follows it), a newline or id 0."""
    if tokenizer.bos:
        return list(tokenizer.bos)
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    return [tokenizer.table.index(b"\n") if b"\n" in tokenizer.table else 0]


def prompt_ids(
    tokenizer: Tokenizer, prompt: str, n_ids: int, special: bool = False
) -> tuple[list[int], list[int], int]:
    """Return (ids of the prompt, ids that may come next, characters of the prompt that those
    repeat); any id may come next if the second is empty.

    A BPE joins a space to the word after it, so in training a lone space is never followed by a
    word. A prompt that ends in white space is therefore shortened by its last token, and the next
    token must begin with that white space.

    n_ids: size of the model's vocabulary. special: recognize special tokens in the prompt. Raises
    ConfigError for an id that the model does not have.
    """
    ids, bos = tokenizer.encode(prompt, special), list(tokenizer.bos)
    if not ids:
        ids, bos = start_ids(tokenizer), []
    if special and ids[: len(bos)] == bos:  # the prompt spells it already
        bos = []
    check_ids(bos + ids, n_ids, tokenizer)
    last = tokenizer.bytes_of(ids[-1])
    if len(ids) > 1 and last and not last.strip(b" \t\n"):
        longer = [i for i, piece in enumerate(tokenizer.table[:n_ids]) if piece.startswith(last)]
        if len(longer) > 1:
            return bos + ids[:-1], longer, len(last)
    return bos + ids, [], 0


# Bytes and characters


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is the end-of-text."""
    return Tokenizer(
        name="byte",
        table=[bytes([b]) for b in range(256)] + [b""],
        eot=256,
        encode_array=lambda text: np.frombuffer(text.encode("utf-8"), dtype=np.uint8),
        special={END_OF_TEXT: 256},
        files={KIND_FILE: _described("byte")},
    )


def char_tokenizer(alphabet: str, with_eot: bool) -> Tokenizer:
    """One id per character of `alphabet` (distinct, sorted); the end-of-text comes last."""
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
        files={KIND_FILE: _described("char", alphabet=alphabet, eot=with_eot)},
    )


def code_points(text: str) -> np.ndarray:
    """Return the code point of each character, (n,) uint32."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def unknown_characters(counts: Mapping[str, int], alphabet: str) -> ConfigError:
    """Return the error for characters that are not in the alphabet; counts: those of the text."""
    unknown = sorted(set(counts) - set(alphabet))
    shown = ", ".join(
        f"{c!r} (U+{ord(c):04X}) {'once' if counts[c] == 1 else f'{counts[c]:,} times'}"
        for c in unknown[:10]
    )
    more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
    return ConfigError(
        f"the char tokenizer does not know {shown}{more}: its {len(alphabet)} characters are "
        f"{alphabet[:60]!r}{'...' if len(alphabet) > 60 else ''}; remove the unknown ones from the "
        "text, or train with --tokenizer=byte or bpe:N, which know every character"
    )


def lost_bytes(text: str, decoded: str) -> int:
    """Return the bytes of the characters that `decoded`, a text after encoding and decoding, has
    fewer of than `text`. Positions are not compared: no tokenizer moves characters."""
    missing = np.bincount(code_points(text), minlength=0x110000)
    missing -= np.bincount(code_points(decoded), minlength=0x110000)
    codes = np.flatnonzero(missing > 0)
    utf8_lengths = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
    return int((missing[codes] * utf8_lengths).sum())


# Ids that are not text: music, molecules, moves. Until they are encoded they are text with one
# character per id, so that they are cut, split and sent to worker processes as text is.

FIRST_CHARACTER = 0x3400  # beyond digits and white space
SURROGATES = range(0xD800, 0xE000)  # code points that are not characters


def ids_tokenizer(size: int) -> Tokenizer:
    """Ids from 0 to size - 1, as the characters of `characters_of` or written as numbers."""

    def encode(text: str) -> np.ndarray:
        codes = code_points(text).astype(np.int64)
        if len(codes) and codes.min() >= FIRST_CHARACTER:
            return codes - FIRST_CHARACTER - len(SURROGATES) * (codes >= SURROGATES.stop)
        return ids_of(text, size, f"tokenizer ids:{size}")

    return Tokenizer(
        name=f"ids:{size}",
        table=[f" {token}".encode() for token in range(size)],
        eot=None,
        encode_array=encode,
        files={KIND_FILE: _described("ids", size=size)},
        spells=False,
    )


def characters_of(ids: np.ndarray) -> str:
    """Return one character per id; the inverse of the encoding above."""
    codes = ids + FIRST_CHARACTER
    codes = codes + len(SURROGATES) * (codes >= SURROGATES.start)
    return codes.astype("<u4").tobytes().decode("utf-32-le")


def ids_of(value: str | list, size: int, name: str, first: int = 0) -> np.ndarray:
    """Return whole numbers from 0 to size - 1, given as text or as a list, as (n,) int64.

    Raises ConfigError with the position, counted from `first`, of anything else.
    """
    numbers = value.split() if isinstance(value, str) else value
    numbers = numbers if isinstance(numbers, list) else [numbers]
    for at, number in enumerate(numbers):
        is_id = isinstance(number, int) and not isinstance(number, bool)
        if isinstance(number, str):
            is_id = number.isascii() and number.isdigit() and len(number) < 10
        if not is_id or not 0 <= int(number) < size:
            raise ConfigError(
                f"{name}: token {first + at} is {str(number)[:40]!r}, but "
                f"data.tokenizer=ids:{size} allows whole numbers from 0 to {size - 1}"
            )
    return np.array([int(number) for number in numbers], dtype=np.int64)


# Our own byte-level BPE (Sennrich et al. 2016; on bytes: Radford et al. 2019): trained by
# `tokenizers`, saved as tokenizer.json, encoded by tiktoken, which is faster.

GIANT_WORD = 1000

# The pattern that cuts text into words, which are never merged with each other. It has GPT-4's
# rules, except that white space after the end of a line stays with the line break, and both with
# the punctuation before them: ":" and the indentation of the next line are one word, which makes
# Python code 6% shorter. It is spelled so that the regex engines of tiktoken and of `tokenizers`
# agree. Repetitions next to a look-ahead are bounded: on a million spaces tiktoken's engine would
# overflow its stack.
SPLIT_PATTERN = (
    r"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]{1,64}(?:[\r\n]{1,64}[ \t]{0,64}(?= \S)|[\r\n]{0,64})"
    r"|\s{1,64}(?!\S)"
    r"|\s"
)


# Llama 3's pattern, which llama.cpp knows by name: a BPE with it can be exported to GGUF.
LLAMA_PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def split_pattern(name: str) -> str:
    """Return the pattern that bpe:N or bpe:N:llama is trained with."""
    return LLAMA_PATTERN if name.endswith(":llama") else SPLIT_PATTERN


def train_bpe(name: str, vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE of at most vocab_size ids, the last of them the end-of-text.

    It has fewer ids if the texts hold too few pairs to merge. name: bpe:N or bpe:N:llama.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trained

    trained = Trained(models.BPE(ignore_merges=True))  # take a known word whole, as tiktoken does
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split_pattern(name)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(_without_giant_words(texts, split_pattern(name)), trainer)
    trained.add_special_tokens([END_OF_TEXT])
    return own_bpe(name, trained.to_str(pretty=True))


def _without_giant_words(texts: Iterable[str], pattern: str) -> Iterator[str]:
    """Cut texts that hold a giant word: training takes time quadratic in its length."""
    unbounded = " \n" if pattern == LLAMA_PATTERN else "\n"
    for text in texts:
        longest = max(map(len, text.split()), default=0)
        if longest > GIANT_WORD or any(white * GIANT_WORD in text for white in unbounded):
            yield from (text[at : at + GIANT_WORD] for at in range(0, len(text), GIANT_WORD))
        else:
            yield text


def own_bpe(name: str, tokenizer_json: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json that `train_bpe` made."""
    about = json.loads(tokenizer_json)
    pattern = about["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]  # not today's
    to_byte = byte_of_character()
    ranks = {bytes(to_byte[c] for c in t): i for t, i in about["model"]["vocab"].items()}
    files = {KIND_FILE: _described("bpe", name=name), JSON_FILE: tokenizer_json}
    max_spaces = WHITE_CHARACTERS if pattern == LLAMA_PATTERN else None
    special = {END_OF_TEXT: len(ranks)}
    return _bpe(name, pattern, ranks, len(ranks) + 1, special, files, max_spaces)


def _bpe(
    name: str,
    pattern: str,
    ranks: dict[bytes, int],
    n_ids: int,
    special: dict[str, int],
    files: dict[str, str],
    max_spaces: int | None = None,
) -> Tokenizer:
    """Return a BPE encoded by tiktoken. max_spaces: see WHITE_CHARACTERS."""
    import tiktoken

    # It knows no special tokens, so that their text is plain text.
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    table = [b""] * n_ids
    for piece, rank in ranks.items():
        table[rank] = piece

    def encode(text: str) -> np.ndarray:
        size = max_spaces or len(text) + 1
        blocks = [text[at : at + size] for at in range(0, len(text), size)]
        if not any(block.isspace() for block in blocks[:-1]):
            blocks = [text]
        ids = [encoding.encode_to_numpy(block, disallowed_special=()) for block in blocks]
        return ids[0] if len(ids) == 1 else np.concatenate(ids)

    return Tokenizer(name, table, special[END_OF_TEXT], encode, special, files)


def byte_of_character() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet, which has a printable character per
    byte, so that a vocabulary can be written as text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


# tiktoken's encodings, by name

NETWORK_SECONDS = 10
WHITE_CHARACTERS = 1 << 17  # a longer run of white space would overflow the stack of its regex
TIKTOKEN_HOST = "https://openaipublic.blob.core.windows.net/"


def tiktoken_files(name: str) -> list[str]:
    """Return the addresses of the files that tiktoken downloads for an encoding."""
    if name == "gpt2":
        folder = "gpt-2/encodings/main/"
        return [TIKTOKEN_HOST + folder + file for file in ("vocab.bpe", "encoder.json")]
    base = {"p50k_edit": "p50k_base", "o200k_harmony": "o200k_base"}.get(name, name)
    return [f"{TIKTOKEN_HOST}encodings/{base}.tiktoken"]


def tiktoken_by_name(name: str) -> Tokenizer:
    """Return a tiktoken encoding. Raises ConfigError if it is neither cached nor downloadable."""
    import tiktoken

    named = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = Path(named or Path(tempfile.gettempdir(), "data-gym-cache"))
    for address in tiktoken_files(name):
        _fetch_once(name, address, cache / hashlib.sha1(address.encode()).hexdigest())
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:
        raise ConfigError(
            f"data.tokenizer={name}: tiktoken cannot load it ({error}): delete the damaged file in "
            f"{cache} and run the command again"
        ) from error
    ranks = encoding._mergeable_ranks.items()
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks]
    about = {
        "name": name,
        "pattern": encoding._pat_str,
        "vocab_size": encoding.n_vocab,
        "special": encoding._special_tokens,
    }
    return tiktoken_from_ranks(about, "".join(lines))


def _fetch_once(name: str, address: str, path: Path) -> None:
    """Download a file to where tiktoken looks for it: tiktoken itself would retry for minutes."""
    if path.exists():
        return
    try:
        with urllib.request.urlopen(address, timeout=NETWORK_SECONDS) as response:
            content = response.read()
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer={name}: {address} cannot be downloaded ({error}): download it on "
            f"another machine and put it at {path} (TIKTOKEN_CACHE_DIR sets the folder), or use "
            "--tokenizer=bpe:N, which needs no network"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


def tiktoken_from_ranks(about: dict, ranks_text: str) -> Tokenizer:
    """Return the tokenizer of saved ranks; needs neither network nor cache."""
    pairs = [line.split() for line in ranks_text.splitlines()]
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in pairs}
    files = {KIND_FILE: _described("tiktoken", **about), RANKS_FILE: ranks_text}
    name, pattern, n_ids = about["name"], about["pattern"], about["vocab_size"]
    return _bpe(name, pattern, ranks, n_ids, about["special"], files, WHITE_CHARACTERS)


# Hugging Face's tokenizer.json

MAX_HOLES = 1 << 20  # ids in a vocabulary that belong to no token
COMMON_EOTS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def hf_from_folder(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder. Raises ConfigError if there is none."""
    path = Path(folder).expanduser()
    if not (path / JSON_FILE).is_file():
        hint = ""
        if (path / "tokenizer.model").is_file():  # transformers converts it when it is loaded
            hint = (
                "; to make it from tokenizer.model (SentencePiece): python -c 'from transformers "
                f'import AutoTokenizer; AutoTokenizer.from_pretrained("{path}")'
                f'.save_pretrained("{path}")\''
            )
        raise ConfigError(f"data.tokenizer=hf:{folder}: {path / JSON_FILE} does not exist{hint}")
    config = path / CONFIG_FILE
    config_text = config.read_text(encoding="utf-8") if config.is_file() else "{}"
    content = (path / JSON_FILE).read_text(encoding="utf-8")
    found = hf_from_json(f"hf:{folder}", content, config_text, _end_ids(path))
    return replace(found, chat_template=_chat_template(path, config_text))


def _chat_template(folder: Path, config_text: str) -> str:
    """Return a folder's chat template: that of its own file, else of the config; "" if none."""
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    found = _json_object(config_text, CONFIG_FILE).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _end_ids(folder: Path) -> list[int]:
    """Return the ids that end a text by the model's own files, as transformers reads them."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        found = _json_object(path.read_bytes(), path).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ConfigError(f"{path}: eos_token_id={found!r}: must be an id or a list of ids")
            return ids
    return []


def _json_object(text: str | bytes, name: object) -> dict[str, Any]:
    """Parse a JSON object. Raises ConfigError with the file's name for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} cannot be read: not a JSON object")
    return found


def hf_from_json(
    name: str, tokenizer_json: str, config_text: str = "{}", ends: Sequence[int] = ()
) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json; its end-of-text is the eos_token of the config.

    ends: the ids that end a text by the model's files, if they name any.
    """
    loaded = _library_tokenizer(name, tokenizer_json)
    table, eot = _table(loaded), _eot(loaded, config_text, ends)
    # A vocabulary with every byte decodes to the same text, unless a normalizer changed it before.
    has_bytes = {bytes([b]) for b in range(256)} <= set(table)
    added = loaded.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    end = None if eot is None else loaded.id_to_token(eot)
    if end is not None and (eot in added or end in COMMON_EOTS):  # special even if not marked so
        special[end] = eot
    for token in special.values():
        table[token] = b""
    about = _json_object(tokenizer_json, JSON_FILE)
    bos = _opening(about.get("post_processor") or {})
    plain = _library_tokenizer(name, _without_special(about, special))

    def encode(text: str) -> np.ndarray:
        try:
            return np.array(plain.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        except Exception as error:  # a WordLevel without an unknown token
            known = b"".join(table).decode("utf-8", errors="replace")
            if set(text) - set(known):
                raise unknown_characters(Counter(text), known) from None
            raise ConfigError(f"tokenizer {name}: cannot encode the text: {error}") from None

    others = tuple(ends) if set(ends) - {eot} else ()
    described = _described("hf", name=name, **({"ends": others} if others else {}))
    return Tokenizer(
        name=name,
        table=table,
        eot=eot,
        encode_array=encode,
        special=special,
        files={KIND_FILE: described, JSON_FILE: tokenizer_json, CONFIG_FILE: config_text},
        bos=tuple(bos),
        ends=others,
        encode_special=lambda text: loaded.encode(text, add_special_tokens=False),
        lossy=loaded.normalizer is not None or not has_bytes,
    )


def _library_tokenizer(name: str, tokenizer_json: str):
    """Return a tokenizers.Tokenizer that neither truncates nor pads."""
    from tokenizers import Tokenizer as Loaded

    try:
        loaded = Loaded.from_str(tokenizer_json)
    except Exception as error:
        raise ConfigError(
            f"data.tokenizer={name}: tokenizer.json cannot be read: {error}"
        ) from None
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _table(loaded) -> list[bytes]:
    """Return the bytes of each id, by the kind of decoder; empty for special tokens."""
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    n_ids = max(vocabulary.values(), default=-1) + 1
    if n_ids > len(vocabulary) + MAX_HOLES:  # a number from a file must not fill the memory
        raise ConfigError(f"{JSON_FILE}: {len(vocabulary):,} tokens, but ids up to {n_ids - 1:,}")
    about = json.loads(loaded.to_str())  # only now: the library counts up to the largest id
    kinds = json.dumps([about["decoder"], about["pre_tokenizer"]])
    table = [b""] * n_ids
    to_bytes: Callable[[str], bytes]
    if '"ByteLevel"' in kinds:
        to_bytes = partial(_byte_level, byte_of_character())
    elif '"WordPiece"' in kinds:
        to_bytes = _word_piece
    else:  # U+2581 stands for a space only if the tokenizer says so
        to_bytes = _metaspace if r"\u2581" in kinds else str.encode
    for token, i in vocabulary.items():
        table[i] = to_bytes(token)
    for i, token in loaded.get_added_tokens_decoder().items():
        table[i] = b"" if token.special else token.content.encode("utf-8")
    return table


def _byte_level(byte_of: dict[str, int], token: str) -> bytes:
    known = all(c in byte_of for c in token)
    return bytes(byte_of[c] for c in token) if known else token.encode("utf-8")


def _metaspace(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode("utf-8")


def _word_piece(token: str) -> bytes:
    return (token[2:] if token.startswith("##") else " " + token).encode("utf-8")


def _eot(loaded, config_text: str, ends: Sequence[int]) -> int | None:
    """Return the id of the config's eos_token, else of a common one, else the first of `ends`."""
    named = _json_object(config_text, CONFIG_FILE).get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    found = [loaded.token_to_id(token) for token in ([named] if named else []) + [*COMMON_EOTS]]
    known = [i for i in ends if i < loaded.get_vocab_size()]
    return next((i for i in (*found, *known) if i is not None), None)


def _opening(processor: dict[str, Any]) -> list[int]:
    """Return the ids that a post-processor puts before a text. transformers follows only it, and
    not `add_bos_token` of the config."""
    kind = processor.get("type")
    if kind == "Sequence":  # after the first that adds something, the others see no single text
        return next(filter(None, map(_opening, processor["processors"])), [])
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][1]]
    found: list[int] = []
    for piece in processor["single"] if kind == "TemplateProcessing" else ():
        if "SpecialToken" not in piece:
            break
        found += processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return found


def _without_special(about: dict[str, Any], special: Iterable[str]) -> str:
    """Return the tokenizer.json with special tokens renamed to what no text contains, so that their
    text is plain text. (The library's `encode_special_tokens` is not enough: a Unigram, a WordLevel
    or a BPE that takes known words whole finds the text in its vocabulary.) Changes `about`."""
    model, names = about["model"], {name: f"\ufdd0{name}\ufdd0" for name in special}
    about["post_processor"] = None  # adds nothing here, and uses the old names
    for token in about.get("added_tokens") or ():
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], list):  # Unigram: pairs of a piece and its score
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [
            [a, b] for a, b in pairs if not {a, b, a + b.removeprefix(prefix)} & names.keys()
        ]
    return json.dumps(about)
