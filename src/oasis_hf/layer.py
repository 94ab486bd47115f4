"""One layer of the cache: Transformers' layer contract over store, pool, tail, index and residency."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .compat import CacheLayerMixin
from .config import OasisConfig
from .dense import dense_attention
from .geometry import LayerGeometry, ceil_div, round_up
from .handle import OasisLength, attach
from .index import index_class
from .ledger import PaddingLedger
from .ops import kernels
from .residency import Residency, StepPlan
from .stats import LayerCounters
from .tiers import HostStore, ResidentPool, Tail


@dataclass
class _Rows:
    """The tokens of the forward in progress.

    Attributes:
        dense: whether they attend to everything (a prompt).
        before: tokens of each sequence before them; host numbers, dense only.
        positions: `[B, T]` their positions, sparse only.
    """

    dense: bool
    before: list[int]
    positions: Tensor | None


class OasisLayer(CacheLayerMixin):
    """Full attention of one model layer, offloaded and attended to sparsely.

    Sequences are stored without their padding: token i of a row is its i-th real token, so that a
    padded row is the same as the row alone.

    Args:
        config: choices of the cache.
        layer_idx: number of the model layer, for messages.
        ledger: which columns are padding, shared by the cache's layers.
        leads: whether this is the layer that records new columns.
        store_layers: offloaded layers from this one to the last, which take host memory together.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        config: OasisConfig,
        layer_idx: int,
        ledger: PaddingLedger,
        leads: bool = True,
        store_layers: int = 1,
    ) -> None:
        super().__init__()
        self.config, self.layer_idx, self.store_layers = config, layer_idx, store_layers
        self.ledger, self.leads = ledger, leads
        self.recording = False
        self.columns = 0
        self.counters = LayerCounters()

    # ---- state ---------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Build the parts for K `[B, H, T, Dk]` and V `[B, H, T, Dv]` like these."""
        config, device = self.config, key_states.device
        self.dtype, self.device = key_states.dtype, device
        self.batch_size, heads = key_states.shape[:2]
        index = index_class(config.index)
        self.geometry = LayerGeometry.plan(
            kv_heads=heads,
            k_dim=key_states.shape[-1],
            v_dim=value_states.shape[-1],
            itemsize=key_states.element_size(),
            block=config.block_size,
            group=index.group_tokens(config.block_size),
            budget=config.budget,
            head_room=config.head_room,
            recent=config.recent_tokens,
            rows=config.max_rows,
        )
        self.ops = kernels(config.backend, device)
        shape = (self.geometry, self.batch_size, self.dtype)
        self.store = HostStore(*shape, config.backend)
        self.pool = ResidentPool(*shape, device, self.ops)
        self.tail = Tail(*shape, device, self.ops)
        self.residency = Residency(self.geometry, self.batch_size, device, self.ops)
        self.index = index(config.block_size, config.budget_blocks, config.reduction, self.ops)
        self.index.allocate(self.batch_size, heads, key_states)
        self.lengths = torch.zeros(self.batch_size, dtype=torch.long, device=device)
        self.committed = torch.zeros_like(self.lengths)
        self.cold = True
        self.fresh = 0
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Tokens given so far, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical sizes: what is resident does not change what a mask covers."""
        return OasisLength(self.columns + query_length), 0

    # ---- one forward ---------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, dense: bool = True, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new tokens' K and V; they are stored when the attention runs.

        Args:
            key_states: `[B, H, T, Dk]`.
            value_states: `[B, H, T, Dv]`.
            dense: whether these tokens are a prompt.

        Returns:
            The same tensors; the key carries the handle that `oasis_attention` looks for.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states)
        self._dense = dense
        attach(self, key_states)
        return key_states, value_states

    def _check(self, key: Tensor) -> None:
        if key.shape[0] != self.batch_size:
            raise ValueError(
                f"batch size: got {key.shape[0]}, expected {self.batch_size}, the batch that this "
                "cache holds; use a new cache, cache.reset(), or cache.batch_select_indices()"
            )
        expected = (self.geometry.kv_heads, self.geometry.k_dim, self.dtype, self.device)
        got = (key.shape[1], key.shape[3], key.dtype, key.device)
        if got != expected:
            raise ValueError(
                f"layer {self.layer_idx}: got keys of (heads, dim, dtype, device) {got}, expected "
                f"{expected}; use a new cache for another model"
            )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        scaling: float,
        new: bool,
    ) -> Tensor:
        """Store the new tokens and attend.

        Args:
            query: `[B, Hq, T, D]`.
            key: `[B, H, T, Dk]` of the new tokens.
            value: `[B, H, T, Dv]`.
            valid: `[B, T]` bool, False for padding; None if all are real.
            scaling: factor of the logits.
            new: False where another model layer shares these K and V and they are stored already.

        Returns:
            `[B, Hq, T, Dv]`.
        """
        if new:
            self._open(key.shape[2])
        if self._dense:
            return self._attend_dense(query, key, value, valid, scaling, new)
        if new:
            self._append(key, value, valid)
        return self._attend_sparse(query, scaling)

    def _open(self, rows: int) -> None:
        """Make room for the new tokens in every part that grows."""
        group = self.geometry.group
        need = round_up(self.columns + rows, group) // self.geometry.block
        self.store.ensure(need, self.store_layers)
        self.index.ensure(self.store.blocks)
        self.residency.ensure(self.index.capacity)
        self.columns += rows

    # ---- decode and verification: fixed shapes, no host synchronisation ------------------------

    def _append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        for _ in range(ceil_div(self.config.max_rows, self.geometry.group)):
            self._flush()
        rows = key.shape[2]
        if valid is None:
            valid = torch.ones(self.batch_size, rows, dtype=torch.bool, device=self.device)
        seen = valid.long().cumsum(-1)
        positions = self.lengths[:, None] + seen - 1
        self.tail.write(key, value, positions, valid)
        self.lengths += seen[:, -1]
        self._rows = _Rows(False, [], positions)
        self.fresh = rows

    def _flush(self) -> None:
        """Move the oldest full group of the tail into store, index and pool.

        Everything in the tail at the start of a forward is verified: rejected drafts were cropped.
        """
        g = self.geometry
        per_group = g.group // g.block
        full = self.lengths - self.committed >= g.group + self.config.recent_tokens
        k, v = self.tail.read(self.committed, g.group)
        blocks_k, blocks_v = (t.unflatten(2, (per_group, g.block)) for t in (k, v))
        offset = torch.arange(per_group, device=self.device)
        blocks = self.committed[:, None] // g.block + offset
        self.store.write(blocks, blocks_k, blocks_v, full)
        self.index.write(self.committed // g.group, k, full)
        kept = min(per_group, g.slots)
        slots = self.residency.admit(blocks[:, -kept:], full)
        self.pool.write(slots, blocks_k[:, :, -kept:], blocks_v[:, :, -kept:])
        self.committed += torch.where(full, g.group, 0)

    def _attend_sparse(self, query: Tensor, scaling: float) -> Tensor:
        heads = self.geometry.kv_heads
        rows = query.unflatten(1, (heads, -1))
        assert self._rows.positions is not None
        mask = self.tail.mask(self.lengths, self.committed, self._rows.positions)
        score = self._score(rows.float() * scaling, mask)
        if self.cold:
            self._fill(score)
        plan = self.residency.step(
            score, self.geometry.budget_blocks, self.config.now_above, self.config.cap_blocks
        )
        if self.config.on_miss != "skip":
            self._fetch(plan.ids, plan.now)
        out = self.ops.sparse_attention(
            rows,
            self.pool.k,
            self.pool.v,
            plan.attended(self.residency.blocks),
            self.tail.k,
            self.tail.v,
            mask,
            scaling,
        )
        self._prefetch(plan)
        self.counters.step(plan)
        return out.flatten(1, 2)

    def _score(self, query: Tensor, tail_mask: Tensor) -> Tensor:
        """Score of every block for query rows `[B, H, G, T, D]`, sinks first: `[B, H, N]`."""
        block = self.geometry.block
        rest = self.ops.tail_logsumexp(query, self.tail.k, tail_mask)
        committed = self.committed // block
        score = self.index.score(query.flatten(2, 3), committed, rest)
        number = torch.arange(score.shape[-1], device=self.device)
        sinks = ceil_div(self.config.sink_tokens, block)
        sink = (number[None] < committed[:, None]) & (number < sinks)
        return torch.where(sink[:, None], float("inf"), score)

    def _fill(self, score: Tensor) -> None:
        """First sparse step after a prompt: make the best blocks resident, head-room included."""
        plan = self.residency.step(score, self.geometry.slots, float("-inf"), 0)
        self._fetch(plan.ids, plan.now)
        self.counters.fill(plan)
        self.cold = False

    def _prefetch(self, plan: StepPlan) -> None:
        """Fetch for the next step, behind the attention of this one."""
        if self.config.on_miss != "fetch":
            self._fetch(plan.ids, plan.later)

    def _fetch(self, ids: Tensor, slots: Tensor) -> None:
        """Copy blocks `[B, H, m]` from the store to slots (-1: none)."""
        k, v = self.store.gather(torch.where(slots >= 0, ids, -1))
        self.pool.write(slots, k, v)

    # ---- prompts: dense, host numbers allowed --------------------------------------------------

    def _attend_dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        scaling: float,
        new: bool,
    ) -> Tensor:
        if new:
            self._rows = _Rows(True, self.lengths.tolist(), None)
        before = self._rows.before
        if valid is not None and bool(valid.all()):
            valid = None
        all_k, all_v, all_valid = key, value, valid
        if any(before):
            old_k, old_v, old_valid = self.history(before)
            all_k, all_v = torch.cat([old_k, key], 2), torch.cat([old_v, value], 2)
            if valid is not None or old_valid is not None:
                real = [
                    torch.ones(self.batch_size, k.shape[2], dtype=torch.bool, device=self.device)
                    if given is None
                    else given
                    for given, k in ((old_valid, old_k), (valid, key))
                ]
                all_valid = torch.cat(real, 1)
        out = dense_attention(query, all_k, all_v, all_valid, scaling)
        if new:
            self.extend(key, value, valid)
        return out

    def history(self, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The first tokens of each sequence, read back from store and tail.

        Args:
            lengths: tokens wanted of each sequence.

        Returns:
            k `[B, H, L, Dk]`, v `[B, H, L, Dv]` with L the longest, and valid `[B, L]` or None if
            all sequences are as long. Rows past a sequence's length are zeros.
        """
        longest = max(lengths)
        g = self.geometry
        shape = (self.batch_size, g.kv_heads, longest)
        k = torch.zeros(*shape, g.k_dim, dtype=self.dtype, device=self.device)
        v = torch.zeros(*shape, g.v_dim, dtype=self.dtype, device=self.device)
        for rows, committed, length in self._runs(lengths):
            stored = min(committed, length)
            if stored:
                blocks = self.store.read_range(rows, 0, ceil_div(stored, g.block))
                for target, part in zip((k, v), blocks, strict=True):
                    target[rows, :, :stored] = part.flatten(2, 3)[:, :, :stored]
            place = torch.arange(stored, length, device=self.device) % self.tail.places
            for target, ring in ((k, self.tail.k), (v, self.tail.v)):
                target[rows, :, stored:length] = ring[rows][:, :, place]
        if min(lengths) == longest:
            return k, v, None
        limit = torch.tensor(lengths, device=self.device)
        return k, v, torch.arange(longest, device=self.device)[None] < limit[:, None]

    def _runs(self, lengths: list[int]) -> list[tuple[slice, int, int]]:
        """Sequences that can be handled together: (rows, committed, length)."""
        committed = self.committed.tolist()
        if len(set(lengths)) == 1 and len(set(committed)) == 1:
            return [(slice(0, self.batch_size), committed[0], lengths[0])]
        return [
            (slice(row, row + 1), done, length)
            for row, (done, length) in enumerate(zip(committed, lengths, strict=True))
        ]

    def extend(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Store many tokens at once: full groups to the store and index, the rest to the tail."""
        keep = self.config.recent_tokens
        if self.recording:
            keep = max(keep, self.config.max_rows)
        for rows, committed, length in self._runs(self.lengths.tolist()):
            for part in [rows] if valid is None else _single(rows):
                k, v = key[part], value[part]
                if valid is not None:
                    real = valid[part.start]
                    k, v = k[:, :, real], v[:, :, real]
                self._extend_rows(part, committed, length, k, v, keep)
        self.cold = True
        self.fresh = 0

    def adopt(self, key: Tensor, value: Tensor, lengths: Tensor, columns: int) -> None:
        """Fill an empty layer with a saved history.

        Args:
            key: `[B, H, L, Dk]`; value `[B, H, L, Dv]`; without padding, zeros past a sequence's end.
            lengths: `[B]` tokens of each sequence.
            columns: tokens given, padding included.
        """
        self.lazy_initialization(key, value)
        self._open(columns)
        column = torch.arange(key.shape[2], device=self.device)
        self.extend(key, value, column[None] < lengths[:, None].to(self.device))

    def _extend_rows(
        self, rows: slice, committed: int, length: int, k: Tensor, v: Tensor, keep: int
    ) -> None:
        g = self.geometry
        held = torch.arange(committed, length, device=self.device) % self.tail.places
        k = torch.cat([self.tail.k[rows][:, :, held], k], 2)
        v = torch.cat([self.tail.v[rows][:, :, held], v], 2)
        total = k.shape[2]
        moved = max(0, total - keep) // g.group * g.group
        if moved:
            blocks_k, blocks_v = (t[:, :, :moved].unflatten(2, (-1, g.block)) for t in (k, v))
            self.store.write_range(rows, committed // g.block, blocks_k, blocks_v)
            groups = k[:, :, :moved].unflatten(2, (-1, g.group))
            self.index.write_range(rows, committed // g.group, groups)
        place = torch.arange(committed + moved, committed + total, device=self.device)
        place = place % self.tail.places
        self.tail.k[rows, :, place] = k[:, :, moved:]
        self.tail.v[rows, :, place] = v[:, :, moved:]
        self.lengths[rows] = committed + total
        self.committed[rows] = committed + moved

    # ---- cache operations: every part, always --------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens: -n removes n (no padding among them)."""
        self.drop(-tokens_to_remove, -tokens_to_remove)

    def drop(self, columns: int, tokens: "int | Tensor") -> None:
        """Take back the newest columns.

        Args:
            columns: how many, padding included.
            tokens: how many real tokens of each sequence, a number or `[B]`.
        """
        if not columns or not self.is_initialized:
            return
        self.columns -= columns
        self.lengths -= tokens
        if columns > self.fresh:
            self._reopen()
        self.fresh = max(0, self.fresh - columns)

    def _reopen(self) -> None:
        """Bring the last group back into the tail where tokens that had left it were removed."""
        g = self.geometry
        pairs = zip(self.lengths.tolist(), self.committed.tolist(), strict=True)
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
            self.residency.forget(row, start // g.block)

    def _map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        for part in (self.store, self.pool, self.tail, self.index, self.residency):
            part.map_batch(fn)
        self.lengths, self.committed = fn(self.lengths), fn(self.committed)
        self.batch_size = self.lengths.shape[0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row beam_idx[i]."""
        self._map_batch(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows."""
        self._map_batch(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows `indices` (numbers or a bool mask)."""
        self._map_batch(lambda t: t[indices.to(t.device)])

    def reset(self) -> None:
        """Forget everything and give all memory back."""
        self.columns = 0
        self.counters = LayerCounters()
        if self.is_initialized:
            self.is_initialized = False
            del self.store, self.pool, self.tail, self.index, self.residency

    def offload(self) -> None:
        """Nothing to do: this layer owns its transfers."""

    def prefetch(self) -> None:
        """Nothing to do: this layer owns its transfers."""


def _single(rows: slice) -> list[slice]:
    return [slice(row, row + 1) for row in range(rows.start, rows.stop)]
