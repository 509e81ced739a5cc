"""Attention maps are causal, complete and the model's own, and leave the model unchanged."""

from __future__ import annotations

import pytest
import torch

from model.config import ModelConfig
from model.gpt import GPT
from model.inspect import attention_maps


def make_model(**given) -> GPT:
    sizes = dict(n_layers=3, n_heads=4, n_kv_heads=2, d_model=32, context_length=16, dropout=0.5)
    model = GPT(ModelConfig(**(sizes | given)).resolved(20))
    model.init_weights(0)
    rng = torch.Generator().manual_seed(1)
    for p in model.parameters():  # the first weights leave each block the identity
        p.data += 0.1 * torch.randn(p.shape, generator=rng)
    return model


TOKENS = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_maps_are_distributions_over_the_past(position):
    maps = attention_maps(make_model(position=position), TOKENS)
    assert maps.shape == (3, 2, 4, 9, 9)
    assert not maps.requires_grad
    torch.testing.assert_close(maps.sum(-1), torch.ones(3, 2, 4, 9))
    assert (maps == maps.tril()).all()
    assert (maps.diagonal(dim1=-2, dim2=-1) > 0).all()


def test_maps_are_the_weights_that_the_model_uses():
    """Rebuilt from the last layer's map: its heads' outputs, projected and added, give the model's
    hidden state before the MLP."""
    model = make_model().eval()
    maps = attention_maps(model, TOKENS)
    layer = model.layers[-1]
    inputs = {}
    layer.attn_norm.register_forward_hook(lambda module, args, out: inputs.update(x=out))
    layer.attn.register_forward_hook(lambda module, args, out: inputs.update(out=out))
    with torch.no_grad():
        model(TOKENS)
        v = layer.attn.v_proj(inputs["x"]).view(2, 9, 2, 8).transpose(1, 2)
        mixed = maps[-1] @ v.repeat_interleave(2, dim=1)
        expected = layer.attn.o_proj(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(inputs["out"], expected)


def test_the_model_is_unchanged():
    model = make_model().train()
    model.use_attention("tiled")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    backends = [layer.attn.attend for layer in model.layers]
    generator = torch.random.get_rng_state()
    maps = attention_maps(model, TOKENS)
    assert torch.equal(maps, attention_maps(model, TOKENS))  # dropout is off
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert all(module.training for module in model.modules())
    assert [layer.attn.attend for layer in model.layers] == backends
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert torch.is_grad_enabled()


def test_a_text_that_is_too_long_is_refused_and_the_mode_restored():
    model = make_model().train()
    with pytest.raises(ValueError, match="context_length=16"):
        attention_maps(model, torch.zeros(1, 17, dtype=torch.long))
    assert model.training
