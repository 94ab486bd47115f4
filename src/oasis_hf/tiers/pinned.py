"""Host memory that a CUDA device reads and writes directly: ordinary pages, registered."""

import ctypes
import weakref

import torch
from torch import Tensor

from ..streams import wait_for

HUGE_PAGE = 1 << 21
MADV_HUGEPAGE = 14


def _unregister(address: int, device: torch.device) -> None:
    """Give memory back once the device is done with it, which may still read ahead."""
    wait_for(device)
    torch.cuda.cudart().cudaHostUnregister(address)


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed, registered host memory, given back when the tensor dies.

    torch's own pinned allocator rounds sizes up to a power of two and keeps what is freed; a cache
    of many gigabytes cannot afford either. The driver pins page by page, most of that time in
    faulting them in: pages are asked for 2 MiB at a time, and touched by all cores first.

    Raises:
        RuntimeError: the driver refuses to register the memory.
    """
    size = torch.empty((), dtype=dtype).element_size()
    for extent in shape:
        size *= extent
    pages = -(-size // HUGE_PAGE) * HUGE_PAGE
    raw = torch.empty(pages + HUGE_PAGE, dtype=torch.uint8)
    offset = -raw.data_ptr() % HUGE_PAGE
    whole = raw[offset : offset + pages]
    # Only advice: where it is refused, pages are small.
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(whole.data_ptr()), ctypes.c_size_t(pages), MADV_HUGEPAGE
    )
    whole.zero_()
    code = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), pages, 0)
    if int(code) != 0:
        raise RuntimeError(
            f"host memory: the driver refused to pin {pages / 1e9:.2f} GB (error {int(code)}); "
            "lower the context or the batch, or raise the locked-memory limit (ulimit -l)"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    weakref.finalize(raw.untyped_storage(), _unregister, whole.data_ptr(), device)
    return whole[:size].view(dtype).view(shape)
