"""Exact checksums of tensors, taken where the tensor is.

Sums of integers are the same in any order, so they do not depend on the device or its threads. Each
byte counts: a change of a single element always changes the sum. Only eight bytes leave the device.
"""

import functools
import hashlib

import torch
from torch import Tensor

WIDTH = 1021
"""Words that have a factor of their own. A prime, so that rows of a matrix that change places get
other factors."""


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Odd numbers `[WIDTH]` int64: multiplying by one loses nothing."""
    digests = (hashlib.sha256(f"oasis-hf {number}".encode()).digest() for number in range(WIDTH))
    numbers = [int.from_bytes(digest[:8], "little", signed=True) | 1 for digest in digests]
    return torch.tensor(numbers, dtype=torch.long, device=device)


def checksum(tensor: Tensor) -> Tensor:
    """A number `[]` int64 on the tensor's device, of all its bytes in logical order.

    Two tensors of one shape and dtype with the same contents have the same number, whatever their
    device and layout; with other contents, as good as never.
    """
    words = _words(tensor)
    factors = _factors(tensor.device)
    rows = words.numel() // WIDTH
    whole = words[: rows * WIDTH].view(rows, WIDTH).sum(0)
    rest = words[rows * WIDTH :]
    return (whole * factors).sum() + (rest * factors[: rest.numel()]).sum()


def _words(tensor: Tensor) -> Tensor:
    """The bytes as int64, zeros after their end; a copy only where the memory cannot be read so."""
    with torch.no_grad():
        plain = tensor.detach().as_subclass(Tensor)
        if plain.layout != torch.strided:
            plain = plain.to_dense()
        if plain.is_quantized:
            plain = plain.dequantize()
        flat = plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        spare = -flat.numel() % 8
        if spare or flat.storage_offset() % 8:
            flat = torch.cat([flat, flat.new_zeros(spare)])
        return flat.view(torch.long)
