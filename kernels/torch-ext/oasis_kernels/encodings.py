"""How an index stores keys in few bits: 8-bit floats, two bits per element, planes of two bits.

Bytes mean the same to every backend. Letters: g tokens per index group, D head dimension.
"""

import torch
from torch import Tensor


def to_float8(x: Tensor, up: bool) -> Tensor:
    """Bytes of 8-bit floats (e4m3, without subnormals) that bound `x` from above, or from below.

    Every number has an exponent of its own, so none is coarse because another is large. Beyond
    +-448, bounds are +-448.
    """
    bits = x.float().view(torch.int32)
    negative, size = bits < 0, bits & 0x7FFFFFFF
    away = negative != up
    # Three bits of mantissa; the exponent is counted from 2**-7.
    short = (torch.where(away, size + 0xFFFFF, size) >> 20) - (120 << 3)
    least = torch.where(away & (size > 0), 8, 0)
    short = torch.where(short < 8, least, short.clamp(max=126))
    return (short | torch.where(negative, 128, 0)).to(torch.uint8)


def floats(x: Tensor) -> Tensor:
    """float32 of what an index stores: of bytes the 8-bit floats that they are."""
    return (x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x).float()


def quantize_keys_2bit(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two bits per key element, asymmetric, per channel over one group of tokens.

    The range is stored as (lowest, step), so that lowest and lowest + 3 * step bound the group: the
    same two numbers serve as the coarse min/max level at no extra bytes.

    Args:
        keys: `[..., g, D]`, D a multiple of 4.

    Returns:
        codes `[..., g, D / 4]` uint8 (byte j holds channels j, j + D/4, j + D/2, j + 3D/4, lowest
        bits first), lowest `[..., D]` and step `[..., D]` in the dtype of `keys`.
    """
    lowest = keys.amin(-2)
    step = ((keys.amax(-2).float() - lowest.float()) * (1 / 3)).to(keys.dtype)
    scale = torch.where(step > 0, step, torch.ones_like(step)).float()
    offset = keys.float() - lowest.float().unsqueeze(-2)
    code = (offset / scale.unsqueeze(-2) + 0.5).floor().clamp(0, 3).to(torch.uint8)
    c0, c1, c2, c3 = code.chunk(4, -1)
    return c0 | (c1 << 2) | (c2 << 4) | (c3 << 6), lowest, step


def dequantize_keys_2bit(codes: Tensor, lowest: Tensor, step: Tensor) -> Tensor:
    """Inverse of `quantize_keys_2bit`, in float32: `[..., g, D]`."""
    code = torch.cat([(codes >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    # In place: a fresh tensor of this size costs a host more than the arithmetic on it.
    return code.float().mul_(step.float().unsqueeze(-2)).add_(lowest.float().unsqueeze(-2))


def pack_planes(levels: Tensor, leading: int) -> tuple[Tensor, Tensor]:
    """Planes of two bits, in which four consecutive tokens share a byte, the first lowest.

    Args:
        levels: `[..., g, D]` uint8, below 16 in the leading channels and below 4 in the others; g a
            multiple of 4.
        leading: how many channels have four bits.

    Returns:
        codes `[..., g / 4, D]`: the levels of two bits, and the upper two bits of the others; fine
        `[..., g / 4, leading]`: the lower two bits of these.
    """
    first = levels[..., :leading]
    return (
        _pack_tokens(torch.cat([first >> 2, levels[..., leading:]], -1)),
        _pack_tokens(first & 3),
    )


def _pack_tokens(codes: Tensor) -> Tensor:
    """Four tokens a byte: `[..., g, C]` below 4 to `[..., g / 4, C]`."""
    c0, c1, c2, c3 = codes.unflatten(-2, (-1, 4)).unbind(-2)
    return c0 | (c1 << 2) | (c2 << 4) | (c3 << 6)


def unpack_planes(codes: Tensor, fine: Tensor) -> Tensor:
    """Levels in float32 `[..., g, D]`: the inverse of `pack_planes`."""
    upper, lower = (
        torch.stack([(plane >> shift) & 3 for shift in (0, 2, 4, 6)], -2).flatten(-3, -2)
        for plane in (codes, fine)
    )
    leading = fine.shape[-1]
    return torch.cat([upper[..., :leading] * 4 + lower, upper[..., leading:]], -1).float()
