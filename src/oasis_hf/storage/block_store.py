"""The interface of a block store: where the full K and V of one layer are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..geometry import LayerGeometry
from .streams import Beside


class BlockStore(ABC):
    """Every verified block of one layer, of B sequences and H KV heads, block by block.

    A class is passed as `OasisCache(store=...)`, and built once for each layer. `PinnedStore`, the
    default, keeps blocks as they are in pinned host memory; a subclass of it that only keeps them
    in another form needs `pack` and `unpack` alone.

    Args:
        geometry: sizes of the layer's parts.
        batch: sequences B.
        dtype: of K and V.
        device: of the layer.
        backend: that the layer's steps run on.

    Attributes:
        name: identifies the store in saved caches.
        addressable: whether kernels may follow `table` to the blocks, as they are in
            `oasis_kernels.api.Store`. Without that, steps run on the torch backend.
        slabs: all tensors that hold blocks, each `[B, H, ...]` with a row per sequence.
        shared: whether others hold the same slabs, which must then stay as they are.
        table: addresses of the slabs on the device, where it can reach them; None elsewhere.
        beside: writes that run on the side stream; whoever reads on the current stream joins first.
    """

    name: ClassVar[str]
    addressable: ClassVar[bool] = False

    def __init__(
        self,
        geometry: LayerGeometry,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
    ) -> None:
        self.geometry, self.batch, self.dtype = geometry, batch, dtype
        self.slabs: list[Tensor] = []
        self.shared = False
        self.table: Tensor | None = None
        self.beside = Beside(device)

    # ---- capacity ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Capacity N: blocks of each sequence that can be stored."""

    @property
    @abstractmethod
    def slab_blocks(self) -> int:
        """Blocks of every slab, for kernels; any number where the store is not addressable."""

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes of one block of one head, as it is stored and moved."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(slab.nbytes for slab in self.slabs)

    @abstractmethod
    def blocks_for(self, blocks: int) -> int:
        """Capacity once `ensure` has been asked for `blocks` blocks."""

    @abstractmethod
    def growth_bytes(self, blocks: int) -> int:
        """Host memory that `ensure` takes before it gives any back."""

    @abstractmethod
    def ensure(self, blocks: int) -> None:
        """Grow to at least `blocks` blocks; what is stored stays.

        Raises:
            HostMemoryError: the memory cannot be had; nothing has changed.
        """

    def taken(self, size: int) -> int:
        """Bytes of host memory that a tensor of `size` bytes takes here."""
        return size

    # ---- blocks --------------------------------------------------------------------------------

    @abstractmethod
    def write(self, blocks: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> None:
        """Write the blocks that leave the tail in a step.

        Args:
            blocks: `[B, m]` int64 block numbers, the same for every head.
            k: `[B, H, m, b, Dk]`; v: `[B, H, m, b, Dv]`.
            keep: `[B]` bool, sequences that write.
        """

    @abstractmethod
    def write_range(self, rows: slice, first: int, k: Tensor, v: Tensor) -> None:
        """Write consecutive blocks from `first` for some sequences: k `[B', H, n, b, Dk]`."""

    @abstractmethod
    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks `[B, H, m]` (int64; those below 0 give unspecified rows).

        Returns:
            k `[B, H, m, b, Dk]` and v `[B, H, m, b, Dv]`, on the host or the device.
        """

    @abstractmethod
    def read_range(self, rows: slice, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Read blocks first..last of some sequences: k `[B', H, n, b, Dk]`, v likewise."""

    @abstractmethod
    def buffer(self, count: int) -> Tensor:
        """Memory on the device for `count` stored blocks of one sequence: `[1, H, count, ...]`."""

    @abstractmethod
    def read_into(self, row: int, packed: Tensor) -> None:
        """Read the first blocks of a sequence into a `buffer`, on the current stream."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Stored blocks `[B', H, n, ...]` as k `[B', H, n, b, Dk]` and v, on their device."""

    def settle(self) -> None:  # noqa: B027 - most stores are written by the host alone
        """Wait until what the device writes here is visible to the host."""

    # ---- batch operations ----------------------------------------------------------------------

    @abstractmethod
    def like(self, slab: Tensor, batch: int) -> Tensor:
        """Memory of this store's kind for a slab of another batch size."""

    @abstractmethod
    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every slab by what `fn` makes of it, in memory from `like` or its own."""
