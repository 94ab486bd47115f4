"""A model, its cache, and where the rows of a batch stand in it.

After every round the batch is a left-padded batch: the newest tokens of all rows stand in the last
column. A model then sees exactly what it sees of any padded batch, sliding windows included, which
count columns.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..cache import OasisCache
from ..facts import compat
from ..layers import rounds
from ..layers.columns import shift_flags


class Decoder:
    """Feeds tokens to a model and takes rejected ones back, for the target and for a draft.

    Args:
        model: a causal language model.
        cache: an `OasisCache` or a `DynamicCache`.

    Attributes:
        mask: `[B, C]` bool, which columns of the cache hold tokens; also those not committed yet.
        held: `[B]` on the host: generated tokens that the cache holds of each row.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache
        self._cache_name = compat.cache_kwarg(model)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters

    def read(self, ids: Tensor, real: Tensor, piece: int | None = None) -> Tensor:
        """Read a prompt, or what the cache does not hold of it.

        Args:
            ids: `[B, P]`; only new tokens, if `real` is longer than they are.
            real: `[B, C]` bool over everything, False for padding.
            piece: tokens read at once, or None for all.

        Returns:
            `[B, 1, V]` logits behind the last column.
        """
        batch, columns = real.shape
        self.mask, self._base = real, columns
        self.held = torch.zeros(batch, dtype=torch.long, device="cpu")
        past = self.cache.get_seq_length()
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        ids = ids[:, past - columns :]
        for first in range(past, columns, piece or columns):
            end = min(columns, first + (piece or columns))
            if isinstance(self.cache, OasisCache):
                self.cache.expect(prompt=True)
            part = ids[:, first - past : end - past]
            logits = self._forward(part, real[:, :end], positions[:, first:end], 1)
            # From here on drafts may be rejected, and what was read is no part of the first
            # verification. A sliding layer that records its past gives back what it need not hold.
            if isinstance(self.cache, OasisCache):
                self.cache.expect_drafts()
            else:
                self.cache.activate_past_recording()
            self._shift(torch.zeros(batch, dtype=torch.long, device="cpu"))
        self._lengths = real.sum(1)
        self._columns = columns
        return logits

    def feed(self, tokens: Tensor, real: Tensor, keep: int | None = None) -> Tensor:
        """Run the model on tokens that may be taken back.

        Args:
            tokens: `[B, T]`.
            real: `[B, T]` bool; a row's real tokens come first.
            keep: newest columns whose logits are wanted; all by default.

        Returns:
            `[B, keep, V]`.
        """
        new = self.mask.shape[1] - self._columns
        offset = self.mask[:, self._columns :].sum(1) if new else 0
        mask = torch.cat([self.mask, real], 1)
        if isinstance(self.cache, OasisCache):
            # Laid out by this object: what it says of earlier columns need not be checked.
            self.cache.expect(agreed=True)
        first = (self._lengths + offset)[:, None]
        positions = (first + real.long().cumsum(1) - 1).clamp(min=0)
        logits = self._forward(tokens, mask, positions, keep or tokens.shape[1])
        # A forward that breaks off is undone by the cache's own hook.
        self.mask = mask
        return logits

    def _shift(self, by: Tensor) -> None:
        if isinstance(self.cache, OasisCache):
            self.cache.close()
        rounds.shift(self.cache, by)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, keep: int) -> Tensor:
        options: dict[str, Any] = {self._cache_name: self.cache}
        if self._keeps_logits:
            options["logits_to_keep"] = keep
        if self._takes_positions:
            options["position_ids"] = positions
        output = self.model(
            input_ids=ids, attention_mask=mask.long(), use_cache=True, return_dict=True, **options
        )
        return output.logits[:, -keep:]

    def commit(self, offered: Tensor, kept: Tensor) -> None:
        """Keep the first tokens of each row that were fed since the last commit.

        Args:
            offered: `[B]` on the host: real tokens fed.
            kept: `[B]` on the host: how many of them stay.
        """
        rows = self.mask.shape[1] - self._columns
        held = self.held + kept
        columns = self._base + int(held.max())
        by = columns - (self._columns + kept)
        if isinstance(self.cache, OasisCache):
            self.cache.commit(rows, kept, offered, columns)
        else:
            rounds.commit(self.cache, rows, kept, offered, columns)
        self.mask = shift_flags(self.mask, by, columns) if by.any() else self.mask[:, :columns]
        self._lengths = self._lengths + kept.to(self._lengths.device, non_blocking=True)
        self.held, self._columns = held, columns

    def take_back(self) -> None:
        """Forget what was fed since the last commit, by a round that broke off."""
        if self.mask.shape[1] > self._columns:
            offered = self.mask[:, self._columns :].sum(1).cpu()
            self.commit(offered, torch.zeros_like(offered))

    def finish(self) -> None:
        """Lay the cache out as the sequences are: prompt, generated tokens, padding behind."""
        by = self.held - self.held.max()
        if by.any():
            self._shift(by)
            self.mask = shift_flags(self.mask, by, self._columns)
