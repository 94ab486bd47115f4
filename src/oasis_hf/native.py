"""A layer that stays on the device and attends to everything, for `dense_layers`."""

from typing import Any

import torch
from torch import Tensor

from .compat import DynamicLayer
from .dense import dense_attention
from .handle import OasisLength, attach
from .ledger import PaddingLedger


class DenseLayer(DynamicLayer):
    """Transformers' dynamic layer, with attention "oasis" reading it through the same handle.

    Args:
        layer_idx: number of the model layer, for messages.
        ledger: which columns are padding, shared by the cache's layers.
        leads: whether this is the layer that records new columns.
    """

    def __init__(self, layer_idx: int, ledger: PaddingLedger, leads: bool) -> None:
        super().__init__()
        self.keys: Tensor | None
        self.values: Tensor | None
        self.layer_idx, self.ledger, self.leads = layer_idx, ledger, leads

    reads_prompt = False

    @property
    def columns(self) -> int:
        """Tokens given so far, padding included."""
        return int(self.get_seq_length())

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """Dtype of the K and V held, or None before the first."""
        return None if self.keys is None else self.keys.dtype

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical sizes."""
        return OasisLength(self.columns + query_length), 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new K and V; they are stored when the attention runs."""
        attach(self, key_states, value_states)
        return key_states, value_states

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        scaling: float,
        new: bool,
    ) -> Tensor:
        """Store the new tokens and attend to all; as in `OasisLayer.attend`."""
        if new:
            super().update(key, value)
        real = self.ledger.real()
        if real is not None:
            real = real.to(query.device)
        return dense_attention(query, *self.held(), real, scaling)

    def adopt(self, key: Tensor, value: Tensor) -> None:
        """Fill an empty layer with a history of K and V `[B, H, L, D]`, padding included."""
        super().update(key, value)

    def held(self) -> tuple[Tensor, Tensor]:
        """All K and V `[B, H, L, D]`, padding included."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def drop(self, columns: int, tokens: "int | torch.Tensor") -> None:
        """Take back the newest columns."""
        if columns and self.is_initialized:
            super().crop(-columns)

    def reset(self) -> None:
        """Forget everything and give all memory back."""
        self.keys = self.values = None
        self.is_initialized = False
