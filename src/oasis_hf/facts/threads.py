"""How many threads torch uses for a command: as many as there are cores for it, and no more."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch

CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which users choose the number of threads themselves."""
CGROUPS = Path("/sys/fs/cgroup")
LOOK = 0.1
"""Seconds for which the load of the cores is looked at."""


def bound_threads() -> int:
    """Lower the number of torch's threads to the cores that are there for this process.

    These are physical cores, those that the process may run on, and those that its container
    grants. Where OpenMP's threads spin as they wait (its default), cores that other processes keep
    busy are left out as well: a thread that waits for its turn there holds up all others. A number
    in `OMP_NUM_THREADS` or `MKL_NUM_THREADS` is the user's and stays.

    Returns:
        The number of threads.
    """
    if not any(os.environ.get(name) for name in CHOSEN):
        cores = usable_cores()
        if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
            cores = min(cores, idle_cores())
        torch.set_num_threads(min(torch.get_num_threads(), cores))
    return torch.get_num_threads()


def usable_cores() -> int:
    """Physical cores that this process may use, at least 1."""
    counts = [psutil.cpu_count(logical=False), len(_allowed())]
    share = granted(CGROUPS)
    if share is not None:
        counts.append(int(share))
    return max(1, min(count for count in counts if count is not None))


def idle_cores() -> int:
    """Cores that this process may run on and that nobody keeps busy now, at least 1."""
    load = psutil.cpu_percent(LOOK, percpu=True)
    free = sum(1 - load[core] / 100 for core in _allowed() if core < len(load))
    return max(1, round(free))


def granted(root: Path) -> float | None:
    """Cores that the control group at `root` grants by its quota (v2 or v1); None for all."""
    try:
        quota, _, period = (root / "cpu.max").read_text().partition(" ")
    except OSError:
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return share if share > 0 else None


def _allowed() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
