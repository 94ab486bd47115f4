"""Which blocks are resident: choosing, comparing, evicting the least recently selected."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..geometry import LayerGeometry
from ..ops import Choice


class Residency:
    """Maps between blocks and slots of one layer, per sequence and KV head.

    Attributes:
        slot_of_block: `[B, H, N + 1]` int32, -1 where not resident.
        block_of_slot: `[B, H, S + 1]` int32, -1 where free.
        last_selected: `[B, H, S + 1]` int32 step of the last selection, -1 where free.
        clock: `[1]` int32, number of the current step.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        batch: int,
        device: torch.device,
        ops: ModuleType,
        slots: int | None = None,
    ) -> None:
        """Tables of `slots` slots, by default the geometry's; `ensure` adds blocks and slots."""
        self.ops, self.heads = ops, geometry.kv_heads

        def table(width: int) -> Tensor:
            shape = (batch, geometry.kv_heads, width + 1)
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        self.slot_of_block = table(0)
        slots = geometry.slots if slots is None else slots
        self.block_of_slot = table(slots)
        self.last_selected = table(slots)
        self.clock = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def blocks(self) -> int:
        """Capacity N."""
        return self.slot_of_block.shape[2] - 1

    @property
    def slots(self) -> int:
        """Number of slots S."""
        return self.block_of_slot.shape[2] - 1

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """slot_of_block, block_of_slot and last_selected."""
        return self.slot_of_block, self.block_of_slot, self.last_selected

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.slot_of_block.nbytes + self.block_of_slot.nbytes + self.last_selected.nbytes

    def ensure(self, blocks: int, slots: int = 0) -> None:
        """Grow the capacity to at least `blocks` blocks and `slots` slots; residents stay."""
        grown = (
            _widened(self.slot_of_block, blocks),
            _widened(self.block_of_slot, slots),
            _widened(self.last_selected, slots),
        )
        self.slot_of_block, self.block_of_slot, self.last_selected = grown

    def step(self, score: Tensor, count: int, now_above: float, later_cap: int) -> Any:
        """Choose the `count` best blocks and plan what has to move, at the next time.

        Args:
            score: `[B, H, N]`, -inf where a block may not be chosen.
            count: blocks wanted per head.
            now_above: score above which a missing block is fetched before attention.
            later_cap: blocks per head fetched afterwards at most.

        Returns:
            The reference backend's `StepPlan`.
        """
        self.clock += 1
        return self.ops.choose(self, score, Choice(count, now_above, later_cap))

    def admit(self, blocks: Tensor, keep: Tensor) -> Tensor:
        """Make blocks `[B, m]` of sequences `keep` `[B]` resident, which just left the tail.

        Returns:
            `[B, H, m]` slots, -1 where not admitted.
        """
        slots: Tensor = self.ops.admit(self, blocks, keep, self.clock)
        return slots

    def limit(self, blocks: Tensor) -> None:
        """Evict all blocks from number `blocks` `[B]` on: the tail took them back."""
        bound = blocks[:, None, None]
        number = torch.arange(self.slot_of_block.shape[2], device=blocks.device)
        self.slot_of_block.masked_fill_(number >= bound, -1)
        gone = self.block_of_slot >= bound
        self.block_of_slot.masked_fill_(gone, -1)
        self.last_selected.masked_fill_(gone, -1)

    def clear(self) -> None:
        """Evict everything."""
        for table in self.tables:
            table.fill_(-1)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation."""
        self.slot_of_block = fn(self.slot_of_block)
        self.block_of_slot = fn(self.block_of_slot)
        self.last_selected = fn(self.last_selected)


def _widened(table: Tensor, width: int) -> Tensor:
    """A table of at least `width` entries and the spill, which holds what `table` does."""
    old = table.shape[2] - 1
    if width <= old:
        return table
    grown = table.new_full((*table.shape[:2], width + 1), -1)
    grown[..., :old] = table[..., :old]
    return grown
