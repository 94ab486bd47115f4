"""Moves of tokens and blocks: into the tail, from the tail to store and pool, from the store.

The store lies in host memory that the device can address. `slabs` `[n]` int64 holds the address of
each slab; slab i covers blocks i * slab .. (i + 1) * slab - 1 as `[BH, slab + 1, ROW]`. The size
of a slab is no constant of a kernel: it grows with a short context.
"""

import triton
import triton.language as tl

from .search import eviction_order


@triton.jit
def advance_kernel(
    lengths, committed, clock, counts, valid, positions, moved, B, recent,
    T: tl.constexpr, GROUP: tl.constexpr, FLUSHES: tl.constexpr, BP: tl.constexpr,
    HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Open a step, one program: which groups leave the tail, where the new rows go.

    Arrays: lengths and committed `[B]` int64, updated; clock `[1]`, updated; counts `[2]`, zeroed;
    valid `[B, T]` bool; positions `[B, T]` int64 and moved `[B]` int32, written. A row of padding
    has position -1 and sees nothing.
    """
    i_b = tl.arange(0, BP)
    m_b = i_b < B
    b_len = tl.load(lengths + i_b, mask=m_b, other=0)
    b_done = tl.load(committed + i_b, mask=m_b, other=0)
    full = tl.maximum(b_len - b_done - recent, 0) // GROUP
    full = tl.minimum(full, FLUSHES)
    tl.store(moved + i_b, full.to(tl.int32), mask=m_b)
    tl.store(committed + i_b, b_done + full * GROUP, mask=m_b)
    for t in range(T):
        if HAS_VALID:
            real = tl.load(valid + i_b * T + t, mask=m_b, other=0).to(tl.int64)
            b_len += real
            tl.store(positions + i_b * T + t, tl.where(real != 0, b_len - 1, -1), mask=m_b)
        else:
            b_len += 1
            tl.store(positions + i_b * T + t, b_len - 1, mask=m_b)
    tl.store(lengths + i_b, b_len, mask=m_b)
    tl.store(clock, tl.load(clock) + 1)
    tl.store(counts + tl.arange(0, 2), tl.zeros((2,), tl.int32))


@triton.jit
def _block_address(slabs, block, bh, slab, ROW: tl.constexpr, like):
    base = tl.load(slabs + block // slab).to(like.dtype)
    return base + (bh * (slab + 1) + block % slab) * ROW


@triton.jit
def _admit(
    bh, block, slot_of_block, block_of_slot, last_selected, now_time, N, S, SP: tl.constexpr
):
    """Give one block the slot that is evicted first; returns the slot."""
    i_s = tl.arange(0, SP)
    age = tl.load(last_selected + bh * (S + 1) + i_s, mask=i_s < S, other=0)
    owner = tl.load(block_of_slot + bh * (S + 1) + i_s, mask=i_s < S, other=0)
    order = eviction_order(owner, age, now_time).to(tl.int64)
    slot = tl.argmax(tl.where(i_s < S, order, -1), 0, tie_break_left=True)
    old = tl.load(block_of_slot + bh * (S + 1) + slot)
    if old >= 0:
        tl.store(slot_of_block + bh * (N + 1) + old, -1)
    tl.store(slot_of_block + bh * (N + 1) + block, slot)
    tl.store(block_of_slot + bh * (S + 1) + slot, block.to(tl.int32))
    tl.store(last_selected + bh * (S + 1) + slot, now_time)
    tl.debug_barrier()
    return slot


@triton.jit
def _float8(x, UP: tl.constexpr):
    """Bytes of 8-bit floats that bound float32 `x`: see `encodings.to_float8`."""
    bits = x.to(tl.int32, bitcast=True)
    negative, size = bits < 0, bits & 0x7FFFFFFF
    away = negative != UP
    short = (tl.where(away, size + 0xFFFFF, size) >> 20) - 960
    least = tl.where(away & (size > 0), 8, 0)
    short = tl.where(short < 8, least, tl.minimum(short, 126))
    return (short | tl.where(negative, 128, 0)).to(tl.uint8)


@triton.jit
def append_kernel(
    key, value, valid, positions, moved, committed, clock,
    ring_k, ring_v, pool_k, pool_v, slot_of_block, block_of_slot, last_selected, slabs,
    index_a, index_b, index_c,
    H, N, S, R, slab,
    T: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, DQ: tl.constexpr, SP: tl.constexpr,
    KIND: tl.constexpr, FLUSHES: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Move full groups out of the tail, then write the new rows into it. One program per BH.

    KIND 0 leaves the index alone, 1 writes bounds (index_a low, index_b high `[BH, N + 1, DK]`), 2
    writes two-bit keys (index_a codes `[BH, N / PER + 1, GROUP, DK / 4]`, index_b lowest and
    index_c step `[BH, N / PER + 1, DK]`).
    """
    bh = tl.program_id(0).to(tl.int64)
    b = bh // H
    PER: tl.constexpr = GROUP // BLOCK
    ROW: tl.constexpr = BLOCK * (DK + DV)
    groups = tl.load(moved + b)
    start = tl.load(committed + b) - groups * GROUP
    now_time = tl.load(clock) - 1
    for i in tl.static_range(FLUSHES):
        if i < groups:
            first = start + i * GROUP
            for j in tl.static_range(PER):
                block = first // BLOCK + j
                i_t = tl.arange(0, BLOCK)
                i_k, i_v = tl.arange(0, DKP), tl.arange(0, DVP)
                source = bh * (R + 1) + (first + j * BLOCK) % R + i_t
                m_k, m_v = (i_k < DK)[None, :], (i_v < DV)[None, :]
                b_k = tl.load(ring_k + source[:, None] * DK + i_k[None, :], mask=m_k, other=0.0)
                b_v = tl.load(ring_v + source[:, None] * DV + i_v[None, :], mask=m_v, other=0.0)
                host = _block_address(slabs, block, bh, slab, ROW, ring_k)
                tl.store(host + i_t[:, None] * DK + i_k[None, :], b_k, mask=m_k)
                tl.store(host + BLOCK * DK + i_t[:, None] * DV + i_v[None, :], b_v, mask=m_v)
                slot = _admit(
                    bh, block, slot_of_block, block_of_slot, last_selected, now_time, N, S, SP
                )
                target = (bh * (S + 1) + slot) * BLOCK + i_t
                tl.store(pool_k + target[:, None] * DK + i_k[None, :], b_k, mask=m_k)
                tl.store(pool_v + target[:, None] * DV + i_v[None, :], b_v, mask=m_v)
                if KIND == 1:
                    entry = (bh * (N + 1) + block) * DK + i_k
                    low, high = tl.min(b_k, 0), tl.max(b_k, 0)
                    if index_a.dtype.element_ty == tl.uint8:
                        low = _float8(low.to(tl.float32), False)
                        high = _float8(high.to(tl.float32), True)
                    tl.store(index_a + entry, low, mask=i_k < DK)
                    tl.store(index_b + entry, high, mask=i_k < DK)
            if KIND == 2:
                i_t, i_c = tl.arange(0, GROUP), tl.arange(0, DQ)
                m_c = i_c < DK // 4
                row = bh * (N // PER + 1) + first // GROUP
                source = bh * (R + 1) + first % R + i_t
                code = tl.zeros((GROUP, DQ), tl.uint8)
                for part in tl.static_range(4):
                    channel = part * (DK // 4) + i_c
                    b_k = tl.load(
                        ring_k + source[:, None] * DK + channel[None, :],
                        mask=m_c[None, :],
                        other=0.0,
                    )
                    low = tl.min(b_k, 0)
                    range_k = tl.max(b_k, 0).to(tl.float32) - low.to(tl.float32)
                    # Not low.dtype: reductions of 16-bit numbers come back in float32.
                    step = (range_k * 0.3333333333333333).to(b_k.dtype)
                    tl.store(index_b + row * DK + channel, low, mask=m_c)
                    tl.store(index_c + row * DK + channel, step, mask=m_c)
                    scale = tl.where(step > 0, step.to(tl.float32), 1.0)
                    offset = b_k.to(tl.float32) - low.to(tl.float32)[None, :]
                    # Rounded division: keys on a coarse grid often fall between two codes.
                    level = tl.div_rn(offset, tl.broadcast_to(scale[None, :], (GROUP, DQ)))
                    level = tl.minimum(tl.maximum(tl.floor(level + 0.5), 0.0), 3.0)
                    code = code | (level.to(tl.uint8) << (2 * part))
                tl.store(
                    index_a + (row * GROUP + i_t)[:, None] * (DK // 4) + i_c[None, :],
                    code, mask=m_c[None, :],
                )  # fmt: skip
    # A ring place written below may be one that a group above was read from.
    tl.debug_barrier()
    i_k, i_v = tl.arange(0, DKP), tl.arange(0, DVP)
    for t in range(T):
        place = tl.load(positions + b * T + t) % R
        keep = True
        if HAS_VALID:
            keep = tl.load(valid + b * T + t) != 0
        m_k, m_v = (i_k < DK) & keep, (i_v < DV) & keep
        b_k = tl.load(key + (bh * T + t) * DK + i_k, mask=m_k, other=0.0)
        b_v = tl.load(value + (bh * T + t) * DV + i_v, mask=m_v, other=0.0)
        tl.store(ring_k + (bh * (R + 1) + place) * DK + i_k, b_k, mask=m_k)
        tl.store(ring_v + (bh * (R + 1) + place) * DV + i_v, b_v, mask=m_v)


@triton.jit
def gather_kernel(
    entries, count, slabs, pool_k, pool_v, S, slab,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Copy listed blocks from the store into their slots; ends at once where the list is empty.

    Arrays: entries `[n, 3]` int32 of (bh, block, slot), count `[1]` int32. KEYS and VALUES are the
    elements of a block's keys and values. Few programs with wide rows: the link is filled by bytes
    in flight, and the compute beside it keeps its multiprocessors.
    """
    total = tl.load(count)
    i = tl.program_id(0)
    while i < total:
        bh = tl.load(entries + i * 3).to(tl.int64)
        block = tl.load(entries + i * 3 + 1)
        slot = tl.load(entries + i * 3 + 2).to(tl.int64)
        host = _block_address(slabs, block, bh, slab, KEYS + VALUES, pool_k)
        i_k, i_v = tl.arange(0, KP), tl.arange(0, VP)
        b_k = tl.load(host + i_k, mask=i_k < KEYS)
        b_v = tl.load(host + KEYS + i_v, mask=i_v < VALUES)
        tl.store(pool_k + (bh * (S + 1) + slot) * KEYS + i_k, b_k, mask=i_k < KEYS)
        tl.store(pool_v + (bh * (S + 1) + slot) * VALUES + i_v, b_v, mask=i_v < VALUES)
        i += tl.num_programs(0)
