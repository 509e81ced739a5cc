"""Choosing the next id: each setting compared with probabilities worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from model.config import SamplingConfig
from model.generate import next_distribution, sample_next

# Softmax of these logits: 0.1, 0.4, 0.2, 0.3
LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()


def distribution(logits=LOGITS, seen=None, **settings) -> list[float]:
    return next_distribution(logits, SamplingConfig(**settings), seen)[0].tolist()


def rng(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        # Temperature 1/2 squares them: 1, 16, 4, 9 of 30
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 4}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 10**6}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 0}, [0.1, 0.4, 0.2, 0.3]),
        # 0.4 does not reach 0.6, 0.4 + 0.3 does
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
        # The floor is 0.6 x 0.4 = 0.24
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"min_p": 0.0}, [0.1, 0.4, 0.2, 0.3]),
        # top-k first: of 4/7 and 3/7, the first alone reaches 0.5
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),
        # temperature before top-p: at 1/2 the first has 16/30 and reaches 0.5 alone
        ({"temperature": 0.5, "top_p": 0.5}, [0, 1, 0, 0]),
    ],
)
def test_a_setting_gives_the_probabilities_worked_out_by_hand(settings, expected):
    assert distribution(**settings) == pytest.approx(expected, abs=1e-6)


def test_the_repetition_penalty_by_hand():
    """Penalty 2 halves a positive logit and doubles a negative one, of ids that were seen."""
    logits = torch.tensor([[2.0, -1.0, 1.0, 0.5]])
    seen = torch.tensor([[True, True, False, False]])
    odds = [math.exp(x) for x in (1.0, -2.0, 1.0, 0.5)]
    expected = [x / sum(odds) for x in odds]
    assert distribution(logits, seen, repetition_penalty=2.0) == pytest.approx(expected)
    greedy = SamplingConfig(temperature=0.0, repetition_penalty=3.0)
    assert sample_next(logits, greedy, rng(), seen).tolist() == [2]
    assert sample_next(logits, greedy, rng(), torch.zeros_like(seen)).tolist() == [0]
    # Rows have their own past, and the logits that came in are not written to.
    rows = sample_next(logits.expand(2, 4), greedy, rng(), torch.cat([seen, ~seen]))
    assert rows.tolist() == [2, 0]
    assert logits.tolist() == [[2.0, -1.0, 1.0, 0.5]]


def test_equal_odds_do_not_widen_top_k():
    probabilities = next_distribution(torch.zeros(1, 6), SamplingConfig(top_k=2), None)[0]
    assert sorted(probabilities.tolist()) == [0, 0, 0, 0, 0.5, 0.5]


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_temperatures_stay_finite(temperature, dtype):
    logits = torch.tensor([[50.0, 49.0, -60000.0, -torch.inf]], dtype=dtype)
    for more in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        settings = SamplingConfig(temperature=temperature, **more)
        probabilities = next_distribution(logits, settings, None)
        assert probabilities.dtype == torch.float32
        assert probabilities.isfinite().all()
        assert probabilities.sum().item() == pytest.approx(1.0)
        assert probabilities[0, 3] == 0  # what is masked stays so
        if temperature < 1:
            assert probabilities[0].tolist() == [1, 0, 0, 0]


def test_draws_follow_the_distribution():
    """20,000 draws: three standard deviations of the largest share are 0.0104."""
    ids = sample_next(LOGITS.expand(20_000, 4), SamplingConfig(), rng())
    shares = torch.bincount(ids, minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.4, 0.2, 0.3]), rtol=0, atol=0.0104)
    ids = sample_next(LOGITS.expand(2_000, 4), SamplingConfig(top_k=2), rng())
    assert set(ids.tolist()) == {1, 3}


def test_a_draw_depends_on_its_generator_alone():
    logits, settings = LOGITS.expand(50, 4), SamplingConfig()
    before = torch.random.get_rng_state()
    first = sample_next(logits, settings, rng(1))
    torch.manual_seed(99)
    assert torch.equal(sample_next(logits, settings, rng(1)), first)
    assert not torch.equal(sample_next(logits, settings, rng(2)), first)
    torch.random.set_rng_state(before)
    sample_next(logits, settings, rng(3))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_greedy_needs_no_random_number():
    generator = rng(1)
    before = generator.get_state()
    assert sample_next(LOGITS, SamplingConfig(temperature=0.0), generator).tolist() == [1]
    assert torch.equal(generator.get_state(), before)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.0, 1e-6, 1e-4, 1.0, 5.0], [-1.0, -1e-9, 1e-9, 1e9, NAN, INF]),
        ("top_k", [0, 1, 50, 10**6], [-1]),
        ("top_p", [1e-9, 0.5, 1.0], [0.0, -0.1, 1.1, NAN]),
        ("min_p", [0.0, 0.1, 1.0], [-0.1, 1.1, NAN]),
        ("repetition_penalty", [0.5, 1.0, 1.2], [0.0, -1.0, 1e9, NAN, INF]),
        ("max_new_tokens", [1, 10**6], [0, -5]),
    ],
)
def test_values_out_of_range_are_named(name, good, bad):
    for value in good:
        assert SamplingConfig(**{name: value}).problems() == []
    for value in bad:
        (problem,) = SamplingConfig(**{name: value}).problems()
        assert problem.startswith(f"{name}={value}: must be ")


def test_all_problems_are_reported_together():
    assert len(SamplingConfig(temperature=-1.0, top_k=-1, top_p=0.0).problems()) == 3


def test_top_p_reached_exactly_needs_no_further_id():
    assert distribution(torch.zeros(1, 4), top_p=0.5) == [0.5, 0.5, 0.0, 0.0]
