"""What is written by hand for CPUs: derivatives of derivatives are right, or refused."""

from __future__ import annotations

import pytest
import torch

import model.fast
from model.fast import (
    ChunkedLossFunction,
    CrossEntropyFunction,
    DropoutFunction,
    RMSNormFunction,
    RotationFunction,
    speed_up,
)
from model.loss import IGNORE_INDEX

TARGETS = torch.tensor([0, 4, IGNORE_INDEX])


def randn(*shape: int, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float64)


ANGLES = randn(4, 3, seed=8)
FUNCTIONS = {  # each of x and a second tensor that is learned
    "RMSNorm": lambda x, w: RMSNormFunction.apply(x, w[0, :6], 1e-6),
    "rotation": lambda x, w: RotationFunction.apply(x.view(1, 1, 4, 6), ANGLES.cos(), ANGLES.sin()),
    "cross entropy": lambda x, w: CrossEntropyFunction.apply(x.view(3, 8), TARGETS, IGNORE_INDEX),
    "chunked loss": lambda x, w: ChunkedLossFunction.apply(x.view(3, 8), w, TARGETS, torch.float64),
    "dropout": lambda x, w: DropoutFunction.apply(x, 0.5),
}
REFUSED = {"RMSNorm", "rotation", "cross entropy", "chunked loss"}


def test_every_hand_written_function_is_here():
    written = {
        name
        for name, value in vars(model.fast).items()
        if isinstance(value, type) and issubclass(value, torch.autograd.Function)
    } - {"Function"}
    assert len(written) == len(FUNCTIONS), written


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_is_right_or_refused(name):
    """Of the sum of squares, so that the second derivative is not zero for linear functions."""

    def value(x, w):
        torch.manual_seed(1)
        return FUNCTIONS[name](x, w).square().sum()

    x, w = randn(4, 6, seed=1).requires_grad_(), randn(5, 8, seed=2).requires_grad_()
    try:
        (slope,) = torch.autograd.grad(value(x, w), x, create_graph=True)
    except RuntimeError as error:
        assert "Function" in str(error) and "no second derivative" in str(error)
        assert name in REFUSED
        return
    assert name not in REFUSED
    (second,) = torch.autograd.grad(slope.sum(), x)
    step = 1e-5 * torch.ones_like(x)
    ahead, behind = (
        torch.autograd.grad(value(y, w), y)[0]
        for y in ((x + step).detach().requires_grad_(), (x - step).detach().requires_grad_())
    )
    torch.testing.assert_close(second, (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-6)


def test_without_the_hand_written_passes_a_model_can_be_derived_twice():
    """The way out that the refusal names."""
    from model.config import ModelConfig
    from model.gpt import GPT

    gpt = GPT(ModelConfig(n_layers=1, n_heads=2, d_model=8, context_length=4).resolved(11))
    gpt.use_attention("reference")
    tokens = torch.tensor([[1, 2, 3]])
    (slope,) = torch.autograd.grad(gpt(tokens, tokens), gpt.embed.weight, create_graph=True)
    assert torch.autograd.grad(slope.square().sum(), gpt.norm.weight)[0].isfinite().all()
    speed_up(gpt)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gpt(tokens, tokens), gpt.embed.weight, create_graph=True)
