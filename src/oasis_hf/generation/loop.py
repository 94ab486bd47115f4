"""The rounds of a generation: draft, verify, accept, for all rows of a batch at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .acceptance import Drafts, choose
from .decoder import Decoder
from .drafting import Drafter, held_in_the_end
from .speculation import Speculation
from .text import Processors, Stops, Text


@dataclass
class Loop:
    """One generation.

    Attributes:
        target: the model whose tokens these are; it has read the prompt.
        drafter: where drafts come from, or None.
        text: what there is so far.
        processors: what logits go through.
        stops: where rows end.
        speculation: how many tokens to draft.
        sample: whether to sample.
        streamer: what new tokens of a single row are handed to, or None.
        keep: which logits are kept for the output: "scores", "logits", both or none.
    """

    target: Decoder
    drafter: Drafter | None
    text: Text
    processors: Processors
    stops: Stops
    speculation: Speculation
    sample: bool
    streamer: Any = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.kept: dict[str, list[list[Tensor]]] = {
            name: [[] for _ in self.text.ends] for name in self.keep
        }

    def run(self, logits: Tensor) -> None:
        """Generate until every row has ended.

        Args:
            logits: `[B, 1, V]` behind the prompt.
        """
        try:
            self._settle(logits, Drafts.none(self.text.ids))
            while bool(self.text.active.any()):
                self.round()
            self._feed_ends()
        except BaseException:
            # What was read stays usable; the error goes on.
            self.target.take_back()
            self.target.finish()
            if self.drafter is not None:
                self.drafter.finish(None)
            raise
        self.target.finish()
        if self.drafter is not None:
            self.drafter.finish(self.text)
        if self.streamer is not None:
            self.streamer.end()

    def round(self) -> None:
        """Draft, verify, accept: one forward of the model."""
        started = time.perf_counter()
        text, length = self.text, self.speculation.next_length()
        drafts = Drafts.none(text.ids)
        if self.drafter is not None and length:
            drafts = self.drafter.propose(text, length)
        drafted = time.perf_counter()
        active = text.on_device(text.active)
        tokens = torch.cat([text.newest(), drafts.tokens], 1)
        number = torch.arange(tokens.shape[1], device=tokens.device)
        real = active[:, None] & (number <= drafts.counts[:, None])
        sequences = int(text.active.sum())
        logits = self.target.feed(tokens, real)
        offered, new = self._settle(logits, drafts)
        self.target.commit(offered, new)
        if self.drafter is not None:
            self.drafter.accept(new)
        self.speculation.record(
            drafted=(offered - 1).clamp(min=0).tolist(),
            accepted=(new - 1).clamp(min=0).tolist(),
            tokens=int(new.sum()),
            sequences=sequences,
            draft_seconds=drafted - started,
            verify_seconds=time.perf_counter() - drafted,
        )

    def _settle(self, logits: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        """Accept drafts and write the new tokens of every row.

        Args:
            logits: `[B, k + 1, V]`.
            drafts: k proposed tokens.

        Returns:
            `[B]` on the host: tokens fed of each row, and new tokens. Of those fed as many stay as
            are new: the newest is fed in the next round.
        """
        text = self.text
        raw = logits.clone() if "logits" in self.keep else logits
        scores = self.processors(text, drafts.tokens, logits)
        tokens, accepted = choose(scores, drafts, self.sample)
        active = text.on_device(text.active)
        counts, ended = self.stops.cut(text, tokens, torch.where(active, accepted + 1, 0))
        offered = torch.where(active, drafts.counts + 1, 0)
        # The only place of a round where the host waits for the device.
        numbers = torch.stack([offered, counts, ended.long()], 1)
        host = torch.cat([numbers, tokens], 1).cpu()
        offered, counts, ended, new = host[:, 0], host[:, 1], host[:, 2] > 0, host[:, 3:]
        self.stops.ask(text, new, counts, ended)
        self._keep({"scores": scores, "logits": raw}, counts)
        text.append(tokens, counts)
        text.active &= ~ended
        if self.streamer is not None:
            self.streamer.put(new[0, : int(counts[0])])
        return offered, counts

    def _keep(self, rounds: dict[str, Tensor], counts: Tensor) -> None:
        for name, rows in self.kept.items():
            for row, count in enumerate(counts.tolist()):
                rows[row].extend(rounds[name][row, :count].clone())

    def _feed_ends(self) -> None:
        """Feed the last token of rows that ended before others: the next turn is cut behind it."""
        missing = held_in_the_end(self.text) - self.target.held
        if missing.any():
            real = self.text.on_device(missing > 0)[:, None]
            self.target.feed(self.text.newest(), real)
            self.target.commit(missing, missing)

    def steps(self, name: str) -> tuple[Tensor, ...] | None:
        """Kept logits, `[B, V]` of each generated token; zeros behind a row's end."""
        rows = self.kept.get(name)
        if rows is None:
            return None
        longest = max(len(row) for row in rows)
        blank = next(step for row in rows for step in row).new_zeros(())
        width = next(step for row in rows for step in row).shape
        return tuple(
            torch.stack([row[n] if n < len(row) else blank.expand(width) for row in rows])
            for n in range(longest)
        )
