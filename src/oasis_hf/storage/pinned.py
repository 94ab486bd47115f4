"""Host memory that a CUDA device reads and writes directly: ordinary pages, registered."""

import contextlib
import ctypes
import weakref

import torch
from torch import Tensor

from .limits import HostMemoryError, locked_limit
from .streams import wait_for

HUGE_PAGE = 1 << 21
PAGE = 1 << 16
"""A multiple of every usual page size."""
MADV_HUGEPAGE = 14


def _unregister(address: int, device: torch.device) -> None:
    """Give memory back once the device is done with it, which may still read ahead."""
    wait_for(device)
    torch.cuda.cudart().cudaHostUnregister(address)


def _unit(size: int) -> int:
    """What sizes are rounded up to: a large tensor is in huge pages, a small one is not."""
    return HUGE_PAGE if size >= HUGE_PAGE else PAGE


def pinned_bytes(size: int) -> int:
    """Bytes of host memory that `pinned_empty` takes for a tensor of `size` bytes."""
    return -(-size // _unit(size)) * _unit(size)


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed, registered host memory, given back when the tensor dies.

    torch's own pinned allocator rounds sizes up to a power of two and keeps what is freed; a cache
    of many gigabytes cannot afford either. The driver pins page by page, most of that time in
    faulting them in: pages are asked for 2 MiB at a time, and touched by all cores first.

    Raises:
        HostMemoryError: the memory cannot be had, or the driver refuses to register it.
    """
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    unit, pages = _unit(size), pinned_bytes(size)
    try:
        raw = torch.empty(pages + unit, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise HostMemoryError(
            f"host memory: {pages / 1e9:.2f} GB cannot be had ({error}); lower the context or the "
            "batch"
        ) from error
    offset = -raw.data_ptr() % unit
    whole = raw[offset : offset + pages]
    if unit == HUGE_PAGE:
        # Only advice: where it is refused, pages are small.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(whole.data_ptr()), ctypes.c_size_t(pages), MADV_HUGEPAGE
        )
    whole.zero_()
    code = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), pages, 0)
    if int(code) != 0:
        # The next launch would report this error as its own.
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.zeros(1, device="cuda")
        raise HostMemoryError(
            f"host memory: the driver refused to pin {pages / 1e9:.2f} GB (error {int(code)}); "
            "lower the context or the batch, or raise the limit of locked memory (ulimit -l, now "
            f"{locked_limit()})"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    weakref.finalize(raw.untyped_storage(), _unregister, whole.data_ptr(), device)
    return whole[:size].view(dtype).view(shape)
