"""Replays residency over recorded scores: what is resident in time, and what moves when."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...geometry import LayerGeometry, capped_blocks
from ...lookahead import LRU
from ...storage.residency import Residency
from .scores import OPS, Scores

"""No lookahead: the residency as the cache has it."""


@dataclass(frozen=True)
class Options:
    """What is replayed; budget and the rest are named as in `OasisConfig`.

    Attributes:
        fetch_cap: blocks fetched ahead per head and round, as a share of the budget; None for no
            limit.
    """

    predictor: str = LRU
    budget: int = 512
    head_room: float = 2.0
    on_miss: str | float = "fetch"
    fetch_cap: float | None = 0.05

    @property
    def now_above(self) -> float:
        """Score above which a missing block is fetched before attention."""
        limits = {"fetch": float("-inf"), "skip": float("inf")}
        return limits[self.on_miss] if isinstance(self.on_miss, str) else self.on_miss


@dataclass(frozen=True)
class Outcome:
    """`[R, L]` figures of every round and layer, means over KV heads; and what is left at the end.

    Attributes:
        residency: the tables after the last round; their batch is the layers.
        recall: of the blocks that the index wants, the share resident when the round begins.
        recall_true: likewise of the blocks that the true attention would choose.
        mass: true attention to the tail and to wanted blocks that were resident.
        attended: likewise, with those that were fetched before attention.
        ahead: blocks fetched ahead of the round, per head.
        used: of these, blocks that the round wants.
        now: blocks fetched before attention, per head.
        behind: wanted blocks fetched after attention, per head; LRU's only way where misses are
            skipped.
    """

    residency: Residency
    recall: Tensor
    recall_true: Tensor
    mass: Tensor
    attended: Tensor
    ahead: Tensor
    used: Tensor
    now: Tensor
    behind: Tensor


@torch.inference_mode()
def replay(scores: Scores, options: Options) -> Outcome:
    """Run the cache's own `Residency` over all rounds, all layers at once.

    A round wants the blocks that the index scores highest. Once it has ended, a predictor's best
    blocks are fetched ahead, under the cap, best first; those already resident count as selected,
    so that the fetches evict others. Under LRU, skipped misses are fetched behind under the same
    cap, as the cache does it.
    """
    geometry = _geometry(scores, options)
    rounds, layers, _, blocks = scores.wanted.shape
    residency = Residency(geometry, layers, scores.wanted.device, OPS)
    residency.ensure(blocks)
    wanted_count = min(geometry.budget_blocks, blocks)
    cap = min(capped_blocks(options.fetch_cap, geometry.budget_blocks), wanted_count)
    plain = options.predictor == LRU
    ahead = torch.zeros(layers, scores.wanted.shape[2], blocks, dtype=torch.bool)
    best_by_truth = scores.best(wanted_count)
    stored, found = scores.before, []
    for number in range(rounds):
        stored = _admit(residency, scores, stored, int(scores.committed[number]))
        score = scores.wanted[number]
        if not number:
            residency.step(score, geometry.slots, float("-inf"), 0)
        resident = residency.slot_of_block[..., :-1] >= 0
        plan = residency.step(score, wanted_count, options.now_above, cap if plain else 0)
        hits, now, behind = ((slots >= 0) for slots in (plan.hits, plan.now, plan.later))
        best, real = best_by_truth[0][number], best_by_truth[1][number]
        mass, tail = scores.mass[number].gather(-1, plan.ids), scores.tail[number].mean(-1)
        chosen = ahead.gather(-1, plan.ids) & plan.wanted
        found.append(
            [
                _share(hits, plan.wanted),
                _share(resident.gather(-1, best) & real, real),
                tail + (mass * hits).sum(-1).mean(-1),
                tail + (mass * (hits | now)).sum(-1).mean(-1),
                *(part.sum(-1).float().mean(-1) for part in (ahead, chosen, now, behind)),
            ]
        )
        ahead = torch.zeros_like(ahead)
        if not plain:
            predicted = scores.predicted[options.predictor][number]
            plan = residency.step(predicted, wanted_count, float("inf"), cap)
            ahead = ahead.scatter(-1, plan.ids, plan.later >= 0)
    figures = [torch.stack(column) for column in zip(*found, strict=True)]
    return Outcome(residency, *figures)


def _admit(residency: Residency, scores: Scores, stored: int, committed: int) -> int:
    """Make the groups that leave the tail resident, one after the other, as the cache does."""
    keep = torch.ones(residency.slot_of_block.shape[0], dtype=torch.bool)
    while stored < committed:
        group = torch.arange(stored, stored + scores.per_group)[-residency.slots :]
        residency.admit(group.expand(len(keep), -1), keep)
        stored += scores.per_group
    return stored


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Mean over heads `[L]` of the share of `[L, H, K]` in another."""
    return (part.sum(-1) / whole.sum(-1).clamp(min=1)).mean(-1)


def _geometry(scores: Scores, options: Options) -> LayerGeometry:
    """Slots and bytes, of a model in 16 bits."""
    layout, dim = scores.layout, scores.head_dim
    return LayerGeometry.plan(
        kv_heads=scores.wanted.shape[2],
        k_dim=dim,
        v_dim=dim,
        itemsize=2,
        block=layout.block_size,
        group=scores.per_group * layout.block_size,
        budget=options.budget,
        head_room=options.head_room,
        recent=layout.recent_tokens,
        rows=layout.max_rows,
    )
