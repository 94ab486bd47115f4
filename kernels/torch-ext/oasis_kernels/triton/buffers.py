"""What a plan writes."""

import torch
from torch import Tensor

INT32 = torch.int32


class Plan:
    """Buffers that a plan writes: attended slots, and the lists of fetches.

    Attributes:
        attended: `[BH, K]` int32 slots in block order, -1 after the last.
        lists: two `[BH * K, 3]` int32 tensors of (bh, block, slot): now, and later.
        counts: `[2]` int32, how many entries each list has; opening a step sets them to zero.
    """

    def __init__(self, pairs: int, count: int, device: torch.device) -> None:
        self.attended: Tensor = torch.empty(pairs, count, dtype=INT32, device=device)
        self.lists = [torch.empty(pairs * count, 3, dtype=INT32, device=device) for _ in range(2)]
        self.counts = torch.zeros(2, dtype=INT32, device=device)
