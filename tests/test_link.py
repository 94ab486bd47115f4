"""`fetch_cap="auto"`: what the link brings beside a step, without a link to measure."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers import Driver, generate, prompt, tiny_model

from oasis_hf import OasisCache
from oasis_hf.config import OasisConfig
from oasis_hf.facts.compat import weight_bytes
from oasis_hf.geometry import LayerGeometry, blocks_beside, capped_blocks
from oasis_hf.storage import link
from oasis_hf.storage.link import Allowance, Cap, on_grid

CUDA = torch.device("cuda", 0)
LINK, MEMORY, WEIGHTS = 54e9, 4e12, 16_000_000_000
SCAN = 128
"""Bytes of the index that a step reads for each token of a sequence."""


class Layer:
    """As much of a layer on a GPU as an allowance looks at."""

    def __init__(
        self, batch: int = 1, device: torch.device = CUDA, backend: str = "triton"
    ) -> None:
        self.batch_size, self.device, self.backend = batch, device, backend
        self.geometry = LayerGeometry.plan(
            kv_heads=8,
            k_dim=128,
            v_dim=128,
            itemsize=2,
            block=16,
            group=32,
            budget=2048,
            head_room=2.0,
            recent=32,
            rows=32,
        )

    def step_bytes(self, tokens: int) -> int:
        return self.batch_size * (self.geometry.attended_bytes + SCAN * tokens)


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the machine can do, to be changed by a test."""
    found = {"link": LINK, "memory": MEMORY}
    monkeypatch.setattr(link, "link_rate", lambda device: found["link"])
    monkeypatch.setattr(link, "memory_rate", lambda device: found["memory"])
    monkeypatch.setattr(link, "weight_bytes", lambda model: {CUDA: WEIGHTS})
    return found


def allowance(layers: list[Any], model: Any = None, **options: Any) -> Allowance:
    config = OasisConfig(**{"on_miss": "skip"} | options)
    found = Allowance(config, tiny_model("llama") if model is None else model)
    for layer in layers:
        found.enter(layer)
    return found


def cap(batch: int = 1, tokens: int = 131072, count: int = 32, **options: Any) -> Cap:
    layers = [Layer(batch) for _ in range(count)]
    return allowance(layers, **options).cap(layers[0], tokens)


# ---- arithmetic --------------------------------------------------------------------------------


def test_the_cap_is_what_the_link_brings_beside_the_floor_of_a_step() -> None:
    """Written out for 32 layers of 8 heads, blocks of 16 tokens of 128 + 128 numbers."""
    attended = (2048 + 96) * 8 * 256 * 2
    for batch in (1, 8, 32):
        floor = (WEIGHTS + 32 * batch * (attended + SCAN * 131072)) / MEMORY
        blocks = int(LINK * floor / (32 * batch * 8 * 16 * 256 * 2))
        found = cap(batch)
        assert (found.blocks, found.link) == (blocks, LINK)
        assert found.floor == pytest.approx(floor)
        assert 1 < blocks < 128


def test_the_same_numbers_give_the_same_cap() -> None:
    layers = [Layer(8) for _ in range(32)]
    one = allowance(layers)
    first = one.cap(layers[5], 32768)
    assert all(one.cap(layer, 32768) is first for layer in layers)
    assert cap(8, 32768) == first


def test_the_cap_grows_with_the_link_and_shrinks_with_the_batch(rates: dict[str, float]) -> None:
    found = []
    for factor in (0.25, 0.5, 1, 2, 4):
        rates["link"] = factor * LINK
        found.append([cap(batch).blocks for batch in (1, 2, 4, 8, 16, 32)])
    assert all(row == sorted(row, reverse=True) for row in found)
    assert all(list(column) == sorted(column) for column in zip(*found, strict=True))
    assert len({blocks for row in found for blocks in row}) > 5


def test_the_cap_is_at_least_one_block_and_at_most_the_budget(rates: dict[str, float]) -> None:
    rates["link"] = 1.0
    assert cap().blocks == 1
    rates["link"] = 1e18
    assert cap().blocks == 128
    assert blocks_beside(LINK, 1.0, 1, 4) == 4 and blocks_beside(LINK, 0.0, 1, 4) == 1


def test_noise_of_a_measurement_does_not_reach_the_cap() -> None:
    """What links of PCIe's third to sixth generation are measured at, and 5 % more or less."""
    for rate in (13e9, 26e9, 53e9, 106e9):
        assert {on_grid(rate * noise) for noise in (0.95, 1.0, 1.05)} == {on_grid(rate)}
        assert on_grid(rate) == pytest.approx(rate, rel=0.1)
        assert on_grid(2 * rate) == pytest.approx(2 * on_grid(rate))


def test_shares_of_the_budget_are_blocks() -> None:
    shares = (None, 0, 0.0, 0.001, 0.05, 1 / 6, 1)
    assert [capped_blocks(share, 128) for share in shares] == [128, 0, 0, 1, 6, 21, 128]


# ---- where there is a link ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer", [Layer(backend="reference"), Layer(device=torch.device("cpu"))], ids=["torch", "cpu"]
)
def test_without_a_link_auto_is_the_default_share(layer: Layer) -> None:
    assert allowance([layer]).cap(layer, 4096) == Cap(6)


def test_without_weights_auto_is_the_default_share(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    alone = Allowance(OasisConfig(on_miss="skip"))
    alone.enter(layer)
    assert alone.cap(layer, 4096) == Cap(6)
    monkeypatch.setattr(link, "weight_bytes", lambda model: {torch.device("cuda", 1): WEIGHTS})
    assert cap() == Cap(6)


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        pytest.param({"fetch_cap": 0.1}, 13, id="share"),
        pytest.param({"fetch_cap": 0}, 0, id="none"),
        pytest.param({"fetch_cap": None}, 128, id="no limit"),
        pytest.param({"on_miss": "fetch"}, 0, id="fetch"),
    ],
)
def test_no_link_is_measured_where_none_is_needed(
    options: dict[str, Any], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(link, "link_rate")
    assert cap(**options) == Cap(blocks)


def test_each_device_has_its_own_link_weights_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.device("cuda", 1)
    monkeypatch.setattr(link, "weight_bytes", lambda model: {CUDA: WEIGHTS, other: WEIGHTS // 4})
    layers = [Layer() for _ in range(24)] + [Layer(device=other) for _ in range(8)]
    shared = allowance(layers)
    here, there = (shared.cap(layer, 131072) for layer in (layers[0], layers[-1]))
    assert here == cap(count=24)
    assert here.floor is not None and there.floor is not None
    assert there.floor < here.floor / 2


def test_a_layer_counts_once_and_not_behind_its_end() -> None:
    layers = [Layer() for _ in range(4)]
    shared = allowance(layers)
    shared.enter(layers[0])
    assert shared.cap(layers[0], 4096) == cap(tokens=4096, count=4)
    shared.leave(layers.pop())
    del layers[-1]
    gc.collect()
    assert shared.cap(layers[0], 8192) == cap(tokens=8192, count=2)


# ---- in a cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("miss", ["skip", 0.02])
def test_on_a_cpu_auto_is_five_percent(miss: str | float) -> None:
    model, ids, tokens = tiny_model("llama"), prompt(700), []
    for chosen in ("auto", 0.05):
        cache = OasisCache(model, budget=640, on_miss=miss, fetch_cap=chosen)
        tokens.append(generate(model, ids, cache, 12))
        stats = cache.stats()
        assert (stats.cap_blocks, stats.cap_share) == (2, 0.05)
        assert stats.link_rate is None and stats.step_floor is None
        assert "2 blocks per head and step (5.0% of the budget)" in str(stats)
    assert torch.equal(*tokens)


def test_stats_say_what_the_cap_was_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Cap(3, LINK, 0.0041)
    monkeypatch.setattr(Allowance, "cap", lambda self, layer, tokens: chosen)
    driver = Driver(budget=96, recent_tokens=16, on_miss="skip")
    generator = torch.Generator().manual_seed(0)
    for rows in (300, 1):
        driver.feed_random(generator, 2, rows)
    stats = driver.cache.stats()
    assert (stats.cap_blocks, stats.cap_share) == (3, 0.5)
    assert (stats.link_rate, stats.step_floor) == (LINK, 0.0041)
    assert "(50.0% of the budget): a link of 54.00 GB/s beside a step of at least 4.10 ms" in str(
        stats
    )


def test_steps_fetch_as_much_as_the_cap_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length that it is asked for is rounded up, so it changes rarely."""
    asked = []

    def two(self: Allowance, layer: Any, tokens: int) -> Cap:
        asked.append(tokens)
        return Cap(2)

    monkeypatch.setattr(Allowance, "cap", two)
    driver = Driver(budget=96, recent_tokens=16, head_room=1, on_miss="skip", fetch_cap=None)
    generator = torch.Generator().manual_seed(0)
    driver.feed_random(generator, 1, 500)
    for _ in range(20):
        driver.feed_random(generator, 1, 1)
    counts = driver.layer.parts.counters.read()
    heads = driver.layer.parts.geometry.kv_heads
    assert 0 < counts["later"] <= 2 * heads * 20
    assert set(asked) == {4096}


def test_a_cache_shares_one_allowance_and_gives_layers_back() -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, budget=64, on_miss="skip")
    shared = {id(layer.allowance) for layer in cache.offloaded}
    assert len(shared) == 1
    found = cache.offloaded[0].allowance
    generate(model, prompt(100), cache, 4)
    assert len(found._layers) == len(cache.offloaded)
    cache.reset()
    assert not found._layers


# ---- what a step reads -------------------------------------------------------------------------


def test_weights_are_read_but_for_rows_of_the_embeddings() -> None:
    model = tiny_model("llama")
    everything = sum(parameter.nbytes for parameter in model.parameters())
    embeddings = model.get_input_embeddings().weight.nbytes
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    expected = everything - (0 if tied else embeddings)
    assert weight_bytes(model) == {torch.device("cpu"): expected}
    assert weight_bytes(torch.nn.Linear(3, 5, bias=False)) == {torch.device("cpu"): 60}


@pytest.mark.parametrize(
    ("index", "per_group"), [("keys2bit", (32, 2)), ("minmax", (16, 2)), ("mean", (16, 1))]
)
def test_a_step_reads_the_coarse_index_and_what_it_attends_to(
    index: str, per_group: tuple[int, int]
) -> None:
    model = tiny_model("llama")
    cache = OasisCache(model, budget=64, index=index)
    model(input_ids=prompt(320, 2), past_key_values=cache)
    layer, config = cache.offloaded[0], model.config
    keys = config.num_key_value_heads * config.head_dim * 4
    group, arrays = per_group
    attended = (64 + layer.parts.geometry.ring) * 2 * keys
    assert layer.parts.step_bytes(320) == 2 * (attended + 320 // group * arrays * keys)
