"""Runs on conversations: packing, the loss of a step, resuming, answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from test_chat import WORDS, write_talks

from data.config import DataConfig
from data.loader import BatchLoader
from data.prepare import prepare
from data.shards import IGNORE_INDEX, Windows
from data.tokenizer import load_tokenizer
from model.config import ModelConfig
from model.gpt import GPT, with_new_ids
from tools import batch, evaluate
from training.checkpoint import find_checkpoint


@pytest.fixture(scope="module")
def talks(tmp_path_factory) -> Path:
    return write_talks(tmp_path_factory.mktemp("talks") / "talks.jsonl")


@pytest.fixture(scope="module")
def chat_options(talks) -> dict[str, object]:
    """Options of a tiny run on these conversations."""
    prepared = talks.parent / "prepared"
    shown = {"source": talks, "format": "chat", "tokenizer": "byte", "split": "document"}
    return {**shown, "prepared_dir": prepared, "context_length": 96, "sample_prompt": "say red"}


@pytest.fixture(scope="module")
def windows(talks) -> Windows:
    config = DataConfig(
        source=str(talks),
        format="chat",
        tokenizer="byte",
        val_fraction=0,
        prepared_dir=str(talks.parent / "prepared"),
    )
    return Windows(prepare(config, say=lambda text: None, progress=False), "train", 160)


def model(backend: str, **options) -> GPT:
    config = ModelConfig(n_layers=2, n_heads=4, d_model=32, context_length=160, **options)
    made = GPT(config.resolved(259), backend)
    made.init_weights(3)
    torch.manual_seed(0)
    for p in made.parameters():  # projections start at zero: nothing would be mixed
        torch.nn.init.normal_(p, std=0.2)
    return made


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa"])
def test_a_conversation_in_a_shared_row_has_the_loss_it_has_alone(windows, backend, position):
    made = model(backend, position=position)
    shared = 0
    for i in range(3):
        row = [torch.from_numpy(part)[None] for part in windows.pair(i)]
        with torch.no_grad():
            together = made(*row, reduction="none")[0]
        tokens, targets, documents = (part[0] for part in row)
        for number in documents.unique():
            mine = documents == number
            if not (targets[mine] != IGNORE_INDEX).any():
                continue  # the beginning of the next, which has a row of its own
            with torch.no_grad():
                alone = made(tokens[mine][None], targets[mine][None], reduction="none")[0]
            torch.testing.assert_close(together[mine], alone, atol=1e-5, rtol=0)
            shared += 1
    assert shared >= 5


def test_every_answer_is_a_target_once_in_an_epoch(talks, windows):
    loader = BatchLoader(windows, seed=1, global_batch=1)
    tokenizer = load_tokenizer(next((talks.parent / "prepared").glob("[!.]*")) / "tokenizer")
    found = []
    for i in range(len(windows)):
        _, targets, _ = loader.batch(i)
        counted = targets[targets != IGNORE_INDEX].tolist()
        end = tokenizer.special["<|im_end|>"]
        text = "".join("." if token == end else tokenizer.decode([token]) for token in counted)
        found += re.findall(r"\w+", text)
        assert text.count(".") == len(re.findall(r"\w+", text))  # each answer ends its turn
    wanted = re.findall(r'"assistant", "content": "(\w+)"', talks.read_text())
    assert sorted(found) == sorted(wanted)


def test_the_micro_batch_does_not_change_the_loss(train_tiny, chat_options, tmp_path):
    """Rows have different numbers of targets, and the loss is the mean over the global batch."""
    losses = []
    for size in (1, 2, 4):
        out = tmp_path / str(size)
        assert train_tiny(out, **chat_options, micro_batch=size, max_steps=3, interval=1) == 0
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, atol=2e-6)


def weights(run: Path) -> bytes:
    return (find_checkpoint(run, "latest").path / "model.safetensors").read_bytes()


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(train_tiny, chat_options, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train_tiny(whole, **chat_options, max_steps=8, checkpoint_interval=3) == 0
    shutil.copytree(whole, halves)
    for step in (6, 8):
        shutil.rmtree(halves / f"checkpoints/step-{step}")
    assert train_tiny(halves, **chat_options, max_steps=8, checkpoint_interval=3) == 0
    assert weights(halves) == weights(whole)


def test_a_base_model_gets_rows_for_the_chat_tokens(train_tiny, chat_options, tmp_path, capsys):
    """They start as the mean of the others; the tokenizer comes from the base run."""
    base, chat = tmp_path / "base", tmp_path / "chat"
    (tmp_path / "plain.txt").write_text("user\nsay red\nassistant\nred\n" * 200)
    text = {"source": tmp_path / "plain.txt", "tokenizer": "byte", "context_length": 96}
    assert train_tiny(base, **text, tie_embeddings=True, max_steps=4) == 0
    # A learning rate too small to move a weight: what is saved is what the run began with.
    options = {**chat_options, "tokenizer": f"run:{base}", "init_from": base, "lr": 1e-30}
    assert train_tiny(chat, **options, weight_decay=0, max_steps=1) == 0
    assert "vocabulary: 2 new ids for the chat tokens" in capsys.readouterr().out
    old, new = (find_checkpoint(run, "latest").model_tensors() for run in (base, chat))
    assert new["embed.weight"].shape == (259, 16)
    torch.testing.assert_close(new["embed.weight"][:257], old["embed.weight"])
    mean = old["embed.weight"].mean(0)
    torch.testing.assert_close(new["embed.weight"][257:], torch.stack([mean, mean]))
    assert train_tiny(chat, **options, weight_decay=0, max_steps=2) == 0  # resumes
    assert "vocabulary: " not in capsys.readouterr().out


def test_new_ids_are_the_mean_of_the_known_and_padding_stays():
    rows = torch.tensor([[0.0, 1.0], [2.0, 3.0], [9.0, 9.0], [7.0, 8.0]])
    assert with_new_ids(rows, 2, 3).tolist() == [[0.0, 1.0], [2.0, 3.0], [1.0, 2.0], [7.0, 8.0]]
    assert with_new_ids(rows[:2], 2, 3).tolist() == [[0.0, 1.0], [2.0, 3.0], [1.0, 2.0]]
    assert with_new_ids(rows, 4, 4) is rows


def test_the_batch_viewer_shows_what_counts(train_tiny, chat_options, tmp_path, command):
    run = tmp_path / "run"
    assert train_tiny(run, **chat_options, max_steps=1) == 0
    code, out, err = command(batch.main, run, "--step=1", "--chars=0")
    assert (code, err) == (0, "")
    answers = re.findall(r"assistant\n(.+?)\n", out)
    assert len(answers) >= 4  # of 4 rows
    assert all(re.fullmatch(r"«(red|green|blue)<\|im_end\|>»", answer) for answer in answers)
    assert out.count("«") == len(answers)
    with mock.patch.object(sys.stdout, "isatty", lambda: True), mock.patch.dict(os.environ):
        os.environ.pop("NO_COLOR", None)
        _, colored, _ = command(batch.main, run, "--step=1", "--chars=0")
    assert colored == out.replace("«", "\033[32m").replace("»", "\033[0m")


def test_what_cannot_be_evaluated_is_refused(train_tiny, chat_options, trained, tmp_path, command):
    run = tmp_path / "run"
    assert train_tiny(run, **chat_options, max_steps=1) == 0
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "assistant", "content": "Hi"}]}')
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "a" * 200, "completion": "b"}))
    for folder, options, problem in (
        (run, ["--task=x", "--source=x"], "task and source are both given"),
        (run, ["--stride=8"], "a sliding window is for text; conversations are scored as the"),
        (
            run,
            [f"--task={tmp_path}/a.jsonl"],
            "line 1: does not end with a question and its",
        ),
        (
            run,
            [f"--task={tmp_path}/b.jsonl"],
            "line 1: 219 tokens and an answer exceed the",
        ),
        (
            trained,
            [f"--task={tmp_path}/b.jsonl"],
            "the tokenizer of these weights has no",
        ),
    ):
        code, _, err = command(evaluate.main, folder, *options)
        assert code == 2 and problem in err


def test_the_answers_of_a_run_are_counted(train_tiny, chat_options, tmp_path, command):
    """A model that learns to repeat one of three words, asked for words it has seen."""
    run, task = tmp_path / "run", tmp_path / "task.jsonl"
    options = {**chat_options, "d_model": 32, "lr": 0.03, "max_steps": 60, "eval_interval": 60}
    assert train_tiny(run, **options, checkpoint_interval=60) == 0
    rows = [{"prompt": f"say {WORDS[i % 3]}{i}", "completion": WORDS[i % 3]} for i in range(12)]
    rows += [{"prompt": "say red1", "completion": "never"}]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = command(evaluate.main, run, f"--task={task}")
    assert (code, err) == (0, "")
    assert "wrong: 'say red1': 'red', not 'never'" in out
    assert re.search(r"task.jsonl: 12 of 13 answers are right, word for word: 92.3%$", out, re.M)
