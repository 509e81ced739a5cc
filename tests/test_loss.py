"""The loss: cross entropy, whole and in chunks, compared with PyTorch's own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from model.config import ModelConfig
from model.fast import FastCrossEntropy
from model.gpt import GPT
from model.loss import IGNORE_INDEX, LARGE_VOCAB, CrossEntropy

cross_entropy = FastCrossEntropy()


def make_model(vocab_size: int) -> GPT:
    sizes = dict(n_layers=1, n_heads=4, d_model=32, context_length=16)
    model = GPT(ModelConfig(**sizes).resolved(vocab_size))
    model.init_weights(0)
    return model


def randint(high, *shape, seed=2):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def chunks_of(monkeypatch):
    """Return a function that sets the chunk size and makes every vocabulary a large one."""

    def set_size(tokens: int) -> None:
        monkeypatch.setattr("model.loss.LARGE_VOCAB", 1)
        monkeypatch.setattr("model.loss.CHUNK_TOKENS", tokens)

    return set_size


def chunked_and_plain(V=50, N=37, dtype=torch.float64):
    """Return x (B, T, C), head, targets with some ignored, and PyTorch's own cross entropy."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1, N, 8, generator=rng, dtype=dtype).requires_grad_()
    head = torch.randn(V, 8, generator=rng, dtype=dtype).requires_grad_()
    targets = randint(V, 1, N)
    targets[0, ::5] = IGNORE_INDEX
    logits = (x @ head.T).flatten(0, 1)
    plain = F.cross_entropy(logits, targets[0], ignore_index=IGNORE_INDEX, reduction="none")
    return x, head, targets, plain


@pytest.mark.parametrize("cross_entropy", [CrossEntropy(), FastCrossEntropy()], ids=type)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 8, 37, 1])
def test_the_loss_is_cross_entropy_in_chunks_or_not(monkeypatch, chunk, reduction, cross_entropy):
    if chunk is not None:
        monkeypatch.setattr("model.loss.LARGE_VOCAB", 1)
        monkeypatch.setattr("model.loss.CHUNK_TOKENS", chunk)
    x, head, targets, plain = chunked_and_plain()
    reduced = {"none": plain[None], "sum": plain.sum(), "mean": plain.sum() / (plain != 0).sum()}
    got, expected = cross_entropy(x, head, targets, reduction), reduced[reduction]
    torch.testing.assert_close(got, expected)
    direction = torch.rand(got.shape, generator=torch.Generator().manual_seed(5)).double()
    gradients = torch.autograd.grad(got, (x, head), direction)
    expected = torch.autograd.grad(expected, (x, head), direction)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    with torch.no_grad():  # evaluation uses PyTorch's own
        torch.testing.assert_close(cross_entropy(x, head, targets, reduction), got.detach())


@pytest.mark.parametrize("V", [20, LARGE_VOCAB])
def test_the_loss_without_targets_is_zero(V):
    model = make_model(V)
    tokens = randint(20, 80, 16)  # 1,280 tokens: two chunks
    loss = model(tokens, torch.full_like(tokens, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad.eq(0).all() for p in model.parameters())


@pytest.mark.parametrize("target", [20, -1])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    model, tokens = make_model(20), randint(20, 1, 4)
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises((IndexError, RuntimeError), match="out of"),
        ):
            model(tokens, torch.full_like(tokens, target))


class Largest(torch.overrides.TorchFunctionMode):
    """Remembers the number of elements of the largest tensor that a function returns."""

    elements = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def saved_elements(compute) -> int:
    """Count the elements that autograd keeps for backward, views of one storage once."""
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = compute()  # held, so that no storage is used again for another
    assert loss.requires_grad
    return sum(kept.values())


def test_the_logits_of_a_large_vocabulary_never_exist_all_at_once(monkeypatch):
    """B T V = 64 x 1,000; chunks of 8 tokens are an eighth of it, in forward and kept for backward:
    nothing of V but the head itself."""
    x, head = torch.randn(4, 16, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    targets = randint(1000, 4, 16)
    monkeypatch.setattr("model.loss.CHUNK_TOKENS", 8)
    assert saved_elements(lambda: cross_entropy(x, head, targets, "sum")) > 64_000
    monkeypatch.setattr("model.loss.LARGE_VOCAB", 1000)
    assert saved_elements(lambda: cross_entropy(x, head, targets, "sum")) < 10_000
    with Largest() as largest:
        cross_entropy(x, head, targets, "sum")
    assert largest.elements == 8 * 1000


def test_float16_gradients_survive_by_the_scalers_factor(monkeypatch):
    """softmax / count over many ids is below float16's smallest number, 6e-8. Scaled before
    backward, by what GradScaler multiplies the loss with, it is not: the chunks see the factor."""
    monkeypatch.setattr("model.loss.LARGE_VOCAB", 1)
    monkeypatch.setattr("model.loss.CHUNK_TOKENS", 16)
    V, N, scale = 2000, 64, 2.0**12
    x = torch.rand(1, N, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.zeros(V, 16).requires_grad_()
    targets = torch.zeros(1, N, dtype=torch.long)

    def gradient(factor: float):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(x, head, targets, "sum") / (N * 1000)
        return torch.autograd.grad(loss * factor, head)[0] / factor

    # d loss / d head[v] = softmax x / (N * 1000), for all ids that are no target
    expected = (x[0].sum(0) / V / (N * 1000)).expand(V - 1, 16)
    torch.testing.assert_close(gradient(scale)[1:], expected.detach(), rtol=0.1, atol=1e-11)
    assert (gradient(1.0)[1:] == 0).float().mean() > 0.9


def test_a_chunk_takes_three_products_of_the_head(chunks_of):
    """Logits, the gradient of x and that of the head, 2 N C V each: none is made again."""
    chunks_of(16)
    x, head, targets, _ = chunked_and_plain(V=100, N=64, dtype=torch.float32)
    narrow = torch.autocast("cpu", dtype=torch.bfloat16)  # where no product is in place: all count
    with narrow, FlopCounterMode(display=False) as counter:
        cross_entropy(x, head, targets, "sum").backward()
    assert counter.get_total_flops() == 3 * 2 * 64 * 8 * 100


def test_the_heads_gradient_is_summed_in_float32(chunks_of):
    """Of chunks that are all alike, 5 give 5/2 of what 2 give; 5 of a number that has the 8 bits of
    bfloat16 often need more."""
    chunks_of(8)

    def gradient(copies: int) -> torch.Tensor:
        x, head, targets, _ = chunked_and_plain(N=8, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(x.repeat(1, copies, 1), head, targets.repeat(1, copies), "sum")
        return torch.autograd.grad(loss, head)[0]

    five, two = gradient(5), gradient(2)
    torch.testing.assert_close(five, two * 2.5, rtol=1e-6, atol=1e-7)
    assert (five.bfloat16() != five).float().mean() > 0.5


def test_bfloat16_products_are_near_the_exact_gradient(chunks_of):
    chunks_of(8)
    x, head, targets, plain = chunked_and_plain(dtype=torch.float32)
    exact = torch.autograd.grad(plain.sum(), (x, head))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(cross_entropy(x, head, targets, "sum"), (x, head))
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 8])
def test_the_loss_of_narrow_logits_is_in_float32(chunk, dtype, chunks_of, monkeypatch):
    """Of the logits as they are rounded: log-probabilities of 8 bits would be off by a percent."""
    if chunk is not None:
        chunks_of(chunk)
    monkeypatch.setattr("model.fast.product_dtype", lambda x: dtype)  # float16 has its own way
    x, head, targets, _ = chunked_and_plain(dtype=dtype)
    logits = F.linear(x.detach()[0], head.detach()).double()
    exact = F.cross_entropy(logits, targets[0], ignore_index=IGNORE_INDEX, reduction="sum")
    found = cross_entropy(x, head, targets, "sum")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("chunk", [None, 1, 8])
def test_an_ignored_target_counts_nothing_whatever_its_logits_are(chunk, bad, chunks_of):
    """As with torch: a loss of 0, even where the logits are not finite."""
    if chunk is not None:
        chunks_of(chunk)
    x, head, targets, plain = chunked_and_plain(dtype=torch.float32)
    x.data[0, 5] = bad  # 5 is ignored
    total = plain.sum()
    torch.testing.assert_close(cross_entropy(x, head, targets, "sum"), total, rtol=1e-5, atol=0)
    losses = cross_entropy(x, head, targets, "none")
    torch.testing.assert_close(losses[0], plain, rtol=1e-5, atol=1e-6)
    assert losses[0, 5] == 0


def test_backward_can_be_called_again(chunks_of):
    chunks_of(8)
    x, head, targets, _ = chunked_and_plain()
    gradient = partial(torch.autograd.grad, cross_entropy(x, head, targets, "mean"), (x, head))
    for first, second in zip(gradient(retain_graph=True), gradient(), strict=True):
        assert torch.equal(first, second)


def test_a_gradient_of_the_gradient_is_refused(chunks_of):
    chunks_of(8)
    x, head, targets, _ = chunked_and_plain()
    loss = cross_entropy(x, head, targets, "sum")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss**2, x, create_graph=True)


def test_the_chunks_can_be_compiled(chunks_of):
    chunks_of(8)
    x, head, targets, plain = chunked_and_plain()
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, head, targets, "sum"), (x, head))
    for mine, theirs in zip(found, torch.autograd.grad(plain.sum(), (x, head)), strict=True):
        torch.testing.assert_close(mine, theirs)
