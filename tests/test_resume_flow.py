"""The same command again: it resumes, reports a finished run, or refuses; nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from faultlib import around_steps, bits
from safetensors.torch import load_file

import train
from cli.options import ConfigError, parse_value
from tools.export import __main__ as export
from training import run as run_module
from training.config import OPTIONS
from training.evaluate import Evaluation
from training.metrics import read_metrics


class Killed(BaseException):
    """Ends a run at once, as a kill does."""


@pytest.fixture
def killed_at(train_tiny, monkeypatch):
    """killed_at(step, out_dir, ...): train, and be killed once `step` updates are done."""

    def run(step: int, out_dir: Path, **options) -> None:
        def kill(state, setup):
            if state.step == step:
                raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr("training.run.take_step", around_steps(before=kill))
            train_tiny(out_dir, **options)

    return run


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the lock, by its path."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def run_json(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


# Resuming


@pytest.mark.parametrize("step", [4, 6])
def test_the_same_command_resumes_to_the_same_bits(
    killed_at, train_tiny, trained_once, tmp_path, step
):
    folder = tmp_path / "killed"
    killed_at(step, folder)
    assert train_tiny(folder) == 0
    a, b = (load_file(f / "checkpoints/step-8/model.safetensors") for f in (folder, trained_once))
    assert all(torch.equal(a[name], b[name]) for name in b)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    seen = [(line["attempt"], line["step"]) for line in lines if "loss" in line]
    again = [(2, 6), (2, 8)]
    assert seen == ([(1, 1), (1, 2), (1, 4)] + [(1, 6)] * (step == 6) + again)
    losses = {e["step"]: e.get("loss") for e in read_metrics(folder / "metrics.jsonl")}
    wanted = {e["step"]: e.get("loss") for e in read_metrics(trained_once / "metrics.jsonl")}
    assert losses == wanted


def test_a_run_on_ids_without_text_resumes_to_the_same_bits_and_has_no_tokenizer_json(
    train_tiny, tmp_path, command
):
    numbers = [(i * i + i // 7) % 23 for i in range(1500)]
    (tmp_path / "notes.txt").write_text(" ".join(map(str, numbers)))
    options = {"source": tmp_path / "notes.txt", "prepared_dir": tmp_path / "prepared"}
    options |= {"tokenizer": "ids:23", "schedule": "constant", "dropout": 0.1}
    assert train_tiny(tmp_path / "whole", **options, max_steps=8) == 0
    for steps in (3, 8):
        assert train_tiny(tmp_path / "longer", **options, max_steps=steps) == 0
    assert bits(tmp_path / "longer", 8) == bits(tmp_path / "whole", 8)
    code, _, err = command(export.main, tmp_path / "whole", f"--out={tmp_path / 'hf'}")
    assert code == 2 and "tokenizer ids:23" in err and "--format=onnx" in err
    assert not (tmp_path / "hf").exists()


def test_a_run_killed_before_its_first_checkpoint_begins_again(killed_at, train_tiny, tmp_path):
    killed_at(2, tmp_path, max_steps=4)
    assert not (tmp_path / "checkpoints").exists()
    assert train_tiny(tmp_path, max_steps=4) == 0
    attempts = [e["attempt"] for e in read_metrics(tmp_path / "metrics.jsonl") if "loss" in e]
    assert attempts == [2] * 3


def test_a_run_without_checkpoints_is_refused_without_advice_to_resume(trained, train_tiny):
    """They may have been deleted to save space: what is left still belongs to the user."""
    shutil.rmtree(trained / "checkpoints")
    before = snapshot(trained)
    with pytest.raises(ConfigError) as caught:
        train_tiny(trained, lr=0.005)
    assert "--overwrite=true" in caught.value.hints[-1]
    assert "--resume=changed" not in str(caught.value)
    assert snapshot(trained) == before


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "snapshots.jsonl", "report.html", "checkpoints/best"]
)
def test_a_folder_of_someone_else_is_refused_and_left_alone(train_tiny, tmp_path, name):
    for file in (name, "checkpoints/.tmp-mine/notes", "log.txt"):
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text("mine")
    with pytest.raises(ConfigError, match=rf"holds .*{name.partition('/')[0]}.* but no run.json"):
        train_tiny(tmp_path / "run")
    for file in (name, "checkpoints/.tmp-mine/notes"):
        assert (tmp_path / "run" / file).read_text() == "mine"
    assert train_tiny(tmp_path / "run", overwrite=True, max_steps=2) == 0
    assert (tmp_path / "run.old" / name).read_text() == "mine"


def test_a_log_in_the_folder_does_not_matter(train_tiny, tmp_path):
    (tmp_path / "log.txt").write_text("mine")
    assert train_tiny(tmp_path, max_steps=2) == 0
    assert (tmp_path / "log.txt").read_text() == "mine"


def test_a_damaged_run_json_is_named_with_what_to_do(train_tiny, tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        train_tiny(tmp_path)
    (damage,), (advice,) = caught.value.problems, caught.value.hints
    assert damage.startswith(f"{tmp_path}: run.json is not JSON: ")
    assert "--overwrite=true" in advice
    assert train_tiny(tmp_path, overwrite=True, max_steps=2) == 0


def test_a_finished_run_is_reported_and_left_alone(trained, train_tiny, capsys):
    before = snapshot(trained)
    for options in ({}, {"quiet": True}):
        assert train_tiny(trained, **options) == 0
        out = capsys.readouterr().out
        assert out.count(f"{trained} is finished at step 8: all steps done; validation loss") == 1
        assert f"python sample.py {trained}" in out
        assert "--max_steps=16" in out and "--resume=changed" not in out
    assert snapshot(trained) == before


def test_options_that_change_no_weights_may_differ(trained, train_tiny):
    assert train_tiny(trained, interval=1, keep_checkpoints=5, eval_interval=3) == 0


# Refusing


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lr": 0.5}, ["optim.lr: the run has 0.01, the command says 0.5", "--resume=changed"]),
        ({"max_steps": 6}, ["run.max_steps: the run has 8", "--resume=changed"]),
        ({"n_layers": 4}, ["model.n_layers: the run has 1", "cannot change"]),
        ({"context_length": 32}, ["model.context_length: the run has 16", "cannot change"]),
        ({"resume": "changed", "n_layers": 4}, ["model.n_layers: the run has 1", "cannot change"]),
        ({"resume": "changed", "seed": 3}, ["run.seed: the run has 1", "cannot change"]),
        ({"global_batch": 8, "lr": 1}, ["data.global_batch: the run has 4", "optim.lr: the run"]),
    ],
)
def test_different_settings_are_refused_with_what_to_do(trained, train_tiny, options, told):
    before = snapshot(trained)
    with pytest.raises(ConfigError) as caught:
        train_tiny(trained, **options)
    for part in [*told, "holds a run with different settings", "--overwrite=true"]:
        assert part in str(caught.value)
    assert snapshot(trained) == before


def test_changed_data_is_refused_and_the_runs_own_stays(train_tiny, tmp_path, capsys):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("abcdefgh\n" * 60)
    options = {"source": text, "prepared_dir": tmp_path / "prepared", "max_steps": 4}
    train_tiny(run, **options, checkpoint_interval=2)
    shutil.rmtree(run / "checkpoints/step-4")
    text.write_text("abcdefhg\n" * 60)
    (own,) = (tmp_path / "prepared").glob("text_txt-*")
    prepared, before = snapshot(own), snapshot(run)
    with pytest.raises(ConfigError, match=r"(?s)not what the run was trained on.*--resume=changed"):
        train_tiny(run, **options, checkpoint_interval=2)
    assert snapshot(run) == before
    assert snapshot(own) == prepared
    shutil.copytree(run, tmp_path / "changed")
    text.write_text("abcdefgh\n" * 60)
    assert train_tiny(run, **options, checkpoint_interval=2) == 0
    text.write_text("abcdefhg\n" * 60)
    capsys.readouterr()
    assert train_tiny(tmp_path / "changed", **options, checkpoint_interval=2, resume="changed") == 0
    assert "resuming with the run's own data" in capsys.readouterr().out
    ends = [
        (folder / "checkpoints/step-4/model.safetensors").read_bytes()
        for folder in (run, tmp_path / "changed")
    ]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("new_text", ["abcdefhg\n" * 60, "abcdefgh\n" * 60 + "xyz"])
@pytest.mark.parametrize("prepared_is_there", [True, False])
def test_changed_data_is_named_and_not_a_vocabulary_that_follows_from_it(
    train_tiny, tmp_path, new_text, prepared_is_there
):
    """Without the run's prepared data, it is told by its fingerprint."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("abcdefgh\n" * 60)
    options = {"source": text, "prepared_dir": tmp_path / "prepared"}
    train_tiny(run, **options, max_steps=2)
    if not prepared_is_there:
        shutil.rmtree(tmp_path / "prepared")
    text.write_text(new_text)
    before = snapshot(run)
    with pytest.raises(ConfigError) as caught:
        train_tiny(run, **options, max_steps=4)
    assert "trained on" in str(caught.value) and "--overwrite=true" in str(caught.value)
    assert "vocab_size" not in str(caught.value)
    assert snapshot(run) == before
    text.write_text("abcdefgh\n" * 60)
    assert train_tiny(run, **options, max_steps=4) == 0


# With changed values


def test_resume_changed_continues_with_new_values(trained, train_tiny):
    assert train_tiny(trained, resume="changed", max_steps=12, lr=0.002, schedule="constant") == 0
    rates = {e["step"]: e["lr"] for e in read_metrics(trained / "metrics.jsonl") if "lr" in e}
    assert rates[12] == 0.002
    assert rates[2] > 0.002
    assert (trained / "checkpoints/step-12").is_dir()
    assert run_json(trained)["run"]["max_steps"] == 12
    assert run_json(trained)["optim"]["lr"] == 0.002
    assert train_tiny(trained, max_steps=12, lr=0.002, schedule="constant") == 0  # no longer new


def test_resume_changed_needs_something_to_resume(train_tiny, tmp_path):
    with pytest.raises(ConfigError, match="resume=changed: .*holds no checkpoint"):
        train_tiny(tmp_path / "new", resume="changed")


@pytest.fixture
def start_tiny(tiny_argv):
    """start_tiny(out_dir, "--name=value", ...): a start that types few options; those of a tiny
    run are in a config file."""

    def start(out_dir: Path, *typed: str, **in_file) -> int:
        argv = tiny_argv(out_dir, **in_file)
        options = dict(word.removeprefix("--").split("=", 1) for word in argv[1:])
        values = {
            OPTIONS[name].full_name: parse_value(OPTIONS[name].annotation, text, name)
            for name, text in options.items()
        }
        path = out_dir.parent / "mine.py"
        path.write_text(
            "from training.config import *\n" + f"config = with_values(Config(), {values!r})\n"
        )
        with mock.patch("training.messages.SAMPLE_TOKENS", 10):
            return train.main([str(path), *typed])

    return start


def rates(folder: Path) -> dict[int, float]:
    return {e["step"]: e["lr"] for e in read_metrics(folder / "metrics.jsonl") if "lr" in e}


def test_options_typed_before_stay_and_a_longer_run_reports_the_learning_rate(
    start_tiny, tmp_path, capsys
):
    run = tmp_path / "run"
    assert start_tiny(run, "--lr=0.5", "--max_steps=4", "--interval=1") == 0
    capsys.readouterr()
    assert start_tiny(run) == 0  # the file says 8 steps and another rate: typed before, kept
    out = capsys.readouterr().out
    assert "is finished at step 4" in out and "--max_steps=8" in out
    assert "--lr=0.5" in out and "--max_steps=4" in out
    assert start_tiny(run, "--max_steps=8") == 0
    out = capsys.readouterr().out
    assert "run.max_steps=8" in out
    taken = rates(run)
    assert list(taken) == list(range(1, 9))
    assert f"learning rate: rises again from {taken[4]:.3g} to {taken[5]:.3g} in step 5" in out
    assert f"decays after step 5 to {taken[8]:.3g} in step 8" in out and taken[6] < taken[5]
    assert taken[5] == 0.5 and taken[4] < 0.3
    assert run_json(run)["optim"]["lr"] == 0.5
    in_file = run_json(run)["config_file"]
    assert in_file["optim.lr"] == 0.01 and in_file["log.interval"] == 2


def test_an_edited_config_file_is_refused_and_accepted_with_changed(start_tiny, tmp_path, capsys):
    run = tmp_path / "run"
    assert start_tiny(run, "--max_steps=4") == 0
    before = snapshot(run)
    with pytest.raises(ConfigError) as caught:
        start_tiny(run, "--max_steps=6", lr=0.002)
    assert "optim.lr" in str(caught.value) and "--resume=changed" in str(caught.value)
    assert snapshot(run) == before
    assert start_tiny(run, "--max_steps=6", "--resume=changed", lr=0.002) == 0
    assert "optim.lr=0.002" in capsys.readouterr().out
    assert run_json(run)["optim"]["lr"] == 0.002
    assert start_tiny(run, lr=0.002) == 0  # no longer new


def test_a_longer_time_budget_resumes_a_finished_run(start_tiny, tmp_path, capsys):
    run = tmp_path / "run"
    assert start_tiny(run, "--time_budget=0.3s", "--eval_interval=1000") == 0
    steps = json.loads(find_state(run).read_text())["step"]
    capsys.readouterr()
    assert start_tiny(run) == 0
    out = capsys.readouterr().out
    assert f"is finished at step {steps}" in out
    advised = re.search(r"--time_budget=\S+", out.rpartition("to train longer")[2])[0]
    assert start_tiny(run, advised) == 0
    assert json.loads(find_state(run).read_text())["step"] > steps


def find_state(folder: Path) -> Path:
    """state.json of the newest checkpoint."""
    found = (folder / "checkpoints").glob("step-*/state.json")
    return max(found, key=lambda path: int(path.parent.name.removeprefix("step-")))


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_run_that_ended_early_is_resumed_by_the_printed_command(
    start_tiny, tmp_path, capsys, monkeypatch, at_the_end
):
    run, losses = tmp_path / "run", iter([2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    monkeypatch.setattr(
        run_module, "evaluate", lambda *args, **options: Evaluation(next(losses), 100, 100)
    )
    steps = "--max_steps=4" if at_the_end else "--max_steps=8"
    assert start_tiny(run, "--eval_interval=2", "--patience=1", steps) == 0
    assert start_tiny(run) == 0
    out = capsys.readouterr().out
    assert "is finished at step 4: no better loss" in out
    advised = out.strip().rpartition("the same command with ")[2].split()
    assert ("--max_steps=8" in advised) == at_the_end
    assert start_tiny(run, *advised) == 0
    assert find_state(run).parent.name == "step-8"


# A start that took no step


@pytest.fixture
def fails_at_once(monkeypatch):
    """A context in which the first step runs out of memory."""

    @contextlib.contextmanager
    def failing():
        def out_of_memory(*args):
            raise torch.OutOfMemoryError("out of memory")

        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(run_module, "train_step", out_of_memory)
            yield

    return failing


def test_a_start_that_fails_before_its_first_step_does_not_lock_the_folder(
    start_tiny, fails_at_once, tmp_path, capsys
):
    run = tmp_path / "run"
    with fails_at_once():
        start_tiny(run, "--lr=0.5", "--max_steps=4")
    assert (run / "run.json").exists()
    assert start_tiny(run, "--n_layers=2", "--max_steps=2", "--micro_batch=1") == 0
    assert "no step was taken" in capsys.readouterr().out
    assert run_json(run)["optim"]["lr"] == 0.01  # nothing of that start is kept
    assert run_json(run)["model"]["n_layers"] == 2
    assert list(rates(run)) == [1, 2]


def test_a_checkpoint_of_no_step_is_resumed_or_moved_aside_for_other_settings(
    start_tiny, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"

    def ask(state, setup):
        os.kill(os.getpid(), signal.SIGTERM)  # before the first step, which is then not taken

    with monkeypatch.context() as patch:
        patch.setattr("training.run.take_step", around_steps(before=ask))
        assert start_tiny(run, "--max_steps=4") == 128 + signal.SIGTERM
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == ["step-0"]
    kept = shutil.copytree(run, tmp_path / "kept")
    assert start_tiny(run, "--max_steps=2", "--lr=0.5", "--n_layers=2") == 0
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == ["step-2"]
    assert (tmp_path / "run.old/checkpoints/step-0").is_dir()
    capsys.readouterr()
    assert start_tiny(kept, "--max_steps=4") == 0
    assert "resuming from" in capsys.readouterr().out


def test_a_mistake_in_the_time_budget_leaves_the_folder_alone(trained, train_tiny, tmp_path):
    new, before = tmp_path / "new", snapshot(trained)
    for folder, options in (
        (new, {}),
        (trained, {"overwrite": True}),
        (trained, {"resume": "changed"}),
    ):
        with pytest.raises(ConfigError, match="run.time_budget=fits:nowhere: "):
            train_tiny(folder, time_budget="fits:nowhere", **options)
    assert snapshot(trained) == before
    assert not (new / "run.json").exists()
    assert train_tiny(new, max_steps=2) == 0


# Starting over


def test_overwrite_moves_the_old_run_aside(trained, train_tiny, capsys):
    before = snapshot(trained)
    for name in ("tiny.old", "tiny.old-1"):
        assert train_tiny(trained, overwrite=True, max_steps=2) == 0
        assert f"moved the old run to {trained.parent / name}" in capsys.readouterr().out
    assert snapshot(trained.parent / "tiny.old") == before
    assert run_json(trained.parent / "tiny.old-1")["run"]["max_steps"] == 2
    assert [p.name for p in (trained / "checkpoints").glob("step-*")] == ["step-2"]
    attempts = {e["attempt"] for e in read_metrics(trained / "metrics.jsonl")}
    assert attempts == {1}


@pytest.mark.parametrize("mistake", [{"context_length": 5000}, {"sample_prompt": "Ω"}])
def test_a_mistake_moves_nothing_aside(trained, train_tiny, mistake):
    before = snapshot(trained)
    with pytest.raises(ConfigError):
        train_tiny(trained, overwrite=True, **mistake)
    assert snapshot(trained) == before
    assert [p.name for p in trained.parent.iterdir()] == ["tiny"]


def test_overwrite_of_nothing_is_a_plain_start(train_tiny, tmp_path):
    assert train_tiny(tmp_path / "new", overwrite=True, max_steps=2) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_overwrite_in_the_working_directory_leaves_all_else(trained, train_tiny, monkeypatch):
    (trained / "mine.txt").write_text("mine")
    before = snapshot(trained)
    monkeypatch.chdir(trained)
    assert train_tiny(Path("."), overwrite=True, max_steps=2) == 0
    assert (trained / "mine.txt").read_text() == "mine"
    del before["mine.txt"]
    assert snapshot(trained / "old") == before
    assert run_json(trained)["run"]["max_steps"] == 2
    assert train_tiny(Path("."), max_steps=2) == 0  # finished, and unlocked


# Restarted by torchrun or a batch system: (at first, again)
AGAIN = {
    "by torchrun's agent": (
        {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"},
    ),
    "by its agent, as a rank has joined": (
        {"TORCHELASTIC_RUN_ID": "5f", "TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RUN_ID": "5f", "TORCHELASTIC_RESTART_COUNT": "0"},
    ),
    "by another agent of this torchrun": (
        {"TORCHELASTIC_RUN_ID": "5f", "TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RUN_ID": "5f", "TORCHELASTIC_RESTART_COUNT": "2", "agent": "other"},
    ),
    "by Slurm": (
        {"SLURM_JOB_ID": "4711"},
        {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1"},
    ),
    "by Slurm, with torchrun": (
        {"SLURM_JOB_ID": "4711", "TORCHELASTIC_RUN_ID": "none"},
        {
            "SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1",
            "TORCHELASTIC_RUN_ID": "none", "agent": "other",
        },
    ),
}  # fmt: skip
NEW = {
    "typed": ({}, {}),
    "another torchrun": (
        {"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none", "agent": "other"},
    ),
    "another torchrun of the same id": (
        {"TORCHELASTIC_RUN_ID": "101"}, {"TORCHELASTIC_RUN_ID": "101", "agent": "other"},
    ),
    "another torchrun, which restarts at once": (
        {"TORCHELASTIC_RUN_ID": "5f"},
        {"TORCHELASTIC_RUN_ID": "60", "TORCHELASTIC_RESTART_COUNT": "1", "agent": "other"},
    ),
    "typed again in one job": ({"SLURM_JOB_ID": "4711"}, {"SLURM_JOB_ID": "4711"}),
    "another job": (
        {"SLURM_JOB_ID": "4711"}, {"SLURM_JOB_ID": "4712", "SLURM_RESTART_COUNT": "1"},
    ),
}  # fmt: skip


@pytest.fixture
def launched(train_tiny, monkeypatch):
    """launched({"SLURM_JOB_ID": ...}, out_dir, ...): train as if started so."""
    monkeypatch.setattr("training.distributed._die_with_torchrun", lambda: None)

    def run(started: dict[str, str], out_dir: Path, **options) -> None:
        with monkeypatch.context() as patch:
            for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
                patch.delenv(name, raising=False)
            for name, value in started.items():
                patch.setenv(name, value)
            if "agent" in started:
                patch.setattr("os.getppid", lambda: 1)
            assert train_tiny(out_dir, overwrite=True, **options) == 0

    return run


@pytest.mark.parametrize(("at_first", "again"), AGAIN.values(), ids=AGAIN)
def test_a_launch_overwrites_once(trained, launched, capsys, at_first, again):
    launched(at_first, trained, max_steps=2)
    capsys.readouterr()
    launched(again, trained, max_steps=2)
    out = capsys.readouterr().out
    assert "restarted: " in out and "finished at step 2" in out
    assert sorted(path.name for path in trained.parent.iterdir()) == ["tiny", "tiny.old"]


@pytest.mark.parametrize(("at_first", "again"), NEW.values(), ids=NEW)
def test_another_launch_overwrites_again(trained, launched, at_first, again):
    for started in (at_first, again):
        launched(started, trained, max_steps=2)
    names = [path.name for path in trained.parent.iterdir()]
    assert sorted(names) == ["tiny", "tiny.old", "tiny.old-1"]


def test_a_killed_launch_resumes_from_its_own_checkpoint(trained, launched, killed_at, monkeypatch):
    started = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    with monkeypatch.context() as patch:
        patch.setattr("training.distributed._die_with_torchrun", lambda: None)
        for name, value in started.items():
            patch.setenv(name, value)
        killed_at(6, trained, overwrite=True, seed=7)
    launched({**started, "TORCHELASTIC_RESTART_COUNT": "1"}, trained, seed=7)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").open()]
    seen = [(line["attempt"], line["step"]) for line in lines if "loss" in line]
    assert seen == [(1, 1), (1, 2), (1, 4), (1, 6), (2, 6), (2, 8)]


def test_a_refusal_is_a_users_mistake(trained, tiny_argv, command):
    code, out, err = command(train.main, *tiny_argv(trained, lr=0.5))
    assert code == 2
    assert err.splitlines() == [
        f"error: {trained} holds a run with different settings:",
        "error: optim.lr: the run has 0.01, the command says 0.5",
        "  to continue with the changed values: --resume=changed",
        "  to start over (the old run is moved aside): --overwrite=true; or choose another "
        "--out_dir",
    ]


@pytest.mark.parametrize("name", ["source", "val_source", "init_from"])
def test_a_mistyped_path_is_reported_before_the_settings(trained, train_tiny, name):
    """Nothing else is wrong with the command than the path, although the other option differs."""
    with pytest.raises(ConfigError) as caught:
        train_tiny(trained, **{"n_layers": 4, name: trained / "tpyo"})
    assert len(caught.value.problems) == 1
    assert "tpyo: " in str(caught.value) and "no such f" in str(caught.value)


def test_as_set_is_only_what_was_set(trained, train_tiny, start_tiny, tmp_path, capsys):
    """A resumed run has the number format that was chosen when it began."""
    assert start_tiny(tmp_path / "run", "--max_steps=2", dtype="auto") == 0
    assert "(as " not in capsys.readouterr().out
    assert start_tiny(tmp_path / "run", "--max_steps=3", dtype="auto") == 0
    assert "float32 (as before)" in capsys.readouterr().out
    assert start_tiny(tmp_path / "run", "--max_steps=4", "--dtype=float32", dtype="auto") == 0
    assert "float32 (as set)" in capsys.readouterr().out
