"""Nothing that is sized by batch, heads, type, device or capacity outlives a change of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Driver, assert_close, plain_attention
from memcheck import memcheck
from torch import Tensor

from oasis_hf import OasisCache

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("small_slabs"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's are in test_gpu_operations.py"),
]

FULL = {"budget": 160, "block_size": 16, "recent_tokens": 0, "sink_tokens": 16, "max_rows": 4}

OPERATIONS: dict[str, tuple[Callable[[OasisCache], Any], list[int]]] = {
    "grows": (lambda cache: cache.batch_repeat_interleave(3), [0, 0, 0, 1, 1, 1]),
    "shrinks": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "reorders": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "grows by picking": (
        lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])),
        [1, 0, 1],
    ),
}


class Spoken:
    """A layer of the Triton engine, and all K and V that it was given."""

    def __init__(self, batch: int, **options: Any) -> None:
        self.driver, self.batch = Driver(**FULL | options, backend="triton"), batch
        self.generator = torch.Generator().manual_seed(1)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def feed(self, rows: int) -> None:
        """One forward, whose attention must be plain attention over everything."""
        (q, k, v), (out,) = self.driver.feed_random(self.generator, self.batch, rows)
        self.keys.append(k)
        self.values.append(v)
        k, v = torch.cat(self.keys, 2), torch.cat(self.values, 2)
        for row in range(self.batch):
            assert_close(out[row], plain_attention(q[row], k[row], v[row]))

    def take(self, operation: Callable[[OasisCache], Any], rows: list[int]) -> None:
        """One batch operation."""
        operation(self.driver.cache)
        self.keys = [key[rows] for key in self.keys]
        self.values = [value[rows] for value in self.values]
        self.driver.seen, self.batch = self.driver.seen[rows], len(rows)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("index", ["keys2bit", "minmax"])
@pytest.mark.parametrize("steps", [0, 2], ids=["after a prompt", "after decode steps"])
def test_batch_operations_leave_no_buffer_of_the_old_batch(
    name: str, index: str, steps: int
) -> None:
    """Every address is in bounds, and every row attends to its own tokens."""
    operation, rows = OPERATIONS[name]
    with memcheck() as checked:
        spoken = Spoken(2, index=index)
        spoken.feed(61)
        for _ in range(steps):
            spoken.feed(1)
        spoken.take(operation, rows)
        # The last of these lets a group leave the tail.
        for _ in range(4 - steps):
            spoken.feed(1)
    assert checked.checked > 1000
