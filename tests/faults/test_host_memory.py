"""Host memory that is not there is refused, before anything is changed, whatever limits it."""

from __future__ import annotations

import functools
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import (
    FULL,
    MODELS,
    SPARSE,
    Driver,
    assert_close,
    build_model,
    dense_cache,
    forward,
    generate,
    plain_attention,
    prompt,
    random_qkv,
    tiny_model,
)

from oasis_hf import HostMemoryError, OasisCache
from oasis_hf.storage import limits, pinned

GB = 10**9
MACHINE = 512 * GB
NONE = 9223372036854771712
"""What version 1 states where there is no limit."""

V2 = "0::{path}\n"
V2_MOUNT = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
V1 = "5:cpu,cpuacct:/elsewhere\n4:memory:{path}\n0::/\n"
V1_MOUNT = (
    "30 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:29 {top} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
)


def v2(used: int, **limits: int) -> dict[str, str]:
    return {"memory.current": f"{used}\n"} | {
        f"memory.{name}": f"{limits[name]}\n" if name in limits else "max\n"
        for name in ("max", "high")
    }


def v1(used: int, limit: int = NONE, stat: str = "") -> dict[str, str]:
    return {
        "memory.usage_in_bytes": f"{used}\n",
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.stat": stat,
    }


Tree = tuple[str, str, dict[str, dict[str, str]], int, str]
"""Control groups of the process, mounts, files by directory; bytes free then, and what says so."""

TREES: dict[str, Tree] = {
    "version 2, its own": (
        V2.format(path="/pod/app"),
        V2_MOUNT.format(top="/"),
        {"pod/app": v2(3 * GB, max=10 * GB), "pod": v2(5 * GB)},
        7 * GB,
        "memory.max of control group .*pod/app",
    ),
    "version 2, a parent's": (
        V2.format(path="/pod/app"),
        V2_MOUNT.format(top="/"),
        {"pod/app": v2(3 * GB, max=10 * GB), "pod": v2(8 * GB, max=12 * GB)},
        4 * GB,
        "memory.max of control group .*pod$",
    ),
    "version 2, throttled": (
        V2.format(path="/app"),
        V2_MOUNT.format(top="/"),
        {"app": v2(3 * GB, max=10 * GB, high=5 * GB)},
        2 * GB,
        "memory.high of control group .*app",
    ),
    "version 2, cached files are given back": (
        V2.format(path="/app"),
        V2_MOUNT.format(top="/"),
        {
            "app": v2(9 * GB, max=10 * GB)
            | {
                "memory.stat": f"anon {3 * GB}\ninactive_file {4 * GB}\nactive_file {2 * GB}\n"
                f"file_dirty {GB}\nfile_writeback 0\nshmem {GB}\n"
            }
        },
        6 * GB,
        "memory.max",
    ),
    "version 2, full": (
        V2.format(path="/app"),
        V2_MOUNT.format(top="/"),
        {"app": v2(11 * GB, max=10 * GB)},
        0,
        "memory.max",
    ),
    "version 2, the namespace's top": (
        V2.format(path="/"),
        V2_MOUNT.format(top="/"),
        {"": v2(3 * GB, max=10 * GB)},
        7 * GB,
        "memory.max",
    ),
    "version 2, moved out of its namespace": (
        V2.format(path="/../other"),
        V2_MOUNT.format(top="/"),
        {"": v2(3 * GB, max=10 * GB)},
        7 * GB,
        "memory.max",
    ),
    "version 1, its own": (
        V1.format(path="/docker/abc"),
        V1_MOUNT.format(top="/"),
        {"memory/docker/abc": v1(3 * GB, 10 * GB), "memory/docker": v1(4 * GB), "memory": v1(0)},
        7 * GB,
        "memory.limit_in_bytes",
    ),
    "version 1, a parent's": (
        V1.format(path="/docker/abc"),
        V1_MOUNT.format(top="/"),
        {
            "memory/docker/abc": v1(3 * GB, stat=f"total_inactive_file {GB}\n"),
            "memory/docker": v1(4 * GB, 6 * GB, f"total_active_file {GB}\ninactive_file 5\n"),
        },
        3 * GB,
        "memory.limit_in_bytes of control group .*docker$",
    ),
    "version 1, that of parents which are not seen": (
        V1.format(path="/docker/abc"),
        V1_MOUNT.format(top="/docker/abc"),
        {"memory": v1(3 * GB, stat=f"hierarchical_memory_limit {8 * GB}\n")},
        5 * GB,
        "hierarchical_memory_limit",
    ),
    "version 1, a path of the host": (
        V1.format(path="/kubepods/pod7/abc"),
        V1_MOUNT.format(top="/"),
        {"memory": v1(3 * GB, 8 * GB)},
        5 * GB,
        "memory.limit_in_bytes",
    ),
    "both versions": (
        V1.format(path="/a").replace("0::/\n", V2.format(path="/b")),
        V1_MOUNT.format(top="/") + V2_MOUNT.format(top="/").replace("cgroup rw", "cgroup/all rw"),
        {"memory/a": v1(3 * GB, 8 * GB), "all/b": {}},
        5 * GB,
        "memory.limit_in_bytes",
    ),
    "none": (V2.format(path="/app"), V2_MOUNT.format(top="/"), {"app": v2(GB)}, MACHINE, "machine"),
    "no control groups": ("", "", {}, MACHINE, "machine"),
}


def plant(root: Path, name: str) -> None:
    """Write one of `TREES` below `root`."""
    own, mounts, groups, _, _ = TREES[name]
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    (root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)
    for path, files in groups.items():
        folder = root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = MACHINE

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


# ---- what is free --------------------------------------------------------------------------------


@pytest.mark.usefixtures("large_machine")
@pytest.mark.parametrize("name", TREES)
def test_limit_of_a_container(name: str, tmp_path: Path) -> None:
    plant(tmp_path, name)
    room = limits.tightest(tmp_path)
    assert room.free == TREES[name][3]
    assert re.search(TREES[name][4], room.source)


@pytest.mark.usefixtures("large_machine")
def test_limit_of_a_machine_that_does_not_overcommit(tmp_path: Path) -> None:
    plant(tmp_path, "none")
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("CommitLimit:  2000000 kB\nCommitted_AS: 1500000 kB\n")
    for policy, free in (("0", MACHINE), ("2", 500_000 * 1024)):
        (tmp_path / "proc/sys/vm/overcommit_memory").write_text(f"{policy}\n")
        assert limits.tightest(tmp_path).free == free


@contextmanager
def address_space(spare: int) -> Iterator[None]:
    """Let this process have so many more bytes of address space."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + spare
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_limit_of_the_process() -> None:
    """A real one: the store would not fit, and is not begun."""
    driver = Driver(layers=2, budget=64)
    states = random_qkv(torch.Generator().manual_seed(0), 32, 2000)
    with address_space(30_000_000), pytest.raises(HostMemoryError) as error:
        driver.feed(*states)
    assert "available under the limit RLIMIT_AS (ulimit -v); use a shorter" in str(error.value)


@pytest.mark.usefixtures("large_machine")
def test_error_names_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, "version 2, full")
    room = limits.tightest(tmp_path)
    monkeypatch.setattr(limits, "tightest", lambda: room)
    with pytest.raises(HostMemoryError, match=r"0\.00 GB available under the limit memory\.max of"):
        forward(tiny_model("llama"), prompt(40), OasisCache(tiny_model("llama"), **FULL))


def test_pinning_that_is_refused_names_the_limit_of_locked_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Driver:
        def cudaHostRegister(self, *args: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    with pytest.raises(HostMemoryError, match=r"refused to pin 0\.00 GB .* \(ulimit -l, now "):
        pinned.pinned_empty((3, 5), torch.float32)


# ---- batch operations ----------------------------------------------------------------------------

OPERATIONS: dict[str, tuple[Callable[[OasisCache], Any], list[int]]] = {
    "repeat": (lambda cache: cache.batch_repeat_interleave(3), [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "select more": (
        lambda cache: cache.batch_select_indices(torch.tensor([2, 0, 1, 1])),
        [2, 0, 1, 1],
    ),
}
GROWS = ("repeat", "select more")


def read(model: Any = None) -> tuple[OasisCache, Any]:
    """A cache that holds three sequences of several slabs and two decode steps, and ids."""
    model = tiny_model("llama") if model is None else model
    cache, ids = OasisCache(model, **FULL), prompt(130, 3)
    forward(model, ids, cache)
    for token in prompt(2, 3, seed=2).split(1, 1):
        forward(model, token, cache)
    return cache, torch.cat([ids, prompt(2, 3, seed=2)], 1)


@functools.cache
def hybrid() -> Any:
    """A model whose sliding layer comes after its full one."""
    stem, options = MODELS["gemma3"]
    kinds = ["full_attention", "sliding_attention"]
    return build_model(stem, options | {"layer_types": kinds})


def assert_goes_on(cache: OasisCache, ids: torch.Tensor) -> None:
    """The cache answers as one that has just read these ids."""
    model, dense = cache.model, dense_cache(cache.model)
    forward(model, ids, dense)
    for token in prompt(3, len(ids), seed=4).split(1, 1):
        assert_close(forward(model, token, cache), forward(model, token, dense))


def fail(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """Let no more than `after` slabs be had; returns how many were asked for."""
    zeros, asked = torch.zeros, []

    def once(*shape: Any, **options: Any) -> torch.Tensor:
        if len(shape) == 1 and isinstance(shape[0], tuple) and len(shape[0]) == 4:
            asked.append(1)
            if len(asked) > after:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", once)
    return asked


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.parametrize("name", GROWS)
def test_larger_batch_is_refused_before_anything_is_changed(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, ids = read(hybrid() if kind == "hybrid" else None)
    before, rows = cache.stats().as_dict(), len(OPERATIONS[name][1])
    with monkeypatch.context() as patch:
        # Enough for one new layer, but not for two beside the old ones.
        patch.setattr(limits, "available_bytes", lambda: before["host_bytes"] * rows // 3 - 1)
        asked = fail(patch, 100)
        with pytest.raises(HostMemoryError) as error:
            OPERATIONS[name][0](cache)
        assert not asked
    says = (
        f"needed for {rows} sequences instead of 3 x {len(cache.offloaded)} layers, while the old"
    )
    assert says in str(error.value) and "nothing has changed" in str(error.value)
    assert cache.stats().as_dict() == before
    assert_goes_on(cache, ids)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("name", GROWS)
def test_memory_that_cannot_be_had_half_way_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, ids = read()
    with monkeypatch.context() as patch:
        asked = fail(patch, 4)
        with pytest.raises(HostMemoryError, match="could not be had"):
            OPERATIONS[name][0](cache)
        assert len(asked) == 5
    assert_goes_on(cache, ids)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("name", ["reorder", "select"])
def test_batch_that_does_not_grow_needs_no_more_memory(
    name: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows move within what there is; a smaller batch has smaller slabs where they can be had."""
    cache, ids = read()
    operation, rows = OPERATIONS[name]
    with monkeypatch.context() as patch:
        patch.setattr(limits, "available_bytes", lambda: 0)
        asked = fail(patch, after)
        operation(cache)
        assert bool(asked) == (name == "select")
    assert_goes_on(cache, ids[rows])


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("name", OPERATIONS)
def test_layers_of_the_model_that_fail_leave_the_others_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sliding layer of Transformers' own has no memory for its rows."""
    cache, ids = read(hybrid())
    native = next(layer for layer in cache.layers if layer not in cache.offloaded)

    def full(*args: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        for method in ("reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
            patch.setattr(type(native), method, full)
        with pytest.raises(RuntimeError, match="out of memory"):
            OPERATIONS[name][0](cache)
    assert_goes_on(cache, ids)


@pytest.mark.parametrize("index", ["keys2bit", "minmax", "streaming"])
def test_every_tensor_that_a_batch_operation_replaces_is_counted(index: str) -> None:
    driver, replaced = Driver(budget=64, index=index), []
    driver.feed_random(torch.Generator().manual_seed(0), 2, 70)
    counted = driver.layer.parts.rowwise()
    driver.layer.map_batch(lambda held: (replaced.append(held), held)[1])
    assert sorted(map(id, replaced)) == sorted(map(id, counted))


BAD_ROWS: dict[str, tuple[Callable[[OasisCache], Any], str]] = {
    "repeat none": (lambda x: x.batch_repeat_interleave(0), "repeats: got 0, expected a whole"),
    "beyond": (lambda x: x.reorder_cache(torch.tensor([0, 3, 1])), r"beam_idx: got \[0, 3, 1\]"),
    "select beyond": (lambda x: x.batch_select_indices(torch.tensor([-4])), r"indices: got \[-4\]"),
    "other mask": (
        lambda x: x.batch_select_indices(torch.tensor([True, False])),
        r"indices: got a mask of shape \(2,\), expected \(3,\)",
    ),
    "shares": (lambda x: x.batch_select_indices(torch.tensor([0.5])), r"indices: got \[0\.5\]"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_do_not_exist_change_nothing(name: str) -> None:
    cache, ids = read(hybrid())
    operation, message = BAD_ROWS[name]
    with pytest.raises(ValueError, match=message):
        operation(cache)
    assert_goes_on(cache, ids)


@pytest.mark.usefixtures("small_slabs")
def test_slabs_of_a_borrower_move_apart_from_its_owner() -> None:
    """Rows that move within a slab would move those of everyone who holds it."""
    model = tiny_model("llama")
    base, ids = OasisCache(model, **FULL), prompt(100, 2)
    forward(model, ids, base)
    other = OasisCache(model, **FULL)
    other.ledger.copy_from(base.ledger)
    for old, new in zip(base.offloaded, other.offloaded, strict=True):
        k, v, _ = old.history(old.parts.frontier.lengths.tolist())
        new.adopt(k, v, old.parts.frontier.lengths, old.columns, owner=old)
    other.reorder_cache(torch.tensor([1, 1]))
    assert_goes_on(other, ids[[1, 1]])
    assert_goes_on(base, ids)


# ---- whatever else takes host memory -------------------------------------------------------------


@pytest.mark.usefixtures("small_slabs")
def test_step_for_which_a_later_layer_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a hook on the model too, the first layer has not taken the tokens."""
    driver, generator = (
        Driver(layers=2, **SPARSE | {"budget": 256}),
        torch.Generator().manual_seed(0),
    )
    states = [random_qkv(generator, 2, rows) for rows in (126, 1, 4)]
    driver.feed(*states[0])
    driver.feed(*states[1])
    held = [layer.parts.frontier.lengths.tolist() for layer in driver.cache.offloaded]
    with monkeypatch.context() as patch:
        fail(patch, 1)
        with pytest.raises(HostMemoryError):
            driver.feed(*states[2])
    assert [layer.parts.frontier.lengths.tolist() for layer in driver.cache.offloaded] == held
    assert driver.cache.get_seq_length() == 127
    driver.seen = driver.seen[:, :127]
    outputs = driver.feed(*states[2])
    q, k, v = (torch.cat(parts, 2) for parts in zip(*states, strict=True))
    for out in outputs:
        for row in range(2):
            assert_close(out[row], plain_attention(q[row, :, -4:], k[row], v[row]))


@pytest.mark.parametrize("operation", ["fork", "load", "adopt"])
def test_copies_that_do_not_fit(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before a layer takes any; the original goes on, and an empty layer stays empty."""
    cache, ids = read()
    model = tiny_model("llama")
    cache.save(tmp_path / "saved")
    source, other = cache.offloaded[0], OasisCache(model, **FULL)
    history = source.history(source.parts.frontier.lengths.tolist())[:2]
    with monkeypatch.context() as patch:
        patch.setattr(limits, "available_bytes", lambda: cache.stats().host_bytes - 1)
        asked = fail(patch, 100)
        with pytest.raises(HostMemoryError, match="x 3 sequences x 2 layers"):
            if operation == "fork":
                cache.fork()
            elif operation == "load":
                OasisCache.load(tmp_path / "saved", model)
            else:
                other.offloaded[0].adopt(*history, source.parts.frontier.lengths, source.columns)
        assert not asked
    assert not other.offloaded[0].is_initialized
    forward(model, ids, other)
    assert_goes_on(other, ids)
    assert_goes_on(cache, ids)


def test_beams_need_no_more_memory_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a beam search reorders the rows; none of them takes a slab for it."""
    model, ids = tiny_model("llama"), prompt(60)
    want = generate(model, ids, None, 12, num_beams=3)
    cache = OasisCache(model, **FULL)
    asked = fail(monkeypatch, 100)
    assert torch.equal(generate(model, ids, cache, 12, num_beams=3), want)
    assert len(asked) == len(cache.layers)
