"""Our tokenizers as tokenizer.json and tokenizer_config.json, which AutoTokenizer and others read.

Bytes become a BPE of `tokenizers` without merges, tiktoken's ranks one with the merges that they
imply, characters a WordLevel: it raises an error for a character that it does not know. What comes
out must give the same ids on PROBE, or nothing is written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cli.options import ConfigError
from data.tokenizer import CONFIG_FILE, END_OF_TEXT, JSON_FILE, Tokenizer, byte_of_character

PAD = "<|pad|>"  # of a vocabulary without an end-of-text
PROBE = (
    "The quick brown fox's 12 lazy dogs -- they'LL jump 3.14159 times!\n\n\tdef f(x):\n"
    "        return x ** 2  # caf\u00e9, na\u00efve, \u00df, \u0416\u0443\u043a, "
    "\u4f60\u597d\u4e16\u754c, "
    "\U0001f600\u200d\U0001f525, e\u0301, \u00a0\u2003 ~\n\n\n   \n123456789 1,000,000   \t  end "
    "HTTPServer2 camelCase O'Neill I'd we've   trailing spaces   \n x\n"
)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> str:
    """Write both files into `folder`; a line on what was checked.

    Raises ConfigError, by the tokenizer's name, if it gives other ids or another text there.
    """
    if not tokenizer.spells:
        raise ConfigError(
            f"tokenizer {tokenizer.name}: its ids stand for no text, so it has no tokenizer.json; "
            "export with --format=onnx, torchscript or torch_export, which need none"
        )
    kept = tokenizer.files.get(JSON_FILE)
    if kept is not None:
        config_text = tokenizer.files.get(CONFIG_FILE)
        config = json.loads(config_text) if config_text else _config(tokenizer, context_length)
        if config_text and not config.get("pad_token") and tokenizer.eot is not None:
            names = {i: text for text, i in tokenizer.special.items()}
            config["pad_token"] = names.get(tokenizer.eot)
        content = kept
    else:
        content = json.dumps(_from_table(tokenizer), ensure_ascii=False, indent=1)
        config = _config(tokenizer, context_length)
    (folder / JSON_FILE).write_text(content, encoding="utf-8", newline="\n")
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return _checked(tokenizer, folder)


def _config(tokenizer: Tokenizer, context_length: int) -> dict[str, Any]:
    end = None if tokenizer.eot is None else END_OF_TEXT
    # Batches are padded with it, on the left, for what is generated stands on the right.
    pad = PAD if PAD in tokenizer.special else end
    return {
        "pad_token": pad,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": end,  # documents follow the end of another
        "eos_token": end,
    }


def _checked(tokenizer: Tokenizer, folder: Path) -> str:
    from tokenizers import Tokenizer as Loaded

    loaded = Loaded.from_file(str(folder / JSON_FILE))
    text = probe_text(tokenizer)
    ids = tokenizer.encode(text)
    theirs = loaded.encode(text, add_special_tokens=False).ids
    if theirs != ids:
        at = next((i for i, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), -1)
        raise ConfigError(
            f"tokenizer {tokenizer.name}: cannot become a tokenizer.json: it gives other ids, at "
            f"token {at} of a text of {len(ids)}; use --format=onnx, torchscript or torch_export"
        )
    for name, token in tokenizer.special.items():
        if loaded.token_to_id(name) != token:
            raise ConfigError(
                f"tokenizer {tokenizer.name}: {name} would get another id than {token}"
            )
    if loaded.decode(theirs, skip_special_tokens=False) != tokenizer.decode(ids):
        raise ConfigError(f"tokenizer {tokenizer.name}: its tokenizer.json decodes to another text")
    return f"{JSON_FILE}: the same {len(ids)} ids and text as {tokenizer.name} on a text of probes"


def probe_text(tokenizer: Tokenizer) -> str:
    """Text to try a tokenizer on: many scripts and spaces, or all the characters that it knows."""
    if tokenizer.name != "char":
        return PROBE
    alphabet = "".join(piece.decode("utf-8") for piece in tokenizer.table)
    return (
        alphabet
        + alphabet[::-1]
        + "".join(a + b for a, b in zip(alphabet, alphabet[7:], strict=False))
    )


def _from_table(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer.json of a char, byte or tiktoken tokenizer."""
    about = json.loads(next(text for text in tokenizer.files.values() if text.startswith("{")))
    kind = about["kind"]
    if kind == "char":
        vocabulary = {c: i for i, c in enumerate(about["alphabet"])} | tokenizer.special
        # unk_token must be named; that there is no such token makes an unknown character an error.
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"}
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}}
        split |= {"behavior": "Isolated", "invert": False}
        return _tokenizer_json(model, split, {"type": "Fuse"}, tokenizer.special)
    characters = {b: c for c, b in byte_of_character().items()}
    ids = {piece: i for i, piece in enumerate(tokenizer.table) if piece}
    spelled = {piece: "".join(characters[b] for b in piece) for piece in ids}
    merges = [] if kind == "byte" else _merges(ids)
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    before: dict[str, Any] = level
    if kind != "byte":
        split = {"type": "Split", "pattern": {"Regex": _oniguruma(about["pattern"])}}
        split |= {"behavior": "Isolated", "invert": False}
        before = {"type": "Sequence", "pretokenizers": [split, level]}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,  # a known piece is taken whole, as tiktoken does
        # Special tokens too: by themselves they would get the next ids, whatever is said below.
        "vocab": {spelled[piece]: i for piece, i in ids.items()} | tokenizer.special,
        "merges": [[spelled[a], spelled[b]] for a, b in merges],
    }
    return _tokenizer_json(model, before, level, tokenizer.special)


def _tokenizer_json(
    model: dict[str, Any], before: dict, decoder: dict, special: dict[str, int]
) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    by_id = sorted(special.items(), key=lambda item: item[1])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t, **flags, "special": True} for t, i in by_id],
        "normalizer": None,
        "pre_tokenizer": before,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _merges(ids: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that each piece of more than a byte is merged from, in the order of the ranks.

    It is what the encoder makes of the piece with the ranks below its own: two pieces.
    """
    merges = []
    for piece, rank in sorted(ids.items(), key=lambda item: item[1]):
        parts = [piece[i : i + 1] for i in range(len(piece))]
        while len(parts) > 2:
            joined = [ids.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            lowest = min(joined)
            if lowest >= rank:
                break
            i = joined.index(lowest)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _oniguruma(pattern: str) -> str:
    """tiktoken's pattern for the regex engine of `tokenizers`.

    There `{1,3}+` repeats, where tiktoken's is possessive, and `$` matches at every line's end. The
    patterns of tiktoken are possessive for speed alone; that the ids stay the same is checked.
    """
    greedy = re.sub(r"([+*?]|\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    return greedy.replace("$", r"\z")
