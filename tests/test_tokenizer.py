"""Tokenizers: text comes back, ids are those of the libraries, nothing needs a network."""

from __future__ import annotations

import base64
import hashlib
import inspect
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers

from cli.options import ConfigError
from data.config import TIKTOKEN_SIZES, DataConfig
from data.tokenizer import (
    JSON_FILE,
    StreamDecoder,
    byte_tokenizer,
    char_tokenizer,
    hf_from_json,
    load_tokenizer,
    prompt_ids,
    ready_tokenizer,
    start_ids,
    tiktoken_files,
    tiktoken_from_ranks,
    train_bpe,
)
from model.config import ModelConfig, SamplingConfig
from model.generate import generate
from model.gpt import GPT

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
SPECIAL = "<|endoftext|>"
HARD = [
    "",
    " ",
    "\n",
    "a",
    "no final newline",
    "\t\tx = 1\n\n\n    y  =  2   \n",
    "don't DON'T we'LL I'Ve 'sx 'ſ",
    "naïve café 日本語のテキスト नमस्ते 🙂🏳️‍🌈 \u0300\u0301",
    "12345 3.14159 1e-10 ٣٤٥ Ⅷ ½",
    "a\u00a0b\u2003c\u3000d\u1680e\u2028f\u0085g\x1ch\u200bi\u180ej",
    "\r\n \r \n\r mixed\r\nnewlines\r",
    "\ufeffmark \x00nul\x00\x01\x7f",
    f"before{SPECIAL}after {SPECIAL}<|fim_prefix|>",
    " " * 70 + "x" + "\n" * 200 + " \n" * 100,
    "!?.,;:" * 50 + "\n\n",
    "\U0010ffff\ud7ff\ue000",
]


def corpus(count: int = 12) -> list[str]:
    """A few real Python files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text("utf-8") for path in sorted(folder.glob("a*.py"))[:count]]


@pytest.fixture(scope="module")
def own():
    return train_bpe("bpe:600", 600, [*corpus(), *HARD])


@pytest.fixture(scope="module")
def library(own):
    """The same tokenizer.json, encoded by `tokenizers`."""
    library = Library.from_str(own.files[JSON_FILE])
    library.encode_special_tokens = True
    return library


@pytest.fixture(scope="module")
def named(own):
    """An encoding as tiktoken_by_name returns it, with GPT-2's pattern and our ranks."""
    ranks = {piece: i for i, piece in enumerate(own.table) if piece}
    lines = [f"{base64.b64encode(piece).decode()} {i}\n" for piece, i in ranks.items()]
    special = {SPECIAL: len(ranks), "<|fim_prefix|>": len(ranks) + 3}
    about = {"pattern": GPT2_PATTERN, "vocab_size": len(ranks) + 4, "special": special}
    return tiktoken_from_ranks({"name": "gpt2", **about}, "".join(lines))


@pytest.fixture(scope="module")
def hugging(own):
    return hf_from_json("hf:x", own.files[JSON_FILE])


@pytest.fixture(params=["char", "byte", "own", "named", "hugging"])
def tokenizer(request):
    if request.param == "char":
        return char_tokenizer("".join(sorted(set("".join([*corpus(), *HARD])))), True)
    if request.param == "byte":
        return byte_tokenizer()
    return request.getfixturevalue(request.param)


# Decoding


def test_decoding_an_encoded_text_gives_the_text(tokenizer):
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,) and lengths[tokenizer.eot] == 0
    for text in (*HARD, *corpus(3)):
        ids = tokenizer.encode_array(text)
        assert np.issubdtype(ids.dtype, np.integer) and ids.ndim == 1
        assert tokenizer.encode(text) == ids.tolist()
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode("utf-8")
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode("utf-8"))


@given(text=st.text())
@settings(max_examples=150, deadline=None)
def test_any_unicode_text_comes_back(own, named, hugging, text):
    for tokenizer in (own, named, hugging, byte_tokenizer()):
        assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode("utf-8")


@given(data=st.binary(max_size=40), eots=st.lists(st.integers(0, 40), max_size=3))
@settings(max_examples=200, deadline=None)
def test_streaming_gives_the_text_of_decoding_at_once(data, eots):
    tokenizer = byte_tokenizer()
    assert tokenizer.decode_bytes(data) == data
    ids = list(data)
    for at in eots:
        ids.insert(at, tokenizer.eot)
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids)


def test_streaming_gives_a_character_once_it_is_complete(own):
    decoder = StreamDecoder(own)
    assert "".join(decoder.push(i) for i in own.encode("é🙂x")) == "é🙂x"
    cut = StreamDecoder(byte_tokenizer())
    assert [cut.push(b) for b in "🙂".encode()[:3]] == ["", "", ""]
    assert cut.finish() == "\ufffd"


@pytest.mark.parametrize("token", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer, token):
    with pytest.raises(ValueError, match=f"{token} is outside .* {tokenizer.vocab_size}"):
        tokenizer.decode([token])


# Our BPE has the ids of `tokenizers`


def test_own_bpe_gives_the_ids_of_tokenizers(own, library):
    for text in (*HARD, *corpus(40)):
        assert own.encode(text) == library.encode(text).ids


@given(text=st.text(alphabet=st.sampled_from("aAé1٣ \t\n\r'!_日🙂sLl\u00a0\u0085\x1c\u3000\u0301")))
@settings(max_examples=300, deadline=None)
def test_own_bpe_gives_the_ids_of_tokenizers_on_any_text(own, library, text):
    assert own.encode(text) == library.encode(text).ids


def test_both_regex_engines_know_the_same_characters(own, library):
    """Code points between letters, digits and spaces: all of the first plane, some of the next."""
    points = [c for c in range(0x10000) if not 0xD800 <= c <= 0xDFFF]
    points += range(0x10000, 0x20000, 7)
    for start in range(0, len(points), 4096):
        text = "".join(f"a{chr(c)} {chr(c)}1" for c in points[start : start + 4096])
        assert own.encode(text) == library.encode(text).ids, hex(points[start])


LONG = {
    "letters": "a" * 10**6,
    "spaces": " " * 10**6 + "x",
    "newlines": "\n" * 10**6 + "x",
    "white space": " \n\t\r" * 250_000 + "x",
    "marks": "!" * 10**6,
    "marks and newlines": ("!" + "\n" * 999) * 1000,
    "one line": "word and " * 110_000,
}


@pytest.mark.parametrize("kind", LONG)
def test_long_runs_are_encoded_in_reasonable_time(own, named, kind):
    for tokenizer in (own, named):
        began = time.perf_counter()
        ids = tokenizer.encode(LONG[kind])
        assert time.perf_counter() - began < 10  # takes 0.2 s
        assert tokenizer.decode(ids) == LONG[kind]


def test_a_trained_bpe_has_the_size_asked_for_and_is_reproducible(own):
    assert (own.vocab_size, own.eot) == (600, 599)
    assert Library.from_str(own.files[JSON_FILE]).token_to_id(SPECIAL) == 599
    assert train_bpe("bpe:600", 600, iter([*corpus(), *HARD])).files == own.files
    small = train_bpe("bpe:1000", 1000, ["abab"])  # too few pairs to merge
    assert small.vocab_size < 1000
    assert small.eot == small.vocab_size - 1
    assert small.decode(small.encode("zebra")) == "zebra"


# Special tokens


def test_the_text_of_a_special_token_is_plain_text_unless_asked(tokenizer):
    text = f"a{SPECIAL}b"
    ids = tokenizer.encode(text)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == text
    ids = tokenizer.encode(text, special=True)
    assert ids == [*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize("names", [["<a>", "<a>b"], ["<a>b", "<a>"]])
def test_the_longest_special_token_that_fits_is_taken(names):
    special = {name: 300 + len(name) for name in names}
    made = replace(byte_tokenizer(), special=special)
    assert made.encode("<a>b<a>c", special=True) == [304, 303, ord("c")]


@pytest.mark.parametrize("text", ["naïve🙂", "\r", "A" * 100, "".join(map(chr, range(300, 350)))])
def test_a_character_that_char_does_not_know_is_named(text):
    with pytest.raises(ConfigError) as refused:
        char_tokenizer("\n abenv", False).encode(text)
    unknown = next(c for c in sorted(set(text)) if c not in "\n abenv")
    said = str(refused.value)
    assert f"{unknown!r} (U+{ord(unknown):04X})" in said
    assert "abenv" in said
    assert len(said) < 600


# Prompts


@pytest.fixture(scope="module")
def words():
    text = "def main(argv):\n    return argv\n\ndef name(self):\n    return self.name\n"
    return train_bpe("bpe:300", 300, [text * 40])


def test_an_empty_prompt_starts_from_the_separator_or_a_newline(tokenizer):
    assert tokenizer.encode("") == []
    assert start_ids(tokenizer) == [tokenizer.eot]
    starts = {"\nab": [0], "a\nb": [1], "ab": [0]}
    assert {a: start_ids(char_tokenizer(a, False)) for a in starts} == starts


@pytest.mark.parametrize(("prompt", "kept"), [("def ", "def"), ("    return ", "    return")])
def test_a_lone_space_at_the_end_of_a_prompt_joins_the_next_token(words, prompt, kept):
    ids, first, skip = prompt_ids(words, prompt, 300)
    assert words.decode(ids) == kept
    assert skip == 1
    assert {words.table[i] for i in first} == {p for p in words.table if p.startswith(b" ")}
    token = next(i for i in first if len(words.table[i]) > 2)
    decoder = StreamDecoder(words, skip)  # the space is not printed twice
    assert decoder.push(token) == words.table[token].decode()[1:]
    assert decoder.push(token) == words.table[token].decode()


@pytest.mark.parametrize("prompt", ["def", "def main(", " ", ""])
def test_other_prompts_stay_as_they_are(words, prompt):
    assert prompt_ids(words, prompt, 300) == (words.encode(prompt) or start_ids(words), [], 0)
    for no_longer_tokens in (byte_tokenizer(), char_tokenizer(" def", False)):
        expected = no_longer_tokens.encode("def ")
        assert prompt_ids(no_longer_tokens, "def ", 300) == (expected, [], 0)


def test_the_first_id_is_one_of_those_allowed_and_the_next_is_free():
    model = GPT(ModelConfig(n_layers=1, n_heads=2, d_model=16, context_length=8).resolved(20))
    model.init_weights(1)
    prompt, rng = torch.zeros(64, 2, dtype=torch.int64), torch.Generator().manual_seed(1)
    settings = SamplingConfig(temperature=5.0, max_new_tokens=2)
    first, second = generate(model, prompt, settings, rng, first_ids=[3, 7])
    assert set(first.tolist()) == {3, 7}
    assert len(set(second.tolist())) > 10


# Saving and loading


def test_a_saved_tokenizer_gives_the_same_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t")
    loaded = load_tokenizer(tmp_path / "t")
    for field in ("name", "eot", "special", "bos", "ends", "files"):
        assert getattr(loaded, field) == getattr(tokenizer, field)
    assert list(loaded.table) == list(tokenizer.table)
    for text in (*HARD, *corpus(2)):
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.encode(text, special=True) == tokenizer.encode(text, special=True)


def test_a_saved_bpe_keeps_the_pattern_it_was_trained_with(own, tmp_path, monkeypatch):
    own.save(tmp_path)
    monkeypatch.setattr("data.tokenizer.SPLIT_PATTERN", r"\w+|\W")
    assert load_tokenizer(tmp_path).encode(HARD[5] + HARD[6]) == own.encode(HARD[5] + HARD[6])


def test_llamas_rule_keeps_indentation_apart_from_the_line_before(tmp_path):
    text = "if x:\n    y = 1234\n"
    ours, llama = (train_bpe(name, 320, [text * 50]) for name in ("bpe:320", "bpe:320:llama"))
    words = ["if", " x", ":\n", "   ", " y", " =", " ", "123", "4", "\n"]
    pieces = [piece.decode() for piece in map(llama.bytes_of, llama.encode(text))]
    assert pieces == words  # the text is short: every word is an id
    assert ours.bytes_of(ours.encode(text)[2]) == b":\n   "
    llama.save(tmp_path)
    giant = " " * 300_000 + "\n" + " " * 5000 + "x" + " " * 3000
    assert load_tokenizer(tmp_path).decode(llama.encode(giant)) == giant
    blank = train_bpe("bpe:300:llama", 300, [giant])  # in seconds: its words are cut
    assert blank.decode(blank.encode(giant)) == giant


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ConfigError, match="from tokenizer.model .*: python -c .*save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(ConfigError, match="tokenizer.json does not exist$"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(tmp_path)


# Hugging Face's other kinds


def test_a_tokenizer_json_encodes_as_tokenizers_does(tmp_path):
    pieces = [*("<unk>", "<s>", "</s>"), *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["\u2581", *"defrtunx", "de", "\u2581f"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("d", "e"), ("\u2581", "f")]
    made = Library(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.enable_truncation(5)
    made.enable_padding(length=300)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = ready_tokenizer(f"hf:{tmp_path}")
    made.no_truncation()
    made.no_padding()
    text = "def f(x):\n    return x  # and more than five tokens"
    assert tokenizer.encode(text) == made.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == " " + text
    assert tokenizer.bytes_of(made.token_to_id("<0x0A>")) == b"\n"
    assert tokenizer.eot == made.token_to_id("</s>")
    assert tokenizer.byte_lengths()[[tokenizer.eot, made.token_to_id("<s>")]].tolist() == [0, 0]


def test_a_word_piece_tokenizer_decodes_to_words(tmp_path):
    vocabulary = {"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "now": 4}
    made = Library(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("playing now") == [2, 3, 4]
    assert tokenizer.decode([2, 3, 4]) == " playing now"
    assert tokenizer.eot == 1


# Without a network


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", TIKTOKEN_SIZES)
def test_a_tiktoken_encoding_fails_at_once_with_the_path_to_fill(no_network, name):
    began = time.perf_counter()
    with pytest.raises(ConfigError) as refused:
        ready_tokenizer(name)
    assert time.perf_counter() - began < 5
    said = str(refused.value)
    address = tiktoken_files(name)[0]
    assert address in said
    assert str(no_network / hashlib.sha1(address.encode()).hexdigest()) in said
    assert "bpe:N" in said


def test_a_damaged_file_in_the_cache_is_refused_at_once(no_network):
    no_network.mkdir()
    for address in tiktoken_files("gpt2"):
        key = hashlib.sha1(address.encode()).hexdigest()
        (no_network / key).write_bytes(b"cut sho")
    with pytest.raises(ConfigError, match="gpt2"):
        ready_tokenizer("gpt2")


def test_the_addresses_are_those_that_tiktoken_looks_for():
    from tiktoken_ext import openai_public

    assert set(openai_public.ENCODING_CONSTRUCTORS) == set(TIKTOKEN_SIZES)
    for name, made_by in openai_public.ENCODING_CONSTRUCTORS.items():
        if name == "o200k_harmony":
            made_by = openai_public.o200k_base
        source = inspect.getsource(made_by)
        assert all(address in source for address in tiktoken_files(name))


def test_own_tokenizers_never_touch_the_network(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
    char_tokenizer("ab", False).encode("abba")
    ready_tokenizer("byte").encode("abba")
    train_bpe("bpe:300", 300, ["some text"]).encode("abba")


# Names


@pytest.mark.parametrize("name", ["char", "byte", "bpe:257", "bpe:8192", "hf:x", *TIKTOKEN_SIZES])
def test_good_names_have_no_problems(name):
    assert DataConfig(tokenizer=name).problems() == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bpe", "257"),
        ("bpe:256", "257"),
        ("bpe:-5", "257"),
        ("bpe:1e4", "257"),
        ("bpe:9999999", "1000000"),
        ("gpt-2", "did you mean gpt2"),
        ("chars", "did you mean char"),
        ("hf:", "hf:FOLDER"),
        ("", "char"),
    ],
)
def test_other_names_are_refused_with_what_is_allowed(name, said):
    (problem,) = DataConfig(tokenizer=name).problems()
    assert name in problem
    assert said in problem
