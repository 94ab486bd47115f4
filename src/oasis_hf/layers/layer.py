"""One layer of the cache: Transformers' contract over the parts of the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import OasisConfig
from ..facts.ambient import kept_steady
from ..facts.compat import CacheLayerMixin, columns_to_crop
from ..facts.handle import OasisLength, OasisUnsupportedError, attach
from ..index import index_class
from ..step.decode import DecodeStep
from ..step.inputs import AttentionInputs
from ..step.prompt import PromptAttention
from ..step.read_ahead import ReadAhead
from ..storage import moves
from ..storage.history import history
from ..storage.link import Allowance
from ..storage.parts import LayerParts, new_epoch
from . import batch
from .contents import by_column
from .forward import Forward, Kind
from .ledger import PaddingLedger


class OasisLayer(CacheLayerMixin):
    """Full attention of one model layer, offloaded and attended to sparsely.

    Args:
        config: choices of the cache.
        layer_idx: number of the model layer, for messages.
        ledger: which columns are padding, shared by the cache's layers.
        leads: whether this is the layer that records new columns.
        store_layers: offloaded layers from this one to the last, which take host memory together.
        allowance: what may be fetched in the background, shared by the cache's layers; by default
            what the config says without a link.
        ahead: reads earlier tokens ahead of their use, shared by the cache's layers.
        now_above: score above which a missing block is fetched before attention; by default what
            the config's policy says of this layer.

    Attributes:
        forward: the forward in progress.
        recording: whether drafts may be cropped after a forward; set by the cache.
        following: the offloaded layer whose attention runs next.
        parts: what the layer is made of; None while it is empty.
        step: runs decode steps over the parts.
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
        ahead: ReadAhead | None = None,
        now_above: float | None = None,
    ) -> None:
        self._parts: LayerParts | None = None
        self._emptied = 0
        super().__init__()
        self.allowance = Allowance(config) if allowance is None else allowance
        self.config, self.layer_idx, self.store_layers = config, layer_idx, store_layers
        self.ledger, self.leads = ledger, leads
        if now_above is None:
            now_above = config.misses.threshold(layer_idx, layer_idx + 1)
        self.now_above = now_above
        self.recording = False
        self.forward: Forward | None = None
        self.following: OasisLayer | None = None
        self.prompts = PromptAttention(ReadAhead() if ahead is None else ahead)
        # `[B, T]` positions of the tokens of the forward in progress; None for a prompt.
        self._rows: Tensor | None = None

    # ---- state ---------------------------------------------------------------------------------

    @property
    def parts(self) -> LayerParts:
        """What the layer is made of.

        Raises:
            RuntimeError: the layer is empty.
        """
        if self._parts is None:
            raise RuntimeError(
                f"layer {self.layer_idx}: holds nothing yet; look at `is_initialized` first"
            )
        return self._parts

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Build the parts for K `[B, H, T, Dk]` and V `[B, H, T, Dv]` like these."""
        shared = self.now_above, self.store_layers, self.allowance
        self.take_over(LayerParts(self.config, key_states, value_states, *shared))

    def take_over(self, parts: LayerParts) -> None:
        """Be made of these parts from now on."""
        self._parts, self.step = parts, DecodeStep(parts)
        self.dtype, self.device = parts.dtype, parts.device
        self.is_initialized = True

    @kept_steady
    def adopt(
        self,
        key: Tensor,
        value: Tensor,
        lengths: Tensor,
        columns: int,
        owner: OasisLayer | None = None,
        knowledge: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Fill an empty layer with a saved history.

        Args:
            key: `[B, H, L, Dk]`; value `[B, H, L, Dv]`; no padding, zeros past a sequence's end.
            lengths: `[B]` tokens of each sequence.
            columns: tokens given, padding included.
            owner: a layer that holds this history, with sequences of one length. Its host memory
                is used as it is, and nothing copied: whatever this layer stores from now on goes
                there too. The owner must not go on, and of several borrowers only the newest may.
            knowledge: what an index of this kind has learned of this history; by default what the
                owner's has.
        """
        self.lazy_initialization(key, value)
        parts = self.parts
        if knowledge is None and owner is not None:
            knowledge = owner.knowledge_for(self)
        if knowledge:
            parts.index.know(knowledge)
        try:
            if owner is not None:
                parts.borrow(owner.parts)
            parts.reserve(columns)
        except BaseException:
            self.reset()
            raise
        if owner is not None:
            moves.extend(parts, key, value, None, self._kept)
            # From now on tokens may be taken back, and others stored in their place.
            parts.borrowed = 0
            return
        column = torch.arange(key.shape[2], device=parts.device)
        valid = column[None] < lengths[:, None].to(parts.device)
        moves.extend(parts, key, value, valid, self._kept)

    def knowledge_for(self, other: OasisLayer) -> Mapping[str, Tensor]:
        """What the index has learned, if the other's index is of its kind."""
        index = self.parts.index
        same = index_class(self.config.index) is index_class(other.config.index)
        return index.knowledge() if same else {}

    @property
    def _kept(self) -> int:
        """Newest tokens that a prompt leaves in the tail."""
        recent = self.config.recent_tokens
        return max(recent, self.config.max_rows) if self.recording else recent

    @property
    def columns(self) -> int:
        """Tokens given so far, padding included."""
        return 0 if self._parts is None else self._parts.frontier.columns

    @property
    def batch_size(self) -> int:
        """Sequences held; 0 if the layer is empty."""
        return 0 if self._parts is None else self._parts.batch_size

    @property
    def epoch(self) -> int:
        """Number of the memory that the layer has, or of having none: see `LayerParts`."""
        return self._emptied if self._parts is None else self._parts.epoch

    def get_seq_length(self) -> int:
        """Tokens given so far, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical sizes: what is resident does not change what a mask covers."""
        return OasisLength(self.columns + query_length), 0

    # ---- contents ------------------------------------------------------------------------------

    def history(self, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The first tokens of each sequence, read back: see `history.history`."""
        return history(self.parts, lengths)

    @property
    def keys(self) -> Tensor | None:
        """All K `[B, H, L, D]`, padding as zeros; None before the first forward.

        A copy on the layer's device, read back from the host at every use.
        """
        return self._by_column(0)

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._refuse("keys", states)

    @property
    def values(self) -> Tensor | None:
        """All V `[B, H, L, D]`, as `keys`."""
        return self._by_column(1)

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._refuse("values", states)

    @kept_steady
    def _by_column(self, which: int) -> Tensor | None:
        return None if self._parts is None else by_column(self._parts, self.ledger.real())[which]

    def _refuse(self, name: str, states: Tensor | None) -> None:
        """Refuse to have K or V put in place; Transformers' own constructor sets None."""
        if states is not None:
            raise OasisUnsupportedError(
                f"layer {self.layer_idx}: {name} cannot be set, as its tokens live in host memory; "
                "use cache.crop(), the batch operations, or another forward"
            )

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
        parts = self.parts
        if key.shape[0] != parts.batch_size:
            raise ValueError(
                f"batch size: got {key.shape[0]}, expected {parts.batch_size}, the batch that this "
                "cache holds; use a new cache, cache.reset(), or cache.batch_select_indices()"
            )
        # The dtype is not compared: it follows autocast, and all are stored in that of the first.
        expected = (parts.geometry.kv_heads, parts.geometry.k_dim, parts.device)
        got = (key.shape[1], key.shape[3], key.device)
        if got != expected:
            raise ValueError(
                f"layer {self.layer_idx}: got keys of (heads, dim, device) {got}, expected "
                f"{expected}; use a new cache for another model"
            )

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Store the new tokens and attend: `[B, Hq, T, Dv]`."""
        parts = self.parts
        if inputs.new:
            parts.reserve(inputs.rows)
        assert self.forward is not None
        if self.forward.dense:
            self._rows = None
            if inputs.new and self.forward.drafts:
                prompt, drafts = inputs.split(inputs.rows - self.forward.drafts)
                return torch.cat([self._attend_prompt(prompt), self._attend_in_turn(drafts)], 2)
            return self._attend_prompt(inputs)
        if parts.unlearned_after(0):
            self._observe(inputs)
            moves.learn(parts)
        if self.config.verification == "exact" and inputs.rows > 1:
            if not inputs.new:
                raise OasisUnsupportedError(
                    f"layer {self.layer_idx}: verification='exact' does not serve models that "
                    "share K and V between layers; use verification='shared'"
                )
            return self._attend_in_turn(inputs)
        query = inputs.query.unflatten(1, (parts.geometry.kv_heads, -1))
        if inputs.new:
            parts.frontier.stepped(inputs.rows, self.config.recent_tokens)
            self._rows = self.step.append(inputs.key, inputs.value, inputs.valid)
        assert self._rows is not None
        rows = self._rows[:, -query.shape[3] :]
        return self.step.attend(query, rows, inputs.spec).flatten(1, 2)

    def _attend_prompt(self, inputs: AttentionInputs) -> Tensor:
        """Attend densely to all earlier tokens and to these, then store these."""
        following = None if self.following is None else self.following._parts
        if self.parts.index.learns:
            self._observe(inputs)
        out = self.prompts.attend(self.parts, inputs, following)
        if inputs.new:
            moves.extend(self.parts, inputs.key, inputs.value, inputs.valid, self._kept)
        return out

    def _observe(self, inputs: AttentionInputs) -> None:
        """Show the queries to an index that learns."""
        valid = inputs.valid
        if valid is not None:
            valid = valid[:, -inputs.query.shape[2] :]
        query = inputs.query.unflatten(1, (self.parts.geometry.kv_heads, -1))
        self.parts.index.observe(query, valid)

    def _attend_in_turn(self, inputs: AttentionInputs) -> Tensor:
        """The rows of a verification one after the other, each a step as in plain decoding."""
        frontier = self.parts.frontier
        frontier.stepped_in_turn(inputs.rows)
        frontier.committed_before.copy_(frontier.committed)
        outputs = []
        for row in range(inputs.rows):
            one = inputs.part(slice(row, row + 1))
            query = one.query.unflatten(1, (self.parts.geometry.kv_heads, -1))
            positions = self.step.append(one.key, one.value, one.valid)
            outputs.append(self.step.attend(query, positions, one.spec))
        return torch.cat(outputs, 3).flatten(1, 2)

    def advanced(self, rows: int) -> None:
        """Keep the host's numbers in step with `rows` columns appended by a replayed graph."""
        frontier = self.parts.frontier
        frontier.columns += rows
        if rows > 1 and self.config.verification == "exact":
            frontier.stepped_in_turn(rows)
        else:
            frontier.stepped(rows, self.config.recent_tokens)

    # ---- cache operations: every part, always --------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens: -n removes n (no padding among them)."""
        count = columns_to_crop(tokens_to_remove, self.columns)
        self.drop(-count, -count)

    def drop(self, columns: int, tokens: int | Tensor) -> None:
        """Take back the newest columns, padding included; `tokens` (or `[B]`) of them are real."""
        if columns and self._parts is not None:
            moves.drop(self._parts, columns, tokens)

    def commit(self, rows: int, tokens: Tensor, columns: int) -> None:
        """End a verification of the newest `rows` columns: see `Frontier.commit`."""
        if self._parts is not None:
            moves.commit(self._parts, rows, tokens, columns)

    def cut(self, lengths: list[int], columns: int) -> list[tuple[Tensor, Tensor]]:
        """Keep so many tokens of each sequence, in `columns` columns: see `moves.cut`."""
        self.parts.frontier.columns = columns
        return moves.cut(self.parts, lengths)

    def give(self, states: list[tuple[Tensor, Tensor]], columns: int) -> None:
        """Append tokens to each sequence, in `columns` columns then: see `moves.give`."""
        self.parts.frontier.columns = columns
        moves.give(self.parts, states, self._kept)

    def roll_back(self, columns: int, lengths: Tensor | None) -> None:
        """Return to the first columns after a forward that broke off: see `moves.roll_back`."""
        if self._parts is not None:
            moves.roll_back(self._parts, columns, lengths)

    def _take(self, rows: Callable[[int], Tensor]) -> None:
        if self._parts is not None:
            batch.take([self], rows(self.batch_size), lambda: None)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation to every part."""
        self._forget_forward()
        self.parts.map_batch(fn)

    def _forget_forward(self) -> None:
        """Forget what the last forward left: it has the rows of the sequences of then."""
        self.forward, self._rows = None, None
        self.prompts.forget()

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
        self._forget_forward()
        if self._parts is not None:
            self._parts.release()
            self._parts, self._emptied = None, new_epoch()
            del self.step
            self.is_initialized = False

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
