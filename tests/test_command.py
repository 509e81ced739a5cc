"""Commands: exit codes, lost output, Ctrl-C during imports, folders that options name."""

from __future__ import annotations

import errno
import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli import command
from cli.command import ended_by_ctrl_c, exit_code_of, lasting_output, make_folder, run_command
from cli.options import ConfigError


def run_main(body: str) -> subprocess.CompletedProcess[str]:
    code = f"from cli.command import *\ndef main(argv):\n    {body}\nrun_command(main)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("body", ["return 0", "raise ConfigError('one')"])
def test_nothing_is_collected_at_exit(body):
    """Python would look for cycles, which takes long where there are many objects."""
    cycle = "a = type('A', (), {'__del__': lambda self: print('collected')})(); a.a = a; del a"
    assert run_main(f"{cycle}; {body}").stdout == ""


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return None", 0, ""),
        ("return 4", 4, ""),
        ("raise ConfigError(['one', 'two'])", 2, "error: one\nerror: two\n"),
        ("raise ConfigError('only')", 2, "error: only\n"),
        ("raise ConfigError('it', ['do this', 'or that'])", 2, "error: it\n  do this\n  or that\n"),
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


def test_exit_codes_of_errors():
    class Held(Exception):
        exit_code = 6

    assert exit_code_of(Held()) == 6
    assert exit_code_of(ConfigError("x")) == 2
    assert exit_code_of(OSError(errno.ENOENT, "no such file")) == 1
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EFBIG"):
        assert exit_code_of(OSError(getattr(errno, name), "disk full or read-only")) == 5, name


# Lost output


class Failing(io.StringIO):
    """A stream that fails from its second write on."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.writes = error, 0

    def write(self, text: str) -> int:
        self.writes += 1
        if self.writes > 1:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("which", ["stdout", "stderr"])
@pytest.mark.parametrize(
    "error",
    [*(OSError(getattr(errno, name), name) for name in ("EIO", "EPIPE", "ENOSPC", "EBADF")),
     ValueError("I/O operation on closed file")],
    ids=str,
)  # fmt: skip
def test_lost_output_is_noted_once_on_the_other_stream(monkeypatch, which, error):
    failing, other = Failing(error), io.StringIO()
    monkeypatch.setattr(sys, "stdout", failing if which == "stdout" else other)
    monkeypatch.setattr(sys, "stderr", failing if which == "stderr" else other)
    with lasting_output():
        for text in "abc":
            getattr(sys, which).write(text)
            print(text, file=getattr(sys, which), flush=True)
    assert getattr(sys, which) is failing  # restored
    assert failing.getvalue() == "a" and failing.writes == 2
    (note,) = other.getvalue().splitlines()
    assert note.startswith(f"note: {which} cannot be written (")


def test_both_streams_may_be_lost(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Failing(OSError(errno.EIO, "gone")))
    with lasting_output():
        for _ in range(3):
            print("a")
            print("b", file=sys.stderr)


def test_a_pipe_that_is_full_for_a_moment_is_kept(monkeypatch):
    stream = Failing(BlockingIOError(errno.EAGAIN, "would block"))
    monkeypatch.setattr(sys, "stdout", stream)
    with lasting_output():
        print("a", end="")
        print("b", end="")
        stream.writes = -9
        print("c", end="")
    assert stream.getvalue() == "ac"


PRINTS = "import sys; [print('x' * 999, flush=True) for _ in range(9)]; "
PRINTS += "print('y', file=sys.stderr, flush=True); open(argv[0], 'w').write('done')"


@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("to", [">&-", "2>&-", ">&- 2>&-", "0<&- >&- 2>&-", ">/dev/full", "| true"])
def test_output_taken_away_by_the_shell(tmp_path, to, lasting):
    """A command survives closed streams, and with outlives_output a full disk or a closed pipe."""
    done, code = tmp_path / "done", tmp_path / "code"
    body = f"from cli.command import *\ndef main(argv):\n    {PRINTS}\n    return 3\n"
    body += f"run_command(main, outlives_output={lasting})"
    # The writer waits until the reader of the pipe has gone.
    sleep = "sleep 0.2; " if "|" in to else ""
    script = f'{{ {sleep}"$0" -c "$1" "$2"; echo $? >"$3"; }} {to}'
    argv = ["sh", "-c", script, sys.executable, body, str(done), str(code)]
    err = subprocess.run(argv, capture_output=True, text=True, timeout=60).stderr
    ended = {">/dev/full": 5, "| true": 141}.get(to, 3) if not lasting else 3
    assert int(code.read_text()) == ended, err
    assert done.exists() == (ended == 3)
    assert "Traceback" not in err and "Exception ignored" not in err


def test_a_new_file_never_gets_the_number_of_a_closed_stream(tmp_path):
    body = "from cli.command import *\ndef main(argv):\n    f = open(argv[0], 'w')\n"
    body += "    os.write(2, b'of a library in C')\nrun_command(main)"
    script = 'exec "$0" -c "$1" "$2" >&- 2>&-'
    subprocess.run(["sh", "-c", script, sys.executable, body, str(tmp_path / "f")], check=True)
    assert (tmp_path / "f").read_text() == ""


def test_a_broken_pipe_other_than_the_output_keeps_its_traceback(monkeypatch):
    """Such as a library's socket: a silent 141 would hide it."""

    def main(argv: list[str]) -> int:
        raise BrokenPipeError(errno.EPIPE, "a socket")

    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(BrokenPipeError):
        run_command(main, outlives_output=True)


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_only_the_first_rank_of_a_machine_reports_a_mistake_at_once(rank, monkeypatch, capsys):
    """torchrun ends the others while they wait; one that remains reports its own mistake."""
    before_waiting = []

    def main(argv: list[str]) -> int:
        raise ConfigError("a mistake")

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(command.time, "sleep", lambda s: before_waiting.append(capsys.readouterr()))
    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 2
    assert [output.err for output in before_waiting] == ([""] if rank == "1" else [])
    assert capsys.readouterr().err == "error: a mistake\n"


# Ctrl-C


def test_ctrl_c_in_an_import_ends_the_process_and_later_raises_again():
    """numpy catches exceptions raised during its import, as the bare except does here."""
    # A shell makes background jobs ignore Ctrl-C; the test may be one.
    begin = "import os, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
    swallowed = "try: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n        except: pass"
    within = run_main(f"{begin}\n    with ended_by_ctrl_c():\n        {swallowed}")
    assert within.returncode == -signal.SIGINT
    sent = "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    after = run_main(f"{begin}\n    with ended_by_ctrl_c(): pass\n    {sent}")
    assert after.returncode == 130


def test_an_ignored_ctrl_c_stays_ignored():
    """As under nohup, and in background jobs of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ended_by_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# Folders


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for folder in (file, file / "run", file / "a/b"):
        with pytest.raises(ConfigError, match=f"out={folder}: {file} is a file, not a folder"):
            make_folder(folder, "out")
    if Path("/proc/self").exists():
        with pytest.raises(ConfigError, match="out=/proc/nothing/here: this folder cannot be"):
            make_folder(Path("/proc/nothing/here"), "out")
    make_folder(tmp_path / "a/b", "out")
    make_folder(tmp_path / "a/b", "out")
    assert (tmp_path / "a/b").is_dir()
    assert file.read_text() == "mine"
