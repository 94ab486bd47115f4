"""What launches share: the settings of a device, and how sizes and types become constants."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .settings import Settings, settings

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@lru_cache
def tuned(device: torch.device) -> Settings:
    """The settings for a device."""
    return settings(torch.cuda.get_device_name(device) if device.type == "cuda" else None)


def pow2(n: int, least: int = 16) -> int:
    """The least power of two not below n and `least`."""
    return max(least, triton.next_power_of_2(n))


def has_assembly(tensor: Tensor) -> bool:
    """Whether inline assembly can run: on a GPU, not in the interpreter."""
    return tensor.is_cuda


def product_type(tensor: Tensor) -> tl.dtype:
    """What products of unpacked numbers are computed in, beside such queries."""
    return tl.float32 if tensor.dtype == torch.float32 else tl.float16


def precision(tensor: Tensor) -> str:
    """How products of such numbers are rounded."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"
