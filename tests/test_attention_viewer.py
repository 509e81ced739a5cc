"""The attention viewer: its weights are the model's, and its figures are right."""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.inspect import attention_maps
from tools import attention
from training.weights import find_weights


@pytest.fixture(scope="module")
def sampled(trained_once):
    return find_weights(trained_once, "latest").load(torch.device("cpu"))


def data_of(text: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', text, flags=re.DOTALL)[1])


def unpacked(data: dict) -> torch.Tensor:
    """Decode the weights as the page's script does: (L, H, T, T)."""
    T, L, H = len(data["tokens"]), data["layers"], data["heads"]
    flat = np.frombuffer(base64.b64decode(data["weights"]), "<u2").reshape(L, H, -1)
    maps = torch.zeros(L, H, T, T)
    for t in range(T):
        row = flat[..., t * (t + 1) // 2 :][..., : t + 1] / data["steps"]
        maps[..., t, : t + 1] = torch.tensor(row)
    return maps


# Figures worked out by hand: two heads over three positions


EVEN = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
FIRST = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0]])
MAPS = torch.stack([EVEN, FIRST])[None]  # (1, 2, 3, 3)


def test_figures_by_hand():
    entropy = (math.log(1) + math.log(2) + math.log(3)) / 3
    assert attention.entropies(MAPS)[0].tolist() == pytest.approx([entropy, 0.0])
    # Even: 0, 1/2, 1 tokens back. The first token always: 0, 1, 2.
    assert attention.distances(MAPS)[0].tolist() == pytest.approx([0.5, 1.0])
    values = np.frombuffer(base64.b64decode(attention.packed(MAPS)), "<u2") / attention.STEPS
    even = [1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3]
    assert values.tolist() == pytest.approx([*even, 1, 1, 0, 1, 0, 0], abs=1e-5)


# Tokens 5 6 5 6 with weights that differ at every place. By hand, of the queries 1, 2 and 3:
WEIGHTS = [[1, 0, 0, 0], [0.9, 0.1, 0, 0], [0.2, 0.5, 0.3, 0], [0.1, 0.04, 0.6, 0.26]]
BY_HAND = {
    "previous token": (0.9 + 0.5 + 0.6) / 3,
    "first token": (0.2 + 0.1) / 2,  # from query 2 on: that of query 1 is its previous token
    "itself": (0.1 + 0.3 + 0.26) / 3,
    "same token": (0.2 + 0.04) / 2,  # query 2 is the 5 of position 0, query 3 the 6 of 1
    "induction": (0.5 + 0.6) / 2,  # what came after them: positions 1 and 2
}
EVEN_BY_HAND = (1 / 3 + 1 / 4) / 2  # equal weights, for a pattern of one key of queries 2 and 3


def test_shares_of_patterns_by_hand():
    shares = attention.pattern_shares(torch.tensor([[WEIGHTS]]), torch.tensor([5, 6, 5, 6]))
    assert {name: share.item() for name, (share, _) in shares.items()} == pytest.approx(BY_HAND)
    for name in ("first token", "same token", "induction"):
        assert shares[name][1] == pytest.approx(EVEN_BY_HAND)


def test_a_pattern_that_no_token_can_follow_is_left_out():
    one = torch.ones(1, 1, 1, 1)
    assert attention.pattern_shares(one, torch.tensor([5])) == {}
    assert attention.clear_patterns(one, {}) == [[["", 0]]]
    different = attention.pattern_shares(torch.tensor([[WEIGHTS]]), torch.tensor([5, 6, 7, 8]))
    assert {"same token", "induction"}.isdisjoint(different)


def test_the_page_opens_on_the_head_and_query_that_show_induction_best():
    ids, even = torch.tensor([5, 6, 5, 6]), torch.ones(4, 4).tril()
    maps = torch.stack([even / even.sum(-1, keepdim=True), torch.tensor(WEIGHTS)])[:, None]
    shares = attention.pattern_shares(maps, ids)  # two layers of one head
    start = attention.starting_place(maps, ids, shares)
    assert (start["layer"], start["head"], start["query"]) == (1, 0, 3)
    assert "induction, 55% (29% if all tokens had equal weight)" in start["why"]
    # Above equal weights: previous token 67% - 36%, induction 55% - 29%, "itself" less.
    assert attention.clear_patterns(maps, shares) == [[["", 0]], [["previous token", 0.667]]]


def test_without_a_clear_pattern_the_page_opens_on_the_lowest_entropy():
    narrow = torch.tensor([[1, 0, 0], [0.5, 0.5, 0], [0.4, 0.3, 0.3]])
    maps = torch.stack([EVEN, narrow])[None]
    ids = torch.tensor([1, 2, 3])
    start = attention.starting_place(maps, ids, attention.pattern_shares(maps, ids))
    assert (start["layer"], start["head"], start["query"]) == (0, 1, 2)
    assert "lowest entropy" in start["why"]


# The page


def test_the_page_holds_the_models_weights(sampled):
    model, tokenizer = sampled
    ids = tokenizer.encode("def f1(x):\n")
    data = data_of(attention.make_page("t", model, tokenizer, ids))
    assert "".join(data["tokens"]) == "def f1(x):\n"
    maps = unpacked(data)
    assert torch.allclose(maps, attention_maps(model, torch.tensor([ids]))[:, 0], atol=1e-5)
    assert torch.allclose(maps.sum(-1), torch.ones(1, 2, len(ids)), atol=1e-4)
    expected = attention.entropies(maps).tolist()[0]
    assert data["entropy"][0] == pytest.approx(expected, abs=1e-3) and len(data["distance"]) == 1


def test_the_weights_are_those_of_the_fused_backend(sampled):
    model, tokenizer = sampled
    ids = torch.tensor([tokenizer.encode("def f1(x):\n")])
    maps = unpacked(data_of(attention.make_page("t", model, tokenizer, ids[0].tolist())))
    layer = model.layers[0]
    with torch.no_grad():
        model.use_attention("sdpa")
        kept = {}
        layer.attn.o_proj.register_forward_pre_hook(lambda module, given: kept.update(out=given[0]))
        layer.attn.v_proj.register_forward_hook(lambda module, given, out: kept.update(v=out))
        model(ids)
    H, T = maps.shape[1:3]
    v, fused = (kept[name][0].view(T, H, -1).transpose(0, 1) for name in ("v", "out"))
    assert torch.allclose(maps[0] @ v, fused, atol=1e-4)


def test_text_cannot_end_the_script(sampled):
    model, _ = sampled

    class Hostile:
        eot = None
        special = {}

        def decode_bytes(self, ids: list[int]) -> bytes:
            return b"</script><b>@TITLE@"

    page = attention.make_page("<x> @DATA@", model, Hostile(), [1, 2])
    assert "<title>&lt;x&gt; @DATA@: attention</title>" in page
    assert data_of(page)["tokens"] == ["</script><b>@TITLE@"] * 2


# The command


@pytest.mark.parametrize(
    ("argv", "tokens", "cut"),
    [
        (["--prompt=def f1(x):", "--tokens=4"], "def ", "4 tokens (the first of 10)"),
        (["--prompt", "x" * 40], "x" * 16, "16 tokens (the first of 40)"),  # the context
        (["--prompt=def "], "def ", "4 tokens;"),
        (["def "], "def ", "4 tokens;"),
    ],
)
def test_the_command_writes_a_page(argv, tokens, cut, command, trained):
    code, out, err = command(attention.main, trained, *argv)
    assert (code, err) == (0, "")
    assert cut in out
    assert data_of((trained / "attention.html").read_text())["tokens"] == list(tokens)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--prompt=def", "--tokens=0"], "tokens=0: must be at least 1"),
        (["--promt=def"], "did you mean --prompt?"),
        (["--prompt=def"], "nowhere"),
        (["def", "--prompt=abc"], "--prompt='abc' and 'def' are two prompts: keep one"),
        (["def", "f(x)"], "unexpected argument 'f(x)'"),
    ],
)
def test_mistakes_are_reported(command, argv, reason):
    code, _, err = command(attention.main, "out/nowhere", *argv)
    assert code == 2
    assert reason in err


def test_without_a_prompt_a_passage_of_the_validation_text_is_shown(command, trained, tiny_folder):
    code, out, err = command(attention.main, trained)
    assert (code, err) == (0, "") and "16 tokens" in out
    shown = "".join(data_of((trained / "attention.html").read_text())["tokens"])
    text = (tiny_folder / "text.txt").read_text()
    assert shown in text[int(0.79 * len(text)) :]  # the last 20% validates


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rn x\ndef f2(x):\n    return", "def f2(x):\n    return"),
        ("a line longer than the rest\ndef", "a line longer than the rest\ndef"),
        ("no end of a line", "no end of a line"),
    ],
)
def test_a_passage_begins_with_a_whole_line_if_that_leaves_most_of_it(text, shown):
    assert attention.whole_lines(text) == shown


def test_the_passage_is_the_one_whose_words_come_up_again(train_tiny, command, tmp_path):
    chosen = "Anna told Olga what Olga told Anna. "
    text = "".join(f"nothing {i} again, {i * i}\n" for i in range(60))
    (tmp_path / "text.txt").write_text(text + text + chosen * 5 + text[:100])
    options = {"source": tmp_path / "text.txt", "prepared_dir": tmp_path / "prepared"}
    assert train_tiny(tmp_path / "run", **options, context_length=64, val_fraction=0.3) == 0
    assert command(attention.main, tmp_path / "run")[0] == 0
    shown = "".join(data_of((tmp_path / "run/attention.html").read_text())["tokens"])
    assert shown in chosen * 5


def test_where_the_data_is_gone_the_example_is_shown(trained, monkeypatch):
    weights = find_weights(trained, "latest")
    assert attention.example(replace(weights, checkpoint=None)) == attention.EXAMPLE
    assert attention.example(weights) != attention.EXAMPLE
    gone = "training.checkpoint.find_fingerprint"
    monkeypatch.setattr(gone, lambda *_: None)
    assert attention.example(weights) == attention.EXAMPLE


def test_only_pages_of_plaingpt_are_overwritten(command, trained, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("mine")
    code, _, err = command(attention.main, trained, "--prompt=def ", f"--out={path}")
    assert (code, path.read_text()) == (2, "mine")
    assert f"out={path}: " in err
    for _ in range(2):
        out = tmp_path / "page.html"
        assert command(attention.main, trained, "--prompt=def ", f"--out={out}")[0] == 0
