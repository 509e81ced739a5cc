"""Norms and MLPs: each compared with its formula in float64.

The formula of a new MLP goes into HIDDEN; the tests here, in test_gpt.py and in test_one_forward.py
find every entry of MLPS by themselves.
"""

from __future__ import annotations

import math
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model.config import ModelConfig
from model.fast import FastRMSNorm, RMSNormFunction
from model.gpt import GPT
from model.inspect import meta_model, parameters_by_part
from model.layers import MLPS, NORMS, LayerNorm, RMSNorm


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def choices(field: str) -> set[str]:
    """Return the words that an option of ModelConfig allows."""
    annotation = get_type_hints(ModelConfig, include_extras=True)[field]
    assert get_origin(annotation) is Annotated
    return set(get_args(get_args(annotation)[0]))


def test_rms_norm_by_hand():
    """The mean square of (3, 4) is 12.5, so both are divided by sqrt(12.5) = 3.5355."""
    norm = RMSNorm(2, eps=0.0)
    norm.weight.data = torch.tensor([1.0, 2.0])
    expected = torch.tensor([[3 / math.sqrt(12.5), 2 * 4 / math.sqrt(12.5)]])
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), expected)
    with torch.no_grad():  # inference uses PyTorch's own
        torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), expected)


def test_layer_norm_by_hand():
    """(1, 5) has mean 3 and variance 4."""
    norm = LayerNorm(2, eps=0.0, bias=True)
    norm.bias.data = torch.tensor([0.0, 10.0])
    torch.testing.assert_close(norm(torch.tensor([[1.0, 5.0]])), torch.tensor([[-1.0, 11.0]]))
    assert LayerNorm(2, eps=0.0, bias=False).bias is None


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16), (2, 3, 4, 16)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("name", [*NORMS, "fast rms"])
def test_a_norm_equals_its_formula_forward_and_backward(name, eps, shape):
    x, weight = randn(*shape).mul_(3).add_(0.5), randn(16, seed=1)
    norm = (NORMS | {"fast rms": FastRMSNorm})[name](16, eps).double()
    norm.weight.data = weight.clone()
    centred = (x0 := x.clone().requires_grad_()) - (x0.mean(-1, keepdim=True) * (name == "layer"))
    w0 = weight.clone().requires_grad_()
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w0

    x1 = x.clone().requires_grad_()
    out = norm(x1)
    torch.testing.assert_close(out, expected)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), expected)
    direction = randn(*shape, seed=2)
    got = torch.autograd.grad(out, (x1, norm.weight), direction)
    for mine, theirs in zip(got, torch.autograd.grad(expected, (x0, w0), direction), strict=True):
        torch.testing.assert_close(mine, theirs)

    # The same in float32, and over a layout that is not contiguous, as queries have it.
    short = x.float().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    gradient = torch.autograd.grad(norm.float()(short), short, direction.float())[0]
    torch.testing.assert_close(gradient.double(), got[0], rtol=1e-4, atol=1e-4)


def test_the_hand_written_backward_is_what_trains_on_a_cpu():
    x = randn(2, 3, 8).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: RMSNormFunction.apply(x, w, 1e-6), (x, randn(8, seed=1).requires_grad_())
    )
    norm = FastRMSNorm(8, 1e-6)
    assert "RMSNormFunction" in type(norm(x.float()).grad_fn).__name__
    low = norm(x.bfloat16())  # a narrow format is left to PyTorch, which computes in float32
    assert low.dtype == torch.bfloat16
    assert "RMSNormFunction" not in type(low.grad_fn).__name__
    torch.testing.assert_close(low.double(), norm.double()(x), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("scale", [1e-30, 1e15])
def test_rms_norm_of_tiny_and_huge_values_is_finite(scale):
    """norm^2 leaves float32 beyond 1e19 only, as the textbook's x^2 does."""
    x = (randn(4, 64) * scale).float().requires_grad_()
    out = RMSNorm(64, 1e-6)(x)
    assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


# The formula of each MLP, from up = x U or, gated, from gate = x G and up = x U, up to the last
# projection. A new MLP needs a line here.
HIDDEN = {
    "swiglu": lambda gate, up: gate / (1 + torch.exp(-gate)) * up,
    "gelu": lambda up: (
        0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    ),
    "gelu_erf": lambda up: 0.5 * up * (1 + torch.erf(up / math.sqrt(2))),
    "relu2": lambda up: up.clamp(min=0) ** 2,
}
each_mlp = pytest.mark.parametrize("name", MLPS)


def random_mlp(name: str, bias: bool) -> torch.nn.Module:
    """Return an MLP of width 8 and 12 in float64, all of whose values matter."""
    mlp = MLPS[name](8, 12, bias).double()
    for seed, p in enumerate(mlp.parameters()):
        p.data = randn(*p.shape, seed=seed)
    return mlp


@pytest.mark.parametrize("bias", [False, True])
@each_mlp
def test_an_mlp_equals_its_formula(name, bias):
    assert name in HIDDEN, f"tests/test_layers.py: HIDDEN has no formula for {name}"
    mlp, x = random_mlp(name, bias), randn(2, 3, 8, seed=9)

    def linear(which: str, x):
        layer = getattr(mlp, which)
        assert (layer.bias is not None) == bias
        return x @ layer.weight.T + (layer.bias if bias else 0.0)

    inputs = [linear(which, x) for which in ["gate_proj"] * mlp.gated + ["up_proj"]]
    torch.testing.assert_close(mlp(x), linear("down_proj", HIDDEN[name](*inputs)))
    assert len(list(mlp.parameters())) == (len(inputs) + 1) * (1 + bias)  # and no other


@each_mlp
def test_the_gradient_of_an_mlp_is_that_of_its_differences(name):
    mlp, x = random_mlp(name, bias=True), randn(2, 3, 8, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: mlp(x), (x, *mlp.parameters()))


@each_mlp
def test_an_mlp_adds_nothing_at_first_and_passes_a_gradient_on(name):
    """Its last projection starts at zero: the block is the identity, and can leave it."""
    model = GPT(ModelConfig(n_layers=1, n_heads=2, d_model=16, mlp=name, vocab_size=10))
    mlp = model.layers[0].mlp
    out = mlp(torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)))
    assert not out.any()
    out.sum().backward()
    assert mlp.down_proj.weight.grad.abs().sum() > 0


@each_mlp
def test_the_default_width_keeps_the_number_of_parameters(name):
    """That of two matrices of C x 4C, to 2%, gated or not; the planner counts the same."""
    config = ModelConfig(n_layers=1, n_heads=4, d_model=768, mlp=name, vocab_size=10).resolved()
    counted = parameters_by_part(meta_model(config))["mlp"]
    assert counted == (3 if MLPS[name].gated else 2) * 768 * config.d_mlp
    assert counted == pytest.approx(2 * 768 * 3072, rel=0.02)
    assert sum(p.numel() for p in MLPS[name](768, config.d_mlp, False).parameters()) == counted


def test_every_choice_of_the_config_has_its_module():
    assert choices("mlp") == set(MLPS)
    assert choices("norm") == set(NORMS)


@pytest.mark.parametrize(
    ("mlp", "d_model", "d_mlp"),
    [("gelu", 768, 3072), ("relu2", 128, 512), ("swiglu", 768, 2048), ("swiglu", 128, 384)]
    + [("swiglu", 256, 704), ("swiglu", 4096, 10944), ("swiglu", 16, 48)],
)
def test_the_default_width_of_the_mlp(mlp, d_model, d_mlp):
    """4 x; gated 8/3 x, rounded up to a multiple of 64 (narrow models: of 8)."""
    assert ModelConfig(d_model=d_model, mlp=mlp).resolved(10).d_mlp == d_mlp
    assert ModelConfig(d_model=d_model, mlp=mlp, d_mlp=99).resolved(10).d_mlp == 99


@torch.no_grad()
def test_autocast_on_a_gpu_leaves_narrow_queries_narrow():
    """Works without a GPU: the tensors are fake, but autocast's rules are the real ones, and since
    torch 2.12 rms_norm is among the operations that it does in float32."""
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(), torch.device("cuda"):
            norm, x = RMSNorm(8, 1e-6), torch.zeros(2, 8)
            narrow = x.to(torch.get_autocast_dtype("cuda"))
            assert norm(narrow).dtype == narrow.dtype != torch.float32
            assert norm(x).dtype == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)
