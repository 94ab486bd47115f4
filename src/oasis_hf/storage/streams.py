"""Work beside the current CUDA stream, and what threads of one process must not do at once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

whole_device = threading.RLock()
"""Held by whoever captures a graph, and by whoever waits for a whole device: CUDA allows no such
wait while a capture goes on, in whatever thread."""

_mine = threading.local()


class Beside:
    """Runs the transfers of one owner on the side stream of its device.

    All owners of a device share one side stream in each thread, in which their transfers keep their
    order; each waits for its own last transfer only. A thread has a stream of its own, since the
    side stream takes part in the capture of a graph. Without CUDA everything runs at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._done: torch.cuda.Event | None = None
        self._on: torch.cuda.Stream | None = None

    @contextmanager
    def run(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Run the block on the side stream, after all that the current stream has been given.

        Args:
            tensors: memory of the current stream that the block uses and that may be freed before
                the block has run; the block may add to the list that it is given.
        """
        used = list(tensors)
        if self.device.type != "cuda":
            yield used
            return
        side = side_stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        if self._done is not None and self._on is not side:
            # The last transfer was another thread's.
            side.wait_event(self._done)
        with torch.cuda.stream(side):
            yield used
            if not torch.cuda.is_current_stream_capturing():
                for tensor in used:
                    tensor.record_stream(side)
            self._done, self._on = side.record_event(), side

    def join(self) -> None:
        """Make the current stream wait for the last transfer."""
        if self._done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._done)
        self._done = self._on = None


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a CUDA device in this thread."""
    streams: dict[torch.device, torch.cuda.Stream] = vars(_mine).setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


def wait_for(device: torch.device) -> None:
    """Wait until a CUDA device has done all that it was given."""
    with whole_device:
        torch.cuda.synchronize(device)
