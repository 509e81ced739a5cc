"""A prompt that ends in white space: no BPE token stands after a space of its own."""

from __future__ import annotations

import pytest
import torch

from data.tokenizer import (
    StreamDecoder,
    byte_tokenizer,
    char_tokenizer,
    prompt_ids,
    start_ids,
    train_bpe,
)
from model.config import ModelConfig, SamplingConfig
from model.generate import generate
from model.gpt import GPT

TEXT = "def main(argv):\n    return argv\n\ndef name(self):\n    return self.name\n" * 40


@pytest.fixture(scope="module")
def words():
    return train_bpe("bpe:300", 300, [TEXT])


@pytest.mark.parametrize(("prompt", "kept"), [("def ", "def"), ("    return ", "    return")])
def test_a_lone_space_at_the_end_is_taken_back(words, prompt, kept):
    ids, first, skip = prompt_ids(words, prompt, 300)
    assert words.decode(ids) == kept
    assert skip == 1
    assert {words.table[i] for i in first} == {p for p in words.table if p.startswith(b" ")}


@pytest.mark.parametrize("prompt", ["def", "def main(", " ", ""])
def test_other_prompts_stay_as_they_are(words, prompt):
    assert prompt_ids(words, prompt, 300) == (words.encode(prompt) or start_ids(words), [], 0)


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), char_tokenizer(" def", False)])
def test_where_no_token_is_longer_nothing_changes(tokenizer):
    assert prompt_ids(tokenizer, "def ", 300) == (tokenizer.encode("def "), [], 0)


def test_the_characters_are_not_spelled_twice(words):
    ids, first, skip = prompt_ids(words, "def ", 300)
    token = next(i for i in first if len(words.table[i]) > 2)
    decoder = StreamDecoder(words, skip)
    assert decoder.push(token) == words.table[token].decode()[1:]
    assert decoder.push(token) == words.table[token].decode()


def test_the_first_id_is_one_of_those_allowed_and_the_next_is_free():
    model = GPT(ModelConfig(n_layers=1, n_heads=2, d_model=16, context_length=8).resolved(20))
    model.init_weights(1)
    prompt, rng = torch.zeros(64, 2, dtype=torch.int64), torch.Generator().manual_seed(1)
    settings = SamplingConfig(temperature=5.0, max_new_tokens=2)
    first, second = generate(model, prompt, settings, rng, first_ids=[3, 7])
    assert set(first.tolist()) == {3, 7}
    assert len(set(second.tolist())) > 10
