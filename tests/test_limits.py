"""Cores and memory from affinity and cgroups, with files as kernels write them."""

from __future__ import annotations

import os

import pytest

from cli import limits
from data.encode import n_workers
from training.distributed import default_threads

V1 = "8:cpu,cpuacct:/docker/1\n7:memory:/docker/1\n1:name=systemd:/docker/1\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(cores, the text of /proc/self/cgroup, {file below /sys/fs/cgroup: its text})."""

    def pretend(cores: int, membership: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        (tmp_path / "membership").write_text(membership)
        monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(limits, "MEMBERSHIP", tmp_path / "membership")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)

    return pretend


@pytest.mark.parametrize(
    "membership, files, cores",
    [
        # Version 2. In a container the own group is the top folder.
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/\n", {"cpu.max": "399999 100000"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),  # at least 1
        ("0::/\n", {"cpu.max": "25000 10000"}, 2),  # another period
        ("0::/\n", {"cpu.max": "6400000 100000"}, 16),  # affinity is less
        ("0::/\n", {"cpu.max": "max 100000"}, 16),
        ("0::/\n", {}, 16),
        ("0::/\n", {"cpu.max": "damaged"}, 16),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000", "a/cpu.max": "400000 100000"}, 2),
        ("0::/docker/1\n", {"cpu.max": "200000 100000"}, 2),  # a path that is not mounted here
        ("0::/../slice/x\n", {"cpu.max": "200000 100000"}, 2),  # beside the namespace's top
        # Version 1
        (V1, {"cpu,cpuacct/docker/1/cpu.cfs_quota_us": "150000",
              "cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000"}, 1),
        (V1, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        (V1, {"cpu/cpu.cfs_quota_us": "300000"}, 16),
        # Both: limits in version 1, the rest in version 2
        (V1 + "0::/x\n", {"unified/x/cgroup.procs": "1", "cpu/cpu.cfs_quota_us": "200000",
                          "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("", {"cpu.max": "100000 100000"}, 16),  # in no group
    ],
)  # fmt: skip
def test_usable_cores(machine, membership, files, cores):
    machine(16, membership, files)
    assert limits.usable_cores() == cores


def test_without_cgroups(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "MEMBERSHIP", tmp_path / "none")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert limits.usable_cores() == 5 and limits.cgroup_memory_left() is None
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert limits.usable_cores() == 1


def test_threads_and_workers_follow_the_usable_cores(machine, monkeypatch):
    machine(16, "0::/\n", {"cpu.max": "400000 100000"})
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert [default_threads(ranks) for ranks in (1, 2, 3, 16)] == [4, 2, 1, 1]
    assert n_workers(None, 1 << 30) == 4
    assert n_workers(7, 1 << 30) == 7  # as set
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)  # OMP_NUM_THREADS, say
    assert default_threads(1) == 3


@pytest.mark.parametrize(
    "membership, files, left",
    [
        ("0::/\n", {"memory.max": "1000", "memory.current": "300"}, 700),
        ("0::/\n", {"memory.max": "1000", "memory.current": "300",
                    "memory.stat": "anon 100\ninactive_file 150"}, 850),
        ("0::/\n", {"memory.max": "1000", "memory.current": "1200"}, 0),
        ("0::/\n", {"memory.max": "max", "memory.current": "300"}, None),
        ("0::/a\n", {"a/memory.max": "1000", "a/memory.current": "300",
                     "memory.max": "2000", "memory.current": "1900"}, 100),
        (V1, {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "400",
              "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50"}, 650),
        (V1, {}, None),
    ],
)  # fmt: skip
def test_memory_left(machine, membership, files, left):
    machine(16, membership, files)
    assert limits.cgroup_memory_left() == left
