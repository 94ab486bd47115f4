"""Caches that continue a prompt over the host memory of the cache that read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import forward, left_padded, prompt, tiny_model

from oasis_hf import OasisCache

STEPS = 90
"""Several groups of any index leave the tail in so many steps."""


def borrow(base: OasisCache, **options: Any) -> OasisCache:
    """A cache with other options over the same host memory."""
    cache = OasisCache(base.model, **options)
    cache.ledger.copy_from(base.ledger)
    for old, new in zip(base.offloaded, cache.offloaded, strict=True):
        k, v, _ = old.history(old.parts.frontier.lengths.tolist())
        new.adopt(k, v, old.parts.frontier.lengths, old.columns, owner=old)
    return cache


def memory(cache: OasisCache) -> list[int]:
    """Where the slabs of a cache's first layer are."""
    return [slab.data_ptr() for slab in cache.offloaded[0].parts.store.slabs]


@pytest.mark.parametrize("length", [20, 40, 200])
def test_borrowers_go_on_as_forks_do(length: int) -> None:
    """One after the other, at every boundary of groups, in the memory of the first."""
    model = tiny_model("llama")
    base = OasisCache(model, index="streaming", on_miss="skip")
    forward(model, prompt(length, 2), base)
    following = prompt(STEPS, 2, seed=9)
    for options in (
        {"budget": 64, "index": "keys2bit", "block_size": 16},
        {"budget": 32, "index": "minmax", "recent_tokens": 0},
    ):
        chosen = options | {"on_miss": "fetch"}
        fork, borrower = base.fork(**chosen), borrow(base, **chosen)
        for token in following.split(1, 1):
            assert torch.equal(
                forward(model, token, borrower)[:, -1], forward(model, token, fork)[:, -1]
            )
        assert borrower.get_seq_length() == fork.get_seq_length()
        for mine, its in zip(borrower.offloaded, fork.offloaded, strict=True):
            for one, other in zip(
                mine.history(mine.parts.frontier.lengths.tolist())[:2],
                its.history(its.parts.frontier.lengths.tolist())[:2],
                strict=True,
            ):
                assert torch.equal(one, other)
        assert memory(borrower) == memory(base) != memory(fork)


def test_what_was_read_is_still_there_after_borrowers() -> None:
    model = tiny_model("llama")
    base = OasisCache(model, index="streaming", on_miss="skip")
    forward(model, prompt(200, 2), base)
    before = [layer.history([200, 200])[:2] for layer in base.offloaded]
    borrower = borrow(base, budget=32, block_size=16)
    for token in prompt(STEPS, 2, seed=9).split(1, 1):
        forward(model, token, borrower)
    for layer, held in zip(base.offloaded, before, strict=True):
        assert all(
            torch.equal(*pair) for pair in zip(layer.history([200, 200])[:2], held, strict=True)
        )


def test_a_borrower_stores_what_takes_the_place_of_cropped_tokens() -> None:
    model = tiny_model("llama")
    base = OasisCache(model, index="streaming", on_miss="skip")
    forward(model, prompt(200, 2), base)
    options = {"budget": 64, "block_size": 16, "on_miss": "fetch"}
    fork, borrower = base.fork(**options), borrow(base, **options)
    for cache in (fork, borrower):
        cache.crop(-120)
        forward(model, prompt(150, 2, seed=3), cache)
    for mine, its in zip(borrower.offloaded, fork.offloaded, strict=True):
        assert torch.equal(mine.history([230, 230])[0], its.history([230, 230])[0])


def test_only_sequences_of_one_length_can_be_borrowed() -> None:
    model = tiny_model("llama")
    base = OasisCache(model, index="streaming", on_miss="skip")
    ids, mask = left_padded([0, 30], 200)
    forward(model, ids, base, mask)
    with pytest.raises(ValueError, match=r"owner: got sequences of \[170, 200\] tokens"):
        borrow(base, budget=32, block_size=16)


def test_blocks_of_another_size_cannot_be_borrowed() -> None:
    model = tiny_model("llama")
    base = OasisCache(model, index="streaming", on_miss="skip")
    forward(model, prompt(200, 2), base)
    with pytest.raises(ValueError, match="in blocks of 16, expected one length and blocks of 4"):
        borrow(base, budget=32)


@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
def test_a_borrower_that_began_in_inference_mode_goes_on_outside_of_it(index: str) -> None:
    """Tables that are made with a layer's contents are written to by later calls, however made."""
    model = tiny_model("llama")
    with torch.inference_mode():
        base = OasisCache(model, index="streaming", on_miss="skip")
        forward(model, prompt(200, 2), base)
        borrower = borrow(base, budget=64, index=index, block_size=16)
    with torch.no_grad():
        for token in prompt(STEPS, 2, seed=9).split(1, 1):
            forward(model, token, borrower)
    assert borrower.get_seq_length() == 200 + STEPS
