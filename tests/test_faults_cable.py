"""Two ranks on two "machines": network namespaces, joined by a cable that is pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from faultlib import wait_for

pytestmark = pytest.mark.faults
LIMIT = 5.0  # --timeout


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"ip {' '.join(words)}: {done.stderr.strip()}; this needs root")


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two namespaces with addresses 10.99.0.1 and 10.99.0.2 on their ends of one cable, "eth0"."""
    if shutil.which("ip") is None:
        pytest.fail("this needs root and the command `ip` (package iproute2)")
    names = [f"plaingpt{os.getpid()}-{rank}" for rank in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = ["type", "veth", "peer", "name", "eth0", "netns"]
        ip("-n", names[0], "link", "add", "eth0", *ends, names[1])
        for rank, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.99.0.{rank + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(machines: list[str], argv: list[str], folder: Path) -> list[subprocess.Popen]:
    """A rank in each; the first holds the store, as it does without torchrun."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    shared |= {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
    jobs = []
    for rank, name in enumerate(machines):
        env = {**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", name, sys.executable, "train.py", *argv]
        log = open(folder / f"rank{rank}.log", "w")  # noqa: SIM115
        jobs.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
    return jobs


@pytest.mark.parametrize("pulled", ["in the middle of steps", "while rank 0 is at work alone"])
def test_a_cable_that_is_pulled_ends_both_ranks(pulled, machines, tiny_argv, tmp_path):
    """Nothing closes the connection: the time-out alone can tell."""
    run = {"max_steps": 10**6, "timeout": LIMIT, "quiet": True, "checkpoint_interval": 10**6}
    often = {"interval": 1} if "alone" in pulled else {"interval": 10**6}
    argv = tiny_argv(tmp_path / "run", **run, eval_interval=10**6, **often)
    jobs = start(machines, argv, tmp_path)
    try:
        metrics = tmp_path / "run/metrics.jsonl"
        wait_for(lambda: metrics.exists() and '"loss"' in metrics.read_text())
        time.sleep(1)
        ip("-n", machines[1], "link", "set", "eth0", "down")
        began = time.monotonic()
        codes = [job.wait(60) for job in jobs]
        seconds = time.monotonic() - began
    finally:
        for job in jobs:
            job.kill()
    told = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(2)]
    assert codes == [7, 7], told
    for rank, text in enumerate(told):
        assert f"error: rank {rank} waited for " in text, text
    assert "waited for rank 1: step " in told[0]
    assert seconds < 3 * LIMIT, told
