"""AdamW and Muon against torch's own, the groups, and one interface for GradScaler."""

from __future__ import annotations

import copy

import pytest
import torch

from cli.options import ConfigError
from model.config import ModelConfig
from model.gpt import GPT
from training.config import OptimConfig
from training.optimizer import Muon, Optimizers, group_names, orthogonalize

CPU = torch.device("cpu")


def tiny_model(**options) -> GPT:
    options = dict(n_layers=2, n_heads=2, d_model=16, context_length=8, **options)
    model = GPT(ModelConfig(**options).resolved(11))
    model.init_weights(0)
    return model


def learn(model: GPT, optimizers, steps: int, seed: int = 0) -> None:
    """Some steps on random tokens."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(11, (4, 9), generator=rng)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizers.step()
        optimizers.zero_grad()


def same(a: GPT, b: GPT) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


# Groups


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True}, {"bias": True, "norm": "layer"}])
def test_each_tensor_is_in_one_group_and_vectors_are_not_decayed(optimizer, options):
    model = tiny_model(**options)
    optimizers = Optimizers(model, OptimConfig(optimizer=optimizer, weight_decay=0.1), CPU)
    held = [p for group in optimizers.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    for group in optimizers.param_groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.dim() == 2 else 0.0)


def test_muon_has_the_matrices_of_the_blocks_and_nothing_else():
    model = tiny_model(position="learned", tie_embeddings=False)
    groups = group_names(dict(model.named_parameters()), muon=True)
    assert sorted(groups["decay"]) == ["embed.weight", "head.weight", "positions.weight"]
    assert len(groups["muon"]) == 2 * 7  # q, k, v, o, gate, up, down
    assert all(name.endswith("_proj.weight") for name in groups["muon"])


# AdamW


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_is_torchs_bit_for_bit(fused):
    torch.set_num_threads(1)
    ours, theirs = tiny_model(), tiny_model()
    config = OptimConfig(lr=3e-3, weight_decay=0.3, beta1=0.8, beta2=0.97, eps=1e-6)
    mine = Optimizers(ours, config, torch.device("cpu" if fused else "mps"))
    assert mine.parts[0].fused is fused
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() == 2], "weight_decay": 0.3},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    oracle = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.97), eps=1e-6, fused=fused)
    learn(ours, mine, 5)
    learn(theirs, oracle, 5)
    assert same(ours, theirs)
    state = mine.state_tensors()
    for name, p in theirs.named_parameters():
        for slot, value in oracle.state[p].items():
            assert torch.equal(state[f"{name}::{slot}"], value)


# Muon


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 24, 8), (1, 16, 16)])
def test_orthogonalized_matrices_have_singular_values_near_1(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalize(x)
    assert found.shape == x.shape
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 64, 32), (2, 16, 16)])
def test_orthogonalizing_is_the_papers_iteration_in_float64(shape):
    """Wide and tall matrices take a shorter way, also with singular values from 1 to 1e-5."""
    rng = torch.Generator().manual_seed(1)
    u, s, vt = torch.linalg.svd(torch.randn(shape, generator=rng), full_matrices=False)
    for values in (s, torch.logspace(0, -5, s.shape[1]).expand_as(s)):
        x = u @ torch.diag_embed(values) @ vt
        expected = x.double() / x.double().norm(dim=(1, 2), keepdim=True)
        for _ in range(5):
            gram = expected @ expected.mT
            expected = 3.4445 * expected + (-4.7750 * gram + 2.0315 * gram @ gram) @ expected
        error = (orthogonalize(x) - expected).norm() / expected.norm()
        assert error < 1e-3  # measured: 2e-4 at most


def test_the_size_of_a_matrix_does_not_matter_to_its_direction():
    x = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(orthogonalize(x), orthogonalize(x * 1e-3), atol=1e-3)
    assert torch.equal(orthogonalize(torch.zeros(1, 4, 4)), torch.zeros(1, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_is_torchs_to_bfloat16s_rounding(shape, dtype):
    rng = torch.Generator().manual_seed(0)
    weight, gradients = torch.randn(shape, generator=rng), torch.randn((3, *shape), generator=rng)
    ours, theirs = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    mine = Muon([{"params": [ours], **options}], dtype)
    oracle = torch.optim.Muon([theirs], **options)
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        oracle.step()
    moved = (theirs - weight).norm()
    assert (ours - theirs).norm() < 0.02 * moved  # measured: 0.0064 and 0.0035


def test_muon_computes_in_bfloat16_where_the_run_does_and_keeps_float32_state():
    def update(*dtype: torch.dtype) -> torch.Tensor:
        model = tiny_model()
        optimizers = Optimizers(model, OptimConfig(optimizer="muon"), CPU, *dtype)
        learn(model, optimizers, 3)
        assert {v.dtype for v in optimizers.state_tensors().values()} == {torch.float32}
        return model.layers[0].mlp.up_proj.weight.detach()

    plain = update()
    assert torch.equal(plain, update(torch.float32))
    assert torch.equal(plain, update(torch.float16))  # 5 bits of exponent do not hold the iteration
    narrow = update(torch.bfloat16)
    assert not torch.equal(plain, narrow)
    assert torch.allclose(plain, narrow, atol=0.01)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)], ids=str
)
def test_muon_computes_in_bfloat16_on_gpus_that_have_units_for_it(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    optimizers = Optimizers(tiny_model(), OptimConfig(optimizer="muon"), torch.device("cuda"))
    assert optimizers.parts[1].dtype == dtype


def test_matrices_of_the_same_shape_do_not_mix():
    def stepped(names: list[int]) -> list[torch.Tensor]:
        params = []
        for name in names:
            rng = torch.Generator().manual_seed(name)
            p = torch.nn.Parameter(torch.randn(4, 6, generator=rng))
            p.grad = torch.randn(4, 6, generator=rng)
            params.append(p)
        Muon([{"params": params, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}]).step()
        return [p.detach() for p in params]

    together, alone = stepped([1, 2]), [*stepped([1]), *stepped([2])]
    for a, b in zip(together, alone, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


# One interface


def test_every_learning_rate_follows_the_factor():
    optimizers = Optimizers(tiny_model(), OptimConfig(optimizer="muon", lr=0.5, muon_lr=0.2), CPU)
    for factor in (0.5, 1.0, 0.1):
        optimizers.set_lr(factor)
        assert [g["lr"] / factor for g in optimizers.param_groups] == pytest.approx([0.5, 0.5, 0.2])
        assert optimizers.lr == pytest.approx(0.5 * factor)


@pytest.mark.parametrize("where", ["embed.weight", "layers.0.mlp.up_proj.weight"])
def test_no_weight_moves_if_one_float16_gradient_is_not_finite(where):
    model = tiny_model()
    optimizers = Optimizers(model, OptimConfig(optimizer="muon"), CPU)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = copy.deepcopy(model)
    state = {name: value.clone() for name, value in optimizers.state_tensors().items()}

    def step(broken: bool) -> None:
        for name, p in model.named_parameters():
            p.grad = torch.full_like(p, torch.inf if broken and name == where else 0.5)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizers)
        scaler.step(optimizers)
        scaler.update()

    step(broken=True)
    assert same(model, before)
    assert all(torch.equal(optimizers.state_tensors()[name], state[name]) for name in state)
    assert scaler.get_scale() == 512
    step(broken=False)
    assert not any(map(torch.equal, model.parameters(), before.parameters()))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_restored_state_continues_bit_for_bit(optimizer):
    torch.set_num_threads(1)
    config = OptimConfig(optimizer=optimizer)
    one, other = tiny_model(), tiny_model()
    of_one, of_other = Optimizers(one, config, CPU), Optimizers(other, config, CPU)
    places = {name: t.data_ptr() for name, t in of_one.state_tensors().items()}
    learn(one, of_one, 3)
    assert places == {name: t.data_ptr() for name, t in of_one.state_tensors().items()}  # in place
    other.load_state_dict(one.state_dict())
    of_other.load_state_tensors({name: t.clone() for name, t in of_one.state_tensors().items()})
    learn(one, of_one, 2, seed=1)
    learn(other, of_other, 2, seed=1)
    assert same(one, other)


def test_state_that_does_not_fit_is_named_and_nothing_is_loaded():
    optimizers = Optimizers(tiny_model(), OptimConfig(), CPU)
    good = {name: torch.ones_like(value) for name, value in optimizers.state_tensors().items()}
    bad = dict(good)
    del bad["embed.weight::exp_avg"]
    bad["nose.weight::exp_avg"] = torch.zeros(3)
    bad["norm.weight::exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(ConfigError) as caught:
        optimizers.load_state_tensors(bad)
    told = str(caught.value)
    assert "embed.weight::exp_avg is missing" in told
    assert "nose.weight::exp_avg is extra" in told
    assert "norm.weight::exp_avg_sq: shape (3,), expected (16,)" in told
    assert not any(value.any() for value in optimizers.state_tensors().values())
    optimizers.load_state_tensors(good)
    assert all(value.all() for value in optimizers.state_tensors().values())
