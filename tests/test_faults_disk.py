"""A full disk, a file size limit, a read-only disk: an error, and no good checkpoint is lost."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from faultlib import bits, leftovers, small_disk, train, verified

import training.checkpoint
import training.logger

# A checkpoint of about 300 kB.
BIG = {"d_model": 32, "n_layers": 2, "dropout": 0.1, "max_steps": 8, "eval_interval": 4}
BIG |= {"checkpoint_interval": 2, "keep_checkpoints": 9, "quiet": "true", "interval": 1}
FREE = [0, 4, 40, 100, 200, 280, 320, 400, 700, 1500]  # kB left


def fill(disk: Path, left_kb: int) -> Path:
    """Fill the file system up to about left_kb; returns the file that does it."""
    status = os.statvfs(disk)
    size = status.f_bavail * status.f_frsize - left_kb * 1024
    (disk / "filler").write_bytes(bytes(max(0, size)))
    return disk / "filler"


def give_checkpoint(step: int, plain: Path, run: Path) -> None:
    """Give a run's folder the checkpoint of that step."""
    name = f"checkpoints/step-{step}"
    shutil.copytree(plain / name, run / name)


@pytest.mark.parametrize("sizes", [[40], pytest.param(FREE, marks=pytest.mark.faults)], ids=len)
def test_a_small_disk_filled_to_many_sizes(sizes, tiny_argv, tmp_path, figure):
    plain = tiny_argv(tmp_path / "plain", **BIG)
    assert train(plain) == 0
    wanted, codes, log = bits(tmp_path / "plain", 8), [], tmp_path / "log"
    with small_disk(tmp_path / "disk") as disk:
        for left in sizes:
            argv, run = tiny_argv(disk / "run", **BIG), disk / "run"
            shutil.copytree(
                tmp_path / "plain" / "checkpoints" / "step-4", run / "checkpoints/step-4"
            )
            filler = fill(disk, left)
            codes.append(train(argv, log=log))
            assert 4 in verified(run) and not leftovers(run)
            filler.unlink()
            assert train(argv) == 0  # with space again it resumes and ends with the same bits
            assert bits(run, 8) == wanted
            shutil.rmtree(run)
    assert set(codes) <= {0, 5} and codes[0] == 5
    assert "No space left on device: '" in log.read_text()
    figure(
        f"a 4 MB file system filled at {len(sizes)} sizes",
        f"exit codes {codes}; previous loads {len(sizes)} of {len(sizes)}; leftovers 0",
    )


@pytest.mark.parametrize("left", [4, pytest.param(0, marks=pytest.mark.faults)])
def test_preparation_on_a_full_disk(left, tiny_argv, tmp_path):
    log = tmp_path / "log"
    with small_disk(tmp_path / "disk") as disk:
        filler = fill(disk, left)
        argv = tiny_argv(tmp_path / "run", prepared_dir=disk / "prepared")
        assert train(argv, log=log) == 5, log.read_text()
        assert "No space left" in log.read_text()
        filler.unlink()
        assert train(argv) == 0


def test_a_file_size_limit(tiny_argv, tmp_path):
    """A limit on the file size (`ulimit -f`) needs no root, and fails in the middle of a file."""
    argv, log = tiny_argv(tmp_path / "run", **BIG), tmp_path / "log"
    assert train(tiny_argv(tmp_path / "plain", **BIG)) == 0
    give_checkpoint(2, tmp_path / "plain", tmp_path / "run")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    assert train(argv, before=limit, log=log) == 5
    assert "File too large: '" in log.read_text() and "model.safetensors" in log.read_text()
    assert verified(tmp_path / "run") == [2] and not leftovers(tmp_path / "run")
    assert train(argv) == 0


@pytest.mark.parametrize("owner", ["log", "run.json", "best"])
def test_no_space_for_a_small_file(owner, tiny_argv, tmp_path):
    """Existing checkpoints stay, and the same command resumes once there is space."""
    argv, log = tiny_argv(tmp_path / "run", **BIG), tmp_path / "log"
    assert train(tiny_argv(tmp_path / "plain", **BIG)) == 0
    give_checkpoint(2, tmp_path / "plain", tmp_path / "run")

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    def patch() -> None:
        if owner == "log":
            training.logger.json.dumps = full
        elif owner == "run.json":
            training.folder.replace_file = full
        else:
            training.checkpoint.replace_file = full

    assert train(argv, before=patch, log=log) == 5
    assert "No space left" in log.read_text() and "Traceback" not in log.read_text()
    assert 2 in verified(tmp_path / "run") and not leftovers(tmp_path / "run")
    assert train(argv) == 0
    assert bits(tmp_path / "run", 8) == bits(tmp_path / "plain", 8)
    best = [(tmp_path / name / "checkpoints" / "best").read_text() for name in ("run", "plain")]
    assert best[0] == best[1]


def test_a_read_only_file_system(tiny_argv, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        if subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode:
            pytest.skip("remounting needs root")
        log = tmp_path / "log"
        assert train(tiny_argv(disk / "run"), log=log) == 5
        assert "Read-only file system: '" in log.read_text()


def test_setting_the_clock_back_changes_nothing(tiny_argv, tmp_path):
    assert train(tiny_argv(tmp_path / "plain", **BIG)) == 0
    give_checkpoint(4, tmp_path / "plain", tmp_path / "run")

    def patch() -> None:
        now = time.time
        time.time = lambda: now() - 1e8

    assert train(tiny_argv(tmp_path / "run", **BIG), before=patch) == 0
    assert bits(tmp_path / "run", 8) == bits(tmp_path / "plain", 8)
