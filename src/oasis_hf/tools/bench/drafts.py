"""Rounds of drafts on random weights, which agree with no draft: acceptance is set, or scripted.

Either way every round verifies its drafts for real, and waits for what came of it.

- `SetRounds` verifies random drafts, and keeps as many of each row as a draft of the given quality
  would have had accepted. Drafting takes no time.
- `LookupRounds` deems the model to say a scripted text. The drafts are those of the library's own
  prompt lookup in that text, found anew in every round, and accepted where the text goes on as they
  do. What is attended to is not the text: the context holds random keys. So the time of a round and
  the number of its tokens are real for texts that repeat themselves as the script does, and say
  nothing of how much a text of yours does.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ...cache import OasisCache
from ...generation.decoder import Decoder
from ...generation.drafting import PromptLookup
from ...generation.loop import Loop
from ...generation.speculation import Speculation
from ...generation.text import Processors, Stops, Text
from .plan import LOOKUP, WARM_UP, Case

NGRAM = 2
"""Tokens that prompt lookup looks for at most; Transformers' default."""

KINDS, FIELDS, POOL = 12, 3, 4
"""Kinds of records in a scripted text, fields of each, and values that a field usually has."""


class Rounds(ABC):
    """Rounds over a filled cache.

    Attributes:
        case: how many drafts, and how many are accepted.
    """

    case: Case

    @abstractmethod
    def run(self) -> int:
        """One round: draft, verify, wait for what came of it, keep; returns the tokens kept."""

    @abstractmethod
    def start(self) -> None:
        """Forget what was counted."""

    @abstractmethod
    def counts(self) -> tuple[int, int, list[float]]:
        """Drafts verified, drafts accepted, and each sequence's tokens per round."""

    def report(self) -> dict[str, Any]:
        """What came of the drafts since `start`.

        `accepted_share` is of the drafts verified, those behind a refused one included.
        """
        drafted, accepted, tokens = self.counts()
        return {
            "accepted_share": accepted / max(1, drafted),
            "tokens_per_round_range": [min(tokens), max(tokens)],
        }


def draft_rounds(model: LlamaForCausalLM, case: Case, cache: OasisCache) -> Rounds:
    """The rounds of a case over its filled cache."""
    kind = LookupRounds if case.acceptance == LOOKUP else SetRounds
    return kind(model, case, cache)


# ---- acceptance that is set --------------------------------------------------------------------


def kept_tokens(case: Case, generator: torch.Generator) -> Tensor:
    """Tokens that each sequence keeps of one round, `[B]` on the host.

    The newest token, and the drafts before the first that is refused; each is accepted with the
    case's probability.
    """
    draw = torch.rand(case.batch, case.drafts, generator=generator)
    return 1 + (draw < float(case.acceptance)).long().cumprod(1).sum(1)


class SetRounds(Rounds):
    """Random drafts, of which a set share is accepted.

    Args:
        model: whose cache it is.
        case: how many drafts, and how many are accepted.
        cache: holds the case's context.
    """

    def __init__(self, model: LlamaForCausalLM, case: Case, cache: OasisCache) -> None:
        self.case, self.device = case, model.device
        self.words = model.config.vocab_size
        self.decoder = Decoder(model, cache)
        self.generator = torch.Generator().manual_seed(0)
        columns = cache.get_seq_length() + 1
        real = torch.ones(case.batch, columns, dtype=torch.bool, device=self.device)
        self.decoder.read(self._tokens(1), real)
        self.start()

    def _tokens(self, count: int) -> Tensor:
        return torch.randint(1, self.words, (self.case.batch, count), device=self.device)

    def run(self) -> int:
        """As in `Rounds`."""
        tokens = self._tokens(1 + self.case.drafts)
        logits = self.decoder.feed(tokens, torch.ones_like(tokens, dtype=torch.bool))
        # A real round learns here what was accepted.
        logits.argmax(-1).cpu()
        kept = kept_tokens(self.case, self.generator)
        self.decoder.commit(torch.full_like(kept, tokens.shape[1]), kept)
        self._rounds += 1
        self._kept += kept
        return int(kept.sum())

    def start(self) -> None:
        """As in `Rounds`."""
        self._rounds = 0
        self._kept = torch.zeros(self.case.batch, dtype=torch.long)

    def counts(self) -> tuple[int, int, list[float]]:
        """As in `Rounds`."""
        rounds = self._rounds * self.case.batch
        accepted = int(self._kept.sum()) - rounds
        return rounds * self.case.drafts, accepted, (self._kept / max(1, self._rounds)).tolist()


# ---- acceptance that is found ------------------------------------------------------------------


def script(batch: int, tokens: int, words: int, seed: int = 0) -> Tensor:
    """Texts that repeat themselves as records or code do: `[batch, tokens]` ids from 1 on.

    Lines of a few kinds, most often in the same order. Each is a skeleton of fixed tokens around
    fields; a field has one of a few usual values, or a new one. How often a value is new differs by
    row: seldom in the first, mostly in the last.
    """
    rows = []
    for row in range(batch):
        draw = random.Random(f"{seed} {row}")
        rows.append(_records(draw, tokens, words, (row + 0.5) / batch))
    return torch.tensor(rows)


def _records(draw: random.Random, tokens: int, words: int, novelty: float) -> list[int]:
    """One text; `novelty` is how often a field has a value that it never had."""

    def some(least: int, most: int) -> list[int]:
        return [draw.randrange(1, words) for _ in range(draw.randint(least, most))]

    kinds = [
        [(some(2, 6), [some(1, 3) for _ in range(POOL)]) for _ in range(FIELDS)]
        for _ in range(KINDS)
    ]
    text: list[int] = []
    number = 0
    while len(text) < tokens:
        number = draw.randrange(KINDS) if draw.random() < 0.25 else (number + 1) % KINDS
        for skeleton, usual in kinds[number]:
            text += skeleton
            text += some(1, 3) if draw.random() < novelty else draw.choice(usual)
    return text[:tokens]


class _ScriptedDecoder(Decoder):
    """A decoder whose model is deemed to say a script: it runs, and its best tokens are replaced.

    Args:
        model: the model that runs.
        cache: its cache; the script begins with what it holds.
        script: `[B, L]` ids.
    """

    def __init__(self, model: LlamaForCausalLM, cache: OasisCache, script: Tensor) -> None:
        super().__init__(model, cache)
        self._script, self._read = script, cache.get_seq_length() + 1
        real = torch.ones(script.shape[0], self._read, dtype=torch.bool, device=script.device)
        self.read(script[:, self._read - 1 : self._read], real)

    def feed(self, tokens: Tensor, real: Tensor, keep: int | None = None) -> Tensor:
        """As in `Decoder`; what follows a wrong draft has no meaning, and is not kept."""
        logits = super().feed(tokens, real, keep)
        number = torch.arange(1, logits.shape[1] + 1, device=tokens.device)
        place = self._read + self.held.to(tokens.device, non_blocking=True)[:, None] + number
        said = self._script.gather(1, place.clamp(max=self._script.shape[1] - 1))
        return logits.scatter_(2, said[..., None], float("inf"))


class LookupRounds(Rounds):
    """The library's own rounds of prompt lookup, in a scripted text.

    Args:
        model: whose cache it is.
        case: how many drafts.
        cache: holds the case's context.
    """

    def __init__(self, model: LlamaForCausalLM, case: Case, cache: OasisCache) -> None:
        self.case = case
        context = cache.get_seq_length()
        # One token is read, and one is still to be fed, before the first round.
        rounds = WARM_UP + case.steps
        length = context + 2 + (rounds + 1) * (case.drafts + 1)
        self.script = script(case.batch, length, model.config.vocab_size).to(model.device)
        target = _ScriptedDecoder(model, cache, self.script)
        known = self.script[:, : context + 2]
        self.loop = Loop(
            target=target,
            drafter=PromptLookup(NGRAM),
            text=Text(known, torch.ones_like(known, dtype=torch.bool), pad=0),
            processors=Processors([]),
            stops=Stops([], length),
            speculation=Speculation(case.drafts),
            sample=False,
        )
        self.start()

    def run(self) -> int:
        """As in `Rounds`."""
        before = self.loop.text.ends.sum()
        self.loop.round()
        return int(self.loop.text.ends.sum() - before)

    def start(self) -> None:
        """As in `Rounds`."""
        self.loop.speculation.start()
        self._before = self.loop.text.ends

    def counts(self) -> tuple[int, int, list[float]]:
        """As in `Rounds`; a row for which nothing is found has no drafts."""
        report = self.loop.speculation.report()
        tokens = (self.loop.text.ends - self._before) / max(1, report.rounds)
        return report.drafted, report.accepted, tokens.tolist()
