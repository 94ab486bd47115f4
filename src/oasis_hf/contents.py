"""The K and V of an offloaded layer as other caches hold them, for whoever asks."""

from __future__ import annotations

import torch
from torch import Tensor

from .ambient import kept_steady
from .handle import OasisUnsupportedError
from .ledger import PaddingLedger
from .storage import LayerStorage


class ByColumn(LayerStorage):
    """`keys` and `values`, which layers of Transformers have as attributes.

    Attributes:
        layer_idx: number of the model layer, for messages.
        ledger: which columns are padding.
        is_initialized: whether the layer holds anything.
    """

    layer_idx: int
    ledger: PaddingLedger
    is_initialized: bool

    @property
    def keys(self) -> Tensor | None:
        """All K `[B, H, L, D]`, padding as zeros; None before the first forward.

        A copy on the layer's device, read back from the host at every use.
        """
        return self._by_column()[0] if self.is_initialized else None

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._refuse("keys", states)

    @property
    def values(self) -> Tensor | None:
        """All V `[B, H, L, D]`, as `keys`."""
        return self._by_column()[1] if self.is_initialized else None

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._refuse("values", states)

    def _refuse(self, name: str, states: Tensor | None) -> None:
        """Refuse to have K or V put in place; Transformers' own constructor sets None."""
        if states is not None:
            raise OasisUnsupportedError(
                f"layer {self.layer_idx}: {name} cannot be set, as its tokens live in host memory; "
                "use cache.crop(), the batch operations, or another forward"
            )

    @kept_steady
    def _by_column(self) -> tuple[Tensor, Tensor]:
        """K and V with one entry for each of L columns; padding is not stored."""
        k, v, _ = self.history(self.settled()[0])
        real = self.ledger.real()
        if real is None:
            return k, v
        real = real[:, : self.columns].to(self.device)
        if not k.shape[2]:
            k, v = (x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (k, v))
        place = (real.long().cumsum(1) - 1).clamp(min=0)[:, None, :, None]
        k, v = (
            torch.where(
                real[:, None, :, None],
                x.gather(2, place.expand(-1, x.shape[1], -1, x.shape[3])),
                0,
            )
            for x in (k, v)
        )
        return k, v
