"""Rotary positions: against complex numbers, against transformers, and what they promise."""

from __future__ import annotations

import math

import pytest
import torch

from model.config import ModelConfig
from model.rope import Rope, rope_frequencies, rotate


def positions(start: int, T: int) -> torch.Tensor:
    return torch.arange(start, start + T)


LLAMA3 = dict(rope_theta=500000.0, rope_scaling="llama3", rope_factor=32.0)


def make_config(**given) -> ModelConfig:
    sizes = dict(n_heads=2, d_model=128, context_length=64) | given
    return ModelConfig(**sizes).resolved(10)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_a_plane_turns_as_a_complex_number():
    """Coordinates i and i + D/2 are x + iy; position p multiplies by e^(i p theta^(-2i/D))."""
    D, T = 8, 5
    x = randn(2, 3, T, D, dtype=torch.float64)
    rope = Rope(make_config(d_head=D))
    angles = torch.tensor([[p * 10000.0 ** (-2 * i / D) for i in range(D // 2)] for p in range(T)])
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rotate(x, *rope(positions(0, T))), expected, rtol=0, atol=1e-6)


def test_by_hand():
    """Angle 90 degrees sends (x, y) to (-y, x); here x = 1, 2 and y = 3, 4."""
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    turned = rotate(x, cos=torch.zeros(1, 2), sin=torch.ones(1, 2))
    assert turned.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]


@pytest.mark.parametrize("scaling", [{}, LLAMA3], ids=["plain", "llama3"])
def test_equals_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    D, T, theta = 64, 300, scaling.get("rope_theta", 10000.0)
    parameters = {"rope_type": "default", "rope_theta": theta}
    if scaling:
        parameters |= {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0}
        parameters |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * D,
            num_attention_heads=2,
            head_dim=D,
            max_position_embeddings=T,
            rope_parameters=parameters,
        )
    )
    q, k = randn(2, 2, T, D), randn(2, 2, T, D, seed=1)
    expected = apply_rotary_pos_emb(q, k, *theirs(q, torch.arange(T)[None]))
    rope = Rope(make_config(d_head=D, context_length=T, **scaling))
    for x, want in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rotate(x, *rope(positions(0, T))), want, rtol=0, atol=2e-4)
    frequencies = rope_frequencies(rope.config).float()
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-5, atol=0)


def test_llama3_scaling_by_hand():
    """Fast planes are kept, slow ones slowed down by the factor, in between there is both."""
    plain = rope_frequencies(make_config(d_head=128, rope_theta=500000.0))
    scaled = rope_frequencies(make_config(d_head=128, **LLAMA3))
    turns = 8192 * plain / (2 * math.pi)
    fast, slow = turns > 4, turns < 1
    assert fast.any() and slow.any() and not (fast | slow).all()
    torch.testing.assert_close(scaled[fast], plain[fast], rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled[slow], plain[slow] / 32, rtol=1e-12, atol=0)
    between = ~(fast | slow)
    assert ((scaled < plain) & (scaled > plain / 32))[between].all()


@pytest.mark.parametrize("scaling", [{}, LLAMA3], ids=["plain", "llama3"])
def test_scores_depend_on_the_distance_alone(scaling):
    rope = Rope(make_config(context_length=2000, **scaling))
    q, k = randn(64, dtype=torch.float64), randn(64, seed=1, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        turned_q = rotate(q.view(1, 1, 1, 64), *rope(positions(query_at, 1)))
        return float((turned_q * rotate(k.view(1, 1, 1, 64), *rope(positions(key_at, 1)))).sum())

    for distance in (0, 1, 17, 700):
        scores = [score(at + distance, at) for at in (0, 1, 100, 1299)]
        assert max(scores) - min(scores) < 1e-4
    assert abs(score(5, 0) - score(0, 5)) > 1e-2  # before is not after
    assert score(0, 0) == pytest.approx(float(q @ k), abs=1e-5)


def test_a_window_may_start_anywhere():
    rope = Rope(make_config())
    for ours, whole in zip(rope(positions(5, 7)), rope(positions(0, 64)), strict=True):
        assert torch.equal(ours, whole[5:12])


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_tables_stay_float32_however_the_model_is_cast(cast):
    from model.gpt import GPT

    model = GPT(make_config(n_layers=1, context_length=1100))
    exact = model.rope.cos.clone(), model.rope.sin.clone()
    for moved in (getattr(model, cast)(), model.to("cpu"), model.to(torch.bfloat16)):
        tables = moved.rope.cos, moved.rope.sin
        assert all(torch.equal(a, b) for a, b in zip(tables, exact, strict=True))
    assert model.embed.weight.dtype == torch.bfloat16
    assert (
        rotate(randn(1, 2, 4, 64).bfloat16(), *model.rope(positions(0, 4))).dtype == torch.bfloat16
    )
    # In bfloat16 position 1000 and its neighbour would be one.
    assert not torch.equal(model.rope.cos[1000], model.rope.cos[1001])
    angles = torch.tensor([math.cos(1000 * 10000 ** (-2 * i / 64)) for i in range(32)])
    torch.testing.assert_close(model.rope.cos[1000], angles)


def test_tables_are_no_part_of_the_weights():
    assert not Rope(make_config()).state_dict()
