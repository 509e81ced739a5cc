"""metrics.jsonl, and wandb as a stub that fails in every way it can."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path

import pytest

from training.console import Console
from training.logger import RunLogger
from training.metrics import read_metrics


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged(folder: Path, *steps: int, **values) -> None:
    """Log these steps in one process."""
    log = RunLogger(folder, Console())
    for step in steps:
        log.log(step, **values)
    log.close()


# metrics.jsonl


def test_a_line_holds_step_attempt_and_values_and_is_flushed(tmp_path):
    log = RunLogger(tmp_path, Console())
    log.log(1, loss=2.5, mfu=None)
    (entry,) = lines(tmp_path)
    log.close()
    assert entry.pop("time") > 1.7e9
    assert entry == {"step": 1, "attempt": 1, "loss": 2.5}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_becomes_null(tmp_path, value):
    logged(tmp_path, 1, loss=value)
    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text()


def test_attempts_are_appended_and_counted_even_after_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged(tmp_path, 1, 2, 3, loss=1.0)
    with path.open("a") as file:
        file.write('{"step": 4, "attempt": 1, "lo')
    before = path.read_bytes()
    logged(tmp_path, 2, 3, loss=0.5)
    logged(tmp_path, 3, loss=0.25)
    assert path.read_bytes().startswith(before + b"\n")
    assert len(path.read_text().splitlines()) == 7
    kept = [(e["step"], e["attempt"], e["loss"]) for e in read_metrics(path)]
    assert kept == [(1, 1, 1.0), (2, 2, 0.5), (3, 3, 0.25)]


# wandb


@pytest.fixture
def stub(monkeypatch):
    """stub(*broken): put a wandb in place whose methods of these names raise."""

    def make(*broken: str) -> types.ModuleType:
        module = types.ModuleType("wandb")
        module.asked, module.logged, module.finished = [], [], []

        def method(name: str, do):
            def call(*args, **options):
                if name in broken:
                    raise ConnectionError("no api key\nmore about it")
                return do(*args, **options)

            return call

        run = types.SimpleNamespace(
            log=method("log", lambda values, step: module.logged.append((step, values))),
            finish=method("finish", lambda: module.finished.append(True)),
        )

        def init(**options):
            module.asked.append(options)
            run.id = options["id"] or "fresh-id"
            return method("init", lambda: run)()

        module.init = init
        module.Table = lambda columns, data: (columns, list(data))
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    return make


def with_wandb(folder: Path, run_id: str | None = None) -> str | None:
    log = RunLogger(folder, Console())
    found = log.start_wandb("project", {"run": {"seed": 1}}, run_id)
    log.log(1, loss=2.0, mfu=None)
    log.log(2, loss=1.0)
    log.close()
    assert len(lines(folder)) == 2
    return found


def test_wandb_gets_the_values_and_the_config(tmp_path, stub):
    wandb = stub()
    assert with_wandb(tmp_path) == "fresh-id"
    assert wandb.logged == [(1, {"loss": 2.0}), (2, {"loss": 1.0})]
    assert wandb.finished
    (asked,) = wandb.asked
    assert (asked["project"], asked["name"], asked["resume"]) == ("project", tmp_path.name, "allow")
    assert asked["config"] == {"run": {"seed": 1}}


def test_a_run_in_the_working_directory_has_a_name_at_wandb(tmp_path, stub, monkeypatch):
    wandb = stub()
    monkeypatch.chdir(tmp_path)
    with_wandb(Path("."))
    assert wandb.asked[0]["name"] == tmp_path.name


def test_wandb_gets_the_samples_as_one_table(tmp_path, stub):
    wandb = stub()
    log = RunLogger(tmp_path, Console())
    log.log_sample(0, "a", "nobody looks")
    log.start_wandb("project", {}, None)
    log.log_sample(5, "a", "abc")
    log.log_sample(9, "a", "abd")
    log.close()
    columns, rows = wandb.logged[-1][1]["samples"]
    assert columns == ["step", "prompt", "sample"]
    assert rows == [[5, "a", "abc"], [9, "a", "abd"]]
    assert [step for step, _ in wandb.logged] == [5, 9]


def test_a_resumed_run_keeps_its_id_even_if_it_was_killed_before_its_first_checkpoint(
    tmp_path, stub
):
    wandb = stub()
    RunLogger(tmp_path, Console()).start_wandb("project", {}, None)  # killed here
    assert RunLogger(tmp_path, Console()).start_wandb("project", {}, None) == "fresh-id"
    assert with_wandb(tmp_path, "of-a-checkpoint") == "of-a-checkpoint"
    assert [asked["id"] for asked in wandb.asked] == [None, "fresh-id", "of-a-checkpoint"]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_failing_wandb_is_reported_once_and_the_run_continues(tmp_path, stub, capsys, broken):
    stub(broken)
    assert with_wandb(tmp_path, "the-id") == "the-id"
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line]
    assert said.startswith("warning: wandb") and "(no api key); continuing without it" in said


def test_without_the_package_the_run_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    assert with_wandb(tmp_path) is None
    assert "pip install wandb" in capsys.readouterr().out
