"""The model is written once: decoding, export, planning and the viewer run its own modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from model.attention import ATTENTION, KVCache
from model.config import ModelConfig, SamplingConfig
from model.fast import FASTER, speed_up
from model.generate import generate
from model.gpt import GPT, Block
from model.inspect import attention_maps, meta_model, module_rows
from model.layers import MLPS, NORMS, RMSNorm
from tools.export.graph import GraphGPT, empty_past, example_inputs

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
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=6)


def make_model(**given) -> GPT:
    sizes = dict(n_layers=2, n_heads=4, d_model=32, context_length=16)
    model = GPT(ModelConfig(**(sizes | given)).resolved(30)).eval()
    rng = torch.Generator().manual_seed(1)
    for p in model.parameters():  # large and all different, biases too, so that each one matters
        p.data = torch.randn(p.shape, generator=rng) * (0.5 if p.dim() > 1 else 1.0)
    return model


def tokens_of(B: int, T: int) -> torch.Tensor:
    return torch.randint(30, (B, T), generator=torch.Generator().manual_seed(2))


def continued(model: GPT, **options) -> list[list[int]]:
    ids = generate(model, tokens_of(2, 5), GREEDY, torch.Generator(), **options)
    return torch.stack(list(ids), dim=1).tolist()


def graph_logits(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the exported graph, traced as for TorchScript."""
    backend = model.layers[0].attn.attend
    with torch.no_grad():
        traced = torch.jit.trace(GraphGPT(model), example_inputs(model.config), check_trace=False)
        logits, *_ = traced(tokens, *empty_past(model.config, tokens.shape[0]))
    model.use_attention(backend)
    return logits


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_token_with_a_cache_equals_the_forward_of_the_whole_text(kind):
    model, tokens = make_model(**kind), tokens_of(3, 8)
    cache = KVCache(2, 8)
    with torch.no_grad():
        whole = model(tokens)
        pieces = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 8))]
    assert whole.std() > 0.5
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_faster_modules_compute_the_same(kind):
    """Loss and gradients; without dropout, whose draws differ."""
    kind = {name: value for name, value in kind.items() if name != "dropout"}
    tokens, found = tokens_of(2, 9), []
    for faster in (False, True):
        model = make_model(**kind).train()
        if faster:
            speed_up(model)
            assert any(type(module) in FASTER.values() for module in model.modules())
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


def test_your_own_class_is_left_alone():
    class MyNorm(RMSNorm):
        pass

    model = make_model()
    model.norm = MyNorm(32, 1e-6)
    speed_up(model)
    assert type(model.norm) is MyNorm
    assert type(model.layers[0].attn_norm) is FASTER[RMSNorm]


class Experts(nn.Module):
    """An MLP as a reader may write one: a width of its own, children in a list, a mode."""

    gated = False

    def __init__(self, d_model: int, d_mlp: int, bias: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(d_model, 24) for _ in range(2))
        self.down_proj = nn.Linear(24, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        hidden = torch.stack([expert(x).tanh() for expert in self.experts]).sum(0)  # (B, T, 24)
        noise = 0.1 * torch.ones_like(hidden) if self.training else torch.zeros_like(hidden)
        return self.down_proj(hidden + noise).view(B, T, C)


def test_your_own_mlp_trains_samples_exports_and_can_be_inspected(monkeypatch):
    monkeypatch.setitem(MLPS, "swiglu", Experts)
    model, tokens = make_model(), tokens_of(3, 8)
    assert continued(model) == continued(model, use_cache=False)
    with torch.no_grad():
        torch.testing.assert_close(graph_logits(model, tokens), model(tokens), rtol=0, atol=1e-4)
        assert attention_maps(model, tokens).shape == (2, 3, 4, 8, 8)
    rows = {row.name: row for row in module_rows(meta_model(model.config))}
    assert rows["mlp"].parameters == 2 * (32 * 24 + 24) + 24 * 32 + 32
    assert rows["mlp"].flops == 6 * 3 * 32 * 24
    model.init_weights(0)
    speed_up(model.train())
    before = model(tokens[:, :-1], tokens[:, 1:])
    before.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
        assert model(tokens[:, :-1], tokens[:, 1:]) < before
    trained, evaluated = model(tokens), model.eval()(tokens)
    assert not torch.allclose(trained, evaluated)


def test_an_edited_block_changes_sampling_and_export_alike(monkeypatch):
    """A parallel block (attention and MLP of the same input), as a student may try one."""

    def parallel(self, x, rotation, cache=None, documents=None):
        h = self.attn_norm(x)
        return x + self.attn(h, rotation, cache, documents) + self.mlp(h)

    model, tokens = make_model(), tokens_of(2, 8)
    with torch.no_grad():
        sequential, before = model(tokens), continued(model)
        monkeypatch.setattr(Block, "forward", parallel)
        edited = model(tokens)
        assert not torch.allclose(edited, sequential, atol=1e-2)
        torch.testing.assert_close(graph_logits(model, tokens), edited, rtol=0, atol=1e-4)
    assert continued(model) == continued(model, use_cache=False) != before


@pytest.mark.parametrize("backend", ATTENTION)
def test_decoding_uses_the_models_attention(backend):
    model, used = make_model(), []
    attend = ATTENTION[backend]
    model.use_attention(lambda *given, **options: used.append(1) or attend(*given, **options))
    assert len(continued(model)[0]) == 6
    assert len(used) == 2 * 6  # layers times tokens


@pytest.mark.parametrize("way", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_see_every_token_in_three_dimensions(way):
    model, seen = make_model(), []
    getattr(model.layers[1].attn, way)(lambda module, given, *out: seen.append(given[0].shape))
    continued(model)
    assert seen == [(2, 5, 32)] + 5 * [(2, 1, 32)]
