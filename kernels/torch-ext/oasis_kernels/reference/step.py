"""The operations of a step in torch: the meaning that every backend reproduces. See `api`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..api import LATER, NOW, SUMS, WRITTEN, Choice, Opened, Parts, Queries, Scores, Tables
from . import primitives as p

NEG_INF = float("-inf")


@dataclass(frozen=True)
class StepPlan:
    """What one choice wants, has and fetches. All `[B, H, K]`; slots are -1 where none applies.

    Attributes:
        ids: wanted blocks, best first.
        wanted: whether the entry is a block at all.
        hits: slots of wanted blocks that were resident.
        now: slots to fill before attention.
        later: slots to fill after attention, for the next step.
        turnover: wanted blocks that the previous step did not want.
    """

    ids: Tensor
    wanted: Tensor
    hits: Tensor
    now: Tensor
    later: Tensor
    turnover: Tensor

    def attended(self, blocks: int) -> Tensor:
        """Slots to attend to, by block number rather than by score or slot, `[B, H, K]`.

        The order fixes the rounding of the attention: it depends on the set alone, not on where
        its blocks happen to live.
        """
        slots = torch.where(self.hits >= 0, self.hits, self.now)
        order = torch.where(slots >= 0, self.ids, blocks).argsort(dim=-1, stable=True)
        return slots.gather(-1, order)


class Plan:
    """What `plan` decided last: `steps` is `StepPlan`, `attended` its slots in block order."""

    def __init__(self) -> None:
        self.step: StepPlan | None = None
        self.attended: Tensor | None = None


def new_plan(pairs: int, count: int, device: Any) -> Plan:
    """As in `api.Backend`; a plan of torch brings its own memory."""
    return Plan()


def open_step(parts: Parts, plan: Plan, rows: int, valid: Tensor | None) -> Opened:
    """As in `api.Backend`."""
    rules, ends = parts.rules, parts.frontier
    full = (ends.lengths - ends.committed - rules.recent).clamp(min=0) // rules.group
    moved = full.clamp(max=rules.flushes)
    ends.committed += moved * rules.group
    if valid is None:
        seen = torch.arange(1, rows + 1, device=moved.device).expand(len(moved), -1)
    else:
        seen = valid.long().cumsum(-1)
    positions = ends.lengths[:, None] + seen - 1
    if valid is not None:
        positions = torch.where(valid, positions, -1)
    ends.lengths += seen[:, -1]
    parts.residency.clock += 1
    return Opened(positions, moved.int())


def append(
    parts: Parts,
    opened: Opened,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    form: str | None,
) -> None:
    """As in `api.Backend`."""
    group = parts.rules.group
    first = parts.frontier.committed - opened.moved * group
    for number in range(parts.rules.flushes):
        leaving = number < opened.moved
        if p.readable(leaving) and not leaving.any():
            break
        _move_group(parts, first + number * group, leaving, form)
    real = opened.positions >= 0
    for ring, states in ((parts.tail.k, key), (parts.tail.v, value)):
        p.ring_write(ring, states, opened.positions, real)


def _move_group(parts: Parts, first: Tensor, leaving: Tensor, form: str | None) -> None:
    """Move the group from position `first` `[B]` to store, index and pool where `leaving`."""
    rules, tables = parts.rules, parts.residency
    count = rules.group // rules.block
    k, v = (p.ring_read(ring, first, rules.group) for ring in (parts.tail.k, parts.tail.v))
    if form != WRITTEN:
        parts.index.write(first // rules.group, k, leaving)
    k, v = (states.unflatten(2, (count, rules.block)) for states in (k, v))
    blocks = first[:, None] // rules.block + torch.arange(count, device=first.device)
    parts.store.write(blocks, k, v, leaving)
    kept = min(count, tables.block_of_slot.shape[2] - 1)
    slots = admit(tables, blocks[:, -kept:], leaving, tables.clock - 1)
    write_pool(parts, slots, k[:, :, -kept:], v[:, :, -kept:])


def admit(tables: Tables, blocks: Tensor, keep: Tensor, time: Tensor) -> Tensor:
    """Make blocks that just left the tail resident, without a transfer.

    Args:
        tables: of residency.
        blocks: `[B, m]` int64, not resident.
        keep: `[B]` bool, sequences that admit.
        time: `[1]` of their selection.

    Returns:
        `[B, H, m]` slots, -1 where not admitted.
    """
    ids = blocks[:, None].expand(-1, tables.slot_of_block.shape[1], -1)
    take = keep[:, None, None].expand_as(ids)
    return p.assign_slots(
        ids, take, tables.slot_of_block, tables.block_of_slot, tables.last_selected, time
    )


def write_pool(parts: Parts, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Fill slots `[B, H, m]` (-1 is dropped) with k `[B, H, m, b, Dk]` and v."""
    for pool, states in ((parts.pool.k, k), (parts.pool.v, v)):
        target = torch.where(slots >= 0, slots, pool.shape[2] - 1)
        p.scatter_blocks(pool.flatten(3), target, states.flatten(3).to(pool.device))


def given(score: Tensor, positions: Tensor) -> Scores:
    """As in `api.Backend`."""
    return Scores(score.flatten(0, 1)[:, None], None, positions, ready=True)


def final_score(parts: Parts, scores: Scores, fill: bool) -> Tensor:
    """What a plan ranks: score `[B, H, C]`, sinks first, -inf for what may not be chosen."""
    committed = parts.frontier.committed // parts.rules.block
    score = scores.logits[:, 0].unflatten(0, (len(committed), -1))
    number = torch.arange(score.shape[-1], device=score.device)
    stored = number < committed[:, None]
    real = (scores.positions >= 0).any(1, keepdim=True)
    sink = stored & (number < parts.rules.sinks) & real
    score = torch.where(sink[:, None], float("inf"), score)
    if fill:
        # A sequence that has only padding in this step takes any block, the newest first.
        return torch.where((stored & ~real)[:, None], 0.0, score)
    return torch.where(real[:, None], score, NEG_INF)


def plan(parts: Parts, scores: Scores, plan: Plan, choice: Choice) -> None:
    """As in `api.Backend`."""
    score = final_score(parts, scores, choice.fill)
    plan.step = step = choose(parts.residency, score, choice)
    if choice.fill:
        _count(parts.sums, filled=step.now >= 0)
    elif choice.ahead:
        _count(parts.sums, later=step.later >= 0)
    else:
        plan.attended = step.attended(parts.residency.slot_of_block.shape[2] - 1)
        _count(
            parts.sums,
            wanted=step.wanted,
            hits=step.hits >= 0,
            now=step.now >= 0,
            later=step.later >= 0,
            turnover=step.turnover,
            steps=None,
        )


def _count(sums: Tensor, **flags: Tensor | None) -> None:
    for name, flag in flags.items():
        sums[SUMS.index(name)] += 1 if flag is None else flag.sum()


def choose(tables: Tables, score: Tensor, choice: Choice) -> StepPlan:
    """Choose the best blocks at the time of the clock, and plan what has to move.

    Args:
        tables: of residency; updated.
        score: `[B, H, C]`, -inf where a block may not be chosen.
        choice: how many, and what may be fetched.
    """
    ids, value = p.select_blocks(score, min(choice.count, score.shape[-1]))
    slot = tables.slot_of_block.gather(-1, ids).long()
    before = tables.last_selected.gather(-1, slot.clamp(min=0))
    stayed = (slot >= 0) & (before == tables.clock - 1)
    wanted = value > NEG_INF
    hits, now, later = p.plan_step(
        ids,
        value,
        tables.slot_of_block,
        tables.block_of_slot,
        tables.last_selected,
        tables.clock,
        choice.now_above,
        choice.later,
    )
    return StepPlan(ids, wanted, hits, now, later, wanted & ~stayed)


def again(parts: Parts, plan: Plan) -> None:
    """As in `api.Backend`."""
    parts.residency.clock += 1


def fetch(parts: Parts, plan: Plan, which: int) -> tuple[Tensor, ...]:
    """As in `api.Backend`."""
    assert plan.step is not None and which in (NOW, LATER)
    ids, slots = plan.step.ids, plan.step.later if which == LATER else plan.step.now
    if p.readable(slots):
        # The fetches of each head, in front; most blocks are there already.
        listed = slots >= 0
        count = int(listed.sum(-1).amax())
        if not count:
            return ()
        front = listed.int().topk(count, dim=-1).indices
        ids, slots = ids.gather(-1, front), slots.gather(-1, front)
    k, v = parts.store.gather(torch.where(slots >= 0, ids, -1))
    write_pool(parts, slots, k, v)
    return ()


def tail_mask(parts: Parts, positions: Tensor) -> Tensor:
    """`[B, T, R]` bool: which places of the tail each row at `positions` `[B, T]` sees."""
    held = p.ring_positions(parts.frontier.lengths, parts.tail.k.shape[2] - 1)
    stays = held >= parts.frontier.committed[:, None]
    return stays[:, None] & (held[:, None] <= positions[:, :, None])


def attend(parts: Parts, plan: Plan, queries: Queries) -> Tensor:
    """As in `api.Backend`."""
    assert plan.attended is not None
    return p.sparse_attention(
        queries.query,
        parts.pool.k,
        parts.pool.v,
        plan.attended,
        parts.tail.k,
        parts.tail.v,
        tail_mask(parts, queries.positions),
        queries.spec.scaling,
    )
