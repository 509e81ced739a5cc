"""The decoding benchmark at toy size, its arithmetic by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from peerlib import write_peer

from model.attention import KVCache
from model.gpt import GPT
from tools.bench import decode as bench_decode
from tools.bench.__main__ import main

SHAPE = bench_decode.toy_work().shape


def make_model(**sizes) -> GPT:
    model = GPT(replace(SHAPE, **sizes))
    model.init_weights(1)
    return model.eval()


@pytest.fixture
def ticking(monkeypatch):
    """`seconds_of` that runs the work and takes what is given here, in turn."""
    given: list[float] = []

    def seconds_of(work, device=None) -> float:
        work()
        return given.pop(0)

    monkeypatch.setattr(bench_decode, "seconds_of", seconds_of)
    return given


def test_speed_is_all_tokens_of_the_batch_over_the_median_call(ticking):
    ticking += [99.0, 2.0, 4.0, 3.0]  # the first does not count; the median is 3 s
    lengths = {"prompt_tokens": 4, "new_tokens": 6, "batch": 5}
    assert bench_decode.decode_speed(make_model(), **lengths, rounds=3) == 5 * 6 / 3.0
    assert not ticking


@pytest.mark.parametrize("tied", [True, False])
def test_the_products_are_every_matrix_of_a_token_once(monkeypatch, tied):
    """q, k, v, o, up, down of each layer, and the head; no embedding is a product. They are those
    of a token."""
    model, read = make_model(n_layers=3, tie_embeddings=tied), []
    linear = torch.nn.functional.linear

    def count(x, weight, bias=None):
        read.append((weight.data_ptr(), weight.numel(), x.shape[-1]))
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", count)
    with torch.inference_mode():
        cache = KVCache(3, capacity=1)
        model(torch.zeros(1, 1, dtype=torch.int64), cache=cache, last_only=True)
    token, read[:] = list(read), []
    bench_decode.weight_products(model)()
    assert read == token
    assert len(read) == 3 * 6 + 1


def test_products_and_tokens_take_turns(ticking):
    ticking += [5.0, 7.0, 9.0]
    stream, said = iter("abcd"), []
    ours, bound = bench_decode.beside(stream, 3, lambda: said.append("products") or 2.0)
    assert (ours, bound) == (21.0, 6.0)
    assert next(stream) == "d"  # three were taken
    assert len(said) == 3


def test_ratios_by_hand():
    seconds = {"the bound": 0.02, "ours": 0.025, "nanoGPT": 0.2, "batch": 0.002}
    bound, ours, peer, batch = bench_decode.speed_rows(seconds, 16)
    assert bound == ["the bound", "20.00", "50.0", "1.00", "0.80", "", ""]
    assert ours == ["ours", "25.00", "40.0", "0.80", "1.00", "", ""]
    assert peer == ["nanoGPT", "200.00", "5.0", "0.10", "8.00", "", ""]
    assert batch == ["ours, 16 at once", "2.00", "500.0", "10.00", "1/12.50", "", ""]
    (row,) = bench_decode.position_rows({128: (0.025, 0.001)})
    assert row == ["ours at position 128", "25.00", "40.0", "", "", "1.00", "24.00"]


def test_a_batch_is_counted_by_all_its_tokens(monkeypatch):
    """A call of 12 s: 8 tokens of one sequence, 2 x 8 of the batch; 4 s of products for 8."""
    monkeypatch.setattr(bench_decode, "peers", lambda work, folder: {"peer": lambda: 12.0})
    monkeypatch.setattr(bench_decode, "decoding", lambda *about: lambda: 12.0)
    monkeypatch.setattr(bench_decode, "beside", lambda *about: (12.0, 4.0))
    found = bench_decode.seconds_a_token(make_model(), bench_decode.toy_work(), None)
    assert found == {"the bound": 0.5, "ours": 1.5, "peer": 1.5, "batch": 0.75}


def test_the_token_at_a_position_is_the_forward_of_all_before_it(monkeypatch):
    """Measured again and again, it stays at its position; attention sees that many keys."""
    model, seen, forward = make_model(), [], GPT.forward

    def watched(self, tokens, *, cache=None, last_only=False):
        logits = forward(self, tokens, cache=cache, last_only=last_only)
        if tokens.shape[1] == 1:
            seen.append(logits[:, -1])
            assert cache.length == 10
        return logits

    monkeypatch.setattr(GPT, "forward", watched)
    token, attention = bench_decode.at_position(model, 9)
    token(), token()
    with torch.no_grad():
        expected = model(bench_decode.prompt_of(model, 1, 10))[:, -1]
    for logits in seen:
        torch.testing.assert_close(logits, expected)
    assert len(seen) == 2
    keys = []
    for layer in model.layers:
        layer.attn.attend = lambda q, k, v: keys.append((q.shape, k.shape[2], v.shape[2]))
    attention()
    assert keys == [((1, 2, 1, 16), 10, 10)] * 2


def test_the_table_has_all_rows(tmp_path, capsys, monkeypatch):
    """The command as typed, at toy size, beside a stand-in for nanoGPT."""
    monkeypatch.setattr(bench_decode, "has_transformers", lambda: False)  # seconds to import
    peer = write_peer(tmp_path / "nanoGPT")
    assert main(["decode", "--quick=true", f"--peer={peer}"]) == 0
    said = capsys.readouterr().out
    assert said.count("peer (1, 4) 8 2 False\n") == 3
    rows = [line.split("  ")[0] for line in said.splitlines()]
    ours = ["ours", "nanoGPT", "ours, 2 at once", "ours at position 4", "ours at position 30"]
    assert [row for row in rows if row in ours] == ours
    assert "pip install transformers" in said
    assert "--peer=DIR" not in said


def test_hugging_faces_model_has_the_shape(monkeypatch):
    """The library is played by a stand-in: it takes seconds to import."""
    library = ModuleType("transformers")
    library.GPT2Config = dict
    library.GPT2LMHeadModel = lambda config: SimpleNamespace(eval=lambda: config)
    monkeypatch.setitem(sys.modules, "transformers", library)
    given = bench_decode.hugging_face_model(bench_decode.gpt2_shaped(12, 6, 768, 1024, 50304))
    sizes = {"n_layer": 12, "n_head": 6, "n_embd": 768, "n_positions": 1024, "vocab_size": 50304}
    assert given == {**sizes, "bos_token_id": None, "eos_token_id": None}
