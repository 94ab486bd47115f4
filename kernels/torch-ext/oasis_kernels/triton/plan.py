"""One program per (sequence, KV head): reduce scores, choose, compare, evict, list fetches."""

import triton
import triton.language as tl

from .search import (
    descending_rank,
    eviction_order,
    ordered_key,
    share_key,
    top_mask,
    top_places,
    truncate_share,
)


@triton.jit
def rows_logsumexp(partial, bh, programs, Q: tl.constexpr, QP: tl.constexpr, PP: tl.constexpr):
    """Log-sum-exp of each query row, `[QP]`, out of partial (maximum, sum) pairs."""
    i_q, i_p = tl.arange(0, QP), tl.arange(0, PP)
    p = partial + ((bh * programs + i_p)[None, :] * Q + i_q[:, None]) * 2
    m_p = (i_p < programs)[None, :] & (i_q < Q)[:, None]
    b_m = tl.load(p, mask=m_p, other=float("-inf"))
    b_s = tl.load(p + 1, mask=m_p, other=0.0)
    top = tl.max(b_m, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return safe + tl.log(tl.sum(b_s * tl.exp(b_m - safe[:, None]), 1))


@triton.jit
def reduced_score(
    logits, partial, rows_end, bh, b, i_c, N, programs, Q: tl.constexpr, T: tl.constexpr,
    PP: tl.constexpr, CP: tl.constexpr, REDUCE_MAX: tl.constexpr,
):  # fmt: skip
    """Score of each candidate, and how many rows had a say.

    The mean of the rows' softmax, or the maximum of their logits; rows of padding are left out.
    """
    QP: tl.constexpr = triton.next_power_of_2(Q)
    i_q = tl.arange(0, QP)
    b_score = tl.zeros((CP,), tl.float32)
    if REDUCE_MAX:
        b_score += float("-inf")
    else:
        total = rows_logsumexp(partial, bh, programs, Q, QP, PP)
    voices = 0
    for q in tl.range(0, Q, loop_unroll_factor=4):
        if tl.load(rows_end + b * T + q % T) >= 0:
            voices += 1
            b_l = tl.load(logits + (bh * Q + q) * N + i_c, mask=i_c < N, other=float("-inf"))
            if REDUCE_MAX:
                b_score = tl.maximum(b_score, b_l)
            else:
                b_score += tl.exp(b_l - tl.sum(tl.where(i_q == q, total, 0.0), 0))
    if not REDUCE_MAX:
        b_score = truncate_share(b_score / tl.maximum(voices, 1))
    return b_score, voices


@triton.jit
def candidates_kernel(
    logits, partial, rows_end, committed, chosen, H, N, M, programs, group_tokens,
    Q: tl.constexpr, T: tl.constexpr, PP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """The M groups with the largest bounds, in order; unfilled places name group N."""
    bh = tl.program_id(0).to(tl.int64)
    i_c = tl.arange(0, CP)
    b = bh // H
    groups = tl.load(committed + b) // group_tokens
    b_score, _ = reduced_score(
        logits, partial, rows_end, bh, b, i_c, N, programs, Q, T, PP, CP, False
    )
    key = tl.where(i_c < groups, share_key(b_score), tl.zeros((CP,), tl.uint32))
    keep, place, found = top_places(key, M, 12)
    tl.store(chosen + bh * M + place, i_c, mask=keep)
    unfilled = (i_c >= found) & (i_c < M)
    tl.store(chosen + bh * M + i_c, tl.zeros((CP,), tl.int32) + N, mask=unfilled)


@triton.jit
def _room(count, total):
    """Where `total` more entries of a list begin; asked for early, as the answer takes a while."""
    first = 0
    if total > 0:
        first = tl.atomic_add(count, total)
    return first


@triton.jit
def _list(entries, first, mask, place, bh, ids, slots, CP: tl.constexpr):
    """Write the fetches of `mask` to a list from `first` on; `place` counts them from one."""
    entry = entries + (first + place - 1) * 3
    tl.store(entry, tl.zeros((CP,), tl.int32) + bh.to(tl.int32), mask=mask)
    tl.store(entry + 1, ids, mask=mask)
    tl.store(entry + 2, slots, mask=mask)


@triton.jit
def plan_kernel(
    logits, partial, rows_end, chosen, committed,
    slot_of_block, block_of_slot, last_selected, clock,
    attended, now_list, now_count, later_list, later_count, victims, counters,
    H, N, C, programs, S, K, sinks, cap, now_above,
    Q: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
    CANDIDATES: tl.constexpr, PP: tl.constexpr, CP: tl.constexpr, SP: tl.constexpr,
    KP: tl.constexpr,
    REDUCE_MAX: tl.constexpr, FILL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Choose K of C candidate blocks, plan the moves, update the tables.

    Arrays: logits `[BH, Q, C]`; chosen `[BH, C / PER]` groups of the candidates; slot_of_block
    `[BH, N + 1]`, block_of_slot and last_selected `[BH, S + 1]`; attended `[BH, K]` slots in block
    order, -1 after the last; now_list and later_list `[BH * K, 3]` of (bh, block, slot); victims
    `[BH, 3, SP]` scratch; counters `[7]`: wanted, hits,
    now, later, turnover, filled, steps.
    """
    bh = tl.program_id(0).to(tl.int64)
    i_c = tl.arange(0, CP)
    blocks = tl.load(committed + bh // H) // BLOCK
    if CANDIDATES:
        group = tl.load(chosen + bh * (C // PER) + i_c // PER, mask=i_c < C, other=N)
        ids = group * PER + i_c % PER
    else:
        ids = i_c
    b_score, voices = reduced_score(
        logits, partial, rows_end, bh, bh // H, i_c, C, programs, Q, T, PP, CP, REDUCE_MAX
    )
    b_score = tl.where(ids < sinks, float("inf"), b_score)
    if FILL:
        # A sequence that has only padding in this step takes any block, the newest first.
        b_score = tl.where(voices > 0, b_score, 0.0)
        voices = 1
    live = (i_c < C) & (ids < blocks) & (b_score > float("-inf")) & (voices > 0)
    BITS: tl.constexpr = 32 if REDUCE_MAX else 12
    key = ordered_key(b_score) if REDUCE_MAX else share_key(b_score)
    key = tl.where(live, key, tl.zeros((CP,), tl.uint32))
    wanted = top_mask(key, K, BITS)

    now_time = tl.load(clock)
    slot = tl.load(slot_of_block + bh * (N + 1) + ids, mask=wanted, other=-1)
    hit = wanted & (slot >= 0)
    ages = last_selected + bh * (S + 1)
    before = tl.load(ages + slot, mask=hit, other=-2)
    tl.store(ages + slot, tl.zeros((CP,), tl.int32) + now_time, mask=hit)
    miss = wanted & (slot < 0)
    now = miss & (b_score > now_above)
    later = miss & (b_score <= now_above)
    if cap > 0:
        if tl.sum(later.to(tl.int32)) > cap:
            rest = tl.where(later, key, tl.zeros((CP,), tl.uint32))
            later = top_mask(rest, cap, BITS)
    else:
        later = later & (cap > 0)
    take = now | later
    # One scan for all that is counted, none of it more than K: hits, fetches now, fetches later.
    ONE: tl.constexpr = 10 if KP < 1024 else 20
    KIND: tl.constexpr = tl.int32 if KP < 1024 else tl.int64
    FIELD: tl.constexpr = (1 << ONE) - 1
    packed = hit.to(KIND) + (now.to(KIND) << ONE) + (later.to(KIND) << (2 * ONE))
    behind = tl.cumsum(packed, 0)
    totals = tl.sum(packed, 0)
    i_hit, i_now = (behind & FIELD).to(tl.int32), ((behind >> ONE) & FIELD).to(tl.int32)
    i_later = (behind >> (2 * ONE)).to(tl.int32)
    n_hit, n_now = (totals & FIELD).to(tl.int32), ((totals >> ONE) & FIELD).to(tl.int32)
    n_later = (totals >> (2 * ONE)).to(tl.int32)
    given = tl.zeros((CP,), tl.int32) - 1
    if n_now + n_later > 0:
        first_now, first_later = _room(now_count, n_now), _room(later_count, n_later)
        # The ages written above are read back by other threads of this program.
        tl.debug_barrier()
        i_s = tl.arange(0, SP)
        owners = block_of_slot + bh * (S + 1)
        age = tl.load(ages + i_s, mask=i_s < S, other=0)
        owner = tl.load(owners + i_s, mask=i_s < S, other=0)
        order = tl.where(i_s < S, eviction_order(owner, age, now_time), tl.zeros((SP,), tl.uint32))
        turns = victims + bh * 3 * SP
        rank = descending_rank(order, turns, SP, 32 if SP > 32 else SP)
        first_out = rank < n_now + n_later
        tl.store(turns + SP + rank, i_s, mask=first_out)
        tl.store(turns + 2 * SP + rank, owner, mask=first_out)
        tl.debug_barrier()
        turn = turns + SP + i_now + i_later - 1
        given = tl.load(turn, mask=take, other=-1)
        old = tl.load(turn + SP, mask=take, other=-1)
        homes = slot_of_block + bh * (N + 1)
        tl.store(homes + old, tl.zeros((CP,), tl.int32) - 1, mask=take & (old >= 0))
        tl.store(homes + ids, given, mask=take)
        tl.store(owners + given, ids, mask=take)
        tl.store(ages + given, tl.zeros((CP,), tl.int32) + now_time, mask=take)
        _list(now_list, first_now, now, i_now, bh, ids, given, CP)
        _list(later_list, first_later, later, i_later, bh, ids, given, CP)
    if FILL:
        tl.atomic_add(counters + 5, n_now.to(tl.int64))
    elif AHEAD:
        tl.atomic_add(counters + 3, n_later.to(tl.int64))
    else:
        use = hit | now
        used = n_hit + n_now
        tl.store(attended + bh * K + i_hit + i_now - 1, tl.where(hit, slot, given), mask=use)
        i_k = tl.arange(0, KP)
        unused = (i_k >= used) & (i_k < K)
        tl.store(attended + bh * K + i_k, tl.zeros((KP,), tl.int32) - 1, mask=unused)
        stayed = hit & (before == now_time - 1)
        both = tl.sum(wanted.to(tl.int64) + (stayed.to(tl.int64) << 32), 0)
        n_wanted, n_stayed = both & 0xFFFFFFFF, both >> 32
        tl.atomic_add(counters + 6, tl.where(bh == 0, 1, 0).to(tl.int64))
        tl.atomic_add(counters, n_wanted)
        tl.atomic_add(counters + 1, n_hit.to(tl.int64))
        tl.atomic_add(counters + 2, n_now.to(tl.int64))
        tl.atomic_add(counters + 3, n_later.to(tl.int64))
        tl.atomic_add(counters + 4, n_wanted - n_stayed)
