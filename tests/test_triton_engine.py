"""The Triton engine against the torch one, step by step: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engines import DEVICE
from helpers import tensors_of
from torch import Tensor

from oasis_hf.config import OasisConfig
from oasis_hf.index import keys2bit
from oasis_hf.layers.forward import Forward, Kind
from oasis_hf.layers.layer import OasisLayer
from oasis_hf.layers.ledger import PaddingLedger
from oasis_hf.ops import AttentionSpec, Queries, kernels
from oasis_hf.step.inputs import AttentionInputs
from oasis_hf.storage import moves

OPS = kernels("reference")
SEED = int(os.environ.get("OASIS_SEED", "1"))
"""Any number will do: `OASIS_SEED=7 make gpu-test`."""

CASES = {
    "keys2bit-fetch": {},
    "keys2bit-skip": {"on_miss": "skip"},
    "keys2bit-threshold": {"on_miss": 0.02},
    "keys2bit-uncapped": {"on_miss": "skip", "fetch_cap": None},
    "keys2bit-no-lookahead": {"on_miss": "skip", "fetch_cap": 0.0},
    "keys2bit-threshold-no-lookahead": {"on_miss": 0.2, "fetch_cap": 0.0},
    "keys2bit-candidates": {"budget": 16, "sink_tokens": 0, "least": 64},
    "minmax-fetch": {"index": "minmax"},
    "minmax-max": {"index": "minmax", "reduction": "max"},
    "minmax8-fetch": {"index": "minmax8"},
    "minmax8-float16": {"index": "minmax8", "dtype": torch.float16, "rows": 2},
    "pca": {"index": "pca"},
    "pca-block-4": {"index": "pca", "block_size": 4, "rows": 2},
    "pca-odd-dims": {"index": "pca", "dim": 24, "v_dim": 40, "group": 3, "on_miss": "skip"},
    "pca-float16": {"index": "pca", "dtype": torch.float16, "block_size": 32},
    "mean-no-kernel": {"index": "mean"},
    "no-head-room": {"head_room": 1.0},
    "block-8": {"block_size": 8},
    "block-4": {"block_size": 4, "index": "minmax8"},
    "block-32": {"block_size": 32},
    "rows-3": {"rows": 3},
    "odd-dims": {"dim": 24, "v_dim": 40, "group": 3},
    "float16": {"dtype": torch.float16},
    # Triton's interpreter multiplies no bfloat16.
    **({"bfloat16": {"dtype": torch.bfloat16, "rows": 2}} if DEVICE == "cuda" else {}),
}


RESOLUTION = {torch.float32: 2**-6, torch.float16: 2**-5, torch.bfloat16: 2**-4}
"""By how much the shares of two blocks may differ, relative to them, and either may be chosen.

Shares are compared by 12 bits (`reference.truncate_share`): of two that lie within 2**-7 of each
other, either may be cut to the larger number. The rest is what products of 16-bit numbers leave of
a logit: the scan multiplies queries and steps in 16 bits, the reference in 32.
"""

NEXT_TO_NOTHING = 2**-30
"""Smaller shares count as none, in one engine or the other."""


def build(
    backend: str, k: torch.Tensor, v: torch.Tensor, lengths: list[int], **options
) -> OasisLayer:
    """One layer that holds `lengths` tokens of k and v."""
    chosen = {"budget": 64, "sink_tokens": 16, "recent_tokens": 16, "max_rows": 4} | options
    layer = OasisLayer(OasisConfig(backend=backend, **chosen), 0, PaddingLedger())
    layer.adopt(k, v, torch.tensor(lengths, device=DEVICE), max(lengths))
    if layer.parts.unlearned_after(0):
        layer.parts.index.observe(k[:, :, None, -32:], None)
        moves.learn(layer.parts)
    return layer


def assert_same(torch_layer: OasisLayer, triton_layer: OasisLayer) -> None:
    """Every table, summary and stored token of two layers, bit for bit, spills apart."""
    assert torch.equal(torch_layer.parts.frontier.lengths, triton_layer.parts.frontier.lengths)
    assert torch.equal(torch_layer.parts.frontier.committed, triton_layer.parts.frontier.committed)
    for one, other in zip(
        torch_layer.parts.residency.tables, triton_layer.parts.residency.tables, strict=True
    ):
        assert torch.equal(one[..., :-1], other[..., :-1])
    groups = int(torch_layer.parts.frontier.committed.min()) // torch_layer.parts.geometry.group
    for name, array in torch_layer.parts.index.arrays.items():
        other = triton_layer.parts.index.arrays[name]
        same = array[:, :, :groups] == other[:, :, :groups]
        # What is computed by a product of matrices is rounded otherwise, now and then.
        part = float(same.float().mean()) if groups else 1.0
        assert part > 0.999 if torch_layer.parts.index.learns else same.all(), name
    lengths = torch_layer.parts.frontier.lengths.tolist()
    for ours, theirs in zip(
        torch_layer.history(lengths)[:2], triton_layer.history(lengths)[:2], strict=True
    ):
        assert torch.equal(ours, theirs)


def copy_state(to: OasisLayer, source: OasisLayer) -> None:
    """Have one layer hold what another does, in every part that both have."""
    target, given = tensors_of(to), tensors_of(source)
    for path in target.keys() & given.keys() - {"_rows"}:
        target[path].copy_(given[path])
    to.parts.cold = source.parts.cold
    for name in ("columns", "fresh", "in_turn"):
        setattr(to.parts.frontier, name, getattr(source.parts.frontier, name))
    to.parts.frontier.unsettle()


class Step:
    """One step of the Triton engine, checked against the meaning that the torch engine gives it.

    Near-ties may be decided either way, and all later steps depend on it. So nothing is compared
    that follows from a decision, but the decision itself, and what was made of it. The torch layer
    takes over the other's state before each step.
    """

    def __init__(self, layers: list[OasisLayer], resolution: float) -> None:
        self.torch, self.triton = layers
        self.resolution = resolution

    def run(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> None:
        """Query `[B, H, G, T, D]`, key and value `[B, H, T, D]`, valid `[B, T]`."""
        copy_state(self.torch, self.triton)
        positions = []
        for layer in (self.torch, self.triton):
            layer.parts.reserve(key.shape[2])
            layer.parts.frontier.unsettle()
            positions.append(layer.step.append(key, value, valid))
        assert torch.equal(*positions)
        # What left the tail is stored, indexed and resident in both.
        assert_same(self.torch, self.triton)
        self._attend(query, positions[0])

    def _attend(self, query: Tensor, positions: Tensor) -> None:
        layer, scaling = self.triton, query.shape[-1] ** -0.5
        before = layer.parts.residency.slot_of_block[..., :-1] >= 0
        counted = layer.parts.counters.read()
        cold, cap = layer.parts.cold, layer.parts.cap.blocks
        scans: list[Any] = []
        scan = layer.step.scores
        layer.step.scores = lambda *given: scans.append(scan(*given)) or scans[-1]
        got = layer.step.attend(query, positions, AttentionSpec(scaling))
        del layer.step.scores
        layer.parts.cold = False
        layer.parts.join()
        mask = OPS.tail_mask(layer.parts, positions)
        queries = Queries(query, positions, AttentionSpec(scaling))
        score, fill = self.scores(queries, scans[0].chosen)
        self.check_scan(scans[0], query.float() * scaling, mask)
        counts = {n: x - counted[n] for n, x in layer.parts.counters.read().items()}
        self.check_tables()
        if cold:
            resident = layer.parts.residency.slot_of_block[..., :-1] >= 0
            self.check_best(fill, resident, layer.parts.geometry.slots)
            before = resident
        # By what the plan says of itself.
        now, later = (self.listed(which) for which in (0, 1))
        attended = self.attended()
        hits = attended & ~now
        assert not (now & later).any() and not (hits & later).any()
        if layer.config.on_miss == "skip":
            assert not now.any()
        assert (hits <= before).all() and not (now & before).any() and not (later & before).any()
        self.check_choice(score, before, hits, now, later, cap)
        assert counts["hits"] == hits.sum() and counts["now"] == now.sum()
        assert counts["later"] == later.sum() and counts["steps"] == 1
        live = (score > float("-inf")).sum(-1)
        assert counts["wanted"] == live.clamp(max=layer.parts.geometry.budget_blocks).sum()
        self.check_output(got, query, mask, scaling)

    def scores(self, queries: Queries, candidates: Tensor | None) -> tuple[Tensor, Tensor]:
        """The torch engine's score of every block, for a step and for a fill.

        The candidates are checked, and then given.
        """
        index = self.torch.parts.index
        if not isinstance(index, keys2bit.Keys2BitIndex) or candidates is None:
            return self.final(queries)
        own = index._candidates

        def given(rows: Tensor, low: Tensor, step: Tensor, live: Tensor, count: int) -> Tensor:
            bound = index.ops.bound_logits(rows, low.float(), low.float() + 3 * step.float())
            score = index.ops.reduce_rows(bound, live, None, "mean")
            groups = candidates.long().view(*score.shape[:2], -1)
            assert groups.shape[-1] == count
            assert (groups.diff(dim=-1) > 0).all(), "candidates are in order"
            found = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, groups, True)
            self.check_best(score, found, count)
            return groups

        index._candidates = given
        try:
            return self.final(queries)
        finally:
            index._candidates = own

    def final(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """What the torch engine's plans rank, for a step and for a fill."""
        parts = self.torch.parts
        scores = self.torch.step.scores(queries)
        step, fill = (OPS.final_score(parts, scores, fill) for fill in (False, True))
        return step, fill

    def check_scan(self, scan: Any, query: Tensor, mask: Tensor) -> None:
        """Logits of the blocks, and the sum that normalises those of each row, the tail's included.

        Up to a part of the largest logit: products are of 16-bit numbers, or of 32-bit ones.
        """
        index, tail = self.torch.parts.index, self.torch.parts.tail
        if scan.ready:
            return
        number = torch.arange(index.capacity, device=DEVICE)
        blocks = self.torch.parts.frontier.committed // self.torch.parts.geometry.block
        live = (number[None] < blocks[:, None])[:, None]
        rows = query.flatten(2, 3)
        if scan.chosen is None:
            got = scan.logits.view(*rows.shape[:3], -1)
            want = index.block_logits(rows, live)[..., : got.shape[-1]]
            seen = live[:, :, None, : got.shape[-1]].expand_as(want)
        else:
            codes, lowest, step = index.arrays.values()
            want = index._blocks(rows, codes, lowest, step)
            per_group = scan.per_group
            ids = scan.chosen.long()[..., None] * per_group + torch.arange(per_group, device=DEVICE)
            ids = ids.flatten(1).view(*rows.shape[:2], 1, -1).expand(-1, -1, rows.shape[2], -1)
            want, got = want.gather(-1, ids), scan.logits.view(*ids.shape)
            seen = ids < blocks[:, None, None, None]
        scale = max(1.0, float(want[seen].abs().max()))
        exact = self.triton.dtype == torch.float32
        close = {"atol": (1e-5 if exact else self.resolution / 8) * scale, "rtol": 0}
        torch.testing.assert_close(got[seen], want[seen], **close)
        if index.estimates_mass:
            rest = OPS.tail_logsumexp(query, tail.k, mask)
            everything = torch.where(seen, want, float("-inf")).logsumexp(-1).logaddexp(rest)
            peak, total = scan.partial.unbind(-1)
            sums = (peak + total.log()).logsumexp(1).view_as(rest)
            real = rest > float("-inf")
            torch.testing.assert_close(sums[real], everything[real], **close)

    def listed(self, which: int) -> Tensor:
        """`[B, H, N]`: blocks in a list of fetches; their slots are those of the tables."""
        layer, plan = self.triton, self.triton.step.plan
        entries = plan.lists[which][: int(plan.counts[which])].long()
        pairs, blocks, slots = entries.T
        homes = layer.parts.residency.slot_of_block.flatten(0, 1)
        assert torch.equal(homes[pairs, blocks].long(), slots)
        found = torch.zeros_like(homes[:, :-1], dtype=torch.bool)
        found[pairs, blocks] = True
        assert int(found.sum()) == len(entries), "a block is listed twice"
        return found.view_as(layer.parts.residency.slot_of_block[..., :-1])

    def attended(self) -> Tensor:
        """`[B, H, N]`: blocks attended to, which stand in order of their numbers."""
        layer = self.triton
        slots = layer.step.plan.attended.long().view(
            *layer.parts.residency.slot_of_block.shape[:2], -1
        )
        used = slots >= 0
        assert (used.int().diff(dim=-1) <= 0).all(), "the void places are the last"
        blocks = layer.parts.residency.block_of_slot.long().gather(-1, slots.clamp(min=0))
        assert (blocks[used] >= 0).all()
        steps = blocks.diff(dim=-1)
        assert (steps[used[..., 1:]] > 0).all(), "the blocks are in order"
        found = torch.zeros_like(layer.parts.residency.slot_of_block, dtype=torch.bool)
        found.scatter_(-1, torch.where(used, blocks, found.shape[-1] - 1), True)
        return found[..., :-1]

    def check_best(self, score: Tensor, chosen: Tensor, count: int) -> None:
        """The chosen are the `count` best of what may be chosen, up to ties."""
        best = score.sort(-1, descending=True).values
        live = (score > float("-inf")).sum(-1)
        assert torch.equal(chosen.sum(-1), live.clamp(max=count)), "as many as there can be"
        least = best.gather(-1, (live.clamp(1, count) - 1)[..., None])
        assert not (chosen & self.below(score, least)).any(), "a chosen block is among the best"
        assert not (~chosen & self.below(least, score)).any(), "no better block was left out"

    def below(self, one: Tensor, other: Tensor) -> Tensor:
        """Where a score is less than another by more than the index resolves."""
        scale = other.abs().clamp(min=NEXT_TO_NOTHING)
        gap = torch.where(torch.isinf(other), 0.0, scale * self.resolution)
        return (one < other - gap) & (one.abs() + other.abs() > NEXT_TO_NOTHING)

    def check_choice(
        self, score: Tensor, before: Tensor, hits: Tensor, now: Tensor, later: Tensor, cap: int
    ) -> None:
        """Hits, fetches and refusals are those of some choice that the index allows."""
        count = self.triton.parts.geometry.budget_blocks
        live = score > float("-inf")
        best = score.sort(-1, descending=True).values
        number = live.sum(-1)
        least = best.gather(-1, (number.clamp(1, count) - 1)[..., None])
        taken = hits | now | later
        assert (taken <= live).all() and not (taken & self.below(score, least)).any()
        surely = live & self.below(least, score)
        assert (surely & before <= hits).all(), "what is wanted and resident is attended to"
        above = torch.full_like(score, self.triton.now_above)
        assert not (now & self.below(score, above)).any()
        assert not (later & self.below(above, score)).any()
        missing = surely & ~before & ~now
        assert not (missing & self.below(above, score)).any(), "what counts is fetched at once"
        assert (later.sum(-1) <= cap).all()
        refused = missing & ~later
        worst = torch.where(later, score, float("inf")).amin(-1, keepdim=True)
        full = (later.sum(-1, keepdim=True) == cap) & ~self.below(worst, score)
        assert (refused <= full.expand_as(refused)).all(), "only a full cap refuses, and the least"

    def check_tables(self) -> None:
        """The tables agree with each other, and each resident block with the store."""
        layer = self.triton
        slot_of = layer.parts.residency.slot_of_block[..., :-1].long()
        block_of = layer.parts.residency.block_of_slot[..., :-1].long()
        held = block_of >= 0
        assert int((slot_of >= 0).sum()) == int(held.sum())
        slots = torch.arange(block_of.shape[2], device=DEVICE).expand_as(block_of)
        assert torch.equal(slot_of.gather(2, block_of.clamp(min=0))[held], slots[held])
        layer.parts.store.settle()
        k, v = layer.parts.store.gather(torch.where(held, block_of, -1))
        for pool, stored in ((layer.parts.pool.k, k), (layer.parts.pool.v, v)):
            assert torch.equal(pool[:, :, :-1][held], stored.to(DEVICE)[held])

    def check_output(self, got: Tensor, query: Tensor, mask: Tensor, scaling: float) -> None:
        """The output is attention over what the plan says, in float32."""
        layer = self.triton
        slots = layer.step.plan.attended.long().view(*query.shape[:2], -1)
        parts = (layer.parts.pool.k, layer.parts.pool.v, layer.parts.tail.k, layer.parts.tail.v)
        pool_k, pool_v, tail_k, tail_v = (part.float() for part in parts)
        want = OPS.sparse_attention(
            query.float(), pool_k, pool_v, slots, tail_k, tail_v, mask, scaling
        )
        # Weights and values are rounded to the type, and the sum once more.
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(query.dtype, 1e-4)
        torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_a_step_is_what_the_torch_engine_means(
    options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tail, store, index and tables bit for bit, the choice up to ties, the output of that choice.

    Across a flush of the tail, with free places that hold NaN.
    """
    options = dict(options)
    monkeypatch.setattr(keys2bit, "LEAST_CANDIDATES", options.pop("least", 8192))
    rows, dim = options.pop("rows", 1), options.pop("dim", 32)
    v_dim, group = options.pop("v_dim", dim), options.pop("group", 2)
    dtype = options.pop("dtype", torch.float32)
    torch.manual_seed(SEED)
    lengths = [271, 206]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    k, v = draw(2, 1, max(lengths), dim), draw(2, 1, max(lengths), v_dim)
    layers = [build(backend, k, v, lengths, **options) for backend in ("reference", "triton")]
    for layer in layers:
        layer.parts.pool.k.fill_(float("nan"))
        layer.parts.pool.v.fill_(float("nan"))
    step = Step(layers, RESOLUTION[dtype])
    for number in range(4):
        query, key = draw(2, 1, group, rows, dim) * 3, draw(2, 1, rows, dim)
        value = draw(2, 1, rows, v_dim)
        valid = torch.ones(2, rows, dtype=torch.bool, device=DEVICE)
        valid[1, 0] = number != 1
        step.run(query, key, value, valid)
    if options.get("fetch_cap") == 0:
        counts = layers[1].parts.counters.read()
        assert counts["later"] == 0 and counts["hits"] + counts["now"] < counts["wanted"]


def test_prompt_pieces_go_through_the_same_store() -> None:
    """Dense calls read back what the copy kernel wrote, sequences of unequal length included."""
    torch.manual_seed(2)
    k, v = (torch.randn(2, 2, 200, 16, device=DEVICE) for _ in range(2))
    layers = [build(name, k, v, [200, 131], block_size=8) for name in ("reference", "triton")]
    key, value = (torch.randn(2, 2, 90, 16, device=DEVICE) for _ in range(2))
    query = torch.randn(2, 4, 90, 16, device=DEVICE)
    outputs = []
    for layer in layers:
        layer.forward = Forward(Kind.PROMPT, layer.columns, key.shape[2])
        inputs = AttentionInputs(query, key, value, None, AttentionSpec(0.25))
        outputs.append(layer.attend(inputs))
    torch.testing.assert_close(*outputs)
    assert_same(*layers)
