"""What is added from outside the package: an index with kernels, a store, a predictor, a policy."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

import pytest
import torch
from engines import DEVICE
from helpers import FULL, forward, generate, prompt, tiny_model
from torch import Tensor

from oasis_hf import (
    BlockStore,
    Index,
    MissPolicy,
    OasisCache,
    OasisConfigError,
    PinnedStore,
    Predictor,
    SavedCacheError,
)
from oasis_hf.index import IndexKernel
from oasis_hf.lookahead import Rounds
from oasis_hf.ops import Parts, Queries, Scores

pytestmark = pytest.mark.usefixtures("small_slabs")

SPARSE: dict[str, Any] = {"budget": 48, "block_size": 16, "sink_tokens": 16, "recent_tokens": 16}


# ---- a store -------------------------------------------------------------------------------------


class HalfStore(PinnedStore):
    """Keeps K and V as 16-bit floats: half the host memory and traffic of a float32 model."""

    name = "half"
    addressable = False

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.float16

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        return super().pack(k, v).half()

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        return super().unpack(packed.to(self.dtype))


def test_a_store_that_keeps_blocks_in_another_form() -> None:
    model, ids = tiny_model("llama"), prompt(300)
    caches = [OasisCache(model, **SPARSE, store=store) for store in ("pinned", HalfStore)]
    logits = [forward(model, ids[:, :290], cache)[:, -1] for cache in caches]
    for position in range(290, 300):
        step = ids[:, position : position + 1]
        logits = [forward(model, step, cache)[:, -1] for cache in caches]
        torch.testing.assert_close(*logits, atol=2e-2, rtol=2e-2)
    stats = [cache.stats() for cache in caches]
    assert stats[1].host_bytes * 2 == stats[0].host_bytes
    assert 0 < stats[1].bytes_fetched < stats[0].bytes_fetched


@pytest.mark.parametrize("change", ["repeat", "select", "crop", "fork", "save"])
def test_cache_operations_reach_a_store_of_one_s_own(change: str, tmp_path: Any) -> None:
    """As they do the default one: what is left answers as a cache that read just that."""
    model, ids = tiny_model("llama"), prompt(200, 2)
    cache = OasisCache(model, **FULL, store=HalfStore)
    forward(model, ids[:, :190], cache)
    want = ids
    if change == "repeat":
        cache.batch_repeat_interleave(2)
        want = ids.repeat_interleave(2, 0)
    elif change == "select":
        cache.batch_select_indices(torch.tensor([1]))
        want = ids[1:]
    elif change == "crop":
        cache.crop(-60)
    elif change == "fork":
        cache = cache.fork()
    else:
        cache.save(tmp_path / "cache.safetensors")
        with pytest.raises(SavedCacheError, match=r"store 'half' is not built in; pass store="):
            OasisCache.load(tmp_path / "cache.safetensors", model)
        cache = OasisCache.load(tmp_path / "cache.safetensors", model, store=HalfStore)
    held = cache.get_seq_length()
    got = forward(model, want[:, held : held + 4], cache)
    fresh = OasisCache(model, **FULL)
    forward(model, want[:, :held], fresh)
    torch.testing.assert_close(
        got, forward(model, want[:, held : held + 4], fresh), atol=2e-2, rtol=2e-2
    )


def test_stores_that_cannot_be_used_are_refused() -> None:
    model = tiny_model("llama")

    class Unfinished(BlockStore):
        name = "unfinished"

    with pytest.raises(OasisConfigError, match=r"store: Unfinished has no block_bytes, .*write"):
        OasisCache(model, store=Unfinished)
    with pytest.raises(OasisConfigError, match=r"store: got 'disk', expected 'pinned' or"):
        OasisCache(model, store="disk")
    with pytest.raises(OasisConfigError, match=r"store: got <class 'int'>"):
        OasisCache(model, store=int)
    pytest.importorskip("triton")
    with pytest.raises(OasisConfigError, match=r"backend: got 'triton' with a store that is not"):
        forward(model, prompt(20), OasisCache(model, store=HalfStore, backend="triton"))


# ---- a miss policy -------------------------------------------------------------------------------


class FirstLayers(MissPolicy):
    """The first layers wait for what they miss; the others never do."""

    name = "first-layers"

    def __init__(self, count: int) -> None:
        self.count = count

    def threshold(self, layer: int, layers: int) -> float:
        return -math.inf if layer < self.count else math.inf


def test_a_policy_decides_for_each_layer() -> None:
    model, ids = tiny_model("llama"), prompt(400)
    cache = OasisCache(model, **SPARSE, head_room=1.0, on_miss=FirstLayers(1))
    generate(model, ids, cache, 12)
    first, second = (layer.parts.counters.read() for layer in cache.offloaded)
    assert first["hits"] + first["now"] == first["wanted"] and first["now"] > 0
    assert second["now"] == 0 and second["hits"] < second["wanted"]


@pytest.mark.parametrize("count", [0, 99])
def test_a_policy_that_says_what_a_name_says_is_that(count: int) -> None:
    model, ids, name = tiny_model("llama"), prompt(400), "skip" if not count else "fetch"
    answers = [
        generate(model, ids, OasisCache(model, **SPARSE, head_room=1.0, on_miss=miss), 12)
        for miss in (name, FirstLayers(count))
    ]
    assert torch.equal(*answers)


def test_a_threshold_that_is_no_number_is_refused() -> None:
    class Wrong(FirstLayers):
        name = "wrong"

        def threshold(self, layer: int, layers: int) -> float:
            return math.nan

    with pytest.raises(OasisConfigError, match=r"on_miss: policy 'wrong' gave nan for layer 0"):
        OasisCache(tiny_model("llama"), on_miss=Wrong(1))


# ---- a lookahead predictor -----------------------------------------------------------------------


class Neighbours(Predictor):
    """The blocks after those that the last row ranks highest."""

    name = "neighbours"
    asked = 0

    def score(self, rounds: Rounds) -> Tensor:
        self.asked += 1
        return rounds.rank(rounds.last).roll(1, -1)


def test_a_predictor_is_asked_once_a_step_and_layer() -> None:
    model, ids, asked = tiny_model("llama"), prompt(400), Neighbours()
    cache = OasisCache(model, **SPARSE, on_miss="skip", fetch_cap=0.5, lookahead=asked)
    generate(model, ids, cache, 12)
    stats = cache.stats()
    assert asked.asked == stats.steps * 2 == 22
    assert stats.admitted > 0


@pytest.mark.parametrize("lookahead", ["lru", "last", "rows", "last+rows"])
def test_what_is_fetched_ahead_changes_no_answer_where_misses_are_fetched(lookahead: str) -> None:
    model, ids = tiny_model("llama"), prompt(400)
    want = generate(model, ids, OasisCache(model, **SPARSE), 16)
    cache = OasisCache(model, **SPARSE, lookahead=lookahead, fetch_cap=0.5)
    assert torch.equal(generate(model, ids, cache, 16), want)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_what_a_predictor_asks_for_is_resident_afterwards(backend: str) -> None:
    """With a cap that admits it, on both engines; of padded rows nothing is asked."""

    class Oldest(Predictor):
        name = "oldest"

        def score(self, rounds: Rounds) -> Tensor:
            ranked = rounds.rank(rounds.last)
            number = torch.arange(ranked.shape[-1], device=ranked.device, dtype=torch.float32)
            stored = number < rounds.committed[:, None]
            score = torch.where(stored, -number, -math.inf)
            return score[:, None].expand_as(ranked).contiguous()

    if backend == "triton":
        pytest.importorskip("triton")
    model = copy.deepcopy(tiny_model("llama")).to(DEVICE)
    options = SPARSE | {"on_miss": "skip", "fetch_cap": 1.0, "backend": backend, "index": "minmax"}
    ids = prompt(260).to(DEVICE)
    cache = OasisCache(model, **options, lookahead=Oldest())
    forward(model, ids[:, :256], cache)
    for position in range(256, 259):
        forward(model, ids[:, position : position + 1], cache)
    for layer in cache.offloaded:
        layer.parts.join()
        resident = layer.parts.residency.slot_of_block[..., :3] >= 0
        assert bool(resident.all())


@pytest.mark.parametrize("name", ["oracle", "layer", "ngram", "past", "draft", "sideways", 7])
def test_predictors_that_the_cache_cannot_ask_are_refused(name: Any) -> None:
    with pytest.raises(OasisConfigError, match=r"lookahead: got .*, (which needs|expected)"):
        OasisCache(tiny_model("llama"), lookahead=name)


# ---- an index with kernels of its own ------------------------------------------------------------


class SumKernel(IndexKernel):
    """Scores blocks by their summed keys, with torch in place of a kernel."""

    scans = 0

    def scan(self, ops: Any, index: Index, parts: Parts, queries: Queries, blocks: int) -> Scores:
        type(self).scans += 1
        stored = index.arrays["sum"][:, :, :blocks].float()
        mean = queries.query.float().flatten(2, 3).mean(2, keepdim=True)
        number = torch.arange(blocks, device=stored.device)
        live = number < (parts.frontier.committed // parts.rules.block)[:, None]
        score = (mean @ stored.transpose(-1, -2))[:, :, 0]
        return ops.given(torch.where(live[:, None], score, -math.inf), queries.positions)


class SumIndex(Index):
    """The sum of a block's keys, scanned by kernels on both backends."""

    name = "sum"
    kernels: ClassVar = {"reference": SumKernel(), "triton": SumKernel()}

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {"sum": keys.float().sum(-2).to(keys.dtype)}

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        mean = query.mean(2, keepdim=True)
        scores = mean @ self.arrays["sum"][:, :, :-1].float().transpose(-1, -2)
        return scores.expand(-1, -1, query.shape[2], -1)


def test_an_index_with_kernels_is_scanned_by_them() -> None:
    """The same tokens as the same index in torch, which is what a subclass of it is."""

    class TorchIndex(SumIndex):
        """Kernels are a class's own: a subclass may store something else."""

        name = "sum-in-torch"

    model, ids, scans, answers = tiny_model("llama"), prompt(400), [], []
    for index in (SumIndex, TorchIndex):
        SumKernel.scans = 0
        cache = OasisCache(model, **SPARSE, index=index)
        answers.append(generate(model, ids, cache, 16))
        scans.append(SumKernel.scans)
    assert torch.equal(*answers)
    assert scans == [15 * len(cache.offloaded), 0]
