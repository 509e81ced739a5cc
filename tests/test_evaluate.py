"""Evaluation: by hand, and the same loss for the same windows whatever the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from data.config import DataConfig
from model.config import ModelConfig
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from training.config import Config, RunConfig
from training.device import Precision
from training.distributed import Ranks
from training.evaluate import Evaluation, choose_windows, evaluate, windows_at_once

V, T = 5, 4
BYTES = np.array([1, 2, 3, 4, 0])  # what each id stands for; the last is the end-of-text


class FewWindows:
    """Validation windows held in memory."""

    def __init__(self, pairs) -> None:
        self.pairs = [(np.array(tokens), np.array(targets)) for tokens, targets in pairs]

    def __len__(self) -> int:
        return len(self.pairs)

    def pair(self, i: int, shift: int = 0):
        return self.pairs[i]


class Uniform(torch.nn.Module):
    """A model that finds every id equally likely."""

    def forward(self, tokens, targets, reduction):
        counted = targets != IGNORE_INDEX
        return counted * math.log(V)


def random_windows(n: int) -> FewWindows:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, V, (n, T + 1))
    return FewWindows([(row[:-1], row[1:]) for row in ids])


def tiny_model(dropout: float = 0.0) -> GPT:
    config = ModelConfig(n_layers=1, n_heads=2, d_model=8, context_length=T, dropout=dropout)
    model = GPT(config.resolved(V))
    model.init_weights(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5, generator=torch.Generator().manual_seed(p.numel()))
    return model


def measured(model, windows, chosen=None, batch=2, **options) -> Evaluation | None:
    chosen = range(len(windows)) if chosen is None else chosen
    return evaluate(
        model,
        windows,
        chosen,
        batch=batch,
        byte_lengths=BYTES,
        ranks=Ranks(),
        precision=Precision(torch.float32, "cpu"),
        **options,
    )


# By hand


def test_loss_perplexity_and_bits_per_byte_by_hand():
    windows = FewWindows(
        [
            ([0, 0, 0, 0], [0, 1, 2, 4]),  # 1 + 2 + 3 + 0 bytes
            ([0, 0, 0, 0], [3, 3, IGNORE_INDEX, IGNORE_INDEX]),  # 4 + 4 bytes, two targets
        ]
    )
    found = measured(Uniform(), windows)
    assert found.tokens == 6
    assert found.bytes == 14
    assert found.loss == pytest.approx(math.log(5))
    assert found.perplexity == pytest.approx(5)
    assert found.bits_per_byte == pytest.approx(6 * math.log2(5) / 14)


def test_the_loss_is_a_mean_over_targets_not_over_windows():
    class OneBadTarget(torch.nn.Module):
        def forward(self, tokens, targets, reduction):
            return (targets == 1) * 6.0

    windows = FewWindows(
        [([0] * 4, [1, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]), ([0] * 4, [0, 0, 0, 0])]
    )
    assert measured(OneBadTarget(), windows).loss == pytest.approx(6 / 5)


def test_the_losses_of_a_window_are_summed_in_float64():
    """In float32, 2^24 + 1 is 2^24."""

    class Uneven(torch.nn.Module):
        def forward(self, tokens, targets, reduction):
            return torch.tensor([[2.0**24, 1, 1, 1]]).expand(targets.shape)

    windows = FewWindows([([0] * 4, [1] * 4)])
    assert measured(Uneven(), windows).loss == (2**24 + 3) / 4


def test_perplexity_and_bits_per_byte_at_the_limits():
    assert Evaluation(loss=1000.0, tokens=1, bytes=1).perplexity == math.inf
    assert Evaluation(loss=2.0, tokens=3, bytes=2).bits_per_byte == pytest.approx(3 / math.log(2))
    assert Evaluation(loss=2.0, tokens=3, bytes=0).bits_per_byte is None  # ids that are no text


# The same windows


def test_windows_are_spread_evenly_and_the_same_each_time():
    assert choose_windows(10, 5) == [0, 2, 4, 6, 8]
    assert choose_windows(10, 3) == [0, 3, 6]
    assert choose_windows(19, 10) == [0, 1, 3, 5, 7, 9, 11, 13, 15, 17]  # to the end of the text
    assert choose_windows(10, 0) == choose_windows(10, 10) == choose_windows(10, 99)
    assert choose_windows(10, 0) == list(range(10))
    assert choose_windows(1_000_000_007, 2) == [0, 500_000_003]


@pytest.mark.parametrize(
    ("T", "micro_batch", "device", "windows"),
    [
        (64, 12, "cpu", 64),  # 4,096 tokens
        (100, 12, "cpu", 40),
        (64, 128, "cpu", 128),  # never fewer than in training
        (8192, 2, "cpu", 2),
        (64, 12, "cuda", 12),
    ],
)
def test_how_many_windows_are_scored_at_once(T, micro_batch, device, windows):
    config = Config(
        model=ModelConfig(context_length=T),
        data=DataConfig(micro_batch=micro_batch),
        run=RunConfig(device=device),
    )
    assert windows_at_once(config) == windows


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 100])
def test_the_loss_is_the_models_whatever_the_batch(batch):
    model, windows = tiny_model(), random_windows(7)
    losses = []
    for tokens, targets in windows.pairs:
        log_p = model(torch.tensor(tokens)[None]).log_softmax(-1)[0].detach()
        losses += [-float(log_p[t, target]) for t, target in enumerate(targets)]
    found = measured(model, windows, batch=batch)
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.tokens == 7 * T
    assert found.bytes == sum(int(BYTES[targets].sum()) for _, targets in windows.pairs)


def test_only_the_chosen_windows_count():
    model, windows = tiny_model(), random_windows(6)
    alone = FewWindows([windows.pairs[i] for i in (1, 4)])
    assert measured(model, windows, chosen=[1, 4]) == measured(model, alone)


# Side effects


@pytest.mark.parametrize("training", [True, False])
def test_mode_generator_and_gradients_stay_as_they_were(training):
    model, windows = tiny_model(dropout=0.5), random_windows(5)
    model.train(training)
    reference = measured(tiny_model(), windows)
    before = torch.get_rng_state()
    assert measured(model, windows) == reference  # dropout is off
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training is training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    windows.pairs[1] = (np.zeros(T + 1, dtype=int), np.zeros(T + 1, dtype=int))  # too long
    with pytest.raises(ValueError, match="context_length"):
        measured(model, windows, batch=1)
    assert model.training is training


def test_asked_to_stop_it_leaves_and_returns_none():
    asked = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 2

    model = tiny_model()
    assert measured(model, random_windows(10), batch=2, stop=stop) is None
    assert len(asked) == 3
    assert model.training
