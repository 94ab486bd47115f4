"""The index of keys in their principal directions: what it estimates, and when it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import build_model
from torch import Tensor
from transformers import PreTrainedModel

from oasis_hf import OasisCache
from oasis_hf.facts.compat import cache_kwarg
from oasis_hf.index import Index, Keys2BitIndex, OracleIndex, PrincipalKeysIndex, pca
from oasis_hf.ops import kernels

OPS = kernels("reference")
BLOCK, BUDGET = 16, 64


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_model("Llama", {"num_hidden_layers": 2})


def keys_and_queries(tokens: int, dim: int = 64) -> tuple[Tensor, Tensor]:
    """Keys with few strong directions and a large constant part, as real ones; queries likewise."""
    torch.manual_seed(0)
    heads, scale = 2, torch.logspace(0.3, -1.3, dim)[:, None]
    basis = torch.linalg.qr(torch.randn(heads, dim, dim))[0]
    keys = torch.randn(1, heads, tokens, dim) @ (scale * basis) + 8 * torch.randn(1, heads, 1, dim)
    query = torch.randn(1, heads, 2, 16, dim) @ (torch.logspace(0.3, -0.7, dim)[:, None] * basis)
    return keys, query


def filled(kind: type[Index], keys: Tensor, query: Tensor) -> Index:
    """An index over all of these keys."""
    batch, heads, tokens, _ = keys.shape
    index = kind(BLOCK, tokens // BLOCK, "mean", OPS)
    index.ensure(tokens // BLOCK)
    index.allocate(batch, heads, keys)
    if index.learns:
        index.observe(query, None)
        index.fit(slice(None), keys)
        index.fitted(tokens)
    group = index.group_tokens(BLOCK)
    index.write_range(slice(0, batch), 0, keys.unflatten(2, (-1, group)))
    return index


def logits_error(kind: type[Index], keys: Tensor, query: Tensor) -> float:
    """Standard deviation of the estimated blocks' logits from the true ones."""
    live = torch.ones(1, 1, keys.shape[2] // BLOCK, dtype=torch.bool)
    rows = query.flatten(2, 3)
    found, true = (filled(k, keys, query).block_logits(rows, live) for k in (kind, OracleIndex))
    return float((found - true).std())


def test_estimates_are_closer_than_those_of_two_bits_at_fewer_bits() -> None:
    keys, query = keys_and_queries(4096)
    assert logits_error(PrincipalKeysIndex, keys, query) < logits_error(Keys2BitIndex, keys, query)
    sizes = {
        kind: sum(x.nbytes for x in filled(kind, keys, query).arrays.values()) * 8 / keys.numel()
        for kind in (PrincipalKeysIndex, Keys2BitIndex)
    }
    assert sizes[PrincipalKeysIndex] < 2.53
    # Two numbers of 32 bits per channel and group, as the keys are.
    assert sizes[Keys2BitIndex] > 3.9


def test_directions_that_queries_do_not_read_cost_nothing() -> None:
    """The strongest direction of the keys is noise to all queries: it must not take the bits."""
    keys, query = keys_and_queries(2048)
    blind = torch.linalg.qr(torch.randn(64, 64))[0][:, 0]
    keys = keys + 50 * torch.randn(*keys.shape[:3], 1) * blind
    query = query - (query @ blind)[..., None] * blind
    told = logits_error(PrincipalKeysIndex, keys, query)
    index = filled(PrincipalKeysIndex, keys, torch.randn_like(query))
    live = torch.ones(1, 1, 2048 // BLOCK, dtype=torch.bool)
    rows = query.flatten(2, 3)
    untold = index.block_logits(rows, live) - filled(OracleIndex, keys, query).block_logits(
        rows, live
    )
    assert told < 0.9 * float(untold.std())


@pytest.mark.parametrize("kind", ["zeros", "one value", "one token", "not numbers", "huge"])
def test_any_keys_can_be_learned_from(kind: str) -> None:
    keys, query = keys_and_queries(256)
    if kind == "zeros":
        keys, query = torch.zeros_like(keys), torch.zeros_like(query)
    elif kind == "one value":
        keys = torch.full_like(keys, 3.0)
    elif kind == "one token":
        keys = keys[:, :, :1].expand_as(keys).clone()
    elif kind == "not numbers":
        keys[0, 0, 5] = float("nan")
        query[0, 0, 0, 3] = float("inf")
    else:
        keys = keys * 1e6
    index = filled(PrincipalKeysIndex, keys, query)
    for name, learned in index.learned.items():
        if name != "moment":
            assert learned.isfinite().all(), name


def generate(model: PreTrainedModel, cache: OasisCache, ids: Tensor, count: int) -> Tensor:
    return model.generate(
        ids, max_new_tokens=count, do_sample=False, **{cache_kwarg(model): cache}
    )[:, ids.shape[1] :]


def caching(model: PreTrainedModel, **options: Any) -> OasisCache:
    chosen = {"budget": BUDGET, "block_size": BLOCK, "sink_tokens": 16, "recent_tokens": 16}
    return OasisCache(model, index="pca", **(chosen | options))


def prompt(tokens: int) -> Tensor:
    return torch.randint(5, 60, (1, tokens), generator=torch.Generator().manual_seed(3))


def test_nothing_is_learned_while_every_block_is_chosen(model: PreTrainedModel) -> None:
    cache = caching(model, budget=None)
    generate(model, cache, prompt(300), 4)
    assert not any(layer.parts.index.ready for layer in cache.offloaded)


def test_a_context_that_outgrows_the_budget_is_learned(model: PreTrainedModel) -> None:
    """By a prompt at once; by tokens, in the step that first has to choose."""
    cache = caching(model)
    generate(model, cache, prompt(300), 2)
    for layer in cache.offloaded:
        assert layer.parts.index.ready and layer.parts.index.tokens == 300
    cache = caching(model)
    generate(model, cache, prompt(40), 24)
    assert not any(layer.parts.index.ready for layer in cache.offloaded)
    cache = caching(model)
    generate(model, cache, prompt(40), 100)
    for layer in cache.offloaded:
        assert layer.parts.index.ready and 40 < layer.parts.index.tokens < 140


def test_it_is_learned_anew_when_the_context_has_doubled(model: PreTrainedModel) -> None:
    cache = caching(model)
    with torch.no_grad():
        for tokens, learned in ((130, 130), (70, 130), (60, 260), (200, 260), (60, 520)):
            start = cache.get_seq_length()
            model(prompt(1000)[:, start : start + tokens], **{cache_kwarg(model): cache})
            assert {layer.parts.index.tokens for layer in cache.offloaded} == {learned}


def test_much_is_learned_once_and_the_queries_are_forgotten(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pca, "ENOUGH_TOKENS", 200)
    cache = caching(model)
    with torch.no_grad():
        for start, end in ((0, 250), (250, 700)):
            model(prompt(1000)[:, start:end], **{cache_kwarg(model): cache})
    for layer in cache.offloaded:
        assert layer.parts.index.tokens == 250 and "moment" not in layer.parts.index.learned


def test_a_copy_chooses_as_the_original(model: PreTrainedModel, tmp_path: Path) -> None:
    """Forked, or saved and loaded: what was learned goes along, the queries' part included."""
    ids, cache = prompt(400), caching(model)
    with torch.no_grad():
        model(ids[:, :150], **{cache_kwarg(model): cache})
        model(ids[:, 150:-1], **{cache_kwarg(model): cache})
    cache.save(tmp_path / "cache.safetensors")
    copies = [cache.fork(), OasisCache.load(tmp_path / "cache.safetensors", model)]
    for copy in copies:
        for ours, theirs in zip(cache.offloaded, copy.offloaded, strict=True):
            for name, array in ours.parts.index.arrays.items():
                same = array[:, :, :10] == theirs.parts.index.arrays[name][:, :, :10]
                assert same.float().mean() > 0.999
    want = generate(model, cache, ids, 12)
    for copy in copies:
        assert torch.equal(generate(model, copy, ids, 12), want)
    other = OasisCache.load(tmp_path / "cache.safetensors", model, index="keys2bit")
    generate(model, other, ids, 4)
