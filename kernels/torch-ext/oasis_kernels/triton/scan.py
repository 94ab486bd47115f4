"""Launches that score blocks: bounds of groups, candidates among these, two-bit keys.

What an index is made of that has kernels of its own. Tensors are compared with each other before a
launch (`fit`). B sequences, H KV heads, BH = B * H, Q = GQA group x rows, N blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import Scores
from . import plan, score
from .common import DTYPES, has_assembly, pow2, precision, product_type, tuned
from .fit import BYTE, INT32, INT64, check, check_scores, unmet


def bounds(
    query: Tensor, low: Tensor, high: Tensor, committed: Tensor, positions: Tensor,
    scaling: float, group_tokens: int, count: int, step: bool,
) -> Scores:  # fmt: skip
    """Bounds of the first `count` groups: query `[B, H, Q, D]`; low, high `[B, H, N + 1, D]`."""
    batch, heads, rows, dim = query.shape
    span = (batch, heads, low.shape[2], dim)
    stored = low.dtype if low.dtype is BYTE else query.dtype
    check(
        "bounds", query.device,
        ("query", query, (batch, heads, rows, dim), query.dtype),
        ("low", low, span, stored), ("high", high, span, stored),
        ("committed", committed, (batch,), INT64), ("positions", positions, (batch, -1), INT64),
    )  # fmt: skip
    if count >= low.shape[2]:
        raise unmet("bounds", f"at most {low.shape[2] - 1} groups, got {count}")
    bytes_ = low.dtype == torch.uint8
    fast = product_type(query) if bytes_ else DTYPES[low.dtype]
    launch = tuned(query.device)
    # Bytes: as much traffic in one program.
    per_program = min(launch.bounds_groups * (2 if bytes_ else 1), pow2(count))
    programs = triton.cdiv(count, per_program)
    logits = query.new_empty(batch * heads, rows, count, dtype=torch.float32)
    partial = query.new_empty(batch * heads, programs, rows, 2, dtype=torch.float32)
    score.bounds_kernel[(batch * heads, programs)](
        query, low, high, committed, logits, partial, scaling * (256 if bytes_ else 1),
        heads, low.shape[2] - 1, count, rows, group_tokens,
        D=dim, DP=pow2(dim), QN=pow2(rows, 8), BN=per_program, STEP=step,
        FAST=fast, ASM=has_assembly(query) and fast != tl.float32,
        PRECISION=precision(query), num_warps=launch.bounds_warps,
    )  # fmt: skip
    return Scores(logits, partial, positions)


def candidates(
    scores: Scores, committed: Tensor, count: int, heads: int, group_tokens: int
) -> Tensor:
    """The `count` groups with the largest bounds, in order: `[BH, count]` int32."""
    pairs, rows, groups = scores.logits.shape
    check_scores("candidates", scores, committed, pairs // heads, heads)
    if count > groups:
        raise unmet("candidates", f"at most {groups} of them, got {count}")
    programs, launch = scores.partial.shape[1], tuned(scores.logits.device)
    chosen = torch.empty(pairs, count, dtype=INT32, device=scores.logits.device)
    size = pow2(groups)
    plan.candidates_kernel[(pairs,)](
        scores.logits, scores.partial, scores.positions, committed, chosen,
        heads, groups, count, programs, group_tokens,
        Q=rows, T=scores.positions.shape[1], PP=pow2(programs, 1), CP=size,
        num_warps=launch.candidate_warps if size <= 2048 else launch.candidate_warps_wide,
    )  # fmt: skip
    return chosen


def keys2bit(
    query: Tensor,
    codes: Tensor,
    lowest: Tensor,
    step: Tensor,
    chosen: Tensor,
    committed: Tensor,
    ring_k: Tensor,
    lengths: Tensor,
    positions: Tensor,
    scaling: float,
    block: int,
) -> Scores:
    """Two-bit logits of the chosen groups `[BH, M]`, and the tail's share: query `[B, H, Q, D]`."""
    batch, heads, rows, dim = query.shape
    groups, tokens = codes.shape[2] - 1, codes.shape[3]
    span = (batch, heads, groups + 1)
    check(
        "keys2bit", query.device,
        ("query", query, (batch, heads, rows, dim), query.dtype),
        ("codes", codes, (*span, tokens, dim // 4), BYTE),
        ("lowest", lowest, (*span, dim), query.dtype), ("step", step, (*span, dim), query.dtype),
        ("chosen", chosen, (batch * heads, -1), INT32),
        ("ring of keys", ring_k, (batch, heads, -1, dim), query.dtype),
        ("committed", committed, (batch,), INT64), ("lengths", lengths, (batch,), INT64),
        ("positions", positions, (batch, -1), INT64),
    )  # fmt: skip
    if rows % positions.shape[1]:
        raise unmet("keys2bit", f"rows of {positions.shape[1]} tokens, got {rows}")
    count, per_group = chosen.shape[1], tokens // block
    launch = tuned(query.device)
    padded, part = pow2(rows, 4), pow2(dim // 4)
    # What one program holds: the query once per group, in every channel.
    room = 8192 * 32 // (max(padded, 8) * part * max(tokens, 32))
    at_once = max(1, min(launch.fine_groups, room))
    programs = triton.cdiv(count, at_once) + 1
    logits = query.new_empty(batch * heads, rows, count * per_group, dtype=torch.float32)
    partial = query.new_empty(batch * heads, programs, rows, 2, dtype=torch.float32)
    fast = product_type(query)
    places, many = ring_k.shape[2] - 1, batch * heads >= launch.many_pairs
    score.keys2bit_kernel[(batch * heads, programs)](
        query, codes, lowest, step, chosen, committed, logits, partial, scaling,
        ring_k, lengths, positions,
        heads, groups, count, rows, positions.shape[1],
        R=places, G_TOKENS=tokens, BLOCK=block, D=dim, DQ=part, DP=pow2(dim),
        QP=pow2(rows), QN=padded, SPREAD=padded < 8, GROUPS=at_once, FAST=fast,
        ASM=has_assembly(query) and fast == tl.float16, PRECISION=precision(query),
        num_warps=launch.fine_warps, maxnreg=launch.fine_registers if many else None,
    )  # fmt: skip
    return Scores(logits, partial, positions, chosen, per_group)
