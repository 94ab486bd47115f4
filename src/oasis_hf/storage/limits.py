"""How much more host memory this process can take: the machine's, and every limit above it.

A container sees the memory of the whole machine, and its process is killed where its own limit
ends. So the limits of the process's control groups (v1 and v2, its own group and all above it that
it can see) and of the process itself count as well as what the machine has left.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

resource: Any
try:
    import resource
except ImportError:  # Not a POSIX system: no such limits.
    resource = None

UNLIMITED = 1 << 62
"""A control group of version 1 without a limit states the largest number of whole pages."""


class HostMemoryError(MemoryError):
    """Something does not fit in host memory; nothing was stored, changed or lost."""


@dataclass(frozen=True)
class Room:
    """Host memory that may still be taken.

    Attributes:
        free: bytes.
        source: what sets it, for messages.
    """

    free: int
    source: str


def tightest(root: Path = Path("/")) -> Room:
    """The least room of the machine and of all limits on this process.

    Args:
        root: where `proc` and the mount points of control groups are found.
    """
    rooms = [Room(int(psutil.virtual_memory().available), "the machine")]
    rooms += [*group_rooms(root), *commit_room(root), *process_rooms()]
    return min(rooms, key=lambda room: room.free)


def require(needed: int, free: int, purpose: str, advice: str) -> None:
    """Refuse what does not fit, before any of it is taken.

    Args:
        needed: bytes.
        free: bytes that can be taken.
        purpose: what for.
        advice: what to do.

    Raises:
        HostMemoryError: with all of these, and the limit that leaves no more.
    """
    if needed <= free:
        return
    room = tightest()
    limit = f" under {room.source}" if room.source != "the machine" and room.free <= free else ""
    raise HostMemoryError(
        f"host memory: {needed / 1e9:.2f} GB needed for {purpose}, {free / 1e9:.2f} GB "
        f"available{limit}; {advice}"
    )


# ---- control groups ------------------------------------------------------------------------------


def group_rooms(root: Path = Path("/")) -> Iterator[Room]:
    """Room under each limit of this process's control group and of those above it."""
    paths = _group_paths(_read(root / "proc/self/cgroup"))
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount = _Mount.parse(line)
        path = None if mount is None else paths.get(mount.version)
        if mount is None or path is None:
            continue
        top = root / mount.point.lstrip("/")
        group = top / mount.inside(path)
        if not group.is_dir():
            # The group's path is the host's, and this mount shows the group itself.
            group = top
        for level in (group, *group.parents):
            if not level.is_relative_to(top):
                break
            yield from _level_rooms(level, mount.version)


def _group_paths(text: str) -> dict[int, str]:
    """The process's paths in the hierarchies that may limit memory, by version."""
    paths = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


@dataclass(frozen=True)
class _Mount:
    """Where a hierarchy of control groups is mounted, and which group is its top there."""

    version: int
    top: str
    point: str

    @classmethod
    def parse(cls, line: str) -> "_Mount | None":
        """One line of `mountinfo`; None if it is no hierarchy that limits memory."""
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3:
            return None
        top, point = (_unescape(field) for field in fields[3:5])
        if kind[0] == "cgroup2":
            return cls(2, top, point)
        if kind[0] == "cgroup" and "memory" in kind[2].split(","):
            return cls(1, top, point)
        return None

    def inside(self, path: str) -> str:
        """Where a group is below the mount point."""
        if ".." in PurePosixPath(path).parts:
            # Above the top of its namespace: what is mounted is all that can be seen.
            return ""
        inner = PurePosixPath(path)
        if inner.is_relative_to(self.top):
            return str(inner.relative_to(self.top))
        return path.lstrip("/")


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _level_rooms(group: Path, version: int) -> Iterator[Room]:
    """Room under the limits of one group.

    Beyond `memory.high` a process is not killed but slowed down until it hardly runs, so that
    counts as a limit too. Cached file pages are given back on demand; those to be written first
    are not counted on.
    """
    stat = _stat(group / "memory.stat")
    if version == 2:
        used = _number(group / "memory.current")
        limits = {name: _number(group / name) for name in ("memory.max", "memory.high")}
        cached, pending = ("inactive_file", "active_file"), ("file_dirty", "file_writeback")
    else:
        used = _number(group / "memory.usage_in_bytes")
        own = "memory.limit_in_bytes"
        # The second is the least of all groups above, which a container may not see.
        hierarchical = "hierarchical_memory_limit"
        limits = {own: _number(group / own), hierarchical: stat.get(hierarchical)}
        cached = ("total_inactive_file", "total_active_file")
        pending = ("total_dirty", "total_writeback")
    if used is None:
        return
    spare = sum(stat.get(key, 0) for key in cached) - sum(stat.get(key, 0) for key in pending)
    held = max(0, used - max(0, spare))
    for name, limit in limits.items():
        if limit is not None and limit < UNLIMITED:
            yield Room(max(0, limit - held), f"the limit {name} of control group {group}")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _stat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


# ---- the process ---------------------------------------------------------------------------------


def commit_room(root: Path = Path("/")) -> Iterator[Room]:
    """Room under the machine's commit limit, where it does not overcommit memory."""
    if _read(root / "proc/sys/vm/overcommit_memory").strip() != "2":
        return
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE))
    if "CommitLimit" in found and "Committed_AS" in found:
        free = 1024 * (int(found["CommitLimit"]) - int(found["Committed_AS"]))
        yield Room(max(0, free), "the machine's commit limit (vm.overcommit_memory is 2)")


def process_rooms() -> Iterator[Room]:
    """Room under this process's own limits of address space and data."""
    if resource is None:
        return
    memory = psutil.Process().memory_info()
    used = {"RLIMIT_AS": memory.vms, "RLIMIT_DATA": getattr(memory, "data", None)}
    flags = {"RLIMIT_AS": "ulimit -v", "RLIMIT_DATA": "ulimit -d"}
    for name, taken in used.items():
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY and taken is not None:
            yield Room(max(0, limit - taken), f"the limit {name} ({flags[name]})")


def locked_limit() -> str:
    """This process's limit of locked memory, for messages.

    CUDA drivers pin beyond it; where one refuses, it is what a user can change.
    """
    if resource is None:
        return "unknown"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 1e9:.2f} GB"


def available_bytes() -> int:
    """Host memory that can be taken without swapping, and without meeting a limit."""
    return tightest().free
