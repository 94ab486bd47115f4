"""Moving the columns of a batch, each sequence by its own distance.

A forward adds as many columns to every sequence. Where sequences keep different numbers of them,
they are moved so that their newest tokens stand in the last column again: a left-padded batch.
"""

from typing import Any

import torch
from torch import Tensor

from ..facts.compat import is_placeholder, is_sliding


def places(by: Tensor, columns: int, device: torch.device) -> Tensor:
    """Where each column's contents come from: `[B, columns]`, out of range if from nowhere.

    Args:
        by: `[B]` columns that each sequence moves to the right.
        columns: columns afterwards.
        device: where the result is wanted.
    """
    return torch.arange(columns, device=device) - by.to(device, non_blocking=True)[:, None]


def shift_flags(flags: Tensor, by: Tensor, columns: int) -> Tensor:
    """Move flags `[B, C]` to `[B, columns]`; False where nothing comes from."""
    source = places(by, columns, flags.device)
    inside = (source >= 0) & (source < flags.shape[1])
    return flags.gather(1, source.clamp(0, flags.shape[1] - 1)) & inside


def shift_layer(layer: Any, by: Tensor, columns: int) -> None:
    """Move the K and V `[B, H, L, D]` of one of Transformers' dynamic layers.

    What stands in columns that nothing comes from is unspecified: they are padding.
    """
    if is_placeholder(layer) or not layer.is_initialized:
        return
    before, held = layer.get_seq_length(), layer.keys.shape[2]
    width = min(columns, layer.sliding_window - 1) if is_sliding(layer) else columns
    source = places(by, columns, layer.keys.device)[:, columns - width :] - (before - held)
    source = source.clamp(0, held - 1)[:, None, :, None]
    for name in ("keys", "values"):
        states = getattr(layer, name)
        index = source.expand(-1, states.shape[1], -1, states.shape[3])
        setattr(layer, name, states.gather(2, index))
    if is_sliding(layer):
        layer.cumulative_length = columns
