"""Host memory that a CUDA device reads and writes directly: ordinary pages, registered."""

import weakref

import torch
from torch import Tensor

PAGE = 4096


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised registered host memory, given back when the tensor dies.

    torch's own pinned allocator rounds sizes up to a power of two and keeps what is freed; a cache
    of many gigabytes cannot afford either. Whole pages are taken: no page is registered twice.

    Raises:
        RuntimeError: the driver refuses to register the memory.
    """
    size = torch.empty((), dtype=dtype).element_size()
    for extent in shape:
        size *= extent
    pages = -(-size // PAGE) * PAGE
    raw = torch.empty(pages + PAGE, dtype=torch.uint8)
    offset = -raw.data_ptr() % PAGE
    whole = raw[offset : offset + pages]
    code = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), pages, 0)
    if int(code) != 0:
        raise RuntimeError(
            f"host memory: the driver refused to pin {pages / 1e9:.2f} GB (error {int(code)}); "
            "lower the context or the batch, or raise the locked-memory limit (ulimit -l)"
        )
    weakref.finalize(raw.untyped_storage(), _unregister, whole.data_ptr())
    return whole[:size].view(dtype).view(shape)
