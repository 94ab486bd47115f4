"""What the operations of torch are made of.

Each function is fixed-shape tensor work without host synchronisation, so that a decode step made of
them can be captured in a graph. Letters: B sequences, H KV heads, Q query rows of one KV head (the
GQA group times the rows of the step), N blocks of capacity, S resident slots, K blocks of budget,
b tokens per block, g tokens per index group, R places of the tail ring, D head dimension.

Tables carry one spare column at their end ("spill"): masked-out writes go there, so a write needs
no data-dependent shape.
"""

import torch
from torch import Tensor

from ..encodings import floats

NEG_INF = float("-inf")
LEAST_SHARE = 0x30000000  # 2**-31, as the bits of a float32.


def readable(x: Tensor) -> bool:
    """Whether values may be looked at: in host memory, where no device has to be waited for.

    There a step leaves out work that has no effect. Its results are those of the general path,
    and so are its tables but for free slots and spills.
    """
    return x.device.type == "cpu"


def last_live(live: Tensor) -> int:
    """Blocks to look at, of `[B, 1, N]` live ones: N, or up to the last live, where `readable`."""
    if not readable(live):
        return live.shape[-1]
    number = torch.arange(1, live.shape[-1] + 1, device=live.device)
    return int((live.flatten(0, 1).any(0) * number).amax())


def spill(index: Tensor, keep: Tensor, column: int) -> Tensor:
    """`index` where `keep`, the spill `column` elsewhere. Both broadcast; int64."""
    return torch.where(keep, index, column)


def ring_positions(lengths: Tensor, ring: int) -> Tensor:
    """Newest token position held by each place of the tail ring.

    Args:
        lengths: `[B]` int64, tokens of each sequence.
        ring: number of places R; position p lives at place p mod R.

    Returns:
        `[B, R]` int64; negative where a place was never written.
    """
    place = torch.arange(ring, device=lengths.device)
    last = lengths[:, None] - 1
    return last - torch.remainder(last - place, ring)


def ring_write(ring: Tensor, rows: Tensor, positions: Tensor, valid: Tensor) -> None:
    """Write rows of new tokens into the tail ring, in place.

    Args:
        ring: `[B, H, R + 1, D]`; the last place is the spill.
        rows: `[B, H, T, D]`.
        positions: `[B, T]` int64 token positions.
        valid: `[B, T]` bool; invalid rows (padding) go to the spill.
    """
    places = ring.shape[2] - 1
    index = spill(torch.remainder(positions, places), valid, places)
    ring.scatter_(2, index[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3]), rows)


def ring_read(ring: Tensor, start: Tensor, count: int) -> Tensor:
    """Read `count` consecutive tokens from position `start` `[B]`: `[B, H, count, D]`."""
    places = ring.shape[2] - 1
    index = torch.remainder(start[:, None] + torch.arange(count, device=start.device), places)
    shape = (-1, ring.shape[1], -1, ring.shape[3])
    return ring.gather(2, index[:, None, :, None].expand(shape))


def flat_rows(table: Tensor, blocks: Tensor) -> Tensor:
    """Numbers `[B * H * m]` of rows `blocks` `[B, H, m]` in `table` `[B, H, N, ...]` flattened.

    Whole rows are moved by such a number far faster than element by element, by an expanded index.
    """
    batch, heads, count = table.shape[:3]
    first = torch.arange(0, batch * heads * count, count, device=blocks.device)
    return (blocks + first.view(batch, heads, 1)).flatten()


def gather_blocks(table: Tensor, blocks: Tensor) -> Tensor:
    """Rows `blocks` `[B, H, m]` of `table` `[B, H, N, F]`: `[B, H, m, F]`."""
    rows = table.flatten(0, 2).index_select(0, flat_rows(table, blocks))
    return rows.view(*blocks.shape, table.shape[3])


def scatter_blocks(table: Tensor, blocks: Tensor, rows: Tensor) -> None:
    """Write `rows` `[B, H, m, F]` at `blocks` `[B, H, m]` of `table` `[B, H, N, F]`, in place.

    Args:
        table: contiguous.
        blocks: each once per head, but for the spill, which may get any of its rows.
        rows: of the dtype of `table`.
    """
    flat = table.view(-1, table.shape[3])
    flat.index_copy_(0, flat_rows(table, blocks), rows.flatten(0, 2))


def bound_logits(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Largest logit that any key between `low` and `high` can reach (Quest's page bound).

    Args:
        query: `[B, H, Q, D]` float32, already scaled.
        low: `[B, H, N, D]` channel-wise minimum; bytes are 8-bit floats.
        high: `[B, H, N, D]` channel-wise maximum.

    Returns:
        `[B, H, Q, N]` float32.
    """
    up = query.clamp(min=0) @ floats(high).transpose(-1, -2)
    return up + query.clamp(max=0) @ floats(low).transpose(-1, -2)


def truncate_share(share: Tensor) -> Tensor:
    """Keep the upper 16 bits of float32 shares, as bfloat16 would, and nothing below 2**-31.

    Blocks whose shares differ by less than 8 bits of precision are as good as each other, and those
    of next to nothing too. So a share has 12 bits, which makes a threshold search short, and the
    choice hangs less on the rounding of a backend: only near-ties, within this resolution, do.
    """
    upper = share.contiguous().view(torch.int32) & -0x10000
    return torch.where(upper >= LEAST_SHARE, upper, 0).view(torch.float32)


def reduce_rows(
    logits: Tensor, live: Tensor, rest: Tensor | None, reduction: str, real: Tensor | None = None
) -> Tensor:
    """Turn per-query block logits into one score per block and KV head.

    Args:
        logits: `[B, H, Q, N]`, log of a block's unnormalised attention, per query row.
        live: `[B, 1, N]` bool, blocks that may be chosen.
        rest: `[B, H, Q]` log of the attention outside the blocks (the tail), or None.
        reduction: "mean" of the per-query softmax, or "max" of the raw logits (the paper's).
        real: `[B, H, Q]` bool, False for rows of padding, which have no say; None if all are real.

    Returns:
        `[B, H, N]` float32; -inf where not live, and where all rows are padding.
    """
    logits = torch.where(live[:, :, None], logits, NEG_INF)
    if real is not None:
        live = live & real.any(-1, keepdim=True)
        if reduction == "max":
            logits = torch.where(real[..., None], logits, NEG_INF)
    if reduction == "max":
        return logits.amax(2)
    total = torch.logsumexp(logits, -1)
    if rest is not None:
        total = torch.logaddexp(total, rest)
    share = torch.exp(logits - total[..., None])
    if real is None:
        share = share.mean(2)
    else:
        share = torch.where(real[..., None], share, 0.0).sum(2)
        share = share / real.sum(2, keepdim=True).clamp(min=1)
    return torch.where(live, truncate_share(share), NEG_INF)


def select_blocks(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best blocks of each head, best first; equal scores prefer the later block.

    Args:
        score: `[B, H, N]`; -inf marks a block that may not be chosen.
        count: how many, at most N.

    Returns:
        ids `[B, H, count]` int64 and their scores; ids with score -inf are void.
    """
    # No two keys are equal, so a partial sort does: the score's bits, which order as integers once
    # the lower ones of a negative number are flipped, then the block. -0 counts as 0.
    bits = (score + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    number = torch.arange(score.shape[-1], device=score.device)
    count = min(count, score.shape[-1])
    keys = torch.topk((bits.long() << 32) | number, count, dim=-1).values
    ids = keys & 0xFFFFFFFF
    return ids, score.gather(-1, ids)


def eviction_order(block_of_slot: Tensor, last_selected: Tensor, clock: Tensor) -> Tensor:
    """What is evicted first: free slots, then the least recently selected, then the lowest block.

    The order depends on the resident blocks alone, not on the slots they happen to be in.

    Args:
        block_of_slot: `[B, H, S]` int32, -1 where free.
        last_selected: `[B, H, S]` int32 step of the last selection.
        clock: `[1]` int32, the current step.

    Returns:
        `[B, H, S]` int64; the largest goes first.
    """
    age = (clock - last_selected).long().clamp(max=0xFFFF)
    late = 0xFFFF - block_of_slot.long().clamp(max=0xFFFF)
    return torch.where(block_of_slot < 0, 0xFFFFFFFF, age * 0x10000 + late)


def assign_slots(
    ids: Tensor,
    take: Tensor,
    slot_of_block: Tensor,
    block_of_slot: Tensor,
    last_selected: Tensor,
    clock: Tensor,
) -> Tensor:
    """Give each taken block a slot, by `eviction_order`; update the tables in place.

    Args:
        ids: `[B, H, m]` int64 blocks, none of the taken ones resident.
        take: `[B, H, m]` bool; at most as many as there are slots not selected at `clock`.
        slot_of_block: `[B, H, N + 1]` int32, -1 where not resident.
        block_of_slot: `[B, H, S + 1]` int32, -1 where free.
        last_selected: `[B, H, S + 1]` int32 step of the last selection, -1 where free.
        clock: `[1]` int32, the current step.

    Returns:
        `[B, H, m]` int64 slots, -1 where not taken.
    """
    blocks, slots = slot_of_block.shape[-1] - 1, block_of_slot.shape[-1] - 1
    order = eviction_order(block_of_slot[..., :slots], last_selected[..., :slots], clock)
    victims = order.sort(dim=-1, descending=True, stable=True).indices
    rank = (take.cumsum(-1) - 1).clamp(0, slots - 1)
    slot = victims.gather(-1, rank)
    old = block_of_slot.gather(-1, slot).long()
    void = torch.full_like(slot, -1).int()
    slot_of_block.scatter_(-1, spill(old, take & (old >= 0), blocks), void)
    slot_of_block.scatter_(-1, spill(ids, take, blocks), slot.int())
    target = spill(slot, take, slots)
    block_of_slot.scatter_(-1, target, ids.int())
    last_selected.scatter_(-1, target, clock.expand_as(target))
    return torch.where(take, slot, -1)


def plan_step(
    ids: Tensor,
    score: Tensor,
    slot_of_block: Tensor,
    block_of_slot: Tensor,
    last_selected: Tensor,
    clock: Tensor,
    now_above: float,
    later_cap: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the wanted blocks with the resident ones and plan the fetches; updates the tables.

    A missing block whose score exceeds `now_above` is fetched before attention; of the others the
    best `later_cap` per head are fetched afterwards, for the next step; the rest is refused.

    Args:
        ids: `[B, H, K]` wanted blocks, best first.
        score: `[B, H, K]` their scores, -inf where void.
        slot_of_block, block_of_slot, last_selected, clock: as in `assign_slots`.
        now_above: threshold of the score; inf never fetches now, -inf always.
        later_cap: blocks per head.

    Returns:
        Three `[B, H, K]` int64 tensors of slots, -1 elsewhere: hits, fetched now, fetched later.
    """
    slots = block_of_slot.shape[-1] - 1
    wanted = score > NEG_INF
    slot = slot_of_block.gather(-1, ids).long()
    hit = wanted & (slot >= 0)
    last_selected.scatter_(-1, spill(slot, hit, slots), clock.expand_as(slot))
    now = wanted & ~hit & (score > now_above)
    later = wanted & ~hit & ~now
    later = later & (later.cumsum(-1) <= later_cap)
    given = assign_slots(ids, now | later, slot_of_block, block_of_slot, last_selected, clock)
    return (
        torch.where(hit, slot, -1),
        torch.where(now, given, -1),
        torch.where(later, given, -1),
    )


def _fill_hidden(rows: Tensor, seen: Tensor) -> Tensor:
    """Zero what no query sees: a masked place may hold anything, NaN included."""
    if readable(seen) and seen.all():
        return rows
    return torch.where(seen, rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


def sparse_attention(
    query: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    slots: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    tail_mask: Tensor,
    scaling: float,
) -> Tensor:
    """Attention of a few query rows over chosen resident slots and the tail.

    Args:
        query: `[B, H, G, T, D]`, G query heads per KV head, T rows.
        pool_k: `[B, H, S + 1, b, D]`; pool_v likewise, with its own head dimension.
        slots: `[B, H, K]` int64 slots to attend to; -1 is skipped.
        tail_k: `[B, H, R + 1, D]`; tail_v likewise.
        tail_mask: `[B, T, R]` bool, which places of the tail each row sees.
        scaling: factor of the logits.

    Returns:
        `[B, H, G, T, Dv]`; a row that sees nothing (padding) gives zeros.
    """
    batch, heads, group, rows, _ = query.shape
    block = pool_k.shape[3]
    index = slots.clamp(min=0)
    chosen = (slots >= 0)[..., None]
    keys = _fill_hidden(gather_blocks(pool_k.flatten(3), index), chosen)
    values = _fill_hidden(gather_blocks(pool_v.flatten(3), index), chosen)
    keys = keys.unflatten(3, pool_k.shape[3:]).flatten(2, 3)
    values = values.unflatten(3, pool_v.shape[3:]).flatten(2, 3)
    seen_tail = tail_mask.any(1)[:, None, :, None]
    seen = chosen.expand(-1, -1, -1, block).flatten(2)[:, :, None].expand(-1, -1, rows, -1)
    mask = torch.cat([seen, tail_mask[:, None].expand(-1, heads, -1, -1)], -1)
    empty = ~mask.any(-1, keepdim=True)
    mask = (mask | empty)[:, :, None].expand(-1, -1, group, -1, -1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, heads, group * rows, -1),
        torch.cat([keys, _fill_hidden(tail_k[:, :, :-1], seen_tail)], 2),
        torch.cat([values, _fill_hidden(tail_v[:, :, :-1], seen_tail)], 2),
        attn_mask=mask.reshape(batch, heads, group * rows, -1),
        scale=scaling,
    )
    return out.view(batch, heads, group, rows, -1).masked_fill(empty[:, :, None], 0.0)


def tail_logsumexp(query: Tensor, tail_k: Tensor, tail_mask: Tensor) -> Tensor:
    """Log of the attention that each query row gives to the tail.

    Args:
        query: `[B, H, G, T, D]` float32, already scaled.
        tail_k: `[B, H, R + 1, D]`.
        tail_mask: `[B, T, R]` bool.

    Returns:
        `[B, H, G * T]` float32, -inf where a row sees nothing of the tail.
    """
    logits = query.flatten(2, 3) @ tail_k[:, :, :-1].float().transpose(-1, -2)
    mask = tail_mask[:, None].repeat_interleave(query.shape[2], 1).flatten(1, 2)[:, None]
    return torch.logsumexp(torch.where(mask, logits, NEG_INF), -1)
