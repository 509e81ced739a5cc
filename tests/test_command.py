"""A command: exit codes, Ctrl-C while libraries are imported, folders that options name."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data.command import ended_by_ctrl_c, exit_code_of, make_folder
from data.options import ConfigError


def run_main(body: str) -> subprocess.CompletedProcess[str]:
    code = f"from data.command import *\ndef main(argv):\n    {body}\nrun_command(main)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("body", ["return 0", "raise ConfigError('one')"])
def test_on_the_way_out_nothing_is_collected(body):
    """Python would look for cycles, which takes long where there are many objects."""
    cycle = "a = type('A', (), {'__del__': lambda self: print('collected')})(); a.a = a; del a"
    ended = run_main(f"{cycle}; {body}")
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return None", 0, ""),
        ("return 4", 4, ""),
        (
            "raise ConfigError(['one', 'two'])",
            2,
            "error: one\nerror: two\n",
        ),
        ("raise ConfigError('only')", 2, "error: only\n"),
        ("raise OSError(28, 'No space left on device')", 5, "error: [Errno 28] No space left"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise RuntimeError('a bug')", 1, "Traceback"),
        ("raise FileNotFoundError(2, 'no such file')", 1, "Traceback"),
        ("raise BrokenPipeError", 141, ""),
    ],
)
def test_an_error_becomes_its_exit_code(body, code, said):
    ended = run_main(body)
    assert ended.returncode == code
    assert ended.stderr.startswith(said) if said else ended.stderr == ""


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EFBIG"])
def test_a_disk_that_cannot_be_written_is_5(name):
    number = getattr(errno, name)
    assert exit_code_of(OSError(number, os.strerror(number))) == 5


def test_an_error_brings_its_own_code():
    class Held(Exception):
        exit_code = 6

    assert exit_code_of(Held()) == 6
    assert exit_code_of(OSError(errno.ENOENT, "no such file")) == 1
    assert exit_code_of(ConfigError("x")) == 2


# Ctrl-C


def test_ctrl_c_within_an_import_ends_the_process_and_python_has_it_again_afterwards():
    """numpy catches what is raised while it is imported; a bare except does the same here."""
    # These tests may run in the background, where a shell has Ctrl-C ignored: not so here.
    begin = "import os, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
    swallowed = "try: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n        except: pass"
    within = run_main(f"{begin}\n    with ended_by_ctrl_c():\n        {swallowed}")
    assert within.returncode == -signal.SIGINT
    sent = "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    after = run_main(f"{begin}\n    with ended_by_ctrl_c(): pass\n    {sent}")
    assert after.returncode == 130


def test_an_ignored_ctrl_c_stays_ignored():
    """As under nohup, and for what a shell runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ended_by_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# Folders


def test_a_folder_that_cannot_be_is_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for folder in (file, file / "run", file / "a/b"):
        with pytest.raises(ConfigError, match=f"out={folder}: {file} is a file, not a folder"):
            make_folder(folder, "out")
    make_folder(tmp_path / "a/b", "out")
    make_folder(tmp_path / "a/b", "out")
    assert (tmp_path / "a/b").is_dir()
    assert file.read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a /proc")
def test_a_place_where_no_folder_can_be_made_is_one_line():
    with pytest.raises(ConfigError, match="out=/proc/nothing/here: such a folder cannot be made"):
        make_folder(Path("/proc/nothing/here"), "out")
