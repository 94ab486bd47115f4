"""One layer of the cache: Transformers' contract over store, pool, tail, index and residency."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .compat import CacheLayerMixin
from .config import OasisConfig
from .dense import dense_attention
from .geometry import ceil_div
from .handle import OasisLength, attach
from .ledger import PaddingLedger
from .residency import StepPlan
from .stats import LayerCounters
from .storage import LayerStorage


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


class OasisLayer(LayerStorage, CacheLayerMixin):
    """Full attention of one model layer, offloaded and attended to sparsely.

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
        self.build(key_states, value_states)
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
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        dense: bool = True,
        **kwargs: Any,
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
            self.reserve(key.shape[2])
        if self._dense:
            return self._attend_dense(query, key, value, valid, scaling, new)
        if new:
            self._append(key, value, valid)
        return self._attend_sparse(query, scaling)

    # ---- decode and verification: fixed shapes, no host synchronisation ------------------------

    def _append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        for _ in range(ceil_div(self.config.max_rows, self.geometry.group)):
            self.flush()
        rows = key.shape[2]
        if valid is None:
            valid = torch.ones(self.batch_size, rows, dtype=torch.bool, device=self.device)
        seen = valid.long().cumsum(-1)
        positions = self.lengths[:, None] + seen - 1
        self.tail.write(key, value, positions, valid)
        self.lengths += seen[:, -1]
        self._rows = _Rows(False, [], positions)
        self.fresh = rows

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
            self.fetch(plan.ids, plan.now)
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
        self.fetch(plan.ids, plan.now)
        self.counters.fill(plan)
        self.cold = False

    def _prefetch(self, plan: StepPlan) -> None:
        """Fetch for the next step, behind the attention of this one."""
        if self.config.on_miss != "fetch":
            self.fetch(plan.ids, plan.later)

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

    def adopt(self, key: Tensor, value: Tensor, lengths: Tensor, columns: int) -> None:
        """Fill an empty layer with a saved history.

        Args:
            key: `[B, H, L, Dk]`; value `[B, H, L, Dv]`; no padding, zeros past a sequence's end.
            lengths: `[B]` tokens of each sequence.
            columns: tokens given, padding included.
        """
        self.lazy_initialization(key, value)
        self.reserve(columns)
        column = torch.arange(key.shape[2], device=self.device)
        self.extend(key, value, column[None] < lengths[:, None].to(self.device))

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
            self.reopen()
        self.fresh = max(0, self.fresh - columns)

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.map_batch(fn)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row beam_idx[i]."""
        self._apply(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows."""
        self._apply(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows `indices` (numbers or a bool mask)."""
        self._apply(lambda t: t[indices.to(t.device)])

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
