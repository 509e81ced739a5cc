"""Ranks: this process's place among them, and communication that always ends.

torchrun starts W processes and tells each its rank. Every rank holds the whole model; the M
micro-batches of a step are dealt to the ranks in contiguous blocks, and their gradients are summed.
The rank variables of the environment are read here only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cli.command import exit_code_of
from cli.limits import usable_cores
from cli.options import ConfigError
from training.device import hardware_name

BEAT_SECONDS = 1.0  # between two heartbeats of a rank
POLL_SECONDS = 0.05  # longest pause between two looks at what other ranks have posted
SILENCE_SECONDS = 2.5  # a rank without a heartbeat for so long is named as lost


class LostRank(RuntimeError):
    """Another rank is gone, or did not answer within the time-out."""

    exit_code = 7


class Pulse:
    """A thread that counts up alive/RANK in the store, so that others can tell a busy rank from a
    lost one."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(store, rank), daemon=True)
        self._thread.start()

    def _beat(self, store: dist.Store, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # the store's host is gone, and so are all readers
            while not self._done.is_set():
                store.add(f"alive/{rank}", 1)
                self._done.wait(BEAT_SECONDS)

    def stop(self) -> None:
        """End the thread, after a beat that may be under way."""
        self._done.set()
        self._thread.join(BEAT_SECONDS)


@dataclass(frozen=True)
class Launch:
    """What started this process and may start it again: torchrun, a batch system.

    names: identify the launch to a later start. proof: those of the names that only an earlier
    start of the same launch can have left behind.
    """

    names: tuple[str, ...] = ()
    proof: tuple[str, ...] = ()


@dataclass
class Ranks:
    """This process's place. A single process is rank 0 of 1 and never communicates.

    Each wait has a time-out. A wait that fails raises LostRank, which names what was waited for
    and, as far as heartbeats tell, which rank is missing.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # on this machine
    local_world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = 600.0
    store: dist.Store | None = None
    pulse: Pulse | None = None
    launch: Launch = Launch()
    apart: bool = False  # rank 0 may be working alone (saving, a report); set on all ranks alike
    _meetings: int = 0

    @property
    def _store(self) -> dist.Store:
        assert self.store is not None  # a single process never communicates
        return self.store

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes files and prints."""
        return self.rank == 0

    @property
    def about(self) -> dict[str, object]:
        """What a checkpoint's manifest says of the processes and their hardware."""
        return {
            "world": self.world,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "hardware": hardware_name(self.device),
            "python": platform.python_version(),
        }

    def start(self, device: str) -> None:
        """Pick this rank's device and connect to the other ranks.

        Raises ConfigError for a device that is not there.
        """
        self.device = pick_device(device, self.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.store is not None:
            with self.waiting("joining the other ranks"):
                dist.init_process_group(
                    pick_backend(self.device, announce=self.first),
                    store=dist.PrefixStore("group", self.store),
                    rank=self.rank,
                    world_size=self.world,
                    timeout=timedelta(seconds=self.timeout),
                )
            # Gloo connects pair by pair: a rank that failed now, with a message of its own, would
            # look like a lost one to a rank that is still connecting.
            self.meet("joining the other ranks")

    # Through the store: waits as long as the others give signs of life

    def share(self, make: Callable[[], Any], what: str) -> Any:
        """Run `make` on rank 0 and return its result on all ranks; it must be valid JSON.

        It may take hours: the others give up `timeout` seconds after rank 0's last heartbeat. If
        it raises, the others end quietly with the same exit code, and rank 0 says why.
        """
        if self.store is None:
            return make()
        key = self._new_key()
        with self.waiting(what):
            if self.first:
                try:
                    answer = {"result": make()}
                    self._store.set(key, json.dumps(answer))
                except BaseException as error:
                    with contextlib.suppress(dist.DistError):  # without a store nobody listens
                        self._store.set(key, json.dumps({"exit_code": _exit_code(error)}))
                    raise
            else:
                self._poll({0: key}, what)
                answer = json.loads(self._ask(lambda: self._store.get(key), self.timeout))
                if "exit_code" in answer:
                    raise SystemExit(answer["exit_code"])
            return answer["result"]

    def meet(self, what: str) -> None:
        """Wait until all ranks are here, however long those that are alive may take."""
        if self.store is None:
            return
        key = self._new_key()
        with self.waiting(what):
            self._store.set(f"{key}/{self.rank}", "here")
        self._poll({rank: f"{key}/{rank}" for rank in range(self.world)}, what)

    def _new_key(self) -> str:
        self._meetings += 1
        return f"meeting/{self._meetings}"

    def _poll(self, keys: dict[int, str], what: str) -> None:
        """Wait until each rank has posted its key. Raises LostRank for one that has gone silent."""
        seen = {rank: (-1, time.monotonic()) for rank in keys}  # (beats, when they last grew)
        pause = 0.001  # most waits are short

        def look() -> dict[int, int | None]:
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            gone = [rank for rank in missing if self._store.check([f"gone/{rank}"])]
            return {rank: None if rank in gone else self._beats(rank) for rank in missing}

        with self.waiting(what):
            while missing := self._ask(look, self.timeout):
                for rank, beats in missing.items():
                    now = time.monotonic()
                    if beats is None:
                        raise LostRank(self._lost([rank], what, "it has ended with an error"))
                    if beats != seen[rank][0]:
                        seen[rank] = beats, now
                    elif now - seen[rank][1] > self.timeout:
                        raise LostRank(self._lost([rank], what, "no sign of life"))
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS)

    def _ask(self, query: Callable[[], Any], limit: float) -> Any:
        """Return the result of `query`, which asks the store, from a thread of its own: when the
        network is down, torch would wait for the answer for ever."""
        answers: queue.SimpleQueue = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((query(), None))
            except Exception as error:
                answers.put((None, error))

        threading.Thread(target=ask, daemon=True).start()
        try:
            answer, error = answers.get(timeout=limit)
        except queue.Empty:
            raise dist.DistNetworkError(f"the store gave no answer in {limit:g} s") from None
        if error is not None:
            raise error
        return answer

    def _beats(self, rank: int) -> int:
        return self._store.add(f"alive/{rank}", 0)

    # Through gloo or nccl: waits for `timeout` seconds

    def sum_ints(self, values: list[int], what: str) -> list[int]:
        """Return the element-wise sum over ranks; of integers, so it is exact in any order."""
        if self.world == 1:
            return values
        self._rejoin(what)
        total = torch.tensor(values, dtype=torch.int64, device=self.device)
        with self.waiting(what):
            dist.all_reduce(total)
            return total.tolist()  # nccl only begins above; its result is waited for here

    def gather(self, values: Tensor, what: str) -> list[Tensor]:
        """Return the tensors of all ranks, by rank; they have the same shape and dtype."""
        if self.world == 1:
            return [values]
        self._rejoin(what)
        values = values.to(self.device)
        parts = [torch.empty_like(values) for _ in range(self.world)]
        with self.waiting(what):
            dist.all_gather(parts, values)
            return [part.cpu() for part in parts]

    def check_same(self, tensors: Iterable[Tensor], what: str) -> None:
        """Raise RuntimeError unless all ranks hold these tensors with the same bits."""
        if self.world == 1:
            return
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64).clone()
        for rank, other in enumerate(self.gather(own, f"comparing the {what}")):
            if not torch.equal(other, own):
                raise RuntimeError(f"rank {rank} starts with other {what} than rank {self.rank}")

    def _rejoin(self, what: str) -> None:
        """Wait for rank 0 as long as it is alive: it may be working alone for longer than the
        time-out of the exchange that follows."""
        if self.apart:
            self.apart = False
            self.share(lambda: None, what)

    # When a wait fails

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn a failure of communication into a LostRank that says who is missing.

        Other errors pass. The model may run inside (DDP sends during backward, and a GPU reports a
        fault where its result is waited for), and a bug in it keeps its traceback.
        """
        try:
            yield
        except RuntimeError as error:
            if not failed_to_communicate(error):
                raise
            silent = self._silent_ranks()
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            how = re.sub(r"^\[\S+:\d+\] ", "", first_line)  # gloo begins with its source line
            raise LostRank(self._lost(silent, what, how)) from error

    def _lost(self, ranks: list[int], what: str, how: str) -> str:
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "another rank"
        limit = f"parallel.timeout={self.timeout:g} s"
        return f"rank {self.rank} waited for {who}: {what}; {how} ({limit})"

    def _silent_ranks(self) -> list[int]:
        """Return the ranks without a heartbeat that have not given up waiting themselves."""

        def look() -> list[int]:
            self._store.set(f"gave-up/{self.rank}", "1")
            others = [rank for rank in range(self.world) if rank != self.rank]
            before = {rank: self._beats(rank) for rank in others}
            time.sleep(SILENCE_SECONDS)
            silent = [rank for rank in others if self._beats(rank) == before[rank]]
            return [rank for rank in silent if not self._store.check([f"gave-up/{rank}"])]

        try:
            return self._ask(look, 2 * SILENCE_SECONDS)
        except RuntimeError:  # the store's host is gone, too
            return []

    def close(self, failed: bool = False) -> None:
        """Leave the other ranks.

        failed: an exception is on its way up. nccl's orderly exit would wait for ranks that wait
        for this one, and the error would be printed only after their time-out.
        """
        if self.pulse is not None:
            self.pulse.stop()
        if self.store is not None and failed:
            with contextlib.suppress(RuntimeError):  # the store's host is gone: nobody waits
                self._ask(lambda: self._store.set(f"gone/{self.rank}", "1"), SILENCE_SECONDS)
        if self.store is None or not dist.is_initialized():
            return
        if not (failed and dist.get_backend() == "nccl"):
            dist.destroy_process_group()


def failed_to_communicate(error: RuntimeError) -> bool:
    """Whether torch raised this because another rank or the store could not be reached.

    The store and nccl have error types of their own. Gloo raises plain RuntimeErrors that begin
    with a place in its source: [.../gloo/transport/tcp/pair.cc:547].
    """
    gloo = re.match(r"\[\S*gloo\S*:\d+\] |Gloo connectFullMesh failed", str(error))
    return isinstance(error, dist.DistError) or gloo is not None


def _exit_code(error: BaseException) -> int:
    """Return the code that rank 0's process will exit with, for the others to do the same."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 130 if isinstance(error, KeyboardInterrupt) else exit_code_of(error)


# Joining


def join_ranks(mode: str, timeout: float) -> Ranks:
    """Find the other ranks, if torchrun started this process. `share` works from here on.

    Raises ConfigError for mode=ddp without torchrun and for mode=none with it.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if mode == "ddp" and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "parallel.mode=ddp: needs several processes; start with "
            "`torchrun --nproc_per_node=N train.py ...`"
        )
    if mode == "none" and world > 1:
        raise ConfigError(
            f"parallel.mode=none: but torchrun started {world} processes; remove --mode, or start "
            "with python"
        )
    _die_with_torchrun()
    if world == 1:
        return Ranks(timeout=timeout, launch=find_launch())
    rank, limit = int(os.environ["RANK"]), timedelta(seconds=timeout)
    try:
        base, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=limit)))
    except dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LostRank(
            f"rank {rank} waited for the store at {where} (MASTER_ADDR:MASTER_PORT), joining the "
            f"other ranks; {str(error).splitlines()[0]} (parallel.timeout={timeout:g} s)"
        ) from error
    # After a restart by torchrun the store still holds the addresses of the attempt that died.
    attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Ranks(
        rank,
        world,
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        timeout=timeout,
        store=dist.PrefixStore(attempt, base),
        pulse=Pulse(dist.PrefixStore(attempt, base.clone()), rank),  # a store serves one thread
        launch=find_launch(),
    )


def find_launch() -> Launch:
    """Find out who started this process: torchrun's agent and run, Slurm's job.

    An id alone is no proof, as two launches may share it: torchrun's is chosen by the user, and two
    commands may run in one Slurm job. It is one once torchrun or Slurm says that it has restarted
    this process. torchrun's agent, the parent process, belongs to one launch only.
    """
    env, names, proof = os.environ, [], []
    run_id = env.get("TORCHELASTIC_RUN_ID")
    if run_id is not None:
        names.append(f"agent {os.getppid()} of {_began(os.getppid())} on {socket.gethostname()}")
        proof.append(names[0])
    for what, own_id, restarts in (
        ("torchrun", "" if run_id == "none" else run_id, "TORCHELASTIC_RESTART_COUNT"),
        ("slurm", env.get("SLURM_JOB_ID"), "SLURM_RESTART_COUNT"),
    ):
        if own_id:
            names.append(f"{what} {own_id}")
            if env.get(restarts, "0") != "0":
                proof.append(names[-1])
    return Launch(tuple(names), tuple(proof))


def _began(pid: int) -> str:
    """Return when a process began, in ticks since boot: its number may be used again later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # not on Linux
        return "?"


def _die_with_torchrun() -> None:
    """Get SIGTERM when torchrun is killed. Under torchrun only: otherwise nohup would not work."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    # If it is dead already, init is our parent now (in a container torchrun itself may be init).
    if os.getppid() == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes():
        raise LostRank("torchrun has been killed")


# What a rank computes on


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device; for auto this rank's GPU, else Apple's, else the CPU.

    Raises ConfigError if it is not there.
    """
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if n_gpus else "mps" if has_mps else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"run.device={name}: must be auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= n_gpus:
            raise ConfigError(
                f"run.device={name}: GPU {index} is not there; torch sees {n_gpus} CUDA GPUs. "
                "Use --device=cpu, or fewer processes"
            )
        return torch.device("cuda", index)
    if device.type == "mps" and not has_mps:
        raise ConfigError("run.device=mps: torch sees no Apple GPU here; use --device=cpu")
    return device


def pick_backend(device: torch.device, announce: bool = True) -> str:
    """Return nccl between GPUs if this torch has it, else gloo."""
    if device.type != "cuda":
        return "gloo"
    if dist.is_nccl_available():
        return "nccl"
    if announce:
        print("note: this torch was built without nccl; using gloo, which is slower")
    return "gloo"


def default_threads(local_world: int) -> int:
    """Return the CPU threads of this process: its share of the cores that it may use."""
    if local_world == 1:  # torch's choice: one per physical core, or OMP_NUM_THREADS
        return min(torch.get_num_threads(), usable_cores())
    return max(1, usable_cores() // local_world)


def make_cublas_deterministic() -> None:
    """Make cuBLAS give the same bits each time. Must run before the GPU computes anything."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
