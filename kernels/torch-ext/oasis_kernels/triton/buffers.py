"""What launches hand to each other: scores of blocks, and what a plan writes."""

import torch
from torch import Tensor

INT32 = torch.int32


class Scores:
    """Approximate logits of candidate blocks and the sums that normalise them.

    Attributes:
        logits: `[BH, Q, C]` float32.
        partial: `[BH, programs, Q, 2]` float32, (maximum, sum of exp) over parts.
        positions: `[B, T]` int64 of the rows, -1 for padding, which has no say.
        chosen: `[BH, C / per_group]` int32 groups of the candidates, or None: all blocks in order.
        per_group: blocks per group.
        reduce_max: whether rows are combined by the maximum of their logits.
    """

    def __init__(
        self,
        logits: Tensor,
        partial: Tensor,
        positions: Tensor,
        chosen: Tensor | None = None,
        per_group: int = 1,
        reduce_max: bool = False,
    ) -> None:
        self.logits, self.partial, self.positions, self.chosen = logits, partial, positions, chosen
        self.per_group, self.reduce_max = per_group, reduce_max


class Plan:
    """Buffers that a plan writes: attended slots, and the lists of fetches.

    Attributes:
        attended: `[BH, K]` int32 slots in block order, -1 behind the last.
        lists: two `[BH * K, 3]` int32 tensors of (bh, block, slot): now, and later.
        counts: `[2]` int32, how many entries each list has; `advance` sets them to zero.
    """

    def __init__(self, pairs: int, count: int, device: torch.device) -> None:
        self.attended = torch.empty(pairs, count, dtype=INT32, device=device)
        self.lists = [torch.empty(pairs * count, 3, dtype=INT32, device=device) for _ in range(2)]
        self.counts = torch.zeros(2, dtype=INT32, device=device)
