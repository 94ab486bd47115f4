"""Earlier tokens of a prompt, read back from the host while others are attended to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .storage import LayerStorage
from .streams import Beside


@dataclass
class _Ready:
    """What has been asked for: whose tokens, their blocks in the store, and when they are there."""

    layer: LayerStorage
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

    def take(self, layer: LayerStorage, row: int, length: int, room: int) -> tuple[Tensor, Tensor]:
        """The first tokens of a sequence, asked for earlier or read now.

        Args:
            layer: where they are stored.
            row: the sequence.
            length: tokens wanted.
            room: tokens of unspecified content behind them, for the caller to fill.

        Returns:
            k `[1, H, length + room, Dk]` and v likewise.
        """
        ready, self._ready = self._ready, None
        packed: Tensor | None = None
        if ready is not None and ready.layer is layer and ready.wanted == (row, length):
            packed = ready.packed
            ready.beside.join()
        else:
            layer.engine.join()
        k, v = layer.history_buffers(1, length + room)
        layer.recall(row, length, k, v, packed)
        end = length + room
        return k[:, :, :end], v[:, :, :end]

    def start(self, layer: LayerStorage, row: int, length: int) -> None:
        """Ask for the first tokens of a sequence, as `take` will, on the side stream."""
        if layer.device.type != "cuda" or layer.store.table is None or not length:
            return
        packed = layer.store.buffer(layer.stored_blocks(row, length))
        beside = Beside(layer.device)
        with torch.cuda.device(layer.device), beside.run(packed):
            layer.store.read_into(row, packed)
        self._ready = _Ready(layer, (row, length), packed, beside)
