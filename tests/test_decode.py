"""Decoding without modules is the modules' forward, whatever the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from model import decode
from model.attention import ATTENTION
from model.cache import KVCache
from model.config import ModelConfig
from model.decode import Decoder
from model.generate import generate
from model.gpt import GPT, inference
from model.layers import MLPS, NORMS
from model.sampling import SamplingConfig

KINDS = {
    "plain": {},
    "grouped heads": dict(n_kv_heads=2),
    "wide heads": dict(d_head=16),
    "learned positions": dict(position="learned", qk_norm=False),
    "stretched positions": dict(
        rope_scaling="llama3", rope_factor=8.0, rope_original_context=8, rope_theta=100.0
    ),
    "biases": dict(bias=True),
    "tied": dict(tie_embeddings=True),
    "dropout": dict(dropout=0.5),
    **{f"norm {norm}": dict(norm=norm, bias=norm == "layer") for norm in NORMS},
    **{f"mlp {mlp}": dict(mlp=mlp) for mlp in MLPS},
}


def make_model(V=30, attention="sdpa", **given) -> GPT:
    sizes = dict(n_layers=2, n_heads=4, d_model=32, context_length=16)
    model = GPT(ModelConfig(**(sizes | given)).resolved(V), attention).eval()
    rng = torch.Generator().manual_seed(1)
    for p in model.parameters():  # large and all different, biases too, so that each one matters
        p.data = torch.randn(p.shape, generator=rng) * (0.5 if p.dim() > 1 else 1.0)
    return model


def both(model: GPT, B: int, past: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ours, the modules') logits of each of `steps` tokens after `past` of them."""
    rng = torch.Generator().manual_seed(2)
    tokens = torch.randint(model.config.vocab_size, (B, past + steps), generator=rng)
    pairs, (cache, other) = [], (KVCache(model.config.n_layers, past + steps) for _ in range(2))
    with torch.inference_mode(), inference(model):
        decoder = Decoder(model, cache, B)
        for one in (cache, other):
            model(tokens[:, :past], cache=one)
        for t in range(past, past + steps):
            theirs = model(tokens[:, t : t + 1], cache=other)[:, 0]
            pairs.append((decoder(tokens[:, t : t + 1]), theirs))
            assert cache.length == t + 1
    return pairs


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("B", [1, 3, 5, 33])  # the three ways of multiplying, and the plain one
def test_it_is_the_modules_forward(kind, B):
    for ours, theirs in both(make_model(**kind), B, past=5, steps=3):
        assert ours.shape == (B, 30)
        assert theirs.std() > 0.5
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("V", [29, 31, 65])  # 29 and 31 cannot be cut, 65 = 5 x 13
@pytest.mark.parametrize("B", [1, 5])
def test_a_vocabulary_of_any_size(V, B):
    for ours, theirs in both(make_model(V), B, past=1, steps=2):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ATTENTION)
def test_it_uses_the_models_attention(backend, monkeypatch):
    used = []
    attend = ATTENTION[backend]
    monkeypatch.setitem(ATTENTION, backend, lambda *a, **k: used.append(1) or attend(*a, **k))
    ((ours, theirs),) = both(make_model(attention=backend), 2, past=3, steps=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert len(used) == 2 * 4  # layers, times two prompts and two tokens


def test_other_formats_are_multiplied_as_the_modules_do():
    model = make_model().bfloat16()
    for ours, theirs in both(model, 2, past=3, steps=2):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.25)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ((ours, theirs),) = both(make_model(), 2, past=3, steps=1)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.25)


def test_a_weight_that_is_not_in_one_piece():
    model = make_model()
    for p in model.parameters():
        if p.dim() == 2:
            p.data = p.data.t().contiguous().t()
    ((ours, theirs),) = both(model, 1, past=3, steps=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


class Gated(torch.nn.Module):
    """An MLP as a reader may add one: a part that is no projection, a parameter, a method."""

    def __init__(self, config) -> None:
        super().__init__()
        self.up_proj = torch.nn.Linear(config.d_model, 24)
        self.act = torch.nn.Tanh()
        self.down_proj = torch.nn.Linear(24, config.d_model)
        self.gate = torch.nn.Parameter(torch.ones(24))
        self.power = 2

    def gated(self, x):
        return x * self.gate**self.power

    def forward(self, x):
        return self.down_proj(self.gated(self.act(self.up_proj(x))))


def test_an_mlp_of_ones_own(monkeypatch):
    monkeypatch.setitem(MLPS, "swiglu", Gated)
    for ours, theirs in both(make_model(), 3, past=2, steps=2):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_projection_that_is_no_plain_linear_is_asked_itself():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = make_model()
    for layer in model.layers:
        layer.attn.v_proj.__class__ = layer.mlp.up_proj.__class__ = Doubled
    ((ours, theirs),) = both(model, 1, past=2, steps=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_see_every_token(way):
    model, seen = make_model(), []
    getattr(model.layers[1].attn, way)(lambda module, given, *out: seen.append(given[0].shape))
    prompt = torch.zeros(1, 3, dtype=torch.int64)
    settings = SamplingConfig(0.0, max_new_tokens=3)
    list(generate(model, prompt, settings, torch.Generator()))
    assert seen == [(1, 3, 32), (1, 1, 32), (1, 1, 32)]


def test_beyond_the_context_it_refuses():
    model, cache = make_model(), KVCache(2, capacity=20)
    tokens = torch.zeros(1, 17, dtype=torch.int64)
    with torch.inference_mode():
        model(tokens[:, :16], cache=cache)
        with pytest.raises(ValueError, match="17 tokens exceed model.context_length=16"):
            Decoder(model, cache, 1)(tokens[:, 16:])


def test_it_reads_the_weights_as_they_are_now():
    model, token = make_model(), torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        decoder = Decoder(model, KVCache(2, 1), 1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    with torch.inference_mode():
        ours = decoder(token)
        torch.testing.assert_close(ours, model(token)[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out", [2, 7, 8, 65, 1536])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 31, 32, 40])
def test_a_product_is_the_product(rows, out, bias):
    """Against float64."""
    rng = torch.Generator().manual_seed(3)
    x, weight = torch.randn(rows, 24, generator=rng), torch.randn(out, 24, generator=rng)
    b = torch.randn(out, generator=rng) if bias else None
    expected = F.linear(x.double(), weight.double(), b.double() if bias else None).float()
    for strided in (x, x.repeat(1, 2)[:, :24]):
        y = decode.product(weight, b, rows)(strided)
        assert y.shape == (rows, out)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("out", "rows", "threads", "slices"),
    [
        (768, 1, 1, 2),  # one slice would be read slowly
        (768, 1, 2, 2),
        (768, 4, 16, 16),  # each core has some
        (65, 1, 2, 5),
        (31, 1, 2, 1),  # a prime
        (3072, 5, 2, 8),  # 384 rows each
        (50304, 31, 2, 131),
        (768, 5, 8, 8),
        (768, 32, 2, 1),
    ],
)
def test_slices_by_hand(out, rows, threads, slices):
    assert decode.slice_count(out, rows, threads) == slices


def test_only_float32_on_a_cpu_is_cut(monkeypatch):
    monkeypatch.setattr(torch, "bmm", lambda a, b: pytest.fail("cut"))
    x, weight = torch.randn(1, 24), torch.randn(768, 24)
    for other in (dict(dtype=torch.bfloat16), dict(device="meta")):
        decode.product(weight.to(**other), None, 1)(x.to(**other))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decode.product(weight, None, 1)(x)


def test_the_weight_is_cut_and_not_copied(monkeypatch):
    seen, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: seen.append((a, b)) or bmm(a, b))
    weight = torch.randn(768, 24)
    for rows in (1, 4, 5):
        decode.product(weight, None, rows)(torch.randn(rows, 24))
    (one, _), (four, _), (_, five) = seen
    assert {tensor.data_ptr() for tensor in (one, four, five)} == {weight.data_ptr()}
    assert one.shape == four.shape == (2, 384, 24)
    assert five.shape == (2, 24, 384)
