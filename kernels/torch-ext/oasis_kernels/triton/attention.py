"""Attention of a few query rows over chosen slots and the tail, split over programs and merged."""

import triton
import triton.language as tl


@triton.jit
def _merge(acc, m_old, s_old, logits, value, PRECISION: tl.constexpr):
    """One step of the online softmax: `[QP, n]` logits (-inf where hidden), `[n, DVP]` values."""
    m_new = tl.maximum(m_old, tl.max(logits, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = tl.exp(logits - safe[:, None])
    scale = tl.exp(m_old - safe)
    s_new = s_old * scale + tl.sum(b_p, 1)
    acc = tl.dot(b_p.to(value.dtype), value, acc * scale[:, None], input_precision=PRECISION)
    return acc, m_new, s_new


@triton.jit
def partial_attention_kernel(
    query, pool_k, pool_v, attended, ring_k, ring_v, lengths, committed, rows_end,
    out, peak, total, scaling,
    H, Q, T, K, S,
    R: tl.constexpr, BLOCK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr,
    QP: tl.constexpr, SLOTS: tl.constexpr, STEPS: tl.constexpr, RN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial results of SLOTS * STEPS chosen slots each; the last program of axis 1 has the tail.

    Arrays: query `[BH, Q, DK]`, attended `[BH, K]` int32 (-1 behind the last), rows_end `[B, T]`
    positions; out `[BH, programs, Q, DV]` float32, peak and total `[BH, programs, Q]`.
    """
    bh = tl.program_id(0).to(tl.int64)
    i_q, i_k, i_v = tl.arange(0, QP), tl.arange(0, DKP), tl.arange(0, DVP)
    m_q, m_k, m_v = i_q < Q, i_k < DK, i_v < DV
    b_q = tl.load(query + (bh * Q + i_q)[:, None] * DK + i_k[None, :],
                  mask=m_q[:, None] & m_k[None, :], other=0.0)  # fmt: skip
    acc = tl.zeros((QP, DVP), tl.float32)
    b_m = tl.full((QP,), float("-inf"), tl.float32)
    b_s = tl.zeros((QP,), tl.float32)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        last = tl.load(lengths + bh // H) - 1
        done = tl.load(committed + bh // H)
        end = tl.load(rows_end + (bh // H) * T + i_q % T, mask=m_q, other=-1)
        for first in range(0, R, RN):
            i_r = first + tl.arange(0, RN)
            p_r = last - ((last - i_r) % R + R) % R
            m_r = (i_r < R) & (p_r >= done) & (p_r >= 0)
            row = bh * (R + 1) + i_r
            b_k = tl.load(ring_k + row[None, :] * DK + i_k[:, None],
                          mask=m_r[None, :] & m_k[:, None], other=0.0)  # fmt: skip
            b_v = tl.load(ring_v + row[:, None] * DV + i_v[None, :],
                          mask=m_r[:, None] & m_v[None, :], other=0.0)  # fmt: skip
            b_l = tl.dot(b_q, b_k, input_precision=PRECISION) * scaling
            b_l = tl.where(m_r[None, :] & (p_r[None, :] <= end[:, None]), b_l, float("-inf"))
            acc, b_m, b_s = _merge(acc, b_m, b_s, b_l, b_v, PRECISION)
    else:
        for step in range(STEPS):
            i_n = tl.arange(0, SLOTS * BLOCK)
            i_s = (tl.program_id(1) * STEPS + step) * SLOTS + i_n // BLOCK
            slot = tl.load(attended + bh * K + i_s, mask=i_s < K, other=-1)
            m_n = slot >= 0
            row = (bh * (S + 1) + slot) * BLOCK + i_n % BLOCK
            b_k = tl.load(pool_k + row[None, :] * DK + i_k[:, None],
                          mask=m_n[None, :] & m_k[:, None], other=0.0)  # fmt: skip
            b_v = tl.load(pool_v + row[:, None] * DV + i_v[None, :],
                          mask=m_n[:, None] & m_v[None, :], other=0.0)  # fmt: skip
            b_l = tl.dot(b_q, b_k, input_precision=PRECISION) * scaling
            b_l = tl.where(m_n[None, :], b_l, float("-inf"))
            acc, b_m, b_s = _merge(acc, b_m, b_s, b_l, b_v, PRECISION)
    slot_out = (bh * tl.num_programs(1) + tl.program_id(1)) * Q + i_q
    tl.store(out + slot_out[:, None] * DV + i_v[None, :], acc, mask=m_q[:, None] & m_v[None, :])
    tl.store(peak + slot_out, b_m, mask=m_q)
    tl.store(total + slot_out, b_s, mask=m_q)


@triton.jit
def merge_attention_kernel(
    partial, peak, total, out, Q, programs,
    DV: tl.constexpr, DVP: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one query row; a row that saw nothing gives zeros."""
    bh, q = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_p, i_v = tl.arange(0, PP), tl.arange(0, DVP)
    m_p, m_v = i_p < programs, i_v < DV
    slot = (bh * programs + i_p) * Q + q
    b_m = tl.load(peak + slot, mask=m_p, other=float("-inf"))
    b_s = tl.load(total + slot, mask=m_p, other=0.0)
    top = tl.max(b_m, 0)
    weight = tl.exp(b_m - tl.where(top == float("-inf"), 0.0, top))
    norm = tl.sum(b_s * weight, 0)
    b_o = tl.load(partial + slot[:, None] * DV + i_v[None, :],
                  mask=m_p[:, None] & m_v[None, :], other=0.0)  # fmt: skip
    b_o = tl.sum(b_o * weight[:, None], 0) / tl.where(norm > 0, norm, 1.0)
    tl.store(out + (bh * Q + q) * DV + i_v, b_o.to(out.dtype.element_ty), mask=m_v)
