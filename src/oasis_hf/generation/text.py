"""The text of a batch: every row has its own length, and its own rules for going on and ending."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import logits_process

PREFIX_FREE = frozenset(
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
)
"""Processors that do not look at the tokens before: all rows of a round go through at once."""

GROWTH = 1024
"""Columns by which the room for ids grows."""


class Text:
    """Token ids of a batch, and which rows are still being generated.

    Args:
        prompt: `[B, P]` ids.
        real: `[B, P]` bool, False for padding.
        pad: id behind a row's end.

    Attributes:
        ids: `[B, W]` ids, with room; the last column takes what is not to be written.
        prompt: P.
        starts: `[B]` first real column of each row.
        ends: `[B]` on the host: columns of each row so far.
        active: `[B]` bool on the host: rows that go on.
    """

    def __init__(self, prompt: Tensor, real: Tensor, pad: int) -> None:
        batch, self.prompt = prompt.shape
        self.ids = prompt
        self.starts = real.long().argmax(1)
        self.ends = torch.full((batch,), self.prompt, device="cpu")
        self.active = torch.ones(batch, dtype=torch.bool, device="cpu")
        self._pad = pad

    @property
    def device(self) -> torch.device:
        """Where the ids are."""
        return self.ids.device

    @property
    def generated(self) -> Tensor:
        """`[B]` on the host: tokens behind the prompt."""
        return self.ends - self.prompt

    def on_device(self, numbers: Tensor) -> Tensor:
        """`[B]` numbers of the host, where the ids are."""
        return numbers.to(self.device, non_blocking=True)

    def newest(self) -> Tensor:
        """`[B, 1]` the last token of each row."""
        return self.ids.gather(1, self.on_device(self.ends)[:, None] - 1)

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Add the first `counts` `[B]` (on the host) of tokens `[B, T]` to each row."""
        need = int(self.ends.max()) + tokens.shape[1]
        if need >= self.ids.shape[1]:
            room = self.ids.new_full((self.ids.shape[0], need + GROWTH), self._pad)
            room[:, : int(self.ends.max())] = self.ids[:, : int(self.ends.max())]
            self.ids = room
        number = torch.arange(tokens.shape[1], device=self.device)
        spare = self.ids.shape[1] - 1
        column = self.on_device(self.ends)[:, None] + number
        wanted = number < self.on_device(counts)[:, None]
        self.ids.scatter_(1, torch.where(wanted, column, spare), tokens)
        self.ids[:, spare] = self._pad
        self.ends = self.ends + counts

    def sequences(self) -> Tensor:
        """`[B, L]` ids, padded behind each row's end."""
        return self.ids[:, : int(self.ends.max())]


class Processors:
    """Transformers' logits processors over rows of different lengths.

    Args:
        processors: a `LogitsProcessorList`.
    """

    def __init__(self, processors: Any) -> None:
        self._processors = processors
        self._alike = all(type(processor) in PREFIX_FREE for processor in processors)

    def __call__(self, text: Text, drafts: Tensor, logits: Tensor, first: int = 0) -> Tensor:
        """Processed logits.

        Args:
            text: what stands before.
            drafts: `[B, k]` proposed behind it.
            logits: `[B, T, V]`; column j follows the text and the first `first + j` drafts.
            first: see logits.

        Returns:
            `[B, T, V]` float32.
        """
        active = text.on_device(text.active)
        logits = logits.float().masked_fill(~active[:, None, None], 0.0)
        if not self._processors:
            return logits
        if self._alike:
            flat = logits.flatten(0, 1)
            return self._processors(text.ids.new_zeros(flat.shape[0], 1), flat).view_as(logits)
        out = logits.clone()
        for end in set(text.ends[text.active].tolist()):
            # Some processors know each row by its number, so they get the whole batch every time,
            # cut to one length; only rows of that length take the result.
            rows = text.on_device(((text.ends == end) & text.active).nonzero()[:, 0])
            for column in range(logits.shape[1]):
                prefix = torch.cat([text.ids[:, :end], drafts[:, : first + column]], 1)
                scores = self._processors(prefix, logits[:, column].clone())
                out[rows, column] = scores[rows]
        return out


class Stops:
    """Where each row ends: its length, end-of-sequence tokens, and criteria of any other kind.

    Args:
        criteria: a `StoppingCriteriaList`. Those that are neither a length nor an end-of-sequence
            token are asked about one row and one token at a time.
        limit: columns that no row may exceed.
    """

    def __init__(self, criteria: Any, limit: int) -> None:
        self.limit, self._eos, self._others = limit, [], []
        for criterion in criteria:
            if isinstance(criterion, MaxLengthCriteria):
                self.limit = min(self.limit, criterion.max_length)
            elif isinstance(criterion, EosTokenCriteria):
                self._eos.append(criterion.eos_token_id)
            else:
                self._others.append(criterion)

    def cut(self, text: Text, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """How many new tokens count, before the criteria of other kinds are asked; no waiting.

        Args:
            text: what stands before.
            tokens: `[B, T]` new tokens.
            counts: `[B]` how many of them there are.

        Returns:
            counts `[B]`, and `[B]` bool whether the row ends there.
        """
        ended = torch.zeros_like(tokens, dtype=torch.bool)
        for eos in self._eos:
            ended |= torch.isin(tokens, eos.to(tokens.device))
        number = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        left = text.on_device(self.limit - text.ends)
        ended |= number >= left[:, None]
        first = torch.where(ended, number, tokens.shape[1] + 1).amin(1)
        return torch.minimum(counts, first), first <= counts

    def ask(self, text: Text, tokens: Tensor, counts: Tensor, ended: Tensor) -> None:
        """Let criteria of other kinds end rows earlier: counts and ended `[B]`, changed in place.

        All are on the host, tokens `[B, T]` too.
        """
        if not self._others:
            return
        for row, count in enumerate(counts.tolist()):
            end = int(text.ends[row])
            behind = tokens[row : row + 1].to(text.device)
            for number in range(1, count + 1):
                prefix = torch.cat([text.ids[row : row + 1, :end], behind[:, :number]], 1)
                if any(bool(torch.as_tensor(one(prefix, None)).all()) for one in self._others):
                    counts[row], ended[row] = number, True
                    break
