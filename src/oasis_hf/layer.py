"""One layer of the cache: Transformers' contract over store, pool, tail, index and residency."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import batch
from .ambient import kept_steady
from .compat import CacheLayerMixin, columns_to_crop
from .config import OasisConfig
from .contents import ByColumn
from .forward import Forward, Kind
from .handle import OasisLength, OasisUnsupportedError, attach
from .ledger import PaddingLedger
from .link import Allowance
from .prompts import PromptLayer


class OasisLayer(ByColumn, PromptLayer, CacheLayerMixin):
    """Full attention of one model layer, offloaded and attended to sparsely.

    Args:
        config: choices of the cache.
        layer_idx: number of the model layer, for messages.
        ledger: which columns are padding, shared by the cache's layers.
        leads: whether this is the layer that records new columns.
        store_layers: offloaded layers from this one to the last, which take host memory together.
        allowance: what may be fetched in the background, shared by the cache's layers; by default
            what the config says without a link.
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
        allowance: Allowance | None = None,
    ) -> None:
        super().__init__()
        self.allowance = Allowance(config) if allowance is None else allowance
        self.config, self.layer_idx, self.store_layers = config, layer_idx, store_layers
        self.ledger, self.leads = ledger, leads
        self.recording = False
        self.columns = 0
        self.forward: Forward | None = None
        # `[B, T]` positions of the tokens of the forward in progress; None for a prompt.
        self._rows: Tensor | None = None

    # ---- state ---------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Build the parts for K `[B, H, T, Dk]` and V `[B, H, T, Dv]` like these."""
        self.build(key_states, value_states)
        self.is_initialized = True

    @kept_steady
    def adopt(
        self,
        key: Tensor,
        value: Tensor,
        lengths: Tensor,
        columns: int,
        owner: "OasisLayer | None" = None,
    ) -> None:
        """Fill an empty layer with a saved history.

        Args:
            key: `[B, H, L, Dk]`; value `[B, H, L, Dv]`; no padding, zeros past a sequence's end.
            lengths: `[B]` tokens of each sequence.
            columns: tokens given, padding included.
            owner: a layer that holds this history, with sequences of one length. Its host memory
                is used as it is, and nothing copied: whatever this layer stores from now on goes
                there too. The owner must not go on, and of several borrowers only the newest may.
        """
        self.lazy_initialization(key, value)
        try:
            if owner is not None:
                self.borrow(owner)
            self.reserve(columns)
        except BaseException:
            self.reset()
            raise
        if owner is not None:
            self.extend(key, value, None)
            # From now on tokens may be taken back, and others stored in their place.
            self.borrowed = 0
            return
        column = torch.arange(key.shape[2], device=self.device)
        self.extend(key, value, column[None] < lengths[:, None].to(self.device))

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
        forward: Forward | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Take the new tokens' K and V; they are stored when the attention runs.

        Args:
            key_states: `[B, H, T, Dk]`.
            value_states: `[B, H, T, Dv]`.
            forward: the forward that they come in; a prompt by default.

        Returns:
            The same tensors; the key carries the handle that `oasis_attention` looks for.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states)
        if forward is None:
            forward = Forward(Kind.PROMPT, self.columns, key_states.shape[2])
        self.forward = forward
        self.recording = self.recording or forward.drafting
        attach(self, key_states, value_states)
        return key_states, value_states

    def _check(self, key: Tensor) -> None:
        if key.shape[0] != self.batch_size:
            raise ValueError(
                f"batch size: got {key.shape[0]}, expected {self.batch_size}, the batch that this "
                "cache holds; use a new cache, cache.reset(), or cache.batch_select_indices()"
            )
        # The dtype is not compared: it follows autocast, and all are stored in that of the first.
        expected = (self.geometry.kv_heads, self.geometry.k_dim, self.device)
        got = (key.shape[1], key.shape[3], key.device)
        if got != expected:
            raise ValueError(
                f"layer {self.layer_idx}: got keys of (heads, dim, device) {got}, expected "
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
        assert self.forward is not None
        if self.forward.dense:
            self._rows = None
            if new and self.forward.drafts:
                return self._attend_prompt_and_drafts(query, key, value, valid, scaling)
            return self.attend_dense(query, key, value, valid, scaling, new)
        if self.config.verification == "exact" and key.shape[2] > 1:
            if not new:
                raise OasisUnsupportedError(
                    f"layer {self.layer_idx}: verification='exact' does not serve models that "
                    "share K and V between layers; use verification='shared'"
                )
            return self._attend_in_turn(query, key, value, valid, scaling)
        rows = query.unflatten(1, (self.geometry.kv_heads, -1))
        if new:
            self.unsettle()
            self.in_turn = False
            self._rows = self.engine.append(key, value, valid)
            self.fresh = self._fresh_after(key.shape[2])
        assert self._rows is not None
        out = self.engine.attend(rows, self._rows[:, -rows.shape[3] :], scaling)
        self.cold = False
        return out.flatten(1, 2)

    def _attend_in_turn(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        """The rows of a verification one after the other, each a step as in plain decoding."""
        self.unsettle()
        self.fresh, self.in_turn = key.shape[2], True
        self.committed_before.copy_(self.committed)
        query, outputs = query.unflatten(1, (self.geometry.kv_heads, -1)), []
        for row in range(key.shape[2]):
            part = slice(row, row + 1)
            real = None if valid is None else valid[:, part]
            positions = self.engine.append(key[:, :, part], value[:, :, part], real)
            outputs.append(self.engine.attend(query[:, :, :, part], positions, scaling))
            self.cold = False
        return torch.cat(outputs, 3).flatten(1, 2)

    def _attend_prompt_and_drafts(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scaling: float
    ) -> Tensor:
        """A prompt with the first drafts behind it, which assisted decoding gives in one call."""
        assert self.forward is not None
        first = key.shape[2] - self.forward.drafts
        (q, drafted_q), (k, drafted_k), (v, drafted_v) = (
            states.tensor_split([first], 2) for states in (query, key, value)
        )
        real, drafted = (None, None) if valid is None else valid.tensor_split([first], 1)
        prompt = self.attend_dense(q, k, v, real, scaling, True)
        verified = self._attend_in_turn(drafted_q, drafted_k, drafted_v, drafted, scaling)
        return torch.cat([prompt, verified], 2)

    def advanced(self, rows: int) -> None:
        """Keep the host's numbers in step with `rows` columns appended by a replayed graph."""
        self.unsettle()
        self.columns += rows
        self.in_turn = rows > 1 and self.config.verification == "exact"
        self.fresh = rows if self.in_turn else self._fresh_after(rows)

    def _fresh_after(self, rows: int) -> int:
        """`fresh` once a step of `rows` columns has run; no group takes recent tokens with it."""
        return min(self.fresh, self.config.recent_tokens) + rows

    # ---- cache operations: every part, always --------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens: -n removes n (no padding among them)."""
        count = columns_to_crop(tokens_to_remove, self.columns)
        self.drop(-count, -count)

    def drop(self, columns: int, tokens: "int | Tensor") -> None:
        """Take back the newest columns.

        Args:
            columns: how many, padding included.
            tokens: how many real tokens of each sequence, a number or `[B]`.
        """
        if not columns or not self.is_initialized:
            return
        self.columns -= columns
        self._shorten(columns, tokens)
        self.fresh = max(0, self.fresh - columns)

    def _shorten(self, columns: int, tokens: "int | Tensor") -> None:
        """Take the newest tokens back, out of the store where they may have left the tail."""
        self.lengths -= tokens
        self.unsettle()
        if columns > self.fresh:
            self.reopen()
        elif self.in_turn:
            self.take_back()

    def commit(self, rows: int, tokens: Tensor, columns: int) -> None:
        """Take back tokens of the newest columns, and hold `columns` columns from then on.

        Args:
            rows: how many columns these are.
            tokens: `[B]` real tokens taken back of each sequence, its newest.
            columns: columns afterwards, at least the tokens of any sequence.
        """
        if not self.is_initialized:
            return
        self.columns = columns
        self._shorten(rows, tokens)
        self.fresh = 0

    def _take(self, rows: Callable[[int], Tensor]) -> None:
        if self.is_initialized:
            batch.take([self], rows(self.batch_size), lambda: None)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation to every part."""
        self._forget_forward()
        super().map_batch(fn)

    def _forget_forward(self) -> None:
        """Forget what the last forward left: it has the rows of the sequences of then."""
        self.forward, self._rows, self._before = None, None, []
        self.ahead.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes row beam_idx[i]; the cache does so to all layers, or to none."""
        self._take(lambda size: batch.chosen(size, beam_idx, "beam_idx"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows; the cache does so to all layers, or to none."""
        self._take(lambda size: batch.repeated(size, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows `indices` (numbers or a mask); the cache does so to all layers, or to none."""
        self._take(lambda size: batch.chosen(size, indices, "indices"))

    def reset(self) -> None:
        """Forget everything and give all memory back."""
        self.columns = 0
        if self.is_initialized:
            self.is_initialized = False
            self._forget_forward()
            self.release()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled without the cache.

        Raises:
            OasisUnsupportedError: always, naming what does it.
        """
        raise OasisUnsupportedError(
            f"layer {self.layer_idx}: cannot be copied or pickled by itself; use "
            "copy.deepcopy(cache), or cache.save(path)"
        )

    def offload(self) -> None:
        """Nothing to do: this layer owns its transfers."""

    def prefetch(self) -> None:
        """Nothing to do: this layer owns its transfers."""
