"""The full store: every verified block of one layer, in host memory, grown in slabs."""

from collections.abc import Callable

import psutil
import torch
from torch import Tensor

from ..geometry import GROWTH_TOKENS, LayerGeometry, ceil_div
from ..ops import kernels


class HostMemoryError(MemoryError):
    """The context does not fit in host memory; nothing was stored or lost."""


def available_bytes() -> int:
    """Host memory that can be taken without swapping."""
    return int(psutil.virtual_memory().available)


class HostStore:
    """Blocks `[B, H, N, row]` of one layer, a block's keys then its values.

    A slab covers a range of block numbers. Growing adds a slab and moves nothing. Each slab ends in
    a spill block that takes masked-out writes.
    """

    def __init__(
        self, geometry: LayerGeometry, batch: int, dtype: torch.dtype, backend: str
    ) -> None:
        self.geometry, self.batch, self.dtype = geometry, batch, dtype
        self.ops = kernels(backend, torch.device("cpu"))
        self.slabs: list[Tensor] = []

    @property
    def blocks(self) -> int:
        """Capacity N."""
        return sum(slab.shape[2] - 1 for slab in self.slabs)

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
        missing = blocks - self.blocks
        if missing <= 0:
            return
        if self.slabs:
            missing = max(missing, ceil_div(GROWTH_TOKENS, self.geometry.block))
        needed = self.geometry.store_bytes(self.batch, missing + 1) * layers
        free = available_bytes()
        if needed > free:
            raise HostMemoryError(
                f"host memory: {needed / 1e9:.2f} GB needed for the full KV of {blocks} blocks x "
                f"{self.batch} sequences x {layers} layers, {free / 1e9:.2f} GB available; use a "
                "shorter context, a smaller batch or a machine with more memory"
            )
        g = self.geometry
        self.slabs.append(
            torch.zeros(self.batch, g.kv_heads, missing + 1, g.row, dtype=self.dtype, device="cpu")
        )

    def _spans(self) -> list[tuple[int, int, Tensor]]:
        spans, first = [], 0
        for slab in self.slabs:
            count = slab.shape[2] - 1
            spans.append((first, count, slab))
            first += count
        return spans

    def _pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.flatten(3), v.flatten(3)], 3).to("cpu")

    def _unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
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
        rows, blocks, keep = self._pack(k, v), blocks.to("cpu"), keep.to("cpu")
        for first, count, slab in self._spans():
            local = blocks - first
            inside = keep[:, None] & (local >= 0) & (local < count)
            target = torch.where(inside, local, count)[:, None].expand(-1, slab.shape[1], -1)
            self.ops.scatter_blocks(slab, target, rows)

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks `[B, H, m]` (int64; those below 0 give unspecified rows), on the host.

        Returns:
            k `[B, H, m, b, Dk]` and v `[B, H, m, b, Dv]`.
        """
        blocks = blocks.to("cpu")
        result: Tensor | None = None
        for first, count, slab in self._spans():
            local = blocks - first
            rows = self.ops.gather_blocks(slab, local.clamp(0, count))
            result = rows if result is None else torch.where((local >= 0)[..., None], rows, result)
        assert result is not None, "gather from an empty store"
        return self._unpack(result)

    def write_range(self, rows: slice, first: int, k: Tensor, v: Tensor) -> None:
        """Write consecutive blocks from `first` for some sequences: k `[B', H, n, b, Dk]`."""
        packed, done = self._pack(k, v), 0
        for start, count, slab in self._spans():
            local = first + done - start
            take = min(count - local, packed.shape[2] - done)
            if 0 <= local < count and take > 0:
                slab[rows, :, local : local + take] = packed[:, :, done : done + take]
                done += take
        assert done == packed.shape[2], "write past the capacity of the store"

    def read_range(self, rows: slice, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Read blocks first..last of some sequences: k `[B', H, n, b, Dk]`, v likewise."""
        parts = [
            slab[rows, :, max(first - start, 0) : min(last - start, count)]
            for start, count, slab in self._spans()
            if first < start + count and last > start
        ]
        return self._unpack(torch.cat(parts, 2))

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation to every slab."""
        self.slabs = [fn(slab).contiguous() for slab in self.slabs]
        if self.slabs:
            self.batch = self.slabs[0].shape[0]
