"""Hand-written passes: second derivatives are refused, not wrong. Values: test_one_forward.py."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import model.fast
from model.config import ModelConfig
from model.fast import ChunkedLossFunction, CrossEntropyFunction, RMSNormFunction, speed_up
from model.gpt import GPT
from model.loss import IGNORE_INDEX

TARGETS = torch.tensor([0, 4, IGNORE_INDEX])
FUNCTIONS = {
    RMSNormFunction: lambda x: (x, torch.ones(8), 1e-6),
    CrossEntropyFunction: lambda x: (x, TARGETS, IGNORE_INDEX),
    ChunkedLossFunction: lambda x: (x, torch.ones(5, 8), TARGETS, torch.float32),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_second_derivative_is_refused(function):
    x = torch.arange(24.0).view(3, 8).requires_grad_()
    value = function.apply(*FUNCTIONS[function](x)).square().sum()
    with pytest.raises(RuntimeError, match=f"{function.__name__}.* has no second derivative"):
        torch.autograd.grad(value, x, create_graph=True)


def test_every_hand_written_function_is_tested():
    written = [v for v in vars(model.fast).values() if isinstance(v, type) and v is not Function]
    assert {v for v in written if issubclass(v, Function)} == FUNCTIONS.keys()


def test_without_the_hand_written_passes_a_model_has_second_derivatives():
    """This is the advice of the refusal."""
    gpt = GPT(ModelConfig(n_layers=1, n_heads=2, d_model=8, context_length=4).resolved(11))
    gpt.use_attention("reference")
    tokens = torch.tensor([[1, 2, 3]])
    (slope,) = torch.autograd.grad(gpt(tokens, tokens), gpt.embed.weight, create_graph=True)
    assert torch.autograd.grad(slope.square().sum(), gpt.norm.weight)[0].isfinite().all()
    speed_up(gpt)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gpt(tokens, tokens), gpt.embed.weight, create_graph=True)
