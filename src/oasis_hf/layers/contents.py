"""The K and V of an offloaded layer as other caches hold them, for whoever asks."""

import torch
from torch import Tensor

from ..storage.history import history
from ..storage.parts import LayerParts


def by_column(parts: LayerParts, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """All K `[B, H, L, D]` and V, one entry for each of L columns; padding as zeros.

    Copies on the layer's device, read back from the host.

    Args:
        parts: of the layer.
        real: `[B, columns]` bool, which columns are real tokens; None if all are.
    """
    k, v, _ = history(parts, parts.frontier.settled()[0])
    if real is None:
        return k, v
    real = real[:, : parts.frontier.columns].to(parts.device)
    if not k.shape[2]:
        k, v = (x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (k, v))
    place = (real.long().cumsum(1) - 1).clamp(min=0)[:, None, :, None]
    k, v = (
        torch.where(
            real[:, None, :, None], x.gather(2, place.expand(-1, x.shape[1], -1, x.shape[3])), 0
        )
        for x in (k, v)
    )
    return k, v
