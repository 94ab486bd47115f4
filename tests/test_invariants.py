"""What always holds, one section per invariant of DESIGN.md."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from engines import DEVICE, Engine, on_engines
from helpers import (
    SPARSE,
    Driver,
    assert_close,
    forward,
    generate,
    left_padded,
    plain_attention,
    prompt,
    random_qkv,
    tensors_of,
    tiny_model,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from oasis_hf import OasisCache
from oasis_hf.index import INDEXES, keys2bit
from oasis_hf.index.minmax import MinMaxIndex
from oasis_hf.integration.turns import turn
from oasis_kernels.reference import primitives

pytestmark = pytest.mark.usefixtures("small_slabs")

POLICIES: dict[str, dict[str, Any]] = {
    "keys2bit-fetch": {},
    "keys2bit-skip": {"on_miss": "skip"},
    "keys2bit-0.05": {"on_miss": 0.05},
    "minmax-fetch": {"index": "minmax"},
    "minmax-skip-max": {"index": "minmax", "on_miss": "skip", "reduction": "max"},
}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def few(**options: Any) -> list[dict[str, Any]]:
    """One policy, for an engine that is interpreted."""
    return [options]


def talk(driver: Driver, steps: int = 40, batch: int = 2, before: Any = None) -> list[Tensor]:
    """A prompt, decode steps, and verifications with crops; calls `before` ahead of each step."""
    generator, outputs = rng(), []
    outputs += driver.feed_random(generator, batch, 200)[1]
    driver.cache.expect_drafts()
    for step in range(steps):
        if before is not None:
            before()
        rows = (1, 5, 1, 8)[step % 4]
        outputs += driver.feed_random(generator, batch, rows)[1]
        if rows > 1:
            driver.cache.crop(-(step % rows))
            driver.seen = driver.seen[:, : driver.cache.get_seq_length()]
    return outputs


# ---- 1: the store loses nothing ------------------------------------------------------------------


@on_engines(
    "policy, block",
    [(policy, block) for policy in POLICIES.values() for block in (1, 16)],
    [({"index": "minmax"}, 16)],
)
def test_every_token_is_kept_bit_for_bit(
    engine: Engine, policy: dict[str, Any], block: int
) -> None:
    """Whatever is attended to, K and V of all tokens can be read back."""
    driver = engine.driver(**SPARSE | policy | {"block_size": block})
    generator, keys, values = rng(), [], []
    steps = engine.pick(20 if block == 1 else 100, 3)
    for rows in [130, *[1] * steps, 70, *[1] * engine.pick(10, 2)]:
        (_, k, v), _ = driver.feed_random(generator, 2, rows)
        keys.append(k)
        values.append(v)
    k, v, valid = driver.layer.history(driver.layer.parts.frontier.lengths.tolist())
    assert valid is None
    assert torch.equal(k.cpu(), torch.cat(keys, 2))
    assert torch.equal(v.cpu(), torch.cat(values, 2))


# ---- 2: full budget is dense (in every generate mode: contract/test_generate_modes.py) -----------


@on_engines(
    "policy, block",
    [(policy, block) for policy in POLICIES.values() for block in (1, 4, 16, 64)],
    [({}, 16), ({"on_miss": "skip"}, 4), ({"index": "minmax", "reduction": "max"}, 64)],
)
def test_full_budget_is_plain_attention(engine: Engine, policy: dict[str, Any], block: int) -> None:
    options = {**SPARSE, "budget": 320, "max_rows": 4} | policy
    driver = engine.driver(**options | {"block_size": block})
    driver.cache.activate_past_recording()
    generator, keys, values = rng(), [], []
    for rows in engine.pick((150, 1, 3, 1, 70, 4, 1), (150, 3, 70, 1)):
        (q, k, v), (out,) = driver.feed_random(generator, engine.pick(3, 2), rows)
        keys.append(k)
        values.append(v)
        all_k, all_v = torch.cat(keys, 2), torch.cat(values, 2)
        assert_close(
            out, torch.stack([plain_attention(*x) for x in zip(q, all_k, all_v, strict=True)])
        )


# ---- 3: offload changes nothing ------------------------------------------------------------------


@on_engines("index", sorted(INDEXES), ["keys2bit", "minmax8"])
def test_where_blocks_live_changes_no_bit(engine: Engine, index: str) -> None:
    """For the same chosen set: few slots, many slots, or every block resident all the time."""
    size = engine.pick((40, 2), (4, 1))
    runs = [
        talk(engine.driver(**SPARSE, index=index, head_room=room), *size)
        for room in engine.pick((1, 1.25, 3, 16), (1, 16))
    ]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_head_room_holds_what_it_says() -> None:
    """The runs above do differ in what is resident: the largest never misses."""
    tight, roomy = Driver(**SPARSE, head_room=1), Driver(**SPARSE, head_room=16)
    talk(tight)
    talk(roomy)
    assert tight.cache.stats().fetched_now > 0.05
    assert roomy.cache.stats().fetched_now == 0


@on_engines("index", ["keys2bit", "minmax"], ["minmax"])
def test_slabs_change_no_bit(engine: Engine, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in many pieces and a store in one give the same."""
    size = engine.pick((40, 2), (4, 1))
    many = engine.driver(**SPARSE, index=index)
    outputs = talk(many, *size)
    assert len(many.layer.parts.store.slabs) > 2
    monkeypatch.setattr("oasis_hf.storage.pinned_store.GROWTH_TOKENS", 4096)
    one = engine.driver(**SPARSE, index=index)
    assert all(torch.equal(a, b) for a, b in zip(outputs, talk(one, *size), strict=True))
    assert len(one.layer.parts.store.slabs) <= 2


# ---- 4: what is free may hold anything -----------------------------------------------------------


def poison(layer: Any) -> int:
    """Fill every place that holds no live data with NaN; returns how many places that were."""
    if not layer.is_initialized:
        return 0
    layer.parts.join()
    slots = layer.parts.residency.block_of_slot < 0
    slots[..., -1] = True
    newest = torch.arange(layer.parts.tail.places, device=DEVICE)
    last = layer.parts.frontier.lengths[:, None] - 1
    position = last - torch.remainder(last - newest, layer.parts.tail.places)
    places = torch.nn.functional.pad(
        position < layer.parts.frontier.committed[:, None], (0, 1), value=True
    )
    count = int(slots.sum() + places.sum())
    for pool, ring in (
        (layer.parts.pool.k, layer.parts.tail.k),
        (layer.parts.pool.v, layer.parts.tail.v),
    ):
        pool[slots] = float("nan")
        ring.transpose(1, 2)[places] = float("nan")
    committed = layer.parts.frontier.committed // layer.parts.geometry.block
    first = 0
    layer.parts.store.settle()
    for slab in layer.parts.store.slabs:
        blocks = torch.arange(first, first + slab.shape[2])
        blocks[-1] = 2**30
        slab.transpose(1, 2)[blocks[None] >= committed.cpu()[:, None]] = float("nan")
        first += slab.shape[2] - 1
    per_group = layer.parts.geometry.group // layer.parts.geometry.block
    for array in layer.parts.index.arrays.values():
        groups = torch.arange(array.shape[2], device=DEVICE) * per_group
        groups[-1] = 2**30
        stale = groups[None] >= committed[:, None]
        array.transpose(1, 2)[stale] = float("nan") if array.is_floating_point() else 255
    return count


@on_engines("policy", list(POLICIES.values()), few(on_miss="skip"))
def test_free_places_may_hold_anything(engine: Engine, policy: dict[str, Any]) -> None:
    """NaN in free slots, dead ring places, blocks and groups to come, and every spill."""
    options, size = SPARSE | policy | {"head_room": 1.5}, engine.pick((40, 2), (5, 1))
    clean = talk(engine.driver(**options), *size)
    dirty, counts = engine.driver(**options), []
    outputs = talk(dirty, *size, before=lambda: counts.append(poison(dirty.layer)))
    assert min(counts) > 0
    assert all(torch.equal(a, b) for a, b in zip(clean, outputs, strict=True))


# ---- 5: unverified rows stay in the tail ---------------------------------------------------------


@on_engines("index", ["keys2bit", "minmax"], ["minmax"])
def test_drafts_leave_no_trace(engine: Engine, index: str) -> None:
    """Drafts that are cropped change neither store, index nor resident blocks.

    The one run verifies and rejects other drafts at each step, the other none.
    """
    runs = []
    for rejected in (0, 7):
        driver = engine.driver(**SPARSE, index=index)
        driver.cache.activate_past_recording()
        generator, noise, batch = rng(), rng(rejected), engine.pick(2, 1)
        driver.feed_random(generator, batch, 150)
        driver.cache.crop(0)
        for _ in range(engine.pick(70, 12)):
            q, k, v = random_qkv(generator, batch, 1, driver.heads, driver.kv_heads)
            extra = random_qkv(noise, batch, rejected, driver.heads, driver.kv_heads)
            driver.feed(*(torch.cat(pair, 2) for pair in zip((q, k, v), extra, strict=True)))
            driver.cache.crop(-rejected)
            driver.seen = driver.seen[:, : driver.cache.get_seq_length()]
        runs.append(driver.layer)
    one, other = runs
    committed = int(one.parts.frontier.committed[0])
    assert one.parts.frontier.committed.tolist() == other.parts.frontier.committed.tolist()
    assert committed >= engine.pick(192, 144)
    lengths = one.parts.frontier.lengths.tolist()
    for a, b in zip(one.history(lengths)[:2], other.history(lengths)[:2], strict=True):
        assert torch.equal(a, b)
    groups = committed // one.parts.geometry.group
    for name, array in one.parts.index.arrays.items():
        assert torch.equal(array[:, :, :groups], other.parts.index.arrays[name][:, :, :groups])
    assert_pool_matches_store(other)


@on_engines("rows", [2, 8], [8])
def test_rows_are_not_committed_by_their_own_forward(engine: Engine, rows: int) -> None:
    driver = engine.driver(**SPARSE)
    driver.cache.activate_past_recording()
    generator = rng()
    driver.feed_random(generator, 1, 100)
    for _ in range(engine.pick(200, 64) // rows):
        before = driver.layer.parts.frontier.lengths.clone()
        driver.feed_random(generator, 1, rows)
        assert bool(
            (driver.layer.parts.frontier.committed <= before - SPARSE["recent_tokens"]).all()
        )
    group, recent = driver.layer.parts.geometry.group, SPARSE["recent_tokens"]
    assert driver.layer.parts.frontier.committed.tolist() == [int(before - recent) // group * group]


DEPTHS = (1, 15, 16, 17, 63, 64, 65, 100, 190, 229, 230)


@on_engines(
    "index, removed, how",
    list(itertools.product(["keys2bit", "minmax"], DEPTHS, ["decoded", "prompt"])),
    [("keys2bit", 17, "prompt"), ("minmax", 64, "prompt")],
)
def test_crop_reopens_the_last_group(engine: Engine, index: str, removed: int, how: str) -> None:
    """After a crop of any depth and other tokens in place, all parts are those of a fresh cache."""
    options = SPARSE | {"index": index, "recent_tokens": 0}
    driver, generator = engine.driver(**options), rng()
    pieces = [230] if how == "prompt" else [100, *[1] * 130]
    fed = [driver.feed_random(generator, 1, rows)[0] for rows in pieces]
    kept = [torch.cat(part, 2)[:, :, : 230 - removed] for part in zip(*fed, strict=True)]
    driver.cache.crop(-removed)
    driver.seen = driver.seen[:, : 230 - removed]
    layer = driver.layer
    assert (
        layer.parts.frontier.lengths.tolist() == [230 - removed]
        and layer.parts.frontier.committed <= layer.parts.frontier.lengths
    )
    assert not (
        layer.parts.residency.block_of_slot * layer.parts.geometry.block
        >= layer.parts.frontier.committed
    ).any()
    fresh = engine.driver(**options)
    if removed < 230:
        fresh.feed(*kept)
    for rows in (removed, 1, 1):
        new = random_qkv(generator, 1, rows, driver.heads, driver.kv_heads)
        driver.feed(*new)
        fresh.feed(*new)
    lengths = layer.parts.frontier.lengths.tolist()
    for a, b in zip(layer.history(lengths)[:2], fresh.layer.history(lengths)[:2], strict=True):
        assert torch.equal(a, b)
    groups = int(layer.parts.frontier.committed) // layer.parts.geometry.group
    assert groups > 2 and layer.parts.frontier.committed == fresh.layer.parts.frontier.committed
    for name, array in layer.parts.index.arrays.items():
        assert torch.equal(
            array[:, :, :groups], fresh.layer.parts.index.arrays[name][:, :, :groups]
        )


def assert_pool_matches_store(layer: Any) -> None:
    """The tables agree with each other, and each resident block with the store."""
    layer.parts.join()
    layer.parts.store.settle()
    residency = layer.parts.residency
    slot_of, block_of = residency.slot_of_block[..., :-1], residency.block_of_slot[..., :-1]
    for b, h, slot in (block_of >= 0).nonzero().tolist():
        block = int(block_of[b, h, slot])
        assert slot_of[b, h, block] == slot
        k, v = layer.parts.store.gather(
            torch.full((block_of.shape[0], block_of.shape[1], 1), block)
        )
        assert torch.equal(layer.parts.pool.k[b, h, slot].cpu(), k[b, h, 0])
        assert torch.equal(layer.parts.pool.v[b, h, slot].cpu(), v[b, h, 0])
    assert int((slot_of >= 0).sum()) == int((block_of >= 0).sum())


# ---- 6: no host synchronisation in a decode step -------------------------------------------------


class HostSyncError(AssertionError):
    """An operation for which a device would have to be waited for."""


class _FindDispatched(TorchDispatchMode):
    """Operations whose result, or whose result's shape, the host must know."""

    NAMES = frozenset(
        (
            "_local_scalar_dense",
            "nonzero",
            "nonzero_static",
            "masked_select",
            "unique",
            "_unique",
            "_unique2",
            "unique_consecutive",
            "unique_dim",
            "is_nonzero",
            "equal",
            "bincount",
        )
    )
    INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            raise HostSyncError(name)
        if name in self.INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1]):
            raise HostSyncError(f"{name} with a mask")
        if name == "repeat_interleave" and isinstance(args[-1], Tensor):
            raise HostSyncError("repeat_interleave with a tensor")
        return func(*args, **(kwargs or {}))


class _FindCalled(TorchFunctionMode):
    """Python calls that read a tensor's data without a dispatched operation, on the CPU."""

    NAMES = frozenset(
        ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "__array__")
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.NAMES:
            raise HostSyncError(func.__name__)
        return func(*args, **(kwargs or {}))


def unreadable() -> Any:
    """The reference's general path: that of a device, whose values the host must not look at."""
    return mock.patch.object(primitives, "readable", return_value=False)


class NoHostSync:
    """Raises `HostSyncError` at anything that would make the host wait for a device."""

    def __enter__(self) -> None:
        self._modes = (unreadable(), _FindCalled(), _FindDispatched())
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


def walk_steps(model: Any, cache: OasisCache, mask: Tensor | None = None) -> None:
    """Decode steps and verifications of a whole model under `NoHostSync`, over a group boundary.

    As within `generate`, where masks only grow: a mask given by hand is compared with the last one,
    which waits.
    """
    batch = 1 if mask is None else mask.shape[0]
    cache.activate_past_recording()
    with turn(cache, None, None):
        forward(model, prompt(180, batch), cache, mask)
        cache.crop(0)
        _walk_steps(model, cache, batch, mask)


def _walk_steps(model: Any, cache: OasisCache, batch: int, mask: Tensor | None) -> None:
    for step in range(10):
        rows = (1, 4)[step % 2]
        ids, options = prompt(rows, batch, seed=step), {}
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(mask[:, :rows])], 1)
            options["attention_mask"] = mask
            options["position_ids"] = (mask.cumsum(-1) - 1)[:, -rows:]
        # The first step after a prompt fills the resident set: fixed shapes as well.
        with NoHostSync():
            forward(model, ids, cache, **options)
        cache.crop(0)


@pytest.mark.filterwarnings("ignore:module forward hook")
@policies
@pytest.mark.parametrize("padded", [False, True], ids=["one row", "padded batch"])
def test_no_host_sync_in_a_step(policy: dict[str, Any], padded: bool) -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **(SPARSE | policy | {"recent_tokens": 0}))
    before = cache.layers[0]
    walk_steps(model, cache, left_padded([0, 50])[1] if padded else None)
    assert before.parts.frontier.committed[0] > 128 and cache.stats().steps == 10


@policies
@pytest.mark.parametrize("candidates", [64, 8192], ids=["some refined", "all refined"])
def test_looking_at_values_changes_no_result(
    policy: dict[str, Any], candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step leaves out on the host, where values may be read, has no effect."""
    monkeypatch.setattr(keys2bit, "LEAST_CANDIDATES", candidates)
    short, general = (Driver(**(policy | {"backend": "reference"})) for _ in range(2))
    with unreadable():
        want = talk(general)
    got = talk(short)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)
    for one, other in zip(
        short.layer.parts.residency.tables, general.layer.parts.residency.tables, strict=True
    ):
        assert torch.equal(one[..., :-1], other[..., :-1])
    assert short.cache.stats() == general.cache.stats()


def _item(x: Tensor) -> Tensor:
    return x * x.amax().item()


def _branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def _bool_index(x: Tensor) -> Tensor:
    x[x > 1e9] = 0
    return x


SYNCS: dict[str, Callable[[Tensor], Any]] = {
    "item": _item,
    "branch on data": _branch,
    "int": lambda x: int(x.amax()),
    "float": lambda x: float(x.amax()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "mask assignment": _bool_index,
    "mask selection": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "nonzero": lambda x: x.nonzero(),
    "where with one argument": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeats in a tensor": lambda x: x.repeat_interleave(torch.full(x.shape[-1:], 2), -1),
    "tensor as slice": lambda x: x[: x.amax().long()],
}


@pytest.mark.filterwarnings("ignore:module forward hook")
@pytest.mark.parametrize("violation", SYNCS.values(), ids=SYNCS)
def test_the_detector_finds_a_planted_sync(violation: Callable[[Tensor], Any]) -> None:
    """An index that synchronises makes the test above fail, whatever way it does it."""

    class Planted(MinMaxIndex):
        name = "planted"

        def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
            logits = super().block_logits(query, live)
            violation(logits.clone())
            return logits

    model = tiny_model("llama")
    with pytest.raises(HostSyncError):
        walk_steps(model, OasisCache(model, **(SPARSE | {"index": Planted})))


# ---- 7: padding is invisible ---------------------------------------------------------------------


def padded_pieces() -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and masks `[3, T]` of successive calls: padding at either end, inside, a whole row."""
    masks = [torch.ones(3, 190, dtype=torch.long)]
    masks[0][1, :70] = 0
    masks[0][2, 100:130] = 0
    for step in range(24):
        mask = torch.ones(3, (1, 5)[step % 2], dtype=torch.long)
        if step % 4 == 3:
            mask[0, 3:] = 0
            mask[1, :2] = 0
            mask[2, 1:4:2] = 0
        if step % 6 == 5:
            mask[step % 3] = 0
        masks.append(mask)
    for number, mask in enumerate(masks):
        ids = prompt(mask.shape[1], 3, seed=number)
        yield ids * mask, mask


def read(model: Any, cache: OasisCache, pieces: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Logits of successive calls: a prompt, then decode steps and verifications."""
    outputs, seen = [], pieces[0][1][:, :0]
    for number, (ids, mask) in enumerate(pieces):
        seen = torch.cat([seen, mask], 1)
        outputs.append(forward(model, ids, cache, seen))
        if number == 0:
            cache.expect_drafts()
    return outputs


@policies
def test_padded_batch_equals_rows_alone(policy: dict[str, Any]) -> None:
    """At a sparse budget, wherever the padding is: in the prompt, in drafts, or a whole row."""
    model, options = tiny_model("llama"), SPARSE | {"budget": 32} | policy
    pieces = list(padded_pieces())
    together = read(model, OasisCache(model, **options), pieces)
    for row in range(3):
        real = [mask[row].bool() for _, mask in pieces]
        alone = [
            (ids[row : row + 1, keep], torch.ones(1, int(keep.sum()), dtype=torch.long))
            for (ids, _), keep in zip(pieces, real, strict=True)
            if keep.any()
        ]
        want = read(model, OasisCache(model, **options), alone)
        got = [logits[row, keep] for logits, keep in zip(together, real, strict=True) if keep.any()]
        assert_close(torch.cat(got), torch.cat([x[0] for x in want]), rounding=256)


@policies
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_left_padded_generation_equals_rows_alone(kind: str, policy: dict[str, Any]) -> None:
    model, options = tiny_model(kind), SPARSE | {"budget": 32} | policy
    pads = [0, 21, 90]
    ids, mask = left_padded(pads)
    got = generate(model, ids, OasisCache(model, **options), attention_mask=mask, tokens=10)
    for row, count in enumerate(pads):
        want = generate(model, ids[row : row + 1, count:], OasisCache(model, **options), tokens=10)
        assert torch.equal(got[row], want[0])


@on_engines("index", ["keys2bit", "minmax"], ["keys2bit"])
def test_padding_is_in_no_summary(engine: Engine, index: str) -> None:
    """Pads hold huge keys; not one of them is stored, indexed or resident."""
    driver, generator = engine.driver(**SPARSE, index=index), rng()
    heads, steps = (driver.heads, driver.kv_heads), engine.pick(40, 3)
    q, k, v = random_qkv(generator, 2, 200, *heads)
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[0, :90] = mask[1, 50:60] = mask[1, 190:] = False
    pads = ~mask[:, None].expand(-1, driver.kv_heads, -1)
    k[pads] = v[pads] = 1e9
    driver.feed(q, k, v, mask)
    for _ in range(steps):
        q, k, v = random_qkv(generator, 2, 2, *heads)
        k[0, :, 1] = v[0, :, 1] = 1e9
        driver.feed(q[:, :, :1], k[:, :, :1], v[:, :, :1])
        driver.cache.expect_drafts()
        driver.feed(q, k, v, torch.tensor([[True, False], [True, True]]))
    assert driver.layer.parts.frontier.lengths.tolist() == [110 + 2 * steps, 180 + 3 * steps]
    driver.layer.parts.join()
    spills = {"tail": 2, "pool": 2, "store": 2, "index": 2}
    for path, tensor in tensors_of(driver.layer).items():
        part = path.split(".")[0]
        if part in spills and tensor.is_floating_point():
            assert tensor[:, :, :-1].abs().max() < 100, path


# ---- 8: every operation touches every part -------------------------------------------------------

OPERATIONS: dict[str, tuple[Callable[[OasisCache], Any], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "select by mask": (
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
        [0, 2],
    ),
}


def three_rows(kind: str, **options: Any) -> tuple[Any, OasisCache, Tensor]:
    """A cache that has decoded a while, with three rows of different lengths; and its mask."""
    model = tiny_model(kind)
    cache = OasisCache(model, **(SPARSE | options))
    ids, mask = left_padded([0, 30, 77])
    forward(model, ids, cache, mask)
    for step in range(30):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        forward(model, prompt(1, 3, seed=step), cache, mask)
    return model, cache, mask


def batched_tensors(cache: OasisCache) -> dict[str, Tensor]:
    """Every tensor of the cache that has a row per sequence, what the last forward left apart."""
    found = tensors_of(cache)
    for number, layer in enumerate(cache.layers):
        if type(layer).__module__.startswith("transformers"):
            found[f"native {number} keys"] = layer.keys
            found[f"native {number} values"] = layer.values
    return {
        path: tensor
        for path, tensor in found.items()
        if "_rows" not in path and "forward." not in path and not path.endswith(("clock", "sums"))
    }


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"index": "minmax", "on_miss": "skip"}),
        ("llama", {"dense_layers": (0,)}),
        ("gemma3", {}),
    ],
    ids=["keys2bit", "minmax-skip", "dense layer", "hybrid"],
)
def test_batch_operation_touches_every_part(kind: str, options: dict[str, Any], name: str) -> None:
    """Every tensor of the cache has the rows asked for, and each row goes on as it would have."""
    operation, rows = OPERATIONS[name]
    model, cache, mask = three_rows(kind, **options)
    before = {path: tensor.clone() for path, tensor in batched_tensors(cache).items()}
    go_on = cache.fork()
    operation(cache)
    after = batched_tensors(cache)
    assert after.keys() == before.keys()
    assert sum("index.arrays" in path for path in before) >= len(cache.offloaded)
    for path, tensor in before.items():
        assert torch.equal(after[path], tensor[rows]), path
    ids, mask = prompt(1, 3, seed=99), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    got = forward(model, ids[rows], cache, mask[rows])
    # A fork fills its resident set anew: with "skip" it may attend to other blocks.
    if options.get("on_miss") != "skip":
        assert_close(got, forward(model, ids, go_on, mask)[rows])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("removed", [1, 40, 150], ids=lambda n: f"crop {n}")
def test_crop_touches_every_part(kind: str, removed: int) -> None:
    """Lengths of every layer and of the ledger; the same tokens again give the same logits."""
    model = tiny_model(kind)
    dense_layers = (1,) if kind == "llama" else ()
    cache = OasisCache(model, **(SPARSE | {"budget": 256}), dense_layers=dense_layers)
    cache.activate_past_recording()
    ids, mask = left_padded([0, 30, 77], 200)
    first = forward(model, ids, cache, mask)
    cache.crop(-removed)
    held = 200 - removed
    assert cache.get_seq_length() == cache.ledger.columns == cache.stats().context_tokens == held
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [held, held]
    assert cache.offloaded[0].parts.frontier.lengths.tolist() == mask[:, :held].sum(1).tolist()
    assert torch.equal(cache.ledger.real(), mask[:, :held].bool())
    cache.expect(prompt=True)
    again = forward(model, ids[:, held:], cache, mask)
    real = mask[:, held:].bool()
    assert_close(again[real], first[:, held:][real])


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_reset_is_a_new_cache(kind: str) -> None:
    model = tiny_model(kind)
    cache = OasisCache(model, **SPARSE)
    if kind != "qwen3_next":
        cache.activate_past_recording()
    ids, mask = left_padded([0, 30, 77])
    forward(model, ids, cache, mask)
    forward(model, prompt(1, 3), cache)
    cache.reset()
    assert cache.get_seq_length() == cache.ledger.columns == 0
    assert cache.stats().host_bytes == cache.stats().hbm_bytes == cache.stats().native_bytes == 0
    assert cache.stats() == OasisCache(model, **SPARSE).stats()
    want = generate(model, prompt(150), OasisCache(model, **SPARSE))
    assert torch.equal(generate(model, prompt(150), cache), want)


# ---- 9: bounded fast memory ----------------------------------------------------------------------


class SizeWatch(TorchDispatchMode):
    """Remembers the largest tensor that an operation newly allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.by = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            x.untyped_storage().data_ptr()
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                size = x.untyped_storage().nbytes()
                if size > self.largest:
                    self.largest, self.by = size, str(func)
        return result


@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
def test_a_step_allocates_no_full_size_tensor(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a context past the candidates of a scan, a step stays far below the K of one layer."""
    monkeypatch.setattr(keys2bit, "LEAST_CANDIDATES", 512)
    driver = Driver(budget=64, index=index)
    generator = rng()
    driver.feed_random(generator, 1, 4000)
    watch = SizeWatch()
    for _ in range(3):
        qkv = random_qkv(generator, 1, 1)
        with watch:
            driver.feed(*qkv)
    all_keys = 4000 * 2 * 16 * 4
    assert watch.largest < all_keys / 2, f"{watch.by} made {watch.largest} bytes"


def test_the_size_watch_sees_a_copy_of_all_keys() -> None:
    """Reading the history back, which a step must not do, is noticed."""
    driver = Driver(budget=64)
    driver.feed_random(rng(), 1, 4000)
    with SizeWatch() as watch:
        driver.layer.history([4000])
    assert watch.largest >= 4000 * 2 * 16 * 4


@pytest.mark.parametrize("head_room", [1, 1.5, 4])
@pytest.mark.parametrize("block", [4, 16, 64])
def test_sizes_are_those_of_the_geometry(block: int, head_room: float) -> None:
    driver = Driver(budget=128, block_size=block, head_room=head_room)
    driver.feed_random(rng(), 3, 300)
    layer, geometry = driver.layer, driver.layer.parts.geometry
    assert geometry.slots == round(128 // block * head_room)
    assert layer.parts.pool.nbytes + layer.parts.tail.nbytes == geometry.fast_bytes(3)
    blocks = sum(slab.shape[2] for slab in layer.parts.store.slabs)
    assert layer.parts.store.nbytes == geometry.store_bytes(3, blocks)
    assert layer.parts.store.blocks * block >= 300
    sizes: dict[str, int] = {"index": 0, "residency": 0}
    for path, tensor in tensors_of(layer.parts).items():
        part = path.split(".")[0]
        if part in sizes and "clock" not in path:
            sizes[part] += tensor.nbytes
    stats = driver.cache.stats()
    assert stats.index_bytes == sizes["index"] == layer.parts.index.nbytes
    assert stats.hbm_bytes == geometry.fast_bytes(3) + sum(sizes.values())
    assert stats.host_bytes == layer.parts.store.nbytes
    assert stats.full_kv_bytes == 3 * 300 * geometry.token_bytes


@pytest.mark.parametrize(("index", "bits"), [("keys2bit", 3), ("minmax", 2)])
def test_index_size_per_key_element(index: str, bits: float) -> None:
    """In 16-bit models, at block 16; the spill group aside."""
    driver = Driver(index=index, budget=64)
    driver.feed(*(t.bfloat16() for t in random_qkv(rng(), 1, 2048)))
    layer = driver.layer
    groups = next(iter(layer.parts.index.arrays.values())).shape[2]
    elements = 2 * groups * layer.parts.geometry.group * 16
    assert layer.parts.index.nbytes * 8 == elements * bits


def test_fast_memory_does_not_grow_with_the_context() -> None:
    """Pool and tail stay as they are; the index grows at its own small rate."""
    driver, generator = Driver(budget=64, index="minmax"), rng()
    driver.feed_random(generator, 1, 300)
    before = driver.layer.parts.pool.nbytes + driver.layer.parts.tail.nbytes
    for _ in range(40):
        driver.feed_random(generator, 1, 1)
    driver.feed_random(generator, 1, 3000)
    assert driver.layer.parts.pool.nbytes + driver.layer.parts.tail.nbytes == before
    assert driver.cache.stats().index_bytes < 3400 * 2 * 16 * 4 * 2 / 14


def test_a_layer_lets_go_of_the_prompt() -> None:
    """K and V of a prompt do not outlive the attention that stores them."""
    driver = Driver(layers=2, budget=64)
    key, value = (weakref.ref(t) for t in _feed_and_watch(driver))
    assert key() is None and value() is None


def _feed_and_watch(driver: Driver) -> tuple[Tensor, Tensor]:
    """Feed a prompt; returns K and V tensors as `update` of the first layer got them."""
    caught: list[Tensor] = []
    update = driver.cache.update
    driver.cache.update = lambda k, v, *a, **o: (caught.extend((k, v)), update(k, v, *a, **o))[1]  # type: ignore[method-assign]
    driver.feed_random(rng(), 1, 500)
    del driver.cache.update
    return caught[0], caught[1]


@pytest.mark.parametrize("chunk", [128, 512])
def test_chunked_prompts_read_one_layer_at_a_time(chunk: int) -> None:
    """The largest tensor of a long prompt in pieces is one layer's K, and one piece's logits."""
    model = tiny_model("llama")
    cache = OasisCache(model, budget=64, prefill_chunk_size=chunk)
    with SizeWatch() as watch:
        forward(model, prompt(1500), cache, logits_to_keep=1)
    layer_keys, rows = 1500 * 2 * 16 * 4, chunk * 128 * 4
    store_slab = 2 * layer_keys + 64 * 2 * 32 * 4
    scores = 4 * chunk * 1500 * 4
    assert watch.largest <= max(store_slab, rows, scores), watch.by
