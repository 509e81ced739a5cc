"""Our own byte-level BPE: trained by `tokenizers`, kept as tokenizer.json, encoded by tiktoken."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from data.vocabulary import END_OF_TEXT, FILE, Tokenizer, described

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
