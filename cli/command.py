"""Run a command from start to exit code: errors as lines, lost output, Ctrl-C, folders."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from cli.options import ConfigError, first_on_machine
from cli.terminal import print_line

Say = Callable[[str], None]  # prints or collects one line for the user

UNWRITABLE = ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM")
FIRST_RANK_SECONDS = 10  # for the first rank of a machine to report a mistake


def run_command(
    main: Callable[[list[str]], int | None], *, outlives_output: bool = False
) -> NoReturn:
    """Run `main` on the command line and exit: 0, or the code of its error.

    An error with an `exit_code` becomes "error: ..." lines on stderr, its hints indented below. A
    full or read-only disk is 5, Ctrl-C 130. Any other exception is a bug in plainGPT and keeps its
    traceback.

    outlives_output: continue when stdout or stderr can no longer be written, as training should.
    Without it, a closed pipe ends the command with 141.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # print "?" for what a terminal cannot show
    with lasting_output() if outlives_output else nullcontext():
        code = _exit_code(main, outlives_output)
    gc.freeze()  # else Python looks through all of torch's objects at exit: half a second
    sys.exit(code)


def _exit_code(main: Callable[[list[str]], int | None], outlives_output: bool) -> int:
    try:
        code = main(sys.argv[1:]) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not outlives_output:
            _redirect_to_null(sys.stdout)  # the reader (`| head`) has gone: not an error
            return 141
        code = exit_code_of(error)
        if code == 1:
            raise
        if code == ConfigError.exit_code and not first_on_machine():
            # Under torchrun every rank finds the same mistake in the config. Once the first has
            # reported it, torchrun ends the others. One that is still here has its own mistake.
            time.sleep(FIRST_RANK_SECONDS)
        with suppress(OSError):  # the exit code is enough
            for line in getattr(error, "problems", None) or [str(error)]:
                print_line(f"error: {line}", sys.stderr)
            for line in getattr(error, "hints", []):
                print_line(f"  {line}", sys.stderr)
        return code


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error; 1 for an unexpected one."""
    if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in UNWRITABLE:
        return 5
    return getattr(error, "exit_code", 1)


# Output


def _open_closed_streams() -> None:
    """Open the null device for streams that were closed at start (`>&-`, daemons).

    Otherwise sys.stdout is None, and the next file to be opened gets the stream's number: a message
    that a C library prints to stderr would end up in it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


class LastingStream:
    """A text stream that falls silent, instead of raising, once it cannot be written to.

    The terminal has gone (EIO), the reader of a pipe has gone (EPIPE), or the disk of a log file is
    full (ENOSPC). One note about it goes to the `other` stream.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.other: TextIO | LastingStream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda: self._stream.flush())

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except UnicodeError:
            raise
        except BlockingIOError:  # a full non-blocking pipe: only this text is lost
            pass
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if not _redirect_to_null(self._stream):
                self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            reason = getattr(error, "strerror", None) or error
            print(f"note: {self._name} cannot be written ({reason}); continuing", file=self.other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, losing stdout or stderr is not an error."""
    before = sys.stdout, sys.stderr
    out, err = LastingStream(sys.stdout, "stdout"), LastingStream(sys.stderr, "stderr")
    out.other, err.other = err, out
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def _redirect_to_null(stream: TextIO) -> bool:
    """Redirect the file under a stream to the null device; return False if there is no file.

    Buffered text, and whatever Python or a C library writes later, is lost without an error.
    """
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return False
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
    return True


# Folders and Ctrl-C


def make_folder(folder: Path, option: str) -> None:
    """Create the folder that an option names, and its parents.

    Raises ConfigError if one of them is a file, or cannot be created at all.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
        reason = "this folder cannot be created"
        for path in (*reversed(folder.parents), folder):
            if path.is_symlink() and not path.exists():  # is its disk mounted?
                reason = f"{path} is a link to {os.readlink(path)}, which does not exist"
            elif path.is_file():
                reason = f"{path} is a file, not a folder"
        raise ConfigError(f"{option}={folder}: {reason}") from error


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once, by the signal's default action.

    For imports: numpy and torch swallow the KeyboardInterrupt that Python would raise inside them,
    or abort on it.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored (nohup), or handled by someone else
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
