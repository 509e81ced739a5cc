"""The live page of a run (--live): served by a process of its own, which ends with the run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from cli.command import Say

ROOT = Path(__file__).parents[1]


class LivePage:
    """A server that follows all runs beside `folder`, which the page shows first.

    Nothing here can hurt training: it only holds the pipe whose end tells the server that the run
    has ended, even by a kill.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        folder = folder.resolve()
        options = ["--serve", "--until_eof=true", f"--show={folder.name}"]
        argv = [sys.executable, "-m", "tools.report", str(folder.parent), *options]
        line = b""
        try:
            # In a session of its own, Ctrl-C leaves it alone: it shows the end of the run, too.
            self.process = subprocess.Popen(
                argv,
                cwd=ROOT,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
        except OSError as error:
            line = str(error).encode()
        text = line.decode(errors="replace").strip()
        started = text.startswith("live page: ")
        say(text if started else f"note: the live page did not start ({text}); training continues")

    def close(self) -> None:
        """Tell the server that the run has ended. It shows the end and ends by itself."""
        with contextlib.suppress(OSError, AttributeError):
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
