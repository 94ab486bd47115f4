"""Dense causal attention for prompts, in bounded memory."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention.bias import causal_lower_right

ROWS_AT_ONCE = 512
"""Query rows per piece where a mask is needed, so that the mask stays small."""


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scaling: float
) -> Tensor:
    """Causal attention of the last T tokens over all of them.

    Args:
        query: `[B, Hq, T, D]`.
        key: `[B, H, L, D]`, L >= T; the last T are the query rows' own.
        value: `[B, H, L, Dv]`.
        valid: `[B, L]` bool, False for padding; None if there is none.
        scaling: factor of the logits.

    Returns:
        `[B, Hq, T, Dv]`; rows that see nothing (padding) are finite and meaningless.
    """
    rows, total = query.shape[2], key.shape[2]
    gqa = query.shape[1] != key.shape[1]
    flash = _flash_serves(query, key, value)
    if valid is None and rows == total:
        if gqa and query.is_cuda and not flash:
            # No other kernel takes fewer KV heads than queries without holding all logits at once.
            groups = query.shape[1] // key.shape[1]
            key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
            gqa = False
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=rows > 1, scale=scaling, enable_gqa=gqa
        )
    if valid is None and flash:
        if can_use_cudnn_attention(SDPAParams(query, key, value, None, 0.0, False, gqa)):
            return _in_two_parts(query, key, value, scaling)
        lower_right = causal_lower_right(rows, total)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=lower_right, scale=scaling, enable_gqa=gqa
        )
    pieces = []
    column = torch.arange(total, device=query.device)
    for first in range(0, rows, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, rows)
        seen = total - rows + last
        position = torch.arange(total - rows + first, seen, device=query.device)
        mask = (column[None, :seen] <= position[:, None])[None]
        if valid is not None:
            mask = mask & valid[:, None, :seen]
            mask = mask | ~mask.any(-1, keepdim=True)
        pieces.append(
            F.scaled_dot_product_attention(
                query[:, :, first:last],
                key[:, :, :seen],
                value[:, :, :seen],
                attn_mask=mask[:, None],
                scale=scaling,
                enable_gqa=gqa,
            )
        )
    return torch.cat(pieces, 2)


def _flash_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention takes these tensors: it needs no mask for a last part of the rows."""
    sixteen_bits = query.dtype in (torch.float16, torch.bfloat16)
    dims = query.shape[-1], key.shape[-1], value.shape[-1]
    return query.is_cuda and sixteen_bits and len(set(dims)) == 1 and dims[0] <= 256


def _in_two_parts(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The earlier tokens, then the rows' own, merged by their sums.

    cuDNN's attention, twice as fast as the other on Hopper, aligns a causal mask to the first key
    only, and hands out the log-sum-exp that a merge needs only below torch's public interface.
    """
    old = key.shape[2] - query.shape[2]
    parts = []
    for k, v, causal in (
        (key[:, :, :old], value[:, :, :old], False),
        (key[:, :, old:], value[:, :, old:], True),
    ):
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, k, v, None, True, 0.0, causal, False, scale=scaling
        )
        parts.append((found[0], found[1].reshape(query.shape[:3])))
    (before, sum_before), (own, sum_own) = parts
    weight = torch.sigmoid(sum_own - sum_before)[..., None]
    return torch.lerp(before.float(), own.float(), weight).to(query.dtype)
