"""Attention: every backend compared with the textbook, and that with numbers done by hand."""

from __future__ import annotations

import math

import pytest
import torch

from model.attention import ATTENTION, CausalSelfAttention, future_mask, reference_attention
from model.config import ModelConfig
from model.rope import Rope

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
OTHERS = [name for name in ATTENTION if name != "reference"]


def make_qkv(B=2, H=4, H_kv=4, T=7, S=7, D=8, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = (B, H, T, D), (B, H_kv, S, D), (B, H_kv, S, D)
    return [torch.randn(s, generator=rng, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("H_kv", [4, 2, 1])
@pytest.mark.parametrize(("T", "S"), [(7, 7), (3, 9), (1, 9), (1, 1), (130, 130), (70, 200)])
@pytest.mark.parametrize("backend", OTHERS)
def test_a_backend_equals_the_reference_forward_and_backward(backend, T, S, H_kv, causal, dtype):
    qkv = make_qkv(H_kv=H_kv, T=T, S=S, dtype=dtype)
    expected, _ = reference_attention(*qkv, causal=causal)
    out, weights = ATTENTION[backend](*qkv, causal=causal)
    assert weights is None
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[dtype])
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    gradients = torch.autograd.grad(out, qkv, direction)
    for got, want in zip(gradients, torch.autograd.grad(expected, qkv, direction), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=10 * TOLERANCE[dtype])


def test_non_causal_attention_may_have_more_queries_than_keys():
    qkv = make_qkv(T=9, S=4)
    expected, _ = reference_attention(*qkv, causal=False)
    for backend in OTHERS:
        torch.testing.assert_close(ATTENTION[backend](*qkv, causal=False)[0], expected)


def test_two_tokens_by_hand():
    """D = 4. Query 1 scores its two keys 4 / sqrt(4) = 2 and 0: weights e^2 : 1."""
    q = torch.tensor([[5.0, 0, 0, 0], [2.0, 0, 0, 0]]).view(1, 1, 2, 4)
    k = torch.tensor([[2.0, 0, 0, 0], [0.0, 3, 0, 0]]).view(1, 1, 2, 4)
    v = torch.tensor([[1.0, 0, 0, 0], [0.0, 1, 0, 0]]).view(1, 1, 2, 4)
    a = math.exp(2) / (math.exp(2) + 1)  # 0.8808
    out, weights = reference_attention(q, k, v, return_weights=True)
    torch.testing.assert_close(weights, torch.tensor([[[[1.0, 0.0], [a, 1 - a]]]]))
    torch.testing.assert_close(out, torch.tensor([[[[1.0, 0, 0, 0], [a, 1 - a, 0, 0]]]]))


def test_weights_sum_to_one_and_are_exactly_zero_on_the_future():
    q, k, v = make_qkv(T=3, S=9, dtype=torch.float32)
    _, weights = reference_attention(q, k, v, return_weights=True)
    assert weights.shape == (2, 4, 3, 9)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
    assert (weights[..., 0, :7] > 0).all()  # query 0 of 3 stands at position 6 of 9
    assert (weights[..., 0, 7:] == 0).all()
    assert (weights[..., 1, 8:] == 0).all()
    assert (weights[..., 2, :] > 0).all()
    expected = [[False] * 7 + [True] * 2, [False] * 8 + [True], [False] * 9]
    assert future_mask(3, 9).tolist() == expected
    assert reference_attention(q, k, v)[1] is None


# Lengths of the documents of two rows; at 64 keys a tile, whole tiles are of other documents.
ROWS = {
    7: ([3, 4], [1, 5, 1]),
    130: ([130], [1, 69, 60]),
    200: ([150, 2, 48], [64, 64, 72]),
}


def documents_of(T: int) -> torch.Tensor:
    """Return (2, T): the number of each position's document, by ROWS."""
    rows = [torch.tensor(lengths) for lengths in ROWS[T]]
    return torch.stack([torch.arange(len(r)).repeat_interleave(r) for r in rows])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("H_kv", [4, 2])
@pytest.mark.parametrize("T", ROWS)
@pytest.mark.parametrize("backend", ATTENTION)
def test_documents_in_a_row_equal_each_alone(backend, T, H_kv, causal, dtype):
    qkv, documents = make_qkv(H_kv=H_kv, T=T, S=T, dtype=dtype), documents_of(T)
    out, _ = ATTENTION[backend](*qkv, causal=causal, documents=documents)
    expected = torch.empty_like(out)
    for row, lengths in enumerate(ROWS[T]):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for length, end in zip(lengths, ends, strict=True):
            alone = [x[row : row + 1, :, end - length : end] for x in qkv]
            expected[row, :, end - length : end] = reference_attention(*alone, causal=causal)[0][0]
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[dtype])
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    gradients = torch.autograd.grad(out, qkv, direction)
    for got, want in zip(gradients, torch.autograd.grad(expected, qkv, direction), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=10 * TOLERANCE[dtype])


def test_weights_are_zero_on_every_other_document_and_on_the_future():
    """The mask of a row of 2 + 1 + 2 positions, written out."""
    q, k, v = make_qkv(B=1, T=5, S=5)
    visible = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    ).bool()
    documents = torch.tensor([[4, 4, 9, 0, 0]])  # which numbers they are does not matter
    _, weights = reference_attention(q, k, v, return_weights=True, documents=documents)
    assert ((weights > 0) == visible).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 5, dtype=torch.float64))


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize(("T", "S", "shape"), [(3, 9, (2, 9)), (7, 7, (2, 6)), (7, 7, (1, 7))])
def test_documents_of_another_shape_are_refused(backend, T, S, shape):
    documents = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match="documents must be"):
        ATTENTION[backend](*make_qkv(T=T, S=S), documents=documents)


@pytest.mark.parametrize("backend", OTHERS)
def test_only_the_reference_returns_weights(backend):
    with pytest.raises(ValueError, match="reference"):
        ATTENTION[backend](*make_qkv(), return_weights=True)


def test_grouped_queries_read_the_key_head_of_their_group():
    q, k, v = make_qkv(H=4, H_kv=2)
    out, _ = reference_attention(q, k, v)
    for head, source in enumerate([0, 0, 1, 1]):
        one, kv = slice(head, head + 1), slice(source, source + 1)
        alone, _ = reference_attention(q[:, one], k[:, kv], v[:, kv])
        torch.testing.assert_close(out[:, one], alone)


@pytest.mark.parametrize("D", [16, 64, 256])
def test_dividing_by_sqrt_d_keeps_the_scores_at_unit_variance(D):
    """A dot product of D products of unit variance has variance D. The scores are read off as the
    logarithm of the weights, but for a constant in each row."""
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 400, D, generator=rng, dtype=torch.float64) for _ in range(2))
    _, weights = reference_attention(q, k, k, causal=False, return_weights=True)
    assert weights.log().var(-1).mean().item() == pytest.approx(1.0, rel=0.1)
    assert (q @ k.mT).var().item() == pytest.approx(D, rel=0.1)
    # Undivided, the largest weight is nearly 1 and the softmax learns nothing.
    undivided = torch.softmax(q @ k.mT, -1)
    assert weights.amax(-1).mean() < 0.12
    assert undivided.amax(-1).mean() > 3 * weights.amax(-1).mean()


@pytest.mark.parametrize("backend", ATTENTION)
def test_dropout_keeps_the_mean_and_drops_its_share(backend):
    """All weights equal 1/S and v = 1: the output is (keys kept) / (S (1 - p))."""
    S, p = 64, 0.25
    q, k, v = torch.zeros(50, 8, 1, 8), torch.zeros(50, 8, S, 8), torch.ones(50, 8, S, 8)
    torch.manual_seed(0)
    out, _ = ATTENTION[backend](q, k, v, dropout_p=p)
    kept = out[..., 0] * S * (1 - p)  # (50, 8, 1): how many of 64 keys
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-3)
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    assert kept.var().item() == pytest.approx(S * p * (1 - p), rel=0.3)  # binomial
    torch.testing.assert_close(ATTENTION[backend](q, k, v)[0], torch.ones(50, 8, 1, 8))


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([(1, 3, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)], "do not fit"),
        ([(1, 2, 2, 4), (1, 2, 2, 6), (1, 2, 2, 6)], "do not fit"),
        ([(1, 2, 2, 4), (1, 2, 3, 4), (1, 2, 2, 4)], "do not fit"),
        ([(2, 2, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)], "do not fit"),
        ([(1, 2, 3, 4), (1, 2, 2, 4), (1, 2, 2, 4)], "3 queries, but only 2 keys"),
    ],
)
@pytest.mark.parametrize("backend", ATTENTION)
def test_shapes_that_do_not_fit_are_refused(backend, shapes, said):
    with pytest.raises(ValueError, match=said):
        ATTENTION[backend](*(torch.zeros(shape) for shape in shapes))


def test_the_layer_is_its_formula_written_out():
    """One head after the other, by loops; and dropout only in training."""
    config = ModelConfig(n_heads=4, n_kv_heads=2, d_model=12, d_head=6, qk_norm=False, dropout=0.9)
    layer = CausalSelfAttention(config.resolved(10), layer=0).eval()
    x = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(0))
    heads = []
    for h in range(4):
        rows, kv_rows = slice(6 * h, 6 * h + 6), slice(6 * (h // 2), 6 * (h // 2) + 6)
        q = x[0] @ layer.q_proj.weight[rows].T
        k, v = (x[0] @ p.weight[kv_rows].T for p in (layer.k_proj, layer.v_proj))
        scores = (q @ k.T / math.sqrt(6)).masked_fill(torch.ones(5, 5).triu(1) > 0, -math.inf)
        heads.append(scores.softmax(-1) @ v)
    expected = torch.cat(heads, dim=-1) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x, rotation=None)[0], expected)
    assert not torch.allclose(layer.train()(x, rotation=None)[0], expected)


def test_queries_and_keys_are_normalized_per_head_before_rotation():
    config = ModelConfig(n_heads=4, n_kv_heads=2, d_model=12, d_head=6, norm_eps=1e-12).resolved(10)
    layer = CausalSelfAttention(config, layer=0)
    layer.q_norm.weight.data.fill_(2.0)
    layer.k_norm.weight.data.fill_(3.0)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    given = []
    layer.attend = lambda q, k, v, **options: given.append((q, k, v)) or (q, None)
    layer(x, Rope(config)(torch.arange(5)))
    layer(x, None)
    q, k, v = given[0]
    # A rotation keeps lengths; a normalized head has length sqrt(6) times the norm's weight.
    torch.testing.assert_close(q.norm(dim=-1), torch.full((2, 4, 5), 2 * math.sqrt(6)))
    torch.testing.assert_close(k.norm(dim=-1), torch.full((2, 2, 5), 3 * math.sqrt(6)))
    assert v.norm(dim=-1).std() > 0.01
    assert not torch.allclose(q, given[1][0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dropout": 0.2}, 0.2),
        ({"dropout": 0.2, "attention_dropout": 0.0}, 0.0),
        ({"attention_dropout": 0.3}, 0.3),
    ],
)
def test_attention_weights_can_have_their_own_dropout(options, expected):
    layer = CausalSelfAttention(ModelConfig(n_heads=2, d_model=8, **options).resolved(5), 0)
    asked, attend = [], layer.attend

    def watch(q, k, v, **given):
        asked.append(given["dropout_p"])
        return attend(q, k, v, **given)

    layer.attend = watch
    layer.train()(torch.zeros(1, 3, 8), None)
    layer.eval()(torch.zeros(1, 3, 8), None)
    assert asked == [expected, 0.0]
