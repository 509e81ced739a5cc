"""tools.batch shows the windows that an update was computed from."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from cli.options import ConfigError
from data.loader import BatchLoader
from data.prepare import prepared_folder
from data.shards import Windows
from data.tokenizer import load_tokenizer
from tools import batch
from training.checkpoint import find_checkpoint
from training.report.history import read_history


def test_every_window_of_a_step_is_shown_with_its_text(command, trained):
    code, out, err = command(batch.main, trained, "--step=4")
    assert (code, err) == (0, "")
    config = read_history(trained).config
    folder = prepared_folder(config.data)
    windows = Windows(folder, "train", 16)
    loader = BatchLoader(windows, seed=config.run.seed, global_batch=4, micro_batch=2)
    tokenizer = load_tokenizer(folder / "tokenizer")
    # The 4th update is step 3 of the loader, in two micro-batches of two windows.
    tokens = [row for j in (6, 7) for row in loader.batch(j)[0].tolist()]
    shown = out.split("--- ")[1:]
    assert len(shown) == 4
    for text, row in zip(shown, tokens, strict=True):
        assert tokenizer.decode(row) in text
    assert "micro-batch 1, row 0: window" in out
    assert out.startswith("step 4: loss ")  # it was logged


def test_a_step_whose_loss_is_not_finite_is_shown(command, trained):
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    for entry in entries:
        if entry["step"] == 4 and "loss" in entry:
            entry["loss"] = entry["grad_norm"] = None  # as the log has nan and inf
    damaged = [{"step": 4, "attempt": 1, "loss": "x"}, {"step": "4", "loss": 1.0}]
    text = "".join(json.dumps(entry) + "\n" for entry in entries + damaged)
    (trained / "metrics.jsonl").write_text(text)
    code, out, err = command(batch.main, trained, "--step=4")
    assert (code, err) == (0, "")
    assert out.startswith("step 4: loss not finite, gradient norm not finite\n--- micro-batch 0")


def test_of_the_log_the_lines_of_that_step_alone_are_parsed(trained, monkeypatch):
    def parse(line: bytes) -> dict:
        assert b'"step": 4,' in line
        return json.loads(line)

    monkeypatch.setattr("training.metrics.parse_line", parse)
    assert len([*batch.logged(trained, 4)]) == 1


def test_windows_of_later_epochs_are_shifted(command, trained):
    code, out, _ = command(batch.main, trained, "--step=1000")
    assert code == 0
    assert "of epoch 30, shifted by" in out  # 3,996 windows, 133 per epoch
    assert not out.startswith("step")


@pytest.mark.parametrize("mask", [False, True])
def test_padding_of_document_windows_is_not_shown(
    train_tiny, short_documents, tmp_path, command, mask
):
    options = {"windows": "document", "document_mask": mask, "context_length": 64, "max_steps": 1}
    train_tiny(tmp_path, **short_documents, **options)
    path = short_documents["source"]
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    code, out, _ = command(batch.main, tmp_path, "--step=1", "--chars=0")
    assert code == 0
    windows = [shown.partition("\n")[2].removesuffix("\n") for shown in out.split("--- ")[1:]]
    whole = f"(?:{'|'.join(map(re.escape, texts))})"
    assert all(re.fullmatch(whole + ("+" if mask else ""), window) for window in windows)
    assert (max(map(len, windows)) > max(map(len, texts))) == mask


def test_long_windows_are_shortened():
    spans = [("ab", False), ("cd", True), ("ef", False)]
    assert batch.shortened(spans, 3) == [("ab", False), ("c", True), (" ... (3 more)", False)]
    assert batch.shortened(spans, 4) == [*spans[:2], (" ... (2 more)", False)]
    assert batch.shortened(spans, 6) == batch.shortened(spans, 0) == spans


def test_missing_data_is_an_error_that_names_its_fingerprint(trained, tmp_path):
    config = read_history(trained).config
    found = find_checkpoint(trained, "latest")
    assert found.data_folder(config).is_dir()
    moved = replace(found, about={**found.about, "data_folder": str(tmp_path / "gone")})
    assert moved.data_folder(config).is_dir()  # found by its fingerprint
    elsewhere = replace(config, data=replace(config.data, prepared_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=found.about["data_fingerprint"][:12]):
        moved.data_folder(elsewhere)


@pytest.mark.parametrize("options", [[], ["--step=-1"], ["--step=1", "--chars=-1"]], ids=str)
def test_mistakes_are_refused_by_name(command, trained, options):
    code, _, err = command(batch.main, trained, *options)
    assert code == 2
    assert f"{(options or ['--step=0'])[-1].removeprefix('--')}: must be at least" in err
