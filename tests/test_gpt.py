"""The whole model: causality, the first loss, learning, names, counts."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace

import pytest
import torch

from cli.options import ConfigError
from model.attention import KVCache
from model.config import ModelConfig
from model.gpt import GPT, positions_within
from model.layers import MLPS

MODERN = dict(n_kv_heads=2)
GPT2 = dict(norm="layer", mlp="gelu", position="learned", qk_norm=False, bias=True)


def make_model(vocab_size=20, seed=0, attention="sdpa", **given) -> GPT:
    sizes = dict(n_layers=2, n_heads=4, d_model=32, context_length=16)
    return GPT(ModelConfig(**(sizes | given), vocab_size=vocab_size), attention, seed=seed)


def perturb(model: GPT, by: float = 0.1) -> GPT:
    """Move away from the initial weights, with which every block is the identity."""
    rng = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data += by * torch.randn(p.shape, generator=rng)
    return model


def randint(high, *shape, seed=2):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ["sdpa", "reference", "tiled"])
@pytest.mark.parametrize("kind", [MODERN, GPT2], ids=["modern", "gpt2"])
@torch.no_grad()
def test_a_later_token_never_changes_an_earlier_logit(kind, attention):
    model = perturb(make_model(attention=attention, **kind)).eval()
    tokens = randint(20, 1, 12)
    before = model(tokens)
    for t in range(12):
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 7) % 20
        after = model(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t:] - before[:, t:]).abs().amax(-1).min() > 1e-5  # all later ones do


def test_positions_start_at_0_in_each_document():
    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [5, 3, 3, 3, 3, 3]])
    assert positions_within(documents).tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("attention", ["sdpa", "reference", "tiled"])
@pytest.mark.parametrize("kind", [MODERN, GPT2], ids=["rope", "learned"])
def test_documents_in_a_row_have_the_loss_and_gradient_of_each_alone(kind, attention):
    """RoPE turns a document that starts at 11 by other angles; the scores are the same."""
    model = perturb(make_model(attention=attention, **kind))
    tokens, targets = randint(20, 2, 16), randint(20, 2, 16, seed=3)
    documents = torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * 15 + [1]])
    alone = torch.zeros(2, 16)
    for row, first, end in [(0, 0, 5), (0, 5, 11), (0, 11, 16), (1, 0, 15), (1, 15, 16)]:
        one = (slice(row, row + 1), slice(first, end))
        alone[one] = model(tokens[one], targets[one], reduction="none")
    together = model(tokens, targets, documents=documents, reduction="none")
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert (model(tokens, targets, reduction="none") - alone).abs().amax() > 1e-2
    found, wanted = (torch.autograd.grad(x.sum(), model.parameters()) for x in (together, alone))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [MODERN, GPT2], ids=["rope", "learned"])
def test_documents_are_compiled_as_one_graph(kind):
    model = perturb(make_model(**kind))
    tokens, documents = randint(20, 2, 16), torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    plain = model(tokens, tokens, documents)
    model.compile(backend="aot_eager", fullgraph=True)
    compiled = model(tokens, tokens, documents)
    torch.testing.assert_close(compiled, plain)
    for some, others in zip(
        *(torch.autograd.grad(loss, model.parameters()) for loss in (plain, compiled)), strict=True
    ):
        torch.testing.assert_close(some, others, rtol=1e-4, atol=1e-5)


def test_documents_with_a_cache_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="cache"):
        model(randint(20, 1, 4), cache=KVCache(2, 16), documents=torch.zeros(1, 4).long())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@torch.no_grad()
def test_the_first_loss_is_ln_v(norm, mlp, position, tie, bias):
    kinds = dict(norm=norm, mlp=mlp, position=position, tie_embeddings=tie, bias=bias)
    kinds |= dict(n_layers=1, d_head=8, d_mlp=32, context_length=32)  # small is fast
    for width, V in ((64, 65), (128, 300), (768, 65), (768, 2000)):
        model = make_model(V, d_model=width, **kinds)
        tokens = randint(V, 16, 32)
        loss = model(tokens, tokens.roll(-1, dims=1))
        assert loss.item() == pytest.approx(math.log(V), abs=0.1), (width, V)


@pytest.mark.parametrize("kind", [MODERN, GPT2, dict(mlp="relu2", tie_embeddings=True)], ids=str)
def test_the_model_can_overfit_one_batch(kind):
    model = make_model(65, **kind)
    tokens, targets = randint(65, 4, 16), randint(65, 4, 16, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        loss = model(tokens, targets)
        if loss.item() < 0.1:
            return
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pytest.fail(f"after 200 steps the loss is {loss.item()}")


# Names, counts, seeds


def test_names_are_module_paths():
    names = set(make_model(qk_norm=True, **MODERN).state_dict())
    per_layer = ["attn_norm", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj"]
    per_layer += ["attn.q_norm", "attn.k_norm", "mlp_norm"]
    per_layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    expected = {f"layers.{i}.{name}.weight" for i in range(2) for name in per_layer}
    assert names == expected | {"embed.weight", "norm.weight", "head.weight"}

    names = set(make_model(tie_embeddings=True, **GPT2).state_dict())
    per_layer = {name for name in per_layer if "gate" not in name and "attn.q_norm" not in name}
    per_layer -= {"attn.k_norm"}
    kinds = ("weight", "bias")
    expected = {f"layers.{i}.{n}.{kind}" for i in (0, 1) for n in per_layer for kind in kinds}
    assert names == expected | {"embed.weight", "positions.weight", "norm.weight", "norm.bias"}


def test_counts_by_hand():
    """2 layers, width 32, 4 heads of 8 over 2 key/value heads, MLP 88 wide, 20 ids.

    A layer: q 1,024, k and v 512 each, o 1,024, MLP 3 x 2,816: 11,520 in matrices; norms 32 + 32
    + 8 + 8. Embedding and head 640 each, the last norm 32: 2 x 11,600 + 1,312 = 24,512.
    For a token of 10: 6 x (2 x 11,520 + 640) + 12 x 2 layers x 32 x 10 = 149,760.
    """
    untied, tied = make_model(20, **MODERN), make_model(20, tie_embeddings=True, **MODERN)
    assert untied.parameter_count() == 24_512
    assert tied.parameter_count() == 24_512 - 640
    for model in (untied, tied):  # the head computes, tied or not; the embedding does not
        assert model.flops_per_token(10) == 149_760
    wide = make_model(20, d_head=16, d_mlp=88, n_kv_heads=1)  # heads wider than d_model / n_heads
    assert wide.flops_per_token(10) == 6 * (2 * (64 + 32 + 64 + 264) * 32 + 640) + 12 * 2 * 64 * 10


def test_gpt2_has_its_124_million_parameters():
    with torch.device("meta"):
        sizes = dict(n_layers=12, n_heads=12, d_model=768, context_length=1024)
        config = ModelConfig(tie_embeddings=True, **sizes, **GPT2).resolved(50257)
        assert GPT(config).parameter_count() == 124_439_808


def test_initial_weights_depend_on_the_seed_and_the_name_alone():
    one, other = make_model(seed=7), make_model(seed=8)
    for name, p in one.named_parameters():
        drawn = p.dim() > 1 and not name.endswith(("o_proj.weight", "down_proj.weight"))
        assert torch.equal(p, other.get_parameter(name)) != drawn, name
    assert not torch.equal(one.layers[0].attn.q_proj.weight, one.layers[1].attn.q_proj.weight)
    state = torch.random.get_rng_state()
    other.init_weights(7)  # draws from generators of its own
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kind", [MODERN, GPT2 | dict(tie_embeddings=True)], ids=["modern", "gpt2"])
def test_a_parameter_made_alone_has_the_bits_it_has_in_the_whole_model(kind):
    whole = make_model(seed=7, **kind)
    with torch.device("meta"):  # no memory for the others
        deeper = GPT(replace(whole.config, n_layers=9))
    for name, p in reversed(list(whole.named_parameters())):
        with torch.device("cpu"):
            assert torch.equal(deeper.initial_weight(name, 7), p), name


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_the_scale_of_initial_weights(tie):
    model = make_model(2000, d_model=256, tie_embeddings=tie, position="learned", context_length=64)
    expected = {"q_proj": 0.5 / 16, "down_proj": 0, "head": 0.2 / 16, "embed": 1, "positions": 1}
    if tie:
        expected |= dict.fromkeys(("embed", "positions"), (math.log(2000) - 3) / 256)
    for name, p in model.named_parameters():
        if (part := name.split(".")[-2]) in expected:
            assert p.std().item() == pytest.approx(expected[part], rel=0.02), name
            assert abs(p.mean().item()) <= 4 * expected[part] / math.sqrt(p.numel()), name


def test_dropout_is_for_training_and_drawn_from_the_seed():
    model, tokens = make_model(dropout=0.5), randint(20, 1, 8)
    torch.manual_seed(3)
    first = model(tokens)
    second = model(tokens)
    torch.manual_seed(3)
    assert torch.equal(model(tokens), first)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_window_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match=re.escape("17 tokens exceed model.context_length=16")):
        make_model()(torch.zeros(1, 17, dtype=torch.long))


def test_a_model_made_in_python_is_resolved_and_has_its_initial_weights():
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    config = ModelConfig(vocab_size=50, n_layers=2, bias=True)
    model, other = GPT(config), GPT(config, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)  # none of torch's own draws
    assert model.config == config.resolved(50)
    assert type(model.config) is ModelConfig  # or it would not equal the one read from run.json
    assert (model.config.d_head, model.config.d_mlp, model.config.n_kv_heads) == (32, 384, 4)
    for name, p in model.named_parameters():
        assert torch.equal(p, model.initial_weight(name, 0)), name
        assert torch.equal(other.get_parameter(name), model.initial_weight(name, 1)), name
        assert p.requires_grad


def test_initial_weights_are_float32_whatever_torchs_defaults_are():
    expected = GPT(ModelConfig(vocab_size=50, n_layers=1))
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")  # as a notebook sets "cuda"
    try:
        for name, p in expected.named_parameters():
            assert torch.equal(expected.initial_weight(name, 0), p), name
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("seed", [None, 0])
def test_weights_that_will_be_loaded_are_not_drawn(seed, monkeypatch):
    drawn = []
    monkeypatch.setattr(GPT, "initial_weight", lambda self, name, seed: drawn.append(name))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)
    model = GPT(ModelConfig(vocab_size=50, n_layers=1), seed=seed)
    assert drawn == ([] if seed is None else [name for name, _ in model.named_parameters()])
    with torch.device("meta"):
        drawn.clear()
        assert GPT(ModelConfig(vocab_size=50)).embed.weight.is_meta
    assert not drawn


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({}, ["model.vocab_size=none: give a size, for example vocab_size=257"]),
        (
            dict(vocab_size=5, mlp="silu", n_layers=2.0),
            [
                "model.n_layers=2.0: must be a whole number (such as 1000 or 1e3)",
                "model.mlp='silu': must be swiglu or gelu or gelu_erf or relu2",
            ],
        ),
        (
            dict(vocab_size=5, d_model=100, n_heads=3),
            [
                "model.d_model=100 is not a multiple of model.n_heads=3: change one of them, or "
                "set model.d_head"
            ],
        ),
    ],
)
def test_a_config_with_mistakes_is_refused(values, problems):
    with pytest.raises(ConfigError) as refused:
        GPT(ModelConfig(**values))
    assert refused.value.problems == problems


def test_backends_can_be_switched():
    model, tokens = perturb(make_model(**MODERN)).eval(), randint(20, 2, 9)
    with torch.no_grad():
        expected = model(tokens)
        for backend in ("reference", "tiled"):
            model.use_attention(backend)
            torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("kind", [MODERN, GPT2], ids=["modern", "gpt2"])
def test_a_traced_model_runs_at_any_length(kind, grad, tmp_path):
    """TorchScript, saved and loaded: no Python is left in it, and no size is frozen."""
    model = perturb(make_model(**kind)).eval()
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated; sizes are turned into booleans
        traced = torch.jit.trace(model, randint(20, 2, 8), check_trace=False)
        torch.jit.save(traced, tmp_path / "model.pt")
        traced = torch.jit.load(tmp_path / "model.pt")
        for shape in ((1, 1), (3, 16), (2, 5)):
            tokens = randint(20, *shape)
            torch.testing.assert_close(traced(tokens), model(tokens), rtol=0, atol=1e-5)
