"""The folder of a run: one training at a time, nothing overwritten, a log that survives kills."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from faultlib import Shared, ended, fork, fork_command, train, wait_for

import training.run
from cli.files import warn_once
from cli.options import ConfigError
from training.folder import FolderHeld, lock_folder, move_aside
from training.metrics import next_attempt, read_lines, read_metrics


def held(folder, shared: Shared) -> int:
    """A child that holds the folder until it is killed; its process id."""

    def command(argv: list[str]) -> int:
        with lock_folder(folder):
            shared[0] = 1
            signal.pause()
        return 0

    pid = fork_command(command, [])
    wait_for(lambda: shared[0] == 1, pid=pid)
    return pid


def test_the_second_is_told_who_has_the_folder_and_a_killed_holder_blocks_nobody(tmp_path):
    pid = held(tmp_path / "run", Shared())
    with pytest.raises(FolderHeld, match=f"in use by process {pid} on ") as found:
        lock_folder(tmp_path / "run").__enter__()
    assert found.value.exit_code == 6
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    for _ in range(2):  # and again after it was given back in order
        with lock_folder(tmp_path / "run"):
            assert (tmp_path / "run" / ".lock").read_text().startswith(f"process {os.getpid()} ")


def test_a_lock_file_full_of_junk_does_not_hinder(tmp_path):
    (tmp_path / ".lock").write_bytes(b"\xff\x00" * 500)
    with lock_folder(tmp_path), pytest.raises(FolderHeld):
        lock_folder(tmp_path).__enter__()


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EINVAL"])
def test_a_file_system_without_locks_is_one_warning(tmp_path, monkeypatch, capsys, name):
    def refuse(file, how) -> None:
        raise OSError(getattr(errno, name), name)

    warn_once.cache_clear()
    monkeypatch.setattr("fcntl.flock", refuse)
    for _ in range(2):
        with lock_folder(tmp_path / "run"):
            assert (tmp_path / "run" / ".lock").read_text().startswith("process ")
    assert capsys.readouterr().err.count("warning: no file locks here") == 1


def test_a_platform_without_locks_is_one_warning(tmp_path, monkeypatch, capsys):
    warn_once.cache_clear()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with lock_folder(tmp_path / "run"):
        assert capsys.readouterr().err.count("warning: no file locks here") == 1


def test_another_fault_of_a_lock_is_raised(tmp_path, monkeypatch):
    def fail(file, how) -> None:
        raise OSError(errno.EIO, "EIO")

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(OSError, match="EIO"), lock_folder(tmp_path / "run"):
        pass


def test_a_second_training_stops_at_once_and_the_first_goes_on(tiny_argv, tmp_path):
    shared, argv = Shared(), tiny_argv(tmp_path / "run")

    def patch() -> None:
        take_step = training.run.take_step

        def waiting(run, batches) -> None:
            shared[0] = run.state.step
            while run.state.step == 2 and not shared[1]:
                time.sleep(0.001)
            take_step(run, batches)

        training.run.take_step = waiting

    first = fork(argv, before=patch)
    wait_for(lambda: shared[0] == 2, pid=first)
    log = tmp_path / "log"
    assert train(argv, log=log) == 6
    assert f"in use by process {first} on " in log.read_text()
    shared[1] = 1
    assert ended(first) == 0


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_file_in_the_place_of_the_folder_is_a_mistake_in_words(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="run.out_dir=.*is a file"):
        lock_folder(tmp_path / place).__enter__()


def test_old_runs_get_names_of_their_own(tmp_path):
    for number in range(3):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "which").write_text(str(number))
        move_aside(tmp_path / "run")
    kept = {path.name: (path / "which").read_text() for path in tmp_path.glob("run.old*")}
    assert kept == {"run.old": "0", "run.old-1": "1", "run.old-2": "2"}


def old_run(folder):
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "run.json").write_text("old")
    return folder


@pytest.mark.parametrize("depth", ["", "/.", "/inner/.."])
def test_a_link_stays_and_leads_to_a_new_folder_on_the_same_disk(tmp_path, depth):
    old_run(tmp_path / "disk" / "run")
    (tmp_path / "link").symlink_to("disk/run")
    (tmp_path / "disk" / "run" / "inner").mkdir()
    aside = move_aside(tmp_path / f"link{depth}")
    assert aside == tmp_path / "disk" / "run.old"
    assert (aside / "run.json").read_text() == "old"
    assert (tmp_path / "link").is_symlink() and not list((tmp_path / "link").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


@pytest.mark.parametrize("out_dir", [".", "..", "absolute"])
def test_the_working_directory_keeps_its_place_and_all_that_is_not_the_runs(
    tmp_path, monkeypatch, out_dir
):
    run = old_run(tmp_path / "run")
    (run / "mine").write_text("mine")
    (run / "old").mkdir()
    (run / "sub").mkdir()
    monkeypatch.chdir(run / "sub" if out_dir == ".." else run)
    aside = move_aside(run if out_dir == "absolute" else Path(out_dir))
    assert aside == run / "old-1"
    assert sorted(path.name for path in aside.iterdir()) == ["checkpoints", "run.json"]
    assert sorted(path.name for path in run.iterdir()) == ["mine", "old", "old-1", "sub"]


@pytest.mark.parametrize("name", ["EBUSY", "EXDEV", "EACCES"])
def test_a_folder_that_cannot_be_renamed_keeps_its_place(tmp_path, monkeypatch, name):
    """A mount point, a layer of a container, a parent folder that is not ours."""
    run, rename = old_run(tmp_path / "run"), os.rename

    def refuse(a, b) -> None:
        if a == run:
            raise OSError(getattr(errno, name), name)
        rename(a, b)

    monkeypatch.setattr(os, "rename", refuse)
    assert move_aside(run) == run / "old"
    assert (run / "old" / "run.json").read_text() == "old"
    assert [path.name for path in run.iterdir()] == ["old"]


def test_a_link_to_nowhere_is_a_mistake_in_words(tmp_path):
    """Its disk may not be mounted: nothing is made in its place."""
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    for folder in (tmp_path / "link", tmp_path / "link" / "run"):
        with pytest.raises(ConfigError, match=r"run.out_dir=.*disk/run, which does not exist"):
            lock_folder(folder).__enter__()
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize(
    "content, wanted",
    [
        (None, 1),
        (b"", 1),
        (b'{"step": 1, "attempt": 1}\n', 2),
        (b'{"step": 1, "attempt": 4}\n{"step": 2, "att', 5),  # torn
        (b'{"step": 1, "attempt": 4}\n\xff\xfe\n[]\n7\n{"attempt": "x"}\n', 5),
        (b"no JSON at all", 1),
        (b'{"step": 1, "attempt": 4}\n' + b"\0" * 100_000, 5),
        (b'{"step": 1, "attempt": 4}\n' + b"\0" * 3_000_000 + b"\n", 5),
        (b'{"step": 1, "attempt": 4}\n' + b"[" * 200_000, 5),
        (b'{"step": 1, "attempt": 4}\n' + b'{"step": 2, "attempt": "x"}\n' * 9_000, 5),
        (b'{"step": 1, "attempt": 4, "note": "' + b"x" * 70_000 + b'"}\n', 5),  # over two blocks
    ],
)
def test_the_next_attempt(tmp_path, content, wanted):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    assert next_attempt(tmp_path / "metrics.jsonl") == wanted


DAMAGED = [
    b"\0" * 1000,
    b"\xff\xfe",
    b"7",
    b"null",
    b"[]",
    b'{"loss": 1.0}',
    b"[" * 100_000,
    b'{"step": ' + b"9" * 5000 + b"}",
    *(
        json.dumps({"step": 5, "attempt": 1, **wrong}).encode()
        for wrong in [
            *({"step": step} for step in ("5", None, 5.5, True, [], -1, 1 << 70)),
            *({"attempt": attempt} for attempt in ("1", None, [], 1.5)),
            *({"time": time, "note": "n"} for time in ("now", None, 1e300, math.nan)),
            *({"loss": loss} for loss in ("3.0", [], {}, True, math.nan, math.inf, 10**400)),
            *({"val_loss": loss, "perplexity": 1.0} for loss in ("3.0", [], math.nan)),
            *({"loss": 1.0, name: "x"} for name in ("lr", "grad_norm", "mfu", "tokens")),
            *({"loss": 1.0, name: {}} for name in ("data_wait", "tokens_per_second")),
            {"val_loss": 1.0, "bits_per_byte": []},
            *({"fit": fit} for fit in ("9", None, 1.5)),
            *({"note": note} for note in (7, None, [])),
            *({"start": start} for start in (7, {"command": 7}, {"data": 7}, {"environment": []})),
            *({"sample": text} for text in (7, None)),
            *({"passage": passage} for passage in (7, [7], [["a", 1.0]], [["a", "b", []]])),
            *({"passage": [["a", 1.0, pairs]]} for pairs in ([7], [["a"]], [[1, 0.5]], 7)),
        ]
    ),
]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: repr(line[:60]))
def test_a_damaged_line_is_left_out(tmp_path, line):
    good = [b'{"step": 4, "loss": 4.0}', b'{"step": 6, "loss": null, "new": "x"}']
    (tmp_path / "m").write_bytes(b"\n".join([good[0], line, good[1]]))
    assert [entry["step"] for entry in read_metrics(tmp_path / "m")] == [4, 6]
    assert [entry["step"] for entry in read_lines(tmp_path / "m")] == [4, 6]


def test_damaged_logs_cost_neither_the_run_nor_its_report(train_tiny, tmp_path, capsys):
    folder, options = tmp_path / "run", {"report": True, "eval_interval": 4}
    assert train_tiny(folder, max_steps=4, **options) == 0
    for name in ("metrics.jsonl", "snapshots.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b"\n".join(DAMAGED) + b"\n" + b"\0" * 100_000)
    capsys.readouterr()
    assert train_tiny(folder, max_steps=8, resume="must", **options) == 0
    assert "report.html was not" not in capsys.readouterr().out
    found = read_metrics(folder / "metrics.jsonl")
    assert {entry["step"]: entry["attempt"] for entry in found} == {1: 1, 2: 1, 4: 1, 6: 2, 8: 2}
    assert [entry["step"] for entry in read_lines(folder / "snapshots.jsonl")] == [4, 8]


def test_readers_take_the_highest_attempt_of_a_step_and_leave_a_torn_line_out(tmp_path):
    lines = [
        {"step": 1, "attempt": 1, "loss": 5.0},
        {"step": 2, "attempt": 1, "loss": 4.0},
        {"step": 2, "attempt": 1, "val_loss": 4.4},
        {"step": 2, "attempt": 2, "loss": 3.9},
        {"step": 3, "attempt": 2, "loss": 3.0},
    ]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo'
    (tmp_path / "m").write_text(text)
    found = read_metrics(tmp_path / "m")
    assert [(e["step"], e.get("loss"), e.get("val_loss")) for e in found] == [
        (1, 5.0, None),
        (2, 3.9, None),
        (2, None, 4.4),
        (3, 3.0, None),
    ]
