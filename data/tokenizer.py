"""Tokenizers: built by name, read back from a folder; decoding as a stream of characters."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

from cli.options import ConfigError
from data import pretrained, vocabulary
from data.meta import DamagedData
from data.vocabulary import FILE, Tokenizer, byte_tokenizer, char_tokenizer, ids_tokenizer

__all__ = [
    "StreamDecoder",
    "Tokenizer",
    "check_ids",
    "load_tokenizer",
    "prompt_ids",
    "ready_tokenizer",
    "start_ids",
]


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
        return pretrained.hf_from_folder(name.removeprefix("hf:"))
    if name.startswith("run:"):
        return load_tokenizer(_folder_of_run(name.removeprefix("run:")))
    return pretrained.tiktoken_by_name(name)


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
        return pretrained.hf_from_folder(str(folder))
    about = json.loads(_text(folder, FILE))
    kind = about.pop("kind")
    if kind == "char":
        return char_tokenizer(about["alphabet"], about["eot"])
    if kind == "byte":
        return byte_tokenizer()
    if kind == "ids":
        return ids_tokenizer(about["size"])
    if kind == "bpe":
        return vocabulary.own_bpe(about["name"], _text(folder, vocabulary.JSON_FILE))
    if kind == "hf":
        config, content = _text(folder, pretrained.CONFIG_FILE), _text(folder, vocabulary.JSON_FILE)
        return pretrained.hf_from_json(about["name"], content, config, about.get("ends", ()))
    return pretrained.tiktoken_from_ranks(about, _text(folder, pretrained.RANKS_FILE))


def _text(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


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
