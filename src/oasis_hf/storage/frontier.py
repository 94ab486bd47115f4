"""How far each sequence of a layer has come, and what of it may still be taken back."""

from collections.abc import Callable

import torch
from torch import Tensor


class Frontier:
    """The ends of the sequences of one layer.

    A sequence's tokens are numbered without its padding. The first `committed` of them have left
    the tail for the store; the others are in the tail. Columns count padding too.

    Attributes:
        lengths: `[B]` int64 tokens of each sequence.
        committed: `[B]` int64 of these, tokens that left the tail; a multiple of the group.
        committed_before: `[B]` the same, before the rows of the last sequential verification.
        columns: tokens given, padding included; a host number.
        fresh: newest columns that are certainly still in the tail; a host number.
        in_turn: whether the newest rows were such a verification.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.committed = torch.zeros_like(self.lengths)
        self.committed_before = torch.zeros_like(self.lengths)
        self.columns = self.fresh = 0
        self.in_turn = False
        self._host: tuple[list[int], list[int]] | None = None

    # ---- the host's view -----------------------------------------------------------------------

    def settled(self) -> tuple[list[int], list[int]]:
        """`lengths` and `committed` as host numbers.

        Waits for the device, unless a prompt set them last: whatever else does calls `unsettle`.
        """
        if self._host is None:
            self._host = self.lengths.tolist(), self.committed.tolist()
        return self._host

    def unsettle(self) -> None:
        """Forget the host's copy: the device's numbers change."""
        self._host = None

    # ---- forwards ------------------------------------------------------------------------------

    def filled(self, lengths: list[int], committed: list[int]) -> None:
        """Note where a prompt has left the sequences, whose tensors say so already."""
        self._host, self.fresh = (lengths, committed), 0

    def stepped(self, rows: int, recent: int) -> None:
        """Note a step of `rows` columns; no group takes the `recent` newest tokens with it."""
        self.unsettle()
        self.in_turn, self.fresh = False, min(self.fresh, recent) + rows

    def stepped_in_turn(self, rows: int) -> None:
        """Note that `rows` columns come one after the other, each as a step of its own."""
        self.unsettle()
        self.in_turn, self.fresh = True, rows

    # ---- taking back ---------------------------------------------------------------------------

    def crop(self, columns: int, tokens: int | Tensor) -> bool:
        """Take back the newest columns.

        Args:
            columns: how many, padding included.
            tokens: how many real tokens of each sequence, a number or `[B]`.

        Returns:
            Whether tokens that left the tail may be among them.
        """
        self.columns -= columns
        left = self._shorten(columns, tokens)
        self.fresh = max(0, self.fresh - columns)
        return left

    def commit(self, rows: int, tokens: Tensor, columns: int) -> bool:
        """Take back tokens of the newest columns, and hold `columns` columns from then on.

        Args:
            rows: how many columns these are.
            tokens: `[B]` real tokens taken back of each sequence, its newest.
            columns: columns afterwards, at least the tokens of any sequence.

        Returns:
            Whether tokens that left the tail may be among them.
        """
        self.columns = columns
        left = self._shorten(rows, tokens)
        self.fresh = 0
        return left

    def _shorten(self, columns: int, tokens: int | Tensor) -> bool:
        self.lengths -= tokens
        self.unsettle()
        return columns > self.fresh

    def uncommit(self, recent: int, group: int) -> None:
        """Return to the tail the groups that left it after drafts which were then rejected.

        The tail still holds them. Where they would have left it anyway, a step later at most, they
        stay out: the tail is that of a sequence that never saw the drafts.

        Args:
            recent: newest tokens that no group takes with it.
            group: tokens that leave together.
        """
        due = torch.div(self.lengths - 1 - recent, group, rounding_mode="floor")
        kept = torch.minimum(self.committed, torch.maximum(due * group, self.committed_before))
        self.committed.copy_(kept)

    def roll_back(self, columns: int, lengths: Tensor | None) -> None:
        """Return to the first columns, of which `lengths` `[B]` are real; None if all are."""
        self.columns, self.fresh, self.in_turn = columns, 0, False
        if lengths is None:
            self.lengths.fill_(columns)
        else:
            self.lengths.copy_(lengths)
        self.unsettle()

    # ---- batch operations ----------------------------------------------------------------------

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that has a row per sequence."""
        return self.lengths, self.committed, self.committed_before

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a batch operation."""
        self.lengths, self.committed, self.committed_before = map(fn, self.tensors)
        self.unsettle()
