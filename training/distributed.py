"""Who this process is among the ranks, and talking to them. The only reader of rank variables.

torchrun starts W processes and tells each its rank. Every rank holds the whole model; a step's M
micro-batches are dealt to the ranks in contiguous blocks, and their gradients are summed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data.options import ConfigError

POLL_SECONDS = 0.05  # between two looks at what another rank has posted
GRACE_SECONDS = (
    1.0  # after a time-out: for the others to time out as well, before naming who is lost
)


class LostRank(RuntimeError):
    """A wait for another rank came to its time-out, or the rank is gone."""

    exit_code = 7


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
    _shares: int = 0

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

        The others poll, so `make` may take hours; they give up `timeout` seconds after rank 0's
        last sign of life. Whatever rank 0 raised makes the others end too, quietly.
        """
        if self.store is None:
            return make()
        key = f"share/{self._shares}"
        self._shares += 1
        if not self.first:
            return self._await_share(key, what)
        with _heartbeat(self.store, f"{key}/alive"):
            try:
                result = make()
            except BaseException as error:
                code = getattr(error, "exit_code", 1)
                self.store.set(key, json.dumps({"failed": f"{type(error).__name__}", "code": code}))
                raise
        self.store.set(key, json.dumps({"result": result}))
        return result

    def _await_share(self, key: str, what: str) -> Any:
        last_beat, beats = time.monotonic(), -1
        while not self.store.check([key]):
            now = self.store.add(f"{key}/alive", 0)
            if now != beats:
                last_beat, beats = time.monotonic(), now
            if time.monotonic() - last_beat > self.timeout:
                raise LostRank(
                    f"rank {self.rank} waited for rank 0: {what}; no sign of life for "
                    f"{self.timeout:g} s (parallel.timeout)"
                )
            time.sleep(POLL_SECONDS)
        answer = json.loads(self.store.get(key))
        if "failed" in answer:
            raise SystemExit(answer["code"])  # rank 0 says why
        return answer["result"]

    def sum_ints(self, values: list[int], what: str) -> list[int]:
        """Element-wise sum over ranks; integers, so exact in any order."""
        if self.world == 1:
            return values
        total = torch.tensor(values, dtype=torch.int64, device=self.device)
        with self.waiting(what):
            dist.all_reduce(total)
        return total.tolist()

    def gather(self, values: Tensor, what: str) -> list[Tensor]:
        """The tensors of all ranks, in the order of the ranks; one shape and dtype everywhere."""
        if self.world == 1:
            return [values]
        values = values.to(self.device)
        parts = [torch.empty_like(values) for _ in range(self.world)]
        with self.waiting(what):
            dist.all_gather(parts, values)
        return [part.cpu() for part in parts]

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn a failed or timed-out communication into one line that says who is missing."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            missing = self._missing_ranks(what)
            who = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
            raise LostRank(
                f"rank {self.rank} waited for {who}: {what}; lost or silent for "
                f"{self.timeout:g} s (parallel.timeout)"
            ) from error

    def _missing_ranks(self, what: str) -> list[int]:
        """Every rank that is alive posts that it gave up on `what`; who does not is missing."""
        try:
            self.store.set(f"gave-up/{what}/{self.rank}", "1")
            time.sleep(GRACE_SECONDS)
            others = [rank for rank in range(self.world) if rank != self.rank]
            return [r for r in others if not self.store.check([f"gave-up/{what}/{r}"])]
        except RuntimeError:  # the store's host is gone too
            return []

    def close(self) -> None:
        if self.store is not None and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _heartbeat(store: dist.Store, key: str) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        while not done.wait(1.0):
            store.add(key, 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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
    if world == 1:
        return Ranks(timeout=timeout)
    _die_with_torchrun()
    rank, limit = int(os.environ["RANK"]), timedelta(seconds=timeout)
    base, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=limit)))
    # After a restart by torchrun the store still holds the dead attempt's addresses.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}", base)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return Ranks(rank, world, local_rank, local_world, timeout=timeout, store=store)


def _die_with_torchrun() -> None:
    """Be told to stop when torchrun is killed. Only under torchrun: else nohup would not work."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


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


def pick_backend(device: torch.device, say: Callable[[str], None] = print) -> str:
    """nccl between GPUs where this torch has it, else gloo."""
    if device.type != "cuda":
        return "gloo"
    if dist.is_nccl_available():
        return "nccl"
    say("note: this torch has no nccl; ranks talk through gloo, which is slower")
    return "gloo"


def default_threads(local_world: int) -> int:
    """CPU threads for this process: the cores it may use, shared among this machine's ranks."""
    if local_world == 1:
        return torch.get_num_threads()  # one per physical core, or OMP_NUM_THREADS
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // local_world)
