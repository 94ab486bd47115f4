"""Rows after one context that branch: each sees the context and its own ancestors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Tree:
    """Rows of one forward over a cache that holds a context.

    Attributes:
        context: tokens of the context.
        tokens: id of each row.
        parents: row before it, -1 for the context.
    """

    def __init__(self, context: int) -> None:
        self.context = context
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._positions: list[int] = []

    def add(self, token: int, parent: int) -> int:
        """A row after another one; returns its number."""
        before = self.context - 1 if parent < 0 else self._positions[parent]
        self.tokens.append(token)
        self.parents.append(parent)
        self._positions.append(before + 1)
        return len(self.tokens) - 1

    def extend(self, tokens: list[int], parent: int) -> list[int]:
        """Rows one after the other; returns their numbers."""
        rows = []
        for token in tokens:
            parent = self.add(token, parent)
            rows.append(parent)
        return rows

    @property
    def mask(self) -> Tensor:
        """`[1, 1, X, context + X]` bool, what each of the X rows sees."""
        rows = len(self.tokens)
        seen = torch.eye(rows, dtype=torch.bool)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                seen[row] |= seen[parent]
        return torch.cat([torch.ones(rows, self.context, dtype=torch.bool), seen], 1)[None, None]

    def forward(self, model: Any, cache: Any) -> Any:
        """The model's output for all rows; the cache holds the context alone afterwards."""
        given, position = torch.tensor([self.tokens]), torch.tensor([self._positions])
        result = model(
            input_ids=given.to(model.device),
            position_ids=position.to(model.device),
            attention_mask=self.mask.to(model.device),
            past_key_values=cache,
        )
        for layer in cache.layers:
            # An early exit adds nothing to the layers that it leaves out.
            if layer.get_seq_length() > self.context:
                layer.crop(self.context - layer.get_seq_length())
        return result
