"""One step: its loss does not depend on the micro-batches; inf and nan change no weight."""

from __future__ import annotations

import math

import pytest
import torch
from faultlib import Job
from torch.nn.parallel import DistributedDataParallel

from data.config import DataConfig
from model.config import ModelConfig
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from training.config import Config, OptimConfig, ParallelConfig, RunConfig
from training.device import Precision
from training.distributed import Ranks, join_ranks
from training.optimizer import Optimizers
from training.step import (
    SMALLEST_SCALE,
    NonFinite,
    Setup,
    count_targets,
    dropout_seed,
    seed_dropout,
    train_step,
)

B, T, V = 8, 12, 31


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_setup(
    n_micro: int = 1, reduction: str = "exact", dtype=torch.float32, clip: float = 1.0, **model
) -> Setup:
    shape = ModelConfig(n_layers=1, n_heads=2, d_model=16, context_length=T, **model)
    gpt = GPT(shape.resolved(V))
    gpt.init_weights(3)
    precision = Precision(dtype, "cpu")
    optimizers = Optimizers(gpt, OptimConfig(lr=0.01), torch.device("cpu"))
    config = Config(
        data=DataConfig(global_batch=n_micro, micro_batch=1),  # counted, not read
        optim=OptimConfig(grad_clip=clip),
        parallel=ParallelConfig(reduction=reduction),
        run=RunConfig(seed=5),
    )
    return Setup(config, gpt, optimizers, precision.scaler(), precision, Ranks())


def batch(step: int, masked: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(step)
    tokens = torch.randint(V, (B, T), generator=rng)
    targets = torch.randint(V, (B, T), generator=rng)
    # Rows are masked unequally: the first hardly, the last almost completely.
    share = masked * torch.linspace(0, 1, B)[:, None]
    targets[torch.rand(B, T, generator=rng) < share] = IGNORE_INDEX
    return tokens, targets


def cut(whole: tuple[torch.Tensor, torch.Tensor], n: int) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(side.chunk(n) for side in whole), strict=True))


def run(n_micro: int, steps: int = 20, masked: float = 0.0, **options):
    setup = make_setup(n_micro, **options)
    found = [train_step(setup, cut(batch(s, masked), n_micro), s) for s in range(steps)]
    return found, dict(setup.model.named_parameters())


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("masked", [0.0, 0.95])
def test_another_split_into_micro_batches_gives_the_same_to_rounding(masked, reduction):
    """20 steps of AdamW without dropout; with masked targets a mean of means would be off."""
    wanted, weights = run(1, masked=masked)
    for n_micro in (2, 4, 8):
        found, other = run(n_micro, masked=masked, reduction=reduction)
        for a, b in zip(wanted, found, strict=True):
            assert b.loss == pytest.approx(a.loss, rel=1e-5)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4)
            assert b.tokens == a.tokens
        for name, weight in weights.items():
            error = (other[name] - weight).norm() / weight.norm()
            assert error < 1e-5, name


def test_targets_that_are_ignored_do_not_count():
    whole = batch(0, masked=0.95)
    setup = make_setup()
    metrics = train_step(setup, [whole], 0)
    assert metrics.tokens == count_targets([whole]) == int((whole[1] != IGNORE_INDEX).sum())
    assert 0 < metrics.tokens < B * T / 1.5
    assert metrics.loss == pytest.approx(math.log(V), abs=0.1)  # a mean over those that count
    none = train_step(setup, [(whole[0], torch.full_like(whole[1], IGNORE_INDEX))], 1)
    assert (none.loss, none.grad_norm, none.tokens) == (0.0, 0.0, 0)


def test_dropout_is_a_function_of_seed_step_and_micro_batch():
    drawn = set()
    for key in ((5, 0, 0), (5, 0, 1), (5, 1, 0), (6, 0, 0), (5, 0, 0)):
        seed_dropout(torch.device("cpu"), dropout_seed(*key))
        drawn.add(tuple(torch.rand(4).tolist()))
    assert len(drawn) == 4
    # The value itself: a change would change every run that is resumed.
    assert dropout_seed(1, 2, 3) == 6520558355739401531


def test_seeding_keeps_nothing(monkeypatch):
    """Without a GPU, torch.manual_seed keeps a traceback per call."""
    setup = make_setup(8)
    before = len(torch.cuda._queued_calls)
    for step in range(3):
        train_step(setup, cut(batch(step), 8), step)
    assert len(torch.cuda._queued_calls) == before


def test_each_micro_batch_of_each_step_has_a_dropout_of_its_own():
    """Eight micro-batches of one window each, all alike: their losses differ by dropout alone."""

    def losses(step: int) -> list[float]:
        setup, found = make_setup(8, dropout=0.5), []
        forward = setup.model.forward

        def note(*arguments, **options):
            loss = forward(*arguments, **options)
            found.append(loss.item())
            return loss

        setup.model.forward = note
        tokens, targets = batch(0)
        train_step(setup, [(tokens[:1], targets[:1])] * 8, step)
        return found

    first = losses(0)
    torch.rand(7)  # what was drawn before does not matter
    assert first == losses(0)
    assert len({*first, *losses(1)}) == 16


# Frozen weights


def freeze(model: GPT, names: tuple[str, ...]) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(names))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("n_micro", [1, 4])
@pytest.mark.parametrize(
    "frozen", [("embed",), ("layers",), ("embed", "layers.0.attn"), ("norm", "layers.0.mlp")]
)
def test_frozen_weights_stay_and_the_others_train(frozen, n_micro, reduction, optimizer):
    setup = make_setup(n_micro, reduction, tie_embeddings=False)
    freeze(setup.model, frozen)
    optim = OptimConfig(lr=0.01, optimizer=optimizer)
    setup.optimizers = Optimizers(setup.model, optim, torch.device("cpu"))
    before = {name: p.detach().clone() for name, p in setup.model.named_parameters()}
    for step in range(2):
        assert train_step(setup, cut(batch(step), n_micro), step).grad_norm > 0
    for name, p in setup.model.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith(frozen), name


def frozen_steps(reduction: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the weights after two steps of four micro-batches, some of them frozen."""
    setup = make_setup(4, reduction, tie_embeddings=False)
    freeze(setup.model, FROZEN)
    setup.optimizers = Optimizers(setup.model, OptimConfig(lr=0.01), torch.device("cpu"))
    setup.ranks = ranks
    if ranks.world > 1 and reduction == "fast":
        setup.ddp = DistributedDataParallel(setup.model)
    for step in range(2):
        mine = [cut(batch(step), 4)[micro] for micro in setup.local_micro]
        assert train_step(setup, mine, step).grad_norm > 0
    return {name: p.detach().clone() for name, p in setup.model.named_parameters()}


FROZEN = ("embed", "layers.0.attn")


def test_frozen_weights_stay_on_two_ranks_too(tmp_path):
    def command(argv: list[str]) -> int:
        torch.set_num_threads(1)
        ranks = join_ranks("auto", 30)
        ranks.start("cpu")
        found = {reduction: frozen_steps(reduction, ranks) for reduction in ("exact", "fast")}
        torch.save(found, tmp_path / f"{ranks.rank}.pt")
        ranks.close()
        return 0

    job = Job(2, [], tmp_path, command=command)
    assert job.wait() == [0, 0], job.text()
    first, wanted = make_setup(tie_embeddings=False).model, frozen_steps("exact", Ranks())
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, p in first.named_parameters():
            assert torch.equal(found["exact"][name], wanted[name]), name
            torch.testing.assert_close(found["fast"][name], wanted[name], rtol=1e-4, atol=1e-5)
            for weights in found.values():
                assert torch.equal(weights[name], p) == name.startswith(FROZEN), name


def test_a_weight_that_a_micro_batch_does_not_use_adds_a_gradient_of_zero():
    """Like a branch that is not always taken: another micro-batch may use it."""
    setup = make_setup(4, clip=0.0)
    extra = torch.nn.Parameter(torch.ones(3))
    setup.model.register_parameter("extra", extra)
    setup.optimizers = Optimizers(setup.model, OptimConfig(), torch.device("cpu"))
    forward, calls = setup.model.forward, iter(range(4))

    def sometimes(*arguments, **options):
        loss = forward(*arguments, **options)
        return loss + extra.sum() * 96 if next(calls) == 2 else loss

    setup.model.forward = sometimes
    seen = []
    setup.optimizers.step = lambda: seen.append(extra.grad.clone())
    train_step(setup, cut(batch(0), 4), 0)
    assert seen[0].tolist() == [1.0, 1.0, 1.0]  # 96 / the 96 targets


# inf and nan


def poison(setup: Setup, value: float, micro: int, where: str = "loss") -> None:
    """Make the loss of one micro-batch, or one gradient alone, not finite."""
    model, calls = setup.model, iter(range(10**6))
    forward = model.forward

    def bad(*args, **kwargs):
        loss = forward(*args, **kwargs)
        if next(calls) % setup.n_micro != micro:
            return loss
        if where == "loss":
            return loss * value
        loss.register_hook(lambda gradient: gradient * value)
        return loss

    model.forward = bad


def state_of(setup: Setup) -> list[torch.Tensor]:
    tensors = [*setup.model.parameters(), *setup.optimizers.state_tensors().values()]
    return [t.detach().clone() for t in tensors]


def unmoved(before: list[torch.Tensor], setup: Setup) -> bool:
    return all(map(torch.equal, before, state_of(setup)))


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_inf_and_nan_change_no_weight_and_the_step_is_named(where, value, reduction):
    setup = make_setup(4, reduction)
    train_step(setup, cut(batch(0), 4), 0)
    before = state_of(setup)
    poison(setup, value, micro=2, where=where)
    with pytest.raises(NonFinite, match=r"step 2: loss .* gradient norm (nan|inf)") as found:
        train_step(setup, cut(batch(1), 4), 1)
    assert found.value.exit_code == 4
    assert unmoved(before, setup)
    assert all(p.grad is None for p in setup.model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_float16_skips_and_halves_its_scale_until_that_cannot_help(value):
    setup = make_setup(2, dtype=torch.float16)
    train_step(setup, cut(batch(0), 2), 0)
    poison(setup, value, micro=1, where="gradient")
    before, scales = state_of(setup), [setup.scaler.get_scale()]
    with pytest.raises(NonFinite):
        for step in range(1, 100):
            assert train_step(setup, cut(batch(step), 2), step).skipped
            scales.append(setup.scaler.get_scale())
    assert unmoved(before, setup)
    assert scales == [2.0**k for k in range(16, -1, -1)] and scales[-1] == SMALLEST_SCALE


def test_float16_does_not_skip_a_bad_loss_with_good_gradients():
    """GradScaler looks at gradients alone: it would take the step silently."""
    setup = make_setup(1, dtype=torch.float16)
    forward = setup.model.forward
    setup.model.forward = lambda *a, **k: forward(*a, **k) + torch.tensor(math.inf)
    before = state_of(setup)
    with pytest.raises(NonFinite):
        train_step(setup, [batch(0)], 0)
    assert unmoved(before, setup)


def test_float16_trains_like_float32():
    wanted, _ = run(2, steps=8)
    found, _ = run(2, steps=8, dtype=torch.float16)
    for a, b in zip(wanted, found, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=2e-2) and not b.skipped
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=5e-2)  # unscaled before it is measured


def test_the_scaler_resumes_where_it_was():
    """Restored, the scale is equal, and so is the number of steps to its next doubling."""
    setup = make_setup(2, dtype=torch.float16)
    poison(setup, math.inf, micro=1, where="gradient")
    train_step(setup, cut(batch(0), 2), 0)
    del setup.model.forward
    for step in range(1, 4):
        train_step(setup, cut(batch(step), 2), step)
    fresh = make_setup(2, dtype=torch.float16)
    fresh.scaler.load_state_dict(setup.scaler.state_dict())
    assert fresh.scaler.get_scale() == setup.scaler.get_scale() == 32_768
    assert fresh.scaler.state_dict()["_growth_tracker"] == 3


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e9])
def test_clipping(clip, monkeypatch):
    """The logged norm is the one before clipping; 0 disables clipping."""
    norms, setup = [], make_setup(clip=clip)

    def step() -> None:
        gradients = [p.grad for p in setup.model.parameters()]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    monkeypatch.setattr(setup.optimizers, "step", step)
    told = train_step(setup, [batch(0)], 0).grad_norm
    wanted = min(told, clip) if clip else told
    assert norms[0] == pytest.approx(wanted, rel=1e-4)
