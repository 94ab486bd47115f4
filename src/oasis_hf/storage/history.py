"""Reading back what a layer holds: from the store, and from the tail what has not left it."""

import torch
from torch import Tensor

from ..geometry import ceil_div, round_up
from .parts import LayerParts


def history(parts: LayerParts, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The first tokens of each sequence, on the layer's device.

    Args:
        parts: of the layer.
        lengths: tokens wanted of each sequence.

    Returns:
        k `[B, H, L, Dk]`, v likewise with L the longest, and valid `[B, L]` or None if all
        sequences are as long. Tokens past a sequence's end are zeros.
    """
    parts.join()
    longest = max(lengths)
    k, v = history_buffers(parts, parts.batch_size, longest)
    for row, length in enumerate(lengths):
        recall(parts, row, length, k[row : row + 1], v[row : row + 1])
        k[row, :, length:], v[row, :, length:] = 0, 0
    k, v = k[:, :, :longest], v[:, :, :longest]
    if min(lengths) == longest:
        return k, v, None
    limit = torch.tensor(lengths, device=parts.device)
    return k, v, torch.arange(longest, device=parts.device)[None] < limit[:, None]


def history_buffers(parts: LayerParts, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Memory for at least `tokens` tokens: k `[batch, H, L, Dk]` and v, L in whole blocks."""
    g = parts.geometry
    shape = (batch, g.kv_heads, round_up(tokens, g.block))
    k = torch.empty(*shape, g.k_dim, dtype=parts.dtype, device=parts.device)
    return k, torch.empty(*shape, g.v_dim, dtype=parts.dtype, device=parts.device)


def _stored(parts: LayerParts, row: int, length: int) -> int:
    """Of the first tokens of a sequence, those in the store; the tail has the rest."""
    return min(parts.frontier.settled()[1][row], length)


def stored_blocks(parts: LayerParts, row: int, length: int) -> int:
    """Blocks of the store that hold them."""
    return ceil_div(_stored(parts, row, length), parts.geometry.block)


def recall(
    parts: LayerParts, row: int, length: int, k: Tensor, v: Tensor, packed: Tensor | None = None
) -> None:
    """Put the first tokens of a sequence into k `[1, H, L, Dk]` and v.

    L is in whole blocks; what stands after the tokens is unspecified.

    Args:
        parts: of the layer.
        row: the sequence.
        length: how many tokens.
        k: where to put them.
        v: likewise.
        packed: the blocks `[1, H, stored_blocks, row]` that are in the store, if they have been
            read already.
    """
    blocks, block = stored_blocks(parts, row, length), parts.geometry.block
    if packed is None:
        packed = parts.store.buffer(blocks)
        parts.store.read_into(row, packed)
    stored, tail = _stored(parts, row, length), parts.tail
    place = torch.arange(stored, length, device=parts.device) % tail.places
    found = zip((k, v), parts.store.unpack(packed), (tail.k, tail.v), strict=True)
    for target, part, ring in found:
        target[:, :, : blocks * block].unflatten(2, (-1, block)).copy_(part)
        target[:, :, stored:length] = ring[row : row + 1, :, place]


def span(parts: LayerParts, row: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Tokens first..last of a sequence: k `[1, H, last - first, Dk]` and v, on the device."""
    block, rows, tail = parts.geometry.block, slice(row, row + 1), parts.tail
    stored = min(max(parts.frontier.settled()[1][row], first), last)
    place = torch.arange(stored, last, device=parts.device) % tail.places
    found = [(tail.k[rows][:, :, place], tail.v[rows][:, :, place])]
    if stored > first:
        begin = first // block
        blocks = parts.store.read_range(rows, begin, ceil_div(stored, block))
        inside = slice(first - begin * block, stored - begin * block)
        k, v = (x.flatten(2, 3)[:, :, inside].to(parts.device) for x in blocks)
        found.insert(0, (k, v))
    k, v = (torch.cat(states, 2) for states in zip(*found, strict=True))
    return k, v
