"""Earlier tokens of a prompt, read back from the host while others are attended to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..storage.history import history_buffers, recall, stored_blocks
from ..storage.parts import LayerParts
from ..storage.streams import Beside


@dataclass
class _Ready:
    """What has been asked for: whose tokens, their blocks in the store, and when they are there."""

    parts: LayerParts
    wanted: tuple[int, int]
    packed: Tensor
    beside: Beside


class ReadAhead:
    """One sequence of one layer is attended to while the next comes over the link.

    A piece of a prompt attends, in every layer, to all tokens before it, a sequence at a time. So
    no more than two sequences of one layer are on the device, however large the batch.
    """

    def __init__(self) -> None:
        self._ready: _Ready | None = None

    def clear(self) -> None:
        """Forget what was asked for: the cache may have changed."""
        self._ready = None

    def take(self, parts: LayerParts, row: int, length: int, room: int) -> tuple[Tensor, Tensor]:
        """The first tokens of a sequence, asked for earlier or read now.

        Args:
            parts: of the layer where they are stored.
            row: the sequence.
            length: tokens wanted.
            room: tokens of unspecified content after them, for the caller to fill.

        Returns:
            k `[1, H, length + room, Dk]` and v likewise.
        """
        ready, self._ready = self._ready, None
        packed: Tensor | None = None
        if ready is not None and ready.parts is parts and ready.wanted == (row, length):
            packed = ready.packed
            ready.beside.join()
        else:
            parts.join()
        k, v = history_buffers(parts, 1, length + room)
        recall(parts, row, length, k, v, packed)
        end = length + room
        return k[:, :, :end], v[:, :, :end]

    def start(self, parts: LayerParts, row: int, length: int) -> None:
        """Ask for the first tokens of a sequence, as `take` will, on the side stream."""
        if parts.device.type != "cuda" or parts.store.table is None or not length:
            return
        packed = parts.store.buffer(stored_blocks(parts, row, length))
        beside = Beside(parts.device)
        with torch.cuda.device(parts.device), beside.run(packed):
            parts.store.read_into(row, packed)
        self._ready = _Ready(parts, (row, length), packed, beside)
