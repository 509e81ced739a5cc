"""Other people's tokenizers: tiktoken's encodings by name, and Hugging Face's tokenizer.json."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cli.files import replace_file
from cli.options import ConfigError
from data.vocabulary import (
    END_OF_TEXT,
    FILE,
    JSON_FILE,
    Tokenizer,
    byte_of_character,
    described,
    encoding_of,
    unknown_characters,
)

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
