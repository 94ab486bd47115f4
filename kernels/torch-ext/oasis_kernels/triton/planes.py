"""Keys in their principal directions: written in two planes of two bits, and scanned whole.

Four consecutive tokens share a byte, so that a byte is a row of four products with one operand:
part p of all bytes are the tokens 4 i + p.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..api import Scores
from .common import has_assembly, pow2, precision, product_type, tuned
from .fit import BYTE, FLOAT32, INT32, INT64, check, unmet
from .score import ASM_0, ASM_1, ASM_2, ASM_3, _half, _log, _tail_partial, _unpack, _write_partial


@triton.jit
def _levels(
    ring_k, encode, shift, row, source, i_d, i_e, DK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Levels, not yet within their bits, of keys `source` in directions `i_e`: `[tokens, E]`."""
    m_d, m_e = i_d < DK, i_e < DK
    b_k = tl.load(ring_k + source[:, None] * DK + i_d[None, :], mask=m_d[None, :], other=0.0)
    b_e = tl.load(encode + (row * DK + i_d[:, None]) * DK + i_e[None, :],
                  mask=m_d[:, None] & m_e[None, :], other=0.0)  # fmt: skip
    b_s = tl.load(shift + row * DK + i_e, mask=m_e, other=0.0)
    b_l = tl.dot(b_k.to(tl.float32), b_e.to(tl.float32), input_precision=PRECISION)
    return tl.floor(b_l + b_s[None, :])


@triton.jit
def _pack(code, shifts, QUADS: tl.constexpr, DP: tl.constexpr):
    """Codes `[4 * QUADS, DP]` below 4 as bytes `[QUADS, DP]`."""
    parts = tl.reshape(code.to(tl.int32) << shifts[:, None], (QUADS, 4, DP))
    return tl.sum(parts, 1).to(tl.uint8)


@triton.jit
def write_principal_kernel(
    ring_k, encode, shift, committed, moved, codes, fine,
    H, N, R, LEAD,
    GROUP: tl.constexpr, DK: tl.constexpr, DP: tl.constexpr, LP: tl.constexpr,
    FLUSHES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Index the groups that leave the tail. One program per BH.

    Arrays: ring_k `[BH, R + 1, DK]`, encode `[BH, DK, DK]`, shift `[BH, DK]`, codes
    `[BH, N + 1, GROUP / 4, DK]` and fine `[BH, N + 1, GROUP / 4, LEAD]` bytes.
    """
    bh = tl.program_id(0).to(tl.int64)
    groups = tl.load(moved + bh // H)
    start = tl.load(committed + bh // H) - groups * GROUP
    QUADS: tl.constexpr = GROUP // 4
    i_t, i_d, i_l = tl.arange(0, GROUP), tl.arange(0, DP), tl.arange(0, LP)
    i_r = tl.arange(0, QUADS)
    shifts = 2 * (i_t % 4)
    for i in tl.static_range(FLUSHES):
        if i < groups:
            first = start + i * GROUP
            source = bh * (R + 1) + first % R + i_t
            row = (bh * (N + 1) + first // GROUP) * QUADS + i_r
            b_l = _levels(ring_k, encode, shift, bh, source, i_d, i_d, DK, PRECISION)
            top = tl.where(i_d < LEAD, 15.0, 3.0)[None, :]
            b_l = tl.minimum(tl.maximum(b_l, 0.0), top).to(tl.int32)
            b_l = tl.where((i_d < LEAD)[None, :], b_l >> 2, b_l)
            tl.store(codes + row[:, None] * DK + i_d[None, :], _pack(b_l, shifts, QUADS, DP),
                     mask=(i_d < DK)[None, :])  # fmt: skip
            b_l = _levels(ring_k, encode, shift, bh, source, i_d, i_l, DK, PRECISION)
            b_l = tl.minimum(tl.maximum(b_l, 0.0), 15.0).to(tl.int32) & 3
            tl.store(fine + row[:, None] * LEAD + i_l[None, :], _pack(b_l, shifts, QUADS, LP),
                     mask=(i_l < LEAD)[None, :])  # fmt: skip


@triton.jit
def turn_queries_kernel(
    query, decode, origin, turned, offset,
    ring_k, committed, lengths, rows_end, partial, scaling,
    H, Q, T, programs, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, QP: tl.constexpr,
    FAST: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries per level of each direction, and the share of the tail. Two programs per BH.

    Arrays: query `[BH, Q, D]`, decode `[BH, D, D]`, origin `[BH, D]`, turned `[BH, Q, D]` of FAST,
    offset `[BH, Q]`, what every estimated logit has besides; partial `[BH, programs, Q, 2]`, whose
    last entry is the tail's.
    """
    bh = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        i_q, i_d = tl.arange(0, QP), tl.arange(0, DP)
        m_q, m_d = i_q < Q, i_d < D
        b_q = tl.load(query + (bh * Q + i_q)[:, None] * D + i_d[None, :],
                      mask=m_q[:, None] & m_d[None, :], other=0.0).to(tl.float32)  # fmt: skip
        b_m = tl.load(decode + (bh * D + i_d[:, None]) * D + i_d[None, :],
                      mask=m_d[:, None] & m_d[None, :], other=0.0).to(tl.float32)  # fmt: skip
        b_o = tl.load(origin + bh * D + i_d, mask=m_d, other=0.0)
        b_t = tl.dot(b_q, b_m, input_precision=PRECISION) * scaling
        tl.store(turned + (bh * Q + i_q)[:, None] * D + i_d[None, :], _half(b_t, FAST, ASM),
                 mask=m_q[:, None] & m_d[None, :])  # fmt: skip
        tl.store(offset + bh * Q + i_q, tl.sum(b_q * b_o[None, :], 1) * scaling, mask=m_q)
    else:
        done = tl.load(committed + bh // H)
        _tail_partial(
            query, ring_k, lengths, rows_end, partial, bh * programs + programs - 1, bh, done,
            scaling, H, Q, T, R, D, DP, QP, 32, PRECISION,
        )  # fmt: skip


@triton.jit
def _part(
    b_code, b_fine, q_code, q_fine, b_o, PART: tl.constexpr, TEXT: tl.constexpr,
    FAST: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits `[rows, QN]` of one token of each byte."""
    b_l = tl.dot(_unpack(b_code, PART, TEXT, FAST, ASM), q_code, input_precision=PRECISION)
    b_l = tl.dot(_unpack(b_fine, PART, TEXT, FAST, ASM), q_fine, b_l, input_precision=PRECISION)
    if ASM:
        b_l *= 2.0 ** (24 - 2 * PART)
    return b_l + b_o[None, :]


@triton.jit
def principal_kernel(
    turned, offset, codes, fine, committed, logits, partial,
    H, rows, C, Q, LEAD,
    BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, LP: tl.constexpr, QN: tl.constexpr,
    ROWS: tl.constexpr, FAST: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of estimated logits over each of the first C blocks.

    One program per BH and ROWS rows of bytes, each four tokens. Arrays: turned `[BH, Q, D]`, offset
    `[BH, Q]`, codes `[BH, rows, D]`, fine `[BH, rows, LEAD]`, logits `[BH, Q, C]`, partial
    `[BH, programs + 1, Q, 2]`, whose last entry is not this kernel's.
    """
    bh = tl.program_id(0).to(tl.int64)
    PER: tl.constexpr = BLOCK // 4
    BLOCKS: tl.constexpr = ROWS // PER
    i_q, i_d, i_l = tl.arange(0, QN), tl.arange(0, DP), tl.arange(0, LP)
    m_q, m_d, m_l = i_q < Q, i_d < D, i_l < LEAD
    i_b = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live = i_b < tl.load(committed + bh // H) // BLOCK
    i_r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    m_r = i_r < C * PER
    b_code = tl.load(codes + (bh * rows + i_r)[:, None] * D + i_d[None, :],
                     mask=m_r[:, None] & m_d[None, :], other=0)  # fmt: skip
    b_fine = tl.load(fine + (bh * rows + i_r)[:, None] * LEAD + i_l[None, :],
                     mask=m_r[:, None] & m_l[None, :], other=0)  # fmt: skip
    q_code = tl.load(turned + (bh * Q + i_q)[None, :] * D + i_d[:, None],
                     mask=m_q[None, :] & m_d[:, None], other=0.0)  # fmt: skip
    # A level of the first plane is four of the second.
    q_code = tl.where((i_d < LEAD)[:, None], q_code * 4.0, q_code).to(FAST)
    q_fine = tl.load(turned + (bh * Q + i_q)[None, :] * D + i_l[:, None],
                     mask=m_q[None, :] & m_l[:, None], other=0.0)  # fmt: skip
    b_o = tl.load(offset + bh * Q + i_q, mask=m_q, other=0.0)
    l0 = _part(b_code, b_fine, q_code, q_fine, b_o, 0, ASM_0, FAST, ASM, PRECISION)
    l1 = _part(b_code, b_fine, q_code, q_fine, b_o, 1, ASM_1, FAST, ASM, PRECISION)
    l2 = _part(b_code, b_fine, q_code, q_fine, b_o, 2, ASM_2, FAST, ASM, PRECISION)
    l3 = _part(b_code, b_fine, q_code, q_fine, b_o, 3, ASM_3, FAST, ASM, PRECISION)
    most = tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3))
    most = tl.max(tl.reshape(most, (BLOCKS, PER, QN)), 1)
    top = tl.reshape(tl.broadcast_to(most[:, None, :], (BLOCKS, PER, QN)), (ROWS, QN))
    total = tl.exp(l0 - top) + tl.exp(l1 - top) + tl.exp(l2 - top) + tl.exp(l3 - top)
    b_b = most + _log(tl.sum(tl.reshape(total, (BLOCKS, PER, QN)), 1), ASM)
    tl.store(logits + (bh * Q + i_q)[None, :] * C + i_b[:, None], b_b,
             mask=m_q[None, :] & (i_b < C)[:, None])  # fmt: skip
    slot = bh * (tl.num_programs(1) + 1) + tl.program_id(1)
    b_b = tl.where(live[:, None], b_b, float("-inf"))
    _write_partial(partial + slot * Q * 2, i_q, m_q, b_b)


def write_principal(
    ring_k: Tensor,
    encode: Tensor,
    shift: Tensor,
    committed: Tensor,
    moved: Tensor,
    codes: Tensor,
    fine: Tensor,
    group: int,
    flushes: int,
) -> None:
    """Index the groups that leave the tail: see `write_principal_kernel`.

    Args:
        ring_k: `[B, H, R + 1, D]`.
        encode: `[B, H, D, D]`; shift `[B, H, D]` float32.
        committed: `[B]` tokens that left the tail, these groups among them.
        moved: `[B]` groups.
        codes: `[B, H, N + 1, group / 4, D]` bytes; fine `[B, H, N + 1, group / 4, L]`.
    """
    batch, heads, places, dim = ring_k.shape
    lead, span = fine.shape[-1], (batch, heads, codes.shape[2], group // 4)
    check(
        "write_principal", ring_k.device,
        ("ring of keys", ring_k, (batch, heads, places, dim), ring_k.dtype),
        ("encode", encode, (batch, heads, dim, dim), encode.dtype),
        ("shift", shift, (batch, heads, dim), FLOAT32),
        ("committed", committed, (batch,), INT64), ("moved", moved, (batch,), INT32),
        ("codes", codes, (*span, dim), BYTE), ("fine", fine, (*span, lead), BYTE),
    )  # fmt: skip
    if (places - 1) % group or group % 4:
        raise unmet("write_principal", f"whole groups of {group} in {places - 1} places")
    write_principal_kernel[(batch * heads,)](
        ring_k, encode, shift, committed, moved, codes, fine,
        heads, codes.shape[2] - 1, places - 1, lead,
        GROUP=group, DK=dim, DP=pow2(dim), LP=pow2(lead), FLUSHES=flushes,
        PRECISION="ieee", num_warps=4,
    )  # fmt: skip


def principal(
    query: Tensor,
    decode: Tensor,
    origin: Tensor,
    codes: Tensor,
    fine: Tensor,
    committed: Tensor,
    ring_k: Tensor,
    lengths: Tensor,
    positions: Tensor,
    scaling: float,
    block: int,
    count: int,
) -> Scores:
    """Estimated logits of the first `count` blocks, and the tail's share.

    Args:
        query: `[B, H, Q, D]`.
        decode: `[B, H, D, D]`; origin `[B, H, D]` float32.
        codes: `[B, H, N + 1, g / 4, D]` bytes; fine `[B, H, N + 1, g / 4, L]`.
    """
    batch, heads, queries, dim = query.shape
    lead, span = fine.shape[-1], codes.shape[:4]
    check(
        "principal", query.device,
        ("query", query, (batch, heads, queries, dim), query.dtype),
        ("decode", decode, (batch, heads, dim, dim), decode.dtype),
        ("origin", origin, (batch, heads, dim), FLOAT32),
        ("codes", codes, (batch, heads, *span[2:], dim), BYTE), ("fine", fine, (*span, lead), BYTE),
        ("ring of keys", ring_k, (batch, heads, -1, dim), query.dtype),
        ("committed", committed, (batch,), INT64), ("lengths", lengths, (batch,), INT64),
        ("positions", positions, (batch, -1), INT64),
    )  # fmt: skip
    per_block, rows = block // 4, span[2] * span[3]
    if block % 4 or count * per_block > rows - span[3]:
        raise unmet("principal", f"at most {rows - span[3]} rows of {per_block} a block")
    if queries % positions.shape[1]:
        raise unmet("principal", f"rows of {positions.shape[1]} tokens, got {queries}")
    launch, fast = tuned(query.device), product_type(query)
    padded = pow2(queries, 8)
    # What one program holds: logits of four tokens a row, for every query.
    at_once = max(16, per_block, min(launch.principal_rows, launch.principal_rows * 16 // padded))
    at_once = min(at_once, pow2(count * per_block))
    programs = triton.cdiv(count * per_block, at_once)
    pairs, assembly = batch * heads, has_assembly(query) and fast == tl.float16
    turned = query.new_empty(
        pairs, queries, dim, dtype=torch.float16 if fast == tl.float16 else FLOAT32
    )
    offset = query.new_empty(pairs, queries, dtype=FLOAT32)
    logits = query.new_empty(pairs, queries, count, dtype=FLOAT32)
    partial = query.new_empty(pairs, programs + 1, queries, 2, dtype=FLOAT32)
    turn_queries_kernel[(pairs, 2)](
        query, decode, origin, turned, offset,
        ring_k, committed, lengths, positions, partial, scaling,
        heads, queries, positions.shape[1], programs + 1,
        R=ring_k.shape[2] - 1, D=dim, DP=pow2(dim), QP=pow2(queries), FAST=fast, ASM=assembly,
        PRECISION=precision(query), num_warps=launch.turn_warps,
    )  # fmt: skip
    principal_kernel[(pairs, programs)](
        turned, offset, codes, fine, committed, logits, partial,
        heads, rows, count, queries, lead,
        BLOCK=block, D=dim, DP=pow2(dim), LP=pow2(lead), QN=padded, ROWS=at_once,
        FAST=fast, ASM=assembly, PRECISION=precision(query), num_warps=launch.principal_warps,
    )  # fmt: skip
    return Scores(logits, partial, positions)
