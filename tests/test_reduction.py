"""The sum over micro-batches: one tree, whatever the ranks."""

from __future__ import annotations

import pytest
import torch
from faultlib import Job

from cli.options import ConfigError
from training.distributed import Ranks, join_ranks
from training.step import TreeSum, odd_part, pick_reduction, sum_over_ranks


def tree_sum(leaves: list[torch.Tensor]) -> torch.Tensor:
    tree = TreeSum(len(leaves))
    for leaf in leaves:
        tree.add([leaf.clone()])
    return tree.result()[0]


def leaves_of(M: int) -> list[torch.Tensor]:
    """Return numbers of very different sizes, so that another order gives other bits."""
    rng = torch.Generator().manual_seed(M)
    shape = (M, 500)
    scale = 10 ** torch.randint(-4, 5, shape, generator=rng).float()
    return list((torch.randn(shape, generator=rng) * scale).unbind())


def test_the_tree_of_six():
    a, b, c, d, e, f = leaves_of(6)
    assert torch.equal(tree_sum([a, b, c, d, e, f]), ((a + b) + c) + ((d + e) + f))


def test_the_tree_of_eight():
    a, b, c, d, e, f, g, h = leaves_of(8)
    wanted = ((a + b) + (c + d)) + ((e + f) + (g + h))
    assert torch.equal(tree_sum([a, b, c, d, e, f, g, h]), wanted)
    in_a_row = sum([b, c, d, e, f, g, h], a)
    assert not torch.equal(wanted, in_a_row)  # the order shows in the bits


@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 6, 7, 8, 12, 20, 24, 32, 48])
def test_ranks_that_hold_subtrees_join_to_the_same_bits(M):
    leaves, W = leaves_of(M), 1
    whole = tree_sum(leaves)
    while (M // odd_part(M)) % W == 0:
        share = M // W
        parts = [tree_sum(leaves[r * share : (r + 1) * share]) for r in range(W)]
        while len(parts) > 1:
            parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
        assert torch.equal(parts[0], whole), f"{W} ranks"
        W *= 2


@pytest.mark.parametrize("M", [8, 12, 64, 96])
def test_only_a_few_partial_sums_live_at_a_time(M):
    tree, most = TreeSum(M), 0
    for leaf in leaves_of(M):
        tree.add([leaf])
        most = max(most, len(tree.sums))
    assert most <= (M // odd_part(M)).bit_length()  # log2 + 1


def test_too_few_leaves_make_no_tree():
    tree = TreeSum(4)
    for leaf in leaves_of(3):
        tree.add([leaf])
    with pytest.raises(AssertionError, match="3 leaves"):
        tree.result()


@pytest.mark.parametrize("world", [2, 4])
def test_recursive_doubling_between_real_ranks(tmp_path, world):
    """Every rank ends with the same bits, those of the tree; shapes and 0-dim tensors survive."""

    def command(argv: list[str]) -> int:
        ranks = join_ranks("auto", 30)
        ranks.start("cpu")
        share = 8 // world
        mine = leaves_of(8)[ranks.rank * share : (ranks.rank + 1) * share]
        parts = [tree_sum(mine), tree_sum(mine)[:6].view(2, 3), tree_sum(mine)[0]]
        torch.save(sum_over_ranks(parts, ranks, "a test"), tmp_path / f"{ranks.rank}.pt")
        ranks.close()
        return 0

    job = Job(world, [], tmp_path, command=command)
    assert job.wait() == [0] * world, job.text()
    wanted = tree_sum(leaves_of(8))
    for rank in range(world):
        big, small, single = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(big, wanted)
        assert torch.equal(small, wanted[:6].view(2, 3)) and torch.equal(single, wanted[0])


def ranks_of(world: int, device: str = "cpu") -> Ranks:
    return Ranks(world=world, device=torch.device(device))


@pytest.mark.parametrize(
    "asked, M, world, device, wanted",
    [
        ("auto", 8, 1, "cpu", "exact"),
        ("auto", 8, 4, "cpu", "exact"),
        ("auto", 12, 4, "cpu", "exact"),
        ("auto", 6, 3, "cpu", "fast"),  # 3 is not a power of two
        ("auto", 8, 4, "cuda", "fast"),
        ("exact", 8, 4, "cuda", "exact"),
        ("fast", 8, 2, "cpu", "fast"),
        ("fast", 6, 3, "cpu", "fast"),
    ],
)
def test_the_reduction_that_is_picked(asked, M, world, device, wanted):
    assert pick_reduction(asked, M, ranks_of(world, device)) == wanted


@pytest.mark.parametrize("M, world", [(6, 4), (5, 2), (1, 2), (2, 4)])
def test_micro_batches_that_ranks_cannot_share_are_refused(M, world):
    with pytest.raises(ConfigError, match=f"= {M} micro-batches .* {world} ranks"):
        pick_reduction("auto", M, ranks_of(world))


@pytest.mark.parametrize("M, world", [(6, 3), (6, 6), (9, 3), (12, 12)])
def test_an_impossible_exact_reduction_is_refused(M, world):
    needs = f"number of ranks, {world}, must be a power of two .* {M} micro"
    with pytest.raises(ConfigError, match=needs):
        pick_reduction("exact", M, ranks_of(world))
