"""A command from start to exit code: Ctrl-C, output that fails, errors as lines, folders."""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from cli.options import ConfigError, first_on_machine

Say = Callable[[str], None]  # prints or collects one line for the user

UNWRITABLE = ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM")
FIRST_RANK_SECONDS = 10  # in which the first rank of a machine tells a mistake


def run_command(
    main: Callable[[list[str]], int | None], *, outlives_output: bool = False
) -> NoReturn:
    """Run `main` on the command line and exit: 0, or the code that its error carries.

    An error with an `exit_code` becomes "error: ..." lines on stderr, a disk that is full or not
    ours to write becomes 5, Ctrl-C 130. Anything else is a bug of ours and keeps its traceback.

    outlives_output: the work goes on when its output can no longer be written. Without it a
    closed pipe ends the command with 141.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a console cannot show becomes "?"
    with lasting_output() if outlives_output else nullcontext():
        code = _ended(main, outlives_output)
    gc.freeze()  # or Python, on its way out, looks at each of torch's objects again: half a second
    sys.exit(code)


def _let_the_first_rank_tell() -> None:
    """Wait, on the other ranks of a machine, before a mistake is told.

    Under torchrun each of them finds the same mistake in a config. When the first has told it,
    torchrun ends them; one that is still here after the wait has a mistake of its own.
    """
    if not first_on_machine():
        time.sleep(FIRST_RANK_SECONDS)


def _ended(main: Callable[[list[str]], int | None], outlives_output: bool) -> int:
    try:
        code = main(sys.argv[1:]) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not outlives_output:
            _send_nowhere(sys.stdout)  # the reader (`| head`) has gone: nothing is wrong
            return 141
        code = exit_code_of(error)
        if code == 1:
            raise
        if code == ConfigError.exit_code:
            _let_the_first_rank_tell()
        with suppress(OSError):  # the exit code tells it, too
            for line in getattr(error, "problems", None) or [str(error)]:
                print(f"error: {line}", file=sys.stderr)
        return code


def _open_closed_streams() -> None:
    """Let streams that were closed when the process began (`>&-`, daemons) lead nowhere.

    Else Python has None in their place, and the next file that is opened gets their number, so that
    a library's message to stderr would land in it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


class LastingStream:
    """A text stream that becomes silent, instead of raising, once it cannot be written to.

    The terminal has gone (EIO), the reader of a pipe has (EPIPE), the disk of a log is full
    (ENOSPC). `other` is told, once.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name, self.other = stream, name, stream

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
        except BlockingIOError:  # a pipe that is full and must not wait: only this text is lost
            pass
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if not _send_nowhere(self._stream):
                self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            reason = getattr(error, "strerror", None) or error
            print(f"note: {self._name} cannot be written ({reason}); going on", file=self.other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, stdout and stderr that can no longer be written to are no error."""
    before = sys.stdout, sys.stderr
    out, err = LastingStream(sys.stdout, "stdout"), LastingStream(sys.stderr, "stderr")
    out.other, err.other = err, out
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def _send_nowhere(stream: TextIO) -> bool:
    """Let the file below a stream be the null device, with what it still holds; False if none is.

    What Python, or a library in C, writes there later succeeds and is lost.
    """
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return False
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
    return True


def shown(text: str, stream: TextIO) -> str:
    """The text as it is; for a terminal with control characters escaped, which it would obey."""
    if not stream.isatty():
        return text
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: m[0].encode("unicode_escape").decode(), text
    )


def make_folder(folder: Path, option: str) -> None:
    """Make a folder that an option names, and those above it.

    Raises ConfigError where one of them is a file, or cannot be made at all.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
        for path in (folder, *folder.parents):
            if path.is_symlink() and not path.exists():  # the disk it leads to may not be mounted
                where = f"{path} is a link to {os.readlink(path)}, which is not there"
                raise ConfigError(f"{option}={folder}: {where}") from error
            if path.is_file():
                where = f"{path} is a file, not a folder"
                raise ConfigError(f"{option}={folder}: {where}") from error
        raise ConfigError(f"{option}={folder}: such a folder cannot be made") from error


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once inside, by the signal's own action.

    For imports: numpy and torch swallow the KeyboardInterrupt that Python would raise in them, or
    abort with it.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, as under nohup, or someone else's
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_code_of(error: BaseException) -> int:
    """The process's exit code for an error; 1 for one that nobody foresaw."""
    if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in UNWRITABLE:
        return 5
    return getattr(error, "exit_code", 1)
