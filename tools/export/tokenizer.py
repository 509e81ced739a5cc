"""Our tokenizers as tokenizer.json and tokenizer_config.json, for AutoTokenizer and `tokenizers`.

Bytes become a BPE without merges, tiktoken's ranks a BPE with the merges that they imply, and
characters a WordLevel model, which raises an error for an unknown character. The files must give
the same ids and text on PROBE, or the export fails.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from cli.options import ConfigError
from data.tokenizer import (
    CONFIG_FILE,
    END_OF_TEXT,
    JSON_FILE,
    TEMPLATE_FILE,
    Tokenizer,
    byte_of_character,
)

PAD = "<|pad|>"  # for a vocabulary without an end-of-text token
PROBE = (
    "The quick brown fox's 12 lazy dogs -- they'LL jump 3.14159 times!\n\n\tdef f(x):\n"
    "        return x ** 2  # caf\u00e9, na\u00efve, \u00df, \u0416\u0443\u043a, "
    "\u4f60\u597d\u4e16\u754c, "
    "\U0001f600\u200d\U0001f525, e\u0301, \u00a0\u2003 ~\n\n\n   \n123456789 1,000,000   \t  end "
    "HTTPServer2 camelCase O'Neill I'd we've   trailing spaces   \n x\n"
)


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, context_length: int
) -> tuple[str, dict[str, int]]:
    """Write both files into `folder`; return a line on what was verified, and the ids of the
    tokens that tokenizer_config.json names: {"bos_token": 0, ...}."""
    content, config, line = verified_tokenizer(tokenizer, context_length)
    (folder / JSON_FILE).write_text(content, encoding="utf-8", newline="\n")
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    if tokenizer.chat_template:
        (folder / TEMPLATE_FILE).write_text(tokenizer.chat_template, encoding="utf-8")
    return line, _named(content, config)


def verified_tokenizer(
    tokenizer: Tokenizer, context_length: int
) -> tuple[str, dict[str, Any], str]:
    """Return tokenizer.json, the content of tokenizer_config.json, and a line on what was verified.

    Raises ConfigError if the files would give other ids or another text.
    """
    if not tokenizer.spells:
        raise ConfigError(
            f"tokenizer {tokenizer.name}: its ids have no text, so it has no tokenizer.json; "
            "export with --format=onnx, torchscript or torch_export, which do not need one"
        )
    content, config_text = tokenizer.files.get(JSON_FILE), tokenizer.files.get(CONFIG_FILE)
    if content is None:
        content = _from_table(tokenizer)
    if config_text:
        config = json.loads(config_text)
        if not config.get("pad_token") and tokenizer.eot is not None:
            names = {i: text for text, i in tokenizer.special.items()}
            config["pad_token"] = names.get(tokenizer.eot)
    else:
        config = _config(tokenizer, context_length)
    # transformers before 5 would add token_type_ids, which Llama's generate refuses and GPT-2 adds
    # to the embedding.
    config.setdefault("model_input_names", ["input_ids", "attention_mask"])
    return content, config, _verify(tokenizer, content)


def _config(tokenizer: Tokenizer, context_length: int) -> dict[str, Any]:
    end = None if tokenizer.eot is None else END_OF_TEXT
    return {
        "pad_token": PAD if PAD in tokenizer.special else end,
        "padding_side": "left",  # generated tokens are appended on the right
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": end,  # in training, a document follows the end of another
        "eos_token": end,
    }


def _verify(tokenizer: Tokenizer, content: str) -> str:
    from tokenizers import Tokenizer as Loaded

    loaded, name = Loaded.from_str(content), f"tokenizer {tokenizer.name}"
    text = probe_text(tokenizer)
    ids = tokenizer.encode(text)
    theirs = loaded.encode(text, add_special_tokens=False).ids
    if theirs != ids:
        at = next((i for i, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), -1)
        raise ConfigError(
            f"{name}: cannot become a tokenizer.json: its ids would differ at token {at} of "
            f"{len(ids)} in a test text; use --format=onnx, torchscript or torch_export"
        )
    for special, token in tokenizer.special.items():
        if loaded.token_to_id(special) != token:
            raise ConfigError(f"{name}: {special} would get another id than {token}")
    if loaded.decode(theirs, skip_special_tokens=False) != tokenizer.decode(ids):
        raise ConfigError(f"{name}: its tokenizer.json decodes to another text")
    return f"{JSON_FILE}: same {len(ids)} ids and text as {tokenizer.name} on a test text"


def _named(content: str, config: dict[str, Any]) -> dict[str, int]:
    from tokenizers import Tokenizer as Loaded

    loaded = Loaded.from_str(content)
    found: dict[str, int] = {}
    for role in ("bos_token", "pad_token"):
        token = config.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if token and (known := loaded.token_to_id(token)) is not None:
            found[role] = known
    return found


def probe_text(tokenizer: Tokenizer) -> str:
    """Return text to compare tokenizers on: many scripts and spaces, or all known characters."""
    if tokenizer.name != "char":
        return PROBE
    alphabet = "".join(piece.decode("utf-8") for piece in tokenizer.table)
    pairs = zip(alphabet, alphabet[7:], strict=False)
    return alphabet + alphabet[::-1] + "".join(a + b for a, b in pairs)


def _from_table(tokenizer: Tokenizer) -> str:
    """Return tokenizer.json of a char, byte or tiktoken tokenizer."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    about = json.loads(next(text for text in tokenizer.files.values() if text.startswith("{")))
    special = tokenizer.special
    if about["kind"] == "char":
        vocabulary = {c: i for i, c in enumerate(about["alphabet"])} | special
        # unk_token must be named. As no such token exists, an unknown character is an error.
        made = Library(models.WordLevel(vocabulary, unk_token="<unknown>"))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
    else:
        characters = {b: c for c, b in byte_of_character().items()}
        ids = {piece: i for i, piece in enumerate(tokenizer.table) if piece}
        spelled = {piece: "".join(characters[b] for b in piece) for piece in ids}
        # Special tokens too: those not in the vocabulary would be given the next free ids.
        vocabulary = {spelled[piece]: i for piece, i in ids.items()} | special
        merges = [] if about["kind"] == "byte" else _merges(ids)
        pairs = [(spelled[a], spelled[b]) for a, b in merges]
        # A known piece is taken whole (ignore_merges), as tiktoken does.
        made = Library(models.BPE(vocabulary, pairs, ignore_merges=True))
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = level
        if about["kind"] != "byte":
            split = pre_tokenizers.Split(Regex(_oniguruma(about["pattern"])), "isolated")
            made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        made.decoder = decoders.ByteLevel()
    by_id = sorted(special, key=special.__getitem__)
    made.add_special_tokens([AddedToken(text, normalized=False) for text in by_id])
    return made.to_str(pretty=True)


def _merges(ids: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pair that each piece of several bytes is merged from, in the order of the ranks.

    Encoding a piece with the ranks below its own leaves two pieces: that pair.
    """
    merges = []
    for piece, rank in sorted(ids.items(), key=lambda item: item[1]):
        parts = [piece[i : i + 1] for i in range(len(piece))]
        while len(parts) > 2:
            joined = [ids.get(a + b, rank) for a, b in pairwise(parts)]
            lowest = min(joined)
            if lowest >= rank:
                break
            i = joined.index(lowest)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _oniguruma(pattern: str) -> str:
    """Rewrite tiktoken's pattern for the regex engine of `tokenizers`.

    There, `{1,3}+` repeats instead of being possessive, and `$` matches at the end of every line.
    tiktoken's patterns are possessive for speed only; that the ids stay the same is verified.
    """
    greedy = re.sub(r"([+*?]|\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    return greedy.replace("$", r"\z")
