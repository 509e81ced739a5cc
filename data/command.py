"""A command from its start to its exit code: Ctrl-C, errors as lines, folders that options name."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from data.options import ConfigError

UNWRITABLE = ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM")


def run_command(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run `main` on the command line and exit: 0, or the code that its error carries.

    An error with an `exit_code` becomes "error: ..." lines on stderr, a disk that is full or not
    ours to write becomes 5, Ctrl-C 130. Anything else is a bug of ours and keeps its traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a console cannot show becomes "?"
    try:
        code = main(sys.argv[1:]) or 0
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader (`| head`) has gone: nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:
        code = exit_code_of(error)
        if code == 1:
            raise
        for line in getattr(error, "problems", None) or [str(error)]:
            print(f"error: {line}", file=sys.stderr)
    gc.freeze()  # or Python, on its way out, looks at each of torch's objects again: half a second
    sys.exit(code)


def make_folder(folder: Path, option: str) -> None:
    """Make a folder that an option names, and those above it.

    Raises ConfigError where one of them is a file, or cannot be made at all.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        above = [folder, *folder.parents]
        file = next((path for path in above if path.is_file()), error.filename)
        raise ConfigError(f"{option}={folder}: {file} is a file, not a folder") from error
    except FileNotFoundError as error:  # /proc, say
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
