"""Evaluation of a text: every token once, with the context that is stated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tools.evaluate
from cli.options import ConfigError
from data.tokenizer import byte_tokenizer, ids_tokenizer
from model.config import ModelConfig
from model.gpt import GPT
from tools.evaluate import EvaluateOptions, read_ids
from tools.export import __main__ as export
from training.score import score, windows


@given(n=st.integers(2, 200), T=st.integers(1, 30), stride=st.integers(1, 30))
def test_every_target_is_scored_once_with_enough_context(n, T, stride):
    stride = min(stride, T)
    scored = []
    for start, end, first in windows(n, T, stride):
        assert end - 1 - start == min(T, n - 1)  # inputs: whole windows always
        assert start < first < end <= n
        # Context: all there is, or at least T - stride tokens before the first target.
        assert first - start >= min(first, T - stride + 1)
        scored += range(first, end)
    assert scored == list(range(1, n))


@pytest.fixture(scope="module")
def model() -> GPT:
    config = ModelConfig(n_layers=2, n_heads=2, d_model=16, context_length=12).resolved(257)
    model = GPT(config).eval()
    with torch.no_grad():
        rng = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=rng))
    return model


TEXT = "Zwei Knaben liefen durch den Wald, \u00fcber Stock und Stein."


@pytest.mark.parametrize(("T", "stride"), [(12, 6), (12, 12), (12, 1), (5, 2), (1, 1)])
@torch.no_grad()
def test_the_loss_is_that_of_each_token_after_its_window(model, T, stride):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(TEXT)
    losses = []
    for i in range(1, len(ids)):  # by hand, one forward for each token
        end = T + 1 if i <= T else T + 1 - (-(i - T) // stride) * stride  # of the window it is in
        start = max(0, min(end, len(ids)) - T - 1)
        logits = model(torch.tensor([ids[start:i]]))[0, -1]
        losses.append(float(-logits.log_softmax(-1)[ids[i]]))
    found = score(model, ids, tokenizer, T, stride)
    assert found.loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert found.tokens == len(ids) - 1 == found.bytes  # a byte each
    assert found.bits_per_byte == pytest.approx(found.loss / 0.6931471805599453)


def test_ids_outside_of_the_vocabulary_are_refused(model):
    with pytest.raises(ConfigError, match="id 300"):
        score(model, [1, 300, 2], byte_tokenizer(), 12, 6)


def test_a_file_of_ids_is_scored_as_it_is(tmp_path):
    path = tmp_path / "x.bin"
    np.array([5, 256, 7, 8, 256], "<u2").tofile(path)
    options = EvaluateOptions(source=str(path))
    assert read_ids(options, byte_tokenizer()) == ([5, 256, 7, 8, 256], [0, 2])
    np.arange(1, 99).astype("<u4").tofile(path)
    with pytest.raises(ConfigError, match="--ids="):
        read_ids(options, byte_tokenizer())
    wide = EvaluateOptions(source=str(path), ids="u4")
    assert read_ids(wide, byte_tokenizer())[0] == list(range(1, 99))
    (tmp_path / "n.jsonl").write_text('{"text": [5, 6]}\n{"text": "7"}\n')
    rows = EvaluateOptions(source=str(tmp_path / "n.jsonl"))
    assert read_ids(rows, ids_tokenizer(9)) == ([5, 6, 7], [0, 2])


def test_documents_are_joined_by_the_end_of_text(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "c"}\n')
    assert read_ids(EvaluateOptions(source=str(path)), byte_tokenizer()) == (
        [97, 98, 256, 99],
        [0, 3],
    )
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(ConfigError, match="1 tokens"):
        read_ids(EvaluateOptions(source=str(tmp_path / "one.txt")), byte_tokenizer())


def loss_line(command, run: Path, text: Path, *options: str) -> str:
    code, out, err = command(tools.evaluate.main, run, f"--source={text}", "--device=cpu", *options)
    assert code == 0, err
    return out


def test_a_folder_and_the_run_it_came_from_give_the_same(trained, tiny_folder, tmp_path, command):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text, folder = tiny_folder / "text.txt", tmp_path / "hf"
    assert command(export.main, trained, f"--out={folder}")[0] == 0
    ours = loss_line(command, trained, text)
    assert loss_line(command, folder, text) == ours
    assert "context 16, stride 8" in ours
    assert loss_line(command, trained, text, "--stride=2") != ours
    # A text that fits into the context: transformers' own loss.
    short = tmp_path / "short.txt"
    short.write_text("def f1(x):\n")
    said = loss_line(command, folder, short)
    tokens = AutoTokenizer.from_pretrained(folder)(short.read_text(), return_tensors="pt")
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = float(model(**tokens, labels=tokens["input_ids"]).loss)
    assert float(re.search(r"loss ([\d.]+) nats", said)[1]) == pytest.approx(expected, abs=1e-5)


# The run's own validation split


def logged_loss(run: Path) -> float:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["val_loss"] for line in lines if "val_loss" in line][-1]


def loss_of(command, run: Path, *options: str) -> float:
    code, out, err = command(tools.evaluate.main, run, "--device=cpu", "--which=latest", *options)
    assert code == 0, err
    return float(re.search(r"loss ([\d.]+) nats", out)[1])


@pytest.mark.parametrize("windows", ["packed", "document"])
@pytest.mark.parametrize("mask", [False, True])
def test_without_a_text_it_is_the_loss_that_the_run_logged(
    train_tiny, short_documents, tmp_path, command, windows, mask
):
    options = {"windows": windows, "document_mask": mask, "max_steps": 4, "lr": 0.1}
    train_tiny(tmp_path / "run", **short_documents, **options)
    assert loss_of(command, tmp_path / "run") == pytest.approx(logged_loss(tmp_path / "run"))


def test_a_validation_source_is_the_split(train_tiny, tiny_folder, tmp_path, command):
    """With patience, which needs one; and the training text may have no validation part then."""
    text = tmp_path / "val.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 8)
    train_tiny(tmp_path / "run", val_source=text, val_fraction=0, patience=5)
    assert loss_of(command, tmp_path / "run") == pytest.approx(logged_loss(tmp_path / "run"))


def test_a_stride_slides_over_the_split_as_over_its_text(trained, tiny_folder, tmp_path, command):
    text = (tiny_folder / "text.txt").read_text()
    (tmp_path / "val.txt").write_text(text[int(len(text) * 0.8) :])  # as --split=tail cuts it
    split = loss_of(command, trained, "--stride=4")
    assert split == loss_of(command, trained, f"--source={tmp_path / 'val.txt'}", "--stride=4")
    assert split != pytest.approx(logged_loss(trained))


def test_without_a_validation_split_a_text_is_required(train_tiny, trained_once, tmp_path, command):
    train_tiny(tmp_path / "run", val_fraction=0, max_steps=2)
    folder = tmp_path / "hf"
    assert command(export.main, trained_once, f"--out={folder}")[0] == 0
    for run in (tmp_path / "run", folder):
        code, _, err = command(tools.evaluate.main, run, "--device=cpu")
        assert code == 2
        assert "--source" in err


@torch.no_grad()
def test_a_model_of_masked_documents_sees_one_at_a_time(model):
    tokenizer = byte_tokenizer()
    texts = [tokenizer.encode(text) for text in ("Zwei Knaben", "\u00fcber", "Stock und Stein.")]
    ids, starts, total = [], [], 0.0
    for text in texts:
        ids += [tokenizer.eot] if ids else []
        starts.append(len(ids))
        ids += text
    rows = [texts[0] + [256], [256, *texts[1], 256], [256, *texts[2]]]
    for row in rows:  # with context 12 and stride 1 each target has the 11 tokens before it
        for i in range(1, len(row)):
            logits = model(torch.tensor([row[max(0, i - 12) : i]]))[0, -1]
            total -= float(logits.log_softmax(-1)[row[i]])
    found = score(model, ids, tokenizer, 12, 1, starts)
    assert found.loss == pytest.approx(total / (len(ids) - 1), abs=1e-5)
    assert found.loss != pytest.approx(score(model, ids, tokenizer, 12, 1).loss, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--text_field=body"], "text_field=body"),
        (["--errors=replace"], "errors=replace"),
        (["--stride=17"], "stride=17"),
        (["--source=nowhere.txt"], "nowhere.txt"),
        (["--source=TEXT", "--stride=17"], "stride=17"),
        (["--source=TEXT", "--stride=0"], "stride=0"),
        (["--source=TEXT", "--context_length=17"], "context_length=17"),
    ],
)
def test_mistakes_are_refused_by_name(trained_once, tiny_folder, command, options, named):
    options = [option.replace("TEXT", str(tiny_folder / "text.txt")) for option in options]
    code, _, err = command(tools.evaluate.main, trained_once, *options)
    assert code == 2
    assert named in err
