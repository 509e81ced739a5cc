"""The report: figures worked out by hand, everything shown, and nothing that can stop a run."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runlib import PASSAGE, write_run

import training.folder
from cli.options import ConfigError
from data.tokenizer import load_tokenizer
from model.gpt import GPT
from tools import attention
from tools import report as report_tool
from training import page
from training.config import Config, from_json
from training.device import Precision
from training.folder import STEP_MARK, read_entries, read_lines, read_spread
from training.history import (
    BATCH,
    READ,
    History,
    Thinned,
    read_history,
    smoothed,
    thinned,
)
from training.observer import append_snapshot, command_line, sample_text, scored_passage, token_text
from training.report import try_report, write_report
from training.weights import load_for_sampling


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("written") / "demo")
    return write_report([read_history(folder)], folder / "report.html")


@pytest.fixture(scope="module")
def text(written) -> str:
    return written.read_text(encoding="utf-8")


def without_scripts(text: str) -> str:
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


# Figures


@pytest.mark.parametrize("counted", [True, False])
def test_tokens_and_seconds_by_hand(tmp_path, counted):
    """Short documents fill a tenth of each window: what is trained on counts, not the padding."""
    per_step = 51 if counted else 512  # 8 windows of 64
    # 10 steps in 20 s, and 5 more in 5 s; then a resume from step 12 at half the speed.
    lines = [
        {"step": 10, "loss": 3.0, "tokens": 10 * per_step, "tokens_per_second": per_step / 2},
        {"step": 10, "val_loss": 1.0},
        {"step": 15, "loss": 3.0, "tokens": 15 * per_step, "tokens_per_second": per_step},
        {"step": 12, "start": {}, "attempt": 2},
        {"step": 16, "loss": 2.0, "tokens": 16 * per_step, "tokens_per_second": per_step / 2},
    ]
    if not counted:  # a log from before tokens were counted
        lines = [{k: v for k, v in line.items() if k != "tokens"} for line in lines]
    folder = write_run(tmp_path / "run", steps=0)
    history, seen = read_history(folder), []
    for line in lines:
        append_snapshot(folder / "metrics.jsonl", line)
        history.update()
        last = (history.evaluations if "val_loss" in line else history.steps)[-1]
        seen.append((last["step"], last["tokens"] / per_step, last["seconds"]))
    # The attempt before had logged step 15, beyond the checkpoint: from step 10 it is 6 steps.
    assert seen == [(10, 10, 20), (10, 10, 20), (15, 15, 25), (10, 10, 20), (16, 16, 32)]


def test_smoothing_by_hand():
    # half_life 1: a value counts half one step later. 4; (4/2 + 1) / (1/2 + 1) ...
    assert smoothed([4.0, 1.0, 1.0], 1.0) == pytest.approx([4.0, 2.0, 10 / 7])
    assert smoothed([4.0, None, 1.0], 1.0) == pytest.approx([4.0, None, 2.0])


def test_thinning_keeps_spikes_and_ends():
    values = [1.0] * 10_000
    values[777], values[5555] = 9.0, -9.0
    kept = thinned(values, 100)
    assert {0, 777, 5555, 9999} <= set(kept)
    assert len(kept) <= 110
    assert thinned([1.0, 2.0], 100) == [0, 1]
    assert thinned([None] * 1000, 100) == [0, 999]


def test_a_later_attempt_replaces_an_earlier_one(tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    for step, text in [(1, "a"), (2, "b"), (2, "c")]:
        append_snapshot(folder / "snapshots.jsonl", {"step": step, "sample": text})
    assert [entry["sample"] for entry in read_history(folder).snapshots] == ["a", "c"]


@pytest.fixture
def long_history(tmp_path, monkeypatch) -> History:
    """10,000 logged steps and 1,000 evaluations in at most 40 stretches, with a few spikes."""
    monkeypatch.setattr("training.history.MOST_STRETCHES", 40)
    history = History(tmp_path, Config())
    rng = np.random.default_rng(1)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, noise in enumerate(rng.random(10_000), start=1):
            figures = {"loss": 3 + noise, "grad_norm": 1 + noise, "lr": 1e-3, "mfu": 0.4}
            figures |= {"tokens_per_second": 1000.0, "tokens": step}
            figures |= {1234: {"loss": 99.0}, 5678: {"grad_norm": 77.0}}.get(step, {})
            figures |= {7777: {"loss": None}, 8888: {"tokens_per_second": 1.0}}.get(step, {})
            file.write(json.dumps({"step": step, **figures}) + "\n")
            if step % 10 == 0:
                loss = 0.5 if step == 4320 else 3 + noise
                file.write(json.dumps({"step": step, "val_loss": loss}) + "\n")
    with (tmp_path / "snapshots.jsonl").open("w") as file:
        file.writelines(f'{{"step": {step}, "sample": "x"}}\n' for step in range(10, 10_001, 10))
    return history


def test_a_long_log_is_thinned_as_it_is_read_and_keeps_its_spikes(long_history):
    history = long_history
    history.update()
    kept = {entry["step"]: entry for entry in history.steps}
    assert {1234, 5678, 8888, 10_000} <= kept.keys()
    assert 20 <= len(history.training.stretches) <= 40
    assert len(kept) <= 40 * 2 * len(history.training.columns) + 1
    assert len(history.training.fresh) < BATCH
    assert [*kept] == sorted(kept)
    assert (history.best["step"], history.best["val_loss"]) == (4320, 0.5)
    assert len(history.evaluations) <= 40 * 4 + 1
    assert history.last_step == 10_000
    # Means are of all entries of a stretch, not of its extremes.
    means = [stretch.mean for stretch in history.training.stretches]
    assert means[-2] == pytest.approx(3.5, abs=0.1)
    assert sum(stretch.count for stretch in history.training.stretches) == 10_000
    # 9,999 tokens at 1,000 per second, and one at 1 per second
    assert history.steps[-1]["seconds"] == pytest.approx(10.999)
    steps = [snapshot["step"] for snapshot in history.snapshots]
    assert (steps[0], steps[-1]) == (10, 10_000)
    assert 12 <= len(steps) <= 24
    assert max(np.diff(steps)) <= 4 * min(np.diff(steps))


def test_an_attempt_that_goes_back_drops_what_was_beyond(long_history, tmp_path):
    long_history.update()
    append_snapshot(tmp_path / "metrics.jsonl", {"step": 5000, "attempt": 2, "start": {}})
    long_history.update()
    assert 4900 < long_history.last_step <= 5000
    append_snapshot(tmp_path / "metrics.jsonl", {"step": 4000, "attempt": 2, "loss": 1.0})
    append_snapshot(tmp_path / "metrics.jsonl", {"step": 4000, "attempt": 2, "val_loss": 2.0})
    append_snapshot(tmp_path / "snapshots.jsonl", {"step": 4000, "attempt": 2, "sample": "new"})
    long_history.update()
    assert long_history.last_step == 4000
    assert long_history.steps[-1]["loss"] == 1.0
    assert max(entry["step"] for entry in long_history.steps[:-1]) < 4000
    assert long_history.best["step"] == 4000  # 0.5 at step 4,320 is no longer part of the run
    assert long_history.snapshots[-1]["sample"] == "new"
    assert 1234 in {entry["step"] for entry in long_history.steps}


def test_of_many_starts_the_first_and_the_newest_are_listed_and_the_others_counted(tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    with (folder / "metrics.jsonl").open("a") as file:
        for attempt in range(2, 1001):
            file.write(json.dumps({"step": attempt, "attempt": attempt, "start": {}}) + "\n")
    history = read_history(folder)
    assert [entry["attempt"] for entry in history.starts] == [1, *range(801, 1001)]
    assert "799 more starts are not listed" in page.events([history])


def test_a_history_of_one_stretch_can_be_cut_to_nothing():
    thinned_log = Thinned("loss")
    for step in (1, 2, 3):
        thinned_log.add({"step": step, "loss": 1.0})
    thinned_log.cut(0)
    assert (thinned_log.rows(), thinned_log.last) == (([], []), None)


def test_a_running_process_reads_each_line_of_its_log_once(train_tiny, tmp_path, monkeypatch):
    read = []
    parse = training.folder.parse_line
    monkeypatch.setattr("training.folder.parse_line", lambda line: read.append(line) or parse(line))
    monkeypatch.setattr("training.report.draw", lambda histories: 1 / 0)
    monkeypatch.setattr("training.observer.SAMPLE_TOKENS", 2)
    options = {"report": True, "eval_interval": 1, "interval": 1, "checkpoint_interval": 100}
    assert train_tiny(tmp_path / "run", **options) == 0
    lines = [
        line
        for name in ("metrics.jsonl", "snapshots.jsonl")
        for line in (tmp_path / "run" / name).read_bytes().splitlines(keepends=True)
    ]
    assert sorted(read) == sorted(lines)


# A long log that is found on disk


@pytest.fixture
def parsed(monkeypatch) -> list[bytes]:
    """The lines that were parsed."""
    lines: list[bytes] = []
    parse = training.folder.parse_line
    monkeypatch.setattr("training.folder.parse_line", lambda x: lines.append(x) or parse(x))
    return lines


def write_two_attempts(path: Path) -> None:
    """3,000 logged steps, and again from step 2,000 to 4,000; evaluations, events and damage."""
    lines: list[bytes] = []

    def add(step: int, attempt: int, **figures) -> None:
        lines.append(json.dumps({"step": step, "attempt": attempt, **figures}).encode())

    for attempt, first, last in [(1, 1, 3000), (2, 2001, 4000)]:
        add(first - 1, attempt, start={"command": 'python train.py --prompt="loss":'})
        for step in range(first, last + 1):
            add(step, attempt, loss=3.0, tokens=7 * step, tokens_per_second=7.0)
            if step % 40 == 0:
                loss = {1000: 1.0, 2480: 0.5}.get(step if attempt == 1 else 0, 2.0)
                add(step, attempt, val_loss=loss)
            if step % 500 == 0:
                add(step, attempt, note='"loss": and "val_loss":')
                add(step, attempt, fit=5000 + step)
            if step % 700 == 0:
                lines.extend([b"\0" * 9000, b'{"step": 7, "val_loss": 0.1, "torn', b"", b"\xff"])
    path.write_bytes(b"\n".join(lines) + b"\n")


@pytest.mark.parametrize("block, most", [(500, 2000), (500, 100), (1 << 20, 100)])
def test_of_a_long_log_all_but_ordinary_steps_is_read(tmp_path, monkeypatch, parsed, block, most):
    folder = write_run(tmp_path / "run", steps=0, time_budget="1h")
    write_two_attempts(folder / "metrics.jsonl")
    monkeypatch.setattr("training.history.MOST_STRETCHES", 10**6)  # what is read can be compared
    whole = read_history(folder)
    parsed.clear()
    for name, value in {"LONG_LOG": 1 << 16, "LOG_TAIL": 1 << 10, "LOG_BLOCK": block}.items():
        monkeypatch.setattr(f"training.folder.{name}", value)
    monkeypatch.setitem(READ, "metrics.jsonl", (most, STEP_MARK))
    some = read_history(folder)
    assert (some.starts, some.notes, some.fits) == (whole.starts, whole.notes, whole.fits)
    assert (some.last_step, some.max_steps, some.best["step"]) == (4000, 9000, 1000)
    assert some.steps[-1] == whole.steps[-1] | {"seconds": pytest.approx(4000)}
    for one, other in zip(some.evaluations, whole.evaluations, strict=True):
        assert one == other | {"seconds": pytest.approx(other["seconds"])}
    all_steps = {(entry["step"], entry["attempt"]) for entry in whole.steps}
    steps = [(entry["step"], entry["attempt"]) for entry in some.steps]
    assert set(steps) <= all_steps and steps == sorted(steps)  # none that an attempt went back on
    assert max(np.diff([step for step, _ in steps])) <= 100  # evenly spread
    ordinary = [line for line in parsed if STEP_MARK in line]
    assert len(ordinary) < 2 * most + 600


def test_the_cost_of_a_long_log_is_bounded(tmp_path, parsed):
    line = json.dumps({"step": 1, "attempt": 1, "loss": 3.0, "x": "x" * 200}).encode() + b"\n"
    path = tmp_path / "metrics.jsonl"
    for damage in (b"", b"\0" * 5_000_000):  # a line of any length
        path.write_bytes(line * 40_000 + damage + line * 40_000)
        parsed.clear()
        tracemalloc.start()
        with path.open("rb") as file:
            n_read = sum(1 for _ in read_spread(file, *READ["metrics.jsonl"]))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert 7000 < n_read <= len(parsed) < 9000
        assert peak < 10e6 + 6 * len(damage)


def test_of_a_short_log_every_line_is_read(tmp_path):
    write_two_attempts(path := tmp_path / "metrics.jsonl")
    with path.open("rb") as file, path.open("rb") as again:
        file.readline(), again.readline()  # both go on from where they are
        assert [*read_spread(file, 1, STEP_MARK)] == [*read_entries(again)]
        assert file.tell() == path.stat().st_size


def test_a_long_log_that_is_cut_short_while_it_is_read_has_an_end(tmp_path, monkeypatch):
    write_two_attempts(path := tmp_path / "metrics.jsonl")
    monkeypatch.setattr("training.folder.LONG_LOG", 1 << 16)
    monkeypatch.setattr("training.folder.LOG_BLOCK", 1 << 12)
    with path.open("rb") as file:
        entries = read_spread(file, 100, STEP_MARK)
        next(entries)
        os.truncate(path, 1 << 13)
        assert len([*entries]) < 200


def test_of_many_snapshots_some_are_read_and_none_of_a_part_that_was_done_again(tmp_path, parsed):
    folder = write_run(tmp_path / "run", steps=0)
    append_snapshot(folder / "metrics.jsonl", {"step": 600, "attempt": 2, "start": {}})
    with (folder / "snapshots.jsonl").open("w") as file:
        for attempt, first, last in [(1, 1, 900), (2, 800, 2000)]:
            for step in range(first, last + 1):
                entry = {"step": step, "attempt": attempt, "sample": "x" * 3000}
                file.write(json.dumps(entry) + "\n")
    kept = read_history(folder).snapshots
    assert len(parsed) < 400
    assert (kept[0]["step"], kept[-1]["step"]) == (1, 2000)
    assert {entry["attempt"] for entry in kept if entry["step"] > 600} == {2}


def test_a_line_that_stood_still_does_not_count_for_lines_that_were_not_read(tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    for step, time, speed in [(10, 100.0, 512.0), (1010, 1090.0, 0.1)]:
        entry = {"step": step, "time": time, "loss": 1.0, "tokens_per_second": speed}
        append_snapshot(folder / "metrics.jsonl", entry)
    assert read_history(folder).steps[-1]["seconds"] == pytest.approx(10 + 990, abs=1)


def test_a_run_in_the_working_directory_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "mine", steps=0))
    assert read_history(Path(".")).name == "mine"


def test_the_tiles_of_a_run(text):
    tiles = dict(re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', text))
    loss = 5.5 * math.exp(-200 / 80) + 1
    assert tiles[f"{loss + 0.1:.4f}"] == "best validation loss, step 200"
    assert tiles[f"{loss / 2:.4f}"] == "bits per byte, at that step"
    assert tiles[f"{loss:.4f}"] == "training loss, last step"
    assert tiles["1.02k"] == "tokens per second"
    assert tiles["42%"] == "MFU"
    assert tiles["1:40"] == "trained"  # 200 steps of half a second
    assert tiles["102k"] == "tokens seen"
    assert tiles["200"] == "of 200 steps"


# What is shown


def test_one_file_that_needs_nothing_else(written, text):
    assert written.stat().st_size < 3_000_000
    assert not re.search(r'(src|href)\s*=\s*["\']?(https?:)?//', without_scripts(text))
    assert "@import" not in text
    assert list(written.parent.glob(".tmp-*")) == []


def test_what_was_written_by_a_model_or_a_user_is_text(text):
    shown = without_scripts(text)
    assert "<mark>def </mark>&lt;200&gt;&amp;" in shown
    assert "it &lt;i&gt;repeats&lt;/i&gt;" in shown
    data = re.search(r'id="passage-data">(.*?)</script>', text, flags=re.DOTALL)[1]
    assert "<" not in data
    assert json.loads(data)["snapshots"][0]["tokens"] == PASSAGE


def test_samples_come_newest_first(text):
    steps = re.findall(r'<div class="card"><b>step (\d+)', text)
    assert steps == ["200", "150", "100", "50"]


def test_restarts_and_warnings_are_listed(text):
    rows = re.findall(r"<tr><td>(\d+)</td><td>.*?</td><td>(.*?)</td></tr>", text)
    assert ("0", "began") in rows
    assert ("100", "taken up again") in rows
    assert ("60", "it &lt;i&gt;repeats&lt;/i&gt;") in rows


def test_options_that_are_not_the_default_are_marked(text):
    rows = re.findall(r'<tr class="(\w+)" title=".*?"><td>(\w+)</td><td>(.*?)</td>', text)
    marks = {name: (mark, value) for mark, name, value in rows}
    assert marks["lr"] == ("changed", "0.003")
    assert marks["weight_decay"] == ("same", "0.1")
    assert marks["d_head"] == ("same", "32")  # derived
    assert marks["rope_theta"] == ("same", "10000")
    assert marks["max_steps"] == ("changed", "200")


def test_commands_data_and_environment(text, written):
    for expected in (
        "python train.py config/small.py --lr=0.003",
        f"python sample.py {written.parent} --prompt &#x27;def &#x27;",
        "<td>fingerprint</td><td>abc123</td>",
        "<td>tokens to train</td><td>123,456</td>",
        "<td>torch</td><td>2.13.0</td>",
    ):
        assert expected in text


def test_the_command_to_go_on_does_not_start_anew():
    argv = ["config/small.py", "--overwrite=true", "--run.overwrite=true", "--prompt=a b"]
    assert command_line(argv, 1) == "python train.py config/small.py '--prompt=a b'"
    assert command_line([], 2) == "torchrun --nproc_per_node=2 train.py"


def test_two_runs_are_overlaid(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=100, seed=7)
    text = write_report([read_history(a), read_history(b)], tmp_path / "both.html").read_text(
        encoding="utf-8"
    )
    assert "<title>a + b</title>" in text
    assert "<tr><td>run.seed</td><td>1</td><td>7</td></tr>" in text
    assert "200 of 200" in text
    assert "100 of 200" in text
    assert "passage-data" not in without_scripts(text)


# Runs that have little to show


def test_a_run_that_has_only_begun(tmp_path):
    folder = write_run(tmp_path / "new", steps=0)
    text = write_report([read_history(folder)], folder / "report.html").read_text(encoding="utf-8")
    assert "step 0 of 200, 0%" in text


def test_losses_that_are_no_numbers(tmp_path):
    folder = write_run(tmp_path / "nan")
    lines = (folder / "metrics.jsonl").read_text()
    lines = lines.replace('"val_loss": ', '"val_loss": null, "x": ')
    lines = re.sub(r'"loss": [\d.]+', '"loss": null', lines, count=5)
    (folder / "metrics.jsonl").write_text(lines + '{"step": 3, "torn')
    text = write_report([read_history(folder)], folder / "report.html").read_text(encoding="utf-8")
    assert "<b>-</b><span>validation loss" in text


def test_a_run_with_a_time_budget_has_the_length_of_its_last_fit(tmp_path):
    folder = write_run(tmp_path / "budget", time_budget="10m")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "attempt": 1, "fit": 900}\n{"step": 9, "attempt": 1, "fit": 300}\n')
    assert read_history(folder).max_steps == 300
    assert read_history(folder).last_step == 200
    recipe = (folder / "run.json").read_text().replace('"10m"', '""')
    (folder / "run.json").write_text(recipe)  # as after --time_budget= --max_steps=200
    assert read_history(folder).max_steps == 200


def test_many_snapshots_are_thinned_to_the_ends_and_between():
    entries = [{"step": step} for step in range(100)]
    shown = [entry["step"] for entry in page.spread(entries)]
    assert (shown[0], shown[-1], len(shown)) == (0, 99, page.MOST_SNAPSHOTS)
    assert page.spread(entries[:3]) == entries[:3]


# Nothing stops a run


def test_a_missing_library_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    said = []
    assert try_report(read_history(write_run(tmp_path / "run")), said.append) is False
    (line,) = said
    assert "pip install bokeh" in line
    assert not (tmp_path / "run" / "report.html").exists()


def test_whatever_goes_wrong_is_one_line(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "report.html").mkdir()
    said = []
    assert try_report(read_history(folder), said.append) is True  # the next may succeed
    assert len(said) == 1
    assert "\n" not in said[0]
    assert list(folder.glob(".tmp-*")) == []


def test_training_writes_snapshots_and_the_report(train_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("training.observer.SAMPLE_TOKENS", 5)
    folder = tmp_path / "run"
    assert train_tiny(folder, report=True, sample_prompt="def ") == 0
    assert [entry["step"] for entry in read_lines(folder / "snapshots.jsonl")] == [4, 8]
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "step 8 of 8, all steps done" in text
    assert "--sample_prompt=def " in text
    history = read_history(folder)
    assert history.starts[0]["start"]["environment"]["ranks"] == 1
    assert history.starts[0]["start"]["data"]["bytes per token"] == 1.0


def test_a_report_changes_nothing_of_training(train_tiny, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("training.observer.SAMPLE_TOKENS", 5)
    monkeypatch.setattr("training.observer.try_report", lambda folder, say: True)
    assert train_tiny(tmp_path / "run", report=True, dropout=0.0) == 0
    model = "checkpoints/step-8/model.safetensors"
    assert (tmp_path / "run" / model).read_bytes() == (trained / model).read_bytes()


def test_a_run_whose_report_fails_goes_on(train_tiny, tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr("training.observer.append_snapshot", fail)
    monkeypatch.setattr("training.report.draw", fail)
    assert train_tiny(tmp_path / "run", report=True) == 0
    out = capsys.readouterr().out
    assert "note: no snapshot this time (RuntimeError: no memory)" in out
    assert "note: no report.html this time (RuntimeError: no memory)" in out


# Snapshots


@pytest.fixture(scope="module")
def sampled(trained_once):
    return load_for_sampling(trained_once, "latest", torch.device("cpu"))


class Window:
    """One window for scored_passage."""

    def __init__(self, tokens: list[int], ignored: int = 0) -> None:
        self.tokens = np.array(tokens)
        self.targets = np.array([*tokens[1:], 0])
        self.targets[len(tokens) - ignored :] = -100

    def pair(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        assert i == 0
        return self.tokens, self.targets


FLOAT32 = Precision(torch.float32, "cpu")


def test_a_passage_is_scored_as_the_model_scores_it(sampled):
    model, tokenizer = sampled
    ids = tokenizer.encode("def f1(x):\n")
    found = scored_passage(model, tokenizer, Window(ids, ignored=1), FLOAT32)
    tokens = torch.tensor([ids[:-1]])
    losses = model(tokens, torch.tensor([ids[1:]]), reduction="none")[0]
    assert [text for text, _, _ in found] == list("ef f1(x):\n")
    assert [loss for _, loss, _ in found] == pytest.approx(losses.tolist(), abs=6e-4)
    chances = model(tokens)[0].softmax(-1)
    for row, (_, _, likeliest) in enumerate(found):
        values, ids_ = chances[row].topk(5)
        assert [p for _, p in likeliest] == pytest.approx(values.tolist(), abs=6e-5)
        assert [text for text, _ in likeliest] == [tokenizer.decode([i]) for i in ids_.tolist()]


def test_ids_of_a_padded_vocabulary_are_not_shown(sampled):
    model, tokenizer = sampled
    config = replace(model.config, vocab_size=tokenizer.vocab_size + 50)
    padded = GPT(config)
    padded.init_weights(0)
    with torch.no_grad():
        padded.head.weight[tokenizer.vocab_size :] = padded.head.weight[0] * 100
    found = scored_passage(padded, tokenizer, Window(tokenizer.encode("def f1")), FLOAT32)
    assert all(len(likeliest) == 5 for _, _, likeliest in found)  # an unknown id cannot be decoded


def test_snapshots_leave_the_model_and_the_generator_as_they_were(sampled):
    model, tokenizer = sampled
    model.train()
    before = torch.get_rng_state()
    scored_passage(model, tokenizer, Window(tokenizer.encode("def")), FLOAT32)
    first, second = (sample_text(model, tokenizer, "def ", seed=1, tokens=8) for _ in range(2))
    assert first == second
    assert first.startswith("def ")
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    model.eval()


def test_a_token_that_is_no_text_is_shown_by_its_bytes(trained_once):
    tokenizer = load_tokenizer(trained_once / "checkpoints/step-8/tokenizer")
    assert token_text(tokenizer, tokenizer.encode("d")[0]) == "d"

    class Half:
        eot = 7
        special = {"<end>": 7, "<pad>": 9}

        def decode_bytes(self, ids: list[int]) -> bytes:
            return b"\xc3" if ids == [1] else b"a"

    assert token_text(Half(), 1) == "<c3>"
    assert token_text(Half(), 7) == "<end of text>"
    assert token_text(Half(), 9) == "<pad>"


def test_a_torn_snapshot_costs_itself_alone(tmp_path):
    path = tmp_path / "snapshots.jsonl"
    append_snapshot(path, {"step": 1, "sample": "a"})
    with path.open("a") as file:
        file.write('{"step": 2, "samp')
    append_snapshot(path, {"step": 3, "sample": "\ud800"})  # half of a pair: no UTF-8 has it
    assert [entry["step"] for entry in read_lines(path)] == [1, 3]


# The command


def test_the_command_writes_beside_the_run_or_where_it_is_told(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    code, out, err = command(report_tool.main, "a")
    assert (code, err) == (0, "")
    assert "a/report.html: 1." in out
    assert command(report_tool.main, "a", "b")[0] == 0
    assert (tmp_path / "report.html").exists()
    assert command(report_tool.main, "a", "b", "--out=c.html")[0] == 0
    assert (tmp_path / "c.html").exists()


def test_a_page_is_written_over_a_page_of_ours_alone(command, tmp_path, trained):
    from tools.report import main

    path = tmp_path / "mine.html"
    path.write_text("<!doctype html>mine")
    code, out, err = command(main, trained, f"--out={path}")
    assert (code, out) == (2, "")
    assert err == f"error: out={path}: exists, and is no page of ours; name another file\n"
    assert path.read_text() == "<!doctype html>mine"
    path.unlink()
    for _ in range(2):
        assert command(main, trained, f"--out={path}")[0] == 0
    assert command(main, trained, f"--out={tmp_path}")[2].endswith("name a file in it\n")
    nowhere = tmp_path / "not/there.html"
    assert "there is no folder" in command(main, trained, f"--out={nowhere}")[2]
    assert not list(tmp_path.glob(".tmp-*"))
    recipe = (trained / "run.json").read_bytes()
    for other in (trained / "run.json", "/dev/null"):
        assert "is no page of ours" in command(main, trained, f"--out={other}")[2]
    assert (trained / "run.json").read_bytes() == recipe


@pytest.mark.parametrize("tool", [report_tool, attention], ids=["report", "attention"])
def test_a_page_that_cannot_be_written_is_told_by_name_and_the_old_one_stays(
    tool, command, tmp_path, trained
):
    page, before = tmp_path / "page.html", resource.getrlimit(resource.RLIMIT_FSIZE)
    argv = [trained, f"--out={page}", *["--prompt=def "] * (tool is attention)]
    assert command(tool.main, *argv)[0] == 0
    good = page.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        code, _, err = command(tool.main, *argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 5 and err.endswith(f"'{page}'\n")
    assert page.read_bytes() == good and not list(tmp_path.glob(".tmp-*"))


def test_a_folder_without_a_run_is_a_mistake(command, tmp_path):
    code, out, err = command(report_tool.main, tmp_path)
    assert code == 2
    assert "holds no run" in err
    with pytest.raises(ConfigError):
        read_history(tmp_path)


def test_a_missing_library_is_a_mistake_told_in_words(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    code, _, err = command(report_tool.main, write_run(tmp_path / "a"))
    assert code == 2
    assert "pip install bokeh" in err


def test_the_config_of_the_fixture_is_one(tmp_path):
    assert from_json((write_run(tmp_path / "a") / "run.json").read_text()).problems() == []
