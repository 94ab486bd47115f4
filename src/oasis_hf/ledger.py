"""Which columns of a batch are padding: needed to take columns back and to check masks."""

from collections.abc import Callable

import torch
from torch import Tensor

from .columns import shift_flags
from .geometry import GROWTH_TOKENS


class PaddingLedger:
    """Remembers for each column given so far whether it held a real token, per sequence.

    A cache that never saw a mask keeps no tensor: every column is real.

    Attributes:
        columns: columns recorded.
        frozen: whether the columns of the forward in progress are recorded already, by the owner
            of the CUDA graph that it runs in.
        static: then `[B, T]` bool of its rows, or None if all are real.
    """

    def __init__(self) -> None:
        self.columns = 0
        self._real: Tensor | None = None
        self.frozen = False
        self.static: Tensor | None = None

    def append(self, valid: Tensor | None, batch: int, rows: int, device: torch.device) -> None:
        """Record `rows` new columns: valid `[B, rows]` bool, or None if all are real."""
        end = self.columns + rows
        if valid is not None or self._real is not None:
            self._reserve(batch, end, device)
            assert self._real is not None
            self._real[:, self.columns : end] = True if valid is None else valid
        self.columns = end

    def _reserve(self, batch: int, columns: int, device: torch.device) -> None:
        have = 0 if self._real is None else self._real.shape[1]
        if columns <= have:
            return
        grown = torch.ones(batch, columns + GROWTH_TOKENS, dtype=torch.bool, device=device)
        if self._real is not None:
            grown[:, :have] = self._real
        self._real = grown

    def remove(self, columns: int) -> "int | Tensor":
        """Forget the newest columns; returns how many real tokens they held, per sequence."""
        first = self.columns - columns
        removed: int | Tensor = columns
        if self._real is not None:
            removed = self._real[:, first : self.columns].sum(1)
        self.columns = first
        return removed

    def shift(self, by: Tensor, columns: int, device: torch.device) -> None:
        """Move each sequence by `by` `[B]` columns to the right, and hold `columns` then."""
        self._reserve(by.shape[0], self.columns, device)
        assert self._real is not None
        self._real[:, :columns] = shift_flags(self._real[:, : self.columns], by, columns)
        self.columns = columns

    def real(self) -> Tensor | None:
        """`[B, columns]` bool, or None if there never was a mask."""
        return None if self._real is None else self._real[:, : self.columns]

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation."""
        if self._real is not None:
            self._real = fn(self._real)

    def copy_from(self, other: "PaddingLedger") -> None:
        """Take over the contents of another ledger."""
        self.columns = other.columns
        self._real = None if other._real is None else other._real.clone()

    def reset(self) -> None:
        """Forget everything."""
        self.columns, self._real = 0, None
