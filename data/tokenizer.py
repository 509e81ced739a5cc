"""Tokenizers: built by name, read back from a folder; decoding as a stream of characters."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

from data import bpe
from data.options import ConfigError
from data.vocabulary import FILE, Tokenizer, byte_tokenizer, char_tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "load_tokenizer", "start_ids"]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote into this folder. Touches no network.

    Raises ConfigError if there is none.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise ConfigError(f"{folder} holds no tokenizer of ours ({FILE} is missing)")
    about = json.loads(path.read_text(encoding="utf-8"))
    kinds = {
        "char": lambda: char_tokenizer(about["alphabet"], about["eot"]),
        "byte": byte_tokenizer,
        "bpe": lambda: bpe.own_bpe(about["name"], _text(folder, bpe.JSON_FILE)),
        "tiktoken": lambda: bpe.tiktoken_from_files(about, _text(folder, bpe.RANKS_FILE)),
    }
    return kinds[about["kind"]]()


def _text(folder: Path, name: str) -> str:
    return (Path(folder) / name).read_text(encoding="utf-8")


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """What an empty prompt starts from: the end-of-text, else a newline, else id 0."""
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    return [tokenizer.table.index(b"\n") if b"\n" in tokenizer.table else 0]


class StreamDecoder:
    """Decodes ids one by one, giving only complete characters; the same text as `decode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this id completes."""
        return self._decoder.decode(self._tokenizer.bytes_of(int(token)))

    def finish(self) -> str:
        """What is left: U+FFFD if the ids ended inside a character."""
        return self._decoder.decode(b"", final=True)
