"""What one layer of the cache is made of, and how all of it grows, changes its batch and ends."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

from torch import Tensor

from ..config import OasisConfig
from ..geometry import GROWTH_TOKENS, LayerGeometry, ceil_div, round_up
from ..index import build_index, group_tokens, index_class
from ..ops import Rules, choose_backend, kernels
from ..stats import LayerCounters
from . import BlockStore, ResidentPool, Tail, limits, store_class
from .frontier import Frontier
from .limits import require
from .link import Allowance, Cap
from .residency import Residency
from .streams import Beside

_epochs = itertools.count(1)


def new_epoch() -> int:
    """A number that no memory of any layer of this process has had."""
    return next(_epochs)


class LayerParts:
    """Store, pool, tail, index, residency and frontier of one layer.

    A token enters the tail; once its index group is full and verified, the group goes to the store,
    is indexed, and its blocks become resident. Sequences are stored without their padding: token i
    of a row is its i-th real token, so that a padded row is the same as the row alone.

    Args:
        config: choices of the cache.
        key: K `[B, H, T, Dk]`, whose batch, heads, dims, dtype and device the parts have.
        value: V `[B, H, T, Dv]`, likewise.
        now_above: score above which a missing block is fetched before attention.
        store_layers: layers from this one to the last, which take host memory together.
        allowance: what may be fetched in the background; shared by the layers of a cache.

    Attributes:
        cold: whether the resident set is to be filled anew, after a prompt.
        borrowed: while a history is adopted, its first tokens that the store holds already; a host
            number.
        beside: fetches for the next step, on the side stream.
        epoch: number of the memory that the parts have; every change of it takes a new one, and no
            two layers of a process ever have the same.
    """

    def __init__(
        self,
        config: OasisConfig,
        key: Tensor,
        value: Tensor,
        now_above: float,
        store_layers: int,
        allowance: Allowance,
    ) -> None:
        device = key.device
        self.config, self.store_layers, self.allowance = config, store_layers, allowance
        self.now_above = now_above
        self.dtype, self.device = key.dtype, device
        self.batch_size, heads = key.shape[:2]
        index = index_class(config.index)
        self.geometry = LayerGeometry.plan(
            kv_heads=heads,
            k_dim=key.shape[-1],
            v_dim=value.shape[-1],
            itemsize=key.element_size(),
            block=config.block_tokens,
            group=group_tokens(index, config.block_tokens),
            budget=config.budget,
            head_room=config.head_room,
            recent=config.recent_tokens,
            rows=config.max_rows,
        )
        self.rules = Rules(
            block=self.geometry.block,
            group=self.geometry.group,
            recent=config.recent_tokens,
            flushes=ceil_div(config.max_rows, self.geometry.group),
            sinks=ceil_div(config.sink_tokens, self.geometry.block),
        )
        store = store_class(config.store)
        self.backend = choose_backend(config.backend, device, store.addressable)
        ops = kernels("reference")
        shape = (self.geometry, self.batch_size, self.dtype)
        self.frontier = Frontier(self.batch_size, device)
        self.store: BlockStore = store(*shape, device, self.backend)
        self.pool = ResidentPool(*shape, device)
        self.tail = Tail(*shape, device)
        self.residency = Residency(self.geometry, self.batch_size, device, ops, slots=0)
        sizes = (config.block_tokens, config.budget_blocks, config.reduction, self.batch_size)
        self.index = build_index(index, *sizes, key)
        self.counters = LayerCounters(device)
        self.beside = Beside(device)
        self.cold, self.borrowed = True, 0
        allowance.enter(self)
        self.renew()

    @property
    def sums(self) -> Tensor:
        """What a plan counts, as in `oasis_kernels.api.Parts`."""
        return self.counters.sums

    # ---- changes of memory ---------------------------------------------------------------------

    def renew(self) -> None:
        """End a change of storage: a part has other memory, another shape or other sequences.

        Every method that replaces a tensor of a part calls this. Whoever keeps what has the shape
        or the addresses of the parts (a step, a graph) keeps the epoch with it.
        """
        self.epoch = new_epoch()

    def join(self) -> None:
        """Make the current stream wait for what still runs on the side stream."""
        self.beside.join()
        self.store.beside.join()

    def release(self) -> None:
        """End the use of these parts, whose memory goes with them."""
        self.join()
        self.allowance.leave(self)

    def borrow(self, owner: LayerParts) -> None:
        """Use the host memory of parts of the same shape, with all that it holds."""
        lengths, committed = owner.frontier.settled()
        if len(set(lengths)) > 1 or owner.geometry.block != self.geometry.block:
            raise ValueError(
                f"owner: got sequences of {sorted(set(lengths))} tokens in blocks of "
                f"{owner.geometry.block}, expected one length and blocks of "
                f"{self.geometry.block}; copy its history instead"
            )
        wanted, got = self._form(), owner._form()
        if wanted != got:
            raise ValueError(
                f"owner: got (batch, heads, K dim, V dim, dtype, device, backend) {got}, expected "
                f"{wanted}; copy its history instead"
            )
        owner.join()
        # The same slabs, also those to come; a batch operation leaves the owner's as they are.
        owner.store.shared = True
        self.store, self.borrowed = copy.copy(owner.store), committed[0]
        self.renew()

    def _form(self) -> tuple[object, ...]:
        """What the shape of the host memory follows from, besides the block."""
        g = self.geometry
        shape = (self.batch_size, g.kv_heads, g.k_dim, g.v_dim)
        return *shape, self.dtype, self.device, self.backend

    def rowwise(self) -> list[Tensor]:
        """Every tensor that has a row per sequence: what `map_batch` replaces."""
        return [
            *self.store.slabs,
            *(t for part in (self.pool, self.tail) for t in (part.k, part.v)),
            *self.index.arrays.values(),
            *self.index.learned.values(),
            *self.residency.tables,
            *self.frontier.tensors,
        ]

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor that has a row per sequence by what `fn` makes of it."""
        self.join()
        parts = (self.store, self.pool, self.tail, self.index, self.residency, self.frontier)
        for part in parts:
            part.map_batch(fn)
        self.batch_size = self.frontier.lengths.shape[0]
        # What a step may fetch follows the batch.
        self.allowance.enter(self)
        self.renew()

    # ---- capacity ------------------------------------------------------------------------------

    def reserve(self, rows: int) -> None:
        """Make room for the new tokens in every part that grows, and count them."""
        self.grow(rows)
        self.frontier.columns += rows

    def _blocks_after(self, rows: int) -> int:
        """Blocks of all tokens once `rows` more are given, rounded up to groups."""
        tokens = self.frontier.columns + rows
        return round_up(tokens, self.geometry.group) // self.geometry.block

    def _room_after(self, rows: int) -> tuple[int, int]:
        """Blocks and slots that `rows` more tokens need."""
        need = self._blocks_after(rows)
        return need, self.geometry.slots_for(need)

    def fits(self, rows: int) -> bool:
        """Whether `rows` more tokens can be stored without replacing any tensor."""
        if self.unlearned_after(rows):
            return False
        need, slots = self._room_after(rows)
        return need <= min(self.store.blocks, self.index.capacity) and slots <= self.pool.slots

    def grow(self, rows: int) -> None:
        """Make room for `rows` more tokens in every part that grows; nothing else changes.

        The first of the layers that grow by as much in the same forward checks the memory for all
        of them, before any takes some.

        Raises:
            HostMemoryError: with the bytes needed and available, and what to change.
        """
        if self.fits(rows):
            return
        need, slots = self._room_after(rows)
        require(
            self._growth_bytes(need, slots) * self.store_layers,
            limits.available_bytes(),
            f"the full KV of {need} blocks x {self.batch_size} sequences x {self.store_layers} "
            "layers",
            "use a shorter context, a smaller batch or a machine with more memory",
        )
        self.join()
        self.store.ensure(need)
        self.index.ensure(self.store.blocks)
        self.pool.ensure(slots)
        self.residency.ensure(self.index.capacity, slots)
        self.renew()

    def _growth_bytes(self, need: int, slots: int) -> int:
        """Host memory that growing takes: old and new parts exist at the same time."""
        total = self.store.growth_bytes(need)
        if self.device.type == "cpu":
            g, batch = self.geometry, self.batch_size
            if need > self.index.capacity:
                total += self.index.bytes_for(self.store.blocks_for(need))
            if slots > self.pool.slots:
                total += g.fast_bytes(batch, slots) - self.tail.nbytes
        return total

    # ---- sizes of a step -----------------------------------------------------------------------

    @property
    def holds(self) -> int:
        """Blocks that hold the tokens given so far, rounded up to groups; changes with each."""
        return self._blocks_after(0)

    @property
    def covers(self) -> bool:
        """Whether a step chooses every block there is, whatever an index says of it."""
        return self.covers_after(0)

    def covers_after(self, rows: int) -> bool:
        """`covers`, once `rows` more tokens are given: graphs bake it in."""
        return self.wanted >= self._blocks_after(rows)

    def unlearned_after(self, rows: int) -> bool:
        """Whether the index is to be fitted to the context, once `rows` more tokens are given.

        While a step chooses every block there is, nothing has to be ranked.
        """
        outdated = self.index.outdated(self.frontier.columns + rows)
        return outdated and not self.covers_after(rows)

    @property
    def wanted(self) -> int:
        """Blocks that a step chooses per head: the budget's, or as many as there may be."""
        return min(self.geometry.budget_blocks, self.pool.slots)

    @property
    def scanned(self) -> int:
        """Blocks that a scan of the index covers: all that hold tokens, rounded up.

        A power of two where the capacity allows, so that it changes rarely: graphs bake it in.
        """
        return self.scanned_after(0)

    def scanned_after(self, rows: int) -> int:
        """`scanned`, once `rows` more tokens are given."""
        blocks = max(self._blocks_after(rows), 1)
        return min(1 << (blocks - 1).bit_length(), self.index.capacity)

    @property
    def cap(self) -> Cap:
        """What a step may fetch in the background."""
        return self.cap_after(0)

    def cap_after(self, rows: int) -> Cap:
        """`cap`, once `rows` more tokens are given: graphs bake it in.

        It follows the length in the steps by which the store grows, so it changes rarely.
        """
        return self.allowance.cap(self, round_up(self.frontier.columns + rows, GROWTH_TOKENS))

    def step_bytes(self, tokens: int) -> int:
        """Bytes of fast memory that a step after `tokens` tokens must read of this layer."""
        per_sequence = self.geometry.attended_after(tokens) + self.index.scan_bytes(tokens)
        return self.batch_size * per_sequence

    def used_bytes(self) -> tuple[int, int]:
        """Bytes that hold tokens, of fast memory and of the store; waits for the device."""
        g, (lengths, committed) = self.geometry, self.frontier.settled()
        resident = int((self.residency.block_of_slot[..., :-1] >= 0).sum())
        fast = resident * g.block_bytes + (sum(lengths) - sum(committed)) * g.token_bytes
        per_group = sum(array[:1, :, :1].nbytes for array in self.index.arrays.values())
        return fast + sum(committed) // g.group * per_group, sum(committed) * g.token_bytes
