"""The full store: every verified block of one layer, in host memory, grown in slabs."""

import itertools
from collections.abc import Callable, Iterator

import psutil
import torch
from torch import Tensor

from ..geometry import GROWTH_TOKENS, LayerGeometry, ceil_div
from ..ops import kernels
from ..streams import Beside, wait_for
from .pinned import pinned_empty

MAX_SLABS = 4096


class HostMemoryError(MemoryError):
    """The context does not fit in host memory; nothing was stored or lost."""


def available_bytes() -> int:
    """Host memory that can be taken without swapping."""
    return int(psutil.virtual_memory().available)


class HostStore:
    """Blocks `[B, H, N, row]` of one layer, a block's keys then its values.

    Slab i covers blocks i * slab_blocks and on, so an address follows from a block number. Growing
    adds a slab and moves nothing. Each slab ends in a spill block that takes masked-out writes.

    Attributes:
        slabs: tensors `[B, H, slab_blocks + 1, row]` in host memory.
        beside: writes that run on the side stream; whoever reads on the current stream joins first.
        table: `[MAX_SLABS]` int64 addresses of the slabs on the device, where the device can reach
            them; None elsewhere.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
    ) -> None:
        self.geometry, self.batch, self.dtype = geometry, batch, dtype
        self.ops = kernels("reference")
        self.slab_blocks = ceil_div(GROWTH_TOKENS, geometry.block)
        self.slabs: list[Tensor] = []
        self.table: Tensor | None = None
        self.beside = Beside(device)
        if backend == "triton":
            self.table = torch.zeros(MAX_SLABS, dtype=torch.long, device=device)

    @property
    def blocks(self) -> int:
        """Capacity N."""
        return len(self.slabs) * self.slab_blocks

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(slab.nbytes for slab in self.slabs)

    def ensure(self, blocks: int, layers: int = 1) -> None:
        """Grow to at least `blocks` blocks.

        Args:
            blocks: capacity asked for.
            layers: layers that will ask for as much in the same forward, this one included; all of
                them are checked against the available memory before the first takes any.

        Raises:
            HostMemoryError: with the bytes needed and available, and what to change.
        """
        missing = ceil_div(blocks - self.blocks, self.slab_blocks)
        if missing <= 0:
            return
        g, most = self.geometry, MAX_SLABS * self.slab_blocks
        if blocks > most:
            raise HostMemoryError(
                f"context: got {blocks * g.block:,} tokens, expected at most {most * g.block:,}, "
                "for which a store has room; use a shorter context"
            )
        needed = g.store_bytes(self.batch, missing * (self.slab_blocks + 1)) * layers
        free = available_bytes()
        if needed > free:
            raise HostMemoryError(
                f"host memory: {needed / 1e9:.2f} GB needed for the full KV of {blocks} blocks x "
                f"{self.batch} sequences x {layers} layers, {free / 1e9:.2f} GB available; use a "
                "shorter context, a smaller batch or a machine with more memory"
            )
        shape = (self.batch, g.kv_heads, self.slab_blocks + 1, g.row)
        for _ in range(missing):
            self._add(self._zeros(shape))

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self.table is not None and self.table.is_cuda:
            with torch.cuda.device(self.table.device):
                return pinned_empty(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype)

    def _add(self, slab: Tensor) -> None:
        if self.table is not None:
            self.table[len(self.slabs)] = slab.data_ptr()
        self.slabs.append(slab)

    def _pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.flatten(3), v.flatten(3)], 3)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks `[B', H, n, row]` as k `[B', H, n, b, Dk]` and v `[B', H, n, b, Dv]`: views."""
        g = self.geometry
        k, v = rows.split([g.block * g.k_dim, g.block * g.v_dim], 3)
        return k.unflatten(3, (g.block, g.k_dim)), v.unflatten(3, (g.block, g.v_dim))

    def write(self, blocks: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> None:
        """Write blocks where `keep`.

        Args:
            blocks: `[B, m]` int64 block numbers, the same for every head.
            k: `[B, H, m, b, Dk]`; v: `[B, H, m, b, Dv]`.
            keep: `[B]` bool.
        """
        rows = self._pack(k, v).to("cpu")
        blocks, keep = blocks.to("cpu"), keep.to("cpu")
        for number, slab in enumerate(self.slabs):
            local = blocks - number * self.slab_blocks
            inside = keep[:, None] & (local >= 0) & (local < self.slab_blocks)
            target = torch.where(inside, local, self.slab_blocks)[:, None]
            self.ops.scatter_blocks(slab, target.expand(-1, slab.shape[1], -1), rows)

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks `[B, H, m]` (int64; those below 0 give unspecified rows), on the host.

        Returns:
            k `[B, H, m, b, Dk]` and v `[B, H, m, b, Dv]`.
        """
        blocks = blocks.to("cpu")
        result: Tensor | None = None
        for number, slab in enumerate(self.slabs):
            local = blocks - number * self.slab_blocks
            rows = self.ops.gather_blocks(slab, local.clamp(0, self.slab_blocks))
            result = rows if result is None else torch.where((local >= 0)[..., None], rows, result)
        assert result is not None, "gather from an empty store"
        return self.unpack(result)

    def _pieces(self, first: int, last: int) -> list[tuple[Tensor, int, int]]:
        """The parts of slabs that hold blocks first..last: (slab, from, to)."""
        pieces = []
        for number, slab in enumerate(self.slabs):
            low = max(first - number * self.slab_blocks, 0)
            high = min(last - number * self.slab_blocks, self.slab_blocks)
            if low < high:
                pieces.append((slab, low, high))
        return pieces

    def _strips(self, rows: slice, first: int, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of contiguous memory `[n, row]`: in the store, and of blocks first.. in `packed`.

        Copies of that shape are what a copy engine moves by itself, beside all kernels.
        """
        done, last = 0, first + packed.shape[2]
        for slab, low, high in self._pieces(first, last):
            held, part = slab[rows, :, low:high], packed[:, :, done : done + high - low]
            for pair in itertools.product(range(held.shape[0]), range(held.shape[1])):
                yield held[pair], part[pair]
            done += high - low
        assert first + done == last, "beyond the capacity of the store"

    def write_range(self, rows: slice, first: int, k: Tensor, v: Tensor) -> None:
        """Write consecutive blocks from `first` for some sequences: k `[B', H, n, b, Dk]`."""
        packed = self._pack(k, v)
        with self.beside.run(packed):
            for held, part in self._strips(rows, first, packed):
                held.copy_(part, non_blocking=True)

    def buffer(self, count: int) -> Tensor:
        """Memory on the device for `count` blocks of one sequence: `[1, H, count, row]`."""
        g = self.geometry
        shape = (1, g.kv_heads, count, g.row)
        return torch.empty(shape, dtype=self.dtype, device=self.beside.device)

    def read_into(self, row: int, packed: Tensor) -> None:
        """Read the first blocks of a sequence into `[1, H, n, row]`, on the current stream."""
        for held, part in self._strips(slice(row, row + 1), 0, packed):
            part.copy_(held, non_blocking=True)

    def _settle(self) -> None:
        """Wait until what the device writes here is visible to the host."""
        if self.table is not None and self.table.is_cuda:
            wait_for(self.table.device)

    def read_range(self, rows: slice, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Read blocks first..last of some sequences: k `[B', H, n, b, Dk]`, v likewise."""
        self._settle()
        parts = [slab[rows, :, low:high] for slab, low, high in self._pieces(first, last)]
        return self.unpack(torch.cat(parts, 2))

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation to every slab."""
        self._settle()
        self.batch = fn(torch.empty(self.batch)).shape[0]
        old, self.slabs = self.slabs, []
        if self.table is not None:
            # Others that use the old slabs read the old table.
            self.table = torch.zeros_like(self.table)
        for slab in old:
            mapped = fn(slab)
            fresh = self._zeros(tuple(mapped.shape))
            self._add(fresh.copy_(mapped))
