"""The KV cache: decoding with it equals one forward of the whole text, however it is cut."""

from __future__ import annotations

import pytest
import torch

from model.attention import KVCache
from model.config import ModelConfig
from model.gpt import GPT

KINDS = {
    "llama": dict(n_kv_heads=2),
    "gpt2": dict(norm="layer", mlp="gelu", position="learned", qk_norm=False, bias=True),
}
CUTS = [[1] * 9, [5, 3, 1], [9], [1, 8], [8, 1], [2, 2, 5]]


def make_model(context_length=16, attention="sdpa", **given) -> GPT:
    sizes = dict(n_layers=2, n_heads=4, d_model=32, context_length=context_length)
    model = GPT(ModelConfig(**(sizes | given)).resolved(20), attention).eval()
    rng = torch.Generator().manual_seed(1)
    for p in model.parameters():  # large, so that every position matters
        p.data = torch.randn(p.shape, generator=rng) * (0.5 if p.dim() > 1 else 1.0)
    return model


def make_tokens(B=3, T=9):
    return torch.randint(0, 20, (B, T), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "reference", "tiled"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_cached_equals_uncached_however_the_text_is_cut(kind, attention, cuts):
    model, tokens = make_model(attention=attention, **KINDS[kind]), make_tokens()
    expected = model(tokens)
    assert expected.std() > 0.5
    cache, start, pieces = KVCache(2, capacity=16), 0, []
    for size in cuts:
        pieces.append(model(tokens[:, start : start + size], cache=cache))
        start += size
        assert cache.length == start  # advanced once by a forward, not once by a layer
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-4)
    cache.clear()
    again = model(tokens.flip(1), cache=cache)
    torch.testing.assert_close(again, model(tokens.flip(1)), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_last_position_alone():
    model, tokens = make_model(), make_tokens()
    cache = KVCache(2, capacity=16)
    model(tokens[:, :5], cache=cache)
    last = model(tokens[:, 5:], cache=cache, last_only=True)
    assert last.shape == (3, 1, 20)
    torch.testing.assert_close(last[:, 0], model(tokens)[:, -1], rtol=0, atol=1e-4)


@torch.no_grad()
def test_more_than_fits_is_refused():
    model, tokens = make_model(context_length=16), make_tokens(T=9)
    cache = KVCache(2, capacity=10)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="11 positions do not fit its capacity 10"):
        model(tokens[:, :2], cache=cache)
    model(tokens[:, :1], cache=cache)
    assert cache.length == 10
    larger = KVCache(2, capacity=99)
    model(tokens, cache=larger)
    with pytest.raises(ValueError, match="18 tokens exceed model.context_length=16"):
        model(tokens, cache=larger)


@torch.no_grad()
def test_another_batch_is_refused_not_broadcast():
    model, cache = make_model(), KVCache(2, capacity=16)
    model(make_tokens(B=3), cache=cache)
    with pytest.raises(ValueError, match="batch of 3, not of 1"):
        model(make_tokens(B=1, T=1), cache=cache)


def test_the_model_keeps_no_cache():
    model, cache = make_model(), KVCache(2, capacity=16)
    with torch.no_grad():
        first = model(make_tokens())
        model(make_tokens(), cache=cache)
        assert torch.equal(model(make_tokens()), first)
    assert not any(
        isinstance(value, KVCache) for m in model.modules() for value in vars(m).values()
    )


def test_memory_is_what_the_key_heads_need():
    cache = KVCache(2, capacity=16)
    for layer in range(2):
        held = cache.append(layer, *torch.zeros(2, 3, 1, 9, 8))  # one head of width 8
        assert [t.untyped_storage().nbytes() for t in held] == [4 * 3 * 1 * 16 * 8] * 2
