"""Launches of a step on plain tensors: open, append, plan, gather, attention.

Each function states what it reads and writes. Tensors are contiguous, and are compared with each
other before a launch (`fit`). B sequences, H KV heads, BH = B * H, Q = GQA group x rows, N blocks,
S slots, R places of the tail; tables end in a spill entry, as in the reference.
"""

import torch
import triton
from torch import Tensor

from ..api import Scores
from . import attention, move, plan
from .buffers import Plan
from .common import pow2, precision, tuned
from .fit import (
    FLAG,
    INT32,
    INT64,
    check,
    check_scores,
    index_of,
    pool_of,
    tables_of,
    unmet,
)  # fmt: skip


def advance(
    lengths: Tensor,
    committed: Tensor,
    clock: Tensor,
    counts: Tensor,
    valid: Tensor | None,
    positions: Tensor,
    moved: Tensor,
    recent: int,
    group: int,
    flushes: int,
) -> None:
    """Open a step: see `move.advance_kernel`. valid `[B, T]` bool or None; positions `[B, T]`."""
    batch, rows = positions.shape
    check(
        "advance", positions.device,
        ("positions", positions, (batch, rows), INT64), ("lengths", lengths, (batch,), INT64),
        ("committed", committed, (batch,), INT64), ("moved", moved, (batch,), INT32),
        ("clock", clock, (1,), INT32), ("counts", counts, (2,), INT32),
    )  # fmt: skip
    if valid is not None:
        check("advance", positions.device, ("valid", valid, (batch, rows), FLAG))
    move.advance_kernel[(1,)](
        lengths, committed, clock, counts, valid, positions, moved, batch, recent,
        T=rows, GROUP=group, FLUSHES=flushes, BP=pow2(batch), HAS_VALID=valid is not None,
        num_warps=1,
    )  # fmt: skip


def append(
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    positions: Tensor,
    moved: Tensor,
    committed: Tensor,
    clock: Tensor,
    ring: tuple[Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    slabs: Tensor,
    slab_blocks: int,
    index: tuple[Tensor, ...],
    kind: int,
    group: int,
    flushes: int,
) -> None:
    """Move full groups out of the tail and write the new rows: see `move.append_kernel`."""
    batch, heads, rows, k_dim = key.shape
    v_dim, block = value.shape[-1], pool[0].shape[3]
    slots = pool[0].shape[2] - 1
    places, dtype = ring[0].shape[2] - 1, key.dtype
    capacity, per_group = tables[0].shape[2] - 1, group // block
    check(
        "append", key.device,
        ("key", key, (batch, heads, rows, k_dim), dtype),
        ("value", value, (batch, heads, rows, v_dim), dtype),
        ("positions", positions, (batch, rows), INT64),
        ("moved", moved, (batch,), INT32), ("committed", committed, (batch,), INT64),
        ("ring of keys", ring[0], (batch, heads, places + 1, k_dim), dtype),
        ("ring of values", ring[1], (batch, heads, places + 1, v_dim), dtype),
        *pool_of(pool, (batch, heads, slots, block, k_dim, v_dim), dtype),
        *tables_of(tables, clock, (batch, heads, slots)),
        ("slabs", slabs, (-1,), INT64), *index_of(index, kind, key, capacity, group, block),
    )  # fmt: skip
    if valid is not None:
        check("append", key.device, ("valid", valid, (batch, rows), FLAG))
    if per_group * block != group or places % group:
        raise unmet("append", f"whole blocks of {block} in {group}, and these in {places} places")
    if capacity > slabs.shape[0] * slab_blocks:
        raise unmet("append", f"{capacity} blocks in {slabs.shape[0]} slabs of {slab_blocks}")
    arrays = (*index, key, key, key)[:3]
    move.append_kernel[(batch * heads,)](
        key, value, valid, positions, moved, committed, clock,
        *ring, *pool, *tables, slabs, *arrays,
        heads, tables[0].shape[2] - 1, slots, ring[0].shape[2] - 1, slab_blocks,
        T=rows, BLOCK=block, GROUP=group, DK=k_dim, DV=v_dim, DKP=pow2(k_dim), DVP=pow2(v_dim),
        DQ=pow2(k_dim // 4, 1), SP=pow2(slots),
        KIND=kind, FLUSHES=flushes, HAS_VALID=valid is not None, num_warps=4,
    )  # fmt: skip


def plan_step(
    scores: Scores,
    made: Plan,
    committed: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    clock: Tensor,
    counters: Tensor,
    heads: int,
    count: int,
    block: int,
    sinks: int,
    cap: int,
    now_above: float,
    fill: bool = False,
    ahead: bool = False,
) -> None:
    """Choose, compare, evict and list the fetches, in one kernel: see `plan.plan_kernel`."""
    pairs, rows, blocks = scores.logits.shape
    capacity, slots = tables[0].shape[2] - 1, tables[1].shape[2] - 1
    device, batch = scores.logits.device, tables[0].shape[0]
    check_scores("plan_step", scores, committed, batch, heads)
    check(
        "plan_step", device,
        *tables_of(tables, clock, (batch, heads, slots)),
        ("attended", made.attended, (pairs, count), INT32),
        ("list of fetches now", made.lists[0], (pairs * count, 3), INT32),
        ("list of fetches later", made.lists[1], (pairs * count, 3), INT32),
        ("counts", made.counts, (2,), INT32), ("counters", counters, (7,), INT64),
    )  # fmt: skip
    if blocks > capacity or count > slots:
        raise unmet(
            "plan_step", f"at most {capacity} blocks and {slots} slots, got {blocks} and {count}"
        )
    launch = tuned(device)
    victims = torch.empty(pairs, 3 * pow2(slots), dtype=INT32, device=device)
    size, programs = pow2(blocks), scores.partial.shape[1]
    chosen = scores.chosen if scores.chosen is not None else victims
    plan.plan_kernel[(pairs,)](
        scores.logits, scores.partial, scores.positions, chosen, committed, *tables, clock,
        made.attended, made.lists[0], made.counts, made.lists[1], made.counts[1:], victims,
        counters,
        heads, tables[0].shape[2] - 1, blocks, programs, slots, count, sinks, cap, now_above,
        Q=rows, T=scores.positions.shape[1], BLOCK=block, PER=scores.per_group,
        CANDIDATES=scores.chosen is not None, PP=pow2(programs, 1), CP=size, SP=pow2(slots),
        KP=pow2(count),
        REDUCE_MAX=scores.ready, FILL=fill, AHEAD=ahead,
        num_warps=launch.plan_warps if size <= 2048 else launch.plan_warps_wide,
    )  # fmt: skip


def gather(
    entries: Tensor, count: Tensor, slabs: Tensor, slab_blocks: int, pool: tuple[Tensor, Tensor]
) -> None:
    """Copy listed blocks from the store into their slots: see `move.gather_kernel`."""
    keys = pool[0].shape[3] * pool[0].shape[4]
    values = pool[1].shape[3] * pool[1].shape[4]
    batch, heads, room, block, k_dim = pool[0].shape
    sizes = (batch, heads, room - 1, block, k_dim, pool[1].shape[4])
    check(
        "gather", entries.device, *pool_of(pool, sizes, pool[0].dtype),
        ("entries", entries, (-1, 3), INT32), ("count", count, (-1,), INT32),
        ("slabs", slabs, (-1,), INT64),
    )  # fmt: skip
    if entries.shape[0] % (batch * heads):
        raise unmet("gather", f"entries for {batch} x {heads} heads, got {entries.shape[0]}")
    launch = tuned(entries.device)
    move.gather_kernel[(launch.gather_programs,)](
        entries, count, slabs, *pool, pool[0].shape[2] - 1, slab_blocks,
        KEYS=keys, VALUES=values, KP=pow2(keys), VP=pow2(values),
        num_warps=launch.gather_warps,
    )  # fmt: skip


def sparse_attention(
    query: Tensor,
    pool: tuple[Tensor, Tensor],
    attended: Tensor,
    ring: tuple[Tensor, Tensor],
    lengths: Tensor,
    committed: Tensor,
    positions: Tensor,
    scaling: float,
) -> Tensor:
    """Attention over chosen slots and the tail: query `[B, H, Q, D]` to `[B, H, Q, Dv]`."""
    batch, heads, rows, dim = query.shape
    block, v_dim, count = pool[0].shape[3], pool[1].shape[4], attended.shape[1]
    dtype, slots = query.dtype, pool[0].shape[2] - 1
    check(
        "sparse_attention", query.device,
        ("query", query, (batch, heads, rows, dim), dtype),
        *pool_of(pool, (batch, heads, slots, block, dim, v_dim), dtype),
        ("attended", attended, (batch * heads, -1), INT32),
        ("ring of keys", ring[0], (batch, heads, -1, dim), dtype),
        ("ring of values", ring[1], (batch, heads, ring[0].shape[2], v_dim), dtype),
        ("lengths", lengths, (batch,), INT64), ("committed", committed, (batch,), INT64),
        ("positions", positions, (batch, -1), INT64),
    )  # fmt: skip
    if rows % positions.shape[1]:
        raise unmet("sparse_attention", f"rows of {positions.shape[1]} tokens, got {rows}")
    launch = tuned(query.device)
    many = batch * heads >= launch.many_pairs
    split = launch.attention_many if many else launch.attention_few
    per_step = max(1, min(split.slots * 16 // block, pow2(count, 1)))
    while per_step * block < 16:
        per_step *= 2
    steps = max(1, triton.cdiv(count, per_step * split.programs))
    programs = triton.cdiv(count, per_step * steps) + 1
    shape = (batch * heads, programs, rows)
    out = query.new_empty(*shape, v_dim, dtype=torch.float32)
    peak, total = (query.new_empty(shape, dtype=torch.float32) for _ in range(2))
    attention.partial_attention_kernel[(batch * heads, programs)](
        query, *pool, attended, *ring, lengths, committed, positions, out, peak, total, scaling,
        heads, rows, positions.shape[1], count, pool[0].shape[2] - 1,
        R=ring[0].shape[2] - 1, BLOCK=block, DK=dim, DV=v_dim, DKP=pow2(dim), DVP=pow2(v_dim),
        QP=pow2(rows),
        SLOTS=per_step, STEPS=steps, RN=32, PRECISION=precision(query),
        num_warps=split.warps, maxnreg=split.registers,
    )  # fmt: skip
    result = query.new_empty(batch, heads, rows, v_dim)
    attention.merge_attention_kernel[(batch * heads, rows)](
        out, peak, total, result, rows, programs,
        DV=v_dim, DVP=pow2(v_dim), PP=pow2(programs, 1), num_warps=2,
    )  # fmt: skip
    return result
