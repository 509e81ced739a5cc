"""The attention viewer: its weights are the model's, and its figures are right."""

from __future__ import annotations

import base64
import json
import math
import re

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
    assert "<title>&lt;x&gt; @DATA@</title>" in page
    assert data_of(page)["tokens"] == ["</script><b>@TITLE@"] * 2


# The command


@pytest.mark.parametrize(
    ("argv", "tokens", "cut"),
    [
        (["--prompt=def f1(x):", "--tokens=4"], "def ", "4 tokens (the first of 10)"),
        (["--prompt", "x" * 40], "x" * 16, "16 tokens (the first of 40)"),  # the context
        (["--prompt=def "], "def ", "4 tokens;"),
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
        ([], "prompt is empty"),
        (["--prompt=def", "--tokens=0"], "tokens=0: must be at least 1"),
        (["--promt=def"], "did you mean --prompt?"),
        (["--prompt=def"], "nowhere"),
    ],
)
def test_mistakes_are_reported(command, argv, reason):
    code, _, err = command(attention.main, "out/nowhere", *argv)
    assert code == 2
    assert reason in err


def test_only_pages_of_plaingpt_are_overwritten(command, trained, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("mine")
    code, _, err = command(attention.main, trained, "--prompt=def ", f"--out={path}")
    assert (code, path.read_text()) == (2, "mine")
    assert f"out={path}: " in err
    for _ in range(2):
        out = tmp_path / "page.html"
        assert command(attention.main, trained, "--prompt=def ", f"--out={out}")[0] == 0
