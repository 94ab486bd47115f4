"""What a cache knows of its columns: which hold real tokens, and which tokens these are.

Needed to take columns back, to check what later masks say of them, and to notice that a text was
rewritten at a place that the cache holds already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..facts.ambient import kept_steady
from ..geometry import GROWTH_TOKENS
from .columns import places, shift_flags

UNKNOWN = -1
"""Stands for a token id that nobody told: of embeddings, or of a forward without the hook."""


@dataclass(frozen=True)
class Record:
    """A ledger's contents at one time, to return to."""

    columns: int
    real: Tensor | None
    ids: Tensor | None


class PaddingLedger:
    """Remembers of each column given so far whether it held a real token, and its token id.

    A cache that never saw a mask keeps no flags: every column is real. One that was never told ids
    keeps none.

    Attributes:
        columns: columns recorded.
        reconcile: weak reference to what is called with `[B, columns]` bool when a mask says
            something else about columns that are recorded; set by the cache.
        abandon: likewise, to what is called when the attention of a layer raises an error.
    """

    def __init__(self) -> None:
        self.columns = 0
        self._real: Tensor | None = None
        self._ids: Tensor | None = None
        self.reconcile: weakref.ref[Callable[[Tensor], None]] | None = None
        self.abandon: weakref.ref[Callable[[], None]] | None = None

    def append(
        self,
        valid: Tensor | None,
        batch: int,
        rows: int,
        device: torch.device,
        ids: Tensor | None = None,
    ) -> None:
        """Record new columns.

        Args:
            valid: `[batch, rows]` bool, False for padding; None if all are real.
            batch: sequences.
            rows: new columns.
            device: where the record is kept.
            ids: `[batch, rows]` token ids, or None if they are not known.
        """
        end = self.columns + rows
        if valid is not None or self._real is not None:
            flags = self._reserve_real(batch, end, device)
            flags[:, self.columns : end] = True if valid is None else valid
        if ids is not None and ids.shape != (batch, rows):
            ids = None
        if ids is not None or self._ids is not None:
            told = self._reserve_ids(batch, end, device)
            told[:, self.columns : end] = UNKNOWN if ids is None else ids
        self.columns = end

    def _reserve_real(self, batch: int, columns: int, device: torch.device) -> Tensor:
        if self._real is None or columns > self._real.shape[1]:
            grown = torch.ones(batch, columns + GROWTH_TOKENS, dtype=torch.bool, device=device)
            self._real = _over(grown, self._real)
        return self._real

    def _reserve_ids(self, batch: int, columns: int, device: torch.device) -> Tensor:
        if self._ids is None or columns > self._ids.shape[1]:
            shape = (batch, columns + GROWTH_TOKENS)
            grown = torch.full(shape, UNKNOWN, dtype=torch.int32, device=device)
            self._ids = _over(grown, self._ids)
        return self._ids

    def remove(self, columns: int) -> int | Tensor:
        """Forget the newest columns; returns how many real tokens they held, per sequence."""
        first = self.columns - columns
        removed: int | Tensor = columns
        if self._real is not None:
            removed = self._real[:, first : self.columns].sum(1)
        self.columns = first
        return removed

    @kept_steady
    def shift(self, by: Tensor, columns: int, device: torch.device) -> None:
        """Move each sequence by `by` `[B]` columns to the right, and hold `columns` then."""
        flags = self._reserve_real(by.shape[0], self.columns, device)
        flags[:, :columns] = shift_flags(flags[:, : self.columns], by, columns)
        if self._ids is not None:
            source = places(by, columns, device).clamp(0, self.columns - 1)
            self._ids[:, :columns] = self._ids[:, : self.columns].gather(1, source)
        self.columns = columns

    def real(self) -> Tensor | None:
        """`[B, columns]` bool, or None if there never was a mask."""
        return None if self._real is None else self._real[:, : self.columns]

    def ids(self) -> Tensor | None:
        """`[B, columns]` token ids, `UNKNOWN` where nobody told; None if nobody ever did."""
        return None if self._ids is None else self._ids[:, : self.columns]

    def differs(self, mask: Tensor) -> bool:
        """Whether `[B, columns]` bool says anything else of the columns; waits for the device."""
        real = self.real()
        if real is None:
            return not bool(mask.all())
        return bool((mask.to(real.device) != real).any())

    def follow(self, mask: Tensor) -> None:
        """Hide what a mask `[B, columns]` bool of what is recorded leaves out.

        Waits for the device.

        Raises:
            ValueError: the mask shows columns that were padding.
        """
        reconcile = None if self.reconcile is None else self.reconcile()
        if reconcile is not None and self.columns and self.differs(mask):
            reconcile(mask)

    def give_up(self) -> None:
        """Have the forward in progress undone, where no hook does it."""
        abandon = None if self.abandon is None else self.abandon()
        if abandon is not None:
            abandon()

    def hide(self, mask: Tensor) -> None:
        """Record as padding what `[B, columns]` bool leaves out."""
        flags = self._reserve_real(mask.shape[0], self.columns, mask.device)
        flags[:, : self.columns] &= mask.to(flags.device)

    def common(self, ids: Tensor, start: int = 0) -> int:
        """How many of the tokens `[B, n]` from column `start` on are those held there, at most.

        Only what is known counts: padding and tokens whose ids nobody told agree with anything.
        Each text may stand for several sequences, as where beams are held. Waits for the device.
        """
        count = min(ids.shape[1], self.columns - start)
        held = self.ids()
        if held is None or count <= 0 or held.shape[0] % ids.shape[0]:
            return max(count, 0)
        ids = ids.repeat_interleave(held.shape[0] // ids.shape[0], 0)
        held = held[:, start : start + count]
        other = (held != ids[:, :count].to(held.device)) & (held != UNKNOWN)
        real = self.real()
        if real is not None:
            other &= real[:, start : start + count]
        found = other.any(0)
        return int(found.int().argmax()) if bool(found.any()) else count

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation."""
        if self._real is not None:
            self._real = fn(self._real)
        if self._ids is not None:
            self._ids = fn(self._ids)

    def record(self) -> Record:
        """The contents, as copies."""
        real, ids = self.real(), self.ids()
        return Record(
            self.columns,
            None if real is None else real.clone(),
            None if ids is None else ids.clone(),
        )

    def restore(self, record: Record) -> None:
        """Return to recorded contents."""
        self.columns = record.columns
        self._real = None if record.real is None else record.real.clone()
        self._ids = None if record.ids is None else record.ids.clone()

    def copy_from(self, other: PaddingLedger) -> None:
        """Take over the contents of another ledger."""
        self.restore(other.record())

    def reset(self) -> None:
        """Forget everything."""
        self.columns, self._real, self._ids = 0, None, None


def _over(grown: Tensor, old: Tensor | None) -> Tensor:
    """`grown` with the columns of `old` in its first ones."""
    if old is not None:
        grown[:, : old.shape[1]] = old
    return grown
