"""What a cache allocates and computes follows the context, however generous the budget."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    SPARSE,
    Driver,
    assert_close,
    dense_cache,
    forward,
    generate,
    plain_attention,
    prompt,
    random_qkv,
    tiny_model,
)
from torch import Tensor

from oasis_hf import Index, OasisCache, OasisConfig

README = Path(__file__).parents[2] / "README.md"
TOKEN = 2 * (16 + 16) * 4
"""Bytes of one token's K and V in one layer of the tiny model."""


class LeavesOut(Index):
    """Would never choose any block."""

    name = "leaves-out"

    def encode(self, keys: Tensor) -> dict[str, Tensor]:
        return {}

    def block_logits(self, query: Tensor, live: Tensor) -> Tensor:
        return query.new_full((*query.shape[:3], live.shape[2]), float("-inf"))


# ---- memory --------------------------------------------------------------------------------------


def test_a_budget_beyond_the_context_takes_no_memory() -> None:
    """As much as the next power of two of tokens has, and not what 100,000 tokens would."""
    cache = OasisCache(tiny_model("llama"), budget=100_000, block_size=16)
    forward(tiny_model("llama"), prompt(900), cache)
    forward(tiny_model("llama"), prompt(1), cache)
    stats = cache.stats()
    assert stats.resident_tokens == 1024
    assert stats.hbm_bytes < 2 * (1024 + 16 + 128) * TOKEN * 1.3


@pytest.mark.parametrize(("tokens", "allocated"), [(5, 256), (300, 512), (1500, 2048)])
def test_a_short_context_has_a_small_store(tokens: int, allocated: int) -> None:
    driver = Driver(block_size=16)
    driver.feed_random(torch.Generator().manual_seed(0), 1, tokens)
    assert driver.cache.stats().host_bytes == (allocated + 16) * TOKEN


def test_the_store_of_a_context_that_grows_is_that_of_one_read_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    grown, whole = Driver(block_size=16), Driver(block_size=16)
    grown.feed_random(generator, 1, 40)
    assert grown.cache.stats().host_bytes == 272 * TOKEN
    for rows in (1, 300, 1, 1000, 3000):
        grown.feed_random(generator, 1, rows)
    whole.feed_random(generator, 1, 4342)
    assert grown.cache.stats().host_bytes == whole.cache.stats().host_bytes == 2 * 4112 * TOKEN


def test_stats_tell_what_is_allocated_from_what_is_used() -> None:
    driver = Driver(budget=None, block_size=16, index="minmax")
    driver.feed_random(torch.Generator().manual_seed(0), 1, 300)
    driver.feed_random(torch.Generator().manual_seed(1), 1, 1)
    stats = driver.cache.stats()
    # The newest 45 tokens are in the tail, which the store does not hold yet.
    assert stats.host_used_bytes == 256 * TOKEN < stats.host_bytes == 528 * TOKEN
    assert stats.hbm_used_bytes == 301 * TOKEN + 16 * 2 * 2 * 16 * 4 < stats.hbm_bytes
    assert str(stats).count(" in use") == 2


# ---- growing -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("on_miss", ["fetch", "skip"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_growing_pools_keep_what_they_hold(backend: str, on_miss: str) -> None:
    """Slots are added twice; nothing that was resident is fetched again, and nothing is missed."""
    if backend == "triton":
        pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    driver = Driver(budget=None, recent_tokens=0, max_rows=1, backend=backend, on_miss=on_miss)
    generator, keys, values, sizes = torch.Generator().manual_seed(0), [], [], []
    for rows in (30, *[1] * 5, 27, *[1] * 5):
        q, k, v = random_qkv(generator, 1, rows)
        (out,) = driver.feed(*(t.to(device) for t in (q, k, v)))
        keys.append(k)
        values.append(v)
        want = plain_attention(q[0], torch.cat(keys, 2)[0], torch.cat(values, 2)[0])
        assert_close(out[0].cpu(), want)
        sizes.append(driver.cache.stats().resident_tokens)
    assert sorted(set(sizes)) == [32, 64, 128]
    stats = driver.cache.stats()
    assert stats.hit_rate == 1 and stats.bytes_fetched == stats.bytes_filled


def test_a_full_pool_is_never_replaced() -> None:
    """A context beyond budget and head room has all slots from the start, and keeps its shapes."""
    driver = Driver(**SPARSE, head_room=2)
    generator = torch.Generator().manual_seed(0)
    driver.feed_random(generator, 1, 600)
    assert driver.cache.stats().resident_tokens == 128
    epoch = driver.layer.epoch
    for _ in range(60):
        driver.feed_random(generator, 1, 1)
    assert driver.layer.epoch == epoch


# ---- everything ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on_miss": "skip"},
        {"index": "streaming", "on_miss": "skip", "fetch_cap": 0},
        {"index": LeavesOut, "on_miss": "skip"},
        {"block_size": 4, "recent_tokens": 0},
    ],
    ids=lambda options: ", ".join(map(str, options.values())) or "default",
)
def test_no_budget_is_exact(options: dict[str, Any]) -> None:
    """Whatever an index says, every block is attended to; over several turns."""
    model = tiny_model("llama")
    cache, dense = OasisCache(model, budget=None, **options), dense_cache(model)
    ids = prompt(320, 2)
    for turn in range(2):
        new = generate(model, ids, cache, 40)
        assert torch.equal(new, generate(model, ids, dense, 40))
        ids = torch.cat([ids, new, prompt(20, 2, seed=turn)], 1)
    stats = cache.stats()
    assert stats.budget_tokens is None and "all tokens attended" in str(stats)
    assert "every token" in stats.note


def test_no_budget_survives_saving_and_forking(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache, path = OasisCache(model, budget=None), tmp_path / "cache.safetensors"
    forward(model, prompt(200), cache)
    cache.save(path)
    few = OasisCache(model, **SPARSE)
    forward(model, prompt(200), few)
    dense = dense_cache(model)
    forward(model, prompt(200), dense)
    want = forward(model, prompt(1), dense)
    for other in (OasisCache.load(path, model), cache.fork(), few.fork(budget=None)):
        assert other.oasis_config.budget is None
        assert_close(forward(model, prompt(1), other), want)


# ---- whole blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"budget": 700}, 704),
        ({"budget": 516}, 520),
        ({"budget": 100, "block_size": 16}, 112),
        ({"budget": 3, "sink_tokens": 0}, 4),
    ],
)
def test_a_budget_between_blocks_is_rounded_up_and_says_so(
    options: dict[str, Any], tokens: int
) -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, **options)
    config, asked = cache.oasis_config, options["budget"]
    assert (config.budget, config.budget_tokens) == (asked, tokens)
    assert f"budget={asked} ({tokens} in blocks of {config.block_tokens})" in repr(config)
    stats = cache.stats()
    assert (stats.budget_tokens, stats.budget_asked) == (tokens, asked)
    assert f"{tokens} tokens ({asked} rounded up to blocks of {config.block_tokens})" in str(stats)
    ids = prompt(300)
    same = OasisCache(model, **options | {"budget": tokens, "block_size": config.block_tokens})
    assert torch.equal(generate(model, ids, cache, 8), generate(model, ids, same, 8))


def test_readme_tells_the_size_of_blocks() -> None:
    """The sentence on `block_size="auto"`, against every budget."""
    sentence = re.search(
        r"with 2-bit keys and fetched misses (\d+) from budgets of ([\d,]+) up, (\d+) from ([\d,]+)"
        r" up and (\d+) below",
        README.read_text(),
    )
    assert sentence is not None
    most, high, middle, low, least = (int(part.replace(",", "")) for part in sentence.groups())
    for budget in range(1, 3000):
        said = most if budget >= high else middle if budget >= low else least
        assert OasisConfig(budget=budget, sink_tokens=0).block_tokens == said, budget
