"""Cores and memory that this process may use: its affinity, and the limits of its cgroups.

Containers and batch systems set such limits; the machine's own figures do not show them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores by affinity, or by a CPU quota, rounded down, where that is less; at least 1.

    More threads than a quota allows would all be stopped for the rest of each period.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    for group in _groups("cpu"):
        words = _words(group / "cpu.max")  # version 2: "150000 100000", or "max 100000"
        words = words or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # -1: none
            cores = min(cores, int(words[0]) // int(words[1]))
    return max(1, cores)


def cgroup_memory_left() -> int | None:
    """Bytes below the nearest memory limit of a cgroup; None without one.

    Files that were read and could be dropped (page cache not used of late) do not count.
    """
    left = []
    for group in _groups("memory"):
        for names in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):  # version 2, 1
            limit, used = (_words(group / f"memory.{name}") for name in names)
            if limit and used and limit[0].isdecimal():
                stat = _words(group / "memory.stat")
                figures = dict(zip(stat[::2], stat[1::2], strict=False))
                cache = figures.get("total_inactive_file") or figures.get("inactive_file") or 0
                left.append(max(0, int(limit[0]) - int(used[0]) + int(cache)))
    return min(left, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of all around it; each may set a limit.

    A container often sees the top folder only, as its own, whatever the path says.
    """
    for line in _read(MEMBERSHIP).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mounts = [CGROUPS, CGROUPS / "unified"]
        elif controller in controllers.split(","):
            mounts = [CGROUPS / controllers, CGROUPS / controller]
        else:
            continue
        for mount in mounts:
            group = mount / path.lstrip("/")
            yield from [group, *group.parents][: len(group.parts) - len(mount.parts) + 1]


def _words(path: Path) -> list[str]:
    return _read(path).split()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such limit, or not Linux
        return ""
