"""Text to ids and back. A tokenizer is a table (the bytes of each id) and a way to encode."""

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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cli.files import replace_file
from cli.options import ConfigError
from data.meta import DamagedData

FILE = "plaingpt_tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
RANKS_FILE = "ranks.tiktoken"  # tiktoken's form: a token in base64 and its rank on each line
CONFIG_FILE = "tokenizer_config.json"
NETWORK_SECONDS = 10
MOST_HOLES = 1 << 20  # ids of a vocabulary that belong to no token
WHITE_CHARACTERS = 1 << 17

TIKTOKEN_HOST = "https://openaipublic.blob.core.windows.net/"
TIKTOKEN_FILES = {
    "gpt2": ("gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"),
    "r50k_base": ("encodings/r50k_base.tiktoken",),
    "p50k_base": ("encodings/p50k_base.tiktoken",),
    "p50k_edit": ("encodings/p50k_base.tiktoken",),
    "cl100k_base": ("encodings/cl100k_base.tiktoken",),
    "o200k_base": ("encodings/o200k_base.tiktoken",),
    "o200k_harmony": ("encodings/o200k_base.tiktoken",),
}
COMMON_EOTS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


# Ids of the encodings that tiktoken knows by name; a table, since asking it may need the network.
TIKTOKEN_SIZES = {
    "gpt2": 50257,
    "r50k_base": 50257,
    "p50k_base": 50281,
    "p50k_edit": 50284,
    "cl100k_base": 100277,
    "o200k_base": 200019,
    "o200k_harmony": 201088,
}


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


class StreamDecoder:
    """Decodes ids one by one, giving only complete characters; the same text as `decode`, less
    the first `skip` characters (of `prompt_ids`)."""

    def __init__(self, tokenizer: Tokenizer, skip: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this id completes."""
        text = self._decoder.decode(self._tokenizer.bytes_of(int(token)))
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]

    def finish(self) -> str:
        """What is left: U+FFFD if the ids ended inside a character."""
        return self._decoder.decode(b"", final=True)


# By name, or from a folder


def ready_tokenizer(name: str) -> Tokenizer | None:
    """The tokenizer of this name; None if it is made from the text (char, bpe:N).

    Raises ConfigError if somebody else's is not to be had.
    """
    if name == "char" or name.startswith("bpe:"):
        return None
    if name == "byte":
        return byte_tokenizer()
    if name.startswith("ids:"):
        return ids_tokenizer(int(name.removeprefix("ids:")))
    if name.startswith("hf:"):
        return hf_from_folder(name.removeprefix("hf:"))
    if name.startswith("run:"):
        return load_tokenizer(_folder_of_run(name.removeprefix("run:")))
    return tiktoken_by_name(name)


def _folder_of_run(run: str) -> Path:
    """The tokenizer's folder in a checkpoint, or in the newest one of a run: all have the same."""
    path = Path(run).expanduser()
    steps = sorted(path.glob("checkpoints/step-*/tokenizer"), key=lambda p: (len(str(p)), str(p)))
    found = [folder for folder in (path / "tokenizer", *steps) if (folder / FILE).is_file()]
    if not found:
        raise ConfigError(f"data.tokenizer=run:{run}: no checkpoint with a tokenizer there")
    return found[-1]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote into this folder, or a Hugging Face tokenizer.json.

    Touches no network. Raises ConfigError if there is none, DamagedData if it cannot be read.
    """
    try:
        return _load(Path(folder))
    except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
        if isinstance(error, (ConfigError, PermissionError)):
            raise
        raise DamagedData(f"{folder}: the tokenizer cannot be read ({error!r})") from error


def _load(folder: Path) -> Tokenizer:
    if not (folder / FILE).is_file():
        return hf_from_folder(str(folder))
    about = json.loads(_text(folder, FILE))
    kind = about.pop("kind")
    if kind == "char":
        return char_tokenizer(about["alphabet"], about["eot"])
    if kind == "byte":
        return byte_tokenizer()
    if kind == "ids":
        return ids_tokenizer(about["size"])
    if kind == "bpe":
        return own_bpe(about["name"], _text(folder, JSON_FILE))
    if kind == "hf":
        config, content = _text(folder, CONFIG_FILE), _text(folder, JSON_FILE)
        return hf_from_json(about["name"], content, config, about.get("ends", ()))
    return tiktoken_from_ranks(about, _text(folder, RANKS_FILE))


def _text(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


# Prompts


def check_ids(ids: Sequence[int], n_ids: int, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for an id that a model of n_ids ids does not know."""
    if ids and max(ids) >= n_ids:
        raise ConfigError(
            f"the text has id {max(ids)}, the model knows {n_ids} ids: the tokenizer "
            f"{tokenizer.name} ({tokenizer.vocab_size} ids) is another model's"
        )


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """What an empty prompt starts from: the document start, the end-of-text, a newline or id 0."""
    if tokenizer.bos:
        return list(tokenizer.bos)
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    return [tokenizer.table.index(b"\n") if b"\n" in tokenizer.table else 0]


def prompt_ids(
    tokenizer: Tokenizer, prompt: str, n_ids: int, special: bool = False
) -> tuple[list[int], list[int], int]:
    """How to continue a prompt: its ids, the ids that may come first, and how many characters of
    the prompt those spell again; ([...], [], 0) where any id may come.

    A BPE joins a space to the word after it, so after a space of its own it expects what is never
    joined to one. A prompt that ends in white space is therefore taken back to the token before,
    and goes on with a token that begins with this white space.

    n_ids: how many ids the model knows. special: whether the text of special tokens in the prompt
    stands for them. Raises ConfigError for an id that the model does not know.
    """
    ids, bos = tokenizer.encode(prompt, special), list(tokenizer.bos)
    if not ids:
        ids, bos = start_ids(tokenizer), []
    if special and ids[: len(bos)] == bos:  # typed already
        bos = []
    check_ids(bos + ids, n_ids, tokenizer)
    last = tokenizer.bytes_of(ids[-1])
    if len(ids) > 1 and last and not last.strip(b" \t\n"):
        longer = [i for i, piece in enumerate(tokenizer.table[:n_ids]) if piece.startswith(last)]
        if len(longer) > 1:
            return bos + ids[:-1], longer, len(last)
    return bos + ids, [], 0


# Tokenizers of our own


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


# tiktoken's encodings


def tiktoken_by_name(name: str) -> Tokenizer:
    """A tiktoken encoding. Without it in the cache and a network: ConfigError, at once."""
    import tiktoken

    for file in TIKTOKEN_FILES[name]:
        _fetch_once(name, TIKTOKEN_HOST + file)
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:
        raise ConfigError(
            f"data.tokenizer={name}: tiktoken cannot load it ({error}): delete the damaged file in "
            f"{_tiktoken_cache()} and fetch it again"
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


def tiktoken_from_ranks(about: dict, ranks_text: str) -> Tokenizer:
    """The tokenizer of saved ranks; needs neither network nor cache."""
    pairs = [line.split() for line in ranks_text.splitlines()]
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in pairs}
    encoding = encoding_of(about["name"], about["pattern"], ranks)
    table = [b""] * about["vocab_size"]
    for piece, rank in ranks.items():
        table[rank] = piece

    def encode(text: str) -> np.ndarray:
        blocks = [encoding.encode_to_numpy(b, disallowed_special=()) for b in _blocks(text)]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    special = about["special"]
    files = {FILE: described("tiktoken", **about), RANKS_FILE: ranks_text}
    return Tokenizer(about["name"], table, special[END_OF_TEXT], encode, special, files)


def _blocks(text: str) -> list[str]:
    """The text whole, unless it holds a run of white space on which tiktoken's regex overflows."""
    starts = range(0, len(text), WHITE_CHARACTERS)
    blocks = [text[at : at + WHITE_CHARACTERS] for at in starts]
    return blocks if any(block.isspace() for block in blocks[:-1]) else [text]


def _tiktoken_cache() -> Path:
    named = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    return Path(named or Path(tempfile.gettempdir(), "data-gym-cache"))


def _fetch_once(name: str, address: str) -> None:
    """Put a file where tiktoken looks for it: tiktoken itself would try for minutes."""
    path = _tiktoken_cache() / hashlib.sha1(address.encode()).hexdigest()
    if path.exists():
        return
    try:
        with urllib.request.urlopen(address, timeout=NETWORK_SECONDS) as response:
            content = response.read()
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer={name}: {address} cannot be fetched ({error}): fetch it elsewhere and "
            f"put it at {path} (the folder is TIKTOKEN_CACHE_DIR's), or use --tokenizer=bpe:N, "
            "which needs no network"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


# Hugging Face's tokenizer.json


def hf_from_folder(folder: str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises ConfigError if there is none."""
    path = Path(folder).expanduser()
    if not (path / JSON_FILE).is_file():
        raise ConfigError(f"data.tokenizer=hf:{folder}: there is no {path / JSON_FILE}")
    config = path / CONFIG_FILE
    config_text = config.read_text(encoding="utf-8") if config.is_file() else "{}"
    content = (path / JSON_FILE).read_text(encoding="utf-8")
    return hf_from_json(f"hf:{folder}", content, config_text, _end_ids(path))


def _end_ids(folder: Path) -> list[int]:
    """The ids that end a text according to the model's own files, as transformers reads them."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        found = _object(path.read_bytes(), str(path)).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ConfigError(f"{path}: eos_token_id={found!r}: must be an id or a list of ids")
            return ids
    return []


def _object(text: str | bytes, name: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError, by the file's name, for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} cannot be read: not a JSON object")
    return found


def opening_ids(tokenizer_json: str) -> list[int]:
    """The ids that the tokenizer's post-processor puts before a text.

    transformers heeds it alone: not the config's `add_bos_token`.
    """
    return _opening(_object(tokenizer_json, JSON_FILE).get("post_processor") or {})


def _opening(processor: dict[str, Any]) -> list[int]:
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


def hf_from_json(
    name: str, tokenizer_json: str, config_text: str = "{}", ends: Sequence[int] = ()
) -> Tokenizer:
    """The tokenizer of a tokenizer.json; its end-of-text is the eos_token of the config.

    ends: the ids that end a text, if the model's files tell.
    """
    loaded = _loaded(name, tokenizer_json)
    table, eot = _table(loaded), _eot(loaded, config_text, ends)
    special = _special(loaded, eot)
    for token in special.values():
        table[token] = b""
    plain = _loaded(name, _without_names(tokenizer_json, special))

    def encode(text: str) -> np.ndarray:
        try:
            return np.array(plain.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        except Exception as error:  # a WordLevel without an unknown token
            raise _not_encoded(name, text, table, error) from None

    def encode_special(text: str) -> list[int]:
        return loaded.encode(text, add_special_tokens=False).ids

    others = tuple(ends) if set(ends) - {eot} else ()
    about = described("hf", name=name, **({"ends": others} if others else {}))
    return Tokenizer(
        name=name,
        table=table,
        eot=eot,
        encode_array=encode,
        special=special,
        files={FILE: about, JSON_FILE: tokenizer_json, CONFIG_FILE: config_text},
        bos=tuple(opening_ids(tokenizer_json)),
        ends=others,
        encode_special=encode_special,
        lossy=_is_lossy(loaded, table),
    )


def _not_encoded(name: str, text: str, table: list[bytes], error: Exception) -> ConfigError:
    known = b"".join(table).decode("utf-8", errors="replace")
    if set(text) - set(known):
        return unknown_characters(Counter(text), known)
    return ConfigError(f"tokenizer {name}: the text cannot be encoded: {error}")


def _loaded(name: str, tokenizer_json: str):
    """A tokenizers.Tokenizer that neither truncates nor pads."""
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


def _special(loaded, eot: int | None) -> dict[str, int]:
    """Text of special tokens -> id, the end-of-text among them even if it is not marked so."""
    added = loaded.get_added_tokens_decoder()
    found = {token.content: i for i, token in added.items() if token.special}
    end = loaded.id_to_token(eot) if eot is not None else None
    if end is not None and (eot in added or end in COMMON_EOTS):
        found[end] = eot
    return found


def _is_lossy(loaded, table: list[bytes]) -> bool:
    """Whether decoding may give another text: not from a token per byte and the text as it is."""
    every_byte = {bytes([b]) for b in range(256)} <= set(table)
    return loaded.normalizer is not None or not every_byte


def _without_names(tokenizer_json: str, special: Iterable[str]) -> str:
    """The tokenizer.json with special tokens under names that no text holds: their own text is
    plain text then. (The library's `encode_special_tokens` is not enough: a Unigram, a WordLevel or
    a BPE that takes known words whole finds the text in its vocabulary.)
    """
    about = _object(tokenizer_json, JSON_FILE)
    model, names = about["model"], {name: f"\ufdd0{name}\ufdd0" for name in special}
    about["post_processor"] = None  # adds nothing here, and knows the old names
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


def _table(loaded) -> list[bytes]:
    """The bytes of each id, by the kind of the tokenizer's decoder; none for special tokens."""
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    n_ids = max(vocabulary.values(), default=-1) + 1
    if n_ids > len(vocabulary) + MOST_HOLES:  # it comes from a file: nothing that large is made
        raise ConfigError(f"{JSON_FILE}: {len(vocabulary):,} tokens, but ids up to {n_ids - 1:,}")
    about = json.loads(loaded.to_str())  # not before: the library counts up to the largest id
    kinds = json.dumps([about["decoder"], about["pre_tokenizer"]])
    table = [b""] * n_ids
    to_bytes: Callable[[str], bytes]
    if '"ByteLevel"' in kinds:
        to_bytes = partial(_byte_level, byte_of_character())
    elif '"WordPiece"' in kinds:
        to_bytes = _word_piece
    else:  # U+2581 stands for a space only where the tokenizer says so
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
    named = _named(_object(config_text, CONFIG_FILE), "eos_token")
    candidates = [named] if named else []
    found = [loaded.token_to_id(token) for token in (*candidates, *COMMON_EOTS)]
    known = [i for i in ends if i < loaded.get_vocab_size()]
    return next((i for i in (*found, *known) if i is not None), None)


def _named(config: dict[str, Any], role: str) -> str | None:
    """The text of a token that tokenizer_config.json names, such as its eos_token."""
    token = config.get(role)
    return token.get("content") if isinstance(token, dict) else token
