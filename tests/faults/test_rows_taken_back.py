"""Rows of a verification that are all taken back, the first one too."""

from __future__ import annotations

import pytest
import torch
from helpers import Driver, random_qkv


@pytest.mark.parametrize("index", ["minmax", "keys2bit"])
@pytest.mark.parametrize("block", [1, 4])
def test_the_tail_still_holds_what_a_sequential_verification_moved_out(
    block: int, index: str
) -> None:
    """A group that left the tail during the rows comes back to it, with its own tokens."""
    rows = 6
    driver = Driver(
        budget=64,
        block_size=block,
        index=index,
        verification="exact",
        recent_tokens=8,
        max_rows=rows,
        sink_tokens=0,
    )
    generator = torch.Generator().manual_seed(1)
    (_, keys, values), _ = driver.feed_random(generator, 1, 40)
    driver.cache.expect_drafts()
    for _ in range(12):
        driver.feed(*random_qkv(generator, 1, rows))
        driver.cache.crop(-rows)
        (_, k, v), _ = driver.feed_random(generator, 1, 1)
        driver.cache.crop(0)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    driver.feed(*random_qkv(generator, 1, rows))
    driver.cache.crop(-rows)
    held_k, held_v, _ = driver.layer.history([keys.shape[2]])
    assert torch.equal(held_k, keys) and torch.equal(held_v, values)
