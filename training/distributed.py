"""Who this process is among the ranks, and talking to them. The only reader of rank variables.

torchrun starts W processes and tells each its rank. Every rank holds the whole model; a step's M
micro-batches are dealt to the ranks in contiguous blocks, and their gradients are summed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cli.command import Say, exit_code_of
from cli.limits import usable_cores
from cli.options import ConfigError

# Signs of life: how the others can tell a busy rank from a lost one.

BEAT_SECONDS = 1.0


class Pulse:
    """A thread that counts up alive/RANK in the store: this process is there, however busy."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(store, rank), daemon=True)
        self._thread.start()

    def _beat(self, store: dist.Store, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # the store's host has gone: nobody listens
            while not self._done.is_set():
                store.add(f"alive/{rank}", 1)
                self._done.wait(BEAT_SECONDS)

    def stop(self) -> None:
        """End the thread; waits for a beat under way."""
        self._done.set()
        self._thread.join(BEAT_SECONDS)


POLL_SECONDS = 0.05  # at most, between two looks at what another rank has posted
SILENCE_SECONDS = 2.5  # a rank that gives none for so long is named as lost


class LostRank(RuntimeError):
    """A wait for another rank came to its time-out, or the rank is gone."""

    exit_code = 7


@dataclass(frozen=True)
class Launch:
    """What started this process and may start it again: torchrun, a batch system.

    names: by which a later start of the same launch can be known. proof: those names that nothing
    but an earlier start of this launch can have left.
    """

    names: tuple[str, ...] = ()
    proof: tuple[str, ...] = ()


@dataclass
class Ranks:
    """This process's place. A single process is rank 0 of 1 and never communicates."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0  # on this machine
    local_world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = 600.0
    store: dist.Store | None = None
    pulse: Pulse | None = None
    launch: Launch = Launch()
    apart: bool = False  # rank 0 may be at work alone (saving, a report): set on all ranks alike
    _meetings: int = 0

    @property
    def first(self) -> bool:
        """Rank 0 alone writes files and speaks."""
        return self.rank == 0

    def start(self, device: str) -> None:
        """Pick this rank's device and open the channel to the others.

        Raises ConfigError for a device that is not there.
        """
        self.device = pick_device(device, self.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.store is not None:
            with self.waiting("joining the other ranks"):
                dist.init_process_group(
                    pick_backend(self.device),
                    store=dist.PrefixStore("group", self.store),
                    rank=self.rank,
                    world_size=self.world,
                    timeout=timedelta(seconds=self.timeout),
                )

    def share(self, make: Callable[[], Any], what: str) -> Any:
        """Rank 0 runs `make`; everyone gets its result, anything JSON can hold.

        It may take hours: the others give up `timeout` seconds after rank 0's last sign of life.
        Whatever rank 0 raises makes the others end too, quietly, with the same exit code.
        """
        if self.store is None:
            return make()
        key = self._new_key()
        with self.waiting(what):
            if self.first:
                try:
                    answer = {"result": make()}
                    self.store.set(key, json.dumps(answer))
                except BaseException as error:
                    with contextlib.suppress(dist.DistError):  # without a store nobody listens
                        self.store.set(key, json.dumps({"exit_code": _exit_code(error)}))
                    raise
            else:
                self._poll({0: key}, what)
                answer = json.loads(self._ask(lambda: self.store.get(key), self.timeout))
                if "exit_code" in answer:
                    raise SystemExit(answer["exit_code"])  # rank 0 says why
            return answer["result"]

    def meet(self, what: str) -> None:
        """Wait until all ranks are here, however long those that show signs of life may take."""
        if self.store is None:
            return
        key = self._new_key()
        with self.waiting(what):
            self.store.set(f"{key}/{self.rank}", "here")
        self._poll({rank: f"{key}/{rank}" for rank in range(self.world)}, what)

    def _rejoin(self, what: str) -> None:
        """Before an exchange, all of whose time-out may be over before rank 0 comes back from work
        of its own: wait for it as long as it shows signs of life."""
        if self.apart:
            self.apart = False
            self.share(lambda: None, what)

    def _new_key(self) -> str:
        self._meetings += 1
        return f"meeting/{self._meetings}"

    def _poll(self, keys: dict[int, str], what: str) -> None:
        """Wait until each rank has posted its key. Raises LostRank for one that has gone silent."""
        seen = {rank: (-1, time.monotonic()) for rank in keys}  # (beats, when they last grew)
        pause = 0.001  # most waits are short

        def look() -> dict[int, int | None]:
            missing = [rank for rank, key in keys.items() if not self.store.check([key])]
            gone = [rank for rank in missing if self.store.check([f"gone/{rank}"])]
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
        """The result of `query`, which asks the store, in a thread of its own: where the network is
        gone, torch would wait for the answer for ever."""
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
        return self.store.add(f"alive/{rank}", 0)

    def sum_ints(self, values: list[int], what: str) -> list[int]:
        """Element-wise sum over ranks; integers, so exact in any order."""
        if self.world == 1:
            return values
        self._rejoin(what)
        total = torch.tensor(values, dtype=torch.int64, device=self.device)
        with self.waiting(what):
            dist.all_reduce(total)
            return total.tolist()  # nccl only begins above; here its result is waited for

    def gather(self, values: Tensor, what: str) -> list[Tensor]:
        """The tensors of all ranks, in the order of the ranks; one shape and dtype everywhere."""
        if self.world == 1:
            return [values]
        self._rejoin(what)
        values = values.to(self.device)
        parts = [torch.empty_like(values) for _ in range(self.world)]
        with self.waiting(what):
            dist.all_gather(parts, values)
            return [part.cpu() for part in parts]

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn a failed or timed-out communication into one line that says who is missing.

        Other errors pass: a bug in the model, which may run inside (DDP sends during backward; a
        GPU reports a fault where its result is waited for), keeps its traceback.
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
        """The ranks that give no sign of life now, though they have not given up themselves."""

        def look() -> list[int]:
            self.store.set(f"gave-up/{self.rank}", "1")
            others = [rank for rank in range(self.world) if rank != self.rank]
            before = {rank: self._beats(rank) for rank in others}
            time.sleep(SILENCE_SECONDS)
            silent = [rank for rank in others if self._beats(rank) == before[rank]]
            return [rank for rank in silent if not self.store.check([f"gave-up/{rank}"])]

        try:
            return self._ask(look, 2 * SILENCE_SECONDS)
        except RuntimeError:  # the store's host is gone too
            return []

    def close(self, failed: bool = False) -> None:
        """Leave the others, in order if all is well.

        failed: an exception is on its way up. nccl's own way out would wait for ranks that are
        waiting for this one, and what went wrong would be told after their time-out only.
        """
        if self.pulse is not None:
            self.pulse.stop()
        if self.store is not None and failed:
            with contextlib.suppress(RuntimeError):  # the store's host has gone: nobody waits
                self._ask(lambda: self.store.set(f"gone/{self.rank}", "1"), SILENCE_SECONDS)
        if self.store is None or not dist.is_initialized():
            return
        if not (failed and dist.get_backend() == "nccl"):
            dist.destroy_process_group()


def failed_to_communicate(error: RuntimeError) -> bool:
    """Whether torch raised this because another rank, or the store, could not be reached.

    The store and nccl have types of their own. Gloo raises plain RuntimeErrors, and begins their
    messages with the place in its source: [.../gloo/transport/tcp/pair.cc:547].
    """
    gloo = re.match(r"\[\S*gloo\S*:\d+\] |Gloo connectFullMesh failed", str(error))
    return isinstance(error, dist.DistError) or gloo is not None


def _exit_code(error: BaseException) -> int:
    """What rank 0's process will exit with, so that the others can do the same."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 130 if isinstance(error, KeyboardInterrupt) else exit_code_of(error)


def join_ranks(mode: str, timeout: float) -> Ranks:
    """Find the other ranks if torchrun started this process; they can `share` from here on.

    Raises ConfigError for mode=ddp without torchrun, mode=none with it.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if mode == "ddp" and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "parallel.mode=ddp needs several processes: start with "
            "`torchrun --nproc_per_node=N train.py ...`"
        )
    if mode == "none" and world > 1:
        raise ConfigError(f"parallel.mode=none, but torchrun started {world} processes")
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
    # After a restart by torchrun the store still holds the dead attempt's addresses.
    attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = dist.PrefixStore(attempt, base)
    pulse = Pulse(dist.PrefixStore(attempt, base.clone()), rank)  # one store is one thread's
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = Ranks(rank, world, local_rank, local_world, timeout=timeout, store=store, pulse=pulse)
    ranks.launch = find_launch()
    return ranks


def find_launch() -> Launch:
    """Who started this process: torchrun's agent and run, Slurm's job.

    An id alone proves nothing, as two launches may have the same: torchrun's by its user's choice,
    a job's where two commands are typed in it. It does once torchrun or Slurm says that it has
    started this again. torchrun's agent, the parent process, is of one launch only.
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
    """When a process began, in ticks since the machine did: its number may be used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # no Linux
        return "?"


def _die_with_torchrun() -> None:
    """Be told to stop when torchrun is killed. Only under torchrun: else nohup would not work."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    # It may be dead already; then init has inherited us (in a container init may be torchrun).
    if os.getppid() == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes():
        raise LostRank("torchrun has been killed")


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """auto: this rank's GPU, else Apple's, else the CPU. Raises ConfigError if it is not there."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        if n_gpus:
            return pick_device("cuda", local_rank)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"run.device={name}: allowed are auto, cpu, cuda, cuda:N, mps") from None
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= n_gpus:
            raise ConfigError(
                f"run.device={name}: GPU {index} is not there; torch sees {n_gpus} CUDA GPUs. "
                "Use --device=cpu, or fewer processes"
            )
        return torch.device("cuda", index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("run.device=mps: torch sees no Apple GPU here. Use --device=cpu")
    return device


def make_cublas_deterministic() -> None:
    """Let cuBLAS give the same bits each time; to be called before the GPU computes anything."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pick_backend(device: torch.device, say: Say = print) -> str:
    """nccl between GPUs where this torch has it, else gloo."""
    if device.type != "cuda":
        return "gloo"
    if dist.is_nccl_available():
        return "nccl"
    say("note: this torch has no nccl; ranks talk through gloo, which is slower")
    return "gloo"


def default_threads(local_world: int) -> int:
    """CPU threads for this process: the cores it may use, shared among this machine's ranks."""
    if local_world == 1:  # torch's choice: one per physical core, or OMP_NUM_THREADS
        return min(torch.get_num_threads(), usable_cores())
    return max(1, usable_cores() // local_world)
