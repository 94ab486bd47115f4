"""Work beside the current CUDA stream."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_side_streams: dict[torch.device, torch.cuda.Stream] = {}


class Beside:
    """Runs the transfers of one owner on the side stream of its device.

    All owners of a device share one side stream, in which their transfers keep their order; each
    waits for its own last transfer only. Without CUDA everything runs at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._done: torch.cuda.Event | None = None

    @contextmanager
    def run(self, *tensors: Tensor) -> Iterator[None]:
        """Run the block on the side stream, after all that the current stream has been given.

        Args:
            tensors: memory of the current stream that the block uses and that may be freed before
                the block has run.
        """
        if self.device.type != "cuda":
            yield
            return
        side = side_stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            yield
            for tensor in tensors:
                tensor.record_stream(side)
            self._done = side.record_event()

    def join(self) -> None:
        """Make the current stream wait for the last transfer."""
        if self._done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._done)
        self._done = None


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a CUDA device."""
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]
