"""How one decode step runs: the same step, as torch operations or as fused kernels.

A step has fixed shapes and never waits for the device. Both engines read and write the same parts
of a layer's storage, so a layer may be prefilled, saved or cropped without knowing which it has.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .geometry import ceil_div
from .index import Index, Keys2BitIndex, MinMax8Index, MinMaxIndex
from .index.keys2bit import candidate_tokens
from .ops import kernels
from .streams import Beside

if TYPE_CHECKING:
    from .storage import LayerStorage


class Engine(ABC):
    """Runs the decode steps of one layer."""

    def __init__(self, storage: LayerStorage) -> None:
        # Not a cycle: a cache's memory is freed with its last reference, not by the collector.
        self.s: LayerStorage = weakref.proxy(storage)

    @property
    def flushes(self) -> int:
        """Groups that may leave the tail in one step: what a step adds at most, in groups."""
        return ceil_div(self.s.config.max_rows, self.s.geometry.group)

    @abstractmethod
    def append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
        """Move full groups out of the tail, then write new rows into it.

        Args:
            key: `[B, H, T, Dk]`.
            value: `[B, H, T, Dv]`.
            valid: `[B, T]` bool, or None if all rows are real.

        Returns:
            `[B, T]` int64 positions of the rows, -1 for padding: such a row sees nothing.
        """

    @abstractmethod
    def attend(self, query: Tensor, positions: Tensor, scaling: float) -> Tensor:
        """Choose blocks for query rows, fetch what must be there, attend, fetch the rest.

        Args:
            query: `[B, H, G, T, D]`.
            positions: `[B, T]` of the rows.
            scaling: factor of the logits.

        Returns:
            `[B, H, G, T, Dv]`.
        """

    @property
    def native(self) -> bool:
        """Whether the index is scanned by a kernel of this engine."""
        return False

    def fit(self) -> None:  # noqa: B027 - most engines keep nothing between steps
        """Build whatever has the shape of the storage anew: the storage has changed."""

    def _all_blocks(self, tail_mask: Tensor) -> Tensor:
        """Score `[B, H, N]` of a step that chooses every block; rows of padding want none.

        Args:
            tail_mask: `[B, T, R]` what each row sees of the tail; a real row sees at least itself.
        """
        s = self.s
        number = torch.arange(s.holds, device=s.device)
        live = number[None] < (s.committed // s.geometry.block)[:, None]
        live = live & tail_mask.flatten(1).any(1, keepdim=True)
        score = torch.where(live, float("inf"), float("-inf"))
        return score[:, None].expand(-1, s.geometry.kv_heads, -1)

    def join(self) -> None:  # noqa: B027 - most engines run nothing beside the current stream
        """Make the current stream wait for what still runs beside it."""


class ReferenceEngine(Engine):
    """Torch operations."""

    def append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
        """As in `Engine`."""
        s = self.s
        for _ in range(self.flushes):
            self._flush()
        rows = key.shape[2]
        if valid is None:
            valid = torch.ones(s.batch_size, rows, dtype=torch.bool, device=s.device)
        seen = valid.long().cumsum(-1)
        positions = s.lengths[:, None] + seen - 1
        s.tail.write(key, value, positions, valid)
        s.lengths += seen[:, -1]
        return torch.where(valid, positions, -1)

    def _flush(self) -> None:
        """Move the oldest full group of the tail into store, index and pool, where there is one."""
        s, g = self.s, self.s.geometry
        per_group = g.group // g.block
        full = s.lengths - s.committed >= g.group + s.config.recent_tokens
        if s.ops.readable(full) and not full.any():
            return
        k, v = s.tail.read(s.committed, g.group)
        blocks_k, blocks_v = (t.unflatten(2, (per_group, g.block)) for t in (k, v))
        offset = torch.arange(per_group, device=s.device)
        blocks = s.committed[:, None] // g.block + offset
        s.store.write(blocks, blocks_k, blocks_v, full)
        s.index.write(s.committed // g.group, k, full)
        kept = min(per_group, s.residency.slots)
        slots = s.residency.admit(blocks[:, -kept:], full)
        s.pool.write(slots, blocks_k[:, :, -kept:], blocks_v[:, :, -kept:])
        s.committed += torch.where(full, g.group, 0)

    def attend(self, query: Tensor, positions: Tensor, scaling: float) -> Tensor:
        """As in `Engine`."""
        s, config = self.s, self.s.config
        cap = s.cap.blocks
        mask = s.tail.mask(s.lengths, s.committed, positions)
        score = self._score(query.float() * scaling, mask)
        if s.cold:
            plan = s.residency.step(self._fill_score(score), s.residency.slots, float("-inf"), 0)
            self._fetch(plan.ids, plan.now)
            s.counters.fill(plan)
        # No graph bakes this size in, so it follows the context closely.
        plan = s.residency.step(score, min(s.wanted, s.holds), config.now_above, cap)
        if config.on_miss != "skip":
            self._fetch(plan.ids, plan.now)
        out = s.ops.sparse_attention(
            query,
            s.pool.k,
            s.pool.v,
            plan.attended(s.residency.blocks),
            s.tail.k,
            s.tail.v,
            mask,
            scaling,
        )
        if cap:
            # For the next step, behind the attention of this one.
            self._fetch(plan.ids, plan.later)
        s.counters.step(plan)
        return out

    def _score(self, query: Tensor, tail_mask: Tensor) -> Tensor:
        """Score of every block for query rows `[B, H, G, T, D]`, sinks first: `[B, H, N]`."""
        s, block = self.s, self.s.geometry.block
        if s.covers:
            return self._all_blocks(tail_mask)
        rest = s.ops.tail_logsumexp(query, s.tail.k, tail_mask)
        committed = s.committed // block
        score = s.index.score(query.flatten(2, 3), committed, rest)
        number = torch.arange(score.shape[-1], device=s.device)
        sinks = ceil_div(s.config.sink_tokens, block)
        sink = (number[None] < committed[:, None]) & (number < sinks)
        # Rows of padding want nothing, sinks included.
        sink = sink[:, None] & (rest > float("-inf")).any(-1, keepdim=True)
        return torch.where(sink, float("inf"), score)

    def _fill_score(self, score: Tensor) -> Tensor:
        """Score for the first fill; a sequence that has only padding in this step takes any block,
        the newest first."""
        s = self.s
        number = torch.arange(score.shape[-1], device=s.device)
        live = number[None] < s.committed[:, None] // s.geometry.block
        none = score.amax(-1, keepdim=True) == float("-inf")
        return torch.where(none & live[:, None], 0.0, score)

    def _fetch(self, ids: Tensor, slots: Tensor) -> None:
        """Copy blocks `[B, H, m]` from the store to slots (-1: none)."""
        s = self.s
        if s.ops.readable(slots):
            for entries, k, v in s.store.pick(ids, slots >= 0):
                s.pool.put(slots, entries, k, v)
            return
        k, v = s.store.gather(torch.where(slots >= 0, ids, -1))
        s.pool.write(slots, k, v)


class TritonEngine(Engine):
    """Fused kernels; background fetches on a side stream."""

    def __init__(self, storage: LayerStorage) -> None:
        super().__init__(storage)
        self.k: Any = kernels("triton")
        s = storage
        self.kind = _native_kind(s.index) if s.config.reduction == "mean" else 0
        self.beside = Beside(s.device)

    def fit(self) -> None:
        """As in `Engine`."""
        s, g = self.s, self.s.geometry
        # A gather may still read the old plan.
        self.beside.join()
        self.plan = self.k.Plan(s.batch_size * g.kv_heads, s.wanted, s.device)
        self.moved = torch.zeros(s.batch_size, dtype=torch.int32, device=s.device)

    @property
    def native(self) -> bool:
        """As in `Engine`."""
        return self.kind != 0

    def append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
        """As in `Engine`."""
        s, g = self.s, self.s.geometry
        self.join()
        rows = key.shape[2]
        positions = torch.empty(s.batch_size, rows, dtype=torch.long, device=s.device)
        valid = None if valid is None else valid.contiguous()
        self.k.advance(
            s.lengths,
            s.committed,
            s.residency.clock,
            self.plan.counts,
            valid,
            positions,
            self.moved,
            s.config.recent_tokens,
            g.group,
            self.flushes,
        )
        arrays = tuple(s.index.arrays.values()) if self.kind else ()
        if not self.kind:
            self._index_moved()
        self.k.append(
            key.contiguous(),
            value.contiguous(),
            valid,
            positions,
            self.moved,
            s.committed,
            s.residency.clock,
            (s.tail.k, s.tail.v),
            (s.pool.k, s.pool.v),
            s.residency.tables,
            s.store.table,
            s.store.slab_blocks,
            arrays,
            self.kind,
            g.group,
            self.flushes,
        )
        return positions

    def _index_moved(self) -> None:
        """Index the groups that leave the tail, for an index that has no kernel."""
        s, g = self.s, self.s.geometry
        start = s.committed - self.moved * g.group
        for number in range(self.flushes):
            first = start + number * g.group
            keys, _ = s.tail.read(first, g.group)
            s.index.write(first // g.group, keys, number < self.moved)

    def attend(self, query: Tensor, positions: Tensor, scaling: float) -> Tensor:
        """As in `Engine`."""
        s, cap = self.s, self.s.cap.blocks
        rows = query.contiguous().flatten(2, 3)
        # The last of a layer's rows may be asked for alone.
        positions = positions.contiguous()
        scores = self._scores(rows, positions, scaling)
        if s.cold:
            fill = self.k.Plan(rows.shape[0] * rows.shape[1], s.residency.slots, s.device)
            self._choose(scores, fill, s.residency.slots, 0, float("-inf"), True)
            self._gather(fill, 0)
        self._choose(
            scores,
            self.plan,
            s.wanted,
            cap,
            s.config.now_above,
            False,
        )
        if s.config.on_miss != "skip":
            self._gather(self.plan, 0)
        out = self.k.sparse_attention(
            rows,
            (s.pool.k, s.pool.v),
            self.plan.attended,
            (s.tail.k, s.tail.v),
            s.lengths,
            s.committed,
            positions,
            scaling,
        )
        if cap:
            # The memory must not be given to others before the transfer ends, whoever drops it.
            plan, pool, table = self.plan, s.pool, s.store.table
            assert table is not None
            with self.beside.run(plan.lists[1], plan.counts, table, pool.k, pool.v):
                self._gather(plan, 1)
        return out.unflatten(2, query.shape[2:4])

    def _scores(self, rows: Tensor, positions: Tensor, scaling: float) -> Any:
        s, g, k = self.s, self.s.geometry, self.k
        arrays = s.index.arrays
        if self.kind == 1:
            low, high = arrays["low"], arrays["high"]
            return k.bounds(
                rows, low, high, s.committed, positions, scaling, g.block, s.scanned, False
            )
        if self.kind == 2:
            groups = s.scanned * g.block // g.group
            low, step = arrays["lowest"], arrays["step"]
            coarse = k.bounds(
                rows, low, step, s.committed, positions, scaling, g.group, groups, True
            )
            wanted = ceil_div(candidate_tokens(g.budget_blocks * g.block), g.group)
            chosen = k.candidates(coarse, s.committed, min(wanted, groups), g.kv_heads, g.group)
            return k.keys2bit(
                rows,
                *arrays.values(),
                chosen,
                s.committed,
                s.tail.k,
                s.lengths,
                positions,
                scaling,
                g.block,
            )
        mask = s.tail.mask(s.lengths, s.committed, positions)
        if s.covers:
            return k.given(self._all_blocks(mask), positions)
        scaled = rows.float() * scaling
        rest = s.ops.tail_logsumexp(scaled.unflatten(2, (-1, positions.shape[1])), s.tail.k, mask)
        return k.given(s.index.score(scaled, s.committed // g.block, rest), positions)

    def _choose(
        self, scores: Any, plan: Any, count: int, cap: int, now_above: float, fill: bool
    ) -> None:
        s, g = self.s, self.s.geometry
        self.k.plan_step(
            scores,
            plan,
            s.committed,
            s.residency.tables,
            s.residency.clock,
            s.counters.sums,
            g.kv_heads,
            count,
            g.block,
            ceil_div(s.config.sink_tokens, g.block),
            cap,
            now_above,
            fill,
        )

    def _gather(self, plan: Any, which: int) -> None:
        s = self.s
        self.k.gather(
            plan.lists[which],
            plan.counts[which:],
            s.store.table,
            s.store.slab_blocks,
            (s.pool.k, s.pool.v),
        )

    def join(self) -> None:
        """As in `Engine`."""
        self.beside.join()
        self.s.store.beside.join()


def _native_kind(index: Index) -> int:
    """How the append kernel writes an index: 0 not at all, 1 bounds, 2 two-bit keys."""
    return {MinMaxIndex: 1, MinMax8Index: 1, Keys2BitIndex: 2}.get(type(index), 0)


def build_engine(storage: LayerStorage) -> Engine:
    """The engine of the storage's backend."""
    return TritonEngine(storage) if storage.backend == "triton" else ReferenceEngine(storage)
