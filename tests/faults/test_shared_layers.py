"""Layers that share K and V attend in turn over the same parts: none disturbs the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import DEVICE
from torch import Tensor

from oasis_hf.config import OasisConfig
from oasis_hf.layers.forward import Forward, Kind
from oasis_hf.layers.layer import OasisLayer
from oasis_hf.layers.ledger import PaddingLedger
from oasis_hf.ops import AttentionSpec
from oasis_hf.step.inputs import AttentionInputs

TOKENS, SHAPE = 400, (2, 1)
backends = pytest.mark.parametrize("backend", ["reference", "triton"])


def build(backend: str, **options: Any) -> OasisLayer:
    """A layer that holds a prompt of random tokens."""
    if backend == "triton":
        pytest.importorskip("triton")
    chosen = {"budget": 48, "head_room": 1.0, "sink_tokens": 0, "recent_tokens": 8, "max_rows": 4}
    layer = OasisLayer(OasisConfig(backend=backend, **(chosen | options)), 0, PaddingLedger())
    k, v = drawn(TOKENS, 2, seed=1)
    layer.adopt(k, v, torch.full((SHAPE[0],), TOKENS, device=DEVICE), TOKENS)
    return layer


def drawn(tokens: int, count: int, seed: int, heads: int = 1) -> tuple[Tensor, ...]:
    """Random states `[2, heads, tokens, 16]`, alike wherever they are drawn."""
    generator = torch.Generator().manual_seed(seed)
    shape = (SHAPE[0], heads, tokens, 16)
    return tuple(torch.randn(shape, generator=generator).to(DEVICE) for _ in range(count))


def step(layer: OasisLayer, queries: list[Tensor], seed: int) -> list[Tensor]:
    """One step, for which several model layers ask in turn."""
    key, value = drawn(1, 2, seed)
    layer.forward = Forward(Kind.DECODE, layer.columns, 1)
    inputs = AttentionInputs(queries[0], key, value, None, AttentionSpec(0.25))
    return [
        layer.attend(replace(inputs, query=query, new=not number))
        for number, query in enumerate(queries)
    ]


@backends
@pytest.mark.parametrize("index", ["minmax", "keys2bit"])
def test_what_another_layer_asked_for_changes_no_answer(backend: str, index: str) -> None:
    """Each gets what it gets alone, whatever had to leave the pool for those before it."""
    together, alone = build(backend, index=index), build(backend, index=index)
    for number in range(3):
        queries = [4 * q for q in drawn(1, 3, seed=50 + number, heads=2)]
        answers = step(together, queries, seed=90 + number)
        (want,) = step(alone, queries[-1:], seed=90 + number)
        torch.testing.assert_close(answers[-1], want)


@backends
def test_the_tables_stay_whole(backend: str) -> None:
    """No block is in two places, and every resident one is what the store has."""
    layer = build(backend, index="minmax", on_miss="skip", fetch_cap=None)
    for number in range(4):
        step(layer, list(drawn(1, 3, seed=10 + number, heads=2)), seed=30 + number)
    parts = layer.parts
    parts.join()
    parts.store.settle()
    block_of = parts.residency.block_of_slot[..., :-1].long()
    slot_of = parts.residency.slot_of_block[..., :-1].long()
    held = block_of >= 0
    assert int(held.sum()) == int((slot_of >= 0).sum()) > 0
    slots = torch.arange(block_of.shape[2], device=DEVICE).expand_as(block_of)
    assert torch.equal(slot_of.gather(2, block_of.clamp(min=0))[held], slots[held])
    k, v = parts.store.gather(torch.where(held, block_of, -1))
    for pool, stored in ((parts.pool.k, k), (parts.pool.v, v)):
        assert torch.equal(pool[:, :, :-1][held], stored.to(DEVICE)[held])
