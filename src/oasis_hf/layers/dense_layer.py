"""A layer that stays on the device and attends to everything, for `dense_layers`."""

from typing import Any

import torch
from torch import Tensor

from ..facts.compat import DynamicLayer
from ..facts.handle import OasisLength, attach
from ..step.dense import dense_attention
from ..step.inputs import AttentionInputs
from .forward import Forward, Kind
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
        self.dtype: torch.dtype
        self.layer_idx, self.ledger, self.leads = layer_idx, ledger, leads
        self.forward: Forward | None = None

    @property
    def columns(self) -> int:
        """Tokens given so far, padding included."""
        return int(self.get_seq_length())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """As in Transformers, whose layers of newer versions do not keep their dtype."""
        super().lazy_initialization(key_states, value_states)
        self.dtype = key_states.dtype

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical sizes."""
        return OasisLength(self.columns + query_length), 0

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        forward: Forward | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Take new K and V; they are stored when the attention runs."""
        if forward is None:
            forward = Forward(Kind.PROMPT, self.columns, key_states.shape[2])
        self.forward = forward
        attach(self, key_states, value_states)
        return key_states, value_states

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Store the new tokens and attend to all; as `OasisLayer.attend`."""
        if inputs.new:
            super().update(inputs.key, inputs.value)
        real = self.ledger.real()
        if real is not None:
            real = real.to(inputs.query.device)
        return dense_attention(inputs.query, *self.held(), real, inputs.spec.scaling)

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
