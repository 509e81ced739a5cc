"""The report: figures worked out by hand, everything shown, and nothing that can stop a run."""

from __future__ import annotations

import html
import json
import math
import os
import re
import resource
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runlib import PASSAGE, write_run

from data.tokenizer import load_tokenizer
from model.gpt import GPT
from tools import attention
from tools.report import __main__ as report_tool
from tools.report.compare import comparison
from training.config import Config
from training.device import Precision
from training.logger import append_line, command_line
from training.metrics import STEP_MARK, parse_line, read_entries, read_lines, read_spread
from training.report.history import (
    MOST_SNAPSHOTS,
    READ,
    History,
    Thinned,
    read_history,
)
from training.report.page import fill_template, page_data, try_report, write_report
from training.snapshot import sample_text, scored_passage, token_text
from training.weights import find_weights


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("written") / "demo")
    return write_report(read_history(folder), folder / "report.html")


def data_of(path: Path) -> dict:
    """The data in a page."""
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="page-data">(.*?)</script>', text, flags=re.DOTALL)[1])


@pytest.fixture(scope="module")
def data(written) -> dict:
    return data_of(written)


@pytest.fixture
def parsed(monkeypatch) -> list[bytes]:
    """The lines of logs that were parsed."""
    lines: list[bytes] = []

    def parse(line: bytes) -> dict | None:
        lines.append(line)
        return parse_line(line)

    monkeypatch.setattr("training.metrics.parse_line", parse)
    return lines


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
        append_line(folder / "metrics.jsonl", line)
        history.update()
        last = (history.validation if "val_loss" in line else history.training).last
        seen.append((last["step"], last["tokens"] / per_step, last["seconds"]))
    # The attempt before had logged step 15, beyond the checkpoint: from step 10 it is 6 steps.
    assert seen == [(10, 10, 20), (10, 10, 20), (15, 15, 25), (10, 10, 20), (16, 16, 32)]


@pytest.fixture
def long_history(tmp_path, monkeypatch) -> History:
    """10,000 logged steps and 1,000 evaluations in at most 40 stretches, with a few spikes."""
    monkeypatch.setattr("training.report.history.MOST_STRETCHES", 40)
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
    kept = {entry["step"]: entry for entry in history.training.entries}
    assert {1234, 5678, 8888, 10_000} <= kept.keys()
    assert 20 <= len(history.training.stretches) <= 40
    assert len(kept) <= 40 * 2 * len(history.training.columns) + 1
    assert [*kept] == sorted(kept)
    assert (history.best["step"], history.best["val_loss"]) == (4320, 0.5)
    assert len(history.validation.entries) <= 40 * 4 + 1
    assert history.last_step == 10_000
    # Means are of all entries of a stretch, not of its extremes.
    means = [stretch.mean for stretch in history.training.stretches]
    assert means == pytest.approx([3.5] * len(means), abs=0.5)
    assert sum(stretch.count for stretch in history.training.stretches) == 10_000
    assert [mean for _, mean in history.training.curve() if mean is not None] == means
    # 9,999 tokens at 1,000 per second, and one at 1 per second
    assert history.training.last["seconds"] == pytest.approx(10.999)
    steps = [snapshot["step"] for snapshot in history.snapshots]
    assert (steps[0], steps[-1], len(steps)) == (10, 10_000, MOST_SNAPSHOTS)
    assert max(np.diff(steps)) <= 4 * min(np.diff(steps))


def test_resuming_from_an_earlier_step_drops_what_came_after(long_history, tmp_path):
    long_history.update()
    append_line(tmp_path / "metrics.jsonl", {"step": 5000, "attempt": 2, "start": {}})
    long_history.update()
    assert 4900 < long_history.last_step <= 5000
    append_line(tmp_path / "metrics.jsonl", {"step": 4000, "attempt": 2, "loss": 1.0})
    append_line(tmp_path / "metrics.jsonl", {"step": 4000, "attempt": 2, "val_loss": 2.0})
    append_line(tmp_path / "snapshots.jsonl", {"step": 4000, "attempt": 2, "sample": "new"})
    long_history.update()
    assert long_history.last_step == 4000
    *earlier, last = long_history.training.entries
    assert last["loss"] == 1.0
    assert max(entry["step"] for entry in earlier) < 4000
    assert long_history.best["step"] == 4000  # 0.5 at step 4,320 is no longer part of the run
    assert long_history.snapshots[-1]["sample"] == "new"
    assert all(snapshot["step"] < 4000 for snapshot in long_history.snapshots[:-1])
    assert 1234 in {entry["step"] for entry in earlier}


def test_the_first_and_the_newest_of_many_starts_are_listed(tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    with (folder / "metrics.jsonl").open("a") as file:
        for attempt in range(2, 1001):
            file.write(json.dumps({"step": attempt, "attempt": attempt, "start": {}}) + "\n")
    history = read_history(folder)
    assert [entry["attempt"] for entry in history.starts] == [1, *range(801, 1001)]
    assert ["", "", "799 more starts are not listed"] in page_data(history)["events"]


def test_a_short_history_can_be_cut_to_nothing():
    thinned_log = Thinned("loss")
    for step in (1, 2, 3):
        thinned_log.add({"step": step, "loss": 1.0})
    thinned_log.cut(0)
    assert (thinned_log.curve(), thinned_log.last) == ([], None)


def test_a_running_process_reads_each_line_of_its_log_once(
    train_tiny, tmp_path, monkeypatch, parsed
):
    monkeypatch.setattr("training.report.page.page_data", lambda histories: 1 / 0)
    monkeypatch.setattr("training.observer.SAMPLE_TOKENS", 2)
    options = {"report": True, "eval_interval": 1, "interval": 1, "checkpoint_interval": 100}
    assert train_tiny(tmp_path / "run", **options) == 0
    lines = [
        line
        for name in ("metrics.jsonl", "snapshots.jsonl")
        for line in (tmp_path / "run" / name).read_bytes().splitlines(keepends=True)
    ]
    assert sorted(parsed) == sorted(lines)


# A long log that is found on disk


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
def test_only_ordinary_steps_of_a_long_log_are_skipped(tmp_path, monkeypatch, parsed, block, most):
    folder = write_run(tmp_path / "run", steps=0, time_budget="1h")
    write_two_attempts(folder / "metrics.jsonl")
    # Nothing is thinned, so that what is read can be compared.
    monkeypatch.setattr("training.report.history.MOST_STRETCHES", 10**6)
    whole = read_history(folder)
    parsed.clear()
    for name, value in {"LONG_LOG": 1 << 16, "LOG_TAIL": 1 << 10, "LOG_BLOCK": block}.items():
        monkeypatch.setattr(f"training.metrics.{name}", value)
    monkeypatch.setitem(READ, "metrics.jsonl", (most, STEP_MARK))
    some = read_history(folder)
    assert (some.starts, some.notes, some.fits) == (whole.starts, whole.notes, whole.fits)
    assert (some.last_step, some.max_steps, some.best["step"]) == (4000, 9000, 1000)
    assert some.training.last == whole.training.last | {"seconds": pytest.approx(4000)}
    for one, other in zip(some.validation.entries, whole.validation.entries, strict=True):
        assert one == other | {"seconds": pytest.approx(other["seconds"])}
    all_steps = {(entry["step"], entry["attempt"]) for entry in whole.training.entries}
    steps = [(entry["step"], entry["attempt"]) for entry in some.training.entries]
    assert set(steps) <= all_steps and steps == sorted(steps)  # none that was redone
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


def test_a_short_log_is_read_in_full(tmp_path):
    write_two_attempts(path := tmp_path / "metrics.jsonl")
    with path.open("rb") as file, path.open("rb") as again:
        file.readline(), again.readline()  # both start from here
        assert [*read_spread(file, 1, STEP_MARK)] == [*read_entries(again)]
        assert file.tell() == path.stat().st_size


def test_reading_ends_if_the_log_is_truncated_meanwhile(tmp_path, monkeypatch):
    write_two_attempts(path := tmp_path / "metrics.jsonl")
    monkeypatch.setattr("training.metrics.LONG_LOG", 1 << 16)
    monkeypatch.setattr("training.metrics.LOG_BLOCK", 1 << 12)
    with path.open("rb") as file:
        entries = read_spread(file, 100, STEP_MARK)
        next(entries)
        os.truncate(path, 1 << 13)
        assert len([*entries]) < 200


def test_some_of_many_snapshots_are_read_and_none_that_were_redone(tmp_path, parsed):
    folder = write_run(tmp_path / "run", steps=0)
    append_line(folder / "metrics.jsonl", {"step": 600, "attempt": 2, "start": {}})
    with (folder / "snapshots.jsonl").open("w") as file:
        for attempt, first, last in [(1, 1, 900), (2, 800, 2000)]:
            for step in range(first, last + 1):
                entry = {"step": step, "attempt": attempt, "sample": "x" * 3000}
                file.write(json.dumps(entry) + "\n")
    kept = read_history(folder).snapshots
    assert len(parsed) < 400
    assert (kept[0]["step"], kept[-1]["step"]) == (1, 2000)
    assert {entry["attempt"] for entry in kept if entry["step"] > 600} == {2}


def test_one_slow_step_does_not_count_for_lines_that_were_not_read(tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    for step, time, speed in [(10, 100.0, 512.0), (1010, 1090.0, 0.1)]:
        entry = {"step": step, "time": time, "loss": 1.0, "tokens_per_second": speed}
        append_line(folder / "metrics.jsonl", entry)
    assert read_history(folder).training.last["seconds"] == pytest.approx(10 + 990, abs=1)


def test_a_run_in_the_working_directory_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "mine", steps=0))
    assert read_history(Path(".")).name == "mine"


def test_the_headline_numbers_of_a_run(data):
    loss = 5.5 * math.exp(-200 / 80) + 1
    assert data["headlines"] == {
        "best validation loss": f"{loss + 0.1:.4f}",
        "best bits per byte": f"{loss / 2:.4f}",
        "best at step": "200",
        "last training loss": f"{loss:.4f}",
        "tokens per second": "1.02k",
        "MFU": "42%",
        "training time": "1:40",  # 200 steps of half a second
        "tokens seen": "102k",
    }


def test_the_curves_of_a_run(data):
    (run,) = data["runs"]
    training, validation = run["training"], run["validation"]
    assert (training["step"], validation["step"]) == ([*range(2, 201, 2)], [50, 100, 150, 200])
    for column, last in {"tokens": 0.1024, "minutes": 100 / 60, "lr": 1e-3, "mfu": 0.42}.items():
        assert training[column][-1] == pytest.approx(last, rel=1e-5)
    assert training["loss"][0] == pytest.approx(5.5 * math.exp(-2 / 80) + 1, rel=1e-5)
    assert len(training["mean"]) == len(training["grad_norm"]) == 100
    assert validation["perplexity"][-1] == pytest.approx(
        math.exp(validation["val_loss"][-1]), rel=1e-4
    )
    resumed, warning = run["marks"]
    assert resumed == {
        "kind": "resumed", "text": "resumed", "step": 100, "tokens": 0.0512, "minutes": 0.833333
    }  # fmt: skip
    assert (warning["kind"], warning["text"]) == ("warning", "it <i>repeats</i>")


# What is shown


def test_one_small_file_that_needs_nothing_else(written):
    text = written.read_text(encoding="utf-8")
    assert len(text) < 75_000
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|@[A-Z]+@""", text)
    assert list(written.parent.glob(".tmp-*")) == []


def test_the_page_of_a_long_run_is_small(tmp_path):
    """10,000 logged steps of noise, and as many snapshots as are kept, of 160 tokens each."""
    folder = write_run(tmp_path / "run", steps=0)
    rng = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(1, 10_001):
            loss, lr, norm, speed, mfu = rng.random(5)
            figures = {"loss": loss, "lr": lr, "grad_norm": norm, "mfu": mfu}
            file.write(json.dumps({"step": step, **figures, "tokens_per_second": speed}) + "\n")
    passage = [["token", 1.234, [["guess", 0.1234]] * 5]] * 160
    for step in range(MOST_SNAPSHOTS):
        entry = {"step": step, "attempt": 1, "prompt": "", "sample": "x" * 500, "passage": passage}
        append_line(folder / "snapshots.jsonl", entry)
    page = write_report(read_history(folder), folder / "report.html")
    assert len(data_of(page)["passage"]["snapshots"]) == MOST_SNAPSHOTS
    assert page.stat().st_size < 375_000


def test_what_was_written_by_a_model_or_a_user_is_text(written, data, tmp_path):
    assert data["samples"][0]["text"] == "def <200>&"
    assert data["passage"]["snapshots"][0]["tokens"] == PASSAGE
    page = written.read_text(encoding="utf-8")
    assert "<200>" not in page and "<i>repeats" not in page
    hostile = "</script><!--<script>\u2028@TITLE@ \ud800"
    (template := tmp_path / "t.html").write_text("<title>@TITLE@</title><script>@DATA@</script>")
    title, text = re.fullmatch(
        "<title>(.*)</title><script>([^<]*)</script>", fill_template(template, hostile, hostile)
    ).groups()
    assert html.unescape(title) == json.loads(text) == hostile
    assert "<" not in title


def test_a_sample_that_is_not_unicode_is_shown_with_replacements(tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    entry = {"step": 1, "prompt": "", "sample": "a\ud800"}
    (folder / "snapshots.jsonl").write_text(json.dumps(entry) + "\n")
    page = write_report(read_history(folder), folder / "report.html")
    assert data_of(page)["samples"][0]["text"] == "a?"


def test_samples_come_newest_first(data):
    loss = 5.5 * math.exp(-200 / 80) + 1.1
    steps = [sample["name"].partition(",")[0] for sample in data["samples"]]
    assert steps == ["step 200", "step 150", "step 100", "step 50"]
    assert data["samples"][0]["name"] == f"step 200, loss {loss:.3f}"
    assert data["samples"][0]["prompt"] == "def "


def test_resumes_and_warnings_are_listed(data):
    rows = [(step, event) for step, _, event in data["events"]]
    assert rows == [("0", "started"), ("60", "it <i>repeats</i>"), ("100", "resumed")]


def test_options_that_are_not_the_default_are_highlighted(data):
    options = {option["name"]: option for section in data["config"].values() for option in section}
    assert len(options) > 50 and all(option["help"] for option in options.values())
    shown = {name: (option["value"], option["changed"]) for name, option in options.items()}
    assert shown["lr"] == ("0.003", True)
    assert shown["max_steps"] == ("200", True)
    assert shown["weight_decay"] == ("0.1", False)
    assert shown["d_head"] == ("32", False)  # derived
    assert shown["rope_theta"] == ("10000", False)


def test_commands_data_and_environment(data, written):
    commands = dict(data["commands"])
    assert commands["resume"] == "python train.py config/small.py --lr=0.003"
    assert commands["sample"] == f"python sample.py {written.parent} --prompt 'def '"
    assert ["tokens to train", "123,456"] in data["data"]
    assert ["torch", "2.13.0"] in data["environment"]


def test_the_command_to_resume_does_not_start_over():
    argv = ["config/small.py", "--overwrite=true", "--run.overwrite=true", "--prompt=a b"]
    assert command_line(argv, 1) == "python train.py config/small.py '--prompt=a b'"
    assert command_line([], 2) == "torchrun --nproc_per_node=2 train.py"


def test_two_runs_are_overlaid(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=100, seed=7)
    data = comparison([read_history(a), read_history(b)])
    assert data["title"] == "a + b"
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert ["run.seed", "1", "7"] in data["differences"]
    assert [row["name"] for row in data["table"]["rows"]] == ["a", "b"]
    assert [sample["name"] for sample in data["samples"]] == ["a", "b"]
    assert not data.keys() & {"headlines", "passage", "config", "commands"}


# Runs that have little to show


def test_a_run_that_has_only_started(tmp_path):
    data = page_data(read_history(write_run(tmp_path / "new", steps=0)))
    assert data["status"].startswith("failed, step 0 of 200 (0%), ")
    assert data["headlines"]["best validation loss"] == "-"


def test_losses_that_are_not_finite(tmp_path):
    folder = write_run(tmp_path / "nan")
    lines = (folder / "metrics.jsonl").read_text()
    lines = lines.replace('"val_loss": ', '"val_loss": null, "x": ')
    lines = re.sub(r'"loss": [\d.]+', '"loss": null', lines, count=5)
    (folder / "metrics.jsonl").write_text(lines + '{"step": 3, "torn')
    data = page_data(read_history(folder))
    assert data["headlines"]["best validation loss"] == "-"
    losses = data["runs"][0]["training"]["loss"]
    assert losses[:5] == [None] * 5 and None not in losses[5:]  # a gap in the curve


def test_a_run_with_a_time_budget_has_the_length_of_its_last_fit(tmp_path):
    folder = write_run(tmp_path / "budget", time_budget="10m")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "attempt": 1, "fit": 900}\n{"step": 9, "attempt": 1, "fit": 300}\n')
    assert read_history(folder).max_steps == 300
    append_line(folder / "metrics.jsonl", {"step": 7, "attempt": 2, "start": {}})
    assert read_history(folder).max_steps == 900  # the second one was beyond the checkpoint
    assert read_history(folder).last_step == 6
    recipe = (folder / "run.json").read_text().replace('"10m"', '""')
    (folder / "run.json").write_text(recipe)  # as after --time_budget= --max_steps=200
    assert read_history(folder).max_steps == 200


# Nothing stops a run


def test_a_failed_report_prints_one_line(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "report.html").mkdir()
    said = []
    try_report(read_history(folder), said.append)
    assert len(said) == 1 and "\n" not in said[0]
    assert list(folder.glob(".tmp-*")) == []


def test_training_writes_snapshots_and_the_report(train_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("training.observer.SAMPLE_TOKENS", 5)
    folder = tmp_path / "run"
    assert train_tiny(folder, report=True, sample_prompt="def ") == 0
    assert [entry["step"] for entry in read_lines(folder / "snapshots.jsonl")] == [4, 8]
    data = data_of(folder / "report.html")
    assert data["status"].startswith("finished, step 8 of 8, last entry 20")
    assert "--sample_prompt=def " in dict(data["commands"])["resume"]
    history = read_history(folder)
    assert history.starts[0]["start"]["environment"]["ranks"] == 1
    assert history.starts[0]["start"]["data"]["bytes per token"] == 1.0


def test_the_report_does_not_change_training(train_tiny, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("training.observer.SAMPLE_TOKENS", 5)
    monkeypatch.setattr("training.observer.try_report", lambda history, say: None)
    assert train_tiny(tmp_path / "run", report=True, dropout=0.0) == 0
    model = "checkpoints/step-8/model.safetensors"
    assert (tmp_path / "run" / model).read_bytes() == (trained / model).read_bytes()


def test_a_run_continues_if_its_report_fails(train_tiny, tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr("training.observer.append_line", fail)
    monkeypatch.setattr("training.report.page.page_data", fail)
    assert train_tiny(tmp_path / "run", report=True) == 0
    out = capsys.readouterr().out
    assert "note: no snapshot this time (RuntimeError: no memory)" in out
    assert "note: report.html was not updated (RuntimeError: no memory)" in out


# Snapshots


@pytest.fixture(scope="module")
def sampled(trained_once):
    return find_weights(trained_once, "latest").load(torch.device("cpu"))


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


def test_a_token_that_is_not_text_is_shown_as_bytes(trained_once):
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


def test_a_torn_snapshot_is_skipped(tmp_path):
    path = tmp_path / "snapshots.jsonl"
    append_line(path, {"step": 1, "sample": "a"})
    with path.open("a") as file:
        file.write('{"step": 2, "samp')
    append_line(path, {"step": 3, "sample": "\ud800"})  # half of a pair: no UTF-8 has it
    assert [entry["step"] for entry in read_lines(path)] == [1, 3]


# The command


def test_the_report_is_written_into_the_run_or_to_out(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    code, out, err = command(report_tool.main, "a")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"a/report.html: \d+ kB, open it in a browser\n", out)
    assert command(report_tool.main, "a", "b")[0] == 0
    assert (tmp_path / "report.html").exists()
    assert command(report_tool.main, "a", "b", "--out=c.html")[0] == 0
    assert (tmp_path / "c.html").exists()


def test_only_a_page_that_we_wrote_is_replaced(command, tmp_path, trained):
    path = tmp_path / "mine.html"
    path.write_text("<!doctype html>mine")
    code, out, err = command(report_tool.main, trained, f"--out={path}")
    assert (code, out) == (2, "")
    assert err == (
        f"error: out={path}: already exists and was not written by plainGPT; choose another file\n"
    )
    assert path.read_text() == "<!doctype html>mine"
    path.unlink()
    for _ in range(2):
        assert command(report_tool.main, trained, f"--out={path}")[0] == 0
    assert not list(tmp_path.glob(".tmp-*"))
    recipe = (trained / "run.json").read_bytes()
    for other in (trained / "run.json", "/dev/null", tmp_path, tmp_path / "not/there.html"):
        code, _, err = command(report_tool.main, trained, f"--out={other}")
        assert code == 2 and f"out={other}: " in err
    assert (trained / "run.json").read_bytes() == recipe


@pytest.mark.parametrize("tool", [report_tool, attention], ids=["report", "attention"])
def test_a_page_that_cannot_be_written_is_named_and_the_old_one_stays(
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
    code, _, err = command(report_tool.main, tmp_path)
    assert code == 2
    assert f"{tmp_path} is not the folder of a run" in err


def test_the_report_needs_neither_torch_nor_a_plotting_package():
    code = "import sys, training.report.page; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(ended.stdout.split()) & {"torch", "bokeh", "matplotlib", "plotly"}
