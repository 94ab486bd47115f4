"""Where all K and V of one layer are, and how they move between tail, store, index and pool."""

import copy
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .config import OasisConfig
from .engine import build_engine
from .geometry import GROWTH_TOKENS, LayerGeometry, ceil_div, round_up
from .index import build_index, group_tokens, index_class
from .link import Allowance, Cap
from .ops import choose_backend, kernels
from .residency import Residency
from .stats import LayerCounters
from .tiers import HostStore, ResidentPool, Tail, host
from .tiers.limits import require

_epochs = itertools.count(1)


class LayerStorage:
    """The parts of one layer and the moves between them.

    A token enters the tail; once its index group is full and verified, the group goes to the store,
    is indexed, and its blocks become resident. Sequences are stored without their padding: token i
    of a row is its i-th real token, so that a padded row is the same as the row alone.

    Attributes:
        lengths: `[B]` tokens of each sequence.
        committed: `[B]` of these, tokens that left the tail for the store; a multiple of the group.
        columns: tokens given, padding included; a host number.
        fresh: newest columns that are certainly still in the tail; a host number.
        committed_before: `[B]` the same, before the rows of the last exact verification.
        in_turn: whether the newest rows were such a verification.
        cold: whether the resident set is to be filled anew, after a prompt.
        recording: whether drafts may be cropped after a forward; set by the cache.
        borrowed: while a history is adopted, its first tokens that the store holds already; a host
            number.
        allowance: what may be fetched in the background; shared by the layers of a cache.
        epoch: number of the memory that the parts have; every change of storage takes a new one,
            and no two layers of a process ever have the same. 0 before the first.
    """

    config: OasisConfig
    store_layers: int
    columns: int
    recording: bool
    allowance: Allowance
    epoch: int = 0

    def build(self, key: Tensor, value: Tensor) -> None:
        """Create all parts for K `[B, H, T, Dk]` and V `[B, H, T, Dv]` like these."""
        config, device = self.config, key.device
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
        self.backend = choose_backend(config.backend, device)
        self.ops = kernels("reference")
        shape = (self.geometry, self.batch_size, self.dtype)
        self.store = HostStore(*shape, device, self.backend)
        self.pool = ResidentPool(*shape, device, self.ops)
        self.tail = Tail(*shape, device, self.ops)
        self.residency = Residency(self.geometry, self.batch_size, device, self.ops, slots=0)
        sizes = (config.block_tokens, config.budget_blocks, config.reduction, self.batch_size)
        self.index = build_index(index, *sizes, key)
        self.lengths = torch.zeros(self.batch_size, dtype=torch.long, device=device)
        self.committed = torch.zeros_like(self.lengths)
        self.committed_before = torch.zeros_like(self.lengths)
        self.in_turn = False
        self._settled: tuple[list[int], list[int]] | None = None
        self.cold = True
        self.fresh = 0
        self.borrowed = 0
        self.counters = LayerCounters(device)
        self.engine = build_engine(self)
        self.allowance.enter(self)
        self.renew()

    def renew(self) -> None:
        """End a change of storage: a part has other memory, another shape or other sequences.

        Every method that replaces a tensor of a part calls this, so that nothing outlives the
        change: the engine builds its buffers anew, and graphs know their layers by the epoch.
        """
        self.epoch = next(_epochs)
        self.engine.fit()

    def release(self) -> None:
        """Give all memory back."""
        self.engine.join()
        self.allowance.leave(self)
        del self.store, self.pool, self.tail, self.index, self.residency, self.engine
        self.unsettle()
        self.epoch = next(_epochs)

    def borrow(self, owner: "LayerStorage") -> None:
        """Use the host memory of a layer of the same shape, with all that it holds."""
        lengths, committed = owner.settled()
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
        owner.engine.join()
        # The same slabs, also those to come; a batch operation leaves the owner's as they are.
        owner.store.shared = True
        self.store, self.borrowed = copy.copy(owner.store), committed[0]
        self.renew()

    def _form(self) -> tuple[object, ...]:
        """What the shape of the host memory follows from, besides the block."""
        g = self.geometry
        shape = (self.batch_size, g.kv_heads, g.k_dim, g.v_dim)
        return *shape, self.dtype, self.device, self.backend

    def reserve(self, rows: int) -> None:
        """Make room for the new tokens in every part that grows, and count them."""
        self.grow(rows)
        self.columns += rows

    def _blocks_after(self, rows: int) -> int:
        """Blocks of all tokens once `rows` more are given, rounded up to groups."""
        return round_up(self.columns + rows, self.geometry.group) // self.geometry.block

    def _room_after(self, rows: int) -> tuple[int, int]:
        """Blocks and slots that `rows` more tokens need."""
        need = self._blocks_after(rows)
        return need, self.geometry.slots_for(need)

    def fits(self, rows: int) -> bool:
        """Whether `rows` more tokens can be stored without replacing any tensor."""
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
            host.available_bytes(),
            f"the full KV of {need} blocks x {self.batch_size} sequences x {self.store_layers} "
            "layers",
            "use a shorter context, a smaller batch or a machine with more memory",
        )
        self.engine.join()
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

    @property
    def holds(self) -> int:
        """Blocks that hold the tokens given so far, rounded up to groups; changes with each."""
        return self._blocks_after(0)

    @property
    def covers(self) -> bool:
        """Whether a step chooses every block there is, whatever an index says of it."""
        return self.wanted >= self.holds

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
        return self.allowance.cap(self, round_up(self.columns + rows, GROWTH_TOKENS))

    def step_bytes(self, tokens: int) -> int:
        """Bytes of fast memory that a step behind `tokens` tokens must read of this layer."""
        per_sequence = self.geometry.attended_after(tokens) + self.index.scan_bytes(tokens)
        return self.batch_size * per_sequence

    def used_bytes(self) -> tuple[int, int]:
        """Bytes that hold tokens, of fast memory and of the store; waits for the device."""
        g, (lengths, committed) = self.geometry, self.settled()
        resident = int((self.residency.block_of_slot[..., :-1] >= 0).sum())
        fast = resident * g.block_bytes + (sum(lengths) - sum(committed)) * g.token_bytes
        per_group = sum(array[:1, :, :1].nbytes for array in self.index.arrays.values())
        return fast + sum(committed) // g.group * per_group, sum(committed) * g.token_bytes

    def history(self, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The first tokens of each sequence, read back from store and tail.

        Args:
            lengths: tokens wanted of each sequence.

        Returns:
            k `[B, H, L, Dk]`, v likewise with L the longest, and valid `[B, L]` or None if
            all sequences are as long. Tokens past a sequence's end are zeros.
        """
        self.engine.join()
        longest = max(lengths)
        k, v = self.history_buffers(self.batch_size, longest)
        for row, length in enumerate(lengths):
            self.recall(row, length, k[row : row + 1], v[row : row + 1])
            k[row, :, length:], v[row, :, length:] = 0, 0
        k, v = k[:, :, :longest], v[:, :, :longest]
        if min(lengths) == longest:
            return k, v, None
        limit = torch.tensor(lengths, device=self.device)
        return k, v, torch.arange(longest, device=self.device)[None] < limit[:, None]

    def history_buffers(self, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Memory for at least `tokens` tokens: k `[batch, H, L, Dk]` and v, L in whole blocks."""
        g = self.geometry
        shape = (batch, g.kv_heads, round_up(tokens, g.block))
        k = torch.empty(*shape, g.k_dim, dtype=self.dtype, device=self.device)
        return k, torch.empty(*shape, g.v_dim, dtype=self.dtype, device=self.device)

    def _stored(self, row: int, length: int) -> int:
        """Of the first tokens of a sequence, those in the store; the tail has the rest."""
        return min(self.settled()[1][row], length)

    def stored_blocks(self, row: int, length: int) -> int:
        """Blocks of the store that hold them."""
        return ceil_div(self._stored(row, length), self.geometry.block)

    def recall(
        self, row: int, length: int, k: Tensor, v: Tensor, packed: Tensor | None = None
    ) -> None:
        """Put the first tokens of a sequence into k `[1, H, L, Dk]` and v.

        L is in whole blocks; what stands behind the tokens is unspecified.

        Args:
            packed: the blocks `[1, H, stored_blocks, row]` that are in the store, if they have been
                read already.
        """
        blocks = self.stored_blocks(row, length)
        if packed is None:
            packed = self.store.buffer(blocks)
            self.store.read_into(row, packed)
        stored = self._stored(row, length)
        place = torch.arange(stored, length, device=self.device) % self.tail.places
        parts = zip((k, v), self.store.unpack(packed), (self.tail.k, self.tail.v), strict=True)
        for target, part, ring in parts:
            whole = target[:, :, : blocks * self.geometry.block]
            whole.unflatten(2, (-1, self.geometry.block)).copy_(part)
            target[:, :, stored:length] = ring[row : row + 1, :, place]

    def settled(self) -> tuple[list[int], list[int]]:
        """`lengths` and `committed` as host numbers.

        Waits for the device, unless a prompt set them last: whatever else does calls `unsettle`.
        """
        if self._settled is None:
            self._settled = self.lengths.tolist(), self.committed.tolist()
        return self._settled

    def unsettle(self) -> None:
        """Forget the host's copy of `lengths` and `committed`."""
        self._settled = None

    def _runs(self) -> list[tuple[slice, int, int]]:
        """Sequences that can be handled together: (rows, committed, length)."""
        lengths, committed = self.settled()
        if len(set(lengths)) == 1 and len(set(committed)) == 1:
            return [(slice(0, self.batch_size), committed[0], lengths[0])]
        return [
            (slice(row, row + 1), done, length)
            for row, (done, length) in enumerate(zip(committed, lengths, strict=True))
        ]

    @property
    def _tail_tokens(self) -> int:
        """Newest tokens that a prompt leaves in the tail."""
        recent = self.config.recent_tokens
        return max(recent, self.config.max_rows) if self.recording else recent

    def extend(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Store many tokens at once: full groups to the store and index, the rest to the tail."""
        keep = self._tail_tokens
        runs, lengths, committed = self._runs(), *map(list, self.settled())
        self.unsettle()
        for rows, done, length in runs:
            for part in [rows] if valid is None else _single(rows):
                k, v = key[part], value[part]
                if valid is not None:
                    real = valid[part.start]
                    k, v = k[:, :, real], v[:, :, real]
                moved = self._extend_rows(part, done, length, k, v, keep)
                for row in range(part.start, part.stop):
                    lengths[row] += k.shape[2]
                    committed[row] += moved
        self._settled = lengths, committed
        self.cold = True
        self.fresh = 0

    def _extend_rows(
        self, rows: slice, committed: int, length: int, k: Tensor, v: Tensor, keep: int
    ) -> int:
        """Returns how many tokens left the tail or never entered it."""
        g = self.geometry
        place = torch.arange(committed, length, device=self.device) % self.tail.places
        k = torch.cat([self.tail.k[rows][:, :, place], k], 2)
        v = torch.cat([self.tail.v[rows][:, :, place], v], 2)
        total = k.shape[2]
        moved = max(0, total - keep) // g.group * g.group
        if moved:
            # What a borrowed store holds already is not written again.
            held = min(max(0, self.borrowed - committed), moved) // g.block * g.block
            if held < moved:
                parts = (t[:, :, held:moved].unflatten(2, (-1, g.block)) for t in (k, v))
                self.store.write_range(rows, (committed + held) // g.block, *parts)
            groups = k[:, :, :moved].unflatten(2, (-1, g.group))
            self.index.write_range(rows, committed // g.group, groups)
            # From here on the ring may lose what is in the store.
            self.committed[rows] = committed + moved
        place = torch.arange(committed + moved, committed + total, device=self.device)
        place = place % self.tail.places
        self.tail.k[rows, :, place] = k[:, :, moved:]
        self.tail.v[rows, :, place] = v[:, :, moved:]
        self.lengths[rows] = committed + total
        return moved

    def reopen(self) -> None:
        """Bring the last group back into the tail where tokens that had left it were removed."""
        g = self.geometry
        self.engine.join()
        pairs = list(zip(*self.settled(), strict=True))
        self.unsettle()
        for row, (length, committed) in enumerate(pairs):
            if length >= committed:
                continue
            start = length // g.group * g.group
            rows = slice(row, row + 1)
            if length > start:
                k, v = self.store.read_range(rows, start // g.block, ceil_div(length, g.block))
                place = torch.arange(start, length, device=self.device) % self.tail.places
                for ring, part in ((self.tail.k, k), (self.tail.v, v)):
                    tokens = part.flatten(2, 3)[:, :, : length - start].to(self.device)
                    ring[rows, :, place] = tokens
            self.committed[row] = start
        self.residency.limit(self.committed // g.block)

    def span(self, row: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Tokens first..last of a sequence: k `[1, H, last - first, Dk]` and v, on the device."""
        g, rows = self.geometry, slice(row, row + 1)
        stored = min(max(self.settled()[1][row], first), last)
        place = torch.arange(stored, last, device=self.device) % self.tail.places
        parts = [(self.tail.k[rows][:, :, place], self.tail.v[rows][:, :, place])]
        if stored > first:
            begin = first // g.block
            found = self.store.read_range(rows, begin, ceil_div(stored, g.block))
            inside = slice(first - begin * g.block, stored - begin * g.block)
            k, v = (x.flatten(2, 3)[:, :, inside].to(self.device) for x in found)
            parts.insert(0, (k, v))
        k, v = (torch.cat(states, 2) for states in zip(*parts, strict=True))
        return k, v

    def cut(self, lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Take the newest tokens of each sequence out of every part.

        Args:
            lengths: tokens that each sequence keeps.

        Returns:
            For each sequence what was taken: k `[1, H, n, Dk]` and v, in host memory.
        """
        self.engine.join()
        held = self.settled()[0]
        taken = [self.span(row, keep, held[row]) for row, keep in enumerate(lengths)]
        if lengths != held:
            self.lengths.copy_(torch.tensor(lengths, device="cpu"))
            self.unsettle()
            self.fresh, self.in_turn = 0, False
            self.reopen()
        return [(k.cpu(), v.cpu()) for k, v in taken]

    def give(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        """Append tokens to each sequence: k `[1, H, n, Dk]` and v, n of its own."""
        self.engine.join()
        lengths, committed = map(list, self.settled())
        self.unsettle()
        for row, states in enumerate(parts):
            k, v = (x.to(self.device) for x in states)
            if k.shape[2]:
                rows = slice(row, row + 1)
                self._extend_rows(rows, committed[row], lengths[row], k, v, self._tail_tokens)
        self.fresh, self.cold = 0, True

    def take_back(self) -> None:
        """Return to the tail the groups that left it behind drafts which were then rejected.

        The ring still holds them. Where they would have left it anyway, a step later at most, they
        stay out: the tail is that of a sequence that never saw the drafts.
        """
        g = self.geometry
        due = torch.div(
            self.lengths - 1 - self.config.recent_tokens, g.group, rounding_mode="floor"
        )
        kept = torch.minimum(self.committed, torch.maximum(due * g.group, self.committed_before))
        self.committed.copy_(kept)
        self.residency.limit(self.committed // g.block)

    def roll_back(self, columns: int, lengths: Tensor | None) -> None:
        """Return to the first columns, whatever a forward that broke off has left behind.

        Args:
            columns: columns to keep.
            lengths: `[B]` real tokens among them, or None if all are real.
        """
        self.engine.join()
        self.columns, self.fresh, self.cold, self.in_turn = columns, 0, True, False
        if lengths is None:
            self.lengths.fill_(columns)
        else:
            self.lengths.copy_(lengths)
        self.unsettle()
        self.reopen()
        # A slot may have been given to a block that never arrived.
        self.residency.clear()

    def rowwise(self) -> list[Tensor]:
        """Every tensor that has a row per sequence: what `map_batch` replaces."""
        return [
            *self.store.slabs,
            *(t for part in (self.pool, self.tail) for t in (part.k, part.v)),
            *self.index.arrays.values(),
            *self.residency.tables,
            *(self.lengths, self.committed, self.committed_before),
        ]

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor that has a row per sequence by what `fn` makes of it."""
        self.engine.join()
        for part in (self.store, self.pool, self.tail, self.index, self.residency):
            part.map_batch(fn)
        self.lengths, self.committed = fn(self.lengths), fn(self.committed)
        self.committed_before = fn(self.committed_before)
        self.unsettle()
        self.batch_size = self.lengths.shape[0]
        # What a step may fetch follows the batch.
        self.allowance.enter(self)
        self.renew()


def _single(rows: slice) -> list[slice]:
    return [slice(row, row + 1) for row in range(rows.start, rows.stop)]
