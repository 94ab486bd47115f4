"""What the link to host memory brings beside one decode step: `fetch_cap="auto"`.

What is attended to must not depend on the noise of a measurement. So the time of a step is not
measured but computed, as the bytes that it must read at the bandwidth that the device states; and
the rate of the link, which no device states, is measured once a process and rounded to a coarse
grid. Equal models, batches and lengths then have equal caps on equal machines, but for one whose
link lies at a boundary of the grid.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..config import OasisConfig
from ..facts.compat import weight_bytes
from ..geometry import LayerGeometry, blocks_beside
from .pinned import pinned_empty
from .streams import whole_device

COPIED = 1 << 26
"""Bytes copied to measure the link: enough for its full rate, over in some milliseconds."""

GRID_ORIGIN, GRID_STEPS = 0.84 * 63e9, 4
"""A rate of the grid, and its steps per doubling. PCIe's nominal rates double from one generation
to the next (63 GB/s in the fifth, 16 lanes) and copies reach 0.8 to 0.88 of them: all these links
lie inside a step, not at its boundary."""


def on_grid(rate: float) -> float:
    """The rate of the grid nearest to a measured one."""
    steps = round(GRID_STEPS * math.log2(rate / GRID_ORIGIN))
    return GRID_ORIGIN * 2 ** (steps / GRID_STEPS)


def timed(run: Callable[[], Any], repeats: int = 7) -> list[float]:
    """Seconds of device time of each of several runs, on the current device."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times


def link_times(device: torch.device, count: int) -> list[float]:
    """Seconds of copies of `count` bytes from pinned host memory to a CUDA device."""
    source = pinned_empty((count,), torch.uint8)
    target = torch.empty(count, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        return timed(lambda: target.copy_(source, non_blocking=True))


def device_times(device: torch.device, count: int) -> list[float]:
    """Seconds of copies of `count` bytes within a CUDA device's memory; each moves them twice."""
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    with torch.cuda.device(device):
        return timed(lambda: target.copy_(source))


@functools.cache
def link_rate(device: torch.device) -> float:
    """Bytes per second from host memory to a CUDA device, on the grid; waits for the device once.

    The best of several copies: whatever else uses the link only takes from it.
    """
    with whole_device:
        torch.cuda.synchronize(device)
        return on_grid(COPIED / min(link_times(device, COPIED)))


@functools.cache
def memory_rate(device: torch.device) -> float:
    """Bytes per second of a CUDA device's memory: stated, or else a measured copy, on the grid."""
    properties = torch.cuda.get_device_properties(device)
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    if kilohertz and bits:
        # Two transfers a clock.
        return 2 * kilohertz * 1e3 * bits / 8
    # Larger than any cache of the device.
    count = 4 * COPIED
    with whole_device:
        torch.cuda.synchronize(device)
        return on_grid(2 * count / min(device_times(device, count)))


@dataclass(frozen=True)
class Cap:
    """What one step may fetch in the background.

    Attributes:
        blocks: per head.
        link: bytes per second of the link that it was chosen by, or None.
        floor: seconds that a step takes at least, likewise.
    """

    blocks: int
    link: float | None = None
    floor: float | None = None


def stated(config: OasisConfig) -> Cap:
    """What a config says without a link; nothing is left to fetch where misses do not wait."""
    return Cap(config.cap_blocks if config.fetches_ahead else 0)


class Reader(Protocol):
    """A layer whose steps read fast memory and fetch over the link."""

    @property
    def device(self) -> torch.device: ...
    @property
    def backend(self) -> str: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def geometry(self) -> LayerGeometry: ...
    def step_bytes(self, tokens: int) -> int:
        """Bytes of fast memory that a step after `tokens` tokens must read of this layer."""


class Allowance:
    """How many blocks the layers of one cache may fetch in the background.

    With `fetch_cap="auto"`, for each device: link x floor / (bytes of one block of every head,
    sequence and layer on it), at least one and at most the budget's. The floor is the time in which
    the device reads its weights, and of every offloaded layer on it the coarse index and the
    attended K and V. Neither a link nor the weights of a model are known to the torch backend,
    without CUDA, or to a cache that was built from a config: these keep the default share. Whatever
    a model's steps leave out counts as read: experts that were not chosen, an encoder of images.

    Args:
        config: choices of the cache.
        model: whose weights a step reads, if it is known.
    """

    def __init__(self, config: OasisConfig, model: torch.nn.Module | None = None) -> None:
        self._stated = stated(config)
        self._auto = config.fetch_cap == "auto" and config.fetches_ahead
        self._model = None if model is None else weakref.ref(model)
        # Layers hold this object: holding them in turn would leave their memory to the collector.
        self._layers: list[weakref.ref[Reader]] = []
        self._caps: dict[tuple[torch.device, int, int], Cap] = {}

    def enter(self, layer: Reader) -> None:
        """Count a layer whose parts have been built."""
        self.leave(layer)
        self._layers.append(weakref.ref(layer))

    def leave(self, layer: Reader) -> None:
        """Count a layer no longer."""
        self._layers = [other for other in self._layers if other() not in (layer, None)]
        self._caps.clear()

    def cap(self, layer: Reader, tokens: int) -> Cap:
        """What a step of `layer` after `tokens` tokens may fetch; measures the link once."""
        if not self._auto or layer.backend != "triton" or layer.device.type != "cuda":
            return self._stated
        key = (layer.device, layer.batch_size, tokens)
        if key not in self._caps:
            self._caps[key] = self._beside_a_step(layer, tokens)
        return self._caps[key]

    def _beside_a_step(self, layer: Reader, tokens: int) -> Cap:
        device = layer.device
        model = None if self._model is None else self._model()
        weights = 0 if model is None else weight_bytes(model).get(device, 0)
        if not weights:
            return self._stated
        all_layers = [other for ref in self._layers if (other := ref()) is not None]
        here = [other for other in all_layers if other.device == device]
        read = weights + sum(other.step_bytes(tokens) for other in here)
        each = sum(
            other.batch_size * other.geometry.kv_heads * other.geometry.block_bytes
            for other in here
        )
        link, floor = link_rate(device), read / memory_rate(device)
        return Cap(blocks_beside(link, floor, each, layer.geometry.budget_blocks), link, floor)
