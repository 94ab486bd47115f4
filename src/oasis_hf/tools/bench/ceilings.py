"""What the machine can do at best: device copy, host link, gather. In bytes per second."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from ...ops import kernels
from ...storage.link import device_times, link_times, timed
from ...storage.pinned import pinned_empty

GIGABYTE = 1 << 30
CUDA = torch.device("cuda")


def device_copy() -> float:
    """Copy within HBM, bytes read plus bytes written."""
    return 2 * 2 * GIGABYTE / median(device_times(CUDA, 2 * GIGABYTE))


def link_copy() -> float:
    """Pinned host memory to the device, by the copy engine."""
    return GIGABYTE / median(link_times(CUDA, GIGABYTE))


def link_gather(block_bytes: int = 8192) -> dict[str, float]:
    """The gather kernel over scattered blocks, alone and beside a stream of matrix products.

    Returns:
        `bytes_per_second` alone; `beside` = time of both together over the longer of the two alone.
    """
    triton = kernels("triton")
    slab_blocks = GIGABYTE // block_bytes - 1
    elements = block_bytes // 2
    slab = pinned_empty((1, slab_blocks + 1, elements), torch.bfloat16)
    table = torch.tensor([slab.data_ptr()], dtype=torch.long, device="cuda")
    slots = 16384
    pool = [torch.empty(1, 1, slots + 1, 16, elements // 32, device="cuda").bfloat16()] * 2
    entries = torch.zeros(slots, 3, dtype=torch.int32, device="cuda")
    entries[:, 1] = torch.randperm(slab_blocks, device="cuda")[:slots]
    entries[:, 2] = torch.arange(slots, device="cuda")
    count = torch.tensor([slots], dtype=torch.int32, device="cuda")

    def gather() -> None:
        triton.gather(entries, count, table, slab_blocks, (pool[0], pool[1]))

    weights = torch.randn(64, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    inputs = torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def products() -> None:
        for weight in weights:
            torch.mm(inputs, weight)

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            gather()
        products()
        torch.cuda.current_stream().wait_stream(side)

    alone, compute, together = (median(timed(f)) for f in (gather, products, both))
    moved = slots * block_bytes
    return {
        "bytes_per_second": moved / alone,
        "beside": together / max(alone, compute),
        "compute_bytes_per_second": weights.nbytes / compute,
    }


def measure() -> dict[str, Any]:
    """All ceilings."""
    return {
        "device_copy": device_copy(),
        "link_copy": link_copy(),
        "gather": link_gather(),
    }
