"""Scan of the index: approximate logits of every block, and the sums that normalise them.

Grid letters: one program serves one (sequence, KV head) and a range of groups. Q is the number of
query rows of that head (GQA group x rows of the step), padded to QP >= 16 for the tensor cores.
"""

import triton
import triton.language as tl


@triton.jit
def _write_partial(partial, slot, i_q, m_q, logits, live, Q):
    """Store the running maximum and sum of exp over the last axis of `[QP, n]` logits."""
    b_l = tl.where(live[None, :], logits, float("-inf"))
    b_m = tl.max(b_l, 1)
    safe = tl.where(b_m == float("-inf"), 0.0, b_m)
    b_s = tl.sum(tl.exp(b_l - safe[:, None]), 1)
    p = partial + (slot * Q + i_q) * 2
    tl.store(p, b_m, mask=m_q)
    tl.store(p + 1, b_s, mask=m_q)


@triton.jit
def bounds_kernel(
    query, low, high, committed, logits, partial, scaling,
    H, N, Q, group_tokens,
    D: tl.constexpr, DP: tl.constexpr, QP: tl.constexpr, BN: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Largest logit between channel bounds, for every group of keys.

    `high` is the maximum, or with STEP the quantisation step: maximum = low + 3 * step.
    Arrays: query `[BH, Q, D]`, low and high `[BH, N + 1, D]`, logits `[BH, Q, N]`, partial
    `[BH, programs, Q, 2]`.
    """
    bh = tl.program_id(0).to(tl.int64)
    i_n = tl.program_id(1) * BN + tl.arange(0, BN)
    i_q, i_d = tl.arange(0, QP), tl.arange(0, DP)
    m_q, m_d = i_q < Q, i_d < D
    groups = tl.load(committed + bh // H) // group_tokens
    live = i_n < groups
    b_q = tl.load(
        query + (bh * Q + i_q)[:, None] * D + i_d[None, :],
        mask=m_q[:, None] & m_d[None, :], other=0.0,
    )  # fmt: skip
    offset = (bh * (N + 1) + i_n)[None, :] * D + i_d[:, None]
    mask = live[None, :] & m_d[:, None]
    b_low = tl.load(low + offset, mask=mask, other=0.0)
    b_high = tl.load(high + offset, mask=mask, other=0.0)
    if STEP:
        b_high = (b_low.to(tl.float32) + 3.0 * b_high.to(tl.float32)).to(b_low.dtype)
    b_up = tl.maximum(b_q, 0.0).to(b_low.dtype)
    b_down = tl.minimum(b_q, 0.0).to(b_low.dtype)
    b_l = tl.dot(b_up, b_high, input_precision=PRECISION)
    b_l = tl.dot(b_down, b_low, b_l, input_precision=PRECISION) * scaling
    tl.store(logits + (bh * Q + i_q)[:, None] * N + i_n[None, :], b_l,
             mask=m_q[:, None] & (i_n < N)[None, :])  # fmt: skip
    slot = bh * tl.num_programs(1) + tl.program_id(1)
    _write_partial(partial, slot, i_q, m_q, b_l, live, Q)


@triton.jit
def _tail_partial(
    query, ring_k, lengths, rows_end, partial, slot, bh, done, scaling,
    H, Q, T, R, D: tl.constexpr, DP: tl.constexpr, QP: tl.constexpr, RP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Exact share of the tail: running maximum and sum of exp over its places."""
    i_q, i_d, i_r = tl.arange(0, QP), tl.arange(0, DP), tl.arange(0, RP)
    m_q, m_d = i_q < Q, i_d < D
    b_q = tl.load(query + (bh * Q + i_q)[:, None] * D + i_d[None, :],
                  mask=m_q[:, None] & m_d[None, :], other=0.0)  # fmt: skip
    last = tl.load(lengths + bh // H) - 1
    p_r = last - ((last - i_r) % R + R) % R
    m_r = (i_r < R) & (p_r >= done)
    b_k = tl.load(ring_k + (bh * (R + 1) + i_r)[None, :] * D + i_d[:, None],
                  mask=m_r[None, :] & m_d[:, None], other=0.0)  # fmt: skip
    b_l = tl.dot(b_q, b_k, input_precision=PRECISION) * scaling
    end = tl.load(rows_end + (bh // H) * T + i_q % T, mask=m_q, other=-1)
    seen = m_r[None, :] & (p_r[None, :] <= end[:, None])
    b_l = tl.where(seen, b_l, float("-inf"))
    _write_partial(partial, slot, i_q, m_q, b_l, i_r < R, Q)


@triton.jit
def _groups_partial(
    query, codes, lowest, step, chosen, logits, partial, slot, bh, done, scaling,
    N, M, Q,
    G_TOKENS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DQ: tl.constexpr,
    QP: tl.constexpr, GROUPS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two-bit logits of GROUPS chosen groups, summed over each block."""
    PER: tl.constexpr = G_TOKENS // BLOCK
    i_q, i_c, i_t = tl.arange(0, QP), tl.arange(0, DQ), tl.arange(0, G_TOKENS)
    m_q, m_c = i_q < Q, i_c < D // 4
    base = (bh * Q + i_q)[:, None] * D + i_c[None, :]
    m_qc = m_q[:, None] & m_c[None, :]
    b_m = tl.full((QP,), float("-inf"), tl.float32)
    b_s = tl.zeros((QP,), tl.float32)
    for g in tl.static_range(GROUPS):
        i_m = tl.program_id(1) * GROUPS + g
        group = tl.load(chosen + bh * M + i_m, mask=i_m < M, other=N).to(tl.int64)
        live = group * G_TOKENS < done
        row = bh * (N + 1) + group
        b_code = tl.load(
            codes + (row * G_TOKENS + i_t)[None, :] * (D // 4) + i_c[:, None],
            mask=m_c[:, None] & (i_m < M) & live, other=0,
        )  # fmt: skip
        b_l = tl.zeros((QP, G_TOKENS), tl.float32)
        b_z = tl.zeros((QP,), tl.float32)
        for part in tl.static_range(4):
            channel = part * (D // 4) + i_c
            b_q = tl.load(query + base + part * (D // 4), mask=m_qc, other=0.0)
            b_low = tl.load(lowest + row * D + channel, mask=m_c & live, other=0.0)
            b_step = tl.load(step + row * D + channel, mask=m_c & live, other=0.0)
            b_qf = b_q.to(tl.float32)
            b_z += tl.sum(b_qf * b_low.to(tl.float32)[None, :], 1)
            b_qs = (b_qf * b_step.to(tl.float32)[None, :]).to(FAST)
            b_c = ((b_code >> (2 * part)) & 3).to(FAST)
            b_l = tl.dot(b_qs, b_c, b_l, input_precision=PRECISION)
        b_l = (b_l + b_z[:, None]) * scaling
        b_b = tl.reshape(b_l, (QP, PER, BLOCK))
        m_b = tl.max(b_b, 2)
        b_b = m_b + tl.log(tl.sum(tl.exp(b_b - m_b[:, :, None]), 2))
        i_b = i_m * PER + tl.arange(0, PER)
        tl.store(logits + (bh * Q + i_q)[:, None] * (M * PER) + i_b[None, :], b_b,
                 mask=m_q[:, None] & (i_m < M))  # fmt: skip
        b_b = tl.where(live & (i_m < M), b_b, float("-inf"))
        m_new = tl.maximum(b_m, tl.max(b_b, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        b_s = b_s * tl.exp(b_m - safe) + tl.sum(tl.exp(b_b - safe[:, None]), 1)
        b_m = m_new
    p = partial + (slot * Q + i_q) * 2
    tl.store(p, b_m, mask=m_q)
    tl.store(p + 1, b_s, mask=m_q)


@triton.jit
def keys2bit_kernel(
    query, codes, lowest, step, chosen, committed, logits, partial, scaling,
    ring_k, lengths, rows_end,
    H, N, M, Q, T, R,
    G_TOKENS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DQ: tl.constexpr,
    DP: tl.constexpr, QP: tl.constexpr, GROUPS: tl.constexpr, RP: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of two-bit logits over each block of the chosen groups, and of the tail.

    Programs 0 .. ceil(M / GROUPS) - 1 of axis 1 serve chosen groups; the last one serves the tail.
    Arrays: codes `[BH, N + 1, G, D / 4]` uint8, lowest and step `[BH, N + 1, D]`, chosen `[BH, M]`
    int32, logits `[BH, Q, M * G / BLOCK]`, ring_k `[BH, R + 1, D]`.
    """
    bh = tl.program_id(0).to(tl.int64)
    done = tl.load(committed + bh // H)
    slot = bh * tl.num_programs(1) + tl.program_id(1)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        _tail_partial(
            query, ring_k, lengths, rows_end, partial, slot, bh, done, scaling,
            H, Q, T, R, D, DP, QP, RP, PRECISION,
        )  # fmt: skip
    else:
        _groups_partial(
            query, codes, lowest, step, chosen, logits, partial, slot, bh, done, scaling,
            N, M, Q, G_TOKENS, BLOCK, D, DQ, QP, GROUPS, FAST, PRECISION,
        )  # fmt: skip
