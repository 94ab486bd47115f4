"""The operations of a step as launches of kernels. See `api.Backend`."""

import torch
from torch import Tensor

from ..api import WRITTEN, Choice, Opened, Parts, Queries, Scores
from ..reference.primitives import ring_read
from . import launch
from .buffers import INT32, Plan

FORMS = {WRITTEN: 0, "bounds": 1, "keys2bit": 2}
"""Indexes that the append kernel writes by itself, and what it knows them by."""


def new_plan(pairs: int, count: int, device: torch.device) -> Plan:
    """As in `api.Backend`."""
    return Plan(pairs, count, device)


def open_step(parts: Parts, plan: Plan, rows: int, valid: Tensor | None) -> Opened:
    """As in `api.Backend`."""
    ends, rules = parts.frontier, parts.rules
    batch, device = ends.lengths.shape[0], ends.lengths.device
    positions = torch.empty(batch, rows, dtype=torch.long, device=device)
    moved = torch.empty(batch, dtype=INT32, device=device)
    launch.advance(
        ends.lengths,
        ends.committed,
        parts.residency.clock,
        plan.counts,
        None if valid is None else valid.contiguous(),
        positions,
        moved,
        rules.recent,
        rules.group,
        rules.flushes,
    )
    return Opened(positions, moved)


def append(
    parts: Parts,
    opened: Opened,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    form: str | None,
) -> None:
    """As in `api.Backend`."""
    rules, tables, store = parts.rules, parts.residency, parts.store
    if form is None:
        _index_moved(parts, opened)
    kind = FORMS[WRITTEN if form is None else form]
    launch.append(
        key.contiguous(),
        value.contiguous(),
        None if valid is None else valid.contiguous(),
        opened.positions,
        opened.moved,
        parts.frontier.committed,
        tables.clock,
        (parts.tail.k, parts.tail.v),
        (parts.pool.k, parts.pool.v),
        (tables.slot_of_block, tables.block_of_slot, tables.last_selected),
        _addresses(store.table),
        store.slab_blocks,
        tuple(parts.index.arrays.values()) if kind else (),
        kind,
        rules.group,
        rules.flushes,
    )


def _index_moved(parts: Parts, opened: Opened) -> None:
    """Index the groups that leave the tail, for an index that is written in torch."""
    group = parts.rules.group
    start = parts.frontier.committed - opened.moved * group
    for number in range(parts.rules.flushes):
        first = start + number * group
        keys = ring_read(parts.tail.k, first, group)
        parts.index.write(first // group, keys, number < opened.moved)


def _addresses(table: Tensor | None) -> Tensor:
    if table is None:
        raise ValueError(
            "store: got one without addresses for the device, expected a table of them; use "
            "backend='reference' with this store"
        )
    return table


def given(score: Tensor, positions: Tensor) -> Scores:
    """As in `api.Backend`."""
    logits = score.flatten(0, 1)[:, None].contiguous()
    partial = logits.new_zeros(logits.shape[0], 1, 1, 2)
    return Scores(logits, partial, positions.amax(1, keepdim=True), ready=True)


def plan(parts: Parts, scores: Scores, plan: Plan, choice: Choice) -> None:
    """As in `api.Backend`."""
    tables, rules = parts.residency, parts.rules
    launch.plan_step(
        scores,
        plan,
        parts.frontier.committed,
        (tables.slot_of_block, tables.block_of_slot, tables.last_selected),
        tables.clock,
        parts.sums,
        parts.pool.k.shape[1],
        choice.count,
        rules.block,
        rules.sinks,
        choice.later,
        choice.now_above,
        choice.fill,
        choice.ahead,
    )


def again(parts: Parts, plan: Plan) -> None:
    """As in `api.Backend`."""
    parts.residency.clock += 1
    plan.counts.zero_()


def fetch(parts: Parts, plan: Plan, which: int) -> tuple[Tensor, ...]:
    """As in `api.Backend`."""
    table = _addresses(parts.store.table)
    pool = parts.pool.k, parts.pool.v
    launch.gather(plan.lists[which], plan.counts[which:], table, parts.store.slab_blocks, pool)
    return plan.lists[which], plan.counts, table, *pool


def attend(parts: Parts, plan: Plan, queries: Queries) -> Tensor:
    """As in `api.Backend`."""
    query = queries.query
    out = launch.sparse_attention(
        query.contiguous().flatten(2, 3),
        (parts.pool.k, parts.pool.v),
        plan.attended,
        (parts.tail.k, parts.tail.v),
        parts.frontier.lengths,
        parts.frontier.committed,
        queries.positions,
        queries.spec.scaling,
    )
    return out.unflatten(2, query.shape[2:4])
