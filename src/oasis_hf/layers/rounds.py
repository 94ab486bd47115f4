"""The end of a round of batched speculation: every sequence keeps its own number of tokens.

Padding is not stored, so an offloaded layer only shortens its tail; what moves is the ledger, and
the tokens of layers that stay on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..facts import compat
from ..facts.compat import Cache
from .columns import shift_layer
from .dense_layer import DenseLayer
from .layer import OasisLayer
from .state import CacheState


def movable(layer: Any) -> bool:
    """Whether single sequences can be taken back in a layer."""
    if isinstance(layer, OasisLayer | DenseLayer) or compat.is_placeholder(layer):
        return True
    return compat.is_full_attention(layer) or compat.is_sliding(layer)


def commit(cache: Cache, rows: int, kept: Tensor, offered: Tensor, columns: int) -> None:
    """End a round in any cache of movable layers; see `OasisCache.commit`."""
    held = cache.get_seq_length()
    by = columns - (held - rows) - kept
    _move(cache, by, held, columns)
    layers = _offloaded(cache)
    # One copy for each device, not for each layer.
    rejected = {
        device: (offered - kept).to(device, non_blocking=True)
        for device in {layer.device for layer in layers}
    }
    for layer in layers:
        layer.commit(rows, rejected[layer.device], columns)


def shift(cache: Cache, by: Tensor) -> None:
    """Move the columns of each sequence by `by` `[B]` (on the host) to the right."""
    held = cache.get_seq_length()
    _move(cache, by, held, held)


def _move(cache: Cache, by: Tensor, held: int, columns: int) -> None:
    """Move every part that has columns; what is cut off is forgotten."""
    together = not bool(by.any())
    for layer in cache.layers:
        if isinstance(layer, OasisLayer):
            continue
        if together:
            layer.crop(columns - held)
        else:
            shift_layer(layer, by, columns)
    ledger = getattr(cache, "ledger", None)
    if ledger is None:
        return
    if together:
        ledger.remove(held - columns)
    else:
        ledger.shift(by, columns, _offloaded(cache)[0].device)


def _offloaded(cache: Cache) -> list[OasisLayer]:
    return [layer for layer in cache.layers if isinstance(layer, OasisLayer)]


def check(cache: CacheState, rows: int, kept: Tensor, offered: Tensor, columns: int) -> None:
    """Refuse a commit that does not fit, before anything is changed.

    Raises:
        ValueError: naming the argument.
    """
    held = cache.ledger.columns
    if not 1 <= rows <= held:
        raise ValueError(
            f"rows: got {rows}, expected 1 to {held}, the columns that the cache holds; pass the "
            "number of columns fed since the last commit"
        )
    batch = _offloaded(cache)[0].batch_size
    for name, counts in (("kept", kept), ("offered", offered)):
        if counts.shape != (batch,) or counts.device.type != "cpu":
            raise ValueError(
                f"{name}: got shape {tuple(counts.shape)} on {counts.device}, expected one number "
                f"for each of {batch} sequences, on the CPU"
            )
    for name, counts, most in (
        ("offered", offered, torch.full_like(offered, rows)),
        ("kept", kept, offered),
    ):
        if bool(((counts < 0) | (counts > most)).any()):
            raise ValueError(
                f"{name}: got {counts.tolist()}, expected 0 to {most.tolist()}; a sequence cannot "
                "keep more tokens than it was fed"
            )
    if not held - rows <= columns <= held:
        raise ValueError(
            f"columns: got {columns}, expected {held - rows} to {held}; leave it out for the fewest"
        )
