"""Scan of the index: approximate logits of every block, and the sums that normalise them.

Grid letters: one program serves one (sequence, KV head) and a range of groups. Q is the number of
query rows of that head (GQA group x rows of the step), padded for the tensor cores to QN >= 8 as
columns of a product, to QP >= 16 as rows.
"""

import triton
import triton.language as tl


@triton.jit
def _write_partial(partial, i_q, m_q, logits):
    """Store maximum and sum of exp over the first axis of `[n, QN]` logits, a pair per query."""
    b_m = tl.max(logits, 0)
    safe = tl.where(b_m == float("-inf"), 0.0, b_m)
    b_s = tl.sum(tl.exp(logits - safe[None, :]), 0)
    p = partial + i_q * 2
    tl.store(p, b_m, mask=m_q)
    tl.store(p + 1, b_s, mask=m_q)


ASM_FLOAT8 = tl.constexpr("""{
    .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 $0, a, 0x7fff7fff;
    and.b32 $1, b, 0x7fff7fff;
    shr.u32 $0, $0, 1;
    shr.u32 $1, $1, 1;
    lop3.b32 $0, a, 0x80008000, $0, 0xea;
    lop3.b32 $1, b, 0x80008000, $1, 0xea;
}""")


@triton.jit
def _open(x, FAST: tl.constexpr, ASM: tl.constexpr):
    """What an index stores as FAST; bytes are 8-bit floats, and become 2**-8 of their value.

    Exponents of float16 begin 8 earlier: moving the bits to their places does it.
    """
    if x.dtype == tl.uint8:
        if ASM:
            half = tl.inline_asm_elementwise(
                asm=ASM_FLOAT8, constraints="=r,=r,r", args=[x], dtype=tl.float16, is_pure=True,
                pack=4,
            )  # fmt: skip
        else:
            bits = x.to(tl.int16)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return half.to(FAST)
    else:
        return x.to(FAST)


@triton.jit
def _highest(low, step, FAST: tl.constexpr, ASM: tl.constexpr):
    """low + 3 * step; with ASM two at a time, without turning them into float32."""
    if ASM:
        if low.dtype == tl.float16:
            TEXT: tl.constexpr = "{.reg .b32 c; mov.b32 c, 0x42004200; fma.rn.f16x2 $0, $2, c, $1;}"
        else:
            TEXT: tl.constexpr = (
                "{.reg .b32 c; mov.b32 c, 0x40404040; fma.rn.bf16x2 $0, $2, c, $1;}"
            )
        return tl.inline_asm_elementwise(
            asm=TEXT, constraints="=r,r,r", args=[low, step], dtype=low.dtype, is_pure=True, pack=2
        )
    else:
        return (low.to(tl.float32) + 3.0 * step.to(tl.float32)).to(FAST)


@triton.jit
def bounds_kernel(
    query, low, high, committed, logits, partial, scaling,
    H, N, C, Q, group_tokens,
    D: tl.constexpr, DP: tl.constexpr, QN: tl.constexpr, BN: tl.constexpr,
    STEP: tl.constexpr, FAST: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Largest logit between channel bounds, for the first C groups of keys.

    `high` is the maximum, or with STEP the quantisation step: maximum = low + 3 * step.
    Arrays: query `[BH, Q, D]`, low and high `[BH, N + 1, D]`, logits `[BH, Q, C]`, partial
    `[BH, programs, Q, 2]`. FAST is the type of the products. `scaling` makes up for what `_open`
    takes from bytes.
    """
    bh = tl.program_id(0).to(tl.int64)
    i_n = tl.program_id(1) * BN + tl.arange(0, BN)
    i_q, i_d = tl.arange(0, QN), tl.arange(0, DP)
    m_q, m_d = i_q < Q, i_d < D
    groups = tl.load(committed + bh // H) // group_tokens
    live = i_n < groups
    b_q = tl.load(
        query + (bh * Q + i_q)[None, :] * D + i_d[:, None],
        mask=m_q[None, :] & m_d[:, None], other=0.0,
    )  # fmt: skip
    offset = (bh * (N + 1) + i_n)[:, None] * D + i_d[None, :]
    mask = live[:, None] & m_d[None, :]
    b_low = _open(tl.load(low + offset, mask=mask, other=0), FAST, ASM)
    b_high = _open(tl.load(high + offset, mask=mask, other=0), FAST, ASM)
    if STEP:
        b_high = _highest(b_low, b_high, FAST, ASM)
    b_q = b_q.to(tl.float32)
    HALF: tl.constexpr = ASM and b_low.dtype == tl.float16
    b_up = _half(tl.maximum(b_q, 0.0), FAST, HALF)
    b_down = _half(tl.minimum(b_q, 0.0), FAST, HALF)
    b_l = tl.dot(b_high, b_up, input_precision=PRECISION)
    b_l = tl.dot(b_low, b_down, b_l, input_precision=PRECISION) * scaling
    tl.store(logits + (bh * Q + i_q)[None, :] * C + i_n[:, None], b_l,
             mask=m_q[None, :] & (i_n < C)[:, None])  # fmt: skip
    slot = bh * tl.num_programs(1) + tl.program_id(1)
    b_l = tl.where(live[:, None], b_l, float("-inf"))
    _write_partial(partial + slot * Q * 2, i_q, m_q, b_l)


@triton.jit
def _tail_partial(
    query, ring_k, lengths, rows_end, partial, slot, bh, done, scaling,
    H, Q, T, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, QP: tl.constexpr,
    RN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Exact share of the tail: running maximum and sum of exp over its places."""
    i_q, i_d = tl.arange(0, QP), tl.arange(0, DP)
    m_q, m_d = i_q < Q, i_d < D
    b_q = tl.load(query + (bh * Q + i_q)[:, None] * D + i_d[None, :],
                  mask=m_q[:, None] & m_d[None, :], other=0.0)  # fmt: skip
    last = tl.load(lengths + bh // H) - 1
    end = tl.load(rows_end + (bh // H) * T + i_q % T, mask=m_q, other=-1)
    b_m = tl.full((QP,), float("-inf"), tl.float32)
    b_s = tl.zeros((QP,), tl.float32)
    for first in range(0, R, RN):
        i_r = first + tl.arange(0, RN)
        p_r = last - ((last - i_r) % R + R) % R
        m_r = (i_r < R) & (p_r >= done)
        b_k = tl.load(ring_k + (bh * (R + 1) + i_r)[None, :] * D + i_d[:, None],
                      mask=m_r[None, :] & m_d[:, None], other=0.0)  # fmt: skip
        b_l = tl.dot(b_q, b_k, input_precision=PRECISION) * scaling
        b_l = tl.where(m_r[None, :] & (p_r[None, :] <= end[:, None]), b_l, float("-inf"))
        m_new = tl.maximum(b_m, tl.max(b_l, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        b_s = b_s * tl.exp(b_m - safe) + tl.sum(tl.exp(b_l - safe[:, None]), 1)
        b_m = m_new
    p = partial + (slot * Q + i_q) * 2
    tl.store(p, b_m, mask=m_q)
    tl.store(p + 1, b_s, mask=m_q)


def _unpack_asm(part):
    return f"""{{
        .reg .b32 t;
        and.b32 t, $2, {0x03030303 << (2 * part)};
        prmt.b32 $0, t, 0, 0x4140;
        prmt.b32 $1, t, 0, 0x4342;
    }}"""


ASM_0, ASM_1, ASM_2, ASM_3 = (tl.constexpr(_unpack_asm(part)) for part in range(4))


@triton.jit
def _unpack(codes, PART: tl.constexpr, TEXT: tl.constexpr, FAST: tl.constexpr, ASM: tl.constexpr):
    """The 2-bit code PART of each byte as FAST; with ASM as float16, times 2**(2 * PART - 24).

    Converting integers to floats is slow, and needless: a byte with two bits set at 2 * PART *is*
    a subnormal float16, which tensor cores multiply exactly. Four bytes become four numbers in
    three instructions. The other factor takes the powers of two back out, see `_times_step`.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            asm=TEXT, constraints="=r,=r,r", args=[codes], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return ((codes >> (2 * PART)) & 3).to(FAST)


@triton.jit
def _half(x, FAST: tl.constexpr, ASM: tl.constexpr):
    """float32 as FAST; with ASM what float16 cannot hold becomes its largest number."""
    if ASM:
        return tl.inline_asm_elementwise(
            asm="cvt.rn.satfinite.f16.f32 $0, $1;", constraints="=h,r", args=[x],
            dtype=tl.float16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return x.to(FAST)


@triton.jit
def _query_part(base, mask, scaling, PART: tl.constexpr, ASM: tl.constexpr):
    """A quarter of the channels of the scaled query `[QN, DQ]`; with ASM times 2**(8 - 2 * PART).

    So every product with an unpacked code is 2**-16 of what it stands for.
    """
    b_q = tl.load(base, mask=mask, other=0.0).to(tl.float32) * scaling
    if ASM:
        b_q *= 2.0 ** (8 - 2 * PART)
    return b_q


@triton.jit
def _times_step(
    b_q, step, place, mask, SPREAD: tl.constexpr, FAST: tl.constexpr, ASM: tl.constexpr
):
    """Query `[QN, DQ]` times the steps of each group: `[GROUPS, DQ, QN]`; with SPREAD 2 * QN.

    SPREAD puts a column of zeros behind each query's.
    """
    b_s = tl.load(step + place, mask=mask, other=0.0).to(tl.float32)
    b_s = _half(b_q[None] * b_s[:, None, :], FAST, ASM)
    if SPREAD:
        b_s = tl.permute(tl.join(b_s, tl.zeros_like(b_s)), (0, 2, 1, 3))
        b_s = tl.reshape(b_s, (b_s.shape[0], b_s.shape[1], 2 * b_s.shape[2]))
    else:
        b_s = tl.permute(b_s, (0, 2, 1))
    return b_s


@triton.jit
def _log(x, ASM: tl.constexpr):
    """Natural logarithm of float32; with ASM the device's own, in one instruction."""
    if ASM:
        return 0.6931471805599453 * tl.inline_asm_elementwise(
            asm="lg2.approx.f32 $0, $1;", constraints="=r,r", args=[x],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.log(x)


@triton.jit
def _groups_partial(
    query, codes, lowest, step, chosen, logits, partial, slot, bh, done, scaling,
    N, M, Q,
    G_TOKENS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DQ: tl.constexpr,
    DP: tl.constexpr, QN: tl.constexpr, SPREAD: tl.constexpr, GROUPS: tl.constexpr,
    FAST: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two-bit logits of GROUPS chosen groups, summed over each block.

    All groups at once, as one batched product: a loop over them waits at each for the last.
    Tokens are the rows of the products and queries the columns, of which there must be 8. Threads
    hold pairs of columns: with SPREAD queries are the even ones, and threads skip the odd.
    """
    PER: tl.constexpr = G_TOKENS // BLOCK
    PART: tl.constexpr = D // 4
    i_q, i_c, i_t = tl.arange(0, QN), tl.arange(0, DQ), tl.arange(0, G_TOKENS)
    m_q, m_c = i_q < Q, i_c < PART
    i_m = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    group = tl.load(chosen + bh * M + i_m, mask=i_m < M, other=N).to(tl.int64)
    live = (i_m < M) & (group * G_TOKENS < done)
    row = bh * (N + 1) + group
    b_code = tl.load(
        codes + (row[:, None, None] * G_TOKENS + i_t[None, :, None]) * PART + i_c[None, None, :],
        mask=m_c[None, None, :] & live[:, None, None], other=0,
    )  # fmt: skip
    base = query + (bh * Q + i_q)[:, None] * D + i_c[None, :]
    m_qc = m_q[:, None] & m_c[None, :]
    b_q0 = _query_part(base, m_qc, scaling, 0, ASM)
    b_q1 = _query_part(base + PART, m_qc, scaling, 1, ASM)
    b_q2 = _query_part(base + 2 * PART, m_qc, scaling, 2, ASM)
    b_q3 = _query_part(base + 3 * PART, m_qc, scaling, 3, ASM)
    place, m_l = row[:, None] * D + i_c[None, :], m_c[None, :] & live[:, None]
    s0 = _times_step(b_q0, step, place, m_l, SPREAD, FAST, ASM)
    s1 = _times_step(b_q1, step, place + PART, m_l, SPREAD, FAST, ASM)
    s2 = _times_step(b_q2, step, place + 2 * PART, m_l, SPREAD, FAST, ASM)
    s3 = _times_step(b_q3, step, place + 3 * PART, m_l, SPREAD, FAST, ASM)
    b_l = tl.dot(_unpack(b_code, 0, ASM_0, FAST, ASM), s0, input_precision=PRECISION)
    b_l = tl.dot(_unpack(b_code, 1, ASM_1, FAST, ASM), s1, b_l, input_precision=PRECISION)
    b_l = tl.dot(_unpack(b_code, 2, ASM_2, FAST, ASM), s2, b_l, input_precision=PRECISION)
    b_l = tl.dot(_unpack(b_code, 3, ASM_3, FAST, ASM), s3, b_l, input_precision=PRECISION)
    if SPREAD:
        b_l, _ = tl.split(tl.reshape(b_l, (GROUPS, G_TOKENS, QN, 2)))
    if ASM:
        b_l *= 65536.0
    i_d = tl.arange(0, DP)
    b_low = tl.load(lowest + row[:, None] * D + i_d[None, :],
                    mask=live[:, None] & (i_d < D)[None, :], other=0.0)  # fmt: skip
    # The same columns as above.
    ONCE: tl.constexpr = 2 if SPREAD else 1
    i_z = tl.arange(0, QN * ONCE)
    b_q = tl.load(query + (bh * Q + i_z // ONCE)[None, :] * D + i_d[:, None],
                  mask=(i_z // ONCE < Q)[None, :] & (i_d < D)[:, None], other=0.0)  # fmt: skip
    b_z = tl.dot(b_low, b_q.to(b_low.dtype), input_precision=PRECISION) * scaling
    if SPREAD:
        b_z, _ = tl.split(tl.reshape(b_z, (GROUPS, QN, 2)))
    b_b = tl.reshape(b_l + b_z[:, None, :], (GROUPS, PER, BLOCK, QN))
    m_b = tl.max(b_b, 2)
    b_b = m_b + _log(tl.sum(tl.exp(b_b - m_b[:, :, None, :]), 2), ASM)
    i_b = i_m[:, None] * PER + tl.arange(0, PER)[None, :]
    tl.store(logits + (bh * Q + i_q)[None, None, :] * (M * PER) + i_b[:, :, None], b_b,
             mask=m_q[None, None, :] & (i_m < M)[:, None, None])  # fmt: skip
    b_b = tl.reshape(tl.where(live[:, None, None], b_b, float("-inf")), (GROUPS * PER, QN))
    _write_partial(partial + slot * Q * 2, i_q, m_q, b_b)


@triton.jit
def keys2bit_kernel(
    query, codes, lowest, step, chosen, committed, logits, partial, scaling,
    ring_k, lengths, rows_end,
    H, N, M, Q, T,
    R: tl.constexpr, G_TOKENS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DQ: tl.constexpr,
    DP: tl.constexpr, QP: tl.constexpr, QN: tl.constexpr, SPREAD: tl.constexpr,
    GROUPS: tl.constexpr,
    FAST: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr,
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
            H, Q, T, R, D, DP, QP, 32, PRECISION,
        )  # fmt: skip
    else:
        _groups_partial(
            query, codes, lowest, step, chosen, logits, partial, slot, bh, done, scaling,
            N, M, Q, G_TOKENS, BLOCK, D, DQ, DP, QN, SPREAD, GROUPS, FAST, ASM, PRECISION,
        )  # fmt: skip
