"""Where drafts come from: a smaller model, or the text itself."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .acceptance import Drafts
from .decoder import Decoder
from .text import Processors, Text


class Drafter(Protocol):
    """Proposes tokens for all rows of a batch."""

    def propose(self, text: Text, length: int) -> Drafts:
        """Up to `length` tokens behind each row; rows that have ended may get anything."""

    def accept(self, kept: Tensor) -> None:
        """Take note that of the last token and the drafts the first `kept` `[B]` stay (host)."""

    def finish(self, text: Text | None) -> None:
        """The generation is over, or broke off: then there is no text."""


class PromptLookup:
    """Drafts what followed the newest tokens where they stood before.

    Of several places the one with most tokens behind it is taken, the newest of these.

    Args:
        ngram: most tokens that are looked for; fewer where they are not found.
    """

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram

    def propose(self, text: Text, length: int) -> Drafts:
        """As in `Drafter`."""
        ids, ends = text.ids, text.on_device(text.ends)[:, None]
        width = int(text.ends.max())
        # Place c is a match if the n tokens before it are the row's newest; what it offers begins
        # at c.
        place = torch.arange(width, device=ids.device)[None]
        best = torch.zeros_like(ends)
        run = torch.ones(ids.shape[0], width, dtype=torch.bool, device=ids.device)
        for n in range(1, self._ngram + 1):
            newest = ids.gather(1, (ends - n).clamp(min=0))
            before = ids[:, :width].roll(n, 1) == newest
            run = run & before & (place - n >= text.starts[:, None]) & (place < ends)
            worth = (ends - place).clamp(max=length) * width + place
            found, where = torch.where(run, worth, -1).max(1, keepdim=True)
            # A longer match is better than any shorter one.
            best = torch.where(found >= 0, where, best)
        counts = torch.where(best > 0, (ends - best).clamp(max=length), 0)
        number = torch.arange(length, device=ids.device)
        tokens = ids.gather(1, (best + number).clamp(max=ids.shape[1] - 1))
        return Drafts(tokens, counts.squeeze(1))

    def accept(self, kept: Tensor) -> None:
        """Nothing to do: the text is all it knows."""

    def finish(self, text: Text | None) -> None:
        """Nothing to do."""


class ModelDrafter:
    """Drafts with a smaller model, whose cache follows the rows as the target's does.

    Args:
        decoder: the model and its cache; it has read the prompt.
        processors: what the drafts' logits go through, the same as the target's.
        sample: whether to sample the drafts.
    """

    def __init__(self, decoder: Decoder, processors: Processors, sample: bool) -> None:
        self._decoder, self._processors, self._sample = decoder, processors, sample
        self._fed = 0

    def propose(self, text: Text, length: int) -> Drafts:
        """As in `Drafter`."""
        self._catch_up(text, torch.where(text.active, text.generated - 1, 0))
        active = text.on_device(text.active)
        drafts, seen = text.ids.new_zeros(active.shape[0], 0), []
        token = text.newest()
        for number in range(length):
            logits = self._decoder.feed(token, active[:, None])
            scores = self._processors(text, drafts, logits, number)[:, 0]
            if self._sample:
                seen.append(scores.softmax(-1))
                token = torch.multinomial(seen[-1], 1)
            else:
                token = scores.argmax(-1, keepdim=True)
            drafts = torch.cat([drafts, token], 1)
        self._fed, self._offered = length, text.active.long() * length
        probabilities = torch.stack(seen, 1) if seen else None
        return Drafts(drafts, active.long() * length, probabilities)

    def accept(self, kept: Tensor) -> None:
        """As in `Drafter`. The last draft was never fed: a row that keeps it catches up later."""
        if self._fed:
            self._decoder.commit(self._offered, torch.minimum(kept, self._offered))
        self._fed = 0

    def finish(self, text: Text | None) -> None:
        """Read what was generated without drafts, so that the cache can be used again."""
        self._decoder.take_back()
        if text is not None:
            self._catch_up(text, held_in_the_end(text))
        self._decoder.finish()

    def _catch_up(self, text: Text, wanted: Tensor) -> None:
        """Read generated tokens of each row until the cache holds `wanted` `[B]` of them."""
        missing = (wanted - self._decoder.held).clamp(min=0)
        most = int(missing.max())
        if not most:
            return
        number = torch.arange(most, device=text.device)
        column = text.prompt + text.on_device(self._decoder.held)[:, None] + number
        tokens = text.ids.gather(1, column.clamp(max=text.ids.shape[1] - 1))
        self._decoder.feed(tokens, number < text.on_device(missing)[:, None], keep=1)
        self._decoder.commit(missing, missing)


def held_in_the_end(text: Text) -> Tensor:
    """Generated tokens that a cache holds of each row, `[B]`: all columns but the batch's last.

    So does Transformers' own loop, and the next turn is cut off behind them.
    """
    return torch.minimum(text.generated, text.generated.max() - 1)
