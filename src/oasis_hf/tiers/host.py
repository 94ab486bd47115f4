"""The full store: every verified block of one layer, in host memory, grown in slabs."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..geometry import GROWTH_TOKENS, LEAST_TOKENS, LayerGeometry, ceil_div
from ..ops import kernels
from ..streams import Beside, wait_for
from .limits import HostMemoryError, tightest
from .pinned import pinned_bytes, pinned_empty

MAX_SLABS = 4096


def available_bytes() -> int:
    """Host memory that can be taken without swapping, and without meeting a limit."""
    return tightest().free


class HostStore:
    """Blocks `[B, H, N, row]` of one layer, a block's keys then its values.

    Slab i covers blocks i * slab_blocks and on, so an address follows from a block number. Growing
    adds a slab and moves nothing, but for the first slab: a short context has a small one, which is
    replaced by one of twice the size until it is as large as those after it will be. Each slab ends
    in a spill block that takes masked-out writes.

    Attributes:
        slabs: tensors `[B, H, slab_blocks + 1, row]` in host memory.
        shared: whether others hold the same slabs, which must then stay as they are.
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
        self.slabs: list[Tensor] = []
        self.shared = False
        self.table: Tensor | None = None
        self.beside = Beside(device)
        if backend == "triton":
            self.table = torch.zeros(MAX_SLABS, dtype=torch.long, device=device)

    @property
    def slab_blocks(self) -> int:
        """Blocks of every slab, its spill block aside; 0 while there is none."""
        return self.slabs[0].shape[2] - 1 if self.slabs else 0

    @property
    def blocks(self) -> int:
        """Capacity N."""
        return len(self.slabs) * self.slab_blocks

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(slab.nbytes for slab in self.slabs)

    def _sizes(self, blocks: int) -> tuple[int, int]:
        """A capacity of at least `blocks` blocks: blocks of each slab, and how many slabs."""
        full = ceil_div(GROWTH_TOKENS, self.geometry.block)
        least = ceil_div(min(LEAST_TOKENS, GROWTH_TOKENS), self.geometry.block)
        size = min(full, max(least, 1 << (blocks - 1).bit_length()))
        size = max(size, self.slab_blocks)
        return size, max(ceil_div(blocks, size), len(self.slabs))

    def blocks_for(self, blocks: int) -> int:
        """Capacity once `ensure` has been asked for `blocks` blocks."""
        size, count = self._sizes(blocks)
        return max(size * count, self.blocks)

    def growth_bytes(self, blocks: int) -> int:
        """Host memory that `ensure` takes before it gives any back."""
        if blocks <= self.blocks:
            return 0
        size, count = self._sizes(blocks)
        fresh = count - (len(self.slabs) if size == self.slab_blocks else 0)
        return fresh * self.taken(self.geometry.store_bytes(self.batch, size + 1))

    def ensure(self, blocks: int) -> None:
        """Grow to at least `blocks` blocks; the caller has checked the memory for it.

        Raises:
            HostMemoryError: it cannot be had all the same; nothing has changed.
        """
        if blocks <= self.blocks:
            return
        size, count = self._sizes(blocks)
        if count > MAX_SLABS:
            block = self.geometry.block
            raise HostMemoryError(
                f"context: got {blocks * block:,} tokens, expected at most "
                f"{MAX_SLABS * size * block:,}, for which a store has room; use a shorter context"
            )
        shape = (self.batch, self.geometry.kv_heads, size + 1, self.geometry.row)
        kept = self.slabs if size == self.slab_blocks else []
        fresh = [self._zeros(shape) for _ in range(count - len(kept))]
        if self.slabs and not kept:
            # What it holds may still be on its way to or from the device.
            self.settle()
            fresh[0][:, :, : self.slab_blocks] = self.slabs[0][:, :, :-1]
        self.hold([*kept, *fresh])

    def taken(self, size: int) -> int:
        """Bytes of host memory that a tensor of `size` bytes takes here."""
        return pinned_bytes(size) if self._pins else size

    @property
    def _pins(self) -> bool:
        return self.table is not None and self.table.is_cuda

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self._pins:
            assert self.table is not None
            with torch.cuda.device(self.table.device):
                return pinned_empty(shape, self.dtype)
        try:
            return torch.zeros(shape, dtype=self.dtype, device="cpu")
        except RuntimeError as error:
            raise HostMemoryError(
                f"host memory: a slab of {shape} could not be had ({error}); use a shorter context "
                "or a smaller batch"
            ) from error

    def like(self, slab: Tensor, batch: int) -> Tensor:
        """Memory of this store's kind for a slab of another batch size."""
        return self._zeros((batch, *slab.shape[1:]))

    def hold(self, slabs: list[Tensor]) -> None:
        """Hold these slabs from now on. The list stays: layers of a benchmark share it."""
        if self.table is not None:
            addresses = [slab.data_ptr() for slab in slabs]
            self.table[: len(slabs)] = torch.tensor(addresses, dtype=torch.long)
        self.slabs[:] = slabs

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

    def pick(self, blocks: Tensor, keep: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Those of blocks `[B, H, m]` that are wanted, where all is in host memory.

        Args:
            blocks: int64.
            keep: `[B, H, m]` bool.

        Yields:
            For each slab that has some: which entries of the flattened `blocks` they are, `[n]`;
            their k `[n, b * Dk]` and v `[n, b * Dv]`, views of a copy.
        """
        g = self.geometry
        for number, slab in enumerate(self.slabs):
            local = blocks - number * self.slab_blocks
            inside = keep & (local >= 0) & (local < self.slab_blocks)
            entries = inside.flatten().nonzero().squeeze(1)
            if entries.shape[0]:
                place = self.ops.flat_rows(slab, local)[entries]
                rows = slab.flatten(0, 2).index_select(0, place)
                yield entries, *rows.split([g.block * g.k_dim, g.block * g.v_dim], 1)

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

    def settle(self) -> None:
        """Wait until what the device writes here is visible to the host."""
        if self.table is not None and self.table.is_cuda:
            wait_for(self.table.device)

    def read_range(self, rows: slice, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Read blocks first..last of some sequences: k `[B', H, n, b, Dk]`, v likewise."""
        self.settle()
        parts = [slab[rows, :, low:high] for slab, low, high in self._pieces(first, last)]
        return self.unpack(torch.cat(parts, 2))

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every slab by what `fn` makes of it, in memory from `like` or its own."""
        self.settle()
        slabs = [fn(slab) for slab in self.slabs]
        # Others that use the old slabs keep their list and read the old table.
        self.slabs, self.shared = [], False
        if self.table is not None:
            self.table = torch.zeros_like(self.table)
        self.hold(slabs)
        if slabs:
            self.batch = slabs[0].shape[0]
