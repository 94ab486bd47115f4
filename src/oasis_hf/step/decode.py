"""The decode step of one layer: the order of its operations, written once for all backends.

Fixed shapes, and no wait for the device: a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..lookahead import Predictor, Rounds
from ..ops import LATER, NOW, WRITTEN, AttentionSpec, Choice, Queries, Scores, kernels
from ..storage.parts import LayerParts


class DecodeStep:
    """Runs the decode steps of one layer over its parts.

    Attributes:
        parts: of the layer.
        kernel: the index's kernels for the backend; None where it works in torch.
        predictor: asked for what is fetched in the background; None: the step's own misses.
        plan: memory of the plan, which a fetch on the side stream may still read.
    """

    def __init__(self, parts: LayerParts) -> None:
        self.parts = parts
        self.ops: Any = kernels(parts.backend)
        self.torch_ops: Any = kernels("reference")
        self.kernel = parts.index.kernel(parts.backend)
        self.predictor = parts.config.predictor
        self._planned, self._epoch = False, 0

    def fit(self) -> None:
        """Build whatever has the shape of the parts anew, if they have changed since."""
        if self._epoch != self.parts.epoch:
            self.plan = self._new_plan(self.parts.wanted)
            self._epoch = self.parts.epoch

    def _new_plan(self, count: int) -> Any:
        parts = self.parts
        return self.ops.new_plan(parts.batch_size * parts.geometry.kv_heads, count, parts.device)

    def append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
        """Move full groups out of the tail, then write new rows into it.

        Args:
            key: `[B, H, T, Dk]`.
            value: `[B, H, T, Dv]`.
            valid: `[B, T]` bool, or None if all rows are real.

        Returns:
            `[B, T]` int64 positions of the rows, -1 for padding: such a row sees nothing.
        """
        parts = self.parts
        parts.join()
        self.fit()
        opened = self.ops.open_step(parts, self.plan, key.shape[2], valid)
        form = self._index_form(opened.moved)
        self.ops.append(parts, opened, key, value, valid, form)
        self._planned = False
        positions: Tensor = opened.positions
        return positions

    def _index_form(self, moved: Tensor) -> str | None:
        """How `append` writes the groups that leave the tail to the index, if not written here."""
        if not self.parts.index.ready:
            return WRITTEN
        if self.kernel is None or not self.kernel.writes:
            return None if self.kernel is None else self.kernel.form
        self.kernel.write(self.ops, self.parts.index, self.parts, moved)
        return WRITTEN

    def attend(self, query: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
        """Choose blocks for query rows, fetch what must be there, attend, fetch the rest.

        Args:
            query: `[B, H, G, T, D]`.
            positions: `[B, T]` of the rows.
            spec: what the attention is.

        Returns:
            `[B, H, G, T, Dv]`.
        """
        parts, ops, cap = self.parts, self.ops, self.parts.cap.blocks
        if self._planned:
            # Layers that share K and V attend in turn; the last fetches are hits of this one.
            parts.join()
        # The last of a layer's rows may be asked for alone.
        queries = Queries(query, positions.contiguous(), spec)
        scores = self.scores(queries)
        if parts.cold:
            slots = parts.residency.slots
            fill = self._new_plan(slots)
            self._plan(scores, fill, Choice(slots, float("-inf"), 0, fill=True))
            ops.fetch(parts, fill, NOW)
            parts.cold = False
        later = cap if self.predictor is None else 0
        self._plan(scores, self.plan, Choice(parts.wanted, parts.now_above, later))
        if parts.now_above < float("inf"):
            ops.fetch(parts, self.plan, NOW)
        out: Tensor = ops.attend(parts, self.plan, queries)
        if cap and self.predictor is not None:
            self._look_ahead(self.predictor, queries, cap)
        if cap:
            # For the next step, during the rest of the model's.
            with parts.beside.run() as used:
                used.extend(ops.fetch(parts, self.plan, LATER))
        return out

    def _look_ahead(self, predictor: Predictor, queries: Queries, cap: int) -> None:
        """Plan the fetches that a predictor asks for; nothing of this step hangs on them."""
        parts = self.parts
        rows = (queries.positions >= 0).sum(1)
        rounds = Rounds(
            rows=rows,
            accepted=(rows - 1).clamp(min=0),
            probes=torch.zeros_like(rows),
            width=queries.positions.shape[1],
            committed=parts.frontier.committed // parts.rules.block,
            match=torch.full_like(rows, -1),
            block=parts.rules.block,
            rank=lambda asked: self._score(
                replace(queries, positions=torch.where(asked, queries.positions, -1))
            ),
            rank_layer=None,
            following=None,
        )
        scores = self.ops.given(predictor.score(rounds), queries.positions)
        choice = Choice(parts.wanted, float("inf"), cap, ahead=True)
        self._plan(scores, self.plan, choice)

    def _plan(self, scores: Scores, plan: Any, choice: Choice) -> None:
        """Plan, at a time of its own."""
        if self._planned:
            self.ops.again(self.parts, plan)
        self.ops.plan(self.parts, scores, plan, choice)
        self._planned = True

    def scores(self, queries: Queries) -> Scores:
        """Scores of the blocks, by the kernels of the index or in torch."""
        parts = self.parts
        if self.kernel is not None and parts.index.ready:
            return self.kernel.scan(self.ops, parts.index, parts, queries, parts.scanned)
        score = self._all_blocks() if parts.covers else self._score(queries)
        given: Scores = self.ops.given(score, queries.positions)
        return given

    def _score(self, queries: Queries) -> Tensor:
        """The index's score `[B, H, N]` of every block, in torch."""
        parts, torch_ops = self.parts, self.torch_ops
        scaled = queries.query.float() * queries.spec.scaling
        mask = torch_ops.tail_mask(parts, queries.positions)
        rest = torch_ops.tail_logsumexp(scaled, parts.tail.k, mask)
        blocks = parts.frontier.committed // parts.rules.block
        return parts.index.score(scaled.flatten(2, 3), blocks, rest)

    def _all_blocks(self) -> Tensor:
        """Score `[B, H, C]` of a step that chooses every block there is."""
        parts = self.parts
        # A graph bakes C in: there it changes rarely, elsewhere it follows the context closely.
        count = parts.scanned if parts.device.type == "cuda" else parts.holds
        number = torch.arange(count, device=parts.device)
        live = number[None] < (parts.frontier.committed // parts.geometry.block)[:, None]
        score = torch.where(live, float("inf"), float("-inf"))
        return score[:, None].expand(-1, parts.geometry.kv_heads, -1)
