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
    """One process that logs these steps."""
    log = RunLogger(folder, Console())
    for step in steps:
        log.log(step, **values)
    log.close()


# metrics.jsonl


def test_a_line_holds_the_step_the_attempt_and_the_values(tmp_path):
    logged(tmp_path, 1, 2, loss=2.5, mfu=None)
    first, second = lines(tmp_path)
    assert first.pop("time") > 1.7e9
    assert first == {"step": 1, "attempt": 1, "loss": 2.5}
    assert second["step"] == 2


def test_the_file_is_only_appended_to_and_attempts_are_counted(tmp_path):
    logged(tmp_path, 1, 2, 3, loss=1.0)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    logged(tmp_path, 2, 3, loss=0.5)
    logged(tmp_path, 3, loss=0.25)
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)
    assert [entry["attempt"] for entry in lines(tmp_path)] == [1, 1, 1, 2, 2, 3]
    kept = {entry["step"]: entry["loss"] for entry in read_metrics(tmp_path / "metrics.jsonl")}
    assert kept == {1: 1.0, 2: 0.5, 3: 0.25}


def test_a_torn_last_line_spoils_neither_itself_nor_the_next(tmp_path):
    logged(tmp_path, 1, loss=1.0)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "attempt": 1, "lo')
    logged(tmp_path, 2, loss=0.5)
    assert [(e["step"], e["attempt"]) for e in read_metrics(path)] == [(1, 1), (2, 2)]
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_becomes_null(tmp_path, value):
    logged(tmp_path, 1, loss=value)

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse)["loss"] is None


def test_a_line_is_on_its_way_to_the_disk_at_once(tmp_path):
    log = RunLogger(tmp_path, Console())
    log.log(1, loss=1.0)
    assert len(lines(tmp_path)) == 1
    log.close()


# wandb


class StubRun:
    """What wandb.init returns; `broken` names the methods that raise."""

    def __init__(self, id: str, broken: tuple[str, ...]) -> None:
        self.id, self.broken, self.logged, self.finished = id, broken, [], False

    def log(self, values: dict, step: int) -> None:
        if "log" in self.broken:
            raise ConnectionError("server gone")
        self.logged.append((step, values))

    def finish(self) -> None:
        if "finish" in self.broken:
            raise ConnectionError("server gone")
        self.finished = True


@pytest.fixture
def stub(monkeypatch):
    """stub(*broken): put a wandb in place whose methods of these names raise."""

    def make(*broken: str) -> types.ModuleType:
        module = types.ModuleType("wandb")
        module.runs, module.asked = [], []

        def init(**options):
            module.asked.append(options)
            if "init" in broken:
                raise RuntimeError("no api key\nmore about it")
            module.runs.append(StubRun(options["id"] or "fresh-id", broken))
            return module.runs[-1]

        module.init = init
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
    (run,), (asked,) = wandb.runs, wandb.asked
    assert run.logged == [(1, {"loss": 2.0}), (2, {"loss": 1.0})]
    assert run.finished
    assert asked["project"] == "project"
    assert asked["name"] == tmp_path.name
    assert asked["config"] == {"run": {"seed": 1}}


def test_wandb_gets_the_samples_as_one_table(tmp_path, stub):
    wandb = stub()
    wandb.Table = lambda columns, data: (columns, list(data))
    log = RunLogger(tmp_path, Console())
    log.log_sample(0, "a", "nobody looks")
    log.start_wandb("project", {}, None)
    log.log_sample(5, "a", "abc")
    log.log_sample(9, "a", "abd")
    log.close()
    columns, rows = wandb.runs[0].logged[-1][1]["samples"]
    assert columns == ["step", "prompt", "sample"]
    assert rows == [[5, "a", "abc"], [9, "a", "abd"]]
    assert [step for step, _ in wandb.runs[0].logged] == [5, 9]


def test_a_resumed_run_is_the_same_one_at_wandb(tmp_path, stub):
    wandb = stub()
    assert with_wandb(tmp_path, "the-id") == "the-id"
    assert wandb.asked[0]["id"] == "the-id"
    assert wandb.asked[0]["resume"] == "allow"


def test_a_run_killed_before_its_first_checkpoint_is_the_same_one_at_wandb(tmp_path, stub):
    wandb = stub()
    RunLogger(tmp_path, Console()).start_wandb("project", {}, None)  # killed here
    log = RunLogger(tmp_path, Console())
    assert log.start_wandb("project", {}, None) == "fresh-id"
    log.close()
    assert [asked["id"] for asked in wandb.asked] == [None, "fresh-id"]
    assert with_wandb(tmp_path, "of-a-checkpoint") == "of-a-checkpoint"


def test_a_run_in_the_working_directory_has_a_name_at_wandb(tmp_path, stub, monkeypatch):
    wandb = stub()
    monkeypatch.chdir(tmp_path)
    with_wandb(Path("."))
    assert wandb.asked[0]["name"] == tmp_path.name


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_failing_wandb_is_said_once_and_the_run_goes_on(tmp_path, stub, capsys, broken):
    stub(broken)
    with_wandb(tmp_path, "the-id")
    said = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line]
    assert len(said) == 1
    assert said[0].startswith("warning: wandb")
    assert "continuing without it" in said[0]
    assert "more about it" not in said[0]


def test_a_run_that_wandb_cannot_start_keeps_the_id_it_had(tmp_path, stub):
    stub("init")
    assert with_wandb(tmp_path, "the-id") == "the-id"


def test_without_wandb_there_is_advice(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    assert with_wandb(tmp_path) is None
    assert "pip install wandb" in capsys.readouterr().out


def test_wandb_is_not_imported_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    logged(tmp_path, 1, loss=1.0)
