"""The bounded working set in fast memory: resident blocks, and the tail of newest tokens."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ..geometry import LayerGeometry


class ResidentPool:
    """K and V `[B, H, S + 1, b, D]` of the resident blocks; the last slot is the spill.

    It has no slots at first: `ensure` gives it as many as the context needs.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: ModuleType,
    ) -> None:
        g = geometry
        shape = (batch, g.kv_heads, 1, g.block)
        self.ops = ops
        self.k = torch.zeros(*shape, g.k_dim, dtype=dtype, device=device)
        self.v = torch.zeros(*shape, g.v_dim, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.k.nbytes + self.v.nbytes

    @property
    def slots(self) -> int:
        """Number of slots S."""
        return self.k.shape[2] - 1

    def ensure(self, slots: int) -> None:
        """Grow to at least `slots` slots; all keep their number and what they hold."""
        old = self.slots
        if slots <= old:
            return
        grown = [t.new_zeros(*t.shape[:2], slots + 1, *t.shape[3:]) for t in (self.k, self.v)]
        for table, held in zip(grown, (self.k, self.v), strict=True):
            table[:, :, :old] = held[:, :, :old]
        self.k, self.v = grown

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Fill slots `[B, H, m]` (-1 is dropped) with k `[B, H, m, b, Dk]` and v."""
        target = torch.where(slots >= 0, slots, self.k.shape[2] - 1)
        self.ops.scatter_blocks(self.k.flatten(3), target, k.flatten(3).to(self.k.device))
        self.ops.scatter_blocks(self.v.flatten(3), target, v.flatten(3).to(self.v.device))

    def put(self, slots: Tensor, entries: Tensor, k: Tensor, v: Tensor) -> None:
        """Fill some of slots `[B, H, m]`: entries `[n]` of them flattened, k `[n, b * Dk]`, v."""
        place = self.ops.flat_rows(self.k, slots)[entries]
        for table, rows in ((self.k, k), (self.v, v)):
            table.view(-1, rows.shape[1]).index_copy_(0, place, rows)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation."""
        self.k, self.v = fn(self.k), fn(self.v)


class Tail:
    """A ring of the newest tokens, unverified ones included; position p sits at p mod R."""

    def __init__(
        self,
        geometry: LayerGeometry,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: ModuleType,
    ) -> None:
        g = geometry
        self.ops = ops
        self.k = torch.zeros(batch, g.kv_heads, g.ring + 1, g.k_dim, dtype=dtype, device=device)
        self.v = torch.zeros(batch, g.kv_heads, g.ring + 1, g.v_dim, dtype=dtype, device=device)

    @property
    def places(self) -> int:
        """Capacity R."""
        return self.k.shape[2] - 1

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.k.nbytes + self.v.nbytes

    def write(self, k: Tensor, v: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Put tokens k `[B, H, T, Dk]`, v at positions `[B, T]` where valid `[B, T]`."""
        self.ops.ring_write(self.k, k, positions, valid)
        self.ops.ring_write(self.v, v, positions, valid)

    def read(self, start: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Tokens from position start `[B]`: k `[B, H, count, Dk]` and v."""
        return self.ops.ring_read(self.k, start, count), self.ops.ring_read(self.v, start, count)

    def mask(self, lengths: Tensor, committed: Tensor, rows: Tensor) -> Tensor:
        """Which places each query row sees.

        Args:
            lengths: `[B]` tokens so far, the rows of this step included.
            committed: `[B]` tokens that left the tail for the store.
            rows: `[B, T]` positions of the query rows.

        Returns:
            `[B, T, R]` bool.
        """
        position = self.ops.ring_positions(lengths, self.places)
        held = position >= committed[:, None]
        return held[:, None] & (position[:, None] <= rows[:, :, None])

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation."""
        self.k, self.v = fn(self.k), fn(self.v)
