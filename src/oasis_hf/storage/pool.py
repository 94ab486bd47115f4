"""The bounded working set in fast memory: resident blocks, and the tail of newest tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..geometry import LayerGeometry


class _Pair:
    """K and V `[B, H, *places, D]`; the last place is the spill."""

    def __init__(
        self,
        geometry: LayerGeometry,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        *places: int,
    ) -> None:
        shape = (batch, geometry.kv_heads, *places)
        self.k = torch.zeros(*shape, geometry.k_dim, dtype=dtype, device=device)
        self.v = torch.zeros(*shape, geometry.v_dim, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.k.nbytes + self.v.nbytes

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation."""
        self.k, self.v = fn(self.k), fn(self.v)


class ResidentPool(_Pair):
    """K and V `[B, H, S + 1, b, D]` of the resident blocks.

    It has no slots at first: `ensure` gives it as many as the context needs.
    """

    def __init__(
        self, geometry: LayerGeometry, batch: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(geometry, batch, dtype, device, 1, geometry.block)

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


class Tail(_Pair):
    """A ring `[B, H, R + 1, D]` of the newest tokens, unverified ones too; p sits at p mod R."""

    def __init__(
        self, geometry: LayerGeometry, batch: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(geometry, batch, dtype, device, geometry.ring + 1)

    @property
    def places(self) -> int:
        """Capacity R."""
        return self.k.shape[2] - 1
