"""Run folder: one training process at a time, and an old run is moved aside, not overwritten."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from faultlib import Shared, around_steps, ended, fork, fork_command, train, wait_for

import training.run
from cli.files import warn_once
from cli.options import ConfigError
from training.folder import FolderHeld, lock_folder, move_aside


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


def test_a_second_process_is_told_who_has_the_folder_and_a_killed_one_blocks_nobody(tmp_path):
    pid = held(tmp_path / "run", Shared())
    with pytest.raises(FolderHeld, match=f"in use by process {pid} on ") as found:
        lock_folder(tmp_path / "run").__enter__()
    assert found.value.exit_code == 6
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    for _ in range(2):  # and again after an orderly end
        with lock_folder(tmp_path / "run"):
            assert (tmp_path / "run" / ".lock").read_text().startswith(f"process {os.getpid()} ")


def test_a_lock_file_full_of_junk_does_not_matter(tmp_path):
    (tmp_path / ".lock").write_bytes(b"\xff\x00" * 500)
    with lock_folder(tmp_path), pytest.raises(FolderHeld):
        lock_folder(tmp_path).__enter__()


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP", "EINVAL", "Windows"])
def test_no_file_locks_here_is_one_warning(tmp_path, monkeypatch, capsys, name):
    def refuse(file, how) -> None:
        raise OSError(getattr(errno, name), name)

    warn_once.cache_clear()
    if name == "Windows":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        monkeypatch.setattr("fcntl.flock", refuse)
    for _ in range(2):
        with lock_folder(tmp_path / "run"):
            assert (tmp_path / "run" / ".lock").read_text().startswith("process ")
    assert capsys.readouterr().err.count("warning: no file locks here") == 1


def test_any_other_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    def fail(file, how) -> None:
        raise OSError(errno.EIO, "EIO")

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(OSError, match="EIO"), lock_folder(tmp_path / "run"):
        pass


def test_a_second_training_stops_at_once_and_the_first_continues(tiny_argv, tmp_path):
    shared, argv = Shared(), tiny_argv(tmp_path / "run")

    def waiting(state, setup) -> None:
        shared[0] = state.step
        while state.step == 2 and not shared[1]:
            time.sleep(0.001)

    def patch() -> None:
        training.run.take_step = around_steps(before=waiting)

    first = fork(argv, before=patch)
    wait_for(lambda: shared[0] == 2, pid=first)
    log = tmp_path / "log"
    assert train(argv, log=log) == 6
    assert f"in use by process {first} on " in log.read_text()
    shared[1] = 1
    assert ended(first) == 0


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file", "is a file"),
        ("file/run", "is a file"),
        # The disk that a link leads to may not be mounted: nothing is created in its place.
        ("link", "is a link to .*disk/run"),
        ("link/run", "is a link to .*disk/run"),
    ],
)
def test_a_place_where_no_folder_can_be_is_a_users_mistake(tmp_path, place, reason):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    with pytest.raises(ConfigError, match=f"run.out_dir=.*{reason}"):
        lock_folder(tmp_path / place).__enter__()
    assert not (tmp_path / "disk").exists()


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
def test_the_working_directory_stays_with_everything_that_is_not_the_runs(
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
def test_a_folder_that_cannot_be_renamed_stays(tmp_path, monkeypatch, name):
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
