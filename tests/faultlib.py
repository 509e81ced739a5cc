"""Trainings in forked children of this process, to be killed, stopped and starved.

torch is imported once, by the parent, so that a child lives for tenths of a second. Bits are
compared by the SHA-256 of weights and optimizer state.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import struct
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import training.messages
import training.observer
import training.run
import training.startup
from cli.command import run_command
from cli.files import seal, write_file
from train import main
from training.checkpoint import MANIFEST, MODEL, OPTIM, read_manifest

ROOT = Path(__file__).parents[1]
LIMIT = 180.0  # seconds that any child may take: on a crowded machine too
# A store looks up the names of both ends; a name server that does not answer costs 5 seconds.
IMPATIENT = "timeout:1 attempts:1"
Hook = Callable[[], None]


def fork(argv: list[str], *, before: Hook | None = None, log: Path | None = None, **env) -> int:
    """Train in a child, as `python train.py ARGV` would; returns its process id.

    before: runs in the child first: to patch something, or to have another environment.
    """
    return fork_command(main, argv, before=before, log=log, **env)


def fork_command(
    command: Callable,
    argv: list[str],
    *,
    before: Hook | None = None,
    log: Path | None = None,
    **env,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.environ.update({name: str(value) for name, value in env.items()})
        handle = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        # Half the time of a tiny run, and no part of what is tested here.
        training.observer.peak_flops = lambda *arguments: None
        training.messages.sample_text = lambda *arguments, **options: ""
        sys.argv = ["train.py", *argv]
        if before is not None:
            before()
        run_command(command, outlives_output=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def ended(pid: int, limit: float = LIMIT) -> int:
    """Wait for a child; its exit code, or minus the signal that killed it."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"process {pid} did not end within {limit} s")


def train(argv: list[str], **options) -> int:
    """Train in a child to its end; the exit code."""
    return ended(fork(argv, **options))


class Job:
    """W ranks as torchrun starts them, without its 5 seconds of start-up: forked, with a store."""

    def __init__(
        self,
        world: int,
        argv: list[str],
        folder: Path,
        *,
        before: Hook | None = None,
        command: Callable = main,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank{rank}.log" for rank in range(world)]
        port, hang_up = store_host()
        weakref.finalize(self, hang_up)
        shared = {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RES_OPTIONS": IMPATIENT,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self.pids = [
            fork_command(
                command, argv, before=before, log=self.logs[r], RANK=r, LOCAL_RANK=r, **shared
            )
            for r in range(world)
        ]

    def wait(self, limit: float = LIMIT) -> list[int]:
        """The exit codes of all ranks."""
        return [ended(pid, limit) for pid in self.pids]

    def text(self) -> str:
        return "".join(log.read_text() for log in self.logs)


def store_host() -> tuple[int, Callable[[], None]]:
    """A process that holds a store, until the function given is called: (its port, the function).

    Not this process: the store's thread looks up the names of those who call, and a child forked
    meanwhile would find the resolver locked, for ever.
    """
    (port_here, port_there), (line_there, line_here) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.environ["RES_OPTIONS"] = IMPATIENT
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.close(line_here)
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), False)
        os.write(port_there, str(store.port).encode())
        os.close(port_there)
        os.read(line_there, 1)  # returns when this process, and all forked from it, hung up
        os._exit(0)
    os.close(port_there)
    os.close(line_there)
    port = int(os.read(port_here, 16))
    os.close(port_here)

    def hang_up() -> None:
        os.close(line_here)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)  # a child that a test left behind may keep the line open
            os.waitpid(pid, 0)

    return port, hang_up


def around_steps(before: Callable | None = None, after: Callable | None = None) -> Callable:
    """Return a take_step that calls before(state, setup), takes the step, and calls
    after(state, setup): to be put in the place of training.run.take_step."""
    inner = training.run.take_step

    def take_step(setup, data, state, *more) -> None:
        if before is not None:
            before(state, setup)
        inner(setup, data, state, *more)
        if after is not None:
            after(state, setup)

    return take_step


def train_ranks(world: int, argv: list[str], folder: Path, **options) -> None:
    """Train on W ranks to the end, which must be a good one."""
    if world == 1:
        assert train(argv, **options) == 0
        return
    job = Job(world, argv, folder, **options)
    assert job.wait() == [0] * world, job.text()


class Shared:
    """A few numbers that parent and children both see."""

    def __init__(self, n: int = 8) -> None:
        self.memory = mmap.mmap(-1, 8 * n)

    def __getitem__(self, i: int) -> float:
        return struct.unpack_from("d", self.memory, 8 * i)[0]

    def __setitem__(self, i: int, value: float) -> None:
        struct.pack_into("d", self.memory, 8 * i, value)


def bits(run: Path, step: int) -> tuple[str, str, str]:
    """What must be equal: weights, optimizer, and every number that can change an update."""
    folder = run / "checkpoints" / f"step-{step}"
    files = read_manifest(folder)["files"]
    return files[MODEL]["sha256"], files[OPTIM]["sha256"], (folder / "state.json").read_text()


def verified(run: Path) -> list[int]:
    """Steps whose checkpoint is intact; AssertionError for one that is there and is not."""
    steps = []
    for path in (run / "checkpoints").glob("step-*"):
        steps.append(read_manifest(path)["step"])
    return sorted(steps)


def write_sealed(folder: Path, manifest: dict) -> None:
    """Write a checkpoint's manifest with a matching seal, as an attacker would."""
    manifest.pop("seal", None)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "seal": seal(manifest)}))


def refit(folder: Path, name: str) -> None:
    """Make the manifest of a checkpoint match a file that was changed."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = write_file(folder / name, [(folder / name).read_bytes()])
    write_sealed(folder, manifest)


def leftovers(run: Path) -> list[Path]:
    return [path for path in run.rglob(".*") if path.name != ".lock"]


def wait_for(condition: Callable[[], bool], limit: float = LIMIT, pid: int = 0) -> None:
    """Look every millisecond until it is so; not beyond the end of the child `pid`."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        gone = pid and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert not gone or condition(), f"process {pid} ended before"
        time.sleep(0.001)


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "4m") -> Iterator[Path]:
    """A file system of `size` mounted at `folder`; skips the test where that is not allowed."""
    import subprocess

    import pytest

    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
