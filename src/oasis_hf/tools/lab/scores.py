"""What the index says of every block in every round of a recording, and what is true."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ...geometry import ceil_div
from ...index import Index, OracleIndex, index_class
from ...lookahead import Predictor, Rounds
from ...ops import kernels
from .recording import Recording, Run

OPS = kernels("reference")
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class Layout:
    """How the cache is cut, named as in `OasisConfig`."""

    block_size: int = 16
    sink_tokens: int = 16
    recent_tokens: int = 32
    max_rows: int = 32
    reduction: str = "mean"


@dataclass(frozen=True)
class Scores:
    """Scores of R rounds, L layers, H KV heads and N blocks, independent of any budget.

    Attributes:
        wanted: `[R, L, H, N]` the index's score, sinks first, -inf where not stored.
        true: `[R, L, H, N]` likewise by the true attention.
        mass: `[R, L, H, N]` share of the true attention of each block.
        tail: `[R, L, H]` share of the tail.
        predicted: by predictor, `[R, L, H, N]` scores for the round after each round.
        committed: `[R]` blocks in the store.
        before: blocks in the store after the context alone.
        per_group: blocks that leave the tail together.
        flushes: groups that may leave the tail in one round.
        tokens: `[R]` tokens that each round commits.
        layout: how the cache is cut.
        head_dim: of the keys.
    """

    wanted: Tensor
    true: Tensor
    mass: Tensor
    tail: Tensor
    predicted: dict[str, Tensor]
    committed: Tensor
    before: int
    per_group: int
    flushes: int
    tokens: Tensor
    layout: Layout
    head_dim: int
    _best: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def best(self, count: int) -> tuple[Tensor, Tensor]:
        """`[R, L, H, count]` truly best blocks, and whether each is one."""
        if count not in self._best:
            parts = [OPS.select_blocks(score, count) for score in self.true]
            ids, value = (torch.stack(part) for part in zip(*parts, strict=True))
            self._best[count] = ids, value > float("-inf")
        return self._best[count]


@torch.inference_mode()
def score(
    recording: Recording,
    run: Run,
    index: str,
    predictors: dict[str, Predictor],
    layout: Layout | None = None,
) -> Scores:
    """Score every round of a run by an index, by the truth and by predictors.

    All blocks are candidates of `keys2bit`, as in the cache while the context has no more than
    8,192 tokens.

    Args:
        recording: a recording.
        run: one of its generations.
        index: a name of `oasis_hf.index.INDEXES`.
        predictors: by the name that they get in the result.
        layout: how the cache is cut.

    Raises:
        ValueError: the index encodes less than a block at once, so that none ever leaves the tail.
    """
    layout = layout or Layout()
    group = index_class(index).group_tokens(layout.block_size)
    if group < layout.block_size or group % layout.block_size:
        raise ValueError(
            f"index: got {index!r}, whose groups have {group} tokens, expected whole blocks of "
            f"{layout.block_size}"
        )
    before, committed = _committed(run, group, layout)
    results = []
    for number in range(recording.keys.shape[0]):
        layer = _Layer(recording, run, number, index, committed, layout)
        results.append(layer.results(predictors.values()))
    wanted, true, mass, tail, predicted = zip(*results, strict=True)
    by_name = {
        name: torch.stack([parts[place] for parts in predicted], 1)
        for place, name in enumerate(predictors)
    }
    return Scores(
        wanted=torch.stack(wanted, 1),
        true=torch.stack(true, 1),
        mass=torch.stack(mass, 1),
        tail=torch.stack(tail, 1),
        predicted=by_name,
        committed=committed // layout.block_size,
        before=before // layout.block_size,
        per_group=group // layout.block_size,
        flushes=ceil_div(layout.max_rows, group),
        tokens=run.accepted + 1,
        layout=layout,
        head_dim=recording.keys.shape[-1],
    )


def _committed(run: Run, group: int, layout: Layout) -> tuple[int, Tensor]:
    """Tokens in the store after the context, and `[R]` in each round, as the cache moves them."""
    verifies = bool((run.rows + run.probes > 1).any())
    keep = max(layout.recent_tokens, layout.max_rows) if verifies else layout.recent_tokens
    before = stored = max(0, int(run.start[0]) - keep) // group * group
    found = []
    for start in run.start.tolist():
        for _ in range(ceil_div(layout.max_rows, group)):
            if start - stored >= group + layout.recent_tokens:
                stored += group
        found.append(stored)
    return before, torch.tensor(found)


class _Layer:
    """One layer's rounds: batch dimension B is the round."""

    def __init__(
        self,
        recording: Recording,
        run: Run,
        number: int,
        index: str,
        committed: Tensor,
        layout: Layout,
    ) -> None:
        self.run, self.number, self.layout, self.committed = run, number, layout, committed
        heads = recording.keys.shape[1]
        self.width = run.query.shape[3]
        self.row = torch.arange(self.width)[None]
        fed = (run.rows + run.probes)[:, None]
        self.fed = self.row < fed
        self.position = run.start[:, None] + self.row
        self.query, self.peek = (
            (part[number].unflatten(1, (heads, -1)).float() * recording.scaling)
            for part in (run.query, run.peek)
        )
        self.blocks = int(committed[-1]) // layout.block_size
        self.live = torch.arange(self.blocks)[None] < committed[:, None] // layout.block_size
        keys = self._all_keys(recording.keys[number].float())
        self.logits = {
            name: self._block_logits(self._index(name, keys), self.query, self.fed)
            for name in {index, OracleIndex.name}
        }
        self.index = self._index(index, keys)
        self.rest = self._tail(keys, self.query, self.fed)
        self.keys = keys

    def _all_keys(self, context: Tensor) -> Tensor:
        """Keys `[H, P, D]` of all tokens that are committed in the end, by position."""
        run = self.run
        kept = self.row <= run.accepted[:, None]
        new = run.key[self.number].float().transpose(1, 2)[kept]
        return torch.cat([context[:, : int(run.start[0])], new.transpose(0, 1)], 1)

    def _index(self, name: str, keys: Tensor) -> Index:
        """An index over all full groups that are stored in the end."""
        block, (heads, _, dim) = self.layout.block_size, keys.shape
        # Over a budget of everything, `keys2bit` has nothing but candidates.
        index = index_class(name)(block, self.blocks, self.layout.reduction, OPS)
        group = index.group_tokens(block)
        stored = self.blocks * block
        index.ensure(self.blocks)
        index.allocate(1, heads, keys[None])
        if index.learns:
            index.observe(self.query.permute(1, 2, 0, 3, 4).flatten(2, 3)[None], None)
            index.fit(slice(0, 1), keys[None, :, :stored])
            index.fitted(stored)
        groups = keys[None, :, :stored].reshape(1, heads, stored // group, group, dim)
        index.write_range(slice(0, 1), 0, groups)
        return index

    def _block_logits(self, index: Index, query: Tensor, real: Tensor) -> Tensor:
        """`[B, H, G, T, N]` of rows `[B, H, G, T, D]`; only real ones `[B, T]` are computed."""
        rows = query.permute(0, 3, 1, 2, 4)[real]
        flat = rows.permute(1, 0, 2, 3).flatten(1, 2)[None]
        live = torch.ones(1, 1, self.blocks, dtype=torch.bool)
        parts = [index.block_logits(part, live) for part in flat.split(ROWS_AT_ONCE, 2)]
        found = torch.cat(parts, 2)[0].unflatten(1, rows.shape[:1] + rows.shape[2:3])
        batch, heads, group = query.shape[:3]
        out = found.new_zeros(batch, self.width, heads, group, self.blocks)
        out[real] = found.permute(1, 0, 2, 3)
        return out.permute(0, 2, 3, 1, 4)

    def _tail(self, keys: Tensor, query: Tensor, real: Tensor) -> Tensor:
        """`[B, H, G, T]` log of the attention to the tail, the round's own rows included."""
        run, committed = self.run, self.committed
        longest = int((run.start - committed).max())
        place = committed[:, None] + torch.arange(longest)
        old = place < run.start[:, None]
        held = keys[:, place.clamp(max=keys.shape[1] - 1)].transpose(0, 1)
        seen_old = old[:, None].expand(-1, self.width, -1)
        seen_new = (self.row[:, None] <= self.row[..., None]) & self.fed[:, None]
        tail = torch.cat([held, run.key[self.number].float()], 2)
        logits = query @ tail[:, :, None].transpose(-1, -2)
        seen = torch.cat([seen_old, seen_new.expand(len(place), -1, -1)], -1)
        rest = logits.masked_fill(~seen[:, None, None], float("-inf")).logsumexp(-1)
        return rest.masked_fill(~real[:, None, None], float("-inf"))

    def _reduce(
        self, logits: Tensor, rest: Tensor, rows: Tensor, mass: bool, live: Tensor | None = None
    ) -> Tensor:
        """`[B, H, N]` score of rows `[B, T]` from `[B, H, G, T, N]`, as the index reduces them."""
        heads, group = logits.shape[1:3]
        real = rows[:, None, None].expand(-1, heads, group, -1).flatten(2)
        stored = self.live if live is None else live
        return OPS.reduce_rows(
            logits.flatten(2, 3),
            stored[:, None],
            rest.flatten(2) if mass else None,
            self.layout.reduction,
            real,
        )

    def _sinks_first(self, score: Tensor) -> Tensor:
        number = torch.arange(self.blocks)
        sinks = number < ceil_div(self.layout.sink_tokens, self.layout.block_size)
        return torch.where(sinks & (score > float("-inf")), float("inf"), score)

    def rounds(self, wanted: Tensor) -> Rounds:
        """What predictors see; `wanted` is the score `[B, H, N]` of every round."""
        run, mass = self.run, self.index.estimates_mass
        logits = self.logits[self.index.name]

        def rank_layer() -> Tensor:
            following = self._block_logits(self.index, self.peek, self.fed)
            rest = self._tail(self.keys, self.peek, self.fed)
            rows = self.row < run.rows[:, None]
            # The next round's rows over what is stored now.
            live = torch.cat([self.live[:1], self.live[:-1]])
            return _next(self._reduce(following, rest, rows, mass, live))

        return Rounds(
            rows=run.rows,
            accepted=run.accepted,
            probes=run.probes,
            width=self.width,
            committed=self.committed // self.layout.block_size,
            match=run.match,
            block=self.layout.block_size,
            rank=partial(self._reduce, logits, self.rest, mass=mass),
            rank_layer=rank_layer if self.number else None,
            following=_next(wanted),
        )

    def results(
        self, predictors: Iterable[Predictor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """wanted, true, mass, tail and predicted scores; see `Scores`."""
        rows = self.row < self.run.rows[:, None]
        exact, name = self.logits[OracleIndex.name], self.index.name
        wanted = self._reduce(self.logits[name], self.rest, rows, self.index.estimates_mass)
        true = self._reduce(exact, self.rest, rows, True)
        mass, tail = self._mass(exact, rows)
        seen = self.rounds(wanted)
        predicted = [self._sinks_first(predictor.score(seen)) for predictor in predictors]
        return self._sinks_first(wanted), self._sinks_first(true), mass, tail, predicted

    def _mass(self, exact: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Shares `[B, H, N]` of blocks and `[B, H]` of the tail, means over heads and rows."""
        exact = exact.masked_fill(~self.live[:, None, None, None], float("-inf"))
        total = torch.logaddexp(exact.logsumexp(-1), self.rest)
        weight = rows[:, None, None].expand_as(total)
        count = weight.sum((2, 3))
        tail = torch.where(weight, (self.rest - total).exp(), 0.0).sum((2, 3)) / count
        share = torch.where(weight[..., None], (exact - total[..., None]).exp(), 0.0)
        return share.sum((2, 3)) / count[..., None], tail


def _next(score: Tensor) -> Tensor:
    """Each round's scores at the round before; nothing is asked for after the last."""
    return torch.cat([score[1:], torch.full_like(score[:1], float("-inf"))])
